"""What a sweep has to tell: boxes that nobody can judge, an account that spends too fast or runs dry, a reaper that cannot see."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from tasks import alarms
from tasks.domain import Alarm
from tasks.errors import MarketError
from tasks.market.protocol import Market
from tasks.settings import Settings
from tasks.sweep import CannotSee, ReapRow, Sweep, ids_of
from training.box.store import Store, StoreError
from training.contract import layout

log = logging.getLogger(__name__)


def report(market: Market, store: Store, result: Sweep, settings: Settings, only_run: str | None, now: float) -> None:
    """Alarms of what this sweep met are sounded, those that it has answered are cleared, and a whole one that saw everything says when."""
    found = _box_alarms(store, result, now)
    subjects = {alarm.subject for alarm in found}
    for alarm in found:
        alarms.sound(store, alarm)
    try:
        for standing in alarms.standing(store):
            if (
                standing.what == "box_unknown"
                and standing.subject not in subjects
                and only_run in (None, standing.subject)
            ):
                alarms.clear(store, standing.subject)
        if not result.unknown and not result.unverified:
            left = [row for row in result.rows if row.outcome != "destroyed"]
            runs = {row.flow_run_id for row in left if row.flow_run_id}
            alarms.settle(store, runs=runs, boxes={row.instance_id for row in left if row.instance_id}, only=only_run)
        if only_run is None:
            _account_alarm(market, store, result, settings, now)
    except StoreError as error:
        log.warning("alarms cannot be looked through: %s", error)
    if only_run is None and not result.unknown and not result.unverified:
        _note_success(store, now)


def _box_alarms(store: Store, result: Sweep, now: float) -> list[Alarm]:
    """One for each run with a box that could not be judged, and one for each box of nobody's."""
    found: dict[str, list[ReapRow]] = {}
    for row in result.rows:
        if row.action == "unknown" or not row.label:
            found.setdefault(row.flow_run_id or f"box-{row.instance_id or 'without-id'}", []).append(row)
    return [_box_alarm(store, subject, rows, now) for subject, rows in found.items()]


def _box_alarm(store: Store, subject: str, rows: Sequence[ReapRow], now: float) -> Alarm:
    boxes = tuple(sorted(row.instance_id for row in rows if row.instance_id is not None))
    prices = [row.dph_usd for row in rows if row.dph_usd is not None]
    rate, reason = sum(prices) if prices else None, rows[0].reason
    if rows[0].flow_run_id is not None:
        do = f"{alarms.CONSOLE}; the reaper looks again at its next sweep"
        return alarms.of_run(store, subject, "box_unknown", reason=reason, do=do, at=now, instances=boxes, dph_usd=rate)
    do = f"{alarms.CONSOLE}: the reaper never touches what does not carry our label; destroy it there, or give it a label of yours"
    return Alarm(what="box_unknown", subject=subject, instances=boxes, dph_usd=rate, reason=reason, do=do, at=now)


def _account_alarm(market: Market, store: Store, result: Sweep, settings: Settings, now: float) -> None:
    went = sum(row.dph_usd or 0.0 for row in result.rows if row.over_cap)
    spends = result.dph_usd + sum(
        row.dph_usd or 0.0 for row in result.rows if row.over_cap and row.outcome == "destroyed"
    )
    if spends + result.promised_usd_h > settings.max_dph_usd:
        taken = [row for row in result.rows if row.over_cap]
        reason = f"{result.sentence}, at most ${settings.max_dph_usd:.2f}/h (LIVERY_MAX_DPH_USD)"
        reason += (
            f"; boxes {ids_of(taken)} of ${went:.3f}/h had to go"
            if taken
            else "; nothing of ours that is known to bill had to go"
        )
        do = f"{alarms.CONSOLE}; end what is not needed, or raise LIVERY_MAX_DPH_USD"
        ids = tuple(row.instance_id for row in taken if row.instance_id is not None)
        alarms.sound(
            store,
            Alarm(what="cap_reached", subject="account", instances=ids, dph_usd=spends, reason=reason, do=do, at=now),
        )
        return
    try:
        credit = market.credit_usd()
    except MarketError as error:
        log.warning("the account's credit cannot be asked for now: %s", error)
        return
    if credit is not None and credit < settings.min_credit_usd:
        lasts = f", {credit / result.dph_usd:.1f} h at ${result.dph_usd:.3f}/h" if result.dph_usd > 0 else ""
        reason = f"${credit:.2f} of credit are left{lasts}, want ${settings.min_credit_usd:.2f} (LIVERY_MIN_CREDIT_USD)"
        do = "add credit: without it the market stops every box, and later deletes its disk"
        alarms.sound(
            store, Alarm(what="credit_low", subject="account", dph_usd=result.dph_usd, reason=reason, do=do, at=now)
        )
        return
    alarms.clear(store, "account")


def alarm_blind(store: Store, why: CannotSee | str, now: float, dry_run: bool) -> None:
    if not dry_run:
        do = f"{alarms.CONSOLE}: whatever bills there is watched by nobody until the reaper sees again"
        alarms.sound(store, Alarm(what="reaper_blind", subject="reaper", reason=str(why), do=do, at=now))


def _note_success(store: Store, now: float) -> None:
    """For whoever watches the watchman: how long ago a sweep last saw everything."""
    try:
        store.put_bytes(layout.REAPER_LAST_SUCCESS, json.dumps({"at": now}).encode())
        alarms.clear(store, "reaper")
    except StoreError as error:
        log.warning("the sweep's success is not written down: %s", error)
    alarms.reaper_saw_everything(now)
