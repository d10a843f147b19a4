"""All five phases on a real card, in bfloat16, with the 8-bit optimizer, checkpointed activations and flash-linear-attention's rule.

Run it on a machine with a card: `python -m pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import Box, kill, place_box, recipe_of
from training.box.store import Store
from training.contract import layout
from training.contract.recipe import Recipe

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


def on_a_card(**changes: Any) -> Recipe:
    """The tiny recipe as a card trains it."""
    data = recipe_of("tiny-moe").model_dump(mode="json")
    data["model"]["dtype"] = "bfloat16"
    data["box"] |= {"tier": "h200", "device": "cuda"}
    return recipe_of("tiny-moe", **{name: data[name] for name in ("model", "box")} | changes)


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory, s3: dict[str, str], tiny: Path) -> Box:
    box = place_box(tmp_path_factory.mktemp("card") / "box", s3, on_a_card(), "card", tiny)
    code = box.run(timeout_s=400)
    assert code == 0, "\n".join(
        [(box.root / "log").read_text()[-6000:], *(event.model_dump_json() for event in box.of("abort"))]
    )
    return box


def test_every_group_is_alive_in_every_phase(cascade: Box) -> None:
    for kind in KINDS:
        guards = {event.stage: event.groups for event in cascade.of("guard") if event.phase == kind}
        assert set(guards) >= {"attach", "canary", "step1", "step2", "end"}, kind
        for stage in ("canary", "step1", "step2", "end"):
            assert set(guards[stage]) == GROUPS and min(guards[stage].values()) > 0, (kind, stage)
    for end in cascade.of("phase_end"):
        assert end.complete and all(group.zero_b == 0 for group in end.groups.values())


def test_nothing_slow_was_taken_in_silence(cascade: Box) -> None:
    """The 8-bit optimizer, grouped_mm without a wait for the host and the fast rule are there, so no notice of a slow path or unpacked rows."""
    assert [event.what for event in cascade.of("notice")] == []
    packing = {event.phase: event.groups["logits"] for event in cascade.of("guard") if event.stage == "packing"}
    assert set(packing) == {"cpt", "sft"}


def test_it_visibly_learns(cascade: Box) -> None:
    ends = {event.phase: event for event in cascade.of("phase_end")}
    assert ends["sft"].loss_first > 3 and ends["sft"].loss_last < 1
    assert ends["grpo"].metrics["mean_reward"] > 0.1
    base, adapter = (event.metrics["valid_rate"] for event in cascade.of("evaluated"))
    assert base == 0 and adapter > 0.3


def test_a_box_lost_in_mid_sft_goes_on_where_its_last_checkpoint_was(
    cascade: Box, make_box: Callable[..., Box], store: Store, tiny: Path
) -> None:
    """The 8-bit states come back from optimizer.pt, and the losses go on as if nothing had been, to the rounding of bfloat16."""
    phases = on_a_card().model_dump(mode="json")["phases"]
    recipe = on_a_card(phases=[phases[0], phases[1] | {"save_every_steps": 10}], evaluation={"data": None})
    lost = make_box(recipe, "card-lost", tiny)
    runner = lost.start()
    lost.wait_for(lambda: bool(store.list(layout.phase_manifests("card-lost", "sft"))), timeout_s=200)
    kill(runner)
    box = make_box(recipe, "card-lost", tiny)
    assert box.run(timeout_s=200) == 0, (box.root / "log").read_text()[-3000:]
    start = box.of("phase_start")[0]
    assert start.phase == "sft" and start.step >= 10
    tail = {event.step: event.loss for event in cascade.of("step") if event.phase == "sft"}
    for event in box.of("step")[:5]:
        assert event.loss == pytest.approx(tail[event.step], rel=0.25), event.step
