"""The whole training, for real: the shipped tiny recipe through all five phases, a lost box, and the adapter in stock PEFT's hands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import Box, kill, place_box, recipe_of
from training.box.store import Store
from training.contract import layout
from training.contract.manifest import Manifest
from training.contract.recipe import Recipe

pytestmark = pytest.mark.train
KINDS = ("cpt", "sft", "dpo", "kto", "grpo")
GROUPS = {
    "attention",
    "linear_attention",
    "shared_expert",
    "routed_experts.gate_up_proj",
    "routed_experts.down_proj",
}


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory, s3: dict[str, str], tiny: Path) -> Box:
    """The uninterrupted run."""
    box = place_box(tmp_path_factory.mktemp("cascade") / "box", s3, recipe_of("tiny-moe"), "cascade", tiny)
    assert box.run(timeout_s=280) == 0, (box.root / "log").read_text()[-3000:]
    return box


def ends(box: Box) -> dict[str, Any]:
    return {event.phase: event for event in box.of("phase_end")}


def test_every_group_changes_in_every_phase_and_none_is_left_at_zero(cascade: Box) -> None:
    assert tuple(ends(cascade)) == KINDS
    seen: dict[str, set[str]] = {}
    for end in ends(cascade).values():
        assert end.complete and set(end.groups) == GROUPS
        for name, group in end.groups.items():
            assert group.zero_b == 0 and group.delta_norm > 0
            assert group.digest not in seen.setdefault(name, set()), "the same weights as after another phase"
            seen[name].add(group.digest)


def test_it_visibly_learns(cascade: Box) -> None:
    sft, grpo = ends(cascade)["sft"], ends(cascade)["grpo"]
    assert sft.loss_first > 3 and sft.loss_last < 0.7
    assert grpo.metrics["mean_reward"] > 0.1
    assert grpo.metrics["mean_frac_reward_zero_std"] < 1
    base, adapter = (event.metrics["valid_rate"] for event in cascade.of("evaluated"))
    assert base == 0 and adapter > 0.5


def test_the_first_rewards_of_dpo_and_kto_are_zero(cascade: Box) -> None:
    for kind in ("dpo", "kto"):
        first = next(event for event in cascade.of("step") if event.phase == kind and event.step == 1)
        assert first.metrics["rewards/chosen"] == first.metrics["rewards/rejected"] == 0.0
        assert first.loss == pytest.approx({"dpo": 0.6931, "kto": 0.5}[kind], abs=1e-3), "an auxiliary loss leaks in"


def test_every_stage_of_the_guard_spoke_in_every_phase(cascade: Box) -> None:
    stages = {kind: {event.stage for event in cascade.of("guard") if event.phase == kind} for kind in KINDS}
    for kind in KINDS:
        assert stages[kind] >= {"attach", "canary", "step1", "step2", "end"}, kind
    assert "packing" in stages["cpt"] and "packing" in stages["sft"]


def test_a_checkpoint_holds_what_a_resume_needs_and_no_ballast(cascade: Box, store: Store) -> None:
    data = store.get_bytes(layout.manifest("cascade", "dpo", 6))
    assert data is not None
    assert set(Manifest.model_validate_json(data).files) == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
        "training_args.bin",
    }


def test_the_adapter_loads_in_stock_peft_with_equal_logits(
    cascade: Box, store: Store, tiny: Path, tmp_path: Path
) -> None:
    import torch
    from peft import PeftModel

    from training.model import attach, load_base

    for name in ("adapter_config.json", "adapter_model.safetensors"):
        store.download_file(layout.adapter("cascade") + name, tmp_path / name)
    recipe, ids = recipe_of("tiny-moe"), torch.arange(3, 60)[None]
    base = load_base(tiny / "model", recipe)(input_ids=ids).logits
    stock = PeftModel.from_pretrained(load_base(tiny / "model", recipe), str(tmp_path))
    wanted = stock(input_ids=ids).logits
    ours = attach(load_base(tiny / "model", recipe), recipe, tmp_path)(input_ids=ids).logits
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    assert float((wanted - base).abs().max()) > 0.1, "the adapter does nothing"
    assert "/" not in str(stock.peft_config["default"].base_model_name_or_path).removeprefix("bucket:models/")


def up_to_sft() -> Recipe:
    data = recipe_of("tiny-moe").model_dump(mode="json")
    return recipe_of("tiny-moe", phases=data["phases"][:2], evaluation={"data": None})


def test_a_box_lost_in_mid_sft_ends_with_the_very_weights_of_the_uninterrupted_run(
    cascade: Box, make_box: Callable[..., Box], store: Store, tiny: Path
) -> None:
    lost = make_box(up_to_sft(), "lost-in-sft", tiny)
    runner = lost.start()
    lost.wait_for(lambda: bool(store.list(layout.phase_manifests("lost-in-sft", "sft"))), timeout_s=200)
    kill(runner)
    assert "sft" not in ends(lost)

    box = make_box(up_to_sft(), "lost-in-sft", tiny)
    assert box.run(timeout_s=200) == 0, (box.root / "log").read_text()[-3000:]
    start = box.of("phase_start")[0]
    assert start.phase == "sft" and start.step in (20, 40)
    here, there = ends(box)["sft"], ends(cascade)["sft"]
    assert {name: group.digest for name, group in here.groups.items()} == {
        name: group.digest for name, group in there.groups.items()
    }
    assert (here.loss_first, here.loss_last) == (there.loss_first, there.loss_last)
    tail = [event.loss for event in cascade.of("step") if event.phase == "sft" and event.step > start.step]
    assert [event.loss for event in box.of("step")] == tail


def test_rewards_that_never_differ_abort_the_run_and_save_nothing(
    make_box: Callable[..., Box], store: Store, tiny: Path
) -> None:
    """GRPO on the untrained model: no completion is ever a call, so every reward is zero."""
    phase = recipe_of("tiny-moe").phase("grpo").model_dump(mode="json") | {"silent_steps": 2, "save_every_steps": 4}
    box = make_box(recipe_of("tiny-moe", phases=[phase], evaluation={"data": None}), "silent", tiny)
    assert box.run(timeout_s=120) == 3
    abort = box.of("abort")[0]
    assert "no variance" in abort.reason and abort.blame == "user"
    assert store.list(layout.phase_manifests("silent", "grpo")) == []
