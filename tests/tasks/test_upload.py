"""An uplink that will not make it: noticed in time, and handled by what costs least."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.errors import TransferFailed
from tasks.phase import RunView
from tasks.remote.ssh import Remote
from tasks.rules.stalls import patience_s
from tasks.rules.uplink import Decision, NewBox, Predicament
from tasks.upload import UplinkWatch, drop_half_sent, tell_to_send_less
from tests.tasks.remote.conftest import SshBox, box, key_path, link, login, remote  # noqa: F401
from training.box.folder import FolderStore
from training.contract import layout
from training.contract.claims import Claim
from training.contract.events import CheckpointDurable, CheckpointSaved, PhaseEnd, PhaseStart, Step, Transfer
from training.contract.recipe import Budget

MB = 1_000_000
BUDGET = Budget(max_usd=20)
THERE = NewBox(setup_s=1800, setup_usd=0.9, dph_usd=1.30, up_mbps=500, up_usd_gb=0.004)


class Uplink:
    """A watch on a clock that is moved by hand, and a box whose events are written by hand."""

    def __init__(self, budget: Budget = BUDGET, **changes: Any) -> None:
        self.now, self.budget, self.changes = 0.0, budget, changes
        self.view = RunView()
        self.told: list[str] = []
        self.decisions: list[Decision] = []
        self.seq = 0
        self.watch = UplinkWatch(budget, lambda: self.now, self._predicament, self.told.append, self.decisions.append)
        self.say(PhaseStart(phase="sft", step=0, max_steps=40))

    def _predicament(self, view: RunView, upload: Transfer, mbps: float) -> Predicament:
        seen = Predicament(
            what=upload.what,
            total_bytes=upload.total_bytes,
            left_bytes=upload.total_bytes - upload.done_bytes,
            light_bytes=upload.light_bytes,
            later_checkpoints=0,
            mbps=mbps,
            trains_s=0.0,
            unsaved_s=600.0,
            dph_usd=1.25,
            up_usd_gb=0.004,
            left_usd=20.0,
            left_s=36_000.0,
            new_box=THERE,
        )
        return replace(seen, **self.changes)

    def say(self, *events: Any) -> None:
        for event in events:
            self.seq += 1
            self.view.absorb([event.model_copy(update={"seq": self.seq, "t": self.now})])

    def end_phase(self) -> None:
        self.say(PhaseEnd(phase="sft", step=40, max_steps=40, complete=True))

    def sends(self, bytes_a_second: float, seconds: float, total: int = 7000 * MB, light: int | None = None) -> None:
        """Looks every three seconds, as the flow does."""
        began = self.now
        while self.now < began + seconds:
            done = int(bytes_a_second * (self.now - began))
            up: dict[str, Any] = {"what": "upload sft/40", "direction": "up", "mbps": 1.0, "light_bytes": light}
            self.say(Transfer(done_bytes=done, total_bytes=total, **up))
            self.watch(self.view)
            self.now += 3.0


def test_an_upload_in_time_is_left_alone() -> None:
    uplink = Uplink()
    uplink.sends(10 * MB, 600)
    assert not uplink.decisions


def test_an_uplink_of_0_38_MB_a_second_is_noticed_within_60_s_of_its_budget_rule_and_left() -> None:
    """One host uploaded 7 GB at 0.38 MB/s: five hours of idle GPU."""
    uplink = Uplink()
    uplink.end_phase()
    with pytest.raises(
        TransferFailed, match=r"at 3\.0 Mbps; waiting \$6\.\d+ .*another box \$1\.\d+ .*the box is left"
    ):
        uplink.sends(380_000, 3600)
    assert uplink.now <= patience_s(BUDGET.upload_s) + 60
    assert [decision.way for decision in uplink.decisions] == ["move"]


def test_a_link_is_judged_by_what_crosses_it_and_not_only_by_the_parts_that_are_acknowledged() -> None:
    uplink = Uplink()
    uplink.end_phase()
    up = {"what": "upload sft/40", "direction": "up", "done_bytes": 0, "total_bytes": 7000 * MB, "mbps": 3.0}

    def look_on() -> None:
        for uplink.now in range(0, 180, 3):
            uplink.say(Transfer(line_bytes=380_000 * int(uplink.now), **up))  # type: ignore[arg-type]
            uplink.watch(uplink.view)

    with pytest.raises(TransferFailed, match=r"7\.00 GB of 7\.00 GB left at 3\.0 Mbps; waiting \$6\.\d+"):
        look_on()
    assert uplink.now == 120


def test_it_is_noticed_while_training_still_goes_on_and_waited_for_since_nothing_is_idle() -> None:
    uplink = Uplink(trains_s=30_000.0)
    uplink.sends(380_000, 900)
    assert [decision.way for decision in uplink.decisions] == ["wait"], (
        "said once, though it is asked again every minute"
    )


def test_what_was_waited_for_is_left_when_that_becomes_cheaper() -> None:
    uplink = Uplink(trains_s=30_000.0)
    uplink.sends(380_000, 300)
    uplink.changes["trains_s"] = 0.0
    with pytest.raises(TransferFailed, match="the box is left"):
        uplink.sends(380_000, 600)
    assert [decision.way for decision in uplink.decisions] == ["wait", "move"]


def test_where_less_is_cheapest_the_box_is_told_so_once_and_what_it_then_sends_is_judged_anew() -> None:
    uplink = Uplink()
    uplink.end_phase()
    uplink.sends(380_000, 300, light=400 * MB)
    assert [decision.way for decision in uplink.decisions] == ["light"] and len(uplink.told) == 1
    assert "sending less $" in uplink.told[0]
    uplink.sends(380_000, 900, total=400 * MB)
    assert len(uplink.told) == 1 and len(uplink.decisions) == 1


def test_an_upload_that_stands_still_is_given_up_after_the_box_itself_has_tried_three_ways() -> None:
    uplink = Uplink()
    with pytest.raises(TransferFailed, match="no byte for"):
        uplink.sends(0, 3600)
    assert 3 * BUDGET.stall_s < uplink.now < 4 * BUDGET.stall_s


def test_after_training_something_is_sent_within_the_budget_or_the_box_is_left() -> None:
    uplink = Uplink()
    uplink.end_phase()
    for uplink.now in range(0, BUDGET.upload_s, 3):
        uplink.watch(uplink.view)
    uplink.now = BUDGET.upload_s + 1
    with pytest.raises(TransferFailed, match="nothing was sent for 1501 s after training"):
        uplink.watch(uplink.view)


def test_nothing_is_expected_of_a_phase_that_trains_or_is_durable() -> None:
    uplink = Uplink()
    uplink.now = 1e6
    uplink.watch(uplink.view)
    uplink.end_phase()
    uplink.say(CheckpointDurable(phase="sft", step=40, manifest="m", bytes=1, seconds=1, complete=True))
    for uplink.now in (2e6, 3e6):
        uplink.watch(uplink.view)


def test_what_a_new_box_would_do_again_is_the_training_since_the_last_checkpoint_in_the_bucket() -> None:
    uplink = Uplink()
    step = {"phase": "sft", "max_steps": 40, "loss": 1.0, "seconds": 1.0}
    uplink.now = 100.0
    uplink.say(Step(step=10, **step), CheckpointSaved(phase="sft", step=10, bytes=1))
    assert uplink.view.unsaved_s() == 100
    uplink.now = 160.0
    uplink.say(Step(step=16, **step))
    uplink.say(CheckpointDurable(phase="sft", step=10, manifest="m", bytes=1, seconds=1, complete=False))
    assert uplink.view.unsaved_s() == 60, "it became durable at step 16 and holds step 10"


def test_the_upload_under_way_is_the_one_that_spoke_last() -> None:
    view, up = RunView(), {"direction": "up", "done_bytes": 1, "total_bytes": 9, "mbps": 1.0}
    view.absorb([PhaseStart(phase=name, step=0, max_steps=1) for name in ("cpt", "sft")])
    view.absorb([Transfer(what=f"upload {name}/1", seq=seq, **up) for seq, name in ((1, "cpt"), (2, "sft"))])
    assert view.uploading() is not None and view.uploading().what == "upload sft/1"  # type: ignore[union-attr]
    view.absorb([Transfer(what="upload sft/1", seq=3, finished=True, **up)])
    assert view.uploading() is None, "the older one was dropped for it"


def test_the_word_to_send_less_lies_whole_on_the_box(remote: Remote, box: SshBox) -> None:  # noqa: F811
    tell_to_send_less(remote, "upload sft/40: at 3.0 Mbps")
    told = json.loads((box.home / layout.BOX_UPLINK).read_text())
    assert told == {"send": "light", "reason": "upload sft/40: at 3.0 Mbps"}


@pytest.mark.parametrize(("newest", "left"), [("ours", 0), ("anothers", 1), ("unreadable", 1), ("nobodys", 1)])
def test_what_a_runs_boxes_left_half_sent_goes_with_them_unless_it_may_be_anothers(
    tmp_path: Path, newest: str, left: int
) -> None:
    store = FolderStore(tmp_path)
    half = tmp_path / "runs" / "r" / "blobs" / ".unfinished-abc"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    claim = Claim(number=1, runner="x", flow_run_id=newest, at=0.0).model_dump_json().encode()
    if newest != "nobodys":
        store.put_bytes(layout.claim("r", 1), b"{" if newest == "unreadable" else claim)
    drop_half_sent(store, "r", "ours")
    assert half.exists() == bool(left)
