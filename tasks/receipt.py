"""The receipt: planned, paid and wasted dollars of a run, from the market's own charges and the flight record.

Anyone who can reach the bucket and the market can write it: the flow, a hook, the reaper, the daily audit, or a person by
`python -m flows receipt`. A market books late, so a receipt may say "so far"; whoever comes later makes it whole.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

from tasks.destroy import read_intents
from tasks.domain import Attempt, Charge, Flight, Receipt, ReceiptLine, Span
from tasks.errors import MarketError
from tasks.flight import (
    UNTIL_GONE,
    closed_for_the_dead,
    last_sign,
    read_flight,
    with_boxes_of,
    with_time_until_gone,
)
from tasks.lease import read_lease
from tasks.market import open_market
from tasks.market.protocol import Market
from tasks.settings import settings
from tasks.stores import open_store
from training.box.store import Store
from training.contract import layout

log = logging.getLogger(__name__)
Writer = Literal["flow", "hook", "reaper", "command", "audit"]
DAY_S = 86_400  # a market that books by the day dates a charge at its midnight
# Bandwidth is charged by the byte, so it belongs to the steps that move bytes, whatever their length.
_DOWN_STEPS, _UP_STEPS = ("prefetch", "install"), ("upload", "export")
# All else is a box's way to its first step of training.
_WORK_STEPS = ("phase", "upload", "evaluate", "export")
# What the market books for a box may end this much before the flow last saw it.
_BOOKING_SLACK_S = 60.0


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
    intents = read_intents(store, flow_run_id)
    flight = with_boxes_of(flight, intents)
    moment = time.time() if now is None else now
    if flight.outcome == "running" and _is_dead(store, flow_run_id, written_by, moment):
        outcome = f"ended by the {written_by}"
        earlier = read_receipt(store, flight.run, flow_run_id)
        if earlier is not None and earlier.instances_left == 0 and earlier.written_at >= last_sign(flight):
            # Its boxes were gone by then, so nothing went on since.
            outcome, moment = earlier.outcome, min(moment, earlier.written_at)
        flight = closed_for_the_dead(flight, store, outcome, moment).model_copy(update={"outcome": outcome})
    receipt = _receipt(with_time_until_gone(flight, intents), market, written_by, moment)
    store.put_bytes(layout.receipt(flight.run, flow_run_id), receipt.model_dump_json(indent=1).encode())
    return receipt


def _is_dead(store: Store, flow_run_id: str, written_by: Writer, now: float) -> bool:
    """Hook and reaper come when the flow's process is gone; a person may ask for the bill of a run that goes on."""
    if written_by not in {"command", "audit"}:
        return written_by != "flow"
    lease = read_lease(store, flow_run_id)
    return lease is None or lease.expires_at <= now


def _receipt(flight: Flight, market: Market, written_by: Writer, now: float) -> Receipt:
    notes = ["the box is your own: $0, freed and not ours to destroy"] if market.owned else []
    notes += [f"box {each.instance_id}: {sentence}" for each in flight.attempts for sentence in each.decisions]
    charges = _charges(flight, market, now, notes)
    left = _instances_left(flight, market, notes)
    lines = tuple(line for attempt in flight.attempts for line in _attempt_lines(attempt, charges, now))
    by_kind: dict[str, float] = defaultdict(float)
    for charge in charges or ():
        by_kind[charge.kind] += charge.usd
    behind = {} if market.owned or not charges else not_booked_yet(flight, charges, now)
    so_far = charges is not None and (bool(behind) or bool(left) or flight.outcome == "running")
    booked_until = (
        None if None in behind.values() else min((at for at in behind.values() if at is not None), default=None)
    )
    if behind:
        notes.append(
            f"so far: box {', '.join(map(str, behind))} is booked until {moment(booked_until)} only; "
            f"the daily audit makes this whole, or: python -m flows receipt {flight.flow_run_id}"
        )
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
        so_far=so_far,
        booked_until=booked_until,
        planned=flight.planned,
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
    silent = sorted(set(ids) - {charge.instance_id for charge in charges})
    if silent and booked_for_good(last_sign(flight), now):
        notes.append(f"the market charged nothing for box {', '.join(map(str, silent))}")
    elif silent:
        notes.append(
            f"the market lists no charges of box {', '.join(map(str, silent))} yet; paid and wasted are unknown, not zero; "
            f"the daily audit finishes this, or: python -m flows receipt {flight.flow_run_id}"
        )
        return None
    return charges


def not_booked_yet(flight: Flight, charges: Sequence[Charge], now: float) -> dict[int, float | None]:
    """Boxes whose charges do not reach to where the flow last saw them: until when they do, None if the market does not say."""
    behind: dict[int, float | None] = {}
    for attempt in flight.attempts:
        if attempt.instance_id is None or not attempt.spans:
            continue
        seen = attempt.spans[-1].ended_at or now
        dates = [booked_until(charge, now) for charge in charges if charge.instance_id == attempt.instance_id]
        known = [date for date in dates if date is not None]
        until = max(known) if known else None
        if (until is None or until < seen - _BOOKING_SLACK_S) and not booked_for_good(seen, now):
            behind[attempt.instance_id] = until
    return behind


def booked_until(charge: Charge, now: float) -> float | None:
    """The moment up to which a charge is whole; of one that is dated by the day, the day's beginning until the day is over."""
    if charge.until is None:
        return None
    since = charge.since if charge.since is not None else charge.until
    if since % DAY_S or charge.until % DAY_S:
        return charge.until
    day_end = max(charge.until, since + DAY_S)
    return day_end if now >= day_end else since


def booked_for_good(ended: float, now: float) -> bool:
    """Whether the day after the day that something ended is over: what is not booked by then never will be."""
    return now >= (math.floor(ended / DAY_S) + 2) * DAY_S


def moment(at: float | None) -> str:
    return "an unknown time" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


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

    if span.step == UNTIL_GONE:
        return [line(seconds, True, span.reason)]
    if not attempt.wasted and attempt.after_loss and span.step.partition(" ")[0] not in _WORK_STEPS:
        # Paid once already, on the box that was lost.
        return [line(seconds, True, f"{_nth(attempt.attempt)} box after: {attempt.after_loss}")]
    if attempt.wasted or not span.wasted_s or span.wasted_s >= seconds:
        wasted = attempt.wasted or bool(span.wasted_s)
        return [line(seconds, wasted, attempt.ended if wasted else span.reason)]
    return [line(seconds - span.wasted_s, False, ""), line(span.wasted_s, True, attempt.ended)]


def _nth(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


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
    lines += [f"  {sentence}" for sentence in _by_step(receipt)]
    lines += [f"  wasted {dollars(usd)} by: {reason}" for reason, usd in waste_by_reason(receipt).items()]
    lines.append(f"  {'   '.join(_totals(receipt))}   boxes rented {receipt.boxes}")
    lines += [f"  {sentence}" for sentence in _by_kind(receipt)]
    lines.append(f"  instances left: {'unknown' if receipt.instances_left is None else receipt.instances_left}")
    return "\n".join([*lines, *(f"  note: {note}" for note in receipt.notes)])


def markdown(receipt: Receipt) -> str:
    """The receipt as a Prefect artifact."""
    rows = [
        f"| {line.what} | {line.instance_id or '-'} | {line.hours * 3600:.1f} | {_usd(line)} | {('wasted: ' + line.reason) if line.wasted else ''} |"
        for line in receipt.lines
    ]
    totals = ", ".join(f"{words} **{usd}**" for words, _, usd in (total.rpartition(" ") for total in _totals(receipt)))
    head = [
        f"## Receipt of `{receipt.run}`: {receipt.outcome}",
        f"{totals}, boxes rented {receipt.boxes}, "
        f"instances left: **{'unknown' if receipt.instances_left is None else receipt.instances_left}**",
        "",
        "| step | box | seconds | dollars | note |",
        "| --- | --- | ---: | ---: | --- |",
    ]
    foot = [
        *_by_step(receipt),
        *_by_kind(receipt),
        *(f"wasted {dollars(usd)} by: {why}" for why, usd in waste_by_reason(receipt).items()),
    ]
    return "\n".join([*head, *rows, *(f"\n{line}" for line in foot), *(f"\n> {note}" for note in receipt.notes)])


def waste_by_reason(receipt: Receipt) -> dict[str, float | None]:
    """Wasted dollars by reason, None where a part of them is unknown."""
    found: dict[str, float | None] = {}
    for line in receipt.lines:
        if line.wasted:
            before = found.get(line.reason, 0.0)
            found[line.reason] = None if before is None or line.usd is None else before + line.usd
    return found


def _by_step(receipt: Receipt) -> list[str]:
    """What was planned against what was paid, phase by phase; nothing where no plan was on record."""
    phases = [step for step in receipt.planned if step.startswith("phase ")]
    said = []
    for step in receipt.planned:
        lines = [
            line for line in receipt.lines if (line.what == step) or (step not in phases and line.what not in phases)
        ]
        paid = None if any(line.usd is None for line in lines) else sum(line.usd or 0.0 for line in lines)
        wasted = None if paid is None else sum(line.usd or 0.0 for line in lines if line.wasted)
        said.append(
            f"{step}: planned {dollars(receipt.planned[step])}, paid {dollars(paid)}, of it wasted {dollars(wasted)}"
        )
    return said


_KINDS = {"down": "bytes down", "up": "bytes up"}


def _by_kind(receipt: Receipt) -> list[str]:
    """What the market charged for, bandwidth by its direction."""
    said = ", ".join(f"{_KINDS.get(kind, kind)} {dollars(usd)}" for kind, usd in receipt.charges.items())
    return [f"charged for {said}"] if said else []


def _totals(receipt: Receipt) -> tuple[str, str, str]:
    yet = " so far" if receipt.so_far else ""
    return (
        f"planned {dollars(receipt.planned_usd)}",
        f"paid{yet} {dollars(receipt.paid_usd)}",
        f"wasted{yet} {dollars(receipt.wasted_usd)}",
    )


def _usd(line: ReceiptLine) -> str:
    return "unknown" if line.usd is None else f"{line.usd:.5f}"


def dollars(usd: float | None) -> str:
    return "unknown" if usd is None else f"${usd:.4f}"


def read_receipt(store: Store, run: str, flow_run_id: str) -> Receipt | None:
    data = store.get_bytes(layout.receipt(run, flow_run_id))
    return Receipt.model_validate_json(data) if data is not None else None
