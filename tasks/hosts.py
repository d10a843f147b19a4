"""Machines that failed us, remembered in the bucket with reason, date and dollars, so that the cheapest box is not rented again and again.

A failure weighs 1 when it happens and half as much after each half-life of its kind. A machine is left out while its failures together weigh
at least a half: after one failure for one half-life, after two on the same day for two, after four for three. Two machines of one host that
are left out take the host's others with them: what they share (a line, a registry mirror, a power supply) is the likelier cause.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

from pydantic import ValidationError

from tasks.domain import Offer
from tasks.errors import BootFailed, BoxError, BoxLost, InstallFailed, LoginFailed, PreflightFailed
from training.box.store import Store, StoreError
from training.contract import layout
from training.contract.model import Frozen

log = logging.getLogger(__name__)
Kind = Literal["hardware", "lost", "boot", "network", "install"]

HALF_LIFE_DAYS: dict[Kind, float] = {
    "hardware": 14,  # a driver, a card or a disk stays as it is until somebody works on the machine
    "lost": 7,
    "boot": 3,
    "network": 2,  # a line is busy, and is free again
    "install": 1,  # mostly a registry that did not answer
}
LEFT_OUT = 0.5
MACHINES_OF_A_HOST = 2
_KEPT = 20
_DAY_S = 86_400.0
_LINK_CHECKS = {"uplink_mbps", "downlink_mbps", "hub_mbps"}


class Failure(Frozen):
    kind: Kind
    reason: str
    at: float
    usd: float = 0.0
    """What the box cost until it was given back, by its price an hour."""
    run: str = ""

    def weight(self, now: float) -> float:
        return float(2.0 ** (-max(0.0, now - self.at) / (HALF_LIFE_DAYS[self.kind] * _DAY_S)))


class BadHost(Frozen):
    """`hosts/<machine id>.json`. Deleting the object forgives the machine."""

    machine_id: int
    host_id: int | None = None
    failures: tuple[Failure, ...]
    """Oldest first."""

    def left_out(self, now: float) -> bool:
        return sum(failure.weight(now) for failure in self.failures) >= LEFT_OUT

    @property
    def until(self) -> float:
        """When it may be rented again, if it does not fail before."""
        early = self.failures[-1].at
        late = early + _DAY_S * (1 + len(self.failures)) * max(HALF_LIFE_DAYS.values())
        while late - early > 60:
            middle = (early + late) / 2
            early, late = (middle, late) if self.left_out(middle) else (early, middle)
        return late

    @property
    def sentence(self) -> str:
        """The last failure, how many there were, what they cost, and until when it is left out."""
        last, usd = self.failures[-1], sum(failure.usd for failure in self.failures)
        count = "" if len(self.failures) == 1 else f", {len(self.failures)} failures"
        return f"{last.reason} ({_date(last.at)}{count}, ${usd:.2f}; out until {_date(self.until)})"


def remember(
    store: Store,
    machine_id: int,
    kind: Kind,
    reason: str,
    *,
    now: float,
    host_id: int | None = None,
    usd: float = 0.0,
    run: str = "",
) -> BadHost:
    """Add one failure to what is remembered of the machine. StoreError if it cannot be written."""
    known = _read(store, layout.host(machine_id))
    failure = Failure(kind=kind, reason=reason[:300], at=now, usd=round(usd, 4), run=run)
    note = BadHost(
        machine_id=machine_id,
        host_id=host_id if host_id is not None or known is None else known.host_id,
        failures=(*(known.failures if known else ()), failure)[-_KEPT:],
    )
    store.put_bytes(layout.host(machine_id), note.model_dump_json().encode())
    return note


def kind_of(error: BoxError) -> Kind:
    """What sort of failure an error tells of, which decides for how long it counts."""
    if isinstance(error, PreflightFailed):
        return "network" if error.fault in _LINK_CHECKS else "hardware"
    if isinstance(error, BootFailed | LoginFailed):
        return "boot"
    if isinstance(error, InstallFailed):
        return "install"
    return "lost" if isinstance(error, BoxLost) else "network"


def read_hosts(store: Store) -> list[BadHost]:
    """Every machine on record, by machine id. A note that cannot be read is said and skipped: it only costs a try."""
    notes = (_read(store, item.key) for item in store.list("hosts/"))
    return sorted((note for note in notes if note), key=lambda note: note.machine_id)


def bad_machines(store: Store, *, now: float, offers: Iterable[Offer] = ()) -> dict[int, str]:
    """Machine ids that are left out now, with the reason; among `offers` also those whose host has two such machines."""
    out = [note for note in read_hosts(store) if note.left_out(now)]
    found = {note.machine_id: note.sentence for note in out}
    hosts = bad_hosts(out)
    for offer in offers:
        if offer.host_id in hosts and offer.machine_id not in found:
            machines = ", ".join(map(str, hosts[offer.host_id]))
            found[offer.machine_id] = f"host {offer.host_id} is left out, its machines {machines} failed lately"
    return found


def bad_hosts(left_out: Iterable[BadHost]) -> dict[int | None, list[int]]:
    """Host id → its machines that are left out, where there are two or more."""
    machines: dict[int | None, list[int]] = defaultdict(list)
    for note in left_out:
        if note.host_id is not None:
            machines[note.host_id].append(note.machine_id)
    return {host_id: ids for host_id, ids in machines.items() if len(ids) >= MACHINES_OF_A_HOST}


def table(notes: Iterable[BadHost], *, now: float) -> str:
    """What is remembered, for a terminal: those left out first, the dearest first."""
    notes = list(notes)
    if not notes:
        return "no machine has failed"
    hosts = bad_hosts(note for note in notes if note.left_out(now))
    order = sorted(notes, key=lambda note: (not note.left_out(now), -sum(each.usd for each in note.failures)))
    lines = [f"{'machine':>9} {'host':>9} {'failed':>6} {'lost $':>8}  {'out until':<16}  last reason"]
    for note in order:
        until = _date(note.until, minutes=True) if note.left_out(now) else "forgiven"
        usd = sum(each.usd for each in note.failures)
        host = "-" if note.host_id is None else str(note.host_id)
        last = note.failures[-1]
        lines.append(
            f"{note.machine_id:>9} {host:>9} {len(note.failures):>6} {usd:>8.2f}  {until:<16}  {last.kind}: {last.reason}"
        )
    lines += [f"host {host}: all its machines are left out" for host in hosts]
    return "\n".join([*lines, "deleting hosts/<machine id>.json in the bucket forgives a machine"])


def _read(store: Store, key: str) -> BadHost | None:
    try:
        data = store.get_bytes(key)
        note = BadHost.model_validate_json(data) if data is not None else None
    except (StoreError, ValidationError) as error:
        log.warning("%s cannot be read and is ignored: %s", key, str(error).splitlines()[0])
        return None
    return note if note and note.failures else None


def _date(at: float, *, minutes: bool = False) -> str:
    return time.strftime("%Y-%m-%d %H:%M" if minutes else "%Y-%m-%d", time.gmtime(at))
