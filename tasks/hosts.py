"""Machines that failed us, remembered in the bucket with the reason and an expiry, so that the cheapest box is not rented again and again."""

from __future__ import annotations

import logging

from pydantic import ValidationError

from training.box.store import Store, StoreError
from training.contract import layout
from training.contract.model import Frozen

log = logging.getLogger(__name__)
REMEMBERED_DAYS = 7.0


class BadHost(Frozen):
    """`hosts/<machine id>.json`. Deleting the object forgives the machine."""

    machine_id: int
    reason: str
    at: float
    until: float


def remember(store: Store, machine_id: int, reason: str, *, now: float, days: float = REMEMBERED_DAYS) -> None:
    """Leave this machine out for some days. StoreError if it cannot be written."""
    note = BadHost(machine_id=machine_id, reason=reason[:300], at=now, until=now + days * 86_400)
    store.put_bytes(layout.host(machine_id), note.model_dump_json().encode())


def bad_machines(store: Store, *, now: float) -> dict[int, str]:
    """Machine ids that are left out now, with the reason. A note that cannot be read is said and skipped: it only costs a try."""
    found: dict[int, str] = {}
    for item in store.list("hosts/"):
        note = _read(store, item.key)
        if note and note.until > now:
            found[note.machine_id] = note.reason
    return found


def _read(store: Store, key: str) -> BadHost | None:
    try:
        data = store.get_bytes(key)
        return BadHost.model_validate_json(data) if data is not None else None
    except (StoreError, ValidationError) as error:
        log.warning("%s cannot be read and is ignored: %s", key, str(error).splitlines()[0])
        return None
