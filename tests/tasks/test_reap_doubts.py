"""Sweeps in which the market or the bucket shows half of the truth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tasks.domain import Intent
from tasks.errors import DestroyUnverified
from tasks.reap import CannotSee
from tests.tasks.pretend import FLOW_RUN, OTHER_RUN
from tests.tasks.sweeping import HOUR, Reaper
from training.contract import layout


def _intent(reaper: Reaper, attempt: int = 1) -> Intent:
    return Intent.model_validate_json(reaper.store.get_bytes(layout.intent(FLOW_RUN, attempt)) or b"")


def test_the_second_box_of_one_create_call_goes_though_it_shows_late_and_the_lease_lives(reaper: Reaper) -> None:
    """An offer can be accepted twice, and a listing may hide the second box for longer than the run looks for it."""
    box, twin = reaper.rented(), reaper.pretend.rented(offer=0)
    reaper.pretend.market.contracts[twin].label = reaper.pretend.market.contracts[box].label
    reaper.clock.now += HOUR
    reaper.lease()
    rows = {row.instance_id: row for row in reaper.sweep().rows}
    assert rows[box].action == "keep" and rows[twin].outcome == "destroyed", rows[twin].reason
    assert reaper.alive == {box}
    assert (_intent(reaper).state, _intent(reaper).also_ids) == ("created", (twin,)), "the run's own box is still there"


def test_of_two_boxes_with_one_label_none_goes_while_the_intent_names_neither(reaper: Reaper) -> None:
    box, twin = reaper.rented(instance_id=None), reaper.pretend.rented(offer=0)
    reaper.pretend.market.contracts[twin].label = reaper.pretend.market.contracts[box].label
    reaper.lease()
    reaper.sweep()
    assert reaper.alive == {box, twin}


def test_a_row_that_can_nowhere_be_read_in_full_does_not_outlive_its_hard_end(reaper: Reaper) -> None:
    """The same field is as wrong when the box is shown as when it is listed."""
    reaper.rented(hours=1)
    reaper.clock.now += HOUR + 1
    reaper.pretend.market.settle()
    _malformed(reaper, gpu_util={"0": 3})
    assert reaper.sweep().rows[0].outcome == "destroyed" and not reaper.alive


def test_a_row_whose_label_cannot_be_read_is_not_called_somebody_elses(reaper: Reaper) -> None:
    box = reaper.rented()
    reaper.clock.now += HOUR
    _malformed(reaper, label=["livery"])
    result = reaper.sweep()
    assert result.rows[0].action == "unknown" and reaper.alive == {box}
    with pytest.raises(CannotSee, match="label"):
        result.raise_if_bad()


def test_a_sweep_of_one_run_does_not_call_all_well_over_a_row_that_may_be_its_box(reaper: Reaper) -> None:
    reaper.rented()
    reaper.clock.now += HOUR
    _malformed(reaper, label=["livery"])
    with pytest.raises(CannotSee):
        reaper.sweep(only_run=FLOW_RUN).raise_if_bad()


def test_a_box_that_no_listing_shows_and_that_will_not_go_fails_the_sweep_and_keeps_its_alarm(reaper: Reaper) -> None:
    box = reaper.rented()
    reaper.pretend.market.contracts[box].effects["list.lag"] = 1e6
    reaper.clock.now += HOUR
    reaper.pretend.arm("destroy.200_but_stays=1000@always")
    result = reaper.sweep()
    assert reaper.alive == {box}
    alarm = reaper.alarm(FLOW_RUN)
    assert alarm is not None and (alarm.what, alarm.instances) == ("destroy_unverified", (box,))
    assert reaper.store.get_bytes(layout.REAPER_LAST_SUCCESS) is None
    with pytest.raises(DestroyUnverified, match=str(box)):
        result.raise_if_bad()


def test_a_stray_object_among_the_intents_stops_no_sweep(reaper: Reaper) -> None:
    """Consoles of buckets mark a folder by an object of its name."""
    reaper.rented()
    reaper.clock.now += HOUR
    for key in ("intents/", "intents/notes.txt"):
        reaper.store.put_bytes(key, b"")
    assert reaper.sweep().rows[0].outcome == "destroyed"


def test_boxes_that_cannot_be_destroyed_do_not_keep_the_others_from_their_turn(reaper: Reaper) -> None:
    stuck, others = reaper.rented(offer=0), [reaper.rented(OTHER_RUN, attempt=n, offer=n) for n in (1, 2)]
    reaper.clock.now += HOUR
    machine = reaper.pretend.market.contracts[stuck].offer.machine_id
    reaper.pretend.arm(f"destroy.200_but_stays=100000@machine:{machine}")
    for _ in range(3):
        reaper.sweep(max_reap=1)
        reaper.clock.now += 300
    assert not reaper.alive & set(others[:1])


def test_an_alarm_is_settled_by_a_complete_listing_though_a_box_of_another_run_cannot_be_judged(
    reaper: Reaper,
) -> None:
    reaper.pretend.rented(OTHER_RUN)
    reaper.clock.now += HOUR
    reaper.store.put_bytes(layout.alarm(FLOW_RUN), b"{}")
    assert reaper.sweep().unknown
    assert reaper.alarm(OTHER_RUN) is not None
    assert reaper.store.get_bytes(layout.alarm(FLOW_RUN)) is None


def test_a_cap_that_is_kept_again_gives_way_to_little_credit(reaper: Reaper) -> None:
    reaper.rented()
    reaper.lease()
    reaper.sweep(max_dph_usd=0.001)
    assert (alarm := reaper.alarm("account")) and alarm.what == "cap_reached"
    reaper.sweep(min_credit_usd=1e6)
    assert (alarm := reaper.alarm("account")) and alarm.what == "credit_low"


def _malformed(reaper: Reaper, **fields: Any) -> None:
    """The market gives these fields of every box in a form that nobody knows."""
    handle = reaper.pretend.api.handle

    def spoiled(request: Any) -> Any:
        reply = handle(request)
        if request.method == "GET" and "/instances/" in request.path and isinstance(reply.body, dict):
            body = json.loads(json.dumps(reply.body))
            seen = body.get("instances")
            for row in seen if isinstance(seen, list) else [seen]:
                if isinstance(row, dict):
                    row.update(fields)
            if "label" in fields:
                body.pop("label_counts", None)
            return type(reply)(**{**reply.__dict__, "body": body})
        return reply

    reaper.pretend.api.handle = spoiled  # type: ignore[method-assign]
