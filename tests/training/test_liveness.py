"""Each check of liveness is shown what it guards against, broken on a real model."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from transformers import TrainerControl
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

from tests.training.conftest import recipe_of
from training import experts, lean, liveness
from training import tiny as tiny_world
from training.contract.families import FAMILIES
from training.liveness import Guard, LivenessError, static
from training.liveness.rollouts import base_weight
from training.liveness.static import lora_layers
from training.model import attach, load_base, lora_tensors

RECIPE = recipe_of("tiny-moe")
PHASE = RECIPE.phase("sft")
IDS = torch.randint(3, 700, (1, 40), generator=torch.Generator().manual_seed(0))
GATE_UP, DOWN = ROUTED = ("routed_experts.gate_up_proj", "routed_experts.down_proj")
GROUPS = ("attention", "linear_attention", "shared_expert", *ROUTED)


@pytest.fixture(scope="module")
def two_layers(tiny: Path) -> Any:
    """The first and the last layer of the tiny model: a gated delta net and a full attention."""
    base = load_base(tiny / "model", RECIPE)
    base.model.layers = torch.nn.ModuleList([base.model.layers[0], base.model.layers[3]])
    base.model.layers[1].self_attn.layer_idx = 1
    base.config.num_hidden_layers, base.config.layer_types = 2, ["linear_attention", "full_attention"]
    return base


@pytest.fixture
def model(two_layers: Any) -> Any:
    return attach(copy.deepcopy(two_layers), RECIPE, None)


@pytest.fixture
def trained(model: Any) -> Any:
    with torch.no_grad():
        for seed, (_, _, tensor) in enumerate(lora_tensors(model, "lora_B")):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * 0.05)
    return model


def optimizer_of(model: Any, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)


def backward(model: Any) -> None:
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()


def step(
    guard: Guard,
    model: Any,
    optimizer: torch.optim.Optimizer,
    number: int,
    between: Callable[[], Any] = lambda: None,
    micro_steps: int = 1,
) -> None:
    """What the trainer does: the guard looks between the gradient and the update, and after it."""
    state, control = SimpleNamespace(global_step=number), TrainerControl()
    args = SimpleNamespace(gradient_checkpointing=model.is_gradient_checkpointing)
    guard.on_step_begin(args, state, control, model=model)
    optimizer.zero_grad()
    for _ in range(micro_steps - 1):
        backward(model)
        guard.on_substep_end(args, state, control)
    backward(model)
    between()
    guard.on_pre_optimizer_step(args, state, control, model=model, optimizer=optimizer)
    optimizer.step()
    guard.on_optimizer_step(args, state, control, model=model)


def new_guard(**options: Any) -> Guard:
    return Guard(GROUPS, lambda *_: None, **options)


def bypass(self: Any, *arguments: Any) -> Any:
    """What a library does that replaces the experts' forward: right answers of the base, and no adapter in them."""
    return self.base_layer.base_layer(*arguments)


def without_gate_up(self: Any, hidden: Any, index: Any, weight: Any) -> Any:
    base, factors = experts._active_factors(self)
    factors.pop("gate_up_proj")
    self.livery_trained += 1
    return experts._grouped_experts(base, hidden, index, weight, factors, experts.torch_grouped_mm)


def replace_experts(model: Any, forward: Any) -> None:
    for _, wrapper in experts.outer_wrappers(model):
        wrapper.forward = types.MethodType(forward, wrapper)


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at who stands where: what running shows must be enough to catch it."""
    monkeypatch.setattr("training.liveness.steps.require_static", lambda *_: None)


def test_a_healthy_model_passes_every_stage_of_its_first_steps(model: Any) -> None:
    passed: dict[str, dict[str, float]] = {}
    guard, optimizer = Guard(GROUPS, lambda stage, _, values: passed.update({stage: values})), optimizer_of(model)
    liveness.require_static(model)
    moved = liveness.canary(model, IDS, GROUPS)
    for number in range(3):
        step(guard, model, optimizer, number)
    assert set(moved) == set(passed["step1"]) == set(passed["step2"]) == set(guard.last_norms) == set(GROUPS)
    assert all(value > 0 for values in (moved, *passed.values()) for value in values.values())


def test_a_family_without_gated_delta_nets_passes_them_too() -> None:
    family = FAMILIES["qwen3_moe"]
    told = RECIPE.model.model_dump(mode="json") | {"family": "qwen3_moe"}
    recipe = recipe_of("tiny-moe", model=told, adapters={"rank": 8, "alpha": 16, "groups": list(family.groups)})
    model = attach(tiny_world.make_model(773, 768, 767, family="qwen3_moe").requires_grad_(False), recipe, None)
    groups, passed = ("attention", *ROUTED), []
    liveness.require_static(model)
    assert liveness.canary(model, IDS, groups).keys() == set(groups)
    guard, optimizer = Guard(groups, lambda stage, *_: passed.append(stage)), optimizer_of(model)
    for number in range(2):
        step(guard, model, optimizer, number)
    assert passed == ["step1", "step2"]


def test_the_canary_puts_every_weight_back(model: Any) -> None:
    before = liveness.group_states(model)
    liveness.canary(model, IDS, GROUPS)
    assert liveness.group_states(model) == before


def test_bypassed_experts_are_seen_before_the_first_step(model: Any) -> None:
    replace_experts(model, bypass)
    with pytest.raises(LivenessError) as caught:
        liveness.canary(model, IDS, GROUPS)
    assert caught.value.stage == "canary" and caught.value.group in ROUTED
    assert "test_liveness.bypass" in str(caught.value.cause)


def test_bypassed_experts_did_not_run_with_their_adapter(model: Any, unseen: None) -> None:
    replace_experts(model, bypass)
    with pytest.raises(LivenessError, match="ran 0 times with its adapter, want 1") as caught:
        step(new_guard(), model, optimizer_of(model), 0)
    assert caught.value.stage == "running" and "test_liveness.bypass" in str(caught.value.cause)


def test_when_only_gate_up_is_dropped_only_gate_up_is_named(model: Any, unseen: None) -> None:
    replace_experts(model, without_gate_up)
    with pytest.raises(LivenessError, match="step 1: 2 of 2 lora_B") as caught:
        step(new_guard(), model, optimizer_of(model), 0)
    assert (caught.value.stage, caught.value.group) == ("step1", GATE_UP)
    assert "also dead" not in str(caught.value) and "attention" in str(caught.value) and "train" in str(caught.value)
    assert "test_liveness.without_gate_up" in str(caught.value.cause)


def test_one_layer_out_of_two_is_enough(model: Any, unseen: None) -> None:
    name, wrapper = list(experts.outer_wrappers(model))[1]
    wrapper.forward = types.MethodType(without_gate_up, wrapper)
    with pytest.raises(LivenessError, match="1 of 2") as caught:
        step(new_guard(), model, optimizer_of(model), 0)
    assert caught.value.tensor == f"{name}.base_layer.lora_B"


def test_a_gradient_that_is_not_finite_stops_before_the_update_at_any_step(model: Any) -> None:
    guard, optimizer = new_guard(), optimizer_of(model)
    step(guard, model, optimizer, 0)
    step(guard, model, optimizer, 1)
    _, name, tensor = next(lora_tensors(model, "lora_B"))
    before = tensor.detach().clone()

    def damage() -> None:
        assert tensor.grad is not None
        tensor.grad[0, 0] = float("nan")

    with pytest.raises(LivenessError, match=r"step 3.*not finite") as caught:
        step(guard, model, optimizer, 2, damage)
    assert (caught.value.stage, caught.value.tensor) == ("running", name)
    assert torch.equal(tensor, before)


def test_a_tensor_outside_the_optimizer_is_named(model: Any) -> None:
    optimizer = optimizer_of(model)
    _, name, tensor = next(lora_tensors(model, "lora_B"))
    held = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [each for each in held if each is not tensor]
    with pytest.raises(LivenessError, match="not in the optimizer") as caught:
        step(new_guard(), model, optimizer, 0)
    assert (caught.value.stage, caught.value.tensor) == ("step1", name)


def test_an_optimizer_that_does_nothing_is_seen_after_its_first_update(model: Any) -> None:
    optimizer = optimizer_of(model)
    optimizer.step = lambda *_: None  # type: ignore[method-assign,assignment]
    with pytest.raises(LivenessError, match="bit for bit as it was") as caught:
        step(new_guard(), model, optimizer, 0)
    assert caught.value.stage == "step1"


def test_a_warm_up_whose_first_rate_is_zero_is_no_dead_optimizer(model: Any) -> None:
    passed: list[str] = []
    guard, optimizer = Guard(GROUPS, lambda stage, *_: passed.append(stage)), optimizer_of(model, lr=0.0)
    step(guard, model, optimizer, 0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2
    step(guard, model, optimizer, 1)
    assert passed == ["step1"]
    step(guard, model, optimizer, 2)
    assert passed == ["step1", "step2"]


@pytest.mark.parametrize("checkpointing", ["", "ours", "transformers'"])
def test_each_layers_experts_must_run_as_often_as_the_micro_steps_demand(model: Any, checkpointing: str) -> None:
    """Once a micro-step, and once more where the forward is computed again for the backward."""
    if checkpointing == "ours":
        lean.set_recompute(model.train(), "full")
    elif checkpointing:
        lean.remove(model)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    guard, optimizer = new_guard(), optimizer_of(model)
    step(guard, model, optimizer, 0, micro_steps=2)
    name, wrapper = next(experts.outer_wrappers(model))

    def skip_one() -> None:
        wrapper.livery_trained -= 1

    wanted = 4 if checkpointing else 2
    with pytest.raises(LivenessError, match=f"ran {wanted - 1} times with its adapter, want {wanted}") as caught:
        step(guard, model, optimizer, 1, skip_one, micro_steps=2)
    assert caught.value.tensor == name


def test_experts_that_never_get_a_token_are_told_of(model: Any) -> None:
    told: list[str] = []
    guard = new_guard(notice=lambda what, reason: told.append(f"{what}: {reason}"))
    optimizer = optimizer_of(model)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data[2:] = 0.0
            parameter.data[:2] *= 1e4
    for number in range(5):
        step(guard, model, optimizer, number)
    assert len(told) == 1 and "of 16 routed experts had no gradient in 5 steps" in told[0]


def test_rewards_without_variance_abort_after_the_allowed_steps(model: Any) -> None:
    passed: list[str] = []
    flat = [torch.zeros(8)]
    guard = Guard(GROUPS, lambda stage, *_: passed.append(stage), advantages=lambda: flat, silent_steps=3)
    optimizer = optimizer_of(model)
    step(guard, model, optimizer, 0)
    step(guard, model, optimizer, 1)
    with pytest.raises(LivenessError, match="3 steps in a row whose rewards had no variance") as caught:
        step(guard, model, optimizer, 2)
    assert caught.value.stage == "running"
    assert passed == [], "a step without signal is no proof of life"


def test_one_step_with_variance_ends_the_silence(model: Any) -> None:
    advantages = [torch.zeros(8)]
    guard, optimizer = new_guard(advantages=lambda: advantages, silent_steps=2), optimizer_of(model)
    step(guard, model, optimizer, 0)
    advantages[0] = torch.tensor([1.0, -1.0])
    step(guard, model, optimizer, 1)
    advantages[0] = torch.zeros(8)
    step(guard, model, optimizer, 2)


def somebody_elses(self: Any, *arguments: Any, **options: Any) -> Any:
    raise AssertionError("only looked at, never called")


def block_of(model: Any) -> Any:
    return next(liveness.static.blocks(model))[1]


def other_class(block: Any) -> None:
    outer = next(iter(experts.chain(block.experts)))
    outer.base_layer.base_layer.__class__ = type("FusedExperts", (modeling.Qwen3_5MoeExperts,), {})


def lying_forward(forward: Any) -> Any:
    """With functools.wraps, as libraries write it: module and name are those of what it replaces."""

    @wraps(forward)
    def replaced(self: Any, *arguments: Any) -> Any:
        return somebody_elses(self, *arguments)

    return replaced


# what is replaced: (how, group, what the message says, who is named)
Replaced = tuple[Callable[[Any, pytest.MonkeyPatch], Any], str | None, str, str]
REPLACED: dict[str, Replaced] = {
    "experts' class forward": (
        lambda m, p: p.setattr(modeling.Qwen3_5MoeExperts, "forward", somebody_elses),
        GATE_UP,
        "Qwen3_5MoeExperts.forward was replaced",
        "test_liveness.somebody_elses",
    ),
    "experts' class forward under its own name": (
        lambda m, p: p.setattr(
            modeling.Qwen3_5MoeExperts, "forward", lying_forward(modeling.Qwen3_5MoeExperts.forward)
        ),
        GATE_UP,
        "Qwen3_5MoeExperts.forward was replaced",
        "really lying_forward.<locals>.replaced",
    ),
    "block's class forward": (
        lambda m, p: p.setattr(modeling.Qwen3_5MoeSparseMoeBlock, "forward", somebody_elses),
        GATE_UP,
        "Qwen3_5MoeSparseMoeBlock.forward was replaced",
        "test_liveness.somebody_elses",
    ),
    "block's instance forward": (
        lambda m, p: setattr(block_of(m), "forward", types.MethodType(somebody_elses, block_of(m))),
        GATE_UP,
        "layers.0.mlp.forward was replaced",
        "test_liveness.somebody_elses",
    ),
    "wrapper's instance forward": (
        lambda m, p: replace_experts(m, somebody_elses),
        DOWN,
        "mlp.experts.forward is not training.experts",
        "test_liveness.somebody_elses",
    ),
    "wrapper's class forward": (
        lambda m, p: p.setattr(ParamWrapper, "forward", somebody_elses),
        DOWN,
        "ParamWrapper.forward was replaced",
        "test_liveness.somebody_elses",
    ),
    "a linear's instance forward": (
        lambda m, p: setattr(
            m.base_model.model.model.layers[1].self_attn.q_proj, "forward", types.MethodType(somebody_elses, m)
        ),
        "attention",
        "layers.1.self_attn.q_proj.forward was replaced",
        "test_liveness.somebody_elses",
    ),
    "experts' class": (lambda m, p: other_class(block_of(m)), GATE_UP, "want Qwen3_5MoeExperts", "FusedExperts"),
    "registry name on the wrong level": (
        lambda m, p: setattr(m.config, "_experts_implementation_internal", None),
        GATE_UP,
        "reads the experts implementation None",
        "set or lost after loading",
    ),
    "registry entry shadowed": (
        lambda m, p: p.setitem(ALL_EXPERTS_FUNCTIONS._local_mapping, "grouped_mm", somebody_elses),
        GATE_UP,
        "registry's 'grouped_mm' is not transformers' own",
        "test_liveness.somebody_elses",
    ),
    "use_kernels": (
        lambda m, p: setattr(m.get_base_model(), "_use_kernels", True),
        None,
        "use_kernels",
        "use_kernels",
    ),
    "adapters off": (lambda m, p: m.base_model.disable_adapter_layers(), DOWN, "switched off", "switched off"),
    "adapter merged": (lambda m, p: m.merge_adapter(), DOWN, "is merged into the base", "default"),
    "another adapter active": (
        lambda m, p: (m.add_adapter("ref", m.peft_config["default"]), m.set_adapter("ref")),
        DOWN,
        "active adapter is ref, want default",
        "ref",
    ),
    "adapter frozen": (
        lambda m, p: [t.requires_grad_(False) for g, _, t in lora_tensors(m, "lora_B") if g == "attention"],
        "attention",
        "is frozen",
        "frozen",
    ),
    "a library loaded late": (
        lambda m, p: p.setitem(sys.modules, "unsloth", types.ModuleType("unsloth")),
        None,
        "unsloth is loaded",
        "unsloth",
    ),
}


@pytest.mark.parametrize("case", REPLACED)
def test_what_stands_where_the_training_forward_should_is_named(
    model: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    replace, group, reason, culprit = REPLACED[case]
    liveness.require_static(model)
    replace(model, monkeypatch)
    with pytest.raises(LivenessError) as caught:
        liveness.require_static(model)
    assert caught.value.stage == "static"
    assert reason in str(caught.value)
    assert culprit in str(caught.value.cause)
    assert caught.value.group == group


def test_a_patch_by_a_late_import_is_seen_in_mid_run(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    guard, optimizer = new_guard(every=2), optimizer_of(model)
    for number in range(3):
        step(guard, model, optimizer, number)
    forward = modeling.Qwen3_5MoeSparseMoeBlock.forward

    def late(self: Any, hidden: Any) -> Any:
        return forward(self, hidden)

    monkeypatch.setattr(modeling.Qwen3_5MoeSparseMoeBlock, "forward", late)
    with pytest.raises(LivenessError, match=r"SparseMoeBlock\.forward was replaced") as caught:
        step(guard, model, optimizer, 3)
    assert caught.value.stage == "running" and "late" in str(caught.value.cause)


GOOD = {"use_liger_kernel": False, "torch_compile": False, "packing": True, "packing_strategy": "bfd"}
GOOD |= {"router_aux_loss_coef": 0.0, "logging_nan_inf_filter": False, "gradient_checkpointing": False}


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("use_liger_kernel", True),
        ("torch_compile", True),
        ("packing_strategy", "wrapped"),
        ("use_vllm", True),
        ("router_aux_loss_coef", None),
        ("router_aux_loss_coef", 0.001),
        ("logging_nan_inf_filter", True),
        ("gradient_checkpointing", True),
    ],
)
def test_a_trainer_argument_that_goes_round_the_adapters_is_refused(argument: str, value: Any) -> None:
    liveness.require_arguments(SimpleNamespace(**GOOD), PHASE)
    with pytest.raises(LivenessError, match=argument) as caught:
        liveness.require_arguments(SimpleNamespace(**GOOD | {argument: value}), PHASE)
    assert caught.value.stage == "static"


def test_adapters_are_on_while_completions_are_made(trained: Any) -> None:
    rollouts = liveness.Rollouts(trained)
    with pytest.raises(LivenessError, match="no completion was made"):
        rollouts.require_seen(1)
    trained.generate(input_ids=IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert rollouts.require_seen(1) == {"rollouts": 1.0}
    with trained.disable_adapter(), pytest.raises(LivenessError, match="switched off") as caught:
        trained.generate(input_ids=IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert caught.value.stage == "rollout" and caught.value.group in GROUPS


def test_experts_that_rollouts_go_round_are_named(trained: Any) -> None:
    liveness.Rollouts(trained)
    name, wrapper = next(experts.outer_wrappers(trained))
    wrapper.forward = types.MethodType(bypass, wrapper)
    with pytest.raises(LivenessError, match="0 of them with its adapter") as caught:
        trained.generate(input_ids=IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert (caught.value.stage, caught.value.tensor) == ("rollout", name)
    assert "test_liveness.bypass" in str(caught.value.cause)


def test_drift_of_any_one_adapted_weight_is_seen_not_only_of_the_first_and_last(trained: Any) -> None:
    before = liveness.base_sums(trained)
    name, module = lora_layers(trained)[len(before) // 2]
    weight = base_weight(module)
    kept = weight.flatten()[0].clone()
    weight.flatten()[0] += 1.0
    with pytest.raises(LivenessError, match="no longer what it was") as caught:
        liveness.require_base_unchanged(trained, before, "end")
    assert caught.value.tensor == name
    weight.flatten()[0] = kept
    liveness.require_base_unchanged(trained, before, "end")


def test_a_merge_in_place_rounds_the_base_away_and_is_seen(trained: Any) -> None:
    before = liveness.base_sums(trained)
    liveness.require_base_unchanged(trained, before, "rollout")
    for _ in range(2):
        trained.merge_adapter()
        trained.unmerge_adapter()
    with pytest.raises(LivenessError, match="no longer what it was") as caught:
        liveness.require_base_unchanged(trained, before, "rollout")
    assert caught.value.stage == "rollout" and "merged" in str(caught.value.cause)


def test_what_is_saved_is_what_is_in_memory(trained: Any, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path)
    assert liveness.require_saved(trained, tmp_path, RECIPE) == {
        "attention": 8,
        "linear_attention": 6,
        "shared_expert": 12,
        GATE_UP: 4,
        DOWN: 4,
    }
    _, name, tensor = next(entry for entry in lora_tensors(trained, "lora_B") if entry[0] == DOWN)
    with torch.no_grad():
        tensor[0, 0] += 1e-3
    with pytest.raises(LivenessError, match="not what is in memory") as caught:
        liveness.require_saved(trained, tmp_path, RECIPE)
    assert (caught.value.stage, caught.value.group) == ("checkpoint", DOWN)
    assert caught.value.tensor == f"{name}.weight"


def test_a_reference_adapter_saved_for_the_trained_one_is_refused(trained: Any, tmp_path: Path) -> None:
    trained.add_adapter("ref", trained.peft_config["default"])
    trained.save_pretrained(tmp_path, selected_adapters=["ref"])
    with pytest.raises(LivenessError, match="not what is in memory") as caught:
        liveness.require_saved(trained, tmp_path / "ref", RECIPE)
    assert caught.value.stage == "checkpoint" and "another adapter than 'default'" in str(caught.value.cause)


def test_an_unchanged_group_ends_the_run(model: Any) -> None:
    before = liveness.group_states(model)
    step(new_guard(), model, optimizer_of(model), 0)
    after = liveness.group_states(model)
    assert liveness.require_changed(before, after, model).keys() == before.keys()
    stuck = after | {"attention": before["attention"]}
    with pytest.raises(LivenessError, match="bit for bit") as caught:
        liveness.require_changed(before, stuck, model)
    assert (caught.value.stage, caught.value.group) == ("end", "attention")


def test_a_lora_b_that_is_still_zero_at_the_end_ends_the_run(model: Any) -> None:
    before = liveness.group_states(model)
    step(new_guard(), model, optimizer_of(model), 0)
    with torch.no_grad():
        next(tensor for group, _, tensor in lora_tensors(model, "lora_B") if group == DOWN).zero_()
    with pytest.raises(LivenessError, match="1 of 2 lora_B") as caught:
        liveness.require_changed(before, liveness.group_states(model), model)
    assert (caught.value.stage, caught.value.group) == ("end", DOWN)
    assert "layers.0.mlp.experts" in str(caught.value.tensor)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_a_reference_that_is_not_the_phase_start_policy_is_seen_at_step_one(side: str) -> None:
    rewards = {"rewards/chosen": 0.0, "rewards/rejected": 0.0}
    liveness.require_reference(rewards, 1e-5)
    with pytest.raises(LivenessError, match="reference") as caught:
        liveness.require_reference(rewards | {f"rewards/{side}": 0.4}, 1e-5)
    assert caught.value.stage == "reference"


def test_a_merge_changes_each_weight_by_its_delta_and_leaves_no_trace(trained: Any) -> None:
    before = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    changes = liveness.require_merged(trained, IDS)
    assert set(changes) == set(GROUPS) and all(change > 0 for change in changes.values())
    assert all(torch.equal(parameter, before[name]) for name, parameter in trained.named_parameters())


def test_a_merge_that_reads_lora_b_in_another_order_is_named(trained: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, adapter: str) -> torch.Tensor:
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        b_EOR = b.reshape(b.shape[0], self.num_experts, -1).permute(1, 0, 2)
        return self.scaling[adapter] * b_EOR @ a.reshape(self.num_experts, -1, a.shape[1])

    monkeypatch.setattr(ParamWrapper, "get_delta_weight", wrong)
    with pytest.raises(LivenessError, match="s·B·A") as caught:
        liveness.require_merged(trained, IDS)
    assert caught.value.stage == "merge" and caught.value.group in ROUTED


def test_a_live_bfloat16_base_is_never_merged(trained: Any) -> None:
    block_of(trained).experts.base_layer.base_layer.to(torch.bfloat16)
    with pytest.raises(ValueError, match="want a float32 copy"):
        liveness.require_merged(trained, IDS)


def test_a_server_must_answer_as_the_adapter_and_not_as_the_base(trained: Any, tmp_path: Path) -> None:
    liveness.write_probe(tmp_path, liveness.probe_of(trained, IDS))
    probe = liveness.read_probe(tmp_path)
    assert probe is not None
    assert liveness.require_served(probe, liveness.log_probabilities(trained, IDS))["from_adapter"] == 0.0
    with trained.disable_adapter(), pytest.raises(LivenessError, match="the base answers") as caught:
        liveness.require_served(probe, liveness.log_probabilities(trained, IDS))
    assert caught.value.stage == "serve" and "applies no adapter" in str(caught.value.cause)
    replace_experts(trained, without_gate_up)
    with pytest.raises(LivenessError, match="neither of them answers"):
        liveness.require_served(probe, liveness.log_probabilities(trained, IDS))


def test_an_adapter_that_changes_nothing_makes_no_probe(model: Any) -> None:
    with pytest.raises(LivenessError, match="exactly as without it"):
        liveness.probe_of(model, IDS)
    noisy = next(tensor for _, _, tensor in lora_tensors(model, "lora_B"))
    with torch.no_grad():
        noisy.normal_(0, 0.02)
    scalings = [module.scaling["default"] for _, module in lora_layers(model)]
    assert liveness.probe_of(model, IDS).distance > 0
    assert [module.scaling["default"] for _, module in lora_layers(model)] == scalings


@pytest.fixture
def as_installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, to be told otherwise."""
    told: dict[str, str] = {}
    version = static.metadata.version
    monkeypatch.setattr(static.metadata, "version", lambda name: told.get(name) or version(name))
    return told


def test_the_installed_versions_are_the_tested_ones() -> None:
    assert liveness.require_versions().keys() == {"peft", "transformers", "trl"}


@pytest.mark.parametrize(
    ("name", "version"), [("peft", "0.19.1"), ("transformers", "5.17.0"), ("trl", "1.15.2"), ("trl", "2.0.0")]
)
def test_a_version_with_a_known_hole_is_refused(as_installed: dict[str, str], name: str, version: str) -> None:
    as_installed[name] = version
    with pytest.raises(LivenessError, match=f"{name} {version} is installed; want >=") as caught:
        liveness.require_versions()
    assert caught.value.stage == "versions"


@pytest.mark.parametrize("name", ["kernels", "unsloth", "unsloth_zoo", "liger_kernel", "axolotl"])
def test_a_library_that_replaces_forwards_may_not_even_be_installed(as_installed: dict[str, str], name: str) -> None:
    as_installed[name] = "1.0"
    with pytest.raises(LivenessError, match=f"{name} is installed beside") as caught:
        liveness.require_versions()
    assert (caught.value.stage, caught.value.cause) == ("versions", name)


def test_our_folder_is_not_taken_for_the_distribution_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not static.is_kernels_available()
    monkeypatch.setattr(static, "is_kernels_available", lambda: True)
    with pytest.raises(LivenessError, match="package named kernels"):
        liveness.require_versions()
