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
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tasks.clocks import wrong_clock
from tasks.destroy import destroy_all, destroy_boxes, ids_of
from tasks.domain import Instance, Intent
from tasks.errors import LiveryError, MarketError, ShapeError, UserError
from tasks.evidence import Evidence, gather, remember
from tasks.guard import settle_if_possible
from tasks.judge import all_judged, boxes_of, capped, judged, see
from tasks.lease import look_for_lease
from tasks.log import guard_secrets
from tasks.market import open_market
from tasks.market.protocol import Market
from tasks.reap_alarms import alarm_blind, report
from tasks.rules.reaping import Limits, within_ceiling
from tasks.settings import Settings, protections, read_settings
from tasks.stores import open_store
from tasks.sweep import CannotSee, ReapRow, Sweep, text_table
from training.box.store import Store, StoreConflict, StoreError
from training.contract import layout

__all__ = [
    "LAST_SUCCESS",
    "CannotSee",
    "ReapRow",
    "Sweep",
    "limits_of",
    "seconds_since_success",
    "sweep",
    "sweep_now",
    "swept_within",
    "text_table",
]
log = logging.getLogger(__name__)
Settle = Callable[[str, Literal["hook", "reaper"]], None]

# Of the flow's 240 s, at the market's real pace: 22 boxes are asked to go in the first, proved gone in the second, and the receipts of
# their runs begun until the third. What is left over is the next sweep's, and of receipts the audit's.
ASK_S, DESTROY_S, RECEIPTS_S = 75.0, 150.0, 200.0
# Runs whose boxes went without a word, by the dead-man or the market: so many a sweep are looked into.
BOOKS_A_SWEEP, BOOKS_S = 3, 30.0
# As long as a sweep may live.
CLAIM_S = 240.0
# A bucket that hangs must not use up the time of the boxes whose hard end has passed.
STALL_S = 5.0
LAST_SUCCESS = layout.REAPER_LAST_SUCCESS


def sweep_now(settings: Settings, *, dry_run: bool = False, only_run: str | None = None) -> Sweep:
    """A sweep with nothing but the environment. CannotSee as `sweep`, and if this machine's clock is wrong; UserError for a wrong scope."""
    if settings.market == "vast" and settings.reaper_api_key is None:
        log.warning("LIVERY_REAPER_API_KEY is not set: one lost key would blind the flows and their reaper alike")
    market, store = open_market(settings, reaper=True), open_store(settings, stall_s=STALL_S)
    try:
        _require_true_clock(store, time.time())
    except CannotSee as error:
        alarm_blind(store, error, time.time(), dry_run)
        raise
    return sweep(market, store, settings, dry_run=dry_run, only_run=only_run)


def sweep(
    market: Market,
    store: Store,
    settings: Settings,
    *,
    dry_run: bool = False,
    only_run: str | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    settle: Settle = settle_if_possible,
) -> Sweep:
    """Judge every box, destroy the condemned (at most `max_reap`, and those over the account's cap), write the receipts of their runs.

    CannotSee if the account's boxes cannot be listed in full: then nothing is destroyed. A dry run changes nothing anywhere.
    """
    only_run = _scope(only_run)
    limits = limits_of(settings)
    try:
        listing = see(market)
    except CannotSee as error:
        alarm_blind(store, error, clock(), dry_run)
        raise
    boxes = boxes_of(listing)
    evidence = gather(store, boxes, clock(), limits)
    rows = all_judged(listing, store, evidence, clock(), limits)
    if only_run is None:
        rows = capped(rows, boxes, clock(), limits)
    else:
        rows = [row for row in rows if row.flow_run_id == only_run or (row.action == "unknown" and not row.label)]
    reaping = _Reaping(market, store, evidence, limits, clock, sleep, settle)
    going, waiting = _chosen(rows, evidence, settings.max_reap)
    outcomes = {row.instance_id: replace(row, outcome="next sweep") for row in waiting}
    if dry_run:
        outcomes |= {row.instance_id: replace(row, outcome="would be destroyed") for row in going}
    else:
        outcomes |= reaping.reap(going)
    result = Sweep(
        tuple(outcomes.get(row.instance_id, row) for row in rows), dry_run, evidence.promised_usd_h, evidence.problem
    )
    return result if dry_run else _concluded(reaping, result, listing.account_id, only_run, settings)


def _concluded(reaping: _Reaping, result: Sweep, account_id: str, only_run: str | None, settings: Settings) -> Sweep:
    """What the next sweep and people must know of this one, and the books of boxes that went without a word."""
    store, now = reaping.store, reaping.clock()
    if result.blind:
        # One alarm, and no more questions to a bucket that answers none: each takes its time-outs.
        alarm_blind(store, result.blind, now, dry_run=False)
        return result
    remember(store, reaping.evidence, {row.instance_id or 0: now for row in result.unverified})
    result = replace(result, rows=(*result.rows, *reaping.close_books(account_id, only_run)))
    report(reaping.market, store, result, settings, only_run, reaping.clock())
    return result


def limits_of(settings: Settings) -> Limits:
    return Limits(
        max_age_s=settings.max_age_hours * 3600,
        lease_s=settings.lease_s,
        never_running_s=settings.never_running_s,
        down_s=settings.down_s,
        no_progress_s=settings.no_progress_s,
        max_dph_usd=settings.max_dph_usd,
        protected=protections(settings.protected),
    )


def seconds_since_success(store: Store, now: float) -> float | None:
    """How long ago a sweep last saw everything; None if none ever did. StoreError, also for an object that says something else."""
    data = store.get_bytes(LAST_SUCCESS)
    try:
        return None if data is None else now - float(json.loads(data)["at"])
    except (ValueError, KeyError, TypeError):
        raise StoreError(f"{LAST_SUCCESS} does not say when") from None


def swept_within(settings: Settings, seconds: float) -> bool:
    """Whether a sweep has seen everything in these last seconds; False if that is not known."""
    try:
        ago_s = seconds_since_success(open_store(settings, stall_s=STALL_S), time.time())
    except StoreError as error:
        log.warning("when a sweep last saw everything is not known: %s", error)
        return False
    return ago_s is not None and ago_s < seconds


def _scope(only_run: str | None) -> str | None:
    """A blank that was meant to name one run must neither sweep everything nor, seeing nothing, report that all is well."""
    if only_run is None:
        return None
    try:
        return str(uuid.UUID(only_run))
    except ValueError:
        raise UserError(
            f"only_run: seen {only_run!r}, want the id of a flow run, or nothing at all for every box"
        ) from None


def _require_true_clock(store: Store, now: float) -> None:
    if wrong := wrong_clock(store, now):
        raise CannotSee(f"{wrong}: by it leases that live would have run out, so nothing was destroyed; set the clock")


def _chosen(rows: Sequence[ReapRow], evidence: Evidence, max_reap: int) -> tuple[list[ReapRow], Sequence[ReapRow]]:
    """The ceiling holds back all but those over the cap: that one is about dollars, whoever made the mistake.

    Boxes that an earlier sweep could not destroy come last, or they would keep all others from their turn.
    """
    condemned = [row for row in rows if row.action == "destroy" and not row.over_cap]
    condemned.sort(key=lambda row: evidence.tried_at.get(row.instance_id or 0, 0.0))
    going, waiting = within_ceiling(condemned, max_reap)
    if waiting:
        log.error("%d boxes are condemned, %d may go in one sweep (LIVERY_MAX_REAP)", len(condemned), max_reap)
    return [*going, *(row for row in rows if row.over_cap)], waiting


@dataclass(frozen=True)
class _Reaping:
    """Destroying, with all that it takes."""

    market: Market
    store: Store
    evidence: Evidence
    limits: Limits
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    settle: Settle

    @property
    def blind(self) -> bool:
        """The bucket does not answer: it is asked nothing more, since each question takes its time-outs."""
        return bool(self.evidence.problem)

    def reap(self, going: Sequence[ReapRow]) -> dict[int | None, ReapRow]:
        """Each box is looked at again and asked to go; then all together are proved gone, since a listing costs seconds."""
        began, outcomes, asked = self.clock(), dict[int | None, ReapRow](), dict[int, ReapRow]()
        claimed: list[int] = []
        try:
            for row in going:
                box = row.instance_id
                assert box is not None
                if self.clock() - began > ASK_S:
                    outcomes[box] = replace(row, outcome="next sweep")
                    continue
                if not self.blind and not _claim(self.store, box, self.clock()):
                    outcomes[box] = replace(row, outcome="another sweep's")
                    continue
                claimed.append(box)
                outcomes[box] = sure = self._again(row)
                if sure.action == "destroy":
                    asked[box] = sure
                    _ask(self.market, box)
            outcomes |= self._proved(asked, left_s=DESTROY_S - (self.clock() - began))
        finally:
            if not self.blind:
                _release(self.store, claimed)
        self._write_receipts([row.flow_run_id for row in asked.values()], until=began + RECEIPTS_S)
        return outcomes

    def _again(self, row: ReapRow) -> ReapRow:
        """The same judgement on a fresh look, just before the DELETE: a lease may have come alive, a label may have been another's."""
        assert row.instance_id is not None and row.flow_run_id is not None
        try:
            box = self._fresh(row.instance_id)
        except (MarketError, CannotSee) as error:
            return replace(row, action="unknown", reason=f"{row.reason}; but a fresh look failed: {error}")
        if box is None:
            return row  # gone meanwhile, or hidden: destroying it again and proving it is right in both cases
        if box.label != row.label:
            return replace(row, action="unknown", reason=f"its label changed from {row.label} to {box.label}")
        if row.over_cap:
            return row
        evidence = self.evidence if self.blind else self.evidence.with_fresh_lease(self.store, row.flow_run_id)
        return judged(box, self.store, evidence, self.clock(), self.limits)

    def _fresh(self, instance_id: int) -> Instance | None:
        """A row that cannot be read in full is listed with its id and label, which may be all that is needed; shown alone it is an error."""
        try:
            return self.market.show(instance_id)
        except ShapeError:
            listed = {box.id: box for box in boxes_of(see(self.market))}
            if instance_id not in listed:
                raise
            return listed[instance_id]

    def _proved(self, asked: dict[int, ReapRow], left_s: float) -> dict[int | None, ReapRow]:
        if not asked:
            return {}
        done = destroy_all(
            self.market,
            {box: row.label or "" for box, row in asked.items()},
            deadline_s=max(10.0, left_s),
            clock=self.clock,
            sleep=self.sleep,
            store=None if self.blind else self.store,
        )
        outcomes: dict[int | None, ReapRow] = {}
        for box, row in asked.items():
            gone = box in done.gone
            reason = row.reason if gone or not done.reason else f"{row.reason}; {done.reason}"
            outcomes[box] = replace(row, outcome="destroyed" if gone else "unverified", reason=reason)
            log.warning("box %d: %s: %s", box, outcomes[box].outcome, reason)
        return outcomes

    def _write_receipts(self, flow_run_ids: Sequence[str | None], until: float) -> None:
        for flow_run_id in dict.fromkeys(each for each in flow_run_ids if each):
            if self.blind or self.clock() > until:
                log.warning("no receipt of flow run %s yet: python -m flows receipt %s", flow_run_id, flow_run_id)
                continue
            self.settle(flow_run_id, "reaper")

    def close_books(self, account_id: str, only_run: str | None) -> list[ReapRow]:
        """A box that its dead-man or the market ended after its flow had died left an open intent and no receipt. Returned are those that are
        there all the same, though the listing does not show them."""
        ended = [
            intent
            for intent in self.evidence.unlisted
            if intent.account_id == account_id and only_run in (None, intent.flow_run_id) and self._alone(intent)
        ]
        return [row for intent in ended[:BOOKS_A_SWEEP] for row in self._close(intent)]

    def _close(self, intent: Intent) -> list[ReapRow]:
        ids = set(ids_of(intent))
        given: dict[str, Any] = {"clock": self.clock, "sleep": self.sleep, "store": self.store}
        done = destroy_boxes(self.market, intent.flow_run_id, ids, deadline_s=BOOKS_S, **given)
        if done.clean:
            went = ", ".join(map(str, sorted(ids)))
            log.warning("box %s of flow run %s went without a word; its books are closed", went, intent.flow_run_id)
            self.settle(intent.flow_run_id, "reaper")
            return []
        reason = f"nobody answers for it, and no listing shows it; {done.reason}"
        return [
            ReapRow(box, intent.label, None, intent.dph_usd, "destroy", reason, "unverified") for box in done.unverified
        ]

    def _alone(self, intent: Intent) -> bool:
        """Nobody answers for its run: a flow that lives hears of the loss by itself."""
        seen = look_for_lease(self.store, intent.flow_run_id)
        until = 0.0 if seen.lease is None else max(seen.lease.expires_at, seen.lease.hold_until or 0.0)
        return not seen.problem and until <= self.clock()


def _ask(market: Market, instance_id: int) -> None:
    try:
        market.destroy(instance_id)
    except MarketError as error:
        log.warning("box %d: %s; asked again while it is looked for", instance_id, error)


def _claim(store: Store, instance_id: int, now: float) -> bool:
    """Whether no other sweep is at this box. Overlapping sweeps are harmless, a DELETE may be repeated; but one of them would take the other's work
    for trouble. A bucket that does not say is no reason to leave a box."""
    key = layout.reaper_claim(instance_id)
    mine = json.dumps({"at": now, "by": uuid.uuid4().hex}).encode()
    try:
        store.put_bytes(key, mine, create_only=True)
    except StoreConflict:
        try:
            since_s = now - float(json.loads(store.get_bytes(key) or b"{}").get("at", 0.0))
            if abs(since_s) <= CLAIM_S:
                log.info("box %d: another sweep has been at it for %.0f s", instance_id, since_s)
                return False
            store.put_bytes(key, mine)
        except (StoreError, ValueError, AttributeError, TypeError) as error:
            log.warning("box %d: the claim of another sweep cannot be read: %s", instance_id, error)
    except StoreError as error:
        log.warning("box %d is destroyed without a claim: %s", instance_id, error)
    return True


def _release(store: Store, claimed: Collection[int]) -> None:
    for instance_id in claimed:
        try:
            store.delete(layout.reaper_claim(instance_id))
        except StoreError as error:
            log.warning("the claim on box %d stays for %.0f s: %s", instance_id, CLAIM_S, error)


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
        result = sweep_now(settings, dry_run=arguments.dry_run, only_run=arguments.only_run)
        print(text_table(result))
        result.raise_if_bad()
    except LiveryError as error:
        print(f"reaper: {error}", file=sys.stderr)
        return error.exit_code
    return 0
