"""The receipt: planned, paid and wasted dollars of a run, from the market's own charges and the flight record.

Anyone who can reach the bucket and the market can write it: the flow, a hook, the reaper, or a person by `python -m flows receipt`.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import Literal

from tasks.destroy import read_intents
from tasks.domain import Attempt, Charge, Flight, Receipt, ReceiptLine, Span
from tasks.errors import MarketError
from tasks.flight import closed_for_the_dead, last_sign, read_flight, with_boxes_of
from tasks.lease import read_lease
from tasks.market import open_market
from tasks.market.protocol import Market
from tasks.settings import settings
from tasks.stores import open_store
from training.box.store import Store
from training.contract import layout

log = logging.getLogger(__name__)
Writer = Literal["flow", "hook", "reaper", "command"]
DAY_S = 86_400  # a market that books by the day dates a charge at its midnight
# Bandwidth is charged by the byte, so it belongs to the steps that move bytes, whatever their length.
_DOWN_STEPS, _UP_STEPS = ("prefetch", "install"), ("upload", "export")


def settle(flow_run_id: str, written_by: Writer) -> Receipt | None:
    """Write the receipt of a run with nothing but the environment; None if that run left no flight record."""
    current = settings()
    return write_receipt(
        open_store(current), open_market(current, reaper=written_by == "reaper"), flow_run_id, written_by
    )


def write_receipt(
    store: Store,
    market: Market,
    flow_run_id: str,
    written_by: Writer,
    *,
    now: float | None = None,
    flight: Flight | None = None,
) -> Receipt | None:
    """Make the receipt and put it into the bucket. StoreError if it cannot be kept.

    The flow gives its own `flight`: what the bucket holds may be older. Everybody else reads it there.
    """
    flight = flight or read_flight(store, flow_run_id)
    if flight is None:
        return None
    flight = with_boxes_of(flight, read_intents(store, flow_run_id))
    moment = time.time() if now is None else now
    if flight.outcome == "running" and _is_dead(store, flow_run_id, written_by, moment):
        outcome = f"ended by the {written_by}"
        earlier = read_receipt(store, flight.run, flow_run_id)
        if earlier is not None and earlier.instances_left == 0 and earlier.written_at >= last_sign(flight):
            # Its boxes were gone by then, so nothing went on since.
            outcome, moment = earlier.outcome, min(moment, earlier.written_at)
        flight = closed_for_the_dead(flight, store, outcome, moment).model_copy(update={"outcome": outcome})
    receipt = _receipt(flight, market, written_by, moment)
    store.put_bytes(layout.receipt(flight.run, flow_run_id), receipt.model_dump_json(indent=1).encode())
    return receipt


def _is_dead(store: Store, flow_run_id: str, written_by: Writer, now: float) -> bool:
    """Hook and reaper come when the flow's process is gone; a person may ask for the bill of a run that goes on."""
    if written_by != "command":
        return written_by != "flow"
    lease = read_lease(store, flow_run_id)
    return lease is None or lease.expires_at <= now


def _receipt(flight: Flight, market: Market, written_by: Writer, now: float) -> Receipt:
    notes = ["the box is your own: $0, freed and not ours to destroy"] if market.owned else []
    charges = _charges(flight, market, now, notes)
    left = _instances_left(flight, market, notes)
    lines = tuple(line for attempt in flight.attempts for line in _attempt_lines(attempt, charges, now))
    by_kind: dict[str, float] = defaultdict(float)
    for charge in charges or ():
        by_kind[charge.kind] += charge.usd
    return Receipt(
        run=flight.run,
        flow_run_id=flight.flow_run_id,
        outcome=flight.outcome,
        planned_usd=flight.planned_usd,
        paid_usd=None if charges is None else round(sum(by_kind.values()), 6),
        wasted_usd=None if charges is None else round(sum(line.usd or 0.0 for line in lines if line.wasted), 6),
        charges={kind: round(usd, 6) for kind, usd in sorted(by_kind.items())},
        lines=lines,
        boxes=len(_boxes(flight)),
        instances_left=left,
        written_by=written_by,
        written_at=now,
        notes=tuple(notes),
    )


def _charges(flight: Flight, market: Market, now: float, notes: list[str]) -> list[Charge] | None:
    ids = _boxes(flight)
    if not ids:
        return []
    try:
        charges = market.charges(ids, flight.started_at - DAY_S, max(now, flight.ended_at or now) + 60)
    except MarketError as error:
        notes.append(f"the market's charges could not be read ({error}); paid and wasted are unknown, not zero")
        return None
    if silent := sorted(set(ids) - {charge.instance_id for charge in charges}):
        notes.append(
            f"the market lists no charges of box {', '.join(map(str, silent))} yet; paid and wasted are unknown, not zero; "
            f"ask again later: python -m flows receipt {flight.flow_run_id}"
        )
        return None
    return charges


def _boxes(flight: Flight) -> tuple[int, ...]:
    made = [
        each for attempt in flight.attempts for each in (attempt.instance_id, *attempt.also_ids) if each is not None
    ]
    return tuple(dict.fromkeys(made))


def _instances_left(flight: Flight, market: Market, notes: list[str]) -> int | None:
    try:
        listing = market.list_all()
    except MarketError as error:
        notes.append(f"the boxes of this run could not be listed ({error}); look at the market's console")
        return None
    if not listing.complete:
        notes.append(f"the listing of boxes is incomplete ({listing.problem}); look at the market's console")
        return None
    return len(listing.of_run(flight.flow_run_id)) + len(listing.unparsed)


def _attempt_lines(attempt: Attempt, charges: list[Charge] | None, now: float) -> list[ReceiptLine]:
    """One line a step: time-priced charges split by seconds, bytes given to the steps that moved them."""
    if attempt.instance_id is None:
        return [
            ReceiptLine(
                what="rent",
                attempt=attempt.attempt,
                instance_id=None,
                hours=0.0,
                usd=0.0,
                wasted=True,
                reason=attempt.ended,
            )
        ]
    also = [_beside(attempt, each, charges) for each in attempt.also_ids if each != attempt.instance_id]
    costs: dict[str, float] = defaultdict(float)
    for charge in charges or ():
        if charge.instance_id == attempt.instance_id:
            costs[{"down": "down", "up": "up"}.get(charge.kind, "time")] += charge.usd
    seconds = {index: _seconds(span, now) for index, span in enumerate(attempt.spans)}
    whole = sum(seconds.values()) or 1.0
    lines: list[ReceiptLine] = []
    for index, span in enumerate(attempt.spans):
        if charges is None:
            lines += _split(attempt, span, seconds[index], None)
            continue
        usd = costs["time"] * seconds[index] / whole
        usd += costs["down"] * _share(attempt.spans, span, _DOWN_STEPS) + costs["up"] * _share(
            attempt.spans, span, _UP_STEPS
        )
        lines += _split(attempt, span, seconds[index], usd)
    return [*lines, *also]


def _beside(attempt: Attempt, instance_id: int, charges: list[Charge] | None) -> ReceiptLine:
    """A second box of the same create call: nothing was ever done on it."""
    usd = None if charges is None else sum(charge.usd for charge in charges if charge.instance_id == instance_id)
    return ReceiptLine(
        what="rent",
        attempt=attempt.attempt,
        instance_id=instance_id,
        hours=0.0,
        usd=usd,
        wasted=True,
        reason=attempt.ended or "the offer was accepted twice",
    )


def _split(attempt: Attempt, span: Span, seconds: float, usd: float | None) -> list[ReceiptLine]:
    def line(part: float, wasted: bool, reason: str) -> ReceiptLine:
        return ReceiptLine(
            what=span.step,
            attempt=attempt.attempt,
            instance_id=attempt.instance_id,
            hours=round(part / 3600, 6),
            usd=round(usd * part / seconds, 6) if seconds and usd is not None else usd,
            wasted=wasted,
            reason=reason,
        )

    if attempt.wasted or not span.wasted_s or span.wasted_s >= seconds:
        wasted = attempt.wasted or bool(span.wasted_s)
        return [line(seconds, wasted, attempt.ended if wasted else span.reason)]
    return [line(seconds - span.wasted_s, False, ""), line(span.wasted_s, True, attempt.ended)]


def _seconds(span: Span, now: float) -> float:
    return max(0.0, (span.ended_at if span.ended_at is not None else now) - span.started_at)


def _share(spans: tuple[Span, ...], span: Span, steps: tuple[str, ...]) -> float:
    """This span's part of a per-byte charge: equal parts among the steps that move bytes that way, or among all if there is none."""
    movers = [other for other in spans if other.step.partition(" ")[0] in steps] or list(spans)
    return 1 / len(movers) if span in movers else 0.0


def table(receipt: Receipt) -> str:
    """The receipt as lines for a terminal or a log."""
    lines = [
        f"receipt of run '{receipt.run}' ({receipt.outcome})",
        f"  {'step':<16}{'box':>9}{'seconds':>10}{'dollars':>11}  note",
    ]
    for line in receipt.lines:
        note = f"wasted: {line.reason}" if line.wasted else ""
        lines.append(
            f"  {line.what:<16}{line.instance_id or '-':>9}{line.hours * 3600:>10.1f}{_usd(line):>11}  {note}".rstrip()
        )
    lines.append(
        f"  planned {dollars(receipt.planned_usd)}   paid {dollars(receipt.paid_usd)}   wasted {dollars(receipt.wasted_usd)}   boxes rented {receipt.boxes}"
    )
    if receipt.charges:
        lines.append("  charged for " + ", ".join(f"{kind} {dollars(usd)}" for kind, usd in receipt.charges.items()))
    lines.append(f"  instances left: {'unknown' if receipt.instances_left is None else receipt.instances_left}")
    return "\n".join([*lines, *(f"  note: {note}" for note in receipt.notes)])


def markdown(receipt: Receipt) -> str:
    """The receipt as a Prefect artifact."""
    rows = [
        f"| {line.what} | {line.instance_id or '-'} | {line.hours * 3600:.1f} | {_usd(line)} | {('wasted: ' + line.reason) if line.wasted else ''} |"
        for line in receipt.lines
    ]
    head = [
        f"## Receipt of `{receipt.run}`: {receipt.outcome}",
        f"planned **{dollars(receipt.planned_usd)}**, paid **{dollars(receipt.paid_usd)}**, wasted **{dollars(receipt.wasted_usd)}**, boxes rented {receipt.boxes}, "
        f"instances left: **{'unknown' if receipt.instances_left is None else receipt.instances_left}**",
        "",
        "| step | box | seconds | dollars | note |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    return "\n".join([*head, *rows, *(f"\n> {note}" for note in receipt.notes)])


def _usd(line: ReceiptLine) -> str:
    return "unknown" if line.usd is None else f"{line.usd:.5f}"


def dollars(usd: float | None) -> str:
    return "unknown" if usd is None else f"${usd:.4f}"


def read_receipt(store: Store, run: str, flow_run_id: str) -> Receipt | None:
    data = store.get_bytes(layout.receipt(run, flow_run_id))
    return Receipt.model_validate_json(data) if data is not None else None
