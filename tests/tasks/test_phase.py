"""What the events say, folded into a view, and what the view says about an upload."""

from __future__ import annotations

import pytest

from tasks.errors import TransferFailed
from tasks.phase import RunView
from tasks.upload import UplinkWatch
from training.contract.events import CheckpointDurable, PhaseEnd, PhaseStart, RunnerStart, Step, Transfer
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
