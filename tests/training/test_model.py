"""What is loaded and attached is what the recipe says, in number, size and orientation; everything else is refused by name."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.training.conftest import recipe_of
from training.contract.families import FAMILIES
from training.contract.recipe import Adapters, Recipe
from training.errors import LivenessError, ModelError, NoCardError
from training.model import all_lora_tensors, attach, load_base, lora_config, lora_tensors, require_groups

RECIPE = recipe_of("tiny-moe")
GATE_UP, DOWN = "routed_experts.gate_up_proj", "routed_experts.down_proj"


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> Any:
    return load_base(tiny / "model", RECIPE)


@pytest.fixture
def base(loaded: Any) -> Any:
    return copy.deepcopy(loaded)


@pytest.fixture(scope="module")
def stored(loaded: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter after some training."""
    model = attach(copy.deepcopy(loaded), RECIPE, None)
    with torch.no_grad():
        for seed, (_, _, tensor) in enumerate(lora_tensors(model, "lora_B")):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    directory = tmp_path_factory.mktemp("stored")
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def adapter(stored: Path, tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    for path in stored.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_a_stored_adapter_is_loaded_bit_for_bit_and_trainable(base: Any, stored: Path) -> None:
    model = attach(base, RECIPE, stored)
    file = load_file(stored / "adapter_model.safetensors")
    tensors = {f"{name}.weight": tensor for _, name, tensor in all_lora_tensors(model)}
    assert tensors.keys() == file.keys()
    assert all(tensor.requires_grad and torch.equal(tensor, file[name]) for name, tensor in tensors.items())


def edit(adapter: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = adapter / "adapter_config.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))


def rename(adapter: Path, change: Callable[[str], str | None]) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file({new: tensor for key, tensor in load_file(path).items() if (new := change(key)) is not None}, path)


def add(adapter: Path, key: str) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file(load_file(path) | {key: torch.zeros(16, 64)}, path)


def swap_a_and_b(adapter: Path) -> None:
    """As peft 0.18 stored them: the experts' weights read as [E, in, out]."""
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    for key in [key for key in tensors if ".mlp.experts." in key and "lora_A" in key]:
        other = key.replace("lora_A", "lora_B")
        tensors[key], tensors[other] = tensors[other].T.contiguous(), tensors[key].T.contiguous()
    save_file(tensors, path)


WRONG: dict[str, tuple[Callable[[Path], Any], str, str | None, str]] = {
    "text and vision class": (
        lambda a: rename(a, lambda key: key.replace("model.layers", "model.language_model.layers")),
        "keys missing",
        None,
        "made on the vision class",
    ),
    "routed keys missing": (
        lambda a: rename(a, lambda key: None if ".mlp.experts." in key else key),
        "16 keys missing and 0 unknown",
        GATE_UP,
        "made for other groups",
    ),
    "unknown key": (
        lambda a: add(a, "base_model.model.model.layers.0.mlp.gate.lora_A.weight"),
        "0 keys missing and 1 unknown, such as base_model.model.model.layers.0.mlp.gate.lora_A.weight",
        None,
        "other groups or another model",
    ),
    "experts one by one": (
        lambda a: rename(a, lambda key: key.replace(".mlp.experts.lora", ".mlp.experts.0.down_proj.lora")),
        "keys missing",
        DOWN,
        "stored one by one",
    ),
    "peft before 0.19.1": (
        lambda a: edit(a, lambda told: told.update(peft_version="0.18.2")),
        "peft_version is 0.18.2",
        GATE_UP,
        "older peft",
    ),
    "no peft version": (
        lambda a: edit(a, lambda told: told.pop("peft_version")),
        "peft_version is unknown",
        GATE_UP,
        "older peft",
    ),
    "A and B in each other's place": (swap_a_and_b, "has shape", DOWN, "have changed places"),
    "lora_B grouped by expert": (
        lambda a: edit(a, lambda told: told.update(auto_mapping={"unsloth_fixed": True})),
        "grouped by expert",
        GATE_UP,
        "unsloth",
    ),
    "lora_B grouped by expert, and says so": (
        lambda a: edit(a, lambda told: told.update(lora_B_layout="grouped_by_expert")),
        "grouped by expert",
        GATE_UP,
        "unsloth",
    ),
    "another rank": (lambda a: edit(a, lambda told: told.update(r=32)), "r is 32, the recipe wants 16", None, ""),
    "another alpha": (lambda a: edit(a, lambda told: told.update(lora_alpha=16)), "lora_alpha is 16", None, ""),
    "a rank of its own": (
        lambda a: edit(a, lambda told: told.update(rank_pattern={"gate_up_proj": 32})),
        "rank_pattern",
        None,
        "",
    ),
    "one expert parameter only": (
        lambda a: edit(a, lambda told: told.update(target_parameters=["mlp.experts.down_proj"])),
        "lacks mlp.experts.gate_up_proj",
        GATE_UP,
        "",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_peft_would_load_with_a_warning_is_refused_by_name(base: Any, adapter: Path, case: str) -> None:
    damage, reason, group, cause = WRONG[case]
    damage(adapter)
    with pytest.raises(LivenessError) as caught:
        attach(base, RECIPE, adapter)
    assert caught.value.stage == "load"
    assert reason in str(caught.value)
    assert cause in (caught.value.cause or "")
    assert group is None or caught.value.group == group


def test_a_model_of_another_family_is_refused_before_it_is_loaded(tiny: Path) -> None:
    other = recipe_of(
        "tiny-moe",
        model=RECIPE.model.model_dump(mode="json") | {"family": "qwen3_moe"},
        adapters={"groups": ["attention", "routed_experts"]},
    )
    with pytest.raises(LivenessError, match=r"config.json says qwen3_5_moe_text.*qwen3_moe") as caught:
        load_base(tiny / "model", other)
    assert caught.value.stage == "load"


def test_a_model_whose_files_are_torn_is_named_and_no_other_box_is_tried(tiny: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny / "model", model)
    (model / "model.safetensors").write_bytes((tiny / "model" / "model.safetensors").read_bytes()[:100_000])
    with pytest.raises(ModelError, match="model: a weights file is torn"):
        load_base(model, RECIPE)
    (model / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model/config\.json: not a model's"):
        load_base(model, RECIPE)


def on_meta(recipe: Recipe, **numbers: Any) -> Any:
    """The real model's shape with adapters, without a byte of it."""
    with torch.device("meta"):
        config = AutoConfig.for_model(FAMILIES[recipe.model.family].model_type, **numbers)
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return get_peft_model(base, lora_config(recipe.adapters, recipe.model.family))


QWEN36 = {"num_hidden_layers": 40, "num_experts": 256, "moe_intermediate_size": 512, "hidden_size": 2048}
QWEN235 = {
    "num_hidden_layers": 94,
    "num_experts": 128,
    "moe_intermediate_size": 1536,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "head_dim": 128,
}


@pytest.mark.parametrize(("gates", "linear", "total"), [(False, 90, 330), (True, 150, 390)])
def test_qwen36_has_80_routed_of_330_targets_and_of_390_with_the_gates(gates: bool, linear: int, total: int) -> None:
    recipe = recipe_of("qwen3.6-35b-a3b", adapters={"gate_projections": gates})
    model = on_meta(recipe, **QWEN36)
    counts = require_groups(model, recipe)
    assert counts == {"attention": 40, "linear_attention": linear, "shared_expert": 120, GATE_UP: 40, DOWN: 40}
    assert sum(counts.values()) == total
    routed = sum(tensor.numel() for group, _, tensor in all_lora_tensors(model) if group in (GATE_UP, DOWN))
    assert routed == 1_845_493_760, "as published for rank 32"


def test_qwen3_235b_has_188_routed_and_376_attention_targets() -> None:
    recipe = recipe_of("qwen3-235b-a22b-qlora")
    assert require_groups(on_meta(recipe, **QWEN235), recipe) == {"attention": 376, GATE_UP: 94, DOWN: 94}


def test_the_groups_come_from_the_recipe_not_from_what_is_there(base: Any) -> None:
    fewer = Adapters(rank=16, alpha=32, groups=("attention", "linear_attention", "shared_expert"))
    model = get_peft_model(base, lora_config(fewer, RECIPE.model.family))
    with pytest.raises(LivenessError, match=r"routed_experts.*0 lora_B tensors, want 4") as caught:
        require_groups(model, RECIPE)
    assert caught.value.stage == "attach" and caught.value.group in (GATE_UP, DOWN)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda module: module.r.update(default=32), "the recipe wants rank 16"),
        (lambda module: module.scaling.update(default=4.0), "is scaled by 4; the recipe's alpha / rank is 2"),
        (lambda module: module.lora_B.to(torch.bfloat16), "B is torch.bfloat16; want float32"),
        (lambda module: setattr(module, "_did_swap_in_out_features", False), "not oriented for experts"),
        (lambda module: module.lora_B["default"].requires_grad_(False), "is frozen"),
    ],
    ids=["rank", "alpha", "dtype", "orientation", "frozen"],
)
def test_one_tensor_that_differs_from_the_recipe_is_named(base: Any, wrong: Any, reason: str) -> None:
    model = attach(base, RECIPE, None)
    name, module = next((n, m) for n, m in model.named_modules() if getattr(m, "parameter_name", "") == "gate_up_proj")
    wrong(module)
    with pytest.raises(LivenessError) as caught:
        require_groups(model, RECIPE)
    assert reason in str(caught.value)
    assert (caught.value.stage, caught.value.group, caught.value.tensor) == ("attach", GATE_UP, f"{name}.lora_B")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a card is here")
def test_a_recipe_for_a_card_says_so_where_there_is_none(tiny: Path) -> None:
    box = {**RECIPE.model_dump(mode="json")["box"], "tier": "h200", "device": "cuda"}
    with pytest.raises(NoCardError, match=r"box.device: seen no card .* recipe wants cuda"):
        load_base(tiny / "model", recipe_of("tiny-moe", box=box))
