"""Keep, destroy or do not know: the reaper's judgement of one box, and of the account's dollars an hour. No clock, no I/O.

Prefect's states are no evidence: a crashed run may be training and a running one may be dead. A live lease says that somebody
answers for the box; the label's hard end ends it whatever anybody says. A box that does not answer at SSH is no evidence either:
idle is only a box of which two that do not know of each other say so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from tasks.domain import Instance, Intent, Label, Lease
from tasks.rules.stalls import IDLE_GPU_PERCENT

T = TypeVar("T")
Action = Literal["keep", "destroy", "unknown"]
State = Literal["up", "booting", "down", "unknown"]
_BOOTING = {"created", "loading", "scheduling", "rebooting"}
_DOWN = {"stopped", "exited", "offline", "frozen", "error"}
# A stopped box bills its disk alone.
_DISK_ONLY = {"stopped", "exited", "offline", "frozen"}
# Of two sightings further apart nobody knows what was between them; three sweeps at five minutes.
SIGHTING_GAP_S = 900.0
FAILED_PROBES = 3


@dataclass(frozen=True)
class LeaseSeen:
    """What looking for the lease gave. No lease and a bucket that could not be read are two different things."""

    lease: Lease | None = None
    problem: str = ""
    """Why it could not be read; empty if it could."""
    renewed_ago_s: float | None = None
    """The bucket lists it as written so long ago, by the bucket's own clock, which says enough; its content was not read."""


@dataclass(frozen=True)
class Sighting:
    """In which state earlier sweeps found a box that was not up: the market does not say since when."""

    label: str | None
    state: State
    since: float
    seen_at: float


@dataclass(frozen=True)
class Limits:
    max_age_s: float
    lease_s: float
    never_running_s: float
    down_s: float = 600.0
    no_progress_s: float = 1800.0
    max_dph_usd: float = math.inf
    protected: Mapping[int, float] = field(default_factory=dict)
    """Boxes that a person has protected, each until an epoch second."""


@dataclass(frozen=True)
class Facts:
    """All that is known of one box. What is left at its default is not known, and no rule destroys for that."""

    box: Instance
    seen: LeaseSeen = LeaseSeen()
    intended: bool | None = None
    """Whether the bucket holds the intent of any attempt of its run; None: it could not be asked."""
    given_up: bool = False
    """The run has closed this attempt and holds no box of it."""
    twin_of: int | None = None
    """The box of the same label that the run's intent names: the offer was accepted twice, and nobody knows of this one."""
    since: Sighting | None = None
    """This sweep's sighting of it, if it is not up."""
    bucket_quiet_s: float | None = None
    """How long ago the run last wrote anything into the bucket, by the bucket's own clock; infinite: never. Independent of the flow: the box writes there itself."""
    failed_probes: int | None = None
    """Serving probes that failed in a row."""
    lost_label_of: tuple[str, ...] = ()
    """Of a box without a label: labels of open intents for this very machine whose box nobody has seen."""


@dataclass(frozen=True)
class Verdict:
    action: Action
    reason: str


def verdict(facts: Facts, now: float, limits: Limits) -> Verdict:
    """The first rule that speaks decides; the order is the policy. Without the bucket only the label's hard end destroys."""
    box, lease = facts.box, facts.seen.lease
    label = Label.parse(box.label)
    if label is None:
        return _of_nobody(facts)
    protected_until = limits.protected.get(box.id, -math.inf)
    if protected_until > now:
        return Verdict("keep", f"protected for {_span(protected_until - now)} more (LIVERY_PROTECTED)")
    if now > label.hard_end:
        return Verdict("destroy", f"hard end passed {_span(now - label.hard_end)} ago")
    if facts.given_up:
        return Verdict("destroy", f"its run gave attempt {label.attempt} up, and the box came to light afterwards")
    if facts.twin_of is not None:
        return Verdict("destroy", f"its create call made two boxes, and its run works on box {facts.twin_of}")
    if facts.seen.problem:
        # It may be held, or allowed a longer life: only the label can end it now.
        return Verdict("unknown", f"lease cannot be read: {facts.seen.problem}")
    return (
        _too_old(box, lease, now, limits)
        or _held(lease, now)
        or _dead(facts, now, limits)
        or _answered_for(facts, now, limits)
        or _on_its_own(facts, label, now, limits)
    )


def _of_nobody(facts: Facts) -> Verdict:
    if facts.lost_label_of:
        return Verdict(
            "unknown",
            f"has no label, and on its machine {facts.box.machine_id} a create call lost its reply: most likely it is "
            f"{' or '.join(facts.lost_label_of)}; destroy it at the console if it is not yours",
        )
    if not facts.box.label:
        return Verdict("keep", "has no label: not ours, never touched, but counted in the account's $/h")
    return Verdict("keep", "not ours: never touched")


def _too_old(box: Instance, lease: Lease | None, now: float, limits: Limits) -> Verdict | None:
    allowed_s = limits.max_age_s if lease is None or lease.max_age_s is None else lease.max_age_s
    if box.start_date is None or now - box.start_date <= allowed_s:
        return None
    return Verdict("destroy", f"{_span(now - box.start_date)} old, at most {_span(allowed_s)}")


def _held(lease: Lease | None, now: float) -> Verdict | None:
    if lease is None or lease.hold_until is None or lease.hold_until <= now:
        return None
    return Verdict("keep", f"held for debugging for {_span(lease.hold_until - now)}")


def _dead(facts: Facts, now: float, limits: Limits) -> Verdict | None:
    """Boxes of which nothing will come, whoever answers for them."""
    if facts.failed_probes is not None and facts.failed_probes >= FAILED_PROBES:
        return Verdict("destroy", f"{facts.failed_probes} serving probes failed in a row, at most {FAILED_PROBES - 1}")
    sighting = facts.since
    if sighting is None or sighting.label != facts.box.label or sighting.state != state_of(facts.box):
        return None
    for_s = now - sighting.since
    status = "taken back by its host or a higher bid" if facts.box.taken_back else str(facts.box.actual_status)
    if sighting.state == "down" and for_s > limits.down_s:
        return Verdict("destroy", f"{status} for {_span(for_s)}, at most {_span(limits.down_s)}")
    lease = facts.seen.lease
    boot_s = max(limits.never_running_s, lease.patience_s or 0.0) if lease else limits.never_running_s
    if sighting.state == "booting" and for_s > boot_s:
        return Verdict("destroy", f"{status} for {_span(for_s)}, at most {_span(boot_s)}")
    return None


def _answered_for(facts: Facts, now: float, limits: Limits) -> Verdict | None:
    """By a live lease; but a flow that hangs renews its lease for ever."""
    if facts.seen.renewed_ago_s is not None:
        return Verdict("keep", f"lease renewed {_span(facts.seen.renewed_ago_s)} ago, by the bucket's clock")
    lease = facts.seen.lease
    if lease is None or lease.expires_at <= now:
        return None
    live = f"lease live for {_span(lease.expires_at - now)}"
    if not stuck(lease, now, limits):
        return Verdict("keep", live)
    assert lease.progress_at is not None
    still = f"no progress for {_span(now - lease.progress_at)}"
    if facts.bucket_quiet_s is None:
        return Verdict("keep", f"{live}; {still}, and the bucket does not say whether its box wrote anything since")
    if facts.bucket_quiet_s <= _patience_s(lease, limits):
        return Verdict("keep", f"{live}; {still}, but the run wrote to the bucket {_span(facts.bucket_quiet_s)} ago")
    if facts.box.gpu_util is not None and facts.box.gpu_util > IDLE_GPU_PERCENT:
        return Verdict("keep", f"{live}; {still}, but its GPU is {facts.box.gpu_util:.0f} % busy")
    wrote = "never" if math.isinf(facts.bucket_quiet_s) else f"{_span(facts.bucket_quiet_s)} ago"
    idle = "does not say what the GPU does" if facts.box.gpu_util is None else "says that the GPU is idle"
    return Verdict(
        "destroy",
        f"{still}, at most {_span(_patience_s(lease, limits))}; last written to the bucket: {wrote}; the market {idle}",
    )


def stuck(lease: Lease, now: float, limits: Limits) -> bool:
    """Whether the flow itself says in its live lease that nothing came forward for too long: reason to look for a second witness."""
    return lease.progress_at is not None and now - lease.progress_at > _patience_s(lease, limits)


def _patience_s(lease: Lease, limits: Limits) -> float:
    """A run with long steps waits longer for one than the reaper does for a run; the reaper goes by the longer."""
    return max(limits.no_progress_s, lease.patience_s or 0.0)


def _on_its_own(facts: Facts, label: Label, now: float, limits: Limits) -> Verdict:
    """No live lease and no hold."""
    lease, box = facts.seen.lease, facts.box
    if lease and lease.hold_until is not None:
        return Verdict("destroy", f"hold ended {_span(now - lease.hold_until)} ago")
    if lease:
        return Verdict("destroy", f"lease expired {_span(now - lease.expires_at)} ago")
    if facts.intended is None:
        return Verdict("unknown", "no lease, and the bucket does not say whether it ever heard of this run")
    if not facts.intended:
        # Every create call is preceded by an intent: whoever made this box wrote it elsewhere.
        return Verdict(
            "unknown",
            f"labelled as ours, but this bucket has neither lease nor intent of flow run {label.flow_run_id}: another "
            "installation's box, or LIVERY_BUCKET is the wrong one; its hard end will end it",
        )
    if box.start_date is None:
        return Verdict("unknown", "no lease, and the market does not say since when it runs")
    age_s = now - box.start_date
    if age_s <= limits.lease_s:
        return Verdict("keep", f"no lease yet, {_span(age_s)} old")
    return Verdict("destroy", f"no lease, {_span(age_s)} old")


def state_of(box: Instance) -> State:
    """`unknown` covers what the market calls so, no state at all, and words that nobody has seen yet."""
    if box.taken_back or box.actual_status in _DOWN:
        return "down"
    if box.actual_status in _BOOTING:
        return "booting"
    return "up" if box.actual_status == "running" else "unknown"


def sighted(before: Sighting | None, box: Instance, now: float) -> Sighting | None:
    """This sweep's sighting: it goes on from the one before if that was lately and of the same state. None for a box that is up or of unknown state."""
    state = state_of(box)
    if state in {"up", "unknown"}:
        return None
    goes_on = (
        before is not None
        and (before.label, before.state) == (box.label, state)
        and 0 <= now - before.seen_at <= SIGHTING_GAP_S
    )
    return replace(before, seen_at=now) if before and goes_on else Sighting(box.label, state, now, now)


def lost_labels(box: Instance, intents: Collection[Intent], seen_labels: Collection[str]) -> tuple[str, ...]:
    """Labels of the open intents that a box without a label may belong to: asked for on its machine, before it began, and seen nowhere else."""
    if box.label or box.machine_id is None:
        return ()
    return tuple(
        intent.label
        for intent in intents
        if intent.machine_id == box.machine_id
        and intent.label not in seen_labels
        # The market's clock and ours differ by seconds.
        and (box.start_date is None or box.start_date >= intent.written_at - 60)
    )


def rate_usd_h(box: Instance) -> float | None:
    """$/h that a box costs now: stopped, its disk alone; booting, what it will cost. None if the market does not say."""
    if (box.taken_back or box.actual_status in _DISK_ONLY) and box.storage_usd_hour is not None:
        return box.storage_usd_hour
    return box.dph_total_usd


def over_cap(ours: Sequence[Instance], others_usd_h: float, cap_usd_h: float) -> tuple[Instance, ...]:
    """Which of our boxes must go for the account to come under its cap in $/h: the newest first, and no more than it takes.

    `others_usd_h`: what is billed beside them. A box whose price is not stated counts as nothing and is never chosen: that would be
    destroying it for what is not known.
    """
    priced = [(box, rate) for box in ours if (rate := rate_usd_h(box)) is not None]
    total = others_usd_h + sum(rate for _, rate in priced)
    newest_first = sorted(priced, key=lambda one: (one[0].start_date or 0.0, one[0].id), reverse=True)
    gone: list[Instance] = []
    for box, rate in newest_first:
        if total <= cap_usd_h + 1e-9:
            break
        if rate > 0:
            gone.append(box)
            total -= rate
    return tuple(gone)


def within_ceiling(condemned: Sequence[T], max_reap: int) -> tuple[Sequence[T], Sequence[T]]:
    """Who goes now and who waits for the next sweep. So many at once is more likely our mistake than theirs."""
    return condemned[:max_reap], condemned[max_reap:]


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
