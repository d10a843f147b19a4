from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from flows.__main__ import main
from tasks import alarms
from tasks.destroy import destroy_boxes, destroy_in_a_hurry, destroy_run, hurry, release
from tasks.domain import Alarm, Attempt, Destruction, Flight, Intent, Lease, Span
from tasks.lease import hold, read_lease, write_lease
from tasks.market.limiter import Limiter
from tasks.market.vast import VastMarket
from tasks.reap import sweep
from tests.tasks.pretend import FLOW_RUN, NOW, OTHER_RUN, Clock, Pretend, dead_store
from training.box.store import Store
from training.contract import layout

_GIVEN: dict[str, Any] = {
    "flow_run_id": FLOW_RUN,
    "run": "r",
    "attempt": 1,
    "label": "l",
    "account_id": "1",
    "offer_id": 1,
    "machine_id": 1,
    "dph_usd": 1.0,
    "disk_gb": 10,
    "written_at": NOW,
    "state": "created",
}


def _destroy(market: VastMarket, clock: Clock, **options: Any) -> Destruction:
    return destroy_run(market, FLOW_RUN, clock=clock, sleep=clock.sleep, **options)


def _intent(store: Store, attempt: int = 1, **changes: Any) -> None:
    intent = Intent(**{**_GIVEN, "attempt": attempt, **changes})
    store.put_bytes(layout.intent(FLOW_RUN, attempt), intent.model_dump_json().encode())


def _flight(store: Store, box: int, *, flow_run_id: str = FLOW_RUN, dph_usd: float = 1.0) -> None:
    boot = Span(step="boot", started_at=NOW)
    attempt = Attempt(attempt=1, label="l", machine_id=1, offer_id=1, dph_usd=dph_usd, instance_id=box, spans=(boot,))
    flight = Flight(
        flow_run_id=flow_run_id,
        run="tools-35b",
        started_at=NOW,
        planned_usd=1.0,
        max_usd=2.0,
        market="vast",
        attempts=(attempt,),
    )
    store.put_bytes(layout.flight(flow_run_id), flight.model_dump_json().encode())


def _read(store: Store, attempt: int) -> Intent:
    return Intent.model_validate_json(store.get_bytes(layout.intent(FLOW_RUN, attempt)) or b"")


def _state(store: Store, attempt: int = 1) -> str:
    return str(json.loads(store.get_bytes(layout.intent(FLOW_RUN, attempt)) or b"{}")["state"])


def test_every_box_of_the_run_goes_and_no_other(pretend: Pretend, market: VastMarket, clock: Clock) -> None:
    ours = {pretend.rented(attempt=1), pretend.rented(attempt=2)}
    other = pretend.rented(OTHER_RUN)
    result = _destroy(market, clock)
    assert result.clean and set(result.gone) == ours
    assert [box.id for box in pretend.market.alive()] == [other]


def test_a_run_without_boxes_is_clean_after_two_listings(pretend: Pretend, market: VastMarket, clock: Clock) -> None:
    assert _destroy(market, clock).clean
    assert pretend.count("GET", "/api/v1/instances/") == 2


@pytest.mark.parametrize(
    "fault",
    [
        "destroy.429",
        "destroy.200_but_stays=5",
        "destroy.500_but_done",
        "destroy.hang=0",
        "list.410",
        "list.empty_but_success",
        "list.bad_total@4",
        "list.missing_row@2",
        "list.null_fields@4",
        "list.wrong_account",
        "list.one_malformed_row@4",
        "auth.session_expired_404@6",
        "show.null",
    ],
)
def test_it_goes_on_until_the_box_is_really_gone(
    pretend: Pretend, market: VastMarket, clock: Clock, fault: str
) -> None:
    box = pretend.rented()
    pretend.arm(fault)
    result = _destroy(market, clock, also={box})
    assert result.clean and result.gone == (box,)
    assert not pretend.market.alive()


def test_a_listing_that_is_empty_once_is_not_believed(pretend: Pretend, market: VastMarket, clock: Clock) -> None:
    box = pretend.rented()
    pretend.arm("list.empty_but_success")
    result = _destroy(market, clock)
    assert result.gone == (box,) and not pretend.market.alive()


def test_a_delete_that_answers_200_is_no_proof(pretend: Pretend, market: VastMarket, clock: Clock) -> None:
    box = pretend.rented()
    pretend.arm("destroy.200_but_stays=1000@always")
    result = _destroy(market, clock, deadline_s=60)
    assert result.unverified == (box,) and not result.gone
    assert "still listed after its DELETE was accepted" in result.reason
    assert pretend.market.alive()


@pytest.mark.parametrize(
    "fault", ["list.bad_total@always", "list.missing_row@always", "list.410@always", "list.null_fields@always"]
)
def test_what_cannot_be_seen_is_never_called_gone(
    pretend: Pretend, market: VastMarket, clock: Clock, fault: str
) -> None:
    pretend.rented()
    pretend.arm(fault)
    result = _destroy(market, clock, deadline_s=60)
    assert not result.gone and not result.clean and result.reason


def test_a_revoked_key_answers_404_and_nothing_is_called_gone(
    pretend: Pretend, market: VastMarket, clock: Clock
) -> None:
    box = pretend.rented()
    pretend.arm("auth.revoked_midway")
    result = _destroy(market, clock, deadline_s=60, also={box})
    assert result.unverified == (box,) and "auth_error" in result.reason
    assert pretend.market.alive()


def test_a_known_box_is_asked_to_go_though_a_short_listing_leaves_it_out(
    pretend: Pretend, market: VastMarket, clock: Clock
) -> None:
    box = pretend.rented()
    pretend.arm("list.missing_row@always")
    assert _destroy(market, clock, also={box}).gone == (box,)
    assert not pretend.market.alive()


def test_a_box_whose_label_was_lost_goes_by_its_id(pretend: Pretend, market: VastMarket, clock: Clock) -> None:
    box = pretend.rented()
    pretend.market.contracts[box].label = None
    assert _destroy(market, clock).gone == ()
    assert pretend.market.alive()
    assert _destroy(market, clock, also={box}).gone == (box,)
    assert not pretend.market.alive()


def test_the_deadline_is_kept(pretend: Pretend, market: VastMarket, clock: Clock) -> None:
    pretend.rented()
    pretend.arm("destroy.200_but_stays=1000@always")
    began = clock.now
    _destroy(market, clock, deadline_s=60)
    assert clock.now - began < 75


def test_only_the_boxes_that_are_named_go(pretend: Pretend, market: VastMarket, clock: Clock) -> None:
    first, second = pretend.rented(attempt=1), pretend.rented(attempt=2)
    result = destroy_boxes(market, FLOW_RUN, {first}, clock=clock, sleep=clock.sleep)
    assert result.gone == (first,)
    assert [box.id for box in pretend.market.alive()] == [second]


def test_intents_are_closed_and_an_old_alarm_goes(
    pretend: Pretend, market: VastMarket, clock: Clock, store: Store
) -> None:
    _intent(store, 1, instance_id=pretend.rented(), state="created")
    _intent(store, 2, state="unresolved")
    _intent(store, 3, state="refused")
    store.put_bytes(layout.alarm(FLOW_RUN), b"{}")
    assert _destroy(market, clock, store=store).clean
    assert [_state(store, attempt) for attempt in (1, 2, 3)] == ["destroyed", "unresolved", "refused"]
    assert store.get_bytes(layout.alarm(FLOW_RUN)) is None


def test_an_intent_of_which_no_box_was_seen_is_never_called_destroyed(
    pretend: Pretend, market: VastMarket, clock: Clock, store: Store
) -> None:
    """Its process died in the create call; the box may come to light hours later, and then somebody must still be looking."""
    _intent(store, 1, state="written")
    assert _destroy(market, clock, store=store).clean
    intent = _read(store, 1)
    assert (intent.state, intent.closed_at) == ("unresolved", clock.now) and "no box of it was seen" in intent.reason
    assert intent.owned_until == NOW + 24 * 3600


def test_an_intent_whose_box_was_not_looked_for_stays_open(
    pretend: Pretend, market: VastMarket, clock: Clock, store: Store
) -> None:
    first, second = pretend.rented(attempt=1), pretend.rented(attempt=2)
    _intent(store, 1, instance_id=first)
    _intent(store, 2, instance_id=second)
    assert destroy_boxes(market, FLOW_RUN, {first}, clock=clock, sleep=clock.sleep, store=store).clean
    assert (_state(store, 1), _state(store, 2)) == ("destroyed", "created")


def test_a_late_box_goes_on_the_intent_whose_label_it_carries_though_that_was_given_up(
    pretend: Pretend, market: VastMarket, clock: Clock, store: Store
) -> None:
    box = pretend.rented(attempt=2)
    label = str(pretend.market.contracts[box].label)
    for attempt in (1, 3):
        _intent(store, attempt, state="unresolved", label="of another")
    _intent(store, 2, state="refused", label=label)
    assert destroy_boxes(market, FLOW_RUN, {box}, clock=clock, sleep=clock.sleep, store=store).clean
    late = _read(store, 2)
    assert (late.instance_id, late.state, late.closed_at) == (box, "destroyed", clock.now)
    assert [_state(store, attempt) for attempt in (1, 3)] == ["unresolved", "unresolved"]


def test_an_alarm_about_another_box_of_the_run_stays(
    pretend: Pretend, market: VastMarket, clock: Clock, store: Store
) -> None:
    first, second = pretend.rented(attempt=1), pretend.rented(attempt=2)
    alarm = Alarm(what="destroy_unverified", subject=FLOW_RUN, instances=(second,), reason="r", do="d", at=NOW)
    alarms.sound(store, alarm)
    destroy_boxes(market, FLOW_RUN, {first}, clock=clock, sleep=clock.sleep, store=store)
    assert [each.instances for each in alarms.standing(store)] == [(second,)]
    destroy_boxes(market, FLOW_RUN, {second}, clock=clock, sleep=clock.sleep, store=store)
    assert not alarms.standing(store)


def test_what_is_not_verified_is_written_down_as_an_alarm(
    pretend: Pretend, market: VastMarket, clock: Clock, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    box = pretend.rented()
    _intent(store, instance_id=box)
    _flight(store, box, dph_usd=3.6)
    pretend.arm("destroy.200_but_stays=1000@always")
    _destroy(market, clock, deadline_s=30, store=store)
    (alarm,) = alarms.standing(store)
    assert (alarm.what, alarm.subject, alarm.instances, alarm.run) == (
        "destroy_unverified",
        FLOW_RUN,
        (box,),
        "tools-35b",
    )
    assert alarm.dph_usd == pytest.approx(pretend.market.alive()[0].dph_total_usd), "what the market lists now"
    assert alarm.spent_usd == pytest.approx(3.6 * (clock.now - NOW) / 3600, abs=1e-4)
    assert "console" in alarm.do and f"box {box}" in alarm.sentence and "$" in alarm.sentence
    assert _state(store) == "created"
    assert "DESTROY UNVERIFIED" in caplog.text


def test_a_bucket_that_does_not_answer_stops_no_destroy(pretend: Pretend, market: VastMarket, clock: Clock) -> None:
    pretend.rented()
    assert _destroy(market, clock, store=dead_store()).clean
    assert not pretend.market.alive()


def test_in_a_hurry_the_environment_is_enough(pretend: Pretend, environment: dict[str, str]) -> None:
    box = pretend.rented()
    began = time.monotonic()
    result = destroy_in_a_hurry(FLOW_RUN)
    assert result.gone == (box,) and not pretend.market.alive()
    assert time.monotonic() - began < 15


def test_in_a_hurry_a_box_with_a_lost_label_is_found_by_its_intent(
    pretend: Pretend, environment: dict[str, str], store: Store
) -> None:
    box = pretend.rented()
    pretend.market.contracts[box].label = None
    _intent(store, instance_id=box)
    assert destroy_in_a_hurry(FLOW_RUN).gone == (box,)


def test_in_a_hurry_a_held_box_is_kept_and_one_whose_hold_has_ended_is_not(
    pretend: Pretend, environment: dict[str, str], store: Store
) -> None:
    box, now = pretend.rented(), time.time()
    hold(store, FLOW_RUN, "r", now=now, until=now + 3600)
    assert destroy_in_a_hurry(FLOW_RUN).kept_until == pytest.approx(now + 3600)
    assert pretend.market.alive()
    hold(store, FLOW_RUN, "r", now=now - 7200, until=now - 1)
    assert destroy_in_a_hurry(FLOW_RUN).gone == (box,)


def test_in_a_hurry_missing_settings_are_said_and_nothing_is_raised(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIVERY_MARKET_API_KEY")
    result = destroy_in_a_hurry(FLOW_RUN)
    assert not result.clean and "LIVERY_MARKET_API_KEY" in result.reason


def test_in_a_hurry_a_dead_bucket_costs_seconds_and_no_box(
    pretend: Pretend, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    box = pretend.rented()
    monkeypatch.setenv("LIVERY_S3_ENDPOINT_URL", "http://127.0.0.1:9")
    assert destroy_in_a_hurry(FLOW_RUN).gone == (box,)


def test_with_a_bucket_a_box_whose_label_was_lost_goes_by_its_intent(
    pretend: Pretend, market: VastMarket, clock: Clock, store: Store
) -> None:
    box = pretend.rented()
    pretend.market.contracts[box].label = None
    _intent(store, instance_id=box)
    assert _destroy(market, clock, store=store).gone == (box,)
    assert not pretend.market.alive()


def test_a_box_nobody_had_heard_of_is_written_into_the_intent_it_belongs_to(
    pretend: Pretend, market: VastMarket, clock: Clock, store: Store
) -> None:
    _intent(store, 1, state="destroyed", instance_id=1)
    _intent(store, 2, state="written")
    box = pretend.rented(attempt=2)
    assert _destroy(market, clock, store=store).clean
    found = Intent.model_validate_json(store.get_bytes(layout.intent(FLOW_RUN, 2)) or b"")
    assert (found.instance_id, found.state) == (box, "destroyed")


def test_a_run_that_is_over_has_no_live_lease_left(pretend: Pretend, environment: dict[str, str], store: Store) -> None:
    """Or the reaper would keep a box that comes to light for fifteen minutes, because a dead flow answers for it."""
    now = time.time()
    write_lease(store, Lease(flow_run_id=FLOW_RUN, run="r", renewed_at=now, expires_at=now + 900))
    destroy_in_a_hurry(FLOW_RUN)
    lease = read_lease(store, FLOW_RUN)
    assert lease is not None and lease.expires_at <= time.time()


def test_a_kept_box_can_be_released_by_hand(
    pretend: Pretend, environment: dict[str, str], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    box, now = pretend.rented(), time.time()
    hold(store, FLOW_RUN, "r", now=now, until=now + 3600)
    assert main(["release", FLOW_RUN]) == 0
    assert not pretend.market.alive() and str(box) in capsys.readouterr().out
    lease = read_lease(store, FLOW_RUN)
    assert lease is not None and lease.hold_until is None
    assert release(FLOW_RUN).gone == ()


def test_of_twenty_runs_that_crash_together_those_whose_delete_found_no_room_are_alarmed_and_gone_at_the_next_sweep(
    pretend: Pretend, store: Store, tmp_path: Path, clock: Clock
) -> None:
    """The market takes one DELETE in 3 s and a hook has 15: each hook has a clock of its own that began at the crash, and all share one limit."""
    runs = {f"{number:08d}-1988-4822-a204-826ec4ac0aee": number for number in range(20)}
    boxes = {run: pretend.rented(run, offer=0) for run in runs}
    for run, box in boxes.items():
        label = str(pretend.market.contracts[box].label)
        intent = Intent.model_validate(
            {**_GIVEN, "flow_run_id": run, "label": label, "instance_id": box, "account_id": "71500"}
        )
        store.put_bytes(layout.intent(run, 1), intent.model_dump_json().encode())
        write_lease(store, Lease(flow_run_id=run, run="r", renewed_at=NOW, expires_at=NOW + 900))
        _flight(store, box, flow_run_id=run)
    results = []
    for run in runs:
        own = Clock(NOW)
        limiter = Limiter(tmp_path, pretend.market.account_key, clock=own, sleep=own.sleep)
        client = VastMarket(
            pretend.url,
            pretend.market.account_key,
            limiter,
            clock=own,
            sleep=own.sleep,
            budget_s=15,
            jitter=lambda: 0.0,
        )
        results.append(hurry(client, store, run, clock=own, sleep=own.sleep))
        assert own.now - NOW < 30
    left = {run for run, result in zip(runs, results, strict=True) if not result.clean}
    assert left and {contract.id for contract in pretend.market.alive()} <= {boxes[run] for run in left}
    assert {alarm.subject for alarm in alarms.standing(store)} == left
    assert all(alarm.what == "destroy_unverified" and alarm.spent_usd is not None for alarm in alarms.standing(store))
    clock.now = NOW + 300
    swept = sweep(
        pretend.client(tmp_path / "reaper", key=pretend.market.reaper_key),
        store,
        pretend.settings(tmp_path),
        clock=clock,
        sleep=clock.sleep,
        settle=lambda flow_run_id, by: None,
    )
    assert not pretend.market.alive() and not swept.unverified
    assert not alarms.standing(store)


def test_the_hook_of_a_dead_run_leaves_the_box_of_the_same_run_started_again(
    market: VastMarket, store: Store, pretend: Pretend, clock: Clock
) -> None:
    """A person may press "retry" while the hook of the crash is still looking."""
    old = pretend.rented(attempt=1)
    _intended(store, pretend, old, attempt=1)
    write_lease(store, Lease(flow_run_id=FLOW_RUN, run="r", renewed_at=clock.now - 30, expires_at=clock.now + 870))
    young: list[int] = []

    def started_again(seconds: float) -> None:
        clock.sleep(seconds)
        if not young:
            young.append(pretend.rented(attempt=2, offer=1))
            _intended(store, pretend, young[0], attempt=2)
            lease = Lease(flow_run_id=FLOW_RUN, run="r", renewed_at=clock.now, expires_at=clock.now + 900)
            write_lease(store, lease)

    result = hurry(market, store, FLOW_RUN, clock=clock, sleep=started_again)
    assert result.clean and result.gone == (old,)
    assert [box.id for box in pretend.market.alive()] == young
    lease = read_lease(store, FLOW_RUN)
    assert lease is not None and lease.expires_at > clock.now + 800


def _intended(store: Store, pretend: Pretend, box: int, attempt: int) -> None:
    made = pretend.market.contracts[box]
    intent = Intent(
        flow_run_id=FLOW_RUN,
        run="r",
        attempt=attempt,
        label=str(made.label),
        account_id="1",
        offer_id=made.offer.id,
        machine_id=made.offer.machine_id,
        dph_usd=1.0,
        disk_gb=10,
        written_at=pretend.clock.now,
        state="created",
        instance_id=box,
    )
    store.put_bytes(layout.intent(FLOW_RUN, attempt), intent.model_dump_json().encode())
