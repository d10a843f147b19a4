"""What a sweep has to tell: boxes that nobody can judge, an account that spends too fast or runs dry, a reaper that cannot see."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from tasks import alarms
from tasks.domain import Alarm, Trouble
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
        standing = alarms.standing(store)
        for alarm in standing:
            over = alarm.what == "box_unknown" and alarm.subject not in subjects
            if (over or alarm.what == "reaper_blind") and only_run in (None, alarm.subject):
                alarms.clear(store, alarm.subject)
        # A row that does not say whose it is may be any run's.
        if all(row.label or row.action != "unknown" for row in result.rows):
            left = [row for row in result.rows if row.outcome != "destroyed"]
            runs = {row.flow_run_id for row in left if row.flow_run_id}
            alarms.settle(store, runs=runs, boxes={row.instance_id for row in left if row.instance_id}, only=only_run)
        if only_run is None:
            before = next((alarm.what for alarm in standing if alarm.subject == "account"), None)
            _account_alarm(market, store, result, settings, before, now)
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


def _account_alarm(
    market: Market, store: Store, result: Sweep, settings: Settings, before: Trouble | None, now: float
) -> None:
    """The cap first, since money goes by the hour. `before` is the account's alarm that stands; what is not known leaves it standing."""
    if over := _over_cap(result, settings.max_dph_usd, now):
        alarms.sound(store, over)
        return
    if before == "cap_reached":
        # The more urgent of two alarms about one subject would hide the other.
        alarms.clear(store, "account")
    try:
        credit = market.credit_usd()
    except MarketError as error:
        log.warning("the account's credit cannot be asked for now: %s", error)
        return
    if credit is None:
        return
    if credit < settings.min_credit_usd:
        lasts = f", {credit / result.dph_usd:.1f} h at ${result.dph_usd:.3f}/h" if result.dph_usd > 0 else ""
        reason = f"${credit:.2f} of credit are left{lasts}, want ${settings.min_credit_usd:.2f} (LIVERY_MIN_CREDIT_USD)"
        do = "add credit: without it the market stops every box, and later deletes its disk"
        alarms.sound(
            store, Alarm(what="credit_low", subject="account", dph_usd=result.dph_usd, reason=reason, do=do, at=now)
        )
    elif before == "credit_low":
        alarms.clear(store, "account")


def _over_cap(result: Sweep, cap_usd_h: float, now: float) -> Alarm | None:
    """The alarm of an account that spent too fast when this sweep began, or that may, by what could be behind create calls without an answer."""
    taken = [row for row in result.rows if row.over_cap]
    spends = result.dph_usd + sum(row.dph_usd or 0.0 for row in taken if row.outcome == "destroyed")
    if spends + result.promised_usd_h <= cap_usd_h:
        return None
    went = sum(row.dph_usd or 0.0 for row in taken)
    return Alarm(
        what="cap_reached",
        subject="account",
        instances=tuple(row.instance_id for row in taken if row.instance_id is not None),
        dph_usd=spends,
        reason=f"{result.sentence}, at most ${cap_usd_h:.2f}/h (LIVERY_MAX_DPH_USD); "
        + (
            f"boxes {ids_of(taken)} of ${went:.3f}/h had to go"
            if taken
            else "nothing of ours that is known to bill had to go"
        ),
        do=f"{alarms.CONSOLE}; end what is not needed, or raise LIVERY_MAX_DPH_USD",
        at=now,
    )


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
