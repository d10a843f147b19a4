from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from deployments.rehearsal import Rehearsal, start
from deployments.rehearsal.api import Api, Reply, Request
from deployments.rehearsal.faults import FaultBook
from deployments.rehearsal.market import Market

T0 = 1_800_000_000.0
CHEAPEST = 24002001
SSHD_START_TRIES = 60
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVzZWxlc3MgcHVibGljIGtleSBmb3IgdGVzdHMgb25s test"


class FakeClock:
    def __init__(self) -> None:
        self.now = T0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class MarketCaller:
    """Calls the pure API as an HTTP client would, with the account key unless another is given."""

    api: Api
    clock: FakeClock

    @property
    def market(self) -> Market:
        return self.api.market

    def __call__(self, method: str, path: str, body: Any = None, *, key: str | None = "", **query: Any) -> Reply:
        bearer = self.market.account_key if key == "" else key
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in query.items()}
        raw = b"" if body is None else json.dumps(body).encode()
        return self.api.handle(Request(method, path, texts, raw, bearer))

    def create(self, ask: int = CHEAPEST, **body: Any) -> Reply:
        return self("PUT", f"/api/v0/asks/{ask}/", {"disk": 20, "label": "livery:run:1:9", **body})

    def rent(self, ask: int = CHEAPEST, **body: Any) -> int:
        """A running box; returns its id."""
        reply = self.create(ask, **body)
        self.clock.advance(self.market.boot_s)
        instance_id: int = reply.body["new_contract"]
        return instance_id

    def show(self, instance_id: int) -> dict[str, Any] | None:
        row: dict[str, Any] | None = self("GET", f"/api/v0/instances/{instance_id}/").body["instances"]
        return row

    def listed(self, **query: Any) -> list[int]:
        return [row["id"] for row in self("GET", "/api/v1/instances/", **query).body["instances"]]

    def destroy(self, instance_id: int) -> Reply:
        return self("DELETE", f"/api/v0/instances/{instance_id}/")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def call(clock: FakeClock) -> MarketCaller:
    """A market in memory, no boxes, no rate limits, a boot of ten seconds."""
    return MarketCaller(Api(Market(clock, faults=FaultBook(), boot_s=10.0), pace=0), clock)


@dataclass(frozen=True)
class RealBox:
    id: int
    row: dict[str, Any]
    ssh: Callable[..., subprocess.CompletedProcess[str]]


@dataclass(frozen=True)
class Real:
    """A real rehearsal with the means to rent a box and log in."""

    rehearsal: Rehearsal
    http: httpx.Client
    key: Path

    def rent(self, *faults: str, attach: bool = True, **body: Any) -> RealBox:
        for spec in faults:
            self.rehearsal.control.arm(spec)
        offers = self.http.post("/api/v0/bundles/", json={"compute_cap": {"eq": 0}, "rentable": {"eq": True}}).json()
        ask = min(offers["offers"], key=lambda row: row["dph_total"])["id"]
        instance_id = self.http.put(f"/api/v0/asks/{ask}/", json={"disk": 20, **body}).json()["new_contract"]
        if attach:
            self.attach(instance_id)
        row = self.until(instance_id, lambda row: row["actual_status"] == "running")
        return RealBox(instance_id, row, lambda *args, **kw: self.ssh(row, *args, **kw))

    def attach(self, instance_id: int) -> None:
        public = self.key.with_suffix(".pub").read_text()
        self.http.post(f"/api/v0/instances/{instance_id}/ssh/", json={"ssh_key": public}).raise_for_status()

    def show(self, instance_id: int) -> dict[str, Any] | None:
        row: dict[str, Any] | None = self.http.get(f"/api/v0/instances/{instance_id}/").json()["instances"]
        return row

    def until(self, instance_id: int, holds: Callable[[dict[str, Any]], bool], timeout_s: float = 60) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            row = self.show(instance_id)
            if row is not None and holds(row):
                return row
            time.sleep(0.05)
        raise TimeoutError(f"instance {instance_id} stayed {row}")

    def ssh(
        self, row: dict[str, Any], command: str, *, via: str = "direct", tries: int = 20, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """OpenSSH's own client. While the box's sshd is starting it tries again, whatever `tries` says."""
        port = row["ports"]["22/tcp"][0]["HostPort"] if via == "direct" else row["ssh_port"]
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "BatchMode=yes"]
        options += ["IdentitiesOnly=yes", "ConnectTimeout=2"]
        # The default key exchange, safe against the computers of another decade, costs five times as much as the rest of a login.
        options += ["KexAlgorithms=curve25519-sha256"]
        words = ["ssh", "-F", "none", "-i", str(self.key), "-p", str(port)]
        words += [word for option in options for word in ("-o", option)]
        words += [f"{self.rehearsal.env['LIVERY_SSH_USER']}@127.0.0.1", command]
        for attempt in range(SSHD_START_TRIES):
            done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
            starting = "kex_exchange_identification" in done.stderr
            if done.returncode != 255 or (attempt + 1 >= tries and not starting):
                break
            time.sleep(0.05)
        return done


def eventually(holds: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return False


def connect(rehearsal: Rehearsal, key: Path) -> Real:
    http = httpx.Client(
        base_url=rehearsal.env["LIVERY_MARKET_URL"],
        headers={"Authorization": f"Bearer {rehearsal.env['LIVERY_MARKET_API_KEY']}"},
        trust_env=False,
        timeout=10,
    )
    return Real(rehearsal, http, key)


@pytest.fixture(scope="session")
def ssh_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    key = tmp_path_factory.mktemp("key") / "id"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    return key


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    with start(tmp_path_factory.mktemp("rehearsal"), boot_s=0.1, pace=0) as running:
        yield running


@pytest.fixture
def real(rehearsal: Rehearsal, ssh_key: Path) -> Iterator[Real]:
    """The module's rehearsal; whatever the test rented or armed is gone again after it."""
    real = connect(rehearsal, ssh_key)
    yield real
    for row in rehearsal.control.state()["instances"]:
        if not row["gone"]:
            real.http.delete(f"/api/v0/instances/{row['id']}/")
    for fault in rehearsal.control.state()["faults"]:
        rehearsal.control.disarm(fault["name"])
    real.http.close()
