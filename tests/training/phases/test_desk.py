from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.conftest import desk_of, place_box, recipe_of
from training.contract.events import Step, read_events
from training.phases.desk import Desk, Interrupted, NotFinite

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    box = place_box(tmp_path / "box", {}, recipe_of("counting"), "desk", bucket=f"folder:{tmp_path / 'bucket'}")
    desk = desk_of(box, "sft")
    yield desk
    desk.uploader.close()


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
    norms = {"attention": 0.5, "linear_attention": NAN}
    metrics = {"grad_norm": 0.5, "learning_rate": 1e-3, "reward": 0.4, "kl": NAN}
    desk.stepped(5, 1.5, 36.0, metrics, tokens=720, rows=2, grad_norms=norms)
    (step,) = steps(desk)
    assert (step.loss, step.usd, step.eta_s, step.tokens, step.tokens_per_s) == (1.5, 0.01, 540.0, 720, 20.0)
    assert step.metrics == {"reward": 0.4} and step.grad_norms == {"attention": 0.5}
    assert step.usd_total is not None and 0 < step.usd_total < 0.1, "since the runner started, at $1 an hour"


def test_without_a_card_there_is_no_utilisation(desk: Desk) -> None:
    desk.stepped(1, 1.0, 1.0, {}, tokens=100, rows=1)
    (step,) = steps(desk)
    assert step.mfu is None and step.mfu_peak is None


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
