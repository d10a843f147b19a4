from __future__ import annotations

import math
import re
from typing import Any

import pytest

from tasks.domain import Instance, Intent, Label, Lease
from tasks.rules.reaping import (
    SIGHTING_GAP_S,
    Facts,
    LeaseSeen,
    Limits,
    Sighting,
    lost_labels,
    over_cap,
    rate_usd_h,
    sighted,
    state_of,
    verdict,
    within_ceiling,
)
from tests.tasks.pretend import FLOW_RUN, NOW

MINUTE, HOUR = 60, 3600
LIMITS = Limits(max_age_s=12 * HOUR, lease_s=900, never_running_s=2700, protected={7: NOW + HOUR, 8: NOW - 1})
MINE = Label(flow_run_id=FLOW_RUN, attempt=1, hard_end=int(NOW + 8 * HOUR)).text


def _box(*, age: float | None = 2 * HOUR, hard_end: float = 8 * HOUR, **changes: Any) -> Instance:
    label = Label(flow_run_id=FLOW_RUN, attempt=1, hard_end=int(NOW + hard_end)).text
    start = None if age is None else NOW - age
    return Instance(**{"id": 5, "label": label, "start_date": start, "actual_status": "running", **changes})


def _lease(expires_in: float, hold_in: float | None = None, idle: float | None = None, **changes: Any) -> LeaseSeen:
    hold_until = None if hold_in is None else NOW + hold_in
    progress_at = None if idle is None else NOW - idle
    values: dict[str, Any] = {"flow_run_id": FLOW_RUN, "run": "r", "renewed_at": NOW, "expires_at": NOW + expires_in}
    return LeaseSeen(Lease(**{**values, "hold_until": hold_until, "progress_at": progress_at, **changes}))


def _facts(box: Instance, seen: LeaseSeen = LeaseSeen(), *, for_s: float | None = None, **changes: Any) -> Facts:  # noqa: B008
    """`for_s`: how long the box has been seen in its present state."""
    since = None if for_s is None else Sighting(box.label, state_of(box), NOW - for_s, NOW)
    return Facts(**{"box": box, "seen": seen, "intended": True, "since": since, **changes})


LIVE, EXPIRED, MISSING = _lease(600), _lease(-1), LeaseSeen()
HELD = _lease(-HOUR, hold_in=HOUR)
UNREADABLE = LeaseSeen(problem="bucket does not answer")
HANGS = _lease(600, idle=31 * MINUTE)
IDLE: dict[str, Any] = {"gpu_util": 0.0}
TAKEN: dict[str, Any] = dict.fromkeys(("cur_state", "intended_status", "next_state"), "stopped")


@pytest.mark.parametrize(
    ("rule", "facts", "action"),
    [
        ("a live lease keeps", _facts(_box(), LIVE), "keep"),
        ("an expired lease destroys", _facts(_box(), EXPIRED), "destroy"),
        ("a lease that the bucket lists as just renewed keeps", _facts(_box(), LeaseSeen(renewed_ago_s=40)), "keep"),
        ("a label that is not ours is never touched", _facts(_box(label="someone-else"), EXPIRED), "keep"),
        ("no label is not ours", _facts(_box(label=None), EXPIRED), "keep"),
        ("a label that only begins like ours is not ours", _facts(_box(label="livery:x:1:2"), EXPIRED), "keep"),
        ("the hard end beats a live lease", _facts(_box(hard_end=-1), LIVE), "destroy"),
        ("the hard end beats a hold", _facts(_box(hard_end=-1), HELD), "destroy"),
        (
            "the hard end beats a longer life in the lease",
            _facts(_box(hard_end=-1), _lease(9, max_age_s=1e6)),
            "destroy",
        ),
        ("the hard end needs no bucket", _facts(_box(hard_end=-1), UNREADABLE), "destroy"),
        ("the hard end needs no start", _facts(_box(hard_end=-1, age=None), UNREADABLE), "destroy"),
        ("the maximum age beats a live lease", _facts(_box(age=12 * HOUR + 1), LIVE), "destroy"),
        ("a lease may allow a longer life", _facts(_box(age=13 * HOUR), _lease(9, max_age_s=14 * HOUR)), "keep"),
        ("a lease may allow a shorter life", _facts(_box(age=3 * HOUR), _lease(9, max_age_s=2 * HOUR)), "destroy"),
        ("a longer life that cannot be read is not denied", _facts(_box(age=13 * HOUR), UNREADABLE), "unknown"),
        ("a hold keeps after the lease", _facts(_box(), HELD), "keep"),
        ("a hold keeps a box that is down", _facts(_box(actual_status="exited"), HELD, for_s=HOUR), "keep"),
        ("a hold that has ended destroys", _facts(_box(), _lease(-HOUR, hold_in=-1)), "destroy"),
        ("a protected box is kept", _facts(_box(id=7, hard_end=-1), EXPIRED), "keep"),
        ("a protection that has ended protects no more", _facts(_box(id=8), EXPIRED), "destroy"),
        ("a young box without a lease is kept", _facts(_box(age=890), MISSING), "keep"),
        ("an older box without a lease is destroyed", _facts(_box(age=910), MISSING), "destroy"),
        ("no lease and no start is unknown", _facts(_box(age=None), MISSING), "unknown"),
        ("a run of which this bucket never heard is unknown", _facts(_box(), MISSING, intended=False), "unknown"),
        ("intents that cannot be listed are unknown", _facts(_box(), MISSING, intended=None), "unknown"),
        ("a bucket that cannot be read is unknown", _facts(_box(), UNREADABLE), "unknown"),
        ("a state of nobody knows is judged by its lease", _facts(_box(actual_status=None), LIVE), "keep"),
        ("never running destroys", _facts(_box(actual_status="loading"), LIVE, for_s=2701), "destroy"),
        ("booting is given time", _facts(_box(actual_status="loading"), LIVE, for_s=2600), "keep"),
        (
            "a recipe that gives a boot longer is given longer",
            _facts(_box(actual_status="loading"), _lease(600, patience_s=HOUR), for_s=3000),
            "keep",
        ),
        ("an old box that boots again is given time, too", _facts(_box(actual_status="loading"), LIVE), "keep"),
        ("a slow boot may be of a held box", _facts(_box(actual_status="loading"), UNREADABLE, for_s=9999), "unknown"),
        ("offline is no reason by itself", _facts(_box(actual_status="offline"), LIVE), "keep"),
        ("offline for long destroys", _facts(_box(actual_status="offline"), LIVE, for_s=601), "destroy"),
        ("stopped for long destroys", _facts(_box(actual_status="stopped"), LIVE, for_s=601), "destroy"),
        ("stopped for a moment is the flow's", _facts(_box(actual_status="stopped"), LIVE, for_s=590), "keep"),
        ("outbid for long destroys", _facts(_box(**TAKEN), LIVE, for_s=601), "destroy"),
        ("no word of the host is no evidence", _facts(_box(actual_status="unknown"), LIVE, for_s=9999), "keep"),
        ("three failed probes destroy", _facts(_box(), LIVE, failed_probes=3), "destroy"),
        ("two failed probes do not", _facts(_box(), LIVE, failed_probes=2), "keep"),
        ("no progress by flow, bucket and GPU destroys", _facts(_box(**IDLE), HANGS, bucket_quiet_s=HOUR), "destroy"),
        ("a market without GPU readings cannot save it", _facts(_box(), HANGS, bucket_quiet_s=math.inf), "destroy"),
        ("a busy GPU does", _facts(_box(gpu_util=97.0), HANGS, bucket_quiet_s=HOUR), "keep"),
        ("and so does what it wrote to the bucket", _facts(_box(**IDLE), HANGS, bucket_quiet_s=MINUTE), "keep"),
        ("one witness is not enough", _facts(_box(**IDLE), HANGS), "keep"),
        ("a flow that tells of no progress is no witness", _facts(_box(**IDLE), LIVE, bucket_quiet_s=HOUR), "keep"),
        (
            "thirty minutes of grace",
            _facts(_box(**IDLE), _lease(600, idle=29 * MINUTE), bucket_quiet_s=HOUR),
            "keep",
        ),
        (
            "a run that waits longer for a step is given longer",
            _facts(_box(**IDLE), _lease(600, idle=40 * MINUTE, patience_s=HOUR), bucket_quiet_s=50 * MINUTE),
            "keep",
        ),
        ("an attempt that its run gave up goes though the run lives", _facts(_box(), LIVE, given_up=True), "destroy"),
        ("and needs no lease to be read for that", _facts(_box(), UNREADABLE, given_up=True), "destroy"),
        ("a foreign box is nobody's attempt", _facts(_box(label="someone-else"), given_up=True), "keep"),
        (
            "a box without a label where a create call lost its reply is unknown",
            _facts(_box(label=None), lost_label_of=(MINE,)),
            "unknown",
        ),
    ],
)
def test_rule(rule: str, facts: Facts, action: str) -> None:
    found = verdict(facts, NOW, LIMITS)
    assert found.action == action, f"{rule}: {found.reason}"
    assert found.reason


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (_facts(_box(hard_end=-300), LIVE), "hard end passed 5 min ago"),
        (_facts(_box(), _lease(-90)), "lease expired 90 s ago"),
        (_facts(_box(age=13 * HOUR), LIVE), "13.0 h old, at most 12.0 h"),
        (_facts(_box(), UNREADABLE), "bucket does not answer"),
        (_facts(_box(**TAKEN), LIVE, for_s=700), "taken back by its host or a higher bid for 12 min, at most 10 min"),
        (_facts(_box(actual_status="created"), LIVE, for_s=3000), "created for 50 min, at most 45 min"),
        (_facts(_box(**IDLE), HANGS, bucket_quiet_s=HOUR), "no progress for 31 min, at most 30 min; last written"),
        (_facts(_box(gpu_util=97.0), HANGS, bucket_quiet_s=HOUR), "its GPU is 97 % busy"),
        (_facts(_box(id=7)), "protected for 60 min more"),
        (_facts(_box(), MISSING, intended=False), f"neither lease nor intent of flow run {FLOW_RUN}"),
        (_facts(_box(label=None, machine_id=9), lost_label_of=(MINE,)), f"machine 9 .* most likely it is {MINE}"),
    ],
)
def test_the_reason_says_what_was_seen(facts: Facts, words: str) -> None:
    found = verdict(facts, NOW, LIMITS)
    assert re.search(words, found.reason), found.reason


def test_a_sighting_goes_on_only_while_it_is_of_the_same_box_in_the_same_state() -> None:
    down = _box(actual_status="offline")
    first = sighted(None, down, NOW)
    assert first == Sighting(down.label, "down", NOW, NOW)
    later = sighted(first, down, NOW + 300)
    assert later is not None and (later.since, later.seen_at) == (NOW, NOW + 300)
    back = sighted(later, _box(actual_status="loading"), NOW + 600)
    assert back is not None and back.since == NOW + 600
    other = sighted(later, _box(actual_status="offline", hard_end=9 * HOUR), NOW + 600)
    assert other is not None and other.since == NOW + 600
    assert sighted(later, _box(), NOW + 600) is None
    assert sighted(later, _box(actual_status="unknown"), NOW + 600) is None


def test_of_two_sightings_far_apart_nobody_knows_what_was_between() -> None:
    down = _box(actual_status="offline")
    seen = sighted(sighted(None, down, NOW), down, NOW + SIGHTING_GAP_S + 1)
    assert seen is not None and seen.since == NOW + SIGHTING_GAP_S + 1


def test_a_sighting_of_another_state_or_label_condemns_nobody() -> None:
    down = Sighting(_box().label, "down", NOW - HOUR, NOW)
    assert verdict(_facts(_box(), LIVE, since=down), NOW, LIMITS).action == "keep"
    renamed = _box(actual_status="offline", hard_end=9 * HOUR)
    assert verdict(_facts(renamed, LIVE, since=down), NOW, LIMITS).action == "keep"


@pytest.mark.parametrize(
    ("box", "rate"),
    [
        (_box(dph_total_usd=1.2, storage_usd_hour=0.1), 1.2),
        (_box(dph_total_usd=1.2, storage_usd_hour=0.1, actual_status="loading"), 1.2),
        (_box(dph_total_usd=1.2, storage_usd_hour=0.1, actual_status="stopped"), 0.1),
        (_box(dph_total_usd=1.2, storage_usd_hour=0.1, **TAKEN), 0.1),
        (_box(dph_total_usd=1.2, actual_status="stopped"), 1.2),
        (_box(storage_usd_hour=0.1), None),
    ],
)
def test_a_stopped_box_costs_its_disk(box: Instance, rate: float | None) -> None:
    assert rate_usd_h(box) == rate


def _priced(number: int, usd_h: float | None, **changes: Any) -> Instance:
    return _box(id=number, age=1000 - number, **{"dph_total_usd": usd_h, **changes})


@pytest.mark.parametrize(
    ("rule", "boxes", "others", "gone"),
    [
        ("under the cap nobody goes", [_priced(1, 4.0), _priced(2, 6.0)], 0.0, ()),
        ("the newest goes first", [_priced(1, 6.0), _priced(2, 6.0)], 0.0, (2,)),
        ("and no more than it takes", [_priced(1, 4.0), _priced(2, 4.0), _priced(3, 4.0)], 0.0, (3,)),
        ("what others cost counts", [_priced(1, 4.0), _priced(2, 4.0)], 3.0, (2,)),
        ("all, if others are over it", [_priced(1, 1.0), _priced(2, 1.0)], 11.0, (2, 1)),
        ("a stopped one counts by its disk", [_priced(1, 9.0), _priced(2, 9.0, actual_status="stopped", storage_usd_hour=0.5)], 0.0, ()),
        ("a price that is not stated is no reason", [_priced(1, 9.0), _priced(2, None)], 0.0, ()),
        ("nor is it chosen for it", [_priced(1, 11.0), _priced(2, None)], 0.0, (1,)),
    ],
)  # fmt: skip
def test_over_the_cap(rule: str, boxes: list[Instance], others: float, gone: tuple[int, ...]) -> None:
    assert tuple(box.id for box in over_cap(boxes, others, 10.0)) == gone, rule


def test_an_open_intent_may_own_the_unlabelled_box_of_its_machine() -> None:
    intent = Intent(
        flow_run_id=FLOW_RUN,
        run="r",
        attempt=1,
        label=MINE,
        account_id="1",
        offer_id=1,
        machine_id=9,
        dph_usd=1.0,
        disk_gb=1,
        written_at=NOW,
    )
    nameless: dict[str, Any] = {"label": None, "machine_id": 9, "start_date": NOW + 2}
    assert lost_labels(_box(**nameless), [intent], ()) == (MINE,)
    assert lost_labels(_box(**{**nameless, "start_date": None}), [intent], ()) == (MINE,)
    assert lost_labels(_box(**{**nameless, "machine_id": 8}), [intent], ()) == ()
    assert lost_labels(_box(**{**nameless, "start_date": NOW - HOUR}), [intent], ()) == ()
    assert lost_labels(_box(**{**nameless, "label": "mine"}), [intent], ()) == ()
    assert lost_labels(_box(**nameless), [intent], {MINE}) == ()


def test_only_so_many_go_in_one_sweep() -> None:
    assert within_ceiling([1, 2, 3, 4, 5], 3) == ([1, 2, 3], [4, 5])
