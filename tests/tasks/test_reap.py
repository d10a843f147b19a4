from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tasks.domain import Lease
from tasks.errors import DestroyUnverified
from tasks.lease import hold, write_lease
from tasks.market.vast import VastMarket
from tasks.reap import LAST_SUCCESS, CannotSee, Sweep, sweep, text_table
from tests.tasks.pretend import FLOW_RUN, OTHER_RUN, Clock, Pretend, dead_store
from training.box.store import Store
from training.contract import layout

HOUR = 3600


class Reaper:
    def __init__(self, market: VastMarket, store: Store, pretend: Pretend, clock: Clock, tmp_path: Path) -> None:
        self.market, self.store, self.pretend, self.clock, self.tmp_path = market, store, pretend, clock, tmp_path
        self.settled: list[str] = []

    def sweep(
        self, *, dry_run: bool = False, only_run: str | None = None, store: Store | None = None, **changes: Any
    ) -> Sweep:
        return sweep(
            self.market,
            store or self.store,
            self.pretend.settings(self.tmp_path, **changes),
            dry_run=dry_run,
            only_run=only_run,
            clock=self.clock,
            sleep=self.clock.sleep,
            settle=lambda flow_run_id, by: self.settled.append(flow_run_id),
        )

    def lease(self, flow_run_id: str = FLOW_RUN, *, expires_in: float = 900) -> None:
        now = self.clock.now
        write_lease(self.store, Lease(flow_run_id=flow_run_id, run="r", renewed_at=now, expires_at=now + expires_in))

    @property
    def alive(self) -> set[int]:
        return {box.id for box in self.pretend.market.alive()}


@pytest.fixture
def reaper(market: VastMarket, store: Store, pretend: Pretend, clock: Clock, tmp_path: Path) -> Reaper:
    return Reaper(market, store, pretend, clock, tmp_path)


def test_a_box_whose_lease_expired_goes_and_the_receipt_is_written(reaper: Reaper) -> None:
    box = reaper.pretend.rented()
    reaper.lease()
    assert reaper.sweep().rows[0].action == "keep"
    reaper.clock.now += 901
    row = reaper.sweep().rows[0]
    assert (row.instance_id, row.outcome) == (box, "destroyed")
    assert not reaper.alive and reaper.settled == [FLOW_RUN]


def test_a_live_lease_of_another_run_does_not_save_it(reaper: Reaper) -> None:
    ours, theirs = reaper.pretend.rented(), reaper.pretend.rented(OTHER_RUN)
    reaper.clock.now += HOUR
    reaper.lease(OTHER_RUN)
    reaper.sweep()
    assert reaper.alive == {theirs} != {ours}


def test_foreign_boxes_are_listed_and_never_touched(reaper: Reaper) -> None:
    box = reaper.pretend.rented()
    reaper.pretend.market.contracts[box].label = "my own box"
    reaper.clock.now += 100 * HOUR
    row = reaper.sweep().rows[0]
    assert (row.action, reaper.alive) == ("keep", {box})


def test_the_hard_end_beats_a_live_lease(reaper: Reaper) -> None:
    reaper.pretend.rented(hours=2)
    reaper.clock.now += 2 * HOUR + 1
    reaper.lease()
    reaper.sweep()
    assert not reaper.alive


def test_a_held_box_is_kept_until_its_hold_ends(reaper: Reaper) -> None:
    box, now = reaper.pretend.rented(), reaper.clock.now
    hold(reaper.store, FLOW_RUN, "r", now=now, until=now + HOUR)
    reaper.clock.now += HOUR - 60
    reaper.sweep()
    assert reaper.alive == {box}
    reaper.clock.now += 120
    reaper.sweep()
    assert not reaper.alive


def test_a_dry_run_destroys_nothing(reaper: Reaper) -> None:
    reaper.pretend.rented()
    reaper.clock.now += HOUR
    row = reaper.sweep(dry_run=True).rows[0]
    assert row.outcome == "would be destroyed" and reaper.alive and not reaper.settled


def test_only_one_run_can_be_swept(reaper: Reaper) -> None:
    ours, theirs = reaper.pretend.rented(), reaper.pretend.rented(OTHER_RUN)
    reaper.clock.now += HOUR
    rows = reaper.sweep(only_run=FLOW_RUN).rows
    assert [row.instance_id for row in rows] == [ours] and reaper.alive == {theirs}


@pytest.mark.parametrize(
    "fault",
    [
        "list.bad_total@always",
        "list.missing_row@always",
        "list.null_fields@always",
        "list.410@always",
        "auth.session_expired_404@always",
    ],
)
def test_who_cannot_see_destroys_nothing_and_does_not_report_success(reaper: Reaper, fault: str) -> None:
    box = reaper.pretend.rented()
    reaper.clock.now += 20 * HOUR
    reaper.pretend.arm(fault)
    with pytest.raises(CannotSee) as caught:
        reaper.sweep()
    assert caught.value.exit_code == 4
    assert reaper.alive == {box} and reaper.pretend.count("DELETE", "/") == 0
    assert reaper.store.get_bytes(LAST_SUCCESS) is None


def test_a_bucket_that_cannot_be_read_is_unknown_and_fails_the_sweep(reaper: Reaper) -> None:
    box = reaper.pretend.rented()
    reaper.clock.now += HOUR
    result = reaper.sweep(store=dead_store())
    assert result.rows[0].action == "unknown" and reaper.alive == {box}
    with pytest.raises(CannotSee, match=str(box)):
        result.raise_if_bad()


def test_a_row_that_cannot_be_read_in_full_is_judged_by_its_label(reaper: Reaper) -> None:
    reaper.pretend.rented(hours=1)
    reaper.clock.now += HOUR + 1
    reaper.pretend.arm("list.one_malformed_row")
    assert reaper.sweep().rows[0].outcome == "destroyed"
    assert not reaper.alive


def test_a_destroy_that_does_not_take_fails_the_sweep_and_the_next_one_finishes_it(reaper: Reaper) -> None:
    box = reaper.pretend.rented()
    reaper.clock.now += HOUR
    reaper.pretend.arm("destroy.200_but_stays=1000@always")
    result = reaper.sweep()
    assert result.rows[0].outcome == "unverified"
    with pytest.raises(DestroyUnverified, match=str(box)):
        result.raise_if_bad()
    assert reaper.store.get_bytes(f"alarms/{FLOW_RUN}.json") is not None
    reaper.pretend.market.disarm("destroy.200_but_stays")
    assert reaper.sweep().rows[0].outcome == "destroyed"
    assert reaper.store.get_bytes(f"alarms/{FLOW_RUN}.json") is None


def test_more_than_the_ceiling_wait_for_the_next_sweep(reaper: Reaper) -> None:
    for _ in range(3):
        reaper.pretend.rented()
    reaper.clock.now += HOUR
    outcomes = [row.outcome for row in reaper.sweep(max_reap=2).rows]
    assert sorted(outcomes) == ["destroyed", "destroyed", "next sweep"]
    assert len(reaper.alive) == 1


def test_a_lease_that_comes_alive_at_the_last_moment_saves_its_box(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = reaper.pretend.rented()
    reaper.clock.now += HOUR
    answer = reaper.pretend.api.instances.show

    def renew_first(request: Any, id: int) -> Any:
        reaper.lease()
        return answer(request, id)

    for index, route in enumerate(reaper.pretend.api.routes):
        if route.handler == answer:
            reaper.pretend.api.routes[index] = type(route)(**{**route.__dict__, "handler": renew_first})
    assert reaper.sweep().rows[0].action == "keep"
    assert reaper.alive == {box}


def test_an_alarm_whose_box_is_gone_is_settled_and_one_whose_box_lives_is_not(reaper: Reaper) -> None:
    reaper.pretend.rented()
    reaper.lease()
    for flow_run_id in (FLOW_RUN, OTHER_RUN):
        reaper.store.put_bytes(f"alarms/{flow_run_id}.json", b"{}")
    reaper.sweep()
    assert [item.key for item in reaper.store.list("alarms/")] == [f"alarms/{FLOW_RUN}.json"]


def test_a_sweep_that_saw_everything_says_when(reaper: Reaper) -> None:
    reaper.sweep()
    assert json.loads(reaper.store.get_bytes(LAST_SUCCESS) or b"")["at"] == reaper.clock.now


def test_the_table_counts_every_box_and_its_price(reaper: Reaper) -> None:
    reaper.pretend.rented()
    reaper.pretend.rented(OTHER_RUN)
    reaper.lease()
    result = reaper.sweep(dry_run=True)
    text = text_table(result)
    assert "2 boxes" in text and "lease live" in text and FLOW_RUN in text
    assert result.dph_usd == pytest.approx(sum(box.dph_total_usd for box in reaper.pretend.market.alive()))


def _once(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    program = [sys.executable, "-X", "importtime", "-m", "flows.reaper", *arguments]
    return subprocess.run(program, capture_output=True, text=True, timeout=120, env=environ)


def test_the_reaper_runs_from_a_terminal_without_prefect(
    environment: dict[str, str], pretend: Pretend, store: Store
) -> None:
    """The pretend market's clock stands still in the year of the labels, the reaper's does not: the hard end decides."""
    pretend.clock.now = 1_700_000_000
    pretend.rented(hours=1)
    judged = _once(environment, "--once", "--dry-run")
    assert judged.returncode == 0 and "would be destroyed" in judged.stdout
    swept = _once(environment, "--once")
    assert swept.returncode == 0 and "hard end passed" in swept.stdout, swept.stderr[-2000:]
    assert not pretend.market.alive()
    assert " prefect" not in swept.stderr and " torch" not in swept.stderr


def test_exit_codes_tell_what_a_terminal_sweep_met(
    environment: dict[str, str], pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend.clock.now = 1_700_000_000
    pretend.rented(hours=1)
    pretend.arm("list.bad_total@always")
    assert _once(environment, "--once").returncode == 4
    monkeypatch.delenv("LIVERY_MARKET_API_KEY")
    assert _once(environment, "--once").returncode == 2
    assert pretend.market.alive()


@pytest.mark.parametrize(
    ("state", "taken"),
    [("written", False), ("created", False), ("refused", True), ("unresolved", True), ("destroyed", True)],
)
def test_a_box_that_came_to_light_after_its_run_gave_it_up_goes_though_the_run_lives(
    reaper: Reaper, state: str, taken: bool
) -> None:
    """A lost create reply may hide a box for longer than the run looks for it; the run goes on with its next one."""
    late = reaper.pretend.rented(attempt=1)
    present = reaper.pretend.rented(attempt=2)
    reaper.lease()
    label = reaper.pretend.market.contracts[late].label
    intent = {"flow_run_id": FLOW_RUN, "run": "r", "attempt": 1, "label": label, "account_id": "1", "offer_id": 1}
    intent |= {"machine_id": 1, "dph_usd": 1.0, "disk_gb": 100, "written_at": reaper.clock.now, "state": state}
    reaper.store.put_bytes(layout.intent(FLOW_RUN, 1), json.dumps(intent).encode())
    reaper.sweep()
    assert reaper.alive == ({present} if taken else {present, late})


@pytest.mark.parametrize("content", [b"{", b'{"label": "another"}'])
def test_an_intent_that_cannot_be_read_condemns_nobody(reaper: Reaper, content: bytes) -> None:
    box = reaper.pretend.rented()
    reaper.lease()
    reaper.store.put_bytes(layout.intent(FLOW_RUN, 1), content)
    reaper.sweep()
    assert reaper.alive == {box}
