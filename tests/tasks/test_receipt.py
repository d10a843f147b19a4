from __future__ import annotations

import pytest

from tasks.domain import Attempt, Charge, Flight, Listing, Receipt, ReceiptLine, Span
from tasks.receipt import (
    _attempt_lines,
    _receipt,
    booked_for_good,
    booked_until,
    dollars,
    markdown,
    not_booked_yet,
    table,
    waste_by_reason,
)

CHARGES = [
    Charge(instance_id=7, kind="gpu", usd=0.60),
    Charge(instance_id=7, kind="disk", usd=0.06),
    Charge(instance_id=7, kind="down", usd=0.10),
    Charge(instance_id=7, kind="up", usd=0.02),
    Charge(instance_id=8, kind="gpu", usd=9.0),
]


def attempt(**changes: object) -> Attempt:
    spans = (
        Span(step="boot", started_at=0, ended_at=60, outcome="ok"),
        Span(step="prefetch", started_at=60, ended_at=120, outcome="ok"),
        Span(step="phase sft", started_at=120, ended_at=600, outcome="ok"),
        Span(step="upload sft", started_at=600, ended_at=660, outcome="ok"),
    )
    return Attempt(attempt=1, label="l", machine_id=1, offer_id=1, dph_usd=3.6, instance_id=7, ended="done").model_copy(
        update={"spans": spans, **changes}
    )


def test_every_dollar_of_a_box_is_on_one_of_its_lines_and_nobody_elses() -> None:
    lines = _attempt_lines(attempt(), CHARGES, now=660)
    assert sum(line.usd for line in lines) == pytest.approx(0.78, abs=1e-5)
    assert not any(line.wasted for line in lines)


def test_time_is_split_by_seconds_and_bytes_go_to_the_step_that_moved_them() -> None:
    by_step = {line.what: line.usd for line in _attempt_lines(attempt(), CHARGES, now=660)}
    assert by_step["boot"] == pytest.approx(0.06)
    assert by_step["prefetch"] == pytest.approx(0.06 + 0.10)
    assert by_step["upload sft"] == pytest.approx(0.06 + 0.02)
    assert by_step["phase sft"] == pytest.approx(0.48)


def test_bandwidth_is_on_the_receipt_by_its_direction_and_a_decision_with_its_costs() -> None:
    decision = "upload sft/40: 6.95 GB of 7.00 GB left at 3.0 Mbps; waiting $6.50, another box $1.23: the box is left"
    flown = Flight(
        flow_run_id="f",
        run="r",
        started_at=0,
        planned_usd=1.0,
        max_usd=2.0,
        market="vast",
        attempts=(attempt(decisions=(decision,)),),
        ended_at=660,
        outcome="completed",
    )
    receipt = _receipt(flown, Booked(), "flow", 660)  # type: ignore[arg-type]
    for text in (table(receipt), markdown(receipt)):
        assert "bytes down $0.1000" in text and "bytes up $0.0200" in text
        assert f"box 7: {decision}" in text


class Booked:
    """A market that has the charges above on its books, and nothing left."""

    owned = False

    def charges(self, ids: tuple[int, ...], since: float, until: float) -> list[Charge]:
        return [charge.model_copy(update={"until": until}) for charge in CHARGES if charge.instance_id in ids]

    def list_all(self) -> Listing:
        return Listing(instances=(), account_id="1", complete=True)


def test_a_box_that_did_nothing_of_use_is_wasted_whole_with_its_reason() -> None:
    lines = _attempt_lines(attempt(wasted=True, ended="driver 550, want 580"), CHARGES, now=660)
    assert all(line.wasted and line.reason == "driver 550, want 580" for line in lines)


def test_of_a_box_lost_in_mid_phase_only_what_was_not_durable_is_wasted() -> None:
    spans = (*attempt().spans[:2], Span(step="phase sft", started_at=120, ended_at=660, outcome="failed", wasted_s=54))
    lines = _attempt_lines(attempt(spans=spans, ended="host gone"), CHARGES, now=660)
    good, lost = [line for line in lines if line.what == "phase sft"]
    assert (good.wasted, lost.wasted, lost.reason) == (False, True, "host gone")
    assert lost.usd / (good.usd + lost.usd) == pytest.approx(0.1, abs=1e-4)


def test_the_second_box_after_a_loss_pays_its_way_to_the_first_step_once_more_and_that_is_wasted() -> None:
    """Without the loss its boot, install and prefetch, bytes included, would not have been paid."""
    lines = {line.what: line for line in _attempt_lines(attempt(attempt=2, after_loss="host gone"), CHARGES, now=660)}
    assert {what for what, line in lines.items() if line.wasted} == {"boot", "prefetch"}
    assert lines["prefetch"].reason == "second box after: host gone"
    assert lines["prefetch"].usd == pytest.approx(0.06 + 0.10), "the bytes of the second download as well"


def test_a_second_box_that_did_nothing_of_use_is_wasted_for_its_own_reason() -> None:
    lines = _attempt_lines(
        attempt(attempt=2, after_loss="host gone", wasted=True, ended="old driver"), CHARGES, now=660
    )
    assert {line.reason for line in lines} == {"old driver"}


def flight(**changes: object) -> Flight:
    facts = Flight(
        flow_run_id="f", run="r", started_at=0, planned_usd=1.0, max_usd=2.0, market="vast", attempts=(attempt(),)
    )
    return facts.model_copy(update=changes)


def booked(since: float | None, until: float | None, usd: float = 0.5) -> Charge:
    return Charge(instance_id=7, kind="gpu", usd=usd, since=since, until=until)


DAY = 86_400.0


def test_a_box_that_is_booked_to_where_it_was_last_seen_is_booked() -> None:
    assert not_booked_yet(flight(), [booked(0, 610)], now=700) == {}


def test_a_box_that_is_booked_in_part_is_told_with_the_moment() -> None:
    assert not_booked_yet(flight(), [booked(0, 300)], now=700) == {7: 300}


def test_a_charge_without_a_date_may_be_a_part() -> None:
    assert not_booked_yet(flight(), [booked(None, None)], now=700) == {7: None}


def test_a_market_that_books_by_the_day_is_whole_when_the_day_is_over() -> None:
    assert booked_until(booked(DAY, DAY), now=DAY + 700) == DAY
    assert booked_until(booked(DAY, DAY), now=2 * DAY) == 2 * DAY
    assert not_booked_yet(flight(), [booked(0, 0)], now=700) == {7: 0}
    assert not_booked_yet(flight(), [booked(0, 0)], now=DAY) == {}


def test_what_is_not_booked_when_the_next_day_is_over_never_will_be() -> None:
    assert not booked_for_good(660, now=2 * DAY - 1)
    assert booked_for_good(660, now=2 * DAY)
    assert not_booked_yet(flight(), [booked(0, 300)], now=2 * DAY) == {}


def receipt(**changes: object) -> Receipt:
    lines = tuple(_attempt_lines(attempt(attempt=2, after_loss="host gone"), CHARGES, now=660))
    given = Receipt(
        run="r",
        flow_run_id="f",
        outcome="completed",
        planned_usd=1.0,
        paid_usd=0.78,
        wasted_usd=0.22,
        charges={"gpu": 0.6},
        lines=lines,
        boxes=1,
        instances_left=0,
        written_by="flow",
        written_at=700.0,
        planned={"phase sft": 0.7, "set-up and bytes": 0.3},
    )
    return given.model_copy(update=changes)


def test_dollars_that_are_not_all_booked_are_called_so_far() -> None:
    part = receipt(so_far=True, booked_until=300.0)
    assert "paid so far $0.7800" in table(part) and "wasted so far $0.2200" in table(part)
    assert "paid so far **$0.7800**" in markdown(part)
    assert not part.final and receipt().final


def test_waste_is_added_up_by_reason_and_unknown_where_a_part_is() -> None:
    assert waste_by_reason(receipt()) == {"second box after: host gone": pytest.approx(0.22)}
    assert "wasted $0.2200 by: second box after: host gone" in table(receipt())
    unknown = ReceiptLine(
        what="boot", attempt=3, instance_id=9, hours=0, usd=None, wasted=True, reason="second box after: host gone"
    )
    both = receipt(lines=(*receipt().lines, unknown))
    assert waste_by_reason(both) == {"second box after: host gone": None}


def test_planned_stands_beside_paid_phase_by_phase() -> None:
    said = table(receipt())
    assert "phase sft: planned $0.7000, paid $0.4800, of it wasted $0.0000" in said
    assert "set-up and bytes: planned $0.3000, paid $0.3000, of it wasted $0.2200" in said


def test_an_offer_that_gave_no_box_costs_nothing_and_says_why() -> None:
    (line,) = _attempt_lines(attempt(instance_id=None, spans=(), ended="offer gone"), CHARGES, now=660)
    assert (line.usd, line.wasted, line.reason) == (0.0, True, "offer gone")


def test_unknown_dollars_are_called_unknown_and_never_zero() -> None:
    receipt = Receipt(
        run="r",
        flow_run_id="f",
        outcome="completed",
        planned_usd=None,
        paid_usd=None,
        wasted_usd=None,
        charges={},
        lines=(),
        boxes=1,
        instances_left=None,
        written_by="flow",
        written_at=0.0,
    )
    assert dollars(None) == "unknown"
    assert "paid unknown" in table(receipt) and "instances left: unknown" in table(receipt)
    assert "paid **unknown**" in markdown(receipt)
