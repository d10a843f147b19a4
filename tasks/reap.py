"""One sweep over all boxes of the account: judge each by its label, its lease and the clock, destroy what nobody answers for, and prove it.

Needs nothing but the environment: no Prefect, no memory of what was rented. Where it cannot see, it destroys nothing and says so; a
reaper that reports "nothing to do" because it saw nothing is how boxes bill for weeks.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import ValidationError

from tasks.destroy import destroy_boxes
from tasks.domain import Instance, Intent, Label, Listing
from tasks.errors import DestroyUnverified, LiveryError, MarketError
from tasks.guard import settle_if_possible
from tasks.lease import look_for_lease
from tasks.log import guard_secrets
from tasks.market import open_market
from tasks.market.protocol import Market
from tasks.rules.reaping import Action, LeaseSeen, Limits, Verdict, verdict, within_ceiling
from tasks.settings import Settings, read_settings
from tasks.stores import open_store
from training.box.store import Store, StoreError
from training.contract import layout

log = logging.getLogger(__name__)

# Of the flow's 240 s: one run's boxes may take so long, all together so long; the next sweep goes on with the rest.
DESTROY_S, ALL_DESTROYS_S = 90.0, 180.0
LAST_SUCCESS = "reaper/last_success.json"
CANNOT_SEE_EXIT = 4


class CannotSee(LiveryError):
    """The boxes or the leases could not be read: whether something bills for nothing is unknown."""

    exit_code = CANNOT_SEE_EXIT


@dataclass(frozen=True)
class ReapRow:
    """One box of the account and what the sweep made of it."""

    instance_id: int | None
    label: str | None
    status: str | None
    dph_usd: float | None
    action: Action
    reason: str
    outcome: Literal["", "destroyed", "unverified", "would be destroyed", "next sweep"] = ""

    @property
    def flow_run_id(self) -> str | None:
        label = Label.parse(self.label)
        return label.flow_run_id if label else None


@dataclass(frozen=True)
class Sweep:
    rows: tuple[ReapRow, ...]
    dry_run: bool

    @property
    def unverified(self) -> tuple[ReapRow, ...]:
        return tuple(row for row in self.rows if row.outcome == "unverified")

    @property
    def unknown(self) -> tuple[ReapRow, ...]:
        return tuple(row for row in self.rows if row.action == "unknown")

    @property
    def dph_usd(self) -> float:
        """$/h of all boxes that are left, as far as their prices are stated."""
        return sum(row.dph_usd or 0.0 for row in self.rows if row.outcome != "destroyed")

    def table(self) -> list[dict[str, object]]:
        return [
            {
                "box": row.instance_id,
                "label": row.label or "",
                "status": row.status or "",
                "$/h": row.dph_usd,
                "verdict": row.action,
                "reason": row.reason,
                "outcome": row.outcome,
            }
            for row in self.rows
        ]

    def raise_if_bad(self) -> None:
        """DestroyUnverified if a destroy was not verified, CannotSee if a box of ours could not be judged."""
        if self.unverified:
            raise DestroyUnverified(f"boxes {_ids(self.unverified)} may still bill; look at the market's console")
        if self.unknown:
            raise CannotSee(f"boxes {_ids(self.unknown)} could not be judged: {self.unknown[0].reason}")


def sweep(
    market: Market,
    store: Store,
    settings: Settings,
    *,
    dry_run: bool = False,
    only_run: str | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    settle: Callable[[str, Literal["hook", "reaper"]], None] = settle_if_possible,
) -> Sweep:
    """Judge every box, destroy the condemned (at most `max_reap`), write the receipts of their runs.

    CannotSee if the account's boxes cannot be listed in full: then nothing is destroyed.
    """
    listing = _see(market)
    limits = Limits(settings.max_age_hours * 3600, settings.lease_s, settings.never_running_s)
    leases: dict[str, LeaseSeen] = {}
    rows = [_judged(box, store, leases, clock(), limits) for box in _boxes(listing)]
    rows += [
        ReapRow(None, row.label, None, None, "unknown", f"cannot be read: {row.problem}")
        for row in listing.unparsed
        if row.id is None
    ]
    if only_run is not None:
        rows = [row for row in rows if row.flow_run_id == only_run]
    condemned, waiting = within_ceiling([row for row in rows if row.action == "destroy"], settings.max_reap)
    if waiting:
        log.error(
            "%d boxes are condemned, %d may go in one sweep (LIVERY_MAX_REAP); is something wrong with us?",
            len(condemned) + len(waiting),
            settings.max_reap,
        )
    outcomes = {row.instance_id: replace(row, outcome="next sweep") for row in waiting}
    if dry_run:
        outcomes |= {row.instance_id: replace(row, outcome="would be destroyed") for row in condemned}
    else:
        outcomes |= _reap(market, store, condemned, limits, clock, sleep, settle)
    result = Sweep(tuple(outcomes.get(row.instance_id, row) for row in rows), dry_run)
    if not dry_run and not result.unknown and not result.unverified:
        _settle_alarms(store, {box.flow_run_id for box in result.rows if box.outcome != "destroyed"}, only_run)
        _note_success(store, clock())
    return result


def _see(market: Market) -> Listing:
    try:
        listing = market.list_all()
    except MarketError as error:
        raise CannotSee(f"the boxes of the account cannot be listed, nothing was destroyed: {error}") from error
    if not listing.complete:
        raise CannotSee(f"the list of boxes is incomplete, nothing was destroyed: {listing.problem}")
    return listing


def _boxes(listing: Listing) -> list[Instance]:
    """All boxes with an id; of a row that cannot be read in full its id and label still tell whose it is and when it must end."""
    known = [Instance(id=row.id, label=row.label) for row in listing.unparsed if row.id is not None]
    return [*listing.instances, *known]


def _judged(box: Instance, store: Store, leases: dict[str, LeaseSeen], now: float, limits: Limits) -> ReapRow:
    found = _verdict(box, store, leases, now, limits)
    return ReapRow(box.id, box.label, box.actual_status, box.dph_total_usd, found.action, found.reason)


def _verdict(box: Instance, store: Store, leases: dict[str, LeaseSeen], now: float, limits: Limits) -> Verdict:
    label = Label.parse(box.label)
    if label is None:
        return verdict(box, LeaseSeen(), now, limits)
    if label.flow_run_id not in leases:
        leases[label.flow_run_id] = look_for_lease(store, label.flow_run_id)
    return verdict(box, leases[label.flow_run_id], now, limits, _given_up(store, label))


def _given_up(store: Store, label: Label) -> bool:
    """Whether the run has closed the intent of this very box. A lost create reply may hide a box for longer than the run looked for it:
    the run lives on with its next box, its lease speaks for that one, and this one would bill to the run's end."""
    try:
        data = store.get_bytes(layout.intent(label.flow_run_id, label.attempt))
        intent = Intent.model_validate_json(data) if data is not None else None
    except (StoreError, ValidationError) as error:
        log.warning("attempt %d of flow run %s: its intent cannot be read: %s", label.attempt, label.flow_run_id, error)
        return False
    return intent is not None and intent.label == label.text and intent.state in {"refused", "unresolved", "destroyed"}


def _reap(
    market: Market,
    store: Store,
    condemned: Sequence[ReapRow],
    limits: Limits,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    settle: Callable[[str, Literal["hook", "reaper"]], None],
) -> dict[int | None, ReapRow]:
    by_run: dict[str, list[ReapRow]] = defaultdict(list)
    for row in condemned:
        by_run[row.flow_run_id or ""].append(row)
    outcomes: dict[int | None, ReapRow] = {}
    end = clock() + ALL_DESTROYS_S
    for flow_run_id, rows in by_run.items():
        sure = [_again(market, store, row, clock(), limits) for row in rows]
        outcomes |= {row.instance_id: row for row in sure}
        ids = {row.instance_id for row in sure if row.action == "destroy" and row.instance_id is not None}
        if not ids:
            continue
        budget_s = max(10.0, min(DESTROY_S, end - clock()))
        done = destroy_boxes(market, flow_run_id, ids, deadline_s=budget_s, clock=clock, sleep=sleep, store=store)
        for row in sure:
            if row.instance_id in ids:
                outcome: Literal["destroyed", "unverified"] = (
                    "destroyed" if row.instance_id in done.gone else "unverified"
                )
                outcomes[row.instance_id] = replace(row, outcome=outcome, reason=_because(row.reason, done.reason))
                log.warning("box %s: %s: %s", row.instance_id, outcome, row.reason)
        settle(flow_run_id, "reaper")
    return outcomes


def _again(market: Market, store: Store, row: ReapRow, now: float, limits: Limits) -> ReapRow:
    """The same judgement on a fresh look, just before the DELETE: a lease may have come alive, a label may have been another's."""
    assert row.instance_id is not None
    try:
        box = market.show(row.instance_id)
    except MarketError as error:
        return replace(row, action="unknown", reason=f"{row.reason}; but a fresh look failed: {error}")
    if box is None:
        return row  # gone meanwhile, or hidden: destroying it again and proving it is right in both cases
    if box.label != row.label:
        return replace(row, action="unknown", reason=f"its label changed from {row.label} to {box.label}")
    return _judged(box, store, {}, now, limits)


def _because(reason: str, trouble: str) -> str:
    return f"{reason}; {trouble}" if trouble else reason


def _settle_alarms(store: Store, with_boxes: set[str | None], only_run: str | None) -> None:
    """An alarm of a run that has no box any more, by a complete listing, has had its answer."""
    try:
        for item in store.list("alarms/"):
            flow_run_id = item.key.removeprefix("alarms/").removesuffix(".json")
            if flow_run_id not in with_boxes and only_run in (None, flow_run_id):
                store.delete(item.key)
                log.info("alarm of flow run %s is settled: the listing shows no box of it", flow_run_id)
    except StoreError as error:
        log.warning("alarms cannot be looked through: %s", error)


def _note_success(store: Store, now: float) -> None:
    """For whoever watches the watchman: how long ago a sweep last saw everything."""
    try:
        store.put_bytes(LAST_SUCCESS, json.dumps({"at": now}).encode())
    except StoreError as error:
        log.warning("the sweep's success is not written down: %s", error)


def _ids(rows: Sequence[ReapRow]) -> str:
    return ", ".join(str(row.instance_id or "without id") for row in rows)


def text_table(result: Sweep) -> str:
    """The sweep for a terminal or a cron mail."""
    lines = [f"{'box':>10} {'$/h':>7}  {'verdict':<8} {'outcome':<18} reason"]
    for row in result.rows:
        price = "?" if row.dph_usd is None else f"{row.dph_usd:.3f}"
        lines.append(
            f"{row.instance_id or '-':>10} {price:>7}  {row.action:<8} {row.outcome:<18} {row.reason} [{row.label or 'no label'}]"
        )
    lines.append(f"{len(result.rows)} boxes, ${result.dph_usd:.3f}/h{' (dry run)' if result.dry_run else ''}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m flows.reaper --once [--dry-run] [--only-run ID]`; 0 done, 2 settings, 4 cannot see, 5 destroy unverified."""
    parser = argparse.ArgumentParser(prog="python -m flows.reaper", description="Sweep once, without Prefect.")
    parser.add_argument("--once", action="store_true", required=True, help="one sweep; let cron or systemd repeat it")
    parser.add_argument("--dry-run", action="store_true", help="judge and print, destroy nothing")
    parser.add_argument("--only-run", metavar="FLOW_RUN_ID", help="only boxes of this flow run")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        settings = read_settings()
        guard_secrets(settings)
        result = sweep(
            open_market(settings, reaper=True),
            open_store(settings),
            settings,
            dry_run=arguments.dry_run,
            only_run=arguments.only_run,
        )
        print(text_table(result))
        result.raise_if_bad()
    except LiveryError as error:
        print(f"reaper: {error}", file=sys.stderr)
        return error.exit_code
    return 0
