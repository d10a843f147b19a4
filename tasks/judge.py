"""The boxes of the account, each with its verdict: what the listing shows, what it hides, and whose turn it is where too much is spent."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from pydantic import ValidationError

from tasks.domain import Instance, Intent, Label, Listing
from tasks.errors import MarketError
from tasks.evidence import Evidence
from tasks.market.protocol import Market
from tasks.rules.reaping import Limits, over_cap, rate_usd_h, verdict
from tasks.sweep import CannotSee, ReapRow
from training.box.store import Store, StoreError
from training.contract import layout

log = logging.getLogger(__name__)
_CLOSED = {"refused", "unresolved", "destroyed"}


def see(market: Market) -> Listing:
    try:
        listing = market.list_all()
    except MarketError as error:
        raise CannotSee(f"the boxes of the account cannot be listed, nothing was destroyed: {error}") from error
    if not listing.complete:
        raise CannotSee(f"the list of boxes is incomplete, nothing was destroyed: {listing.problem}")
    return listing


def boxes_of(listing: Listing) -> list[Instance]:
    """All boxes with an id; of a row that cannot be read in full its id and label still tell whose it is and when it must end."""
    known = [Instance(id=row.id, label=row.label) for row in listing.unparsed if row.id is not None]
    return [*listing.instances, *known]


def all_judged(listing: Listing, store: Store, evidence: Evidence, now: float, limits: Limits) -> list[ReapRow]:
    """A row for each box, those among them that bill, or may bill, and cannot be judged."""
    out_of_sight = _out_of_sight(listing, evidence)
    dark = {row.instance_id for row in out_of_sight}
    return [judged(box, store, evidence, now, limits) for box in boxes_of(listing) if box.id not in dark] + out_of_sight


def judged(box: Instance, store: Store, evidence: Evidence, now: float, limits: Limits) -> ReapRow:
    """The verdict on one box. Its intent is asked for only where the lease of its run may speak for another box: one request a box is saved."""
    label, given_up, twin_of = Label.parse(box.label), False, None
    twins = evidence.twins.get(box.label or "", frozenset())
    if label is not None and (twins or evidence.later_attempt(label)):
        intent = _intent(store, label)
        given_up = intent is not None and evidence.later_attempt(label) and intent.state in _CLOSED
        if intent is not None and intent.instance_id in twins - {box.id}:
            twin_of = intent.instance_id
    found = verdict(evidence.facts(box, given_up, twin_of), now, limits)
    return ReapRow(box.id, box.label, box.actual_status, rate_usd_h(box), found.action, found.reason)


def _intent(store: Store, label: Label) -> Intent | None:
    """The intent of this very box; None if there is none or it cannot be read."""
    try:
        data = store.get_bytes(layout.intent(label.flow_run_id, label.attempt))
        intent = Intent.model_validate_json(data) if data is not None else None
    except (StoreError, ValidationError) as error:
        log.warning("attempt %d of flow run %s: its intent cannot be read: %s", label.attempt, label.flow_run_id, error)
        return None
    return intent if intent is not None and intent.label == label.text else None


def _out_of_sight(listing: Listing, evidence: Evidence) -> list[ReapRow]:
    """What bills, or may bill, and cannot be judged: rows without an id or a label, and boxes that were rented with another account's key."""
    nameless = [
        ReapRow(row.id, row.label, None, None, "unknown", f"cannot be read: {row.problem}")
        for row in listing.unparsed
        if row.id is None or not row.label
    ]
    elsewhere = [
        ReapRow(
            intent.instance_id,
            intent.label,
            None,
            intent.dph_usd,
            "unknown",
            f"was rented by account {intent.account_id}; this key is of account {listing.account_id} and cannot see it",
        )
        for intent in evidence.unlisted
        if intent.account_id != listing.account_id
    ]
    return nameless + elsewhere


def capped(rows: Sequence[ReapRow], boxes: Sequence[Instance], now: float, limits: Limits) -> list[ReapRow]:
    """The newest of our boxes are condemned until what is known to bill is under the account's cap. What may exist unseen counts in the alarm
    only: to end a box that works for one that may not exist would be to destroy on a guess."""
    free = {
        row.instance_id
        for row in rows
        if row.action == "keep" and row.flow_run_id and limits.protected.get(row.instance_id or 0, 0.0) <= now
    }
    listed = {box.id for box in boxes}
    staying = [row for row in rows if row.action != "destroy" and row.instance_id in listed]
    others_usd_h = sum(row.dph_usd or 0.0 for row in staying if row.instance_id not in free)
    gone = {box.id for box in over_cap([box for box in boxes if box.id in free], others_usd_h, limits.max_dph_usd)}
    total = sum(row.dph_usd or 0.0 for row in staying)
    reason = f"the account spends ${total:.3f}/h, at most ${limits.max_dph_usd:.2f} (LIVERY_MAX_DPH_USD): the newest boxes go first"
    return [
        replace(row, action="destroy", over_cap=True, reason=f"{reason}; otherwise {row.reason}")
        if row.instance_id in gone
        else row
        for row in rows
    ]
