from __future__ import annotations

from typing import Any

import pytest

from tasks.domain import Instance, Label, Lease
from tasks.rules.reaping import LeaseSeen, Limits, verdict, within_ceiling
from tests.tasks.pretend import FLOW_RUN, NOW

LIMITS = Limits(max_age_s=12 * 3600, lease_s=900, never_running_s=2700)
MINUTE, HOUR = 60, 3600


def _box(*, age: float | None = 2 * HOUR, hard_end: float = 8 * HOUR, **changes: Any) -> Instance:
    label = Label(flow_run_id=FLOW_RUN, attempt=1, hard_end=int(NOW + hard_end)).text
    start = None if age is None else NOW - age
    return Instance(**{"id": 5, "label": label, "start_date": start, "actual_status": "running", **changes})


def _lease(expires_in: float, hold_in: float | None = None) -> LeaseSeen:
    hold_until = None if hold_in is None else NOW + hold_in
    return LeaseSeen(
        Lease(flow_run_id=FLOW_RUN, run="r", renewed_at=NOW, expires_at=NOW + expires_in, hold_until=hold_until)
    )


LIVE, EXPIRED, MISSING = _lease(600), _lease(-1), LeaseSeen()
UNREADABLE = LeaseSeen(problem="bucket does not answer")


@pytest.mark.parametrize(
    ("rule", "box", "seen", "action"),
    [
        ("a live lease keeps", _box(), LIVE, "keep"),
        ("an expired lease destroys", _box(), EXPIRED, "destroy"),
        ("a label that is not ours is never touched", _box(label="someone-else"), EXPIRED, "keep"),
        ("no label is not ours", _box(label=None), EXPIRED, "keep"),
        ("a label that only begins like ours is not ours", _box(label="livery:x:1:2"), EXPIRED, "keep"),
        ("the hard end beats a live lease", _box(hard_end=-1), LIVE, "destroy"),
        ("the hard end beats a hold", _box(hard_end=-1), _lease(-1, hold_in=HOUR), "destroy"),
        ("the hard end needs no bucket", _box(hard_end=-1), UNREADABLE, "destroy"),
        ("the hard end needs no start", _box(hard_end=-1, age=None), UNREADABLE, "destroy"),
        ("the maximum age beats a live lease", _box(age=12 * HOUR + 1), LIVE, "destroy"),
        ("the maximum age needs no bucket", _box(age=12 * HOUR + 1), UNREADABLE, "destroy"),
        ("a hold keeps after the lease", _box(), _lease(-HOUR, hold_in=HOUR), "keep"),
        ("a hold that has ended destroys", _box(), _lease(-HOUR, hold_in=-1), "destroy"),
        ("a young box without a lease is kept", _box(age=890), MISSING, "keep"),
        ("an older box without a lease is destroyed", _box(age=910), MISSING, "destroy"),
        ("no lease and no start is unknown", _box(age=None), MISSING, "unknown"),
        ("a bucket that cannot be read is unknown", _box(), UNREADABLE, "unknown"),
        ("a state of nobody knows is judged by its lease", _box(actual_status=None), LIVE, "keep"),
        ("never running needs no bucket", _box(age=2701, actual_status="loading"), UNREADABLE, "destroy"),
        ("booting is given time", _box(age=2600, actual_status="loading"), UNREADABLE, "unknown"),
        ("a live lease answers for a slow boot", _box(age=2701, actual_status="loading"), LIVE, "keep"),
        ("offline is no reason by itself", _box(actual_status="offline"), LIVE, "keep"),
    ],
)
def test_rule(rule: str, box: Instance, seen: LeaseSeen, action: str) -> None:
    found = verdict(box, seen, NOW, LIMITS)
    assert found.action == action, rule
    assert found.reason


@pytest.mark.parametrize(
    ("box", "seen", "words"),
    [
        (_box(hard_end=-300), LIVE, "hard end passed 5 min ago"),
        (_box(), _lease(-90), "lease expired 90 s ago"),
        (_box(age=13 * HOUR), LIVE, "13.0 h old, at most 12.0 h"),
        (_box(), UNREADABLE, "bucket does not answer"),
    ],
)
def test_the_reason_says_what_was_seen(box: Instance, seen: LeaseSeen, words: str) -> None:
    assert words in verdict(box, seen, NOW, LIMITS).reason


def test_only_so_many_go_in_one_sweep() -> None:
    assert within_ceiling([1, 2, 3, 4, 5], 3) == ([1, 2, 3], [4, 5])


@pytest.mark.parametrize("seen", [LIVE, EXPIRED, MISSING, UNREADABLE])
def test_a_box_of_an_attempt_that_its_run_gave_up_goes_though_the_run_lives(seen: LeaseSeen) -> None:
    assert verdict(_box(age=MINUTE), seen, NOW, LIMITS, given_up=True).action == "destroy"
    assert verdict(_box(label="someone-else"), seen, NOW, LIMITS, given_up=True).action == "keep"
