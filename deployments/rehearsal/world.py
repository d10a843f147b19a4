"""Gives the market's contracts real boxes: starts and ends them, shapes their links, and plays the faults that they feel."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from deployments.rehearsal.box import Box, Facts, uv_cache_dir
from deployments.rehearsal.bucket import Bucket
from deployments.rehearsal.market import Contract, Endpoints, Market, Traffic
from deployments.rehearsal.proxy import Link, Mode, Proxy

TICK_S = 0.05
LOOK_S = 0.2
DROP_AFTER_S = 1.5
START_TRIES = 3
TMUX_BANNER = (
    "Welcome to vast.ai. If authentication fails, try again after a few seconds, and double check your ssh key.\n"
    "Have fun!"
)

log = logging.getLogger(__name__)


@dataclass
class Guest:
    """A contract's box with its three proxies; kept after the box is gone, for the byte counts."""

    box: Box
    uplink: Link
    downlink: Link
    bucket: Proxy
    direct: Proxy | None = None
    gateway: Proxy | None = None
    moved: int = 0
    stalled_at: int | None = None
    dropping: bool = False
    drop_at: float | None = None
    boots: int = 0
    offsets: dict[Path, int] = field(default_factory=dict)
    """How far each events.jsonl has been read."""


class World:
    """The `Host` of a real rehearsal. Lives in one event loop; `run` is its heartbeat."""

    def __init__(self, root: Path, bucket: Bucket) -> None:
        self.root = root
        self.bucket = bucket
        self.guests: dict[int, Guest] = {}
        self.base_url = ""
        self._tasks: set[asyncio.Task[None]] = set()

    # The market's wishes

    def make(self, contract: Contract) -> None:
        uplink, downlink = Link(), Link()
        store = Proxy(("127.0.0.1", self.bucket.port), forward=uplink, backward=downlink)
        store.set_mode("open")
        guest = Guest(self._box(contract, store), uplink, downlink, store)
        guest.box.make()
        self.guests[contract.id] = guest
        self._open_ssh(guest)
        self.refresh(contract)

    def boot(self, contract: Contract) -> None:
        guest = self.guests[contract.id]
        guest.boots += 1
        guest.box.set_keys([])
        guest.box.start()
        self.refresh(contract)
        self._spawn(self._see_it_up(contract, guest.boots))

    def halt(self, contract: Contract) -> None:
        guest = self.guests[contract.id]
        guest.boots += 1
        self.refresh(contract)
        guest.box.stop()

    def remove(self, contract: Contract) -> None:
        guest = self.guests[contract.id]
        guest.boots += 1
        for proxy in (guest.bucket, guest.direct, guest.gateway):
            if proxy is not None:
                proxy.close()
        remains = guest.box.remove(self.root / "trash")
        self._spawn(asyncio.to_thread(shutil.rmtree, remains, True))

    def wipe(self, contract: Contract) -> None:
        self.guests[contract.id].box.wipe()

    def refresh(self, contract: Contract) -> None:
        """Brings keys, listeners and rates to what the contract says now."""
        guest = self.guests[contract.id]
        if contract.gone:
            return
        if contract.port_moves > guest.moved:
            guest.moved = contract.port_moves
            self._open_ssh(guest)
        guest.box.set_keys([key.text for key in contract.ssh_keys] if contract.keys_live else [])
        assert guest.direct is not None and guest.gateway is not None
        target = ("127.0.0.1", guest.box.port)
        for proxy, fault in ((guest.direct, "ssh.direct_blocked"), (guest.gateway, "ssh.proxy_blocked")):
            proxy.target = target
            proxy.set_mode(_ssh_mode(contract, fault))
        guest.bucket.set_mode("refuse" if contract.status == "offline" else "open")
        for link, fault in ((guest.uplink, "net.uplink"), (guest.downlink, "net.downlink")):
            slow = contract.effects.get(fault)
            link.rate_bytes_s = None if slow is None else max(1.0, float(slow) * 1e6)
        self._refresh_stall(guest, contract)
        if (dropping := "ssh.drop_mid_command" in contract.effects) and not guest.dropping:
            # Commands from before the fault was armed are not its victims.
            guest.box.begun_commands()
        guest.dropping = dropping

    def endpoints(self, contract: Contract) -> Endpoints | None:
        guest = self.guests.get(contract.id)
        if guest is None or guest.direct is None or guest.gateway is None:
            return None
        return Endpoints(guest.direct.port, guest.gateway.port)

    def traffic(self, contract: Contract) -> Traffic:
        guest = self.guests.get(contract.id)
        return Traffic() if guest is None else Traffic(guest.downlink.bytes, guest.uplink.bytes)

    # The heartbeat

    async def run(self, market: Market) -> None:
        """Settles the market and plays the faults that depend on what boxes do, until cancelled."""
        loop, look_at = asyncio.get_running_loop(), 0.0
        while True:
            market.settle()
            now = loop.time()
            for contract in market.alive():
                self._drop_connections(contract, now)
            if now >= look_at:
                look_at = now + LOOK_S
                for contract in market.alive():
                    self._look_into(contract, market)
            await asyncio.sleep(TICK_S)

    async def close(self, market: Market) -> None:
        """Destroys every box and waits until its disk is deleted."""
        for contract in market.alive():
            market.destroy(contract)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _box(self, contract: Contract, store: Proxy) -> Box:
        environment = {"AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{store.port}", "UV_OFFLINE": "1"}
        if cache := uv_cache_dir():
            environment["UV_CACHE_DIR"] = cache
        if links := os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS"):
            environment["UV_FIND_LINKS"] = links
        effects = contract.effects
        container = {
            "CONTAINER_ID": str(contract.id),
            "CONTAINER_API_KEY": contract.api_key,
            "VAST_CONTAINERLABEL": f"C.{contract.id}",
            "VAST_URL": self.base_url,
            "PUBLIC_IPADDR": "127.0.0.1",
        }
        broken = effects.get("box.import_broken")
        return Box(
            directory=self.root / "boxes" / str(contract.id),
            facts=facts_of(contract),
            environment=environment,
            container_env={**contract.env, **container},
            onstart=contract.onstart,
            banner=TMUX_BANNER if "ssh.tmux_banner_on_stdout" in effects else "",
            path="/usr/bin:/bin" if "ssh.path_minimal" in effects else None,
            broken_module=None if broken is None else str(broken),
        )

    def _open_ssh(self, guest: Guest) -> None:
        """New ports for both SSH endpoints; the old ones are given up."""
        for old in (guest.direct, guest.gateway):
            if old is not None:
                old.close()
        target = ("127.0.0.1", guest.box.port)
        guest.direct = Proxy(target, forward=guest.downlink, backward=guest.uplink)
        guest.gateway = Proxy(target, forward=guest.downlink, backward=guest.uplink)

    async def _see_it_up(self, contract: Contract, boot: int) -> None:
        """Starts the box's SSH server once more if another process took its port first."""
        guest = self.guests[contract.id]
        for attempt in range(START_TRIES):
            try:
                while guest.boots == boot and not await asyncio.to_thread(guest.box.answers):
                    await asyncio.sleep(0.02)
                return
            except RuntimeError as ended:
                if guest.boots != boot:
                    return
                log.warning("box %s, start %d: %s", contract.id, attempt + 1, ended)
                guest.box.stop()
                guest.box.start()
                self.refresh(contract)
        log.error("box %s: no SSH server after %d starts", contract.id, START_TRIES)

    def _refresh_stall(self, guest: Guest, contract: Contract) -> None:
        after = contract.effects.get("net.stall_after")
        if after is None:
            guest.stalled_at = guest.bucket.stall_after_bytes = None
            guest.bucket.thaw()
        elif guest.stalled_at is None:
            guest.stalled_at = guest.bucket.stall_after_bytes = guest.bucket.sent_bytes + int(after)

    def _drop_connections(self, contract: Contract, now: float) -> None:
        left, guest = contract.effects.get("ssh.drop_mid_command"), self.guests[contract.id]
        if left is None:
            return
        if guest.box.begun_commands() and guest.drop_at is None and contract.status == "running":
            guest.drop_at = now + DROP_AFTER_S
        if guest.drop_at is not None and now >= guest.drop_at:
            guest.drop_at = None
            for proxy in (guest.direct, guest.gateway):
                if proxy is not None:
                    proxy.reset_all()
            if int(left) > 1:
                contract.effects["ssh.drop_mid_command"] = int(left) - 1
            else:
                del contract.effects["ssh.drop_mid_command"]

    def _look_into(self, contract: Contract, market: Market) -> None:
        if "box.import_broken" in contract.effects:
            self.guests[contract.id].box.break_imports()
        if "box.lost_at" in contract.effects and self._reached(contract):
            del contract.effects["box.lost_at"]
            market.lose(contract)

    def _reached(self, contract: Contract) -> bool:
        phase, _, step = str(contract.effects["box.lost_at"]).partition(":")
        guest = self.guests[contract.id]
        return any(_is_step(line, phase, int(step)) for line in _new_lines(guest.box.event_files(), guest.offsets))

    def _spawn(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def facts_of(contract: Contract) -> Facts:
    offer, effects = contract.offer, contract.effects
    driver, driver_cuda = offer.driver_version, round(offer.cuda_max_good * 1000)
    if "box.driver_old" in effects:
        driver, driver_cuda = str(effects["box.driver_old"]), 12040
    share = offer.cpu_cores_effective / (offer.cpu_cores or offer.cpu_cores_effective)
    xid = effects.get("box.gpu_lost")
    return Facts(
        gpu_name=contract.gpu_name,
        gpu_memory_mb=contract.gpu_ram_mb,
        num_gpus=offer.num_gpus,
        driver_version=driver,
        cuda_driver=driver_cuda,
        pids_max=int(effects.get("box.pids_max", 32_768)),
        memory_max_gb=round(offer.cpu_ram_mb * share / 1000, 1),
        disk_free_gb=float(effects.get("box.disk_full", contract.disk_gb)),
        clock_skew_s=float(effects.get("box.clock_skew", 0.0)),
        xid=None if xid is None else int(xid),
    )


def _ssh_mode(contract: Contract, fault: str) -> Mode:
    if not contract.ssh_open:
        return "refuse"
    if "ssh.blackhole" in contract.effects:
        return "blackhole"
    match contract.effects.get(fault):
        case None:
            return "open"
        case "refuse":
            return "refuse"
        case _:
            return "blackhole"


def _new_lines(files: list[Path], offsets: dict[Path, int]) -> list[bytes]:
    """The whole lines that were added to the files since the last look."""
    lines: list[bytes] = []
    for path in files:
        with open(path, "rb") as events:
            events.seek(offsets.get(path, 0))
            data = events.read()
        whole = data[: data.rfind(b"\n") + 1]
        offsets[path] = offsets.get(path, 0) + len(whole)
        lines += whole.splitlines()
    return lines


def _is_step(line: bytes, phase: str, step: int) -> bool:
    try:
        event = json.loads(line)
    except ValueError:
        return False
    if not isinstance(event, dict) or event.get("kind") != "step" or event.get("phase") != phase:
        return False
    return isinstance(event.get("step"), int) and event["step"] >= step
