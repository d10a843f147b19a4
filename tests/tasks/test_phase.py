"""What the events say, folded into a view."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.artifacts import Progress, phase_rows
from tasks.phase import RunView, duration
from tests.tasks.pretend import recipe
from training.contract.events import CheckpointDurable, Heartbeat, PhaseEnd, PhaseStart, RunnerStart, Step
from training.contract.recipe import Budget


def test_the_first_and_the_last_loss_are_those_of_the_steps_seen() -> None:
    view = RunView()
    view.absorb(
        [
            PhaseStart(phase="sft", step=0, max_steps=3),
            *(
                Step(phase="sft", step=n, max_steps=3, loss=loss, seconds=1.0)
                for n, loss in ((1, 5.0), (2, None), (3, 0.5))
            ),
        ]
    )
    assert (view.phase("sft").loss_first, view.phase("sft").loss_last, view.phase("sft").step) == (5.0, 0.5, 3)
    assert view.phase("sft").percent == 100


def test_a_phase_is_durable_only_with_its_last_manifest() -> None:
    view = RunView()
    for complete in (False, True):
        view.absorb(
            [CheckpointDurable(phase="sft", step=1, manifest="m", bytes=1, seconds=1, complete=complete, t=5.0)]
        )
        assert view.phase("sft").durable_complete is complete
    assert view.last_durable_at() == 5.0


def test_phases_done_on_an_earlier_box_are_known_from_the_runners_first_word() -> None:
    view = RunView()
    view.absorb([RunnerStart(phases=("cpt", "sft"), done=("cpt",))])
    assert view.done_before == ("cpt",)


def step(number: int, **changes: Any) -> Step:
    given: dict[str, Any] = {
        "phase": "sft",
        "step": number,
        "max_steps": 4,
        "loss": 1.0,
        "seconds": 2.0,
        "tokens": 8000,
    }
    given |= {"tokens_per_s": 4000.0, "mfu": 0.2, "mfu_peak": "measured", "usd": 0.001, "usd_total": 0.25}
    return Step.model_validate({**given, "eta_s": (4 - number) * 60.0, **changes})


def test_the_sentence_tells_pace_price_and_what_is_left() -> None:
    view = RunView()
    view.absorb([step(1)])
    assert view.phase("sft").sentence == (
        "sft step 1/4, loss 1.0000, 2.00 s a step, 4,000 tok/s, MFU 20.0 % of the measured peak, $0.25 on this box so far, "
        "3 min left in this phase"
    )


def test_what_is_not_known_is_left_out_and_never_shown_as_zero() -> None:
    view = RunView()
    view.absorb([step(4, tokens=None, tokens_per_s=None, mfu=None, mfu_peak=None, usd=None, usd_total=None, eta_s=0.0)])
    assert view.phase("sft").sentence == "sft step 4/4, loss 1.0000, 2.00 s a step"
    pace = view.phase("sft").pace
    assert (pace.step_s, pace.tokens_per_s, pace.mfu) == (2.0, None, None)


def test_the_pace_of_a_phase_is_the_mean_over_its_steps_and_not_the_last_one() -> None:
    view = RunView()
    view.absorb([step(1, seconds=1.0, tokens=1000, mfu=0.4), step(2, seconds=3.0, tokens=1000, mfu=0.2)])
    pace = view.phase("sft").pace
    assert (pace.step_s, pace.tokens_per_s) == (2.0, 500.0)
    assert pace.mfu == pytest.approx((0.4 * 1 + 0.2 * 3) / 4) and pace.usd == pytest.approx(0.002)


def test_the_table_of_phases_and_the_progress_show_the_pace() -> None:
    wanted = recipe(phases=[{"kind": "sft", "data": "bucket:x", "steps": 4, "learning_rate": 1e-4}])
    view = RunView()
    view.absorb([step(number) for number in range(1, 5)])
    view.absorb([Heartbeat(gpu_util_percent=97.0, gpu_power_w=641.0)])
    percent, sentence = Progress(wanted).state(view)
    assert percent == 100.0 and sentence.endswith("; GPU 97 % busy, 641 W")
    view.absorb([PhaseEnd(phase="sft", step=4, max_steps=4, complete=True)])
    (row,) = phase_rows(wanted, view, {})
    assert (row["s a step"], row["tok/s"], row["MFU"], row["$ of steps"]) == ("2.00", "4,000", "20.0 %", "0.0040")


@pytest.mark.parametrize(("seconds", "said"), [(45, "45 s"), (600, "10 min"), (12_240, "3.4 h")])
def test_durations_are_told_as_a_person_would(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_the_newest_checkpoint_tells_how_long_the_last_one_will_take() -> None:
    view = RunView()
    assert (view.upload_s(), view.step_s()) == (None, 0.0)
    for phase, at, seconds in (("sft", 2.0, 70.0), ("cpt", 1.0, 5.0)):
        view.absorb(
            [CheckpointDurable(phase=phase, step=1, manifest="m", bytes=1, seconds=seconds, complete=False, t=at)]
        )
    view.absorb([step(1, seconds=3.0)])
    assert (view.upload_s(), view.step_s()) == (70.0, 3.0)


def test_a_runner_told_to_stop_gets_time_for_a_checkpoint_of_the_35b() -> None:
    """11.4 GB at the 200 Mbps that its recipe asks for."""
    assert Budget(max_usd=1).last_upload_s >= 11.4 * 8000 / 200
