from __future__ import annotations

from typing import Any

import pytest

from tasks.domain import Instance
from tasks.rules.interruption import contract_ending, lost_by_row, money_over, price_rise, time_over
from training.contract.recipe import Budget

NOW = 1_799_000_000.0
STOPPED = {"cur_state": "stopped", "intended_status": "stopped", "next_state": "stopped", "actual_status": "stopped"}


def _lost(silent_s: float = 30.0, **row: Any) -> tuple[str, str, str]:
    loss = lost_by_row(Instance(id=7, **row), now=NOW, silent_s=silent_s)
    return (loss.sentence, loss.blame, loss.fault) if loss else ("", "", "")


def test_an_outbid_box_is_lost_at_once_and_its_machine_is_innocent() -> None:
    assert _lost(silent_s=0, is_bid=True, **STOPPED) == ("outbid", "other", "outbid")


def test_a_box_that_its_host_took_back_is_lost_at_once_and_blamed() -> None:
    assert _lost(silent_s=0, is_bid=False, **STOPPED)[1] == "host"
    assert _lost(silent_s=0, actual_status="exited")[1] == "host"


def test_a_contract_that_has_ended_blames_nobody() -> None:
    assert _lost(end_date=NOW - 1, is_bid=True, **STOPPED) == ("its contract has ended", "other", "contract")


def test_a_box_that_the_market_no_longer_has_is_lost() -> None:
    loss = lost_by_row(None, now=NOW, silent_s=0)
    assert loss is not None and loss.sentence == "the market no longer has it"


@pytest.mark.parametrize("state", ["offline", "unknown"])
def test_a_host_out_of_sight_may_come_back_for_two_minutes(state: str) -> None:
    assert _lost(silent_s=119, actual_status=state) == ("", "", "")
    assert "has not answered for 120 s" in _lost(silent_s=120, actual_status=state)[0]


@pytest.mark.parametrize("state", ["running", "rebooting", "loading", "scheduling", None])
def test_a_state_that_says_nothing_of_an_end_ends_nothing(state: str | None) -> None:
    assert _lost(silent_s=1e6, actual_status=state) == ("", "", "")


def test_a_contract_is_left_when_there_is_just_time_to_save() -> None:
    assert contract_ending(NOW + 301, now=NOW, save_s=300, rest_s=900) == ""
    assert "ends in 300 s" in contract_ending(NOW + 300, now=NOW, save_s=300, rest_s=900)
    assert contract_ending(NOW + 300, now=NOW, save_s=300, rest_s=0) == "", "its last upload is under way"
    assert contract_ending(None, now=NOW, save_s=300, rest_s=900) == "", "a market that does not say ends nothing"


def _rise(seen: float, **changes: Any) -> str:
    given: dict[str, Any] = {"cap_usd": 1.3, "rest_s": 3600, "spent_usd": 5.0, "max_usd": 10.0, "elsewhere_usd": 2.0}
    return price_rise(1.0, seen, **{**given, **changes})


def test_a_price_over_the_recipes_cap_is_left() -> None:
    assert _rise(1.31) == "its price rose from $1.000/h to $1.310/h, box.max_dph_usd = $1.30"


def test_a_rise_that_cap_and_budget_bear_is_borne() -> None:
    assert _rise(1.3) == ""
    assert _rise(0.5, rest_s=1e9) == "", "a price that falls is no reason to go"


def test_a_rise_that_the_budget_does_not_bear_is_left_only_if_another_box_would_end_the_run() -> None:
    assert "the rest takes $5.20 here and $2.00 on another box, budget.max_usd = $10.00" in _rise(1.3, rest_s=4 * 3600)
    assert _rise(1.3, rest_s=4 * 3600, elsewhere_usd=None) == ""
    assert _rise(1.3, rest_s=4 * 3600, elsewhere_usd=6.0) == "", "then what is left is better trained with here"


def test_the_last_save_is_kept_back_from_the_money_but_never_more_than_a_tenth() -> None:
    budget = Budget(max_usd=10.0)
    assert money_over(budget, spent_usd=9.49, dph_usd=3.0, save_s=600) == ""
    assert "saving takes about $0.50" in money_over(budget, spent_usd=9.5, dph_usd=3.0, save_s=600)
    assert money_over(budget, spent_usd=8.9, dph_usd=100.0, save_s=600) == ""
    assert money_over(budget, spent_usd=9.0, dph_usd=100.0, save_s=600)


def test_the_last_save_is_kept_back_from_the_hours_but_never_more_than_a_tenth() -> None:
    budget = Budget(max_usd=1.0, max_hours=1.0)
    assert time_over(budget, now=NOW, deadline=NOW + 301, save_s=300) == ""
    assert time_over(budget, now=NOW, deadline=NOW + 300, save_s=300).endswith("is over in 300 s, which saving takes")
    assert time_over(budget, now=NOW, deadline=NOW + 361, save_s=9000) == ""
    assert time_over(budget, now=NOW, deadline=NOW - 1, save_s=0) == "budget.max_hours = 1 is over"
