from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.conftest import BUCKET, place_box, recipe_of
from training.box.store import Store
from training.checkpoint import Checkpoints, Identity, Uploader
from training.contract.events import EventLog, Step, read_events
from training.contract.recipe import Assignment
from training.phases.desk import Desk, Home, Interrupted, NotFinite, Pulse

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def desk(tmp_path: Path, s3: dict[str, str]) -> Iterator[Desk]:
    box = place_box(tmp_path / "box", s3, recipe_of("counting"), "desk")
    home = Home(box.root)
    checkpoints = Checkpoints(Store.from_environment(BUCKET, s3), "desk", home.work / "staging", lambda *_: None)
    uploader = Uploader(box.assignment, home.work / "staging", checkpoints, lambda *_: None)
    assignment = Assignment.model_validate_json(box.assignment.read_text())
    yield Desk(
        assignment=assignment,
        phase=assignment.recipe.phase("sft"),
        home=home,
        events=EventLog(home.events),
        pulse=Pulse(),
        stop=threading.Event(),
        uploader=uploader,
        identity=Identity("d", "", {}, None, ("state.json",)),
        start=None,
    )
    uploader.close()


def steps(desk: Desk) -> list[Step]:
    return [event for event in read_events(desk.home.events) if isinstance(event, Step)]


@pytest.mark.parametrize(
    ("loss", "grad_norm"), [(NAN, 1.0), (INF, 1.0), (1.0, NAN), (1.0, INF)], ids=["nan", "inf", "grad nan", "grad inf"]
)
def test_a_step_that_is_not_finite_stops_the_phase_before_it_can_be_saved(
    desk: Desk, loss: float, grad_norm: float
) -> None:
    """transformers would show a NaN as a loss of 0.0 and go on; it logs a step before it saves it, so an error here saves nothing."""
    with pytest.raises(NotFinite, match="step 3"):
        desk.stepped(3, loss, 0.1, {"grad_norm": grad_norm})
    (step,) = steps(desk)
    assert (step.loss is None) == (loss != 1.0)
    assert (step.grad_norm is None) == (grad_norm != 1.0)


def test_a_step_is_priced_and_its_own_metrics_are_kept(desk: Desk) -> None:
    desk.stepped(5, 1.5, 36.0, {"grad_norm": 0.5, "learning_rate": 1e-3, "tokens": 70.0, "reward": 0.4, "kl": NAN})
    (step,) = steps(desk)
    assert (step.loss, step.usd, step.eta_s, step.tokens) == (1.5, 0.01, 540.0, 70)
    assert step.metrics == {"reward": 0.4}


def test_a_phase_that_ends_early_is_never_done(desk: Desk) -> None:
    with pytest.raises(Interrupted, match="after step 3 of 20"):
        desk.ended(3, groups={}, losses=(None, None), metrics={})
    (end,) = read_events(desk.home.events)
    assert end.kind == "phase_end" and not end.complete


def test_a_long_step_can_be_told_from_a_hang(desk: Desk) -> None:
    assert desk.pulse.beat().in_step_s is None
    desk.pulse.begin_step("sft", 4)
    beat = desk.pulse.beat()
    assert (beat.phase, beat.step) == ("sft", 4) and beat.in_step_s is not None
    assert desk.pulse.end_step() >= 0 and desk.pulse.beat().in_step_s is None
