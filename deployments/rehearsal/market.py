"""The pretend market itself: offers, contracts, their states and their bills, driven by a clock that is passed in.

No HTTP and no processes here: `api.py` gives it the market's HTTP forms, and a `Host` gives its contracts real boxes.
Prices are $/h or $/GB as in the market's rows; times are epoch seconds of the market's clock.
"""

from __future__ import annotations

import heapq
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from deployments.rehearsal.catalogue import OFFERS, Offer
from deployments.rehearsal.faults import FAULTS, Armed, FaultBook, FaultValue

Clock = Callable[[], float]

# Boxes whose host is unreachable are not billed at all; a stopped one still pays for its disk.
UNBILLED = "offline"
GPU_BILLED = "running"
# Data of an expired contract is kept, and billed, for so long.
KEPT_AFTER_END_S = 48 * 3600.0
# Whatever happens to a box, its contract ends when it ends.
UNSTOPPABLE = ("contract_ends", "deleted")


@dataclass(frozen=True)
class Endpoints:
    """The two loopback ports at which a box's SSH server answers."""

    direct_port: int
    proxy_port: int


@dataclass(frozen=True)
class Traffic:
    """Bytes that crossed the box's links since it was made, as the box sees them."""

    down_bytes: int = 0
    up_bytes: int = 0


class Host(Protocol):
    """What stands behind the contracts. Every call must be quick; `refresh` applies the contract's wishes as they are."""

    def make(self, contract: Contract) -> None: ...
    def boot(self, contract: Contract) -> None: ...
    def halt(self, contract: Contract) -> None: ...
    def remove(self, contract: Contract) -> None: ...
    def refresh(self, contract: Contract) -> None: ...
    def wipe(self, contract: Contract) -> None: ...
    def endpoints(self, contract: Contract) -> Endpoints | None: ...
    def traffic(self, contract: Contract) -> Traffic: ...


class NoHost:
    """Contracts without boxes: all that a test of states, bills and replies needs."""

    def make(self, contract: Contract) -> None: ...
    def boot(self, contract: Contract) -> None: ...
    def halt(self, contract: Contract) -> None: ...
    def remove(self, contract: Contract) -> None: ...
    def refresh(self, contract: Contract) -> None: ...
    def wipe(self, contract: Contract) -> None: ...

    def endpoints(self, contract: Contract) -> Endpoints | None:
        return Endpoints(41_022, 15_610)

    def traffic(self, contract: Contract) -> Traffic:
        return Traffic()


@dataclass(frozen=True)
class SshKey:
    id: int
    text: str


@dataclass
class Bill:
    """Dollars so far, by the charges endpoint's item types."""

    gpu_usd: float = 0.0
    disk_usd: float = 0.0
    gpu_s: float = 0.0
    disk_s: float = 0.0


@dataclass
class Contract:
    """One rented instance, from the accepted create call to its deletion (and kept afterwards for the bill)."""

    id: int
    offer: Offer
    disk_gb: float
    label: str | None
    image: str
    onstart: str
    env: dict[str, str]
    bid_usd: float | None
    api_key: str
    created_at: float
    dph_base_usd: float
    gpu_name: str
    gpu_ram_mb: int
    ends_at: float
    """When the host takes the machine back."""
    status: str | None = None
    intended: str = "running"
    status_msg: str | None = None
    running_at: float | None = None
    ended_at: float | None = None
    lost: bool = False
    ssh_keys: list[SshKey] = field(default_factory=list)
    ssh_open: bool = False
    keys_live: bool = True
    port_moves: int = 0
    effects: dict[str, FaultValue] = field(default_factory=dict)
    stays_polls: int | None = None
    show_lag_polls: int = 0
    bill: Bill = field(default_factory=Bill)
    billed_until: float = 0.0
    epoch: int = 0
    """Counts halts and boots, so that an event planned before one of them is void after it."""

    @property
    def gone(self) -> bool:
        return self.ended_at is not None

    @property
    def is_bid(self) -> bool:
        return self.bid_usd is not None

    @property
    def storage_usd_h(self) -> float:
        return self.offer.storage_usd_h(self.disk_gb)

    @property
    def dph_total_usd(self) -> float:
        return self.dph_base_usd + self.storage_usd_h

    @property
    def billed_now_usd_h(self) -> float:
        """$/h that this second costs, bandwidth aside."""
        if self.gone or self.status == UNBILLED:
            return 0.0
        return self.storage_usd_h + (self.dph_base_usd if self.status == GPU_BILLED else 0.0)


@dataclass(frozen=True)
class Rental:
    """What a create call asks for."""

    disk_gb: float
    label: str | None = None
    image: str = ""
    onstart: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    bid_usd: float | None = None


class Market:
    """Offers, contracts and money. Call `settle()` before reading: it plays everything that was due by now."""

    def __init__(
        self,
        clock: Clock,
        *,
        faults: FaultBook | None = None,
        host: Host | None = None,
        boot_s: float = 1.0,
        offers: Iterable[Offer] = OFFERS,
        credit_usd: float = 100.0,
        user_id: int = 71_500,
    ) -> None:
        self.clock = clock
        self.faults = faults or FaultBook()
        self.host: Host = host or NoHost()
        self.boot_s = boot_s
        self.offers = {offer.id: offer for offer in offers}
        self.credit_usd = credit_usd
        self.user_id = user_id
        self.account_key = secrets.token_hex(32)
        self.reaper_key = secrets.token_hex(32)
        self.account_ssh_keys: list[SshKey] = []
        self.contracts: dict[int, Contract] = {}
        self.first_accepted_at: float | None = None
        self._ids = itertools.count(7_835_610)
        self._key_ids = itertools.count(310)
        self._agenda: list[tuple[float, int, int, int, str]] = []
        self._ticket = itertools.count()

    # Renting and giving back

    def rent(self, offer: Offer, rental: Rental) -> Contract:
        """Accepts the ask and starts billing storage. Box faults that fit this machine are taken here."""
        now = self.settle()
        contract = self._contract(offer, rental, now)
        self.contracts[contract.id] = contract
        if self.first_accepted_at is None:
            self.first_accepted_at = now
        for name, fault in FAULTS.items():
            if fault.hits == "box" and (value := self._take_box_fault(name, contract)) is not None:
                contract.effects[name] = value
        self.host.make(contract)
        self._plan_boot(contract, now)
        self._plan(contract, contract.ends_at, "contract_ends")
        return contract

    def destroy(self, contract: Contract) -> None:
        now = self.settle()
        if not contract.gone:
            self._end(contract, now)

    def gone_when_looked_at(self, contract: Contract) -> bool:
        """Counts one look at a box whose destroy was answered 200 but has not happened yet."""
        if contract.stays_polls is not None:
            if contract.stays_polls <= 0:
                self.destroy(contract)
            else:
                contract.stays_polls -= 1
        return contract.gone

    def stop(self, contract: Contract) -> None:
        now = self.settle()
        contract.intended = "stopped"
        self._halt(contract, "stopped", now)

    def start(self, contract: Contract) -> None:
        now = self.settle()
        contract.intended = "running"
        contract.epoch += 1
        contract.status = "loading"
        self._plan(contract, now + self.boot_s, "running")

    def reboot(self, contract: Contract, *, wipe: bool = False) -> None:
        """Kills every process of the box and starts it again; the disk stays, unless `wipe` (the market's recycle)."""
        now = self.settle()
        self._reboot(contract, now)
        if wipe:
            self.host.wipe(contract)

    def lose(self, contract: Contract) -> None:
        """The host vanishes: processes gone, SSH refused, state offline, nothing billed."""
        now = self.settle()
        contract.lost = True
        self._halt(contract, "offline", now)

    def is_rented(self, offer: Offer) -> bool:
        return any(c.offer.id == offer.id and not c.gone for c in self.contracts.values())

    def alive(self) -> list[Contract]:
        return [c for c in self.contracts.values() if not c.gone]

    # Keys

    def add_account_key(self, text: str) -> SshKey:
        """Account keys reach only the boxes made after them, as on the real market."""
        key = SshKey(next(self._key_ids), text.strip())
        self.account_ssh_keys.append(key)
        return key

    def attach_key(self, contract: Contract, text: str) -> SshKey:
        known = next((k for k in contract.ssh_keys if k.text == text.strip()), None)
        key = known or SshKey(next(self._key_ids), text.strip())
        if known is None:
            contract.ssh_keys.append(key)
        if "ssh.key_missing_for" not in contract.effects:
            contract.keys_live = True
        self.host.refresh(contract)
        return key

    def detach_key(self, contract: Contract, key_id: int) -> bool:
        before = len(contract.ssh_keys)
        contract.ssh_keys = [k for k in contract.ssh_keys if k.id != key_id]
        self.host.refresh(contract)
        return len(contract.ssh_keys) < before

    # Faults at run time

    def arm(self, spec: str) -> Armed:
        """Arms a fault; a live one strikes the boxes that are up, oldest first, as far as its scope reaches."""
        armed = self.faults.arm(spec)
        if FAULTS[armed.name].live:
            for contract in self.alive():
                if (value := self.faults.take(armed.name, contract.offer.machine_id)) is not None:
                    contract.effects[armed.name] = value
                    self.host.refresh(contract)
        return armed

    def disarm(self, name: str) -> bool:
        """Takes a fault back, also from the living boxes where it is one that strikes them live."""
        found = self.faults.disarm(name)
        for contract in self.alive():
            if FAULTS[name].live and contract.effects.pop(name, None) is not None:
                found = True
                self.host.refresh(contract)
        return found

    # Time and money

    def settle(self) -> float:
        """Plays every event that was due by now, in order, billing up to each; returns now."""
        now = self.clock()
        while self._agenda and self._agenda[0][0] <= now:
            at, _, contract_id, epoch, event = heapq.heappop(self._agenda)
            contract = self.contracts[contract_id]
            if not contract.gone and (contract.epoch == epoch or event in UNSTOPPABLE):
                self._bill(contract, at)
                self._play(contract, event, at)
        for contract in self.contracts.values():
            self._bill(contract, contract.ended_at if contract.ended_at is not None else now)
        if self.faults.peek("credit.zero") is not None:
            self._stop_for_credit(now)
        return now

    def items_usd(self, contract: Contract) -> dict[str, float]:
        """Dollars by item type of the charges endpoint: gpu, disk, bwd (download), bwu (upload)."""
        traffic = self.host.traffic(contract)
        per_byte = contract.offer.inet_cost_usd_gb / 1e9
        return {
            "gpu": contract.bill.gpu_usd,
            "disk": contract.bill.disk_usd,
            "bwd": traffic.down_bytes * per_byte,
            "bwu": traffic.up_bytes * per_byte,
        }

    def total_usd(self) -> float:
        return sum(sum(self.items_usd(c).values()) for c in self.contracts.values())

    def remaining_credit_usd(self) -> float:
        if self.faults.peek("credit.zero") is None:
            return self.credit_usd - self.total_usd()
        self.faults.note("credit.zero")
        return 0.0

    def _contract(self, offer: Offer, rental: Rental, now: float) -> Contract:
        on_demand = rental.bid_usd is None or self.faults.take("create.returns_on_demand_for_bid", offer.machine_id)
        share = self.faults.take("create.disk_short", offer.machine_id)
        other_gpu = self.faults.take("create.other_gpu", offer.machine_id)
        dearer = self.faults.take("create.dearer", offer.machine_id)
        label_lost = self.faults.take("create.label_lost", offer.machine_id) is not None
        bid_usd = None if on_demand else rental.bid_usd
        dph_base_usd = offer.dph_base_usd if bid_usd is None else bid_usd
        return Contract(
            id=next(self._ids),
            offer=offer,
            disk_gb=rental.disk_gb * (1.0 if share is None else float(share)),
            label=None if label_lost else rental.label,
            image=rental.image,
            onstart=rental.onstart,
            env=dict(rental.env),
            bid_usd=bid_usd,
            api_key=secrets.token_hex(32),
            created_at=now,
            dph_base_usd=dph_base_usd * (1.0 if dearer is None else float(dearer)),
            gpu_name=offer.gpu_name if other_gpu is None else str(other_gpu),
            gpu_ram_mb=offer.gpu_ram_mb if other_gpu is None else offer.gpu_ram_mb // 2,
            ends_at=now + offer.duration_s,
            ssh_keys=list(self.account_ssh_keys),
            billed_until=now,
        )

    def _take_box_fault(self, name: str, contract: Contract) -> FaultValue | None:
        if name == "bid.outbid_after" and not contract.is_bid:
            return None
        return self.faults.take(name, contract.offer.machine_id)

    def _plan(self, contract: Contract, at: float, event: str) -> None:
        heapq.heappush(self._agenda, (at, next(self._ticket), contract.id, contract.epoch, event))

    def _plan_boot(self, contract: Contract, now: float) -> None:
        self._plan(contract, now + 0.15 * self.boot_s, "created")
        self._plan(contract, now + 0.4 * self.boot_s, "loading")
        if "boot.loading_forever" in contract.effects or "boot.status_msg" in contract.effects:
            return
        self._plan(contract, now + self.boot_s, "exited" if "boot.exited" in contract.effects else "running")

    def _plan_after_running(self, contract: Contract, at: float) -> None:
        for effect, event in (
            ("boot.offline_after", "offline"),
            ("bid.outbid_after", "stopped"),
            ("host.reclaim_stop", "stopped"),
            ("host.reboots_after", "reboots"),
            ("price.increase_after", "dearer"),
            ("ssh.refused_for", "ssh_opens"),
            ("ssh.key_missing_for", "keys_arrive"),
            ("ssh.key_dropped_after", "keys_dropped"),
            ("ssh.port_changes_after", "ports_move"),
        ):
            if effect in contract.effects:
                self._plan(contract, at + float(contract.effects[effect]), event)
        if (sooner_s := contract.effects.get("contract.ends_after")) is not None:
            contract.ends_at = min(contract.ends_at, at + float(sooner_s))
            self._plan(contract, contract.ends_at, "contract_ends")
        if "boot.unknown_then_back" in contract.effects:
            self._plan(contract, at + 1.0, "unknown")
            self._plan(contract, at + 1.0 + float(contract.effects["boot.unknown_then_back"]), "back")

    def _play(self, contract: Contract, event: str, at: float) -> None:
        match event:
            case "created":
                contract.status = "created"
            case "loading":
                contract.status = "loading"
                told = contract.effects.get("boot.status_msg")
                contract.status_msg = str(told) if told is not None else f"pulling {contract.image}"
            case "running":
                self._run(contract, at)
            case "exited":
                self._halt(contract, "exited", at)
            case "offline":
                self._halt(contract, "offline", at)
            case "stopped":
                contract.intended = "stopped"
                self._halt(contract, "stopped", at)
            case "reboots":
                del contract.effects["host.reboots_after"]  # once: the box that comes up again stays up
                contract.port_moves += 1
                self._reboot(contract, at)
            case "unknown":
                contract.status = "unknown"
            case "back":
                contract.status = "running"
            case "contract_ends":
                contract.intended = "stopped"
                if contract.status not in ("stopped", UNBILLED):
                    self._halt(contract, "stopped", at)
                self._plan(contract, at + KEPT_AFTER_END_S, "deleted")
            case "deleted":
                self._end(contract, at)
            case "dearer":
                contract.dph_base_usd *= 1.5
            case "ssh_opens":
                contract.ssh_open = True
                self.host.refresh(contract)
            case "keys_arrive":
                del contract.effects["ssh.key_missing_for"]
                contract.keys_live = True
                self.host.refresh(contract)
            case "keys_dropped":
                contract.keys_live = False
                self.host.refresh(contract)
            case "ports_move":
                contract.port_moves += 1
                self.host.refresh(contract)
            case _:
                raise AssertionError(f"unknown event {event}")

    def _run(self, contract: Contract, at: float) -> None:
        contract.status = "running"
        contract.status_msg = f"success, running {contract.image}/ssh"
        contract.running_at = contract.running_at or at
        contract.ssh_open = "ssh.refused_for" not in contract.effects
        contract.keys_live = "ssh.key_missing_for" not in contract.effects
        self._plan_after_running(contract, at)
        self.host.boot(contract)

    def _reboot(self, contract: Contract, at: float) -> None:
        self._halt(contract, "rebooting", at)
        self._plan(contract, at + self.boot_s / 2, "running")

    def _halt(self, contract: Contract, status: str, at: float) -> None:
        self._bill(contract, at)
        contract.epoch += 1
        contract.status = status
        contract.ssh_open = False
        self.host.halt(contract)

    def _end(self, contract: Contract, at: float) -> None:
        contract.ended_at = at
        contract.epoch += 1
        contract.stays_polls = None
        self.host.remove(contract)

    def _bill(self, contract: Contract, until: float) -> None:
        spent_s = until - contract.billed_until
        if spent_s <= 0:
            return
        contract.billed_until = until
        if contract.status == UNBILLED:
            return
        contract.bill.disk_s += spent_s
        contract.bill.disk_usd += contract.storage_usd_h * spent_s / 3600
        if contract.status == GPU_BILLED:
            contract.bill.gpu_s += spent_s
            contract.bill.gpu_usd += contract.dph_base_usd * spent_s / 3600

    def _stop_for_credit(self, now: float) -> None:
        running = [c for c in self.alive() if c.status == "running"]
        if running:
            self.faults.note("credit.zero")
        for contract in running:
            contract.intended = "stopped"
            self._halt(contract, "stopped", now)
