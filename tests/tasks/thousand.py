"""How long a sweep takes over a thousand boxes, and in how much memory: `python -m tests.tasks.thousand`.

The market's own time and its rate limits are left out (its replies are timed and subtracted, the pace is 0); the bucket is a real server on
loopback. Every box has its run with intent and live lease; two are past their hard end. Measure on an idle machine.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import boto3
import httpx

from deployments.rehearsal.api import Request, query_of
from deployments.rehearsal.bucket import REGION, Bucket
from deployments.rehearsal.market import Rental
from tasks.domain import Intent, Label, Lease
from tasks.lease import write_lease
from tasks.reap import sweep
from tests.tasks.pretend import Clock, Pretend
from training.box.store import Store
from training.contract import layout

BOXES, LIMIT_S, LIMIT_MB = 1000, 1.0, 300.0


class Timed(httpx.BaseTransport):
    """The market in this process, and the seconds that it took."""

    def __init__(self, pretend: Pretend) -> None:
        self._pretend, self.seconds, self.busy_s, self.calls = pretend, 0.0, 0.0, 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        began, busy = time.perf_counter(), time.process_time()
        bearer = request.headers["authorization"].removeprefix("Bearer ")
        asked = Request(request.method, request.url.path, query_of(request.url.query), request.read(), bearer)
        reply = self._pretend.api.handle(asked)
        text = json.dumps(reply.body)
        self.seconds += time.perf_counter() - began
        self.busy_s += time.process_time() - busy
        self.calls += 1
        return httpx.Response(reply.status, headers=dict(reply.headers), text=text)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        server = Bucket(Path(folder) / "weed")
        server.start()
        try:
            server.wait_ready()
            return _measured(Path(folder), _store(server))
        finally:
            server.stop(keep=False)


def _store(server: Bucket) -> Store:
    key, secret = server.control.access_key_id, server.control.secret_access_key
    boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        region_name=REGION,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
    ).create_bucket(Bucket="thousand")
    return Store(
        "thousand", endpoint_url=server.endpoint_url, region=REGION, access_key_id=key, secret_access_key=secret
    )


def _measured(folder: Path, store: Store) -> int:
    clock = Clock()
    pretend = Pretend(clock)
    pretend.url = "http://127.0.0.1"
    _fill(pretend, store, clock)
    transport = Timed(pretend)
    market = pretend.client(folder, key=pretend.market.reaper_key, pace=1e-9, transport=transport)
    settings = pretend.settings(folder, max_dph_usd=1e9)
    good = True
    for number in range(4):
        transport.seconds, transport.busy_s, transport.calls = 0.0, 0.0, 0
        began, busy = time.perf_counter(), time.process_time()
        result = sweep(market, store, settings, clock=clock, sleep=clock.sleep, settle=lambda run, by: None)
        seconds = time.perf_counter() - began - transport.seconds
        memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        outcomes = [row.outcome for row in result.rows if row.outcome]
        print(
            f"sweep {number + 1}: {len(result.rows)} boxes, {seconds:.2f} s ({time.process_time() - busy - transport.busy_s:.2f} s of this "
            f"process) beside the market's {transport.seconds:.2f} s in {transport.calls} calls; {memory_mb:.0f} MB; {outcomes or 'all kept'}"
        )
        # A sweep that destroys also waits for proofs and writes bills; what is limited is the judging.
        good = good and (bool(outcomes) or seconds <= LIMIT_S) and memory_mb <= LIMIT_MB
        clock.now += 300
        _renew(store, clock)
    print(f"want, of a sweep that only judges, at most {LIMIT_S:g} s and {LIMIT_MB:g} MB: {'yes' if good else 'NO'}")
    return 0 if good else 1


def _fill(pretend: Pretend, store: Store, clock: Clock) -> None:
    ask = next(iter(pretend.market.offers.values()))
    intents = []
    for number in range(BOXES):
        offer = replace(ask, id=10_000 + number, machine_id=10_000 + number)
        pretend.market.offers[offer.id] = offer
        label = Label(
            flow_run_id=_run(number), attempt=1, hard_end=int(clock.now + (1800 if number < 2 else 8 * 3600))
        ).text
        box = pretend.market.rent(offer, Rental(disk_gb=100, label=label)).id
        intents.append(
            Intent(
                flow_run_id=_run(number),
                run=f"r{number}",
                attempt=1,
                label=label,
                account_id=str(pretend.market.user_id),
                offer_id=offer.id,
                machine_id=offer.machine_id,
                dph_usd=1.0,
                disk_gb=100,
                written_at=clock.now,
                state="created",
                instance_id=box,
            )
        )
    clock.now += 3600
    with ThreadPoolExecutor(8) as writers:
        list(
            writers.map(
                lambda each: store.put_bytes(layout.intent(each.flow_run_id, 1), each.model_dump_json().encode()),
                intents,
            )
        )
    _renew(store, clock)


def _renew(store: Store, clock: Clock) -> None:
    def write(number: int) -> None:
        at = clock.now
        write_lease(
            store,
            Lease(flow_run_id=_run(number), run=f"r{number}", renewed_at=at, expires_at=at + 900, progress_at=at),
        )

    with ThreadPoolExecutor(8) as writers:
        list(writers.map(write, range(BOXES)))


def _run(number: int) -> str:
    return str(uuid.UUID(int=number + 1, version=4))


if __name__ == "__main__":
    sys.exit(main())
