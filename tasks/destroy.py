"""Giving boxes back. "Gone" is said only of a box that two complete, authenticated listings do not show and that nobody finds by its id.

Everything is found by the label in the market's own list, so a caller needs no memory of what was rented. A bad key answers 404 here,
a listing may be short or empty for a moment, and a DELETE may answer 200 and do nothing: none of these is taken for success.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import ValidationError

from tasks import alarms
from tasks.domain import Destruction, Instance, Intent, Label, Listing, UnparsedInstance
from tasks.errors import LiveryError, MarketError
from tasks.lease import end_lease, read_lease, write_lease
from tasks.market import open_market
from tasks.market.protocol import Market
from tasks.settings import read_settings
from tasks.stores import open_store
from training.box.store import Store, StoreError
from training.contract import layout

T = TypeVar("T")
log = logging.getLogger(__name__)

DEADLINE_S = 900.0
HURRY_S = 15.0
PROOFS = 2
_LONGEST_PAUSE_S = 15.0


def destroy_run(
    market: Market,
    flow_run_id: str,
    *,
    deadline_s: float = DEADLINE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    store: Store | None = None,
    also: Collection[int] = (),
    up_to_attempt: int | None = None,
    poll_s: float = 3.0,
) -> Destruction:
    """Destroy every box whose label names this flow run, and those of `also`, and prove it; tried again until the deadline.

    With `up_to_attempt` boxes of later attempts are left alone: a flow run that is started again goes on counting. Raises nothing of the market's: what could not be verified is in `unverified` and `reason`. With a store the intents of the run
    are closed, or an alarm is written.
    """
    known = set(also)
    if store is not None:
        # A new box may stay out of the listing for minutes; the intent has its id.
        known |= _in_time(lambda: _open_ids(store, flow_run_id), set[int]())
    last = math.inf if up_to_attempt is None else up_to_attempt
    hunt = _Hunt(market, lambda listing: _labelled(listing, flow_run_id, last), known, deadline_s, poll_s, clock, sleep)
    result = hunt.run(flow_run_id)
    if store is not None:
        _write_down(store, result, whole_run=True, now=_wall(clock))
    return result


def destroy_boxes(
    market: Market,
    flow_run_id: str,
    instance_ids: Collection[int],
    *,
    deadline_s: float = DEADLINE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    store: Store | None = None,
    poll_s: float = 3.0,
) -> Destruction:
    """Destroy these boxes only, with the same proof."""
    result = _Hunt(market, lambda listing: set(), set(instance_ids), deadline_s, poll_s, clock, sleep).run(flow_run_id)
    if store is not None:
        _write_down(store, result, whole_run=False, now=_wall(clock))
    return result


def destroy_all(
    market: Market,
    labels: Mapping[int, str],
    *,
    deadline_s: float = DEADLINE_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    store: Store | None = None,
    poll_s: float = 3.0,
) -> Destruction:
    """Destroy boxes of several runs, by id and label, in one pursuit: they share the listings, which cost seconds each."""
    result = _Hunt(market, lambda listing: set(), set(labels), deadline_s, poll_s, clock, sleep).run("of several")
    if store is None:
        return result
    by_run: dict[str, dict[int, str]] = defaultdict(dict)
    for box, text in labels.items():
        if label := Label.parse(text):
            by_run[label.flow_run_id][box] = text
    for flow_run_id, boxes in by_run.items():
        changes = {
            "flow_run_id": flow_run_id,
            "gone": tuple(sorted(set(boxes) & set(result.gone))),
            "unverified": tuple(sorted(set(boxes) & set(result.unverified))),
            "labels": boxes,
        }
        _write_down(store, result.model_copy(update=changes), whole_run=False, now=_wall(clock))
    return result


def destroy_in_a_hurry(flow_run_id: str) -> Destruction:
    """`destroy_run` with nothing but the environment and at most 15 seconds of checks, for hooks and guards. Raises nothing of ours.

    A box that is held for debugging is kept. What is not verified in time is alarmed and left to the reaper's next sweep: the
    run's lease is ended.
    """
    try:
        settings = read_settings()
        store = open_store(settings)
        market = open_market(settings, budget_s=HURRY_S)
    except LiveryError as error:
        log.error("boxes of flow run %s may still bill: %s", flow_run_id, error)
        return Destruction(flow_run_id=flow_run_id, reason=str(error))
    return hurry(market, store, flow_run_id, poll_s=min(1.0, settings.poll_s))


def release(flow_run_id: str) -> Destruction:
    """End a hold and give back the run's boxes now, by hand. UserError from the settings; StoreError if the hold cannot be ended."""
    settings = read_settings()
    store, now = open_store(settings), time.time()
    lease = read_lease(store, flow_run_id)
    if lease is not None:
        write_lease(store, lease.model_copy(update={"hold_until": None, "expires_at": min(lease.expires_at, now)}))
    market = open_market(settings)
    return destroy_run(market, flow_run_id, store=store, also=_known_ids(store, flow_run_id), poll_s=settings.poll_s)


def hurry(
    market: Market,
    store: Store,
    flow_run_id: str,
    *,
    poll_s: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Destruction:
    """As `destroy_in_a_hurry`, with a market and a bucket that are at hand."""
    began = _wall(clock)
    nothing: tuple[float | None, list[Intent]] = (None, [])
    held_until, intents = _in_time(lambda: (_hold_of(store, flow_run_id), read_intents(store, flow_run_id)), nothing)
    if held_until is not None and held_until > began:
        return Destruction(flow_run_id=flow_run_id, kept_until=held_until)
    result = destroy_run(
        market,
        flow_run_id,
        deadline_s=HURRY_S,
        clock=clock,
        sleep=sleep,
        also={each for intent in intents for each in ids_of(intent)},
        # Each box has its intent before it is made: one of a later attempt belongs to a flow run that was started again meanwhile.
        up_to_attempt=max((intent.attempt for intent in intents), default=None),
        poll_s=poll_s,
    )

    def note() -> None:
        try:
            end_lease(store, flow_run_id, _wall(clock), of_before=began)
        finally:
            _write_down(store, result, whole_run=True, now=_wall(clock))

    _in_time(note, None)
    return result


@dataclass
class _Hunt:
    """One pursuit of some boxes until they are proved gone or the time is up."""

    market: Market
    targets: Callable[[Listing], set[int]]
    known: set[int]
    deadline_s: float
    poll_s: float
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    problem: str = ""
    dph_usd: dict[int, float] = field(default_factory=dict)
    """$/h of boxes that a listing showed, for the alarm."""
    labels: dict[int, str] = field(default_factory=dict)

    def run(self, flow_run_id: str) -> Destruction:
        end = self.clock() + self.deadline_s
        proofs, pause = 0, self.poll_s / 3
        while True:
            proofs = proofs + 1 if self._seen_gone() else 0
            if proofs >= PROOFS:
                return Destruction(flow_run_id=flow_run_id, gone=tuple(sorted(self.known)), labels=self.labels)
            left = end - self.clock()
            if left <= 0:
                return self._given_up(flow_run_id)
            # Most boxes go at once; a market that refuses is left alone for longer each time.
            self.sleep(min(left, self.poll_s / 3 if proofs else pause))
            pause = min(_LONGEST_PAUSE_S, pause * 1.5) if not proofs else pause

    def _seen_gone(self) -> bool:
        """One look: whatever is still there is asked to go, and True means that this look found nothing at all."""
        try:
            listing = self.market.list_all()
        except MarketError as error:
            self.problem = f"the boxes cannot be listed: {error}"
            # Known boxes are asked to go even blind; only calling them gone needs eyes.
            self._ask(self.known)
            return False
        present = self.targets(listing) | (self.known & _ids(listing))
        self.known |= present
        prices = {box.id: box.dph_total_usd for box in listing.instances if box.id in self.known}
        self.dph_usd |= {box: price for box, price in prices.items() if price is not None}
        self.labels |= {box.id: box.label for box in listing.instances if box.id in self.known and box.label}
        blind = _blind_spot(listing)
        # A listing that leaves rows out may leave out ours: then known boxes are asked to go unseen, too.
        self._ask(present | self.known if blind else present)
        if present:
            self.problem = blind or self.problem
            return False
        self.problem = blind
        return not blind and self._nowhere_by_id()

    def _ask(self, ids: Collection[int]) -> None:
        for instance_id in sorted(ids):
            try:
                self.market.destroy(instance_id)
                self.problem = f"box {instance_id} is still listed after its DELETE was accepted"
            except MarketError as error:
                self.problem = f"box {instance_id}: {error}"
                log.warning("%s", self.problem)

    def _nowhere_by_id(self) -> bool:
        for instance_id in sorted(self.known):
            try:
                if self.market.show(instance_id) is None:
                    continue
                self._ask({instance_id})
            except MarketError as error:
                self.problem = f"box {instance_id} cannot be looked up: {error}"
            return False
        return True

    def _given_up(self, flow_run_id: str) -> Destruction:
        reason = self.problem or "the time was up before a second listing could confirm it"
        log.error(
            "DESTROY UNVERIFIED, flow run %s: boxes %s may still bill: %s; look at the market's console, "
            "the reaper tries again",
            flow_run_id,
            ", ".join(map(str, sorted(self.known))) or "unknown",
            reason,
        )
        return Destruction(
            flow_run_id=flow_run_id,
            unverified=tuple(sorted(self.known)),
            reason=reason,
            dph_usd=sum(self.dph_usd.values()) if self.dph_usd else None,
            labels=self.labels,
        )


def _labelled(listing: Listing, flow_run_id: str, last: float) -> set[int]:
    """Ids of this run's boxes up to its attempt `last`, rows that could not be read in full among them."""
    rows: tuple[Instance | UnparsedInstance, ...] = (*listing.instances, *listing.unparsed)
    return {
        row.id
        for row in rows
        if row.id is not None
        and (label := Label.parse(row.label))
        and label.flow_run_id == flow_run_id
        and label.attempt <= last
    }


def _ids(listing: Listing) -> set[int]:
    return {box.id for box in listing.instances} | {row.id for row in listing.unparsed if row.id is not None}


def _blind_spot(listing: Listing) -> str:
    """Why absence from this listing proves nothing; empty if it does."""
    if not listing.complete:
        return f"the listing is incomplete: {listing.problem}"
    nameless = [row for row in listing.unparsed if row.id is None or row.label is None]
    return f"{len(nameless)} rows of the listing cannot be told apart: {nameless[0].problem}" if nameless else ""


def read_intents(store: Store, flow_run_id: str) -> list[Intent]:
    """The run's intents in the order of its attempts. StoreError; an object that is no intent is said and skipped."""
    found: list[Intent] = []
    for item in store.list(f"intents/{flow_run_id}/"):
        try:
            found.append(Intent.model_validate_json(store.get_bytes(item.key) or b""))
        except ValidationError:
            log.warning("%s is not an intent and is ignored", item.key)
    return found


def _write_down(store: Store, result: Destruction, *, whole_run: bool, now: float) -> None:
    """Close the intents of what is gone, or leave an alarm. A bucket that does not answer must not undo a destroy that worked."""
    try:
        if result.clean:
            _close_intents(store, result, whole_run=whole_run, now=now)
            alarms.answered(store, result.flow_run_id, None if whole_run else result.gone)
        else:
            alarm = alarms.of_run(
                store,
                result.flow_run_id,
                "destroy_unverified",
                reason=result.reason,
                do=f"{alarms.CONSOLE}; the reaper tries again at its next sweep",
                at=now,
                instances=result.unverified,
                dph_usd=result.dph_usd,
            )
            alarms.sound(store, alarm)
    except StoreError as error:
        log.error("the destroy of flow run %s is not written down: %s", result.flow_run_id, error)


def _close_intents(store: Store, result: Destruction, *, whole_run: bool, now: float) -> None:
    """An intent is `destroyed` only if its boxes were seen gone. One of which no box was seen is `unresolved`: a box may come to light yet."""
    intents = read_intents(store, result.flow_run_id)
    strays = _strays(intents, result)
    for intent in intents:
        changes: dict[str, object] = {}
        ids = [*ids_of(intent), *strays.get(intent.attempt, ())]
        if intent.attempt in strays:
            # Its process died before it heard of the box, or had given it up; the receipt needs the id.
            changes |= {"instance_id": ids[0], "also_ids": tuple(ids[1:])}
        news = intent.attempt in strays or intent.state not in {"refused", "destroyed"}
        if news and ids and set(ids) <= set(result.gone):
            changes |= {"state": "destroyed", "closed_at": now}
        elif whole_run and not ids and intent.state == "written":
            unheard = "its create call has no answer, and no box of it was seen"
            changes |= {"state": "unresolved", "closed_at": now, "reason": unheard}
        if changes:
            closed = intent.model_copy(update=changes)
            store.put_bytes(layout.intent(intent.flow_run_id, intent.attempt), closed.model_dump_json().encode())


def _strays(intents: list[Intent], result: Destruction) -> dict[int, tuple[int, ...]]:
    """Boxes that went and that no intent names, by the attempt whose label they carried, or the only one that has no box."""
    named = {each for intent in intents for each in ids_of(intent)}
    attempts = {intent.label: intent.attempt for intent in intents}
    nameless = [intent.attempt for intent in intents if not ids_of(intent) and intent.state != "refused"]
    found: dict[int, tuple[int, ...]] = {}
    for box in result.gone:
        attempt = attempts.get(result.labels.get(box, ""), nameless[0] if len(nameless) == 1 else None)
        if box not in named and attempt is not None:
            found[attempt] = (*found.get(attempt, ()), box)
    return found


def _wall(clock: Callable[[], float]) -> float:
    """The time of day. A clock of the caller's own tells it; the one that counts waiting does not."""
    return time.time() if clock is time.monotonic else clock()


def _hold_of(store: Store, flow_run_id: str) -> float | None:
    lease = read_lease(store, flow_run_id)
    return lease.hold_until if lease else None


def _known_ids(store: Store, flow_run_id: str) -> set[int]:
    return {each for intent in read_intents(store, flow_run_id) for each in ids_of(intent)}


def _open_ids(store: Store, flow_run_id: str) -> set[int]:
    intents = [intent for intent in read_intents(store, flow_run_id) if intent.state != "destroyed"]
    return {each for intent in intents for each in ids_of(intent)}


def ids_of(intent: Intent) -> tuple[int, ...]:
    return tuple(each for each in (intent.instance_id, *intent.also_ids) if each is not None)


def _in_time(read: Callable[[], T], otherwise: T, limit_s: float = 4.0) -> T:
    """What the bucket says within the limit. In a hurry an unreadable bucket is no reason to wait, nor to keep a box."""
    answer = [otherwise]

    def ask() -> None:
        try:
            answer[0] = read()
        except StoreError as error:
            log.warning("bucket not used: %s", error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit_s)
    return answer[0]
