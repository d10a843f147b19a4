"""Load the frozen base, put the adapters on, and prove that every group the recipe names is there.

Always the text class, loaded here and handed over: a trainer given a path takes the vision class in float32, whose adapter keys differ,
and loading one's adapter into the other gives a warning and exactly the base model.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from training import experts
from training.contract.recipe import Adapters, Recipe

ADAPTER = "default"  # TRL looks for this name
_LEAVES = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "linear_attention": ("in_proj_qkv", "in_proj_z", "out_proj"),
    "shared_expert": ("gate_proj", "up_proj", "down_proj"),
}
_GATE_LEAVES = ("in_proj_a", "in_proj_b")
_ROUTED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_PLACES = (("shared_expert", ".shared_expert."), ("linear_attention", ".linear_attn."), ("attention", ".self_attn."))


class ModelError(RuntimeError):
    """The model or adapter is not what the recipe wants; `group` names the LoRA group if it is one."""

    def __init__(self, message: str, group: str | None = None) -> None:
        super().__init__(message)
        self.group = group


def load_tokenizer(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path)


def load_base(path: Path, recipe: Recipe) -> Any:
    """The frozen base model on the recipe's device, in the recipe's dtype."""
    device = "cuda:0" if recipe.box.device == "cuda" else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, recipe.model.dtype), attn_implementation="sdpa", device_map={"": device}
    )
    if not type(model).__name__.endswith("ForCausalLM"):
        raise ModelError(f"{path.name}: loads as {type(model).__name__}; want the text class (…ForCausalLM)")
    return model.requires_grad_(False)


def release() -> None:
    """Give back the memory of models that nobody holds any more: each is a ring (its experts' forwards hold their wrappers), so without this
    the next one is loaded beside it, and two do not fit on a card. Call it when the frame that held the model is gone."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def attach(base: Any, recipe: Recipe, start: Path | None) -> Any:
    """The base with trainable adapters: those of `start`, or fresh ones from the recipe's seed. ModelError if any group is not as wanted."""
    if start is None:
        torch.manual_seed(recipe.seed)
        model = get_peft_model(base, lora_config(recipe.adapters, recipe.model.family))
    else:
        model = PeftModel.from_pretrained(base, str(start), is_trainable=True)
        _require_same_keys(model, start)
    experts.install(model)
    require_groups(model, recipe)
    return model


def lora_config(adapters: Adapters, family: str) -> LoraConfig:
    """Explicit leaf names and parameters: shorthands miss the routed experts, or take the router along."""
    leaves = [leaf for group in adapters.groups for leaf in _LEAVES.get(group, ())]
    if adapters.gate_projections and "linear_attention" in adapters.groups:
        leaves += _GATE_LEAVES
    return LoraConfig(
        r=adapters.rank,
        # Serving engines read a whole number here.
        lora_alpha=int(adapters.alpha) if float(adapters.alpha).is_integer() else adapters.alpha,
        lora_dropout=0.0,  # PEFT cannot apply dropout to a fused expert
        bias="none",
        task_type="CAUSAL_LM",
        target_modules=leaves or None,
        target_parameters=list(_ROUTED) if "routed_experts" in adapters.groups else None,
    )


def lora_tensors(model: nn.Module, which: str, adapter: str = ADAPTER) -> Iterator[tuple[str, str, nn.Parameter]]:
    """(group, name, tensor) of every `lora_A` or `lora_B`. Routed experts are two groups, one a parameter: a fault may take only one of them,
    and the nested names do not tell which is which."""
    for name, module in model.named_modules():
        part = getattr(module, which, None)
        if isinstance(part, nn.ModuleDict) and adapter in part:
            yield _group(name, module), f"{name}.{which}", part[adapter].weight


def expected_counts(config: Any, recipe: Recipe) -> dict[str, int]:
    """How many lora_B tensors each group must have, from the model's configuration."""
    text = config.get_text_config()
    layers = text.num_hidden_layers
    kinds = Counter(getattr(text, "layer_types", None) or ["full_attention"] * layers)
    linear = len(_LEAVES["linear_attention"]) + (len(_GATE_LEAVES) if recipe.adapters.gate_projections else 0)
    counts = {
        "attention": {"attention": len(_LEAVES["attention"]) * kinds["full_attention"]},
        "linear_attention": {"linear_attention": linear * kinds["linear_attention"]},
        "shared_expert": {"shared_expert": len(_LEAVES["shared_expert"]) * layers},
        "routed_experts": {"routed_experts.gate_up_proj": layers, "routed_experts.down_proj": layers},
    }
    return {name: count for group in recipe.adapters.groups for name, count in counts[group].items()}


def require_groups(model: Any, recipe: Recipe) -> dict[str, int]:
    """Counts per group if they are exactly the expected ones, of the wanted rank and trainable; else ModelError names the group."""
    tensors = list(lora_tensors(model, "lora_B"))
    seen, wanted = Counter(group for group, _, _ in tensors), expected_counts(model.config, recipe)
    for group in sorted(wanted.keys() | seen.keys()):
        if seen[group] != wanted.get(group, 0):
            raise ModelError(
                f"group {group}: {seen[group]} lora_B tensors, want {wanted.get(group, 0)}; the targets do not match this model",
                group,
            )
    for group, name, tensor in tensors:
        if not tensor.requires_grad:
            raise ModelError(f"{name}: is frozen; load the adapter with is_trainable=True", group)
    for module in model.modules():
        rank = getattr(module, "r", {}).get(ADAPTER) if isinstance(getattr(module, "r", None), dict) else None
        if rank is not None and rank != recipe.adapters.rank:
            raise ModelError(f"an adapter of rank {rank} was found, the recipe wants {recipe.adapters.rank}")
    return dict(seen)


def _group(name: str, module: Any) -> str:
    if hasattr(module, "parameter_name"):
        return f"routed_experts.{module.parameter_name}"
    return next((group for group, place in _PLACES if place in f"{name}."), f"other:{name.rsplit('.', 1)[-1]}")


def _require_same_keys(model: Any, start: Path) -> None:
    """PEFT only warns about a missing or unknown key, and then trains from zeros."""
    with safe_open(start / "adapter_model.safetensors", "pt") as file:
        stored = set(file.keys())
    wanted = set(get_peft_model_state_dict(model))
    if stored != wanted:
        odd = sorted(stored ^ wanted)
        raise ModelError(
            f"{start.name}/adapter_model.safetensors: {len(wanted - stored)} keys missing and {len(stored - wanted)} unknown,"
            f" such as {odd[0]}; it was made for another model class or other groups"
        )


def stored_adapter(model: Any, directory: Path) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(group, tensor now, tensor in the directory) of every LoRA tensor; the stored ones are read one at a time."""
    with safe_open(directory / "adapter_model.safetensors", "pt") as file:
        for which in ("lora_A", "lora_B"):
            for group, name, tensor in lora_tensors(model, which):
                yield group, tensor, file.get_tensor(f"{name}.weight")
