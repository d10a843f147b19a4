"""Load the frozen base, put the adapters on, and prove that every group the recipe names is there.

Always the text class, loaded here and handed over: a trainer given a path takes the vision class in float32, whose adapter keys differ,
and loading one's adapter into the other gives a warning and exactly the base model.

The recipe says what the adapters are; a stored adapter only gives their numbers, and only if it holds exactly these tensors.
"""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from training import experts, parts
from training.contract.families import FAMILIES, Family
from training.contract.recipe import Adapters, Recipe
from training.errors import LivenessError, ModelError, NoCardError, Stage
from training.experts import ADAPTER
from training.sharded.ranks import current

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Our own forward asks no registry. This is transformers' own default, so that no reload can lose it.
EXPERTS_IMPLEMENTATION = "grouped_mm"
_ORIENTATION_SINCE = Version("0.19.1")  # before, PEFT read [E, out, in] as [E, in, out], and A and B changed places


def load_tokenizer(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path)


def load_base(path: Path, recipe: Recipe) -> Any:
    """The frozen base model on the recipe's device, in the recipe's dtype. LivenessError if it is of another family or class."""
    family = FAMILIES[recipe.model.family]
    try:
        seen = AutoConfig.from_pretrained(path).get_text_config().model_type
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name}/config.json: not a model's that transformers knows: {error}") from None
    if seen != family.model_type:
        raise LivenessError(
            f"config.json says {seen}, the recipe's family {recipe.model.family} is {family.model_type}; correct model.family or model.source",
            stage="load",
        )
    device = device_of(recipe)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NoCardError(
            f"box.device: seen no card that torch {torch.__version__} can use, the recipe wants cuda; train where one is, or write device: cpu with tier: rehearsal"
        )
    if recipe.model.quantisation == "nf4":
        from training.sharded.start import load_quantised  # it needs the Triton kernels on a card

        return load_quantised(path, recipe, ranks=current(), device=device)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, recipe.model.dtype),
            attn_implementation="sdpa",
            experts_implementation=EXPERTS_IMPLEMENTATION,
            device_map={"": str(device)},
        )
    except SafetensorError as error:
        raise ModelError(f"{path.name}: a weights file is torn ({error}); fetch the model again") from None
    if type(model).__name__ != family.text_class:
        raise LivenessError(
            f"{path.name}: loads as {type(model).__name__}; want the text class {family.text_class}", stage="load"
        )
    return model.requires_grad_(False)


def device_of(recipe: Recipe) -> torch.device:
    """The card of this process, or the CPU."""
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if recipe.box.device == "cuda" else "cpu")


def release() -> None:
    """Give back the memory of models that nobody holds any more: each is a ring (its experts' forwards hold their wrappers), so without this
    the next one is loaded beside it, and two do not fit on a card. Call it when the frame that held the model is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def attach(base: Any, recipe: Recipe, start: Path | None, layer: experts.Layer | None = None) -> Any:
    """The base with trainable adapters: those of `start`, or fresh ones from the recipe's seed. LivenessError if any is not as wanted."""
    torch.manual_seed(recipe.seed)
    model = get_peft_model(base, lora_config(recipe.adapters, recipe.model.family))
    quantised = hasattr(base, "livery_held")
    if quantised:
        from training.sharded import start as on_packed

        on_packed.begin_adapters(model, recipe)
    if start is not None:
        load_adapter(model, start, recipe)
    if quantised:
        on_packed.install(model, recipe, layer)
    else:
        experts.install(model, layer)
        _install_lean(model)
    require_groups(model, recipe)
    return model


def _install_lean(model: Any) -> None:
    """`livery_lean` says what was found; see `training.lean.Installed`."""
    if find_spec("triton") is None:  # there is none for macOS, where nothing but a rehearsal runs
        return
    from training import lean

    model.livery_lean = lean.install(model)


def lora_config(adapters: Adapters, family: str) -> LoraConfig:
    """Explicit leaf names and parameters: shorthands miss the routed experts, or take the router along."""
    known = FAMILIES[family]
    leaves = [
        leaf for group in adapters.groups for leaf in known.leaves(group, gate_projections=adapters.gate_projections)
    ]
    return LoraConfig(
        r=adapters.rank,
        # Serving engines read a whole number here.
        lora_alpha=int(adapters.alpha) if float(adapters.alpha).is_integer() else adapters.alpha,
        lora_dropout=0.0,  # PEFT cannot apply dropout to a fused expert
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=leaves or None,
        target_parameters=list(known.routed) if "routed_experts" in adapters.groups else None,
    )


def load_adapter(model: Any, directory: Path, recipe: Recipe) -> None:
    """Copy a stored adapter's numbers into the model's. LivenessError at stage `load` if it holds other tensors, another layout or other settings:
    PEFT itself only warns about missing and unknown keys, and then trains from zeros."""
    require_same_settings(directory, recipe, "load")
    wanted = {f"{name}.weight": (group, tensor) for group, name, tensor in all_lora_tensors(model)}
    with safe_open(directory / WEIGHTS, "pt") as file, torch.no_grad():
        keys = set(file.keys())
        require_same_keys(wanted, {key: tuple(file.get_slice(key).get_shape()) for key in keys}, "load")
        for key in sorted(wanted.keys() & keys):
            stored = parts.mine(wanted[key][1], file.get_tensor(key))
            if stored.shape == wanted[key][1].shape:
                wanted[key][1].copy_(stored)


def require_same_settings(directory: Path, recipe: Recipe, stage: Stage) -> None:
    """LivenessError if a stored adapter_config.json is of another layout, or does not say what the recipe wants."""
    path = directory / CONFIG
    told = json.loads(path.read_text())
    wanted = lora_config(recipe.adapters, recipe.model.family)
    _require_known_storage(told, stage)
    for field in ("r", "lora_alpha"):
        if told.get(field) != getattr(wanted, field):
            raise LivenessError(
                f"{CONFIG}: {field} is {told.get(field)}, the recipe wants {getattr(wanted, field)}", stage=stage
            )
    for field in ("target_modules", "target_parameters"):
        seen, want = set(told.get(field) or ()), set(getattr(wanted, field) or ())
        if seen != want:
            raise LivenessError(
                f"{CONFIG}: {field} lacks {_few(want - seen)} and has {_few(seen - want)} too many; the groups differ from the recipe's",
                stage=stage,
                group="routed_experts.gate_up_proj" if field == "target_parameters" else None,
            )
    for field in ("rank_pattern", "alpha_pattern", "modules_to_save", "use_rslora", "use_dora"):
        if told.get(field):
            raise LivenessError(
                f"{CONFIG}: {field} is {told[field]}; want none: one rank and alpha for all", stage=stage
            )


def require_same_keys(wanted: dict[str, tuple[str, Tensor]], stored: dict[str, tuple[int, ...]], stage: Stage) -> None:
    """LivenessError if the stored names or shapes are not exactly the wanted ones; says which kind of wrong it is where that can be told."""
    missing, unknown = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
    if missing or unknown:
        group = wanted[missing[0]][0] if missing else None
        raise LivenessError(
            f"{WEIGHTS}: {len(missing)} keys missing and {len(unknown)} unknown, such as {(missing or unknown)[0]}",
            stage=stage,
            group=group,
            tensor=(missing or unknown)[0],
            cause=_why_keys_differ(missing, unknown),
        )
    for key, (group, tensor) in wanted.items():
        if stored[key] != parts.whole_shape(tensor):
            raise LivenessError(
                f"{WEIGHTS}: {key} has shape {list(stored[key])}, want {list(parts.whole_shape(tensor))}",
                stage=stage,
                group=group,
                tensor=key,
                cause="A and B of fused experts have changed places (peft before 0.19.1), or another rank or model",
            )


def lora_tensors(model: nn.Module, which: str, adapter: str = ADAPTER) -> Iterator[tuple[str, str, nn.Parameter]]:
    """(group, name, tensor) of every `lora_A` or `lora_B`. Routed experts are two groups, one a parameter: a fault may take only one of them,
    and the nested names do not tell which is which."""
    family = family_of(model)
    for name, module in model.named_modules():
        part = getattr(module, which, None)
        if isinstance(part, nn.ModuleDict) and adapter in part:
            yield _group(family, name, module), f"{name}.{which}", part[adapter].weight


def all_lora_tensors(model: nn.Module, adapter: str = ADAPTER) -> Iterator[tuple[str, str, nn.Parameter]]:
    """(group, name, tensor) of every lora_A, then of every lora_B."""
    for which in ("lora_A", "lora_B"):
        yield from lora_tensors(model, which, adapter)


def family_of(model: Any) -> Family:
    """The family by the model's own configuration; LivenessError if it is none that we know."""
    seen = model.config.get_text_config().model_type
    for family in FAMILIES.values():
        if family.model_type == seen:
            return family
    raise LivenessError(f"model type {seen} is in no family; known are {', '.join(FAMILIES)}", stage="load")


def expected_counts(config: Any, recipe: Recipe) -> dict[str, int]:
    """How many lora_B tensors each group must have, from the model's configuration."""
    family, text = FAMILIES[recipe.model.family], config.get_text_config()
    layers = text.num_hidden_layers
    kinds = Counter(getattr(text, "layer_types", None) or ())
    dense = set(getattr(text, "mlp_only_layers", None) or ())
    sparse_step = getattr(text, "decoder_sparse_step", None) or 1
    sparse = sum(layer not in dense and (layer + 1) % sparse_step == 0 for layer in range(layers))
    counts = {}
    for group in recipe.adapters.groups:
        if group == "routed_experts":
            counts |= dict.fromkeys(family.routed_groups(), sparse)
        else:
            layer_type = family.linears[group].layer_type
            leaves = family.leaves(group, gate_projections=recipe.adapters.gate_projections)
            counts[group] = len(leaves) * (layers if layer_type is None else kinds[layer_type])
    return counts


def require_groups(model: Any, recipe: Recipe, stage: Stage = "attach") -> dict[str, int]:
    """Counts per group if they are exactly the expected ones and every tensor is of the wanted rank, alpha and type; else LivenessError names group
    and tensor. Looks at shapes alone, so it holds for a model on the meta device, too."""
    tensors = list(lora_tensors(model, "lora_B"))
    seen, wanted = Counter(group for group, _, _ in tensors), expected_counts(model.config, recipe)
    for group in sorted(wanted.keys() | seen.keys()):
        if seen[group] != wanted.get(group, 0):
            raise LivenessError(
                f"group {group}: {seen[group]} lora_B tensors, want {wanted.get(group, 0)}; the targets do not match this model",
                stage=stage,
                group=group,
            )
    scaling = recipe.adapters.alpha / recipe.adapters.rank
    for name, module in model.named_modules():
        if isinstance(getattr(module, "lora_B", None), nn.ModuleDict) and ADAPTER in module.lora_B:
            problem = _problem(module, recipe.adapters.rank, scaling)
            if problem:
                group = _group(family_of(model), name, module)
                raise LivenessError(f"{name}: {problem}", stage=stage, group=group, tensor=f"{name}.lora_B")
    return dict(seen)


def _problem(module: Any, rank: int, scaling: float) -> str:
    a, b = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
    experts_count = getattr(module, "num_experts", 1)
    if module.r.get(ADAPTER) != rank or a.shape[0] != rank * experts_count or b.shape[1] != rank * experts_count:
        return (
            f"rank {module.r.get(ADAPTER)} with A {list(a.shape)} and B {list(b.shape)}; the recipe wants rank {rank}"
        )
    if abs(module.scaling[ADAPTER] - scaling) > 1e-9 * scaling:
        return f"is scaled by {module.scaling[ADAPTER]:g}; the recipe's alpha / rank is {scaling:g}"
    if (a.dtype, b.dtype) != (torch.float32, torch.float32):
        return f"A is {a.dtype} and B is {b.dtype}; want float32: in bfloat16 a small update is rounded away"
    if hasattr(module, "parameter_name"):
        weight = module.get_param()
        if not module._did_swap_in_out_features or a.shape[1] != weight.shape[-1] or b.shape[0] != weight.shape[-2]:
            return f"A {list(a.shape)} and B {list(b.shape)} are not oriented for experts [E, out, in] {list(weight.shape)}"
    if not (a.requires_grad and b.requires_grad):
        return "is frozen; want it trainable"
    return ""


def _group(family: Family, name: str, module: Any) -> str:
    if hasattr(module, "parameter_name"):
        return f"routed_experts.{module.parameter_name}"
    return family.group_of(name) or f"other:{name.rsplit('.', 1)[-1]}"


def _require_known_storage(told: dict[str, Any], stage: Stage) -> None:
    """Fused experts have been stored in three ways under the same names; only one is PEFT's of today."""
    if not told.get("target_parameters"):
        return
    version = str(told.get("peft_version") or "unknown")
    known = version != "unknown" and Version(version.split("@")[0]) >= _ORIENTATION_SINCE
    group = "routed_experts.gate_up_proj"
    if not known:
        raise LivenessError(
            f"{CONFIG}: peft_version is {version}; A and B of fused experts changed places in {_ORIENTATION_SINCE}; convert the adapter first",
            stage=stage,
            group=group,
            cause="an older peft",
        )
    layout = told.get("lora_B_layout")
    if ((told.get("auto_mapping") or {}).get("unsloth_fixed") and not layout) or "group" in str(layout):
        raise LivenessError(
            f"{CONFIG}: lora_B of the experts is grouped by expert (lora_B_layout {layout}), PEFT's is not; convert the adapter first",
            stage=stage,
            group=group,
            cause="unsloth before 2026.9.6 wrote it",
        )


def _why_keys_differ(missing: list[str], unknown: list[str]) -> str:
    prefix = ".language_model."
    if any(prefix in key for key in unknown) and not any(prefix in key for key in missing):
        return "it was made on the vision class, whose names have language_model in them; this is the text class"
    if any(prefix in key for key in missing) and not any(prefix in key for key in unknown):
        return "it was made on the text class; this is the vision class"
    if any(".experts.0." in key for key in unknown):
        return "its experts are stored one by one, as for serving; want PEFT's fused form"
    return "it was made for other groups or another model"


def _few(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def stored_adapter(model: Any, directory: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(group, tensor now, tensor in the directory) of every LoRA tensor, whole; the stored ones are read one at a time. Collective."""
    with safe_open(directory / WEIGHTS, "pt") as file:
        for group, name, tensor in all_lora_tensors(model):
            yield group, parts.whole(tensor), file.get_tensor(f"{name}.weight")
