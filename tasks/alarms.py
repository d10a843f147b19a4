"""Alarms: what costs money and needs a person. One schema (`domain.Alarm`), and the one place that writes, tells and clears them.

An alarm is an object in the bucket, a line of the log, and an event for Prefect, whose automations tell people (`deployments/automations.py`).
The object is the truth: a sweep by cron, a hook after a crash and a flow whose server is gone all leave it, and none fails if it cannot be told.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Collection
from datetime import UTC, datetime
from typing import get_args

import httpx
from dotenv import dotenv_values
from pydantic import ValidationError

from tasks.domain import Alarm, Flight, Trouble
from tasks.flight import price_now, read_flight, spent_usd
from tasks.log import redact
from training.box.store import Store, StoreError
from training.contract import layout

log = logging.getLogger(__name__)

CONSOLE = "look at the market's console (vast.ai: https://cloud.vast.ai/instances/)"
ALARM_EVENT = "livery.alarm."
SAW_ALL_EVENT = "livery.reaper.saw-all"
# A trouble that stands is met again at every sweep; people are told of it again after so long.
TELL_AGAIN_S = 6 * 3600.0
_TELL_S = 3.0
# The order in which they stand in the domain: of two about one subject the first is kept.
_URGENCY = {what: place for place, what in enumerate(get_args(Trouble))}
# A complete listing that shows no box of theirs does not answer these.
_NOT_SETTLED_BY_LISTING = {"billed_after_destroy", "billed_without_owner"}


def sound(store: Store, alarm: Alarm) -> None:
    """Write it down, log it, tell Prefect. Raises nothing: whoever sounds an alarm has something more urgent to do."""
    before = _standing(store, alarm.subject)
    recently = _recently_told(before, alarm)
    log.log(logging.ERROR if recently is None else logging.INFO, "ALARM %s", alarm.sentence)
    kept = before is not None and _URGENCY[before.what] < _URGENCY[alarm.what]
    if not kept:
        # Before it is told: a hook in a hurry may end while Prefect makes it wait.
        _write(store, alarm.model_copy(update={"told_at": recently}))
    if recently is None and _told(alarm) and not kept:
        _write(store, alarm.model_copy(update={"told_at": alarm.at}))


def of_run(
    store: Store,
    flow_run_id: str,
    what: Trouble,
    *,
    reason: str,
    do: str,
    at: float,
    instances: Collection[int] = (),
    dph_usd: float | None = None,
) -> Alarm:
    """An alarm about a flow run; box, $/h and dollars spent are its flight record's where the caller does not know better."""
    flight = _flight(store, flow_run_id)
    last = flight.attempts[-1] if flight and flight.attempts else None
    if last is not None and last.instance_id is not None and not last.ended:
        instances = instances or (last.instance_id,)
        dph_usd = price_now(last) if dph_usd is None else dph_usd
    return Alarm(
        what=what,
        subject=flow_run_id,
        run=flight.run if flight else None,
        instances=tuple(sorted(instances)),
        dph_usd=dph_usd,
        spent_usd=round(spent_usd(flight, at), 6) if flight else None,
        reason=reason,
        do=do,
        at=at,
    )


def answered(store: Store, subject: str, gone: Collection[int] | None = None) -> None:
    """The boxes that an alarm is about are proved gone: all of the subject's, or those of `gone`. StoreError."""
    alarm = _read(store, layout.alarm(subject))
    if alarm is not None and alarm.what in _NOT_SETTLED_BY_LISTING:
        return
    if alarm is not None and gone is not None and not set(alarm.instances) <= set(gone):
        return
    store.delete(layout.alarm(subject))


def clear(store: Store, subject: str) -> None:
    """The trouble is over. StoreError."""
    store.delete(layout.alarm(subject))


def standing(store: Store) -> list[Alarm]:
    """Every alarm that stands, the most urgent first. StoreError; an object that is none is said and skipped."""
    found = [_read(store, item.key) for item in store.list(layout.ALARMS)]
    return sorted((alarm for alarm in found if alarm is not None), key=lambda alarm: (_URGENCY[alarm.what], alarm.at))


def settle(store: Store, *, runs: Collection[str], boxes: Collection[int], only: str | None = None) -> list[str]:
    """After a complete listing: the alarms of runs without a box, and of boxes that are not listed any more, have had their answer.

    `runs` and `boxes` are those that are still there; with `only` one flow run's alarm alone is looked at. Returns the subjects
    that were settled. StoreError.
    """
    settled = []
    for item in store.list(layout.ALARMS):
        subject = item.key.removeprefix(layout.ALARMS).removesuffix(".json")
        if subject in {"account", "reaper"} or only not in (None, subject) or _is_there(subject, runs, boxes):
            continue
        alarm = _read(store, item.key)
        if alarm is not None and alarm.what in _NOT_SETTLED_BY_LISTING:
            continue
        store.delete(item.key)
        log.info("the alarm about %s is settled: the listing shows no box of it", subject)
        settled.append(subject)
    return settled


def reaper_saw_everything(now: float) -> None:
    """For the automation that alarms when this has not been heard for two periods of the reaper."""
    tell_prefect(SAW_ALL_EVENT, "livery.reaper", "reaper", {"at": now})


def _is_there(subject: str, runs: Collection[str], boxes: Collection[int]) -> bool:
    number = subject.removeprefix("box-")
    return int(number) in boxes if subject.startswith("box-") and number.isdigit() else subject in runs


def _recently_told(standing: Alarm | None, alarm: Alarm) -> float | None:
    """When the same trouble was told, if that is not long ago."""
    if standing is None or (standing.what, standing.instances) != (alarm.what, alarm.instances):
        return None
    told_at = standing.told_at
    return told_at if told_at is not None and alarm.at - told_at < TELL_AGAIN_S else None


def _standing(store: Store, subject: str) -> Alarm | None:
    try:
        return _read(store, layout.alarm(subject))
    except StoreError as error:
        log.warning("the bucket does not say whether an alarm about %s stands: %s", subject, error)
        return None


def _read(store: Store, key: str) -> Alarm | None:
    data = store.get_bytes(key)
    if data is None:
        return None
    try:
        return Alarm.model_validate_json(data)
    except ValidationError:
        log.warning("%s is not an alarm of ours", key)
        return None


def _flight(store: Store, flow_run_id: str) -> Flight | None:
    try:
        return read_flight(store, flow_run_id)
    except (StoreError, ValidationError) as error:
        log.warning("what flow run %s has cost is unknown: %s", flow_run_id, error)
        return None


def _write(store: Store, alarm: Alarm) -> None:
    try:
        store.put_bytes(layout.alarm(alarm.subject), alarm.model_dump_json(indent=1).encode())
    except StoreError as error:
        log.error("the alarm about %s is not written down: %s", alarm.subject, error)


def _told(alarm: Alarm) -> bool:
    facts = alarm.model_dump(mode="json", include={"subject", "run", "instances", "dph_usd", "spent_usd"})
    payload = {**facts, "what": alarm.what.replace("_", " "), "text": redact(alarm.sentence)}
    kind = f"{ALARM_EVENT}{alarm.what.replace('_', '-')}"
    return tell_prefect(kind, f"livery.{alarm.subject}", alarm.run or alarm.subject, payload, flow_run=alarm.subject)


def tell_prefect(
    event: str, resource: str, name: str, payload: dict[str, object], *, flow_run: str = "", url: str | None = None
) -> bool:
    """One event to Prefect's server, by plain HTTP: Prefect itself may be broken or absent where alarms are sounded. False if it was not taken."""
    url = url or _configured("PREFECT_API_URL")
    if url is None:
        return False
    page = {"prefect.resource.id": f"prefect.flow-run.{flow_run}", "prefect.resource.role": "flow-run"}
    body = {
        "id": str(uuid.uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": event,
        "resource": {"prefect.resource.id": resource, "prefect.resource.name": name},
        "related": [page] if _is_uuid(flow_run) else [],
        "payload": payload,
    }
    login, key = _configured("PREFECT_API_AUTH_STRING"), _configured("PREFECT_API_KEY")
    auth = httpx.BasicAuth(*login.split(":", 1)) if login and ":" in login else None
    headers = {"Authorization": f"Bearer {key}"} if key and auth is None else {}
    try:
        answer = httpx.post(f"{url.rstrip('/')}/events", json=[body], headers=headers, auth=auth, timeout=_TELL_S)
        answer.raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        # A header that cannot be sent is quoted in the complaint, with the key in it.
        unsent = isinstance(error, (httpx.LocalProtocolError, ValueError))
        said = "PREFECT_API_KEY or PREFECT_API_AUTH_STRING cannot be sent" if unsent else redact(str(error))
        log.warning("Prefect was not told of %s: %s: %s", event, type(error).__name__, said)
        return False
    return True


def _configured(name: str) -> str | None:
    """As Prefect reads it: the environment, or else `.env`; a line break at the end of a secret's file is not part of it."""
    return (os.environ.get(name) or dotenv_values(".env").get(name) or "").strip() or None


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True
