"""Each check of liveness is shown what it guards against, broken on a real model."""

from __future__ import annotations

import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import get_peft_model
from transformers import TrainerControl

from tests.training.conftest import recipe_of
from training import experts, liveness
from training.contract.recipe import Adapters
from training.liveness import Guard, LivenessError
from training.model import ModelError, attach, expected_counts, load_base, lora_config, lora_tensors, require_groups
from training.phases.reporter import require_reference

RECIPE = recipe_of("tiny-moe")
IDS = torch.randint(3, 700, (1, 40), generator=torch.Generator().manual_seed(0))
ROUTED = ("routed_experts.gate_up_proj", "routed_experts.down_proj")
GROUPS = ("attention", "linear_attention", "shared_expert", *ROUTED)


@pytest.fixture
def model(tiny: Path) -> Any:
    return attach(load_base(tiny / "model", RECIPE), RECIPE, None)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def backward(model: Any) -> None:
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()


def step(guard: Guard, model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    """What the trainer does: the guard looks between the gradient and the update."""
    optimizer.zero_grad()
    backward(model)
    state = SimpleNamespace(global_step=number)
    guard.on_pre_optimizer_step(None, state, TrainerControl(), model=model, optimizer=optimizer)
    optimizer.step()


def bypass(self: Any, *arguments: Any) -> Any:
    """What a library does that replaces the experts' forward: right answers of the base, and no adapter in them."""
    return self.base_layer.base_layer(*arguments)


def without_gate_up(self: Any, hidden: Any, index: Any, weight: Any) -> Any:
    base, factors = experts._active_factors(self)
    factors.pop("gate_up_proj")
    self.livery_calls += 1
    return experts._grouped_experts(base, hidden, index, weight, factors, experts.torch_grouped_mm)


def replace_experts(model: Any, forward: Any) -> None:
    for _, wrapper in experts.outer_wrappers(model):
        wrapper.forward = types.MethodType(forward, wrapper)


def test_a_healthy_model_passes_every_stage(model: Any) -> None:
    passed: dict[str, dict[str, float]] = {}
    guard, optimizer = Guard(GROUPS, lambda stage, _, values: passed.update({stage: values})), optimizer_of(model)
    moved = liveness.canary(model, IDS, GROUPS)
    for number in range(3):
        step(guard, model, optimizer, number)
    assert set(moved) == set(passed["step1"]) == set(passed["step2"]) == set(GROUPS)
    assert all(value > 0 for values in (moved, *passed.values()) for value in values.values())


def test_the_canary_puts_every_weight_back(model: Any) -> None:
    before = liveness.group_states(model)
    liveness.canary(model, IDS, GROUPS)
    assert liveness.group_states(model) == before


def test_bypassed_experts_are_seen_before_the_first_step(model: Any) -> None:
    replace_experts(model, bypass)
    with pytest.raises(LivenessError) as caught:
        liveness.canary(model, IDS, GROUPS)
    assert caught.value.group in ROUTED
    assert "test_liveness.bypass" in str(caught.value.cause)


def test_bypassed_experts_stop_the_first_step_and_are_named(model: Any) -> None:
    replace_experts(model, bypass)
    with pytest.raises(LivenessError, match="step 1: 4 of 4 lora_B of routed_experts") as caught:
        step(Guard(GROUPS, lambda *_: None), model, optimizer_of(model), 0)
    assert "attention" in str(caught.value) and "train" in str(caught.value)
    assert "test_liveness.bypass" in str(caught.value.cause)


def test_when_only_gate_up_is_dropped_only_gate_up_is_named(model: Any) -> None:
    replace_experts(model, without_gate_up)
    with pytest.raises(LivenessError) as caught:
        step(Guard(GROUPS, lambda *_: None), model, optimizer_of(model), 0)
    assert caught.value.group == "routed_experts.gate_up_proj"
    assert "also dead" not in str(caught.value)


def test_one_layer_out_of_four_is_enough(model: Any) -> None:
    _, wrapper = list(experts.outer_wrappers(model))[2]
    wrapper.forward = types.MethodType(bypass, wrapper)
    with pytest.raises(LivenessError, match="1 of 4") as caught:
        step(Guard(GROUPS, lambda *_: None), model, optimizer_of(model), 0)
    assert "layers.2." in str(caught.value.tensor)


def test_a_gradient_that_is_not_a_number_names_its_tensor(model: Any) -> None:
    backward(model)
    _, name, tensor = next(lora_tensors(model, "lora_B"))
    assert tensor.grad is not None
    tensor.grad[0, 0] = float("nan")
    with pytest.raises(LivenessError, match="not finite") as caught:
        liveness.gradient_norms(model, "lora_B", GROUPS, 1)
    assert caught.value.tensor == name


def test_a_tensor_outside_the_optimizer_is_named(model: Any) -> None:
    optimizer = optimizer_of(model)
    _, name, tensor = next(lora_tensors(model, "lora_B"))
    held = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [each for each in held if each is not tensor]
    with pytest.raises(LivenessError, match="not in the optimizer") as caught:
        step(Guard(GROUPS, lambda *_: None), model, optimizer, 0)
    assert caught.value.tensor == name


def test_rewards_without_variance_abort_after_the_allowed_steps(model: Any) -> None:
    passed: list[str] = []
    flat = [torch.zeros(8)]
    guard = Guard(GROUPS, lambda stage, *_: passed.append(stage), advantages=lambda: flat, silent_steps=3)
    optimizer = optimizer_of(model)
    step(guard, model, optimizer, 0)
    step(guard, model, optimizer, 1)
    with pytest.raises(LivenessError, match="3 steps in a row whose rewards had no variance"):
        step(guard, model, optimizer, 2)
    assert passed == [], "a step without signal is no proof of life"


def test_one_step_with_variance_ends_the_silence(model: Any) -> None:
    advantages = [torch.zeros(8)]
    guard = Guard(GROUPS, lambda *_: None, advantages=lambda: advantages, silent_steps=2)
    optimizer = optimizer_of(model)
    step(guard, model, optimizer, 0)
    advantages[0] = torch.tensor([1.0, -1.0])
    step(guard, model, optimizer, 1)
    advantages[0] = torch.zeros(8)
    step(guard, model, optimizer, 2)


def test_an_unchanged_group_ends_the_run(model: Any) -> None:
    before = liveness.group_states(model)
    optimizer = optimizer_of(model)
    step(Guard(GROUPS, lambda *_: None), model, optimizer, 0)
    after = liveness.group_states(model)
    assert liveness.require_changed(before, after, model).keys() == before.keys()
    stuck = after | {"attention": before["attention"]}
    with pytest.raises(LivenessError, match="bit for bit") as caught:
        liveness.require_changed(before, stuck, model)
    assert caught.value.group == "attention"


def test_a_lora_b_that_is_still_zero_at_the_end_ends_the_run(model: Any) -> None:
    before = liveness.group_states(model)
    step(Guard(GROUPS, lambda *_: None), model, optimizer_of(model), 0)
    with torch.no_grad():
        next(tensor for group, _, tensor in lora_tensors(model, "lora_B") if group == ROUTED[1]).zero_()
    with pytest.raises(LivenessError, match="1 of 4 lora_B") as caught:
        liveness.require_changed(before, liveness.group_states(model), model)
    assert caught.value.group == ROUTED[1]


def test_the_groups_come_from_the_recipe_not_from_what_is_there(tiny: Path) -> None:
    fewer = Adapters(rank=16, alpha=32, groups=("attention", "linear_attention", "shared_expert"))
    model = get_peft_model(load_base(tiny / "model", RECIPE), lora_config(fewer, "qwen3_5_moe"))
    with pytest.raises(ModelError, match=r"routed_experts.*0 lora_B tensors, want 4") as caught:
        require_groups(model, RECIPE)
    assert caught.value.group in ROUTED


def test_a_frozen_adapter_is_refused(model: Any) -> None:
    next(lora_tensors(model, "lora_B"))[2].requires_grad_(False)
    with pytest.raises(ModelError, match="is frozen"):
        require_groups(model, RECIPE)


def test_an_adapter_of_another_model_class_is_refused(model: Any, tiny: Path, tmp_path: Path) -> None:
    """PEFT warns, loads nothing, and the model answers exactly as the base."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    save_file({k.replace("model.layers", "model.language_model.layers"): v for k, v in load_file(path).items()}, path)
    with pytest.warns(UserWarning, match="missing adapter keys"), pytest.raises(ModelError, match="keys missing"):
        attach(load_base(tiny / "model", RECIPE), RECIPE, tmp_path)


def test_qwen36_has_the_330_targets_of_the_default_groups() -> None:
    from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

    layers = ["full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(40)]
    config = Qwen3_5MoeTextConfig(num_hidden_layers=40, layer_types=layers)
    counts = expected_counts(config, recipe_of("qwen3.6-35b-a3b"))
    assert counts == {
        "attention": 40,
        "linear_attention": 90,
        "shared_expert": 120,
        "routed_experts.gate_up_proj": 40,
        "routed_experts.down_proj": 40,
    }


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_reference_that_is_not_the_phase_start_policy_is_seen_at_step_one(side: str) -> None:
    rewards = {"rewards/chosen": 0.0, "rewards/rejected": 0.0}
    require_reference(rewards, 1e-5)
    with pytest.raises(LivenessError, match="reference"):
        require_reference(rewards | {f"rewards/{side}": 0.4}, 1e-5)


def test_a_library_that_replaces_forwards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    liveness.refuse_foreign()
    monkeypatch.setitem(liveness.sys.modules, "unsloth", types.ModuleType("unsloth"))
    with pytest.raises(LivenessError, match="unsloth"):
        liveness.refuse_foreign()


def test_our_folder_is_not_taken_for_the_distribution_kernels() -> None:
    from transformers.utils.import_utils import is_kernels_available

    assert not is_kernels_available()
