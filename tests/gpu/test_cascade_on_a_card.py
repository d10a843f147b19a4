"""All five phases on a real card, in bfloat16, with the 8-bit optimizer, checkpointed activations and flash-linear-attention's rule.

Run it on a machine with a card: `python -m pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import CardRun, card_recipe, place

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
    pytest.mark.timeout(500),
]
KINDS = ("cpt", "sft", "dpo", "kto", "grpo")
GROUPS = {
    "attention",
    "linear_attention",
    "shared_expert",
    "routed_experts.gate_up_proj",
    "routed_experts.down_proj",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from training.tiny import make

    directory = tmp_path_factory.mktemp("world")
    make(directory)
    return directory


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory, world: Path) -> CardRun:
    run = place(tmp_path_factory.mktemp("card"), card_recipe(), world)
    run.run(timeout_s=400)
    return run


def test_every_group_is_alive_in_every_phase(cascade: CardRun) -> None:
    for kind in KINDS:
        guards = {event.stage: event.groups for event in cascade.of("guard") if event.phase == kind}
        assert set(guards) >= {"attach", "canary", "step1", "step2", "end"}, kind
        for stage in ("canary", "step1", "step2", "end"):
            assert set(guards[stage]) == GROUPS and min(guards[stage].values()) > 0, (kind, stage)
    for end in cascade.of("phase_end"):
        assert end.complete and all(group.zero_b == 0 for group in end.groups.values())


def test_nothing_slow_was_taken_in_silence(cascade: CardRun) -> None:
    """The 8-bit optimizer, experts without a wait for the host and the fast rule are there, so no notice of a slow path or unpacked rows."""
    assert [event.what for event in cascade.of("notice") if "slow" in event.what or "unpacked" in event.what] == []
    packing = {event.phase for event in cascade.of("guard") if event.stage == "packing"}
    assert packing == {"cpt", "sft"}


def test_the_first_rewards_of_dpo_and_kto_are_zero_within_what_bfloat16_rounds(cascade: CardRun) -> None:
    for kind in ("dpo", "kto"):
        first = next(event for event in cascade.of("step") if event.phase == kind and event.step == 1)
        print(kind, {name: value for name, value in first.metrics.items() if name.startswith("rewards/")})
        assert abs(first.metrics["rewards/chosen"]) < 1e-2


def test_it_visibly_learns(cascade: CardRun) -> None:
    ends = {event.phase: event for event in cascade.of("phase_end")}
    assert ends["sft"].loss_first > 3 and ends["sft"].loss_last < 1
    assert ends["grpo"].metrics["mean_reward"] > 0.1
    base, adapter = (event.metrics["valid_rate"] for event in cascade.of("evaluated"))
    assert base == 0 and adapter > 0.3


def test_a_box_lost_in_mid_sft_goes_on_where_its_last_checkpoint_was(
    cascade: CardRun, card_run: Callable[[dict[str, Any], Path], CardRun], world: Path
) -> None:
    """The 8-bit states come back from optimizer.pt, and the losses go on as if nothing had been, to the rounding of bfloat16."""
    phases = card_recipe()["phases"]
    recipe = card_recipe(phases=[phases[0], phases[1] | {"save_every_steps": 10}], evaluation={"data": None})
    run = card_run(recipe, world)
    runner = run.start()
    run.wait_for(lambda: any(event.phase == "sft" for event in run.of("checkpoint_durable")), timeout_s=200)
    run.kill(runner)
    run.run(timeout_s=200)
    start = run.of("phase_start")[-1]
    assert start.phase == "sft" and start.step >= 10
    tail = {event.step: event.loss for event in cascade.of("step") if event.phase == "sft"}
    resumed = [event for event in run.of("step") if event.phase == "sft" and event.seq > start.seq]
    for event in resumed[:5]:
        assert event.loss == pytest.approx(tail[event.step], rel=0.25), event.step
