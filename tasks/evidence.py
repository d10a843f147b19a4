"""What the bucket knows about the boxes of the account: leases, intents, earlier sightings. Read once a sweep, and no more than it takes.

A request to a bucket costs milliseconds of computing and tens of waiting, so one listing stands for a thousand questions: which runs have an
intent, which leases were renewed just now. What cannot be read is said to be so, and is nowhere taken for "there is none".
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace

from pydantic import ValidationError

from tasks.domain import INTENT_OWNED_S, Instance, Intent, Label
from tasks.lease import lease_of, look_for_lease
from tasks.rules.reaping import Facts, LeaseSeen, Limits, Sighting, lost_labels, sighted, stuck
from training.box.store import ObjectInfo, Store, StoreError, StoreUnreachable
from training.contract import layout

log = logging.getLogger(__name__)

# Leases that a sweep reads whatever they are. Of more than that it reads those that the bucket does not list as just renewed, and of
# the rest so many by turns, for what stands in them beside the life of their run: of a thousand boxes each within an hour.
OUTRIGHT = 100
# A renewal comes three times in a lease (LIVERY_LEASE_RENEW_S), so one that is listed as younger than a third of it is live.
JUST_RENEWED = 3
_PERIOD_S = 300.0
_READERS = 16
# So many questions without an answer, and the bucket is not asked again in this sweep: each costs its time-outs.
_UNANSWERED = 3
# The call may still be under way, or its box on the way into the listing.
_UNHEARD_S = 300.0
# For so long a box that nobody has seen counts against what may be rented beside it. Listings since then would have shown it.
PROMISED_S = 3600.0
# Written by the flow or a reaper, so no witness of what the box does.
_NOT_THE_BOXS = ("receipts/", "claims/", "events/")


@dataclass(frozen=True)
class Evidence:
    """One sweep's reading of the bucket. Times named `_ago_s` or `quiet` are by the bucket's own clock, all others by the reaper's."""

    leases: Mapping[str, LeaseSeen] = field(default_factory=dict)
    attempts: Mapping[str, int] | None = None
    """The highest attempt of each run that has an intent; None: the intents could not be listed."""
    unseen: tuple[Intent, ...] = ()
    """Create calls that had no answer, less than a day old, and whose label no box carries."""
    unlisted: tuple[Intent, ...] = ()
    """Intents whose box was there once and is not listed."""
    sightings: Mapping[int, Sighting] = field(default_factory=dict)
    quiet_s: Mapping[str, float] = field(default_factory=dict)
    """By run: how long ago its box last wrote to the bucket; only of runs whose lease tells of no progress."""
    labels: frozenset[str] = frozenset()
    twins: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Boxes by the label that they share: an offer can be accepted twice, and a live lease would speak for both."""
    tried_at: Mapping[int, float] = field(default_factory=dict)
    """Boxes that an earlier sweep asked to go and could not prove gone, and when."""
    closed: Mapping[str, float] = field(default_factory=dict)
    """Intents that need not be read again, and when each was last written."""
    problem: str = ""
    """Why the bucket could not be asked; empty if it could."""

    @property
    def promised_usd_h(self) -> float:
        """$/h of the boxes that may exist and that nobody has seen."""
        return sum(intent.dph_usd for intent in self.unseen)

    def later_attempt(self, label: Label) -> bool:
        """Whether its run has gone on to another box, so that this one may have been given up."""
        return (self.attempts or {}).get(label.flow_run_id, 0) > label.attempt

    def facts(self, box: Instance, given_up: bool = False, twin_of: int | None = None) -> Facts:
        label = Label.parse(box.label)
        if label is None:
            return Facts(box, lost_label_of=lost_labels(box, self.unseen, self.labels))
        seen = self.leases.get(label.flow_run_id, LeaseSeen(problem=self.problem))
        return Facts(
            box,
            seen,
            intended=None if self.attempts is None else label.flow_run_id in self.attempts,
            given_up=given_up,
            twin_of=twin_of,
            since=self.sightings.get(box.id),
            bucket_quiet_s=self.quiet_s.get(seen.lease.run) if seen.lease else None,
        )

    def with_fresh_lease(self, store: Store, flow_run_id: str) -> Evidence:
        """The same, with this run's lease read again."""
        return replace(self, leases={**self.leases, flow_run_id: look_for_lease(store, flow_run_id)})


def gather(store: Store, boxes: Collection[Instance], now: float, limits: Limits) -> Evidence:
    """Read what is needed to judge these boxes. Raises nothing of the bucket's: `problem`, or a lease's own, says what is not known."""
    ours = [(box, label) for box in boxes if (label := Label.parse(box.label))]
    labels = frozenset(box.label for box in boxes if box.label)
    try:
        bucket_now = store.server_time()
        listed = store.list("intents/")
    except StoreError as error:
        return Evidence(labels=labels, problem=str(error))
    before, closed, tried_at = _remembered(store)
    intents, closed = _open_intents(store, listed, labels, closed, bucket_now)
    ids = {box.id for box in boxes}
    leases = _leases(store, ours, bucket_now, now, limits)
    return Evidence(
        leases=leases,
        attempts=_highest(listed, [label for _, label in ours]),
        unseen=tuple(intent for intent in intents if _is_unheard(intent, now)),
        unlisted=tuple(
            intent
            for intent in intents
            if intent.instance_id is not None and not ids & {intent.instance_id, *intent.also_ids}
        ),
        sightings={box.id: seen for box, _ in ours if (seen := sighted(before.get(box.id), box, now))},
        quiet_s=_quiet(store, leases.values(), bucket_now, now, limits),
        labels=labels,
        twins=_twins(ours),
        tried_at={box: at for box, at in tried_at.items() if box in ids},
        closed=closed,
    )


def promised(store: Store, boxes: Collection[Instance], now: float) -> tuple[Intent, ...]:
    """Create calls of the last hour that had no answer and whose label no box carries: each may be a box that bills and is not listed yet. StoreError."""
    labels = {box.label for box in boxes if box.label}
    bucket_now = store.server_time()
    recent = [item for item in store.list("intents/") if bucket_now - item.modified <= PROMISED_S]
    intents, _ = _open_intents(store, recent, labels, {}, bucket_now)
    return tuple(intent for intent in intents if _is_unheard(intent, now))


def remember(store: Store, evidence: Evidence, tried_at: Mapping[int, float]) -> None:
    """Leave for the next sweep what this one saw and could not destroy. A sweep that cannot is no worse than the first one."""
    if evidence.problem:
        return
    memory = {
        "sightings": {str(box): asdict(seen) for box, seen in evidence.sightings.items()},
        "closed": dict(evidence.closed),
        "tried_at": {str(box): at for box, at in {**evidence.tried_at, **tried_at}.items()},
    }
    try:
        store.put_bytes(layout.REAPER_MEMORY, json.dumps(memory).encode())
    except StoreError as error:
        log.warning("what this sweep saw is not remembered: %s", error)


def _remembered(store: Store) -> tuple[dict[int, Sighting], dict[str, float], dict[int, float]]:
    try:
        memory = json.loads(store.get_bytes(layout.REAPER_MEMORY) or b"{}")
        sightings = {int(box): Sighting(**seen) for box, seen in memory.get("sightings", {}).items()}
        closed = {str(key): float(at) for key, at in memory.get("closed", {}).items()}
        return sightings, closed, {int(box): float(at) for box, at in memory.get("tried_at", {}).items()}
    except (StoreError, ValueError, TypeError, AttributeError) as error:
        log.warning("what earlier sweeps saw cannot be read, so this one is the first: %s", error)
        return {}, {}, {}


def _twins(ours: Iterable[tuple[Instance, Label]]) -> dict[str, frozenset[int]]:
    carriers: dict[str, set[int]] = defaultdict(set)
    for box, label in ours:
        carriers[label.text].add(box.id)
    return {label: frozenset(boxes) for label, boxes in carriers.items() if len(boxes) > 1}


def _leases(
    store: Store, ours: Collection[tuple[Instance, Label]], bucket_now: float, now: float, limits: Limits
) -> dict[str, LeaseSeen]:
    wanted = {label.flow_run_id for _, label in ours if now <= label.hard_end}
    seen: dict[str, LeaseSeen] = {}
    if len(wanted) > OUTRIGHT:
        # Only its content tells whether an old box may become older still.
        old = {
            label.flow_run_id
            for box, label in ours
            if box.start_date is None or now - box.start_date > limits.max_age_s
        }
        seen = _just_renewed(store, wanted - old, bucket_now, now, limits)
    return seen | _read(store, sorted(wanted - set(seen)))


def _just_renewed(
    store: Store, wanted: Collection[str], bucket_now: float, now: float, limits: Limits
) -> dict[str, LeaseSeen]:
    try:
        ago_s = {_run_of(item): max(0.0, bucket_now - item.modified) for item in store.list("leases/")}
    except StoreError as error:
        log.warning("leases cannot be listed, so each is read: %s", error)
        return {}
    turns = math.ceil(len(wanted) / OUTRIGHT)
    turn = int(now // _PERIOD_S) % turns if turns else 0
    return {
        run: LeaseSeen(renewed_ago_s=ago_s[run])
        for run in wanted
        if ago_s.get(run, math.inf) < limits.lease_s / JUST_RENEWED and zlib.crc32(run.encode()) % turns != turn
    }


def _read(store: Store, flow_run_ids: Collection[str]) -> dict[str, LeaseSeen]:
    contents = _contents(store, [layout.lease(run) for run in flow_run_ids])
    return {run: lease_of(layout.lease(run), contents[layout.lease(run)]) for run in flow_run_ids}


def _contents(store: Store, keys: Sequence[str]) -> dict[str, bytes | StoreError | None]:
    """Each object's content, None if there is none, or why that is not known."""
    unanswered: list[StoreError] = []

    def read(key: str) -> bytes | StoreError | None:
        if len(unanswered) >= _UNANSWERED:
            return StoreError(f"{unanswered[0]}; not asked again in this sweep")
        try:
            return store.get_bytes(key)
        except StoreUnreachable as error:
            unanswered.append(error)
            return error
        except StoreError as error:
            return error

    if len(keys) < 2:
        return {key: read(key) for key in keys}
    with ThreadPoolExecutor(min(_READERS, len(keys))) as readers:
        return dict(zip(keys, readers.map(read, keys), strict=True))


def _open_intents(
    store: Store, listed: Iterable[ObjectInfo], labels: Collection[str], closed: Mapping[str, float], bucket_now: float
) -> tuple[list[Intent], dict[str, float]]:
    """Intents of the last day that are not closed and whose label no listed box carries, and which ones need not be read again."""
    carried = {layout.intent(label.flow_run_id, label.attempt) for text in labels if (label := Label.parse(text))}
    recent = [item for item in listed if bucket_now - item.modified <= INTENT_OWNED_S and item.key not in carried]
    contents = _contents(store, [item.key for item in recent if closed.get(item.key) != item.modified])
    found, still_closed = [], {}
    for item in recent:
        intent = _intent(item.key, contents[item.key]) if item.key in contents else None
        if item.key not in contents or (intent is not None and intent.state in {"refused", "destroyed"}):
            still_closed[item.key] = item.modified
        elif intent is not None:
            found.append(intent)
    return found, still_closed


def _intent(key: str, content: bytes | StoreError | None) -> Intent | None:
    try:
        return Intent.model_validate_json(content) if isinstance(content, bytes) else None
    except ValidationError:
        log.warning("%s is not an intent and is left out", key)
        return None


def _is_unheard(intent: Intent, now: float) -> bool:
    """Its create call had no answer that anybody heard: a box may be behind it."""
    if intent.instance_id is not None or now > intent.owned_until:
        return False
    return intent.state == "unresolved" or (intent.state == "written" and now - intent.written_at > _UNHEARD_S)


def _highest(listed: Iterable[ObjectInfo], labels: Iterable[Label]) -> dict[str, int]:
    """Attempts of the runs with an intent, those included that only a box tells of."""
    highest: dict[str, int] = {}
    for item in listed:
        # A bucket's console marks a folder by an object, and a person may leave a note.
        _, flow_run_id, attempt = (*item.key.removesuffix(".json").split("/", 2), "", "")[:3]
        if attempt.isdigit():
            highest[flow_run_id] = max(highest.get(flow_run_id, 0), int(attempt))
    for label in labels:
        if label.flow_run_id in highest:
            highest[label.flow_run_id] = max(highest[label.flow_run_id], label.attempt)
    return highest


def _quiet(
    store: Store, leases: Iterable[LeaseSeen], bucket_now: float, now: float, limits: Limits
) -> dict[str, float]:
    quiet_s: dict[str, float] = {}
    for lease in (seen.lease for seen in leases):
        if lease is None or lease.expires_at <= now or not stuck(lease, now, limits):
            continue
        prefix = f"{layout.run(lease.run)}/"
        try:
            written = [
                item.modified
                for item in store.list(prefix)
                if not item.key.removeprefix(prefix).startswith(_NOT_THE_BOXS)
            ]
        except StoreError as error:
            log.warning("run '%s': what its box wrote cannot be listed: %s", lease.run, error)
            continue
        quiet_s[lease.run] = bucket_now - max(written, default=-math.inf)
    return quiet_s


def _run_of(item: ObjectInfo) -> str:
    return item.key.removeprefix("leases/").removesuffix(".json")
