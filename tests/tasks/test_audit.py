"""The next day, when the market has booked: did billing stop, is every receipt whole, was anything billed that is nobody's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from flows.__main__ import main
from tasks import alarms
from tasks.audit import DAYS, REAPER_SILENT_S, Audit, audit
from tasks.destroy import destroy_run
from tasks.domain import Attempt, Charge, Flight, Intent, Lease, Receipt, Span
from tasks.errors import DestroyUnverified, MarketError
from tasks.lease import write_lease
from tasks.market.vast import VastMarket
from tasks.receipt import read_receipt, write_receipt
from tests.tasks.pretend import FLOW_RUN, NOW, OTHER_RUN, Clock, Pretend
from training.box.folder import FolderStore
from training.box.store import Store
from training.contract import layout

HOUR, DAY = 3600.0, 86_400.0
RUN = "tools-35b"


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return FolderStore(tmp_path / "bucket")


class Books:
    """A run that had one box for an hour, and the day after it."""

    def __init__(self, pretend: Pretend, market: VastMarket, store: Store, clock: Clock) -> None:
        self.pretend, self.market, self.store, self.clock = pretend, market, store, clock
        self.box = pretend.rented()
        self.label = str(pretend.market.contracts[self.box].label)
        self.intent()
        clock.sleep(HOUR)
        spans = (
            Span(step="boot", started_at=NOW, ended_at=NOW + 60, outcome="ok"),
            Span(step="phase sft", started_at=NOW + 60, ended_at=NOW + HOUR, outcome="ok"),
        )
        attempt = Attempt(
            attempt=1,
            label=self.label,
            machine_id=1,
            offer_id=1,
            dph_usd=1.0,
            instance_id=self.box,
            spans=spans,
            ended="done",
        )
        self.flight = Flight(
            flow_run_id=FLOW_RUN,
            run=RUN,
            started_at=NOW,
            planned_usd=1.0,
            max_usd=2.0,
            market="vast",
            attempts=(attempt,),
            ended_at=NOW + HOUR,
            outcome="completed",
        )
        self.store.put_bytes(layout.flight(FLOW_RUN), self.flight.model_dump_json().encode())

    def intent(self, flow_run_id: str = FLOW_RUN, **changes: Any) -> None:
        facts: dict[str, Any] = {"flow_run_id": flow_run_id, "run": RUN, "attempt": 1, "label": self.label}
        facts |= {"account_id": "71500", "offer_id": 1, "machine_id": 1, "dph_usd": 1.0, "disk_gb": 10}
        facts |= {"written_at": NOW, "state": "created", "instance_id": self.box}
        intent = Intent(**{**facts, **changes})
        self.store.put_bytes(layout.intent(flow_run_id, intent.attempt), intent.model_dump_json().encode())

    def read_intent(self, attempt: int = 1) -> Intent:
        return Intent.model_validate_json(self.store.get_bytes(layout.intent(FLOW_RUN, attempt)) or b"")

    def give_back(self) -> None:
        assert destroy_run(self.market, FLOW_RUN, clock=self.clock, sleep=self.clock.sleep, store=self.store).clean

    def bill(self) -> Receipt:
        made = write_receipt(self.store, self.market, FLOW_RUN, "flow", now=self.clock.now)
        assert made is not None
        return made

    def receipt(self) -> Receipt:
        found = read_receipt(self.store, RUN, FLOW_RUN)
        assert found is not None
        return found

    def audit(self, reaper_ago_s: float = 60.0) -> Audit:
        _swept(self, reaper_ago_s)
        return audit(self.market, self.store, now=self.clock.now, days=400)


@pytest.fixture
def books(pretend: Pretend, market: VastMarket, folder: Store, clock: Clock) -> Books:
    return Books(pretend, market, folder, clock)


def test_a_run_that_was_paid_and_ended_is_well(books: Books) -> None:
    books.give_back()
    books.bill()
    books.clock.sleep(DAY)
    found = books.audit()
    (run,) = found.runs
    assert (run.outcome, run.finding, run.bad) == ("completed", "", False) and not found.standing
    found.raise_if_bad()


def test_a_receipt_that_stayed_unknown_is_finished(books: Books) -> None:
    books.pretend.arm("charges.lag=7200")
    books.give_back()
    assert books.bill().paid_usd is None
    assert books.audit().runs[0].finding == "its receipt is not whole yet"
    books.clock.sleep(DAY)
    assert books.audit().runs[0].finding == "its receipt is whole now"
    receipt = books.receipt()
    assert receipt.final and receipt.written_by == "audit" and receipt.outcome == "completed"
    assert receipt.paid_usd == pytest.approx(books.pretend.market.total_usd(), abs=1e-5)
    assert books.audit().runs[0].finding == "", "nothing is left to do"


def test_a_receipt_that_nobody_could_write_is_written(books: Books) -> None:
    books.give_back()
    assert read_receipt(books.store, RUN, FLOW_RUN) is None
    books.audit()
    assert books.receipt().final


def test_a_box_that_is_billed_after_it_was_seen_gone_is_an_alarm(books: Books) -> None:
    books.give_back()
    books.bill()
    contract = books.pretend.market.contracts[books.box]
    assert contract.ended_at is not None
    contract.ended_at += 2 * HOUR
    books.clock.sleep(DAY)
    found = books.audit()
    (alarm,) = found.standing
    assert (alarm.what, alarm.subject, alarm.instances) == ("billed_after_destroy", FLOW_RUN, (books.box,))
    assert "was seen gone at" in alarm.reason and "billed until" in alarm.reason and alarm.spent_usd
    with pytest.raises(DestroyUnverified, match=f"box {books.box}"):
        found.raise_if_bad()
    contract.ended_at -= 2 * HOUR
    assert not books.audit().standing, "the market took it back"


def test_a_booking_that_ends_a_little_after_the_box_is_no_alarm(books: Books) -> None:
    books.give_back()
    books.bill()
    contract = books.pretend.market.contracts[books.box]
    assert contract.ended_at is not None
    contract.ended_at += 300
    books.clock.sleep(DAY)
    assert not books.audit().standing


@pytest.mark.parametrize(("day", "late"), [(0, False), (1, True)])
def test_of_a_market_that_books_by_the_day_only_a_later_day_is_after_the_destroy(
    books: Books, monkeypatch: pytest.MonkeyPatch, day: int, late: bool
) -> None:
    books.give_back()
    books.bill()
    midnight = books.clock.now // DAY * DAY + day * DAY
    by_day = Charge(instance_id=books.box, kind="gpu", usd=0.5, since=midnight, until=midnight, label=books.label)
    monkeypatch.setattr(books.market, "charges", lambda ids, since, until: [by_day])
    books.clock.sleep(2 * DAY)
    assert bool(books.audit().standing) is late


@pytest.mark.parametrize("label", [None, f"livery:{OTHER_RUN}:1:{int(NOW + 8 * HOUR)}"])
def test_a_billed_box_that_no_run_owns_is_an_alarm_with_its_dollars(books: Books, label: str | None) -> None:
    books.give_back()
    books.bill()
    stray = books.pretend.rented(OTHER_RUN)
    books.pretend.market.contracts[stray].label = label
    books.clock.sleep(HOUR)
    found = books.audit()
    (alarm,) = found.standing
    assert (alarm.what, alarm.subject) == ("billed_without_owner", f"box-{stray}")
    assert alarm.dph_usd and alarm.spent_usd and "is still listed" in alarm.reason
    with pytest.raises(DestroyUnverified):
        found.raise_if_bad()


def test_a_box_that_the_accounts_owner_labelled_is_his(books: Books) -> None:
    books.give_back()
    stray = books.pretend.rented(OTHER_RUN)
    books.pretend.market.contracts[stray].label = "my own box"
    books.clock.sleep(HOUR)
    assert not books.audit().standing


def test_a_billed_box_whose_label_a_run_knows_comes_on_that_runs_bill(books: Books) -> None:
    """Its create reply was lost and it showed after everybody had stopped looking."""
    books.intent(attempt=2, label="of the second", state="unresolved", instance_id=None)
    second = books.pretend.rented(attempt=2)
    books.pretend.market.contracts[second].label = label = f"livery:{FLOW_RUN}:2:{int(NOW + 9 * HOUR)}"
    books.intent(attempt=2, label=label, state="unresolved", instance_id=None)
    attempts = (*books.flight.attempts, books.flight.attempts[0].model_copy(update={"attempt": 2, "label": label, "instance_id": None, "spans": (), "ended": "no answer", "wasted": True}))  # fmt: skip
    books.store.put_bytes(
        layout.flight(FLOW_RUN), books.flight.model_copy(update={"attempts": attempts}).model_dump_json().encode()
    )
    books.market.destroy(second)
    books.give_back()
    books.audit()
    assert books.read_intent(2).instance_id == second
    receipt = books.receipt()
    assert receipt.boxes == 2 and receipt.paid_usd == pytest.approx(books.pretend.market.total_usd(), abs=1e-5)


def test_an_intent_without_answer_is_closed_when_a_day_has_shown_no_box_and_no_charge(books: Books) -> None:
    books.intent(attempt=2, label=f"livery:{FLOW_RUN}:2:{int(NOW + HOUR)}", state="unresolved", instance_id=None)
    books.give_back()
    books.audit()
    assert books.read_intent(2).state == "unresolved"
    books.clock.sleep(DAY)
    books.audit()
    assert (books.read_intent(2).state, books.read_intent(2).closed_at) == ("refused", books.clock.now)


def test_a_run_that_goes_on_is_left_alone(books: Books) -> None:
    running = books.flight.model_copy(update={"outcome": "running", "ended_at": None})
    books.store.put_bytes(layout.flight(FLOW_RUN), running.model_dump_json().encode())
    now = books.clock.now
    write_lease(books.store, Lease(flow_run_id=FLOW_RUN, run=RUN, renewed_at=now, expires_at=now + 900))
    (run,) = books.audit().runs
    assert run.outcome == "running" and read_receipt(books.store, RUN, FLOW_RUN) is None


def test_an_audit_that_cannot_read_the_charges_says_nothing_is_well(
    books: Books, pretend: Pretend, tmp_path: Path
) -> None:
    books.market = pretend.client(tmp_path, key="revoked")
    with pytest.raises(MarketError):
        books.audit()


def _swept(books: Books, ago_s: float) -> None:
    books.store.put_bytes(layout.REAPER_LAST_SUCCESS, json.dumps({"at": books.clock.now - ago_s}).encode())


def test_a_reaper_that_has_seen_nothing_for_two_periods_is_an_alarm_with_what_bills(books: Books) -> None:
    (alarm,) = books.audit(REAPER_SILENT_S + 1).standing
    assert (alarm.what, alarm.subject, alarm.instances) == ("reaper_silent", "reaper", (books.box,))
    assert alarm.dph_usd == pytest.approx(books.pretend.market.alive()[0].dph_total_usd)
    assert not books.audit().standing


def test_a_reaper_that_never_was_is_told_only_where_a_box_needs_one(books: Books) -> None:
    assert [alarm.what for alarm in audit(books.market, books.store, now=books.clock.now).standing] == ["reaper_silent"]
    books.give_back()
    alarms.clear(books.store, "reaper")
    assert not audit(books.market, books.store, now=books.clock.now).standing


def test_runs_of_other_days_are_not_asked_for(books: Books) -> None:
    books.give_back()
    found = audit(books.market, books.store, now=books.clock.now + 400 * DAY, days=DAYS)
    assert not found.runs


def test_a_box_of_days_that_were_audited_before_is_not_called_nobodys(books: Books, tmp_path: Path) -> None:
    """Charges of the day before the first are read too, for runs that span it; the record of a run that ended there is not."""
    books.give_back()
    books.pretend.market.contracts[books.box].label = None
    os.utime(tmp_path / "bucket" / layout.flight(FLOW_RUN), (NOW + HOUR, NOW + HOUR))
    books.clock.sleep(3.5 * DAY)
    _swept(books, 60)
    found = audit(books.market, books.store, now=books.clock.now, days=3)
    assert not found.runs and not found.ownerless


def test_the_audit_is_a_command_that_tells_and_fails_where_something_is_wrong(
    environment: dict[str, str], pretend: Pretend, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit"]) == 0
    assert "audit: 0 runs" in capsys.readouterr().out
    pretend.clock.now = 1_790_000_000
    stray = pretend.rented()
    pretend.market.contracts[stray].label = None
    assert main(["audit", "--days", "4000"]) == 5
    said = capsys.readouterr()
    assert f"box-{stray}" in said.out and "carries no label" in said.err
