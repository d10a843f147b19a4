"""The pretend market behind a real HTTP server on loopback, on a clock that tests move, and a real bucket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from deployments.rehearsal.api import Api, Request, query_of
from deployments.rehearsal.market import Market
from tasks.domain import Label, Offer
from tasks.market.limiter import Limiter
from tasks.market.vast import VastMarket
from tasks.rent import RentRequest
from tasks.settings import Settings
from training.box.store import Store
from training.contract.recipe import Recipe, parse_recipe

FLOW_RUN = "0d8ee658-1988-4822-a204-826ec4ac0aee"
OTHER_RUN = "215db4e6-65e4-4153-992f-e29f6be2b915"
NOW = 1_799_000_000.0
PUBLIC_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHVudGVzdGVkdW50ZXN0ZWR1bnRlc3RlZHVu"


class Clock:
    """Time passes only when somebody sleeps."""

    def __init__(self, now: float = NOW) -> None:
        self.now = now
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


class Pretend:
    """One pretend market at one address. `calls` are the requests as they came, method and path."""

    def __init__(self, clock: Clock, pace: float = 0.0) -> None:
        self.clock = clock
        self.market = Market(clock, boot_s=10.0)
        self.api = Api(self.market, pace=pace)
        self.calls: list[tuple[str, str]] = []
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    def arm(self, *specs: str) -> None:
        for spec in specs:
            self.market.arm(spec)

    def count(self, method: str, path: str) -> int:
        return sum(1 for call in self.calls if call[0] == method and call[1].startswith(path))

    def client(self, state_dir: Path, *, key: str | None = None, pace: float = 1.0, **options: Any) -> VastMarket:
        key = key or self.market.account_key
        limiter = Limiter(state_dir, key, pace, clock=self.clock, sleep=self.clock.sleep)
        given = {"clock": self.clock, "sleep": self.clock.sleep, "jitter": lambda: 0.0, **options}
        return VastMarket(self.url, key, limiter, **given)

    def settings(self, state_dir: Path, bucket: str = "unused", **changes: Any) -> Settings:
        values: dict[str, Any] = {
            "market_url": self.url,
            "market_api_key": self.market.account_key,
            "reaper_api_key": self.market.reaper_key,
            "bucket": bucket,
            "s3_region": "us-east-1",
            "s3_access_key_id": "unused",
            "s3_secret_access_key": "unused",
            "box_s3_access_key_id": "unused",
            "box_s3_secret_access_key": "unused",
            "state_dir": state_dir,
        }
        return Settings(_env_file=None, **{**values, **changes})  # type: ignore[call-arg]

    def rented(self, flow_run_id: str = FLOW_RUN, *, attempt: int = 1, hours: float = 8, offer: int = 0) -> int:
        """A box of this flow run that is there already, made behind the client's back."""
        from deployments.rehearsal.market import Rental

        label = Label(flow_run_id=flow_run_id, attempt=attempt, hard_end=int(self.clock.now + hours * 3600))
        asks = [ask for ask in self.market.offers.values() if not self.market.is_rented(ask)]
        return self.market.rent(asks[offer], Rental(disk_gb=100, label=label.text)).id


@contextmanager
def pretend_market(clock: Clock, pace: float = 0.0) -> Iterator[Pretend]:
    pretend, lock = Pretend(clock, pace), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # head and body in one segment: in two, each reply waits 40 ms for a delayed ACK

        def _handle(self) -> None:
            path, _, query = self.path.partition("?")
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            bearer = (self.headers.get("authorization") or "").removeprefix("Bearer ") or None
            with lock:
                pretend.calls.append((self.command, path))
                pretend.bodies.append(json.loads(body) if body else {})
                reply = pretend.api.handle(Request(self.command, path, query_of(query.encode()), body, bearer))
            if reply.drop:
                self.close_connection = True
                return
            text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
            self.send_response(reply.status)
            for name, value in {**reply.headers, "Content-Length": str(len(text.encode()))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_PUT = do_DELETE = _handle

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    pretend.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield pretend
    finally:
        server.shutdown()
        server.server_close()


def recipe(**changes: Any) -> Recipe:
    """A 35B recipe on the rtxpro6000 tier; keyword arguments replace top-level fields, or single fields of box and budget."""
    data: dict[str, Any] = {
        "name": "tools-35b",
        "model": {"source": "bucket:models/qwen", "family": "qwen3_5_moe", "size_gb": 70.2},
        "phases": [{"kind": "sft", "data": "bucket:data/sft.jsonl", "steps": 100, "learning_rate": 1e-4}],
        "box": {"tier": "rtxpro6000", "disk_gb": 250, "max_dph_usd": 1.30},
        "budget": {"max_usd": 30, "max_hours": 12},
    }
    for name, value in changes.items():
        data[name] = {**data[name], **value} if name in {"box", "budget", "model"} else value
    return parse_recipe(data)


def rehearsal_recipe(**changes: Any) -> Recipe:
    box = {
        "tier": "rehearsal",
        "device": "none",
        "disk_gb": 20,
        "max_dph_usd": 1.0,
        "min_host_memory_gb": 1,
        "boot_s": 60,
    }
    model = {"source": "bucket:models/tiny", "family": "qwen3_5_moe", "size_gb": 0.01, "dtype": "float32"}
    return recipe(**{"trainer": "counting", "model": model, "box": {**box, **changes.pop("box", {})}, **changes})


def rent_request(market: VastMarket, wanted: Recipe, *, attempt: int = 1, offer: Offer | None = None) -> RentRequest:
    offers = market.search(wanted.box)
    return RentRequest(
        recipe=wanted,
        run=wanted.name,
        flow_run_id=FLOW_RUN,
        attempt=attempt,
        offer=offer or min(offers, key=lambda one: one.dph_total_usd),
        public_key=PUBLIC_KEY,
        onstart="touch ~/.no_auto_tmux",
        hard_end=int(NOW + 13 * 3600),
        hours=1.0,
    )


def dead_store() -> Store:
    """A bucket that nobody serves."""
    return Store(
        "nowhere",
        endpoint_url="http://127.0.0.1:9",
        region="us-east-1",
        access_key_id="unused",
        secret_access_key="unused",
        stall_s=1,
    )
