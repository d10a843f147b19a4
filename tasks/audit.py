"""The next-day audit: that billing stopped, that every receipt is whole, and that no box was billed that is nobody's.

A market books late, so on the day itself a receipt may be unknown or only so far, and a box that bills on after its destroy cannot be
seen. A day later it can: each run of the last days is held against the market's charges.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from tasks import alarms
from tasks.destroy import ids_of, read_intents
from tasks.domain import Alarm, Charge, Flight, Intent, Label, Listing, Receipt
from tasks.errors import DestroyUnverified
from tasks.lease import read_lease
from tasks.market import open_market
from tasks.market.protocol import Market
from tasks.receipt import DAY_S, dollars, moment, read_receipt, write_receipt
from tasks.settings import Settings
from tasks.stores import checked_store
from training.box.store import Store
from training.contract import layout

log = logging.getLogger(__name__)

DAYS = 3
# What a market books for a box ends a little after the box does.
BOOKED_AFTER_S = 600.0
# Two periods of the reaper, and what its sweep may take.
REAPER_SILENT_S = 2 * 300.0 + 240.0


@dataclass(frozen=True)
class AuditedRun:
    flow_run_id: str
    run: str
    outcome: str
    receipt: Receipt | None
    """None while the run goes on."""
    finding: str
    """What is wrong, or what was done; empty if all was well already."""
    bad: bool = False

    @property
    def sums(self) -> str:
        if self.receipt is None:
            return "goes on"
        return f"paid {dollars(self.receipt.paid_usd)}{' so far' if self.receipt.so_far else ''}, wasted {dollars(self.receipt.wasted_usd)}"


@dataclass(frozen=True)
class Audit:
    runs: tuple[AuditedRun, ...]
    ownerless: tuple[Alarm, ...]
    reaper: str
    """When it last saw everything."""
    standing: tuple[Alarm, ...]

    @property
    def headline(self) -> str:
        unfinished = sum(1 for each in self.runs if each.receipt is not None and not each.receipt.final)
        return f"{len(self.runs)} runs, {unfinished} receipts not whole yet, {len(self.standing)} alarms stand"

    def table(self) -> list[dict[str, object]]:
        seen = [(each.run, each.flow_run_id, each.outcome, each.sums, each.finding) for each in self.runs]
        seen += [("", each.subject, "", dollars(each.spent_usd), each.reason) for each in self.ownerless]
        return [dict(zip(("run", "flow run", "outcome", "dollars", "finding"), row, strict=True)) for row in seen]

    def text(self) -> str:
        """For a terminal or a cron mail."""
        lines = [
            f"  {each.run:<24} {each.flow_run_id}  {each.outcome}: {each.sums}{f'; {each.finding}' if each.finding else ''}"
            for each in self.runs
        ]
        lines.append(f"  reaper: {self.reaper}")
        lines += [f"  stands: {alarm.sentence}" for alarm in self.standing]
        return "\n".join([f"audit: {self.headline}", *lines])

    def raise_if_bad(self) -> None:
        """DestroyUnverified if something was billed after its destroy, or is nobody's."""
        bad = [each.finding for each in self.runs if each.bad] + [alarm.reason for alarm in self.ownerless]
        if bad:
            raise DestroyUnverified(f"{'; '.join(bad)}; {alarms.CONSOLE}")


def audit_with(settings: Settings, *, days: float = DAYS) -> Audit:
    """The audit with nothing but the environment, by the reaper's key. UserError if the bucket cannot be used at all."""
    return audit(open_market(settings, reaper=True), checked_store(settings), days=days)


def audit(market: Market, store: Store, *, days: float = DAYS, now: float | None = None) -> Audit:
    """Hold every run of the last `days` against the market's charges and boxes. Finishes receipts; sounds and clears its alarms.

    MarketError or StoreError if the charges, the boxes or the records cannot be read: then nothing is said to be well.
    """
    moment_now = time.time() if now is None else now
    since = moment_now - days * DAY_S
    flights = _flights(store, since)
    first = min([since, *(flight.started_at for flight in flights)])
    charges = market.charges(None, first - DAY_S, moment_now + 60)
    return _Books(market, store, moment_now, since, flights, charges, market.list_all()).audit()


def _flights(store: Store, since: float) -> list[Flight]:
    """Flight records touched in these days; an object that is none is said and skipped."""
    found = []
    for item in store.list(layout.FLIGHTS):
        if item.modified < since:
            continue
        try:
            found.append(Flight.model_validate_json(store.get_bytes(item.key) or b""))
        except ValidationError:
            log.warning("%s is not a flight record and is skipped", item.key)
    return sorted(found, key=lambda flight: flight.started_at)


@dataclass
class _Books:
    """What the bucket says and what the market says, side by side."""

    market: Market
    store: Store
    now: float
    since: float
    """What ended before was audited before."""
    flights: list[Flight]
    charges: list[Charge]
    listing: Listing
    changed: set[str] = field(default_factory=set)
    """Flow runs on whose bill a box was put."""

    def audit(self) -> Audit:
        ownerless = self._ownerless()
        if self.listing.complete:
            self._close_old_intents()
        for flow_run_id in self.changed:
            write_receipt(self.store, self.market, flow_run_id, "audit", now=self.now)
        runs = tuple(self._audited(flight) for flight in self.flights)
        for alarm in ownerless:
            alarms.sound(self.store, alarm)
        self._clear_answered({each.flow_run_id for each in runs if each.bad} | {alarm.subject for alarm in ownerless})
        reaper = self._look_after_the_reaper()
        return Audit(runs, tuple(ownerless), reaper, tuple(alarms.standing(self.store)))

    def _audited(self, flight: Flight) -> AuditedRun:
        lease = read_lease(self.store, flight.flow_run_id)
        if flight.outcome == "running" and lease is not None and lease.expires_at > self.now:
            return AuditedRun(flight.flow_run_id, flight.run, "running", None, "")
        receipt, finding = self._receipt(flight), ""
        if receipt is None or not receipt.final:
            receipt = write_receipt(self.store, self.market, flight.flow_run_id, "audit", now=self.now) or receipt
            finding = f"its receipt is {'whole now' if receipt is not None and receipt.final else 'not whole yet'}"
        late = _billed_late(read_intents(self.store, flight.flow_run_id), receipt, self.charges)
        if late:
            finding = self._sound_late(flight, receipt, late)
        outcome = receipt.outcome if receipt else flight.outcome
        return AuditedRun(flight.flow_run_id, flight.run, outcome, receipt, finding, bad=bool(late))

    def _receipt(self, flight: Flight) -> Receipt | None:
        try:
            return read_receipt(self.store, flight.run, flight.flow_run_id)
        except ValidationError:
            log.warning("%s is not a receipt and is written again", layout.receipt(flight.run, flight.flow_run_id))
            return None

    def _sound_late(self, flight: Flight, receipt: Receipt | None, late: dict[int, tuple[float, float]]) -> str:
        told = "; ".join(
            f"box {box} was seen gone at {moment(gone_at)} and is billed until {moment(until)}"
            for box, (gone_at, until) in late.items()
        )
        reason = f"{told}{self._listed(late)}"
        alarm = Alarm(
            what="billed_after_destroy",
            subject=flight.flow_run_id,
            run=flight.run,
            instances=tuple(sorted(late)),
            dph_usd=self._dph(late),
            spent_usd=receipt.paid_usd if receipt else None,
            reason=reason,
            do=f"{alarms.CONSOLE}, destroy it there if it is still listed, and claim the charge with the market",
            at=self.now,
        )
        alarms.sound(self.store, alarm)
        return reason

    def _ownerless(self) -> list[Alarm]:
        """Boxes that were billed, carry our label or none, and stand in no intent. What the account's owner labelled otherwise is his."""
        owned = {box for flight in self.flights for each in self._intents(flight) for box in ids_of(each)}
        labels = {
            charge.instance_id: charge.label
            for charge in self.charges
            if charge.instance_id not in owned and (charge.until is None or charge.until >= self.since)
        }
        found = []
        for box, text in labels.items():
            label = Label.parse(text)
            if (text and label is None) or (label and self._adopted(box, label)):
                continue
            why = f"its label {text} is of no run that the bucket knows" if text else "it carries no label"
            found.append(
                Alarm(
                    what="billed_without_owner",
                    subject=f"box-{box}",
                    instances=(box,),
                    dph_usd=self._dph((box,)),
                    spent_usd=round(sum(each.usd for each in self.charges if each.instance_id == box), 6),
                    reason=f"box {box} was billed and is nobody's: {why}{self._listed((box,))}",
                    do=f"{alarms.CONSOLE}; destroy it there if you do not know it",
                    at=self.now,
                )
            )
        return found

    def _adopted(self, box: int, label: Label) -> bool:
        """Whether a run's intent has the box's label; a box that it did not know is put on that run's bill."""
        for intent in read_intents(self.store, label.flow_run_id):
            if box in ids_of(intent):
                return True
            if intent.label == label.text:
                ids = (*ids_of(intent), box)
                self._write(intent.model_copy(update={"instance_id": ids[0], "also_ids": ids[1:]}))
                self.changed.add(label.flow_run_id)
                log.warning(
                    "box %d was billed and stood in no intent; it is on the bill of flow run %s now",
                    box,
                    label.flow_run_id,
                )
                return True
        return False

    def _close_old_intents(self) -> None:
        """An intent whose create call was never answered, and of which no box and no charge came to light in its time, made none."""
        seen = {charge.label for charge in self.charges}
        seen |= {box.label for box in self.listing.instances} | {row.label for row in self.listing.unparsed}
        for intent in (each for flight in self.flights for each in self._intents(flight)):
            unheard = intent.state in {"written", "unresolved"} and not ids_of(intent)
            if unheard and self.now >= intent.owned_until and intent.label not in seen:
                why = "no box and no charge of it came to light within a day"
                self._write(intent.model_copy(update={"state": "refused", "closed_at": self.now, "reason": why}))

    def _clear_answered(self, found: set[str]) -> None:
        """Alarms of earlier audits that this one does not find again."""
        for alarm in alarms.standing(self.store):
            if alarm.what in {"billed_after_destroy", "billed_without_owner"} and alarm.subject not in found:
                alarms.clear(self.store, alarm.subject)

    def _look_after_the_reaper(self) -> str:
        """Alarm if its last success lies too far back. One that never was there is told only where boxes of ours are."""
        ours = [box for box in self.listing.instances if Label.parse(box.label)]
        last = _last_success(self.store)
        if last is not None and self.now - last <= REAPER_SILENT_S:
            if any(alarm.what == "reaper_silent" for alarm in alarms.standing(self.store)):
                alarms.clear(self.store, "reaper")
            return f"last saw everything at {moment(last)}"
        said = "has never seen everything" if last is None else f"last saw everything at {moment(last)}"
        if last is not None or ours:
            alarm = Alarm(
                what="reaper_silent",
                subject="reaper",
                instances=tuple(box.id for box in ours),
                dph_usd=self._dph(box.id for box in ours),
                reason=f"the reaper {said}; nobody stands behind the flows of these boxes",
                do="look at its process (deployment reaper/cron), and sweep by hand: python -m flows.reaper --once",
                at=self.now,
            )
            alarms.sound(self.store, alarm)
        return said

    def _intents(self, flight: Flight) -> list[Intent]:
        return read_intents(self.store, flight.flow_run_id)

    def _write(self, intent: Intent) -> None:
        key = layout.intent(intent.flow_run_id, intent.attempt)
        self.store.put_bytes(key, intent.model_dump_json().encode())

    def _dph(self, boxes: Iterable[int]) -> float | None:
        """$/h of those that are still listed; 0 if none of them is, None if a price or the list is not known."""
        wanted = set(boxes)
        prices = [box.dph_total_usd for box in self.listing.instances if box.id in wanted]
        return None if not self.listing.complete or None in prices else sum(price or 0.0 for price in prices)

    def _listed(self, boxes: Iterable[int]) -> str:
        still = sorted(set(boxes) & {box.id for box in self.listing.instances})
        return f", and is still listed ({', '.join(map(str, still))})" if still else ""


def _billed_late(
    intents: Iterable[Intent], receipt: Receipt | None, charges: Sequence[Charge]
) -> dict[int, tuple[float, float]]:
    """Boxes that were billed for a time after they were seen gone: when that was, and the end of the charge."""
    late: dict[int, tuple[float, float]] = {}
    for intent in intents:
        gone_at = intent.closed_at
        if gone_at is None and receipt is not None and receipt.instances_left == 0:
            gone_at = receipt.written_at
        if intent.state != "destroyed" or gone_at is None:
            continue
        for charge in charges:
            if charge.instance_id in ids_of(intent) and charge.usd > 0 and _is_after(charge, gone_at):
                until = max(late.get(charge.instance_id, (0.0, 0.0))[1], charge.until or 0.0)
                late[charge.instance_id] = (gone_at, until)
    return late


def _is_after(charge: Charge, gone_at: float) -> bool:
    """A charge dated by the day says nothing of the day that the box went; one that begins on a later day does."""
    if charge.until is None:
        return False
    since = charge.since if charge.since is not None else charge.until
    by_the_day = since % DAY_S == 0 and charge.until % DAY_S == 0
    return since >= gone_at + BOOKED_AFTER_S if by_the_day else charge.until > gone_at + BOOKED_AFTER_S


def _last_success(store: Store) -> float | None:
    data = store.get_bytes(layout.REAPER_LAST_SUCCESS)
    try:
        return float(json.loads(data)["at"]) if data is not None else None
    except (ValueError, KeyError, TypeError):
        log.warning("%s cannot be read and counts for nothing", layout.REAPER_LAST_SUCCESS)
        return None
