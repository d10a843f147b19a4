"""The whole training, for real: a run of seven phases on the tiny model, and what must never pass in silence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.training.conftest import Box, Cascade, recipe_of, seven_phases
from training.contract import layout
from training.contract.layout import PROBE
from training.contract.manifest import REQUIRED_FILES, Manifest, Parent
from training.contract.recipe import Recipe

pytestmark = [pytest.mark.train, pytest.mark.timeout(600)]
NAMES = ("cpt", "sft", "sft-again", "dpo", "dpo-again", "kto", "grpo")
GROUPS = {
    "attention",
    "linear_attention",
    "shared_expert",
    "routed_experts.gate_up_proj",
    "routed_experts.down_proj",
}


def last(cascade: Cascade, phase: str) -> Manifest:
    steps = seven_phases().phase(phase).steps
    return Manifest.model_validate_json(cascade.store.get_bytes(layout.manifest("cascade", phase, steps)) or b"")


def test_every_group_changes_in_every_phase_and_none_is_left_at_zero(cascade: Cascade) -> None:
    assert tuple(cascade.ends) == NAMES
    seen: dict[str, set[str]] = {}
    for end in cascade.ends.values():
        assert end.complete and set(end.groups) == GROUPS
        for name, group in end.groups.items():
            assert group.zero_b == 0 and group.delta_norm > 0
            assert group.digest not in seen.setdefault(name, set()), "the same weights as after another phase"
            seen[name].add(group.digest)


def test_it_visibly_learns(cascade: Cascade) -> None:
    sft, grpo = cascade.ends["sft"], cascade.ends["grpo"]
    assert sft.loss_first > 3 and sft.loss_last < 0.8
    assert grpo.metrics["mean_reward"] > 0.1
    assert grpo.metrics["mean_frac_reward_zero_std"] < 1
    base, adapter = (event.metrics["valid_rate"] for event in cascade.box.of("evaluated"))
    assert base == 0 and adapter > 0.5


def test_every_step_tells_its_tokens_its_price_and_the_gradient_of_every_group(cascade: Cascade) -> None:
    steps = cascade.box.of("step")
    for step in steps:
        assert step.tokens > 0 and step.tokens_per_s > 0 and step.mfu is None, "there is no MFU on a CPU"
        assert set(step.grad_norms) == GROUPS
    assert all(sum(step.grad_norms.values()) > 0 for step in steps if step.phase != "grpo")
    totals = [step.usd_total for step in steps]
    assert totals == sorted(totals) and totals[0] > 0


def test_two_phases_of_one_kind_have_names_data_and_checkpoints_of_their_own(cascade: Cascade) -> None:
    for kind in ("sft", "dpo"):
        first, second = last(cascade, kind), last(cascade, f"{kind}-again")
        assert first.data_sha256 != second.data_sha256
        assert first.phase_digest != second.phase_digest
        assert {event.max_steps for event in cascade.box.of("step") if event.phase == f"{kind}-again"} == {
            second.max_steps
        }


def test_each_phase_begins_from_the_very_manifest_that_the_one_before_ended_with(cascade: Cascade) -> None:
    import hashlib

    parent = None
    for name in NAMES:
        manifest = last(cascade, name)
        assert manifest.parent == parent
        key = layout.manifest("cascade", name, manifest.step)
        parent = Parent(key=key, sha256=hashlib.sha256(cascade.store.get_bytes(key) or b"").hexdigest())


def test_the_first_rewards_of_dpo_and_kto_are_zero(cascade: Cascade) -> None:
    for name, loss in (("dpo", 0.6931), ("dpo-again", 0.6931), ("kto", 0.5)):
        first = next(event for event in cascade.box.of("step") if event.phase == name and event.step == 1)
        assert abs(first.metrics["rewards/chosen"]) < 1e-5 and abs(first.metrics["rewards/rejected"]) < 1e-5
        assert first.loss == pytest.approx(loss, abs=1e-3), "an auxiliary loss leaks in"


def test_every_stage_of_the_guard_spoke_in_every_phase(cascade: Cascade) -> None:
    stages = {name: {event.stage for event in cascade.box.of("guard") if event.phase == name} for name in NAMES}
    for name in NAMES:
        assert stages[name] >= {"attach", "canary", "step1", "step2", "end"}, name
    for name in ("cpt", "sft", "sft-again"):
        assert "packing" in stages[name]


def test_the_exported_adapter_is_held_against_the_probe_that_its_last_manifest_carries(cascade: Cascade) -> None:
    """A box that comes later has the manifest alone, and must serve the same answers."""
    assert PROBE in last(cascade, "grpo").files and PROBE not in last(cascade, "kto").files
    (served,) = (guard for guard in cascade.box.of("guard") if guard.stage == "serve")
    assert served.groups["from_adapter"] < 0.25 * served.groups["from_base"]
    assert cascade.store.size(layout.adapter("cascade") + PROBE)


@pytest.mark.parametrize("phase", ["dpo", "kto", "grpo"])
def test_a_checkpoint_holds_what_a_resume_needs_and_no_ballast(cascade: Cascade, phase: str) -> None:
    """No `ref/` above all, not even where GRPO's KL term has a reference adapter beside the trained one: it would be uploaded each time."""
    assert set(last(cascade, phase).files) - {PROBE} == set(REQUIRED_FILES)


def test_an_unknown_way_of_generating_cannot_be_asked_for(cascade: Cascade) -> None:
    """A checkpoint inside a batch of completions would resume another way: each step has its own generation, and none is used twice."""
    import torch

    entry = last(cascade, "grpo").files["training_args.bin"]
    path = cascade.bucket / layout.blob("cascade", entry.sha256)
    arguments = torch.load(path, weights_only=False)
    assert arguments.steps_per_generation == arguments.gradient_accumulation_steps
    assert arguments.num_iterations == 1
    phase = seven_phases().phase("grpo").model_dump(mode="json")
    for field in ("steps_per_generation", "num_iterations", "generation_batch_size"):
        with pytest.raises(ValueError, match=field):
            recipe_of("tiny-moe", phases=[phase | {field: 2}])


def grpo_alone() -> Recipe:
    phase = recipe_of("tiny-moe").phase("grpo").model_dump(mode="json") | {"silent_steps": 2, "save_every_steps": 4}
    return recipe_of("tiny-moe", phases=[phase], evaluation={"data": None})


def test_rewards_that_never_differ_abort_the_run_and_save_nothing(make_local: Callable[..., Box], tiny: object) -> None:
    """GRPO on the untrained model: no completion is ever a call, so every reward is zero."""
    box = make_local(grpo_alone(), "silent", tiny)
    assert box.run_here() == 3
    abort = box.of("abort")[0]
    assert "no variance" in abort.reason and abort.blame == "user"
    assert box.store.list(layout.phase_manifests("silent", "grpo")) == []
    assert abort.reason in (box.root / "aborted.json").read_text()
