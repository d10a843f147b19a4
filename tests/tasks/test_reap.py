from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tasks.domain import Intent
from tasks.errors import DestroyUnverified, UserError
from tasks.guard import _patience_s
from tasks.lease import LeaseThread, hold, read_lease
from tasks.market.vast import VastMarket
from tasks.reap import (
    LAST_SUCCESS,
    CannotSee,
    _require_true_clock,
    seconds_since_success,
    sweep_now,
    text_table,
)
from tasks.settings import read_settings
from tests.tasks.pretend import FLOW_RUN, OTHER_RUN, Clock, Pretend, dead_store, rehearsal_recipe
from tests.tasks.sweeping import HOUR, Reaper
from training.box.folder import FolderStore
from training.box.store import Store, StoreError, StoreUnreachable
from training.contract import layout

THIRD_RUN = str(uuid.UUID(int=3, version=4))


class Away(FolderStore):
    """A bucket that does not answer, at once."""

    asked = 0

    def _unreachable(self, *_: object, **__: object) -> Any:
        self.asked += 1
        raise StoreUnreachable("the bucket is away")

    get_bytes = put_bytes = list = delete = server_time = _unreachable


def test_a_box_whose_lease_expired_goes_and_the_receipt_is_written(reaper: Reaper) -> None:
    box = reaper.rented()
    reaper.lease()
    assert reaper.sweep().rows[0].action == "keep"
    reaper.clock.now += 901
    row = reaper.sweep().rows[0]
    assert (row.instance_id, row.outcome) == (box, "destroyed")
    assert not reaper.alive and reaper.settled == [FLOW_RUN]


def test_a_live_lease_of_another_run_does_not_save_it(reaper: Reaper) -> None:
    ours, theirs = reaper.rented(), reaper.rented(OTHER_RUN)
    reaper.clock.now += HOUR
    reaper.lease(OTHER_RUN)
    reaper.sweep()
    assert reaper.alive == {theirs} != {ours}


def test_foreign_boxes_are_listed_and_never_touched(reaper: Reaper) -> None:
    box = reaper.rented()
    reaper.pretend.market.contracts[box].label = "my own box"
    reaper.clock.now += 100 * HOUR
    row = reaper.sweep().rows[0]
    assert (row.action, reaper.alive) == ("keep", {box})


def test_the_hard_end_beats_a_live_lease(reaper: Reaper) -> None:
    reaper.rented(hours=2)
    reaper.clock.now += 2 * HOUR + 1
    reaper.lease()
    reaper.sweep()
    assert not reaper.alive


def test_a_held_box_is_kept_until_its_hold_ends(reaper: Reaper) -> None:
    box, now = reaper.rented(), reaper.clock.now
    hold(reaper.store, FLOW_RUN, "r", now=now, until=now + HOUR)
    reaper.clock.now += HOUR - 60
    reaper.sweep()
    assert reaper.alive == {box}
    reaper.clock.now += 120
    reaper.sweep()
    assert not reaper.alive


def test_a_dry_run_destroys_nothing(reaper: Reaper) -> None:
    reaper.rented()
    reaper.clock.now += HOUR
    row = reaper.sweep(dry_run=True).rows[0]
    assert row.outcome == "would be destroyed" and reaper.alive and not reaper.settled


def test_a_dry_run_says_what_would_go_and_what_would_wait_and_writes_nothing(reaper: Reaper) -> None:
    for attempt in (1, 2, 3):
        reaper.rented(attempt=attempt)
    reaper.nameless()
    reaper.clock.now += HOUR
    before = [(item.key, item.modified) for item in reaper.store.list("")]
    rows = reaper.sweep(dry_run=True, max_reap=2, min_credit_usd=1e6).rows
    assert [row.outcome for row in rows] == ["would be destroyed", "would be destroyed", "next sweep", ""]
    assert [(item.key, item.modified) for item in reaper.store.list("")] == before
    assert reaper.pretend.count("DELETE", "/") == 0


def test_only_one_run_can_be_swept(reaper: Reaper) -> None:
    ours, theirs = reaper.rented(), reaper.rented(OTHER_RUN)
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
    box = reaper.rented()
    reaper.clock.now += 20 * HOUR
    reaper.pretend.arm(fault)
    with pytest.raises(CannotSee) as caught:
        reaper.sweep()
    assert caught.value.exit_code == 4
    assert reaper.alive == {box} and reaper.pretend.count("DELETE", "/") == 0
    assert reaper.store.get_bytes(LAST_SUCCESS) is None


def test_a_bucket_that_cannot_be_read_is_unknown_and_fails_the_sweep(reaper: Reaper) -> None:
    box = reaper.rented()
    reaper.clock.now += HOUR
    result = reaper.sweep(store=dead_store())
    assert result.rows[0].action == "unknown" and reaper.alive == {box}
    assert seconds_since_success(reaper.store, reaper.clock.now) is None
    with pytest.raises(CannotSee, match=str(box)):
        result.raise_if_bad()


def test_a_bucket_that_cannot_be_read_fails_the_sweep_of_an_account_without_boxes_too(reaper: Reaper) -> None:
    with pytest.raises(CannotSee, match="leases and intents could not be read"):
        reaper.sweep(store=Away(reaper.tmp_path)).raise_if_bad()


def test_without_the_bucket_the_hard_end_still_ends_a_box(reaper: Reaper) -> None:
    reaper.rented(hours=1)
    reaper.clock.now += HOUR + 1
    assert reaper.sweep(store=(away := Away(reaper.tmp_path))).rows[0].outcome == "destroyed" and not reaper.alive
    assert away.asked < 6, "each question to a bucket that hangs takes its time-outs"


def test_a_row_that_cannot_be_read_in_full_is_judged_by_its_label(reaper: Reaper) -> None:
    reaper.rented(hours=1)
    reaper.clock.now += HOUR + 1
    reaper.pretend.arm("list.one_malformed_row")
    assert reaper.sweep().rows[0].outcome == "destroyed"
    assert not reaper.alive


def test_a_destroy_that_does_not_take_fails_the_sweep_and_the_next_one_finishes_it(reaper: Reaper) -> None:
    box = reaper.rented()
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
    for attempt in (1, 2, 3):
        reaper.rented(attempt=attempt)
    reaper.clock.now += HOUR
    result = reaper.sweep(max_reap=2)
    assert sorted(row.outcome for row in result.rows) == ["destroyed", "destroyed", "next sweep"]
    assert len(reaper.alive) == 1
    with pytest.raises(DestroyUnverified, match="LIVERY_MAX_REAP"):
        result.raise_if_bad()


def test_a_lease_that_comes_alive_at_the_last_moment_saves_its_box(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = reaper.rented()
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
    reaper.rented()
    reaper.lease()
    for flow_run_id in (FLOW_RUN, OTHER_RUN):
        reaper.store.put_bytes(f"alarms/{flow_run_id}.json", b"{}")
    reaper.sweep()
    assert [item.key for item in reaper.store.list("alarms/")] == [f"alarms/{FLOW_RUN}.json"]


def test_a_sweep_that_saw_everything_says_when(reaper: Reaper) -> None:
    reaper.sweep()
    ago_s = seconds_since_success(reaper.store, reaper.clock.now + 600)
    assert ago_s is not None and 600 <= ago_s < 605


def test_a_sweep_of_one_run_is_no_success_of_the_whole(reaper: Reaper) -> None:
    reaper.sweep(only_run=FLOW_RUN)
    assert seconds_since_success(reaper.store, reaper.clock.now) is None


@pytest.mark.parametrize("scope", ["", " ", "livery", "*"])
def test_a_blank_scope_is_refused_and_neither_everything_nor_nothing_is_swept(reaper: Reaper, scope: str) -> None:
    box = reaper.rented()
    reaper.clock.now += HOUR
    with pytest.raises(UserError, match="want the id of a flow run"):
        reaper.sweep(only_run=scope)
    assert reaper.alive == {box} and not reaper.pretend.calls


def test_the_table_counts_every_box_and_its_price(reaper: Reaper) -> None:
    reaper.rented()
    reaper.rented(OTHER_RUN)
    reaper.lease()
    result = reaper.sweep(dry_run=True)
    text = text_table(result)
    assert "2 boxes" in text and "lease live" in text and FLOW_RUN in text
    assert result.dph_usd == pytest.approx(sum(box.dph_total_usd for box in reaper.pretend.market.alive()))


@pytest.mark.parametrize("down", ["stopped", "offline"])
def test_a_box_that_is_down_for_ten_minutes_goes_though_its_lease_lives(reaper: Reaper, down: str) -> None:
    """It bills its disk, and its flow has had the time to replace it."""
    reaper.up_then(down)
    for minute in (0, 5):
        reaper.lease()
        assert reaper.sweep().rows[0].action == "keep", f"after {minute} min"
        reaper.clock.now += 5 * 60
    reaper.lease()
    assert reaper.sweep().rows[0].outcome == "destroyed" and not reaper.alive


def test_a_box_that_came_back_between_is_not_down_for_long(reaper: Reaper) -> None:
    box = reaper.up_then("running")
    for status in ("offline", "offline", "running", "offline", "offline"):
        reaper.pretend.market.contracts[box].status = status
        reaper.lease()
        assert reaper.sweep().rows[0].action == "keep"
        reaper.clock.now += 5 * 60


@pytest.mark.parametrize("memory", [b"{", b"[]", b'{"sightings": {"x": {}}}', b'{"closed": 7}'])
def test_a_memory_that_cannot_be_read_makes_the_sweep_the_first(reaper: Reaper, memory: bytes) -> None:
    reaper.up_then("offline")
    reaper.lease()
    reaper.store.put_bytes(layout.REAPER_MEMORY, memory)
    assert reaper.sweep().rows[0].action == "keep"


@pytest.mark.parametrize(
    ("idle_s", "written", "action"),
    [
        (1700, "", "keep"),
        (1900, "", "destroy"),
        (1900, "manifests/sft/00000001.json", "keep"),
        (1900, "receipts/x", "destroy"),
    ],
)
def test_a_flow_that_hangs_keeps_its_box_no_longer_than_it_and_the_bucket_show_progress(
    reaper: Reaper, idle_s: float, written: str, action: str
) -> None:
    """Marin's 400 idle hours: a renewed lease is a sign of life, and none of work. What the flow itself writes is no second witness."""
    reaper.rented()
    reaper.clock.now += HOUR
    reaper.lease(progress_at=reaper.clock.now - idle_s)
    if written:
        reaper.store.put_bytes(f"runs/r/{written}", b"{}")
    row = reaper.sweep(dry_run=True).rows[0]
    assert row.action == action, row.reason


def test_a_box_of_a_run_that_this_bucket_never_heard_of_is_another_installations(reaper: Reaper) -> None:
    """With the wrong bucket every box looks as if nobody answered for it."""
    box = reaper.pretend.rented()
    reaper.clock.now += HOUR
    result = reaper.sweep()
    assert result.rows[0].action == "unknown" and reaper.alive == {box}
    with pytest.raises(CannotSee, match="LIVERY_BUCKET is the wrong one"):
        result.raise_if_bad()
    alarm = reaper.alarm(FLOW_RUN)
    assert alarm is not None and (alarm.what, alarm.instances) == ("box_unknown", (box,)) and alarm.dph_usd
    reaper.lease()
    reaper.sweep().raise_if_bad()
    assert reaper.alarm(FLOW_RUN) is None


def test_a_protected_box_is_left_alone_until_its_time(reaper: Reaper) -> None:
    box = reaper.rented(hours=1)
    reaper.clock.now += 2 * HOUR
    until = datetime.fromtimestamp(reaper.clock.now + 60, UTC).isoformat()
    assert "protected" in reaper.sweep(protected=f"{box}@{until}").rows[0].reason and reaper.alive == {box}
    reaper.clock.now += 120
    reaper.sweep(protected=f"{box}@{until}")
    assert not reaper.alive


@pytest.mark.parametrize("text", ["7835610", "7835610@", "@2026-12-24", "7835610@for ever", "box@2026-12-24"])
def test_a_protection_without_an_end_is_refused(reaper: Reaper, text: str) -> None:
    with pytest.raises(ValueError, match="<box id>@<date and time>"):
        reaper.pretend.settings(reaper.tmp_path, protected=text)


def test_over_the_cap_the_newest_goes_and_no_ceiling_holds_it_back(reaper: Reaper) -> None:
    boxes = []
    for number, run in enumerate((FLOW_RUN, OTHER_RUN, THIRD_RUN)):
        reaper.clock.now += 60
        boxes.append(reaper.rented(run, offer=number))
        reaper.lease(run)
    dph = [reaper.pretend.market.contracts[box].dph_total_usd for box in boxes]
    reaper.clock.now += 60
    result = reaper.sweep(max_dph_usd=dph[0] + 0.001, max_reap=1)
    assert reaper.alive == {boxes[0]}
    assert {row.instance_id for row in result.rows if row.over_cap and row.outcome == "destroyed"} == set(boxes[1:])
    alarm = reaper.alarm("account")
    assert alarm is not None and alarm.what == "cap_reached" and set(alarm.instances) == set(boxes[1:])
    assert alarm.dph_usd == pytest.approx(sum(dph))
    reaper.sweep(max_dph_usd=sum(dph))
    assert reaper.alarm("account") is None


def test_a_protected_box_and_a_foreign_one_count_and_stay(reaper: Reaper) -> None:
    ours, protected, foreign = reaper.rented(), reaper.rented(OTHER_RUN, offer=1), reaper.pretend.rented(THIRD_RUN)
    reaper.pretend.market.contracts[foreign].label = "somebody else's"
    reaper.lease()
    reaper.sweep(max_dph_usd=0.001, protected=f"{protected}@2099-01-01")
    assert reaper.alive == {protected, foreign} and ours not in reaper.alive


def test_what_may_exist_unseen_counts_in_the_alarm_and_ends_no_box_that_works(reaper: Reaper) -> None:
    box = reaper.rented()
    reaper.lease()
    reaper.intent(OTHER_RUN, dph_usd=50.0, state="unresolved", written_at=reaper.clock.now - HOUR)
    result = reaper.sweep(max_dph_usd=20)
    assert reaper.alive == {box} and result.promised_usd_h == 50.0
    alarm = reaper.alarm("account")
    assert alarm is not None and alarm.what == "cap_reached" and "$50.000/h more may be behind" in alarm.reason
    reaper.clock.now += 24 * HOUR
    assert reaper.sweep(max_dph_usd=20).promised_usd_h == 0.0


def test_a_stopped_box_counts_by_its_disk(reaper: Reaper) -> None:
    box = reaper.up_then("stopped")
    reaper.lease()
    result = reaper.sweep(max_dph_usd=reaper.pretend.market.contracts[box].dph_total_usd / 2)
    assert result.dph_usd == pytest.approx(reaper.pretend.market.contracts[box].storage_usd_h) and reaper.alive == {box}


def test_a_box_without_a_label_is_alarmed_and_counted_and_never_touched(reaper: Reaper) -> None:
    box = reaper.nameless()
    reaper.clock.now += 100 * HOUR
    result = reaper.sweep()
    result.raise_if_bad()
    alarm = reaper.alarm(f"box-{box}")
    assert alarm is not None and alarm.what == "box_unknown" and "not ours" in alarm.reason
    assert reaper.alive == {box} and result.dph_usd > 0
    reaper.pretend.market.contracts[box].label = "mine"
    reaper.sweep()
    assert reaper.alarm(f"box-{box}") is None


def test_a_create_call_that_lost_its_reply_and_its_label_is_an_alarm_that_names_both(reaper: Reaper) -> None:
    machine = reaper.pretend.market.contracts[box := reaper.nameless()].offer.machine_id
    lost = reaper.intent(machine_id=machine, state="unresolved", written_at=reaper.clock.now - 10)
    reaper.clock.now += HOUR
    with pytest.raises(CannotSee, match=rf"{box} .*machine {machine} .*{lost.label}"):
        reaper.sweep().raise_if_bad()
    assert reaper.alive == {box} and reaper.alarm(f"box-{box}") is not None


def test_a_box_that_another_account_rented_cannot_be_seen_with_this_key(reaper: Reaper) -> None:
    """An empty list of the wrong account is complete, authenticated, and no proof at all."""
    reaper.intent(account_id="9", instance_id=4711)
    result = reaper.sweep()
    with pytest.raises(CannotSee, match=r"4711 .*account 9; this key is of account"):
        result.raise_if_bad()
    assert not reaper.settled and seconds_since_success(reaper.store, reaper.clock.now) is None


def test_a_box_that_went_without_a_word_has_its_books_closed(reaper: Reaper) -> None:
    """By its dead-man or by the market, after its flow had died."""
    box = reaper.rented()
    reaper.lease()
    reaper.pretend.market.destroy(reaper.pretend.market.contracts[box])
    reaper.sweep()
    assert not reaper.settled, "its flow may be just about to hear of it"
    reaper.clock.now += HOUR
    reaper.sweep()
    intent = Intent.model_validate_json(reaper.store.get_bytes(layout.intent(FLOW_RUN, 1)) or b"")
    assert (intent.state, reaper.settled) == ("destroyed", [FLOW_RUN])
    reaper.sweep()
    assert reaper.settled == [FLOW_RUN]


def test_little_credit_is_alarmed_until_there_is_more(reaper: Reaper) -> None:
    reaper.sweep(min_credit_usd=1000)
    alarm = reaper.alarm("account")
    assert alarm is not None and alarm.what == "credit_low" and "$100.00 of credit" in alarm.reason
    reaper.sweep(min_credit_usd=5)
    assert reaper.alarm("account") is None


def test_a_reaper_that_is_blind_leaves_an_alarm_until_it_sees_again(reaper: Reaper) -> None:
    reaper.pretend.arm("list.bad_total@always")
    with pytest.raises(CannotSee):
        reaper.sweep()
    alarm = reaper.alarm("reaper")
    assert alarm is not None and alarm.what == "reaper_blind" and "incomplete" in alarm.reason
    reaper.pretend.market.disarm("list.bad_total")
    reaper.sweep()
    assert reaper.alarm("reaper") is None


@pytest.mark.parametrize("claimed", [True, False], ids=["claimed", "not claimed"])
def test_of_two_sweeps_at_once_one_destroys_a_box_and_writes_its_receipt(
    reaper: Reaper, claimed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not claimed:
        monkeypatch.setattr("tasks.reap._claim", lambda *given: True)
    reaper.rented()
    reaper.clock.now += HOUR
    destroy, others = VastMarket.destroy, []

    def while_another_sweeps(self: VastMarket, instance_id: int) -> None:
        if not others:
            others.append(None)
            others.append(reaper.sweep())
        destroy(self, instance_id)

    monkeypatch.setattr(VastMarket, "destroy", while_another_sweeps)
    assert reaper.sweep().rows[0].outcome == "destroyed"
    once = (reaper.pretend.count("DELETE", "/"), reaper.settled) == (1, [FLOW_RUN])
    assert once == claimed and not reaper.alive
    if claimed:
        others[1].raise_if_bad()
        assert others[1].rows[0].outcome == "another sweep's"
    assert not reaper.store.list("reaper/claims/")


def test_the_claim_of_a_sweep_that_died_holds_nobody_back_at_the_next_tick(reaper: Reaper) -> None:
    box = reaper.rented()
    reaper.clock.now += HOUR
    reaper.store.put_bytes(layout.reaper_claim(box), json.dumps({"at": reaper.clock.now, "by": "dead"}).encode())
    assert reaper.sweep().rows[0].outcome == "another sweep's"
    reaper.clock.now += 300
    assert reaper.sweep().rows[0].outcome == "destroyed"


def test_twenty_boxes_are_gone_by_one_sweep_at_the_markets_own_pace(
    reaper: Reaper, tmp_path: Path, clock: Clock
) -> None:
    """Its flow is ended after 240 s; each DELETE waits three seconds for its turn, each look at a box two."""
    ask = next(iter(reaper.pretend.market.offers.values()))
    for number in range(20):
        offer = replace(ask, id=500 + number, machine_id=500 + number)
        reaper.pretend.market.offers = {offer.id: offer}
        reaper.rented(str(uuid.UUID(int=number + 1, version=4)))
    clock.now += HOUR
    reaper.pretend.api.limiter.pace = 1.0
    began = clock.now
    result = reaper.sweep()
    assert not reaper.alive and clock.now - began < 220
    assert {row.outcome for row in result.rows} == {"destroyed"}
    result.raise_if_bad()
    kept = [
        Intent.model_validate_json(reaper.store.get_bytes(item.key) or b"") for item in reaper.store.list("intents/")
    ]
    assert len(kept) == 20 == len(reaper.settled) and {intent.state for intent in kept} == {"destroyed"}


def test_each_run_whose_box_is_not_proved_gone_has_its_own_alarm(reaper: Reaper) -> None:
    boxes = {run: reaper.rented(run, offer=number) for number, run in enumerate((FLOW_RUN, OTHER_RUN))}
    reaper.clock.now += HOUR
    reaper.pretend.arm("destroy.200_but_stays=1000@always")
    with pytest.raises(DestroyUnverified):
        reaper.sweep().raise_if_bad()
    for run, box in boxes.items():
        alarm = reaper.alarm(run)
        assert alarm is not None and (alarm.what, alarm.instances) == ("destroy_unverified", (box,))


def test_a_run_is_named_in_any_case(reaper: Reaper) -> None:
    reaper.rented()
    reaper.clock.now += HOUR
    assert reaper.sweep(only_run=FLOW_RUN.upper()).rows[0].outcome == "destroyed"


def test_a_box_of_another_account_costs_none_of_ours_its_life(reaper: Reaper) -> None:
    box = reaper.rented()
    reaper.lease()
    reaper.intent(OTHER_RUN, account_id="9", instance_id=4711, dph_usd=1000.0)
    reaper.sweep(max_dph_usd=20)
    assert reaper.alive == {box}


def test_a_lease_says_how_old_its_boxes_may_become_and_how_long_its_run_waits_for_progress(reaper: Reaper) -> None:
    """The reaper may run elsewhere, with other settings; and it waits longer than the run does before it gives a box up by itself."""
    recipe = rehearsal_recipe(box={"boot_s": 1200}, budget={"silent_s": 2400, "install_s": 100})
    limits: dict[str, float] = {"max_age_s": 20.0 * HOUR, "patience_s": _patience_s(recipe)}
    LeaseThread(reaper.store, FLOW_RUN, "r", lease_s=900, renew_s=60, clock=reaper.clock, **limits).renew()
    renewed = read_lease(reaper.store, FLOW_RUN)
    assert renewed is not None and renewed.max_age_s == 20 * HOUR
    assert renewed.patience_s is not None and renewed.patience_s > 2400
    hold(reaper.store, FLOW_RUN, "r", now=reaper.clock.now, until=reaper.clock.now + HOUR, max_age_s=20 * HOUR)
    held = read_lease(reaper.store, FLOW_RUN)
    assert held is not None and held.max_age_s == 20 * HOUR


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"at": "noon"}'])
def test_a_last_success_that_says_no_time_is_not_taken_for_one(reaper: Reaper, content: bytes) -> None:
    reaper.store.put_bytes(LAST_SUCCESS, content)
    with pytest.raises(StoreError, match="does not say when"):
        seconds_since_success(reaper.store, reaper.clock.now)


def test_a_reaper_that_shares_the_flows_key_says_so(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sweep_now(read_settings())
    assert "LIVERY_REAPER_API_KEY" not in caplog.text
    monkeypatch.delenv("LIVERY_REAPER_API_KEY")
    sweep_now(read_settings())
    assert "LIVERY_REAPER_API_KEY is not set" in caplog.text


@pytest.mark.parametrize(("skew_s", "seen"), [(0, True), (100, True), (-100, True), (3600, False), (-3600, False)])
def test_a_machine_whose_clock_is_wrong_reaps_nothing(store: Store, skew_s: float, seen: bool) -> None:
    """By a clock an hour ahead every live lease has run out."""
    with contextlib.nullcontext() if seen else pytest.raises(CannotSee, match="set the clock"):
        _require_true_clock(store, time.time() + skew_s)


def test_a_bucket_that_does_not_answer_says_nothing_of_the_clock() -> None:
    _require_true_clock(dead_store(), 0.0)


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
    late = reaper.rented(attempt=1, state=state)
    present = reaper.rented(attempt=2)
    reaper.lease()
    reaper.sweep()
    assert reaper.alive == ({present} if taken else {present, late})


@pytest.mark.parametrize("content", [b"{", b'{"label": "another"}'])
def test_an_intent_that_cannot_be_read_condemns_nobody(reaper: Reaper, content: bytes) -> None:
    box = reaper.rented()
    reaper.lease()
    reaper.store.put_bytes(layout.intent(FLOW_RUN, 1), content)
    reaper.sweep()
    assert reaper.alive == {box}
