"""An uplink that will not make it: wait for it, send less, or move to another box, whichever is projected to cost least. No clock, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tasks.domain import Offer
from tasks.rules.pricing import MAX_DOWN_MBPS, Work, dph_at_disk, money, storage_usd_h, transfer_s
from training.contract.durable import LOSSES_PER_H

Way = Literal["wait", "light", "move"]


@dataclass(frozen=True)
class NewBox:
    """What it takes until another box trains, and what it asks then."""

    setup_s: float
    setup_usd: float
    dph_usd: float
    up_mbps: float
    up_usd_gb: float


@dataclass(frozen=True)
class Predicament:
    """An upload that will not end in time, and all that decides what to do about it."""

    what: str
    total_bytes: int
    left_bytes: int
    light_bytes: int | None
    """All that the light form of this checkpoint has; None if it is light already, or if training goes on from it in mid-phase."""
    later_checkpoints: int
    """That must still follow it up this link: the last one of each phase to come. The export is a copy inside the bucket."""
    mbps: float
    trains_s: float
    """Training that goes on meanwhile; only after that the card waits for the link."""
    unsaved_s: float
    """Training that only this box holds: it is done again if the box is left or lost."""
    dph_usd: float
    up_usd_gb: float
    left_usd: float
    """Of budget.max_usd."""
    left_s: float
    """Of budget.max_hours."""
    new_box: NewBox | None
    """None: no other offer fits."""
    light_allowed: bool = True
    """By the recipe's `allow: [light_checkpoints]`."""


@dataclass(frozen=True)
class Projection:
    """One way out: dollars and seconds from now until the run's last checkpoint is in the bucket, training paid as well."""

    way: Way
    usd: float
    seconds: float
    problem: str = ""
    """Why it cannot be taken."""

    def __str__(self) -> str:
        name = {"wait": "waiting", "light": "sending less", "move": "another box"}[self.way]
        if math.isinf(self.usd):
            return f"{name} {self.problem or 'never ends'}"
        return f"{name} {money(self.usd)} and {self.seconds / 3600:.2f} h{f' ({self.problem})' if self.problem else ''}"


@dataclass(frozen=True)
class Decision:
    way: Way
    sentence: str
    """What was seen, what each of the three ways is projected to cost, and which is taken."""


def decide(seen: Predicament) -> Decision:
    """The cheapest way that budget.max_usd and budget.max_hours allow.

    If they allow none, the box keeps sending, by the shorter way: another box would cost money that is not there, and the run ends at
    its budget with what is in the bucket by then.
    """
    ways = [_wait(seen), _light(seen), _move(seen)]
    possible = [way for way in ways if not way.problem and math.isfinite(way.usd)]
    taken = min(possible or [way for way in ways if way.way != "move"], key=lambda way: (way.usd, way.seconds))
    said = {"wait": "it is waited for", "light": "less is sent", "move": "the box is left"}[taken.way]
    if not possible:
        said += ", for no way fits the budget"
    done = f"{_gb(seen.left_bytes)} of {_gb(seen.total_bytes)} left at {seen.mbps:.1f} Mbps"
    return Decision(taken.way, f"{seen.what}: {done}; {', '.join(map(str, ways))}: {said}")


def setup_of(work: Work, offer: Offer) -> NewBox:
    """A new box from its create call to its first step. The GPU is not billed while it boots; unfit boxes are expected on the way."""
    extra, disk_usd_h = work.overheads, storage_usd_h(offer, work.disk_gb)
    dph_usd = dph_at_disk(offer, work.disk_gb)
    down_gb = work.model_gb + extra.wheels_and_image_gb
    idle_s = (
        extra.install_s
        + extra.phase_start_s
        + transfer_s(work.model_gb, min(offer.inet_down_mbps or 0.0, MAX_DOWN_MBPS))
    )
    unfit_usd = extra.install_s / 3600 * dph_usd + extra.wheels_and_image_gb * offer.inet_down_usd_gb
    return NewBox(
        setup_s=extra.boot_s + idle_s + work.unfit_boxes * (extra.boot_s + extra.install_s),
        setup_usd=extra.boot_s / 3600 * disk_usd_h
        + idle_s / 3600 * dph_usd
        + down_gb * offer.inet_down_usd_gb
        + work.unfit_boxes * unfit_usd,
        dph_usd=dph_usd,
        up_mbps=offer.inet_up_mbps or 0.0,
        up_usd_gb=offer.inet_up_usd_gb,
    )


def _wait(seen: Predicament) -> Projection:
    return _stay(seen, "wait", seen.left_bytes, seen.total_bytes)


def _light(seen: Predicament) -> Projection:
    if seen.light_bytes is None:
        return Projection("light", math.inf, math.inf, "is not possible")
    if not seen.light_allowed:
        return Projection("light", math.inf, math.inf, "is not allowed (allow: [light_checkpoints])")
    # The light form is another file: nothing of what has arrived counts for it. What follows is sent lightly, too.
    return _stay(seen, "light", seen.light_bytes, seen.light_bytes)


def _stay(seen: Predicament, way: Way, now_bytes: int, each_bytes: int) -> Projection:
    later_bytes = seen.later_checkpoints * each_bytes
    send_s, all_s = _seconds(now_bytes, seen.mbps), _seconds(now_bytes + later_bytes, seen.mbps)
    if math.isinf(all_s):
        return Projection(way, math.inf, math.inf)
    seconds = max(seen.trains_s, all_s)
    # Half of what is trained meanwhile is at risk on average, beside what is at risk already.
    redo_s = seen.unsaved_s + min(send_s, seen.trains_s) / 2
    setup_usd = seen.new_box.setup_usd if seen.new_box else 0.0
    risk_usd = min(1.0, LOSSES_PER_H * send_s / 3600) * (redo_s / 3600 * seen.dph_usd + setup_usd)
    usd = seconds / 3600 * seen.dph_usd + (now_bytes + later_bytes) / 1e9 * seen.up_usd_gb + risk_usd
    return _within(seen, Projection(way, usd, seconds))


def _move(seen: Predicament) -> Projection:
    box = seen.new_box
    if box is None:
        return Projection("move", math.inf, math.inf, "is not to be had")
    trains_s = seen.unsaved_s + seen.trains_s
    total = (1 + seen.later_checkpoints) * seen.total_bytes
    # Its last checkpoint can only be sent when it is trained.
    seconds = max(trains_s + _seconds(seen.total_bytes, box.up_mbps), _seconds(total, box.up_mbps))
    if math.isinf(seconds):
        return Projection("move", math.inf, math.inf, "states no uplink")
    usd = box.setup_usd + seconds / 3600 * box.dph_usd + total / 1e9 * box.up_usd_gb
    return _within(seen, Projection("move", usd, box.setup_s + seconds))


def _within(seen: Predicament, way: Projection) -> Projection:
    if way.usd > seen.left_usd:
        return Projection(way.way, way.usd, way.seconds, f"{money(max(0.0, seen.left_usd))} of the budget left")
    if way.seconds > seen.left_s:
        return Projection(way.way, way.usd, way.seconds, f"{max(0.0, seen.left_s) / 3600:.2f} h of the budget left")
    return way


def _seconds(count: int, mbps: float) -> float:
    return transfer_s(count / 1e9, mbps)


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10_000_000 else f"{count / 1e6:.2f} MB"
