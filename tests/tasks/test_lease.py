from __future__ import annotations

import threading

import pytest

from tasks.lease import LeaseThread, hold, look_for_lease, read_lease
from tests.tasks.pretend import FLOW_RUN, Clock, dead_store
from training.box.store import Store, StoreError


def _thread(store: Store, clock: Clock, **options: object) -> LeaseThread:
    given = {"lease_s": 900, "renew_s": 0.02, "clock": clock, **options}
    return LeaseThread(store, FLOW_RUN, "run", **given)  # type: ignore[arg-type]


def test_the_first_lease_is_there_when_start_returns(store: Store, clock: Clock) -> None:
    lease = _thread(store, clock, renew_s=60)
    lease.start()
    lease.stop()
    seen = read_lease(store, FLOW_RUN)
    assert seen is not None and seen.expires_at == clock.now + 900 and seen.hold_until is None


def test_without_a_first_lease_nothing_starts(clock: Clock) -> None:
    with pytest.raises(StoreError):
        _thread(dead_store(), clock).start()


def test_it_is_renewed_and_the_box_is_told(store: Store, clock: Clock) -> None:
    told = threading.Event()
    lease = _thread(store, clock, on_renew=told.set)
    lease.start()
    clock.now += 60
    assert told.wait(10)
    told.clear()
    assert told.wait(10)
    lease.stop()
    seen = read_lease(store, FLOW_RUN)
    assert seen is not None and seen.renewed_at == clock.now


def test_a_renewal_tells_when_the_run_last_got_anywhere_and_not_that_its_thread_lives(
    store: Store, clock: Clock
) -> None:
    lease = _thread(store, clock, progress_at=lambda: 42.0, renew_s=60)
    lease.renew()
    clock.now += 3600
    lease.renew()
    seen = read_lease(store, FLOW_RUN)
    assert seen is not None and (seen.renewed_at, seen.progress_at) == (clock.now, 42.0)


def test_after_stop_nothing_is_renewed(store: Store, clock: Clock) -> None:
    lease = _thread(store, clock)
    lease.start()
    lease.stop()
    clock.now += 60
    before = read_lease(store, FLOW_RUN)
    assert before is not None and before.renewed_at < clock.now
    assert not lease._thread.is_alive()


def test_a_bucket_in_trouble_is_said_and_the_thread_goes_on(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, bucket = threading.Event(), store.bucket
    lease = _thread(store, clock, on_renew=told.set)
    lease.start()
    store.bucket = "gone"
    assert told.wait(20)
    store.bucket = bucket
    clock.now += 60
    for _ in range(2):
        told.clear()
        assert told.wait(20)
    lease.stop()
    assert "lease not renewed" in caplog.text
    seen = read_lease(store, FLOW_RUN)
    assert seen is not None and seen.renewed_at == clock.now


def test_a_box_that_cannot_be_told_does_not_end_the_lease(
    store: Store, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    twice = threading.Event()

    def tell() -> None:
        calls.append(1)
        if len(calls) == 2:
            twice.set()
        raise RuntimeError("no route")

    lease = _thread(store, clock, on_renew=tell)
    lease.start()
    assert twice.wait(20)
    lease.stop()
    assert "no route" in caplog.text


def test_a_lease_that_is_missing_and_one_that_cannot_be_read_are_told_apart(store: Store) -> None:
    assert look_for_lease(store, FLOW_RUN).problem == ""
    assert look_for_lease(store, FLOW_RUN).lease is None
    assert look_for_lease(dead_store(), FLOW_RUN).problem
    store.put_bytes(f"leases/{FLOW_RUN}.json", b"{}")
    assert "not a lease" in look_for_lease(store, FLOW_RUN).problem


def test_a_hold_is_no_live_lease_but_says_until_when(store: Store, clock: Clock) -> None:
    hold(store, FLOW_RUN, "run", now=clock.now, until=clock.now + 7200)
    seen = read_lease(store, FLOW_RUN)
    assert seen is not None and seen.expires_at <= clock.now and seen.hold_until == clock.now + 7200


def test_renewals_outlive_whatever_one_of_them_raises(store: Store, clock: Clock) -> None:
    """A thread that has died renews nothing, and the reaper takes the box of a run that works."""
    asked: list[int] = []
    often = threading.Event()

    def progress() -> float:
        asked.append(1)
        if len(asked) == 4:
            often.set()
        if len(asked) == 2:
            raise RuntimeError("dictionary changed size during iteration")
        return 42.0

    lease = _thread(store, clock, progress_at=progress)
    lease.start()
    assert often.wait(20)
    lease.stop()


def test_a_box_that_swallows_connections_holds_up_no_renewal(store: Store, clock: Clock) -> None:
    asked: list[int] = []
    often, release = threading.Event(), threading.Event()

    def progress() -> float:
        asked.append(1)
        if len(asked) == 4:
            often.set()
        return 42.0

    lease = _thread(store, clock, progress_at=progress, on_renew=lambda: release.wait(60) and None)
    lease.start()
    assert often.wait(20)
    release.set()
    lease.stop()
