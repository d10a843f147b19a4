"""Keep, destroy or do not know: the reaper's judgement of one box, from its row, its run's lease and the clock alone.

Prefect's states are no evidence: a crashed run may be training and a running one may be dead. A live lease says that somebody
answers for the box; the label's hard end ends it whatever anybody says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from tasks.domain import Instance, Label, Lease

T = TypeVar("T")
Action = Literal["keep", "destroy", "unknown"]
_BOOTING = {"created", "loading", "scheduling"}


@dataclass(frozen=True)
class LeaseSeen:
    """What looking for the lease gave. No lease and a bucket that could not be read are two different things."""

    lease: Lease | None = None
    problem: str = ""
    """Why it could not be read; empty if it could."""


@dataclass(frozen=True)
class Limits:
    max_age_s: float
    lease_s: float
    never_running_s: float


@dataclass(frozen=True)
class Verdict:
    action: Action
    reason: str


def verdict(box: Instance, seen: LeaseSeen, now: float, limits: Limits, given_up: bool = False) -> Verdict:
    """The first rule that speaks decides; the order is the policy. `given_up`: the run has closed this attempt and holds no box of it."""
    label = Label.parse(box.label)
    if label is None:
        return Verdict("keep", "not ours: never touched")
    if now > label.hard_end:
        return Verdict("destroy", f"hard end passed {_span(now - label.hard_end)} ago")
    age_s = None if box.start_date is None else now - box.start_date
    if age_s is not None and age_s > limits.max_age_s:
        return Verdict("destroy", f"{_span(age_s)} old, at most {_span(limits.max_age_s)}")
    if given_up:
        return Verdict("destroy", f"its run gave attempt {label.attempt} up, and the box came to light afterwards")
    lease = seen.lease
    if lease and lease.expires_at > now:
        return Verdict("keep", f"lease live for {_span(lease.expires_at - now)}")
    if lease and lease.hold_until is not None and lease.hold_until > now:
        return Verdict("keep", f"held for debugging for {_span(lease.hold_until - now)}")
    if age_s is not None and age_s > limits.never_running_s and box.actual_status in _BOOTING:
        return Verdict("destroy", f"{box.actual_status} for {_span(age_s)}, at most {_span(limits.never_running_s)}")
    if seen.problem:
        return Verdict("unknown", f"lease cannot be read: {seen.problem}")
    if lease and lease.hold_until is not None:
        return Verdict("destroy", f"hold ended {_span(now - lease.hold_until)} ago")
    if lease:
        return Verdict("destroy", f"lease expired {_span(now - lease.expires_at)} ago")
    if age_s is None:
        return Verdict("unknown", "no lease, and the market does not say since when it runs")
    if age_s <= limits.lease_s:
        return Verdict("keep", f"no lease yet, {_span(age_s)} old")
    return Verdict("destroy", f"no lease, {_span(age_s)} old")


def within_ceiling(condemned: Sequence[T], max_reap: int) -> tuple[Sequence[T], Sequence[T]]:
    """Who goes now and who waits for the next sweep. So many at once is more likely our mistake than theirs."""
    return condemned[:max_reap], condemned[max_reap:]


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
