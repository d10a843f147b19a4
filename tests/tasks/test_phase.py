"""What the events say, folded into a view, and what the view says about an upload."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.artifacts import Progress, phase_rows
from tasks.errors import TransferFailed
from tasks.phase import RunView, duration
from tasks.upload import UplinkWatch
from tests.tasks.pretend import recipe
from training.contract.events import CheckpointDurable, Heartbeat, PhaseEnd, PhaseStart, RunnerStart, Step, Transfer
from training.contract.recipe import Budget

BUDGET = Budget(max_usd=1, upload_s=100, stall_s=15)


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


def uploading(done_bytes: int, total: int = 10_000_000, mbps: float = 1.0) -> RunView:
    view = RunView()
    view.absorb(
        [
            PhaseStart(phase="sft", step=0, max_steps=1),
            PhaseEnd(phase="sft", step=1, max_steps=1, complete=True),
            Transfer(what="upload sft/1", direction="up", done_bytes=done_bytes, total_bytes=total, mbps=mbps),
        ]
    )
    return view


def watch_upload(bytes_a_second: float, seconds: int, total: int = 10_000_000) -> None:
    now = [0.0]
    watch = UplinkWatch("sft", BUDGET, lambda: now[0])
    for second in range(seconds):
        now[0] = float(second)
        watch(uploading(int(bytes_a_second * second), total))


def test_an_upload_in_time_is_left_alone() -> None:
    watch_upload(bytes_a_second=200_000, seconds=50)


def test_an_uplink_of_0_38_MB_a_second_is_given_up_long_before_its_budget_is_spent() -> None:
    """One host uploaded 7 GB at 0.38 MB/s: five hours of idle GPU. Here 100 MB have 100 s."""
    with pytest.raises(TransferFailed, match="Mbps"):
        watch_upload(bytes_a_second=380_000, seconds=60, total=100_000_000)


def test_an_upload_that_stands_still_is_given_up() -> None:
    with pytest.raises(TransferFailed, match="no byte for"):
        watch_upload(bytes_a_second=0, seconds=20)


def test_an_upload_is_not_judged_while_the_phase_still_trains() -> None:
    watch = UplinkWatch("sft", BUDGET, lambda: 1e9)
    watch(RunView())


def test_a_checkpoint_that_waits_for_its_turn_is_given_its_whole_budget_and_no_more() -> None:
    now = [0.0]
    watch = UplinkWatch("sft", BUDGET, lambda: now[0])
    view = RunView()
    view.absorb([PhaseEnd(phase="sft", step=1, max_steps=1, complete=True)])
    for now[0] in range(100):
        watch(view)
    now[0] = 101
    with pytest.raises(TransferFailed, match="not durable 101 s after training"):
        watch(view)


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
