from __future__ import annotations

import pytest

from tasks.domain import Attempt, Charge, Receipt, Span
from tasks.receipt import _attempt_lines, dollars, markdown, table

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


def test_a_box_that_did_nothing_of_use_is_wasted_whole_with_its_reason() -> None:
    lines = _attempt_lines(attempt(wasted=True, ended="driver 550, want 580"), CHARGES, now=660)
    assert all(line.wasted and line.reason == "driver 550, want 580" for line in lines)


def test_of_a_box_lost_in_mid_phase_only_what_was_not_durable_is_wasted() -> None:
    spans = (*attempt().spans[:2], Span(step="phase sft", started_at=120, ended_at=660, outcome="failed", wasted_s=54))
    lines = _attempt_lines(attempt(spans=spans, ended="host gone"), CHARGES, now=660)
    good, lost = [line for line in lines if line.what == "phase sft"]
    assert (good.wasted, lost.wasted, lost.reason) == (False, True, "host gone")
    assert lost.usd / (good.usd + lost.usd) == pytest.approx(0.1, abs=1e-4)


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
