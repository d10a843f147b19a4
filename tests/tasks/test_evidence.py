from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import pytest

from tasks.domain import Instance, Intent, Label, Lease
from tasks.evidence import OUTRIGHT, Evidence, gather, remember
from tasks.lease import write_lease
from tasks.rules.reaping import Limits
from tests.tasks.pretend import NOW
from training.box.folder import FolderStore
from training.box.store import StoreError, StoreUnreachable
from training.contract import layout

LIMITS = Limits(max_age_s=12 * 3600, lease_s=900, never_running_s=2700)
MANY = 3 * OUTRIGHT


class Counted(FolderStore):
    """A bucket that counts what it is asked, and does not answer for the keys that it is told to keep back."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[str] = []
        self.listings: list[str] = []
        self.silent: tuple[str, ...] = ()

    def get_bytes(self, key: str) -> bytes | None:
        self.reads.append(key)
        if key.startswith(self.silent or ("nothing",)):
            raise StoreUnreachable(f"could not read {key}")
        return super().get_bytes(key)

    def list(self, prefix: str) -> Any:
        self.listings.append(prefix)
        return super().list(prefix)


@pytest.fixture
def store(tmp_path: Path) -> Counted:
    return Counted(tmp_path)


def _run(number: int) -> str:
    return str(uuid.UUID(int=number + 1, version=4))


def _box(number: int, *, attempt: int = 1, hours: float = 8, **changes: Any) -> Instance:
    label = Label(flow_run_id=_run(number), attempt=attempt, hard_end=int(NOW + hours * 3600)).text
    return Instance(**{"id": number, "label": label, "start_date": NOW - 3600, "actual_status": "running", **changes})


def _lease(store: Counted, number: int, *, old_s: float = 0.0, **changes: Any) -> None:
    values: dict[str, Any] = {"flow_run_id": _run(number), "run": "r", "renewed_at": NOW, "expires_at": NOW + 900}
    write_lease(store, Lease(**{**values, **changes}))
    moment = store.server_time() - old_s
    os.utime(store.root / layout.lease(_run(number)), (moment, moment))


def _intent(store: Counted, number: int, *, attempt: int = 1, **changes: Any) -> Intent:
    values: dict[str, Any] = {
        "flow_run_id": _run(number),
        "run": "r",
        "attempt": attempt,
        "label": _box(number, attempt=attempt).label,
        "account_id": "1",
        "offer_id": 1,
        "machine_id": 1,
        "dph_usd": 2.0,
        "disk_gb": 1,
        "written_at": NOW - 3600,
    }
    intent = Intent(**{**values, **changes})
    store.put_bytes(layout.intent(_run(number), attempt), intent.model_dump_json().encode())
    return intent


def _gather(store: Counted, *boxes: Instance, now: float = NOW) -> Evidence:
    store.reads.clear()
    store.listings.clear()
    return gather(store, boxes, now, LIMITS)


def test_few_leases_are_all_read_and_believed_by_what_stands_in_them(store: Counted) -> None:
    _lease(store, 1, expires_at=NOW - 1)
    seen = _gather(store, _box(1), _box(2)).leases
    assert seen[_run(1)].lease is not None and seen[_run(1)].renewed_ago_s is None
    assert seen[_run(2)].lease is None and not seen[_run(2)].problem


def test_of_many_leases_those_just_renewed_are_read_by_turns_and_all_others_at_once(store: Counted) -> None:
    for number in range(MANY):
        _lease(store, number, old_s=500.0 if number < 10 else 5.0)
    boxes = [_box(number) for number in range(MANY)]
    boxes[20] = _box(20, start_date=NOW - 13 * 3600)
    boxes[21] = _box(21, start_date=None)
    turns = [_gather(store, *boxes, now=NOW + tick * 300) for tick in range(3)]
    read = [{run for run, seen in turn.leases.items() if seen.lease} for turn in turns]
    assert set.union(*read) == {_run(number) for number in range(MANY)}
    for turn in read:
        assert {_run(number) for number in [*range(10), 20, 21]} <= turn, (
            "not renewed, or perhaps allowed a longer life"
        )
        assert len(turn) < 1.5 * OUTRIGHT
    unread = turns[0].leases[min({_run(number) for number in range(MANY)} - read[0])]
    assert unread.renewed_ago_s is not None and 0 < unread.renewed_ago_s < 300


def test_a_thousand_boxes_cost_few_questions(store: Counted) -> None:
    for number in range(1000):
        _lease(store, number)
        _intent(store, number, state="created", instance_id=number)
    boxes = [_box(number) for number in range(1000)]
    _gather(store, *boxes)
    assert len(store.reads) < 1.5 * OUTRIGHT and store.listings == ["intents/", "leases/"]


def test_a_box_past_its_hard_end_needs_no_lease(store: Counted) -> None:
    _gather(store, _box(1, hours=-1))
    assert layout.lease(_run(1)) not in store.reads


def test_a_bucket_that_leaves_three_questions_open_is_asked_no_more(store: Counted) -> None:
    store.silent = ("leases/",)
    seen = _gather(store, *(_box(number) for number in range(100))).leases
    assert all(each.problem and each.lease is None for each in seen.values()) and len(seen) == 100
    assert sum(key.startswith("leases/") for key in store.reads) < 25


def test_a_lease_that_is_no_lease_is_a_problem_of_its_own(store: Counted) -> None:
    store.put_bytes(layout.lease(_run(1)), b"{")
    _lease(store, 2)
    seen = _gather(store, _box(1), _box(2)).leases
    assert "not a lease" in seen[_run(1)].problem and seen[_run(2)].lease is not None


def test_whether_a_run_is_known_is_told_by_one_listing(store: Counted) -> None:
    _intent(store, 1)
    evidence = _gather(store, _box(1), _box(2))
    assert evidence.facts(_box(1)).intended is True and evidence.facts(_box(2)).intended is False
    assert layout.intent(_run(1), 1) not in store.reads, "its box is there and speaks for itself"


def test_a_run_has_gone_on_when_a_later_attempt_is_listed_as_intent_or_as_box(store: Counted) -> None:
    _intent(store, 1)
    first = Label.parse(_box(1).label)
    assert first is not None
    assert not _gather(store, _box(1)).later_attempt(first)
    assert _gather(store, _box(1), _box(1, attempt=2)).later_attempt(first)
    _intent(store, 1, attempt=2)
    assert _gather(store, _box(1)).later_attempt(first)


@pytest.mark.parametrize(
    ("counted", "changes"),
    [
        (True, {"state": "unresolved"}),
        (True, {"state": "written"}),
        (False, {"state": "written", "written_at": NOW - 60}),
        (False, {"state": "unresolved", "written_at": NOW - 86_401}),
        (False, {"state": "created", "instance_id": 4}),
        (False, {"state": "refused"}),
        (False, {"state": "destroyed", "instance_id": 4}),
    ],
)
def test_what_may_exist_unseen_is_a_create_call_without_an_answer_for_a_day(
    store: Counted, counted: bool, changes: dict[str, Any]
) -> None:
    _intent(store, 1, **changes)
    assert _gather(store).promised_usd_h == (2.0 if counted else 0.0)


def test_it_is_no_longer_unseen_when_a_box_carries_its_label(store: Counted) -> None:
    _intent(store, 1, state="unresolved")
    assert _gather(store, _box(1)).promised_usd_h == 0


def test_a_closed_intent_is_read_once_and_again_when_it_has_changed(store: Counted) -> None:
    key = layout.intent(_run(1), 1)
    _intent(store, 1, state="refused")
    remember(store, _gather(store), {})
    assert key in store.reads
    remember(store, _gather(store), {})
    assert key not in store.reads
    _intent(store, 1, state="unresolved")
    assert _gather(store).promised_usd_h == 2.0 and key in store.reads


def test_an_intent_of_last_week_is_not_read(store: Counted) -> None:
    _intent(store, 1)
    moment = store.server_time() - 7 * 86_400
    os.utime(store.root / layout.intent(_run(1), 1), (moment, moment))
    evidence = _gather(store)
    assert layout.intent(_run(1), 1) not in store.reads and evidence.facts(_box(1)).intended


def test_an_intent_whose_box_is_not_listed_is_told(store: Counted) -> None:
    _intent(store, 1, state="created", instance_id=4, also_ids=(5,))
    assert [intent.instance_id for intent in _gather(store).unlisted] == [4]
    assert not _gather(store, _box(5)).unlisted


def test_sightings_go_on_from_sweep_to_sweep(store: Counted) -> None:
    down = _box(1, actual_status="offline")
    remember(store, _gather(store, down), {})
    later = _gather(store, down, now=NOW + 300)
    assert later.sightings[1].since == NOW and later.sightings[1].seen_at == NOW + 300
    remember(store, later, {})
    assert not _gather(store, _box(1), now=NOW + 600).sightings


def test_how_long_a_run_wrote_nothing_is_asked_only_when_its_flow_tells_of_no_progress(store: Counted) -> None:
    _lease(store, 1, progress_at=NOW - 60)
    assert not _gather(store, _box(1)).quiet_s and "runs/r/" not in store.listings
    _lease(store, 1, progress_at=NOW - 1900)
    assert _gather(store, _box(1)).facts(_box(1)).bucket_quiet_s == float("inf")
    store.put_bytes("runs/r/events/x/001.jsonl", b"")
    assert _gather(store, _box(1)).quiet_s["r"] == float("inf"), "the flow writes that one itself"
    store.put_bytes("runs/r/manifests/sft/00000001.json", b"{}")
    assert 0 <= (_gather(store, _box(1)).facts(_box(1)).bucket_quiet_s or 0.0) < 60


def test_a_bucket_that_cannot_be_listed_is_one_problem_and_no_answer(
    store: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lease(store, 1)

    def away(*_: object) -> Any:
        raise StoreError("the bucket is away")

    monkeypatch.setattr(store, "list", away)
    evidence = _gather(store, _box(1))
    facts = evidence.facts(_box(1))
    assert evidence.problem and facts.seen.problem == "the bucket is away" and facts.intended is None
    store.reads.clear()
    remember(store, evidence, {})
    assert not (store.root / layout.REAPER_MEMORY).exists()
