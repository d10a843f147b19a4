"""Runs a whole rehearsal in this process: the market over HTTP, the boxes' world and the bucket, until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from deployments.rehearsal.api import Api, Reply, Request, query_of
from deployments.rehearsal.box import sshd_program
from deployments.rehearsal.bucket import BUCKET, REGION, Bucket, remove_sockets
from deployments.rehearsal.faults import FAULTS, FaultBook
from deployments.rehearsal.market import Contract, Market
from deployments.rehearsal.processes import hold, kill_under
from deployments.rehearsal.world import World

PARENT_CHECK_S = 0.3
METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH"]


@dataclass(frozen=True)
class Options:
    root: Path
    port: int = 0
    faults: Sequence[str] = ()
    boot_s: float = 1.0
    pace: float = 0.1
    clock_ahead_s: float = 0.0
    env_file: Path | None = None
    outlive_parent: bool = False
    keep_bucket: bool = False


class RehearsalClock:
    """The real time, plus what was added to it."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s

    def __call__(self) -> float:
        return time.time() + self.ahead_s


class DroppableH11(H11Protocol):
    """Remembers its connections by peer, so that a reply can be a dropped connection."""

    open_by_peer: dict[tuple[str, int], asyncio.Transport] = {}

    def connection_made(self, transport: Any) -> None:
        self.peer = transport.get_extra_info("peername")
        self.open_by_peer[self.peer] = transport
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_by_peer.pop(self.peer, None)
        super().connection_lost(exc)


class QuietServer(uvicorn.Server):
    """Leaves signals to us: uvicorn would raise them again before the boxes are gone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(options: Options, announce: Callable[[dict[str, str]], None]) -> None:
    """Starts everything, announces the environment, runs until SIGTERM, SIGINT or the parent's end, removes everything.

    RuntimeError: the root is in use, there is no weed binary, or the bucket did not start. ValueError: a bad fault.
    """
    parent = os.getppid()
    options = _absolute(options)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    faults = FaultBook()
    for spec in options.faults:
        faults.arm(spec)
    with hold(options.root):
        remove_leftovers(options.root, keep_bucket=options.keep_bucket)
        bucket = Bucket(options.root / "bucket")
        try:
            bucket.start()
            await _run(options, bucket, faults, stop, parent, announce)
        finally:
            await asyncio.to_thread(bucket.stop, keep=options.keep_bucket)
            remove_leftovers(options.root, keep_bucket=options.keep_bucket)
            for path in (options.root / "env", options.env_file):
                if path is not None:
                    path.unlink(missing_ok=True)


def remove_leftovers(root: Path, *, keep_bucket: bool) -> None:
    """Ends what a killed rehearsal on this root left running, and deletes its boxes. The caller holds the root."""
    kill_under(root)
    remove_sockets(root / "bucket")
    for name in ("boxes", "trash", *(() if keep_bucket else ("bucket",))):
        shutil.rmtree(root / name, ignore_errors=True)


async def _run(
    options: Options,
    bucket: Bucket,
    faults: FaultBook,
    stop: asyncio.Event,
    parent: int,
    announce: Callable[[dict[str, str]], None],
) -> None:
    world, clock = World(options.root, bucket), RehearsalClock(options.clock_ahead_s)
    market = Market(clock, faults=faults, host=world, boot_s=options.boot_s)
    listener = socket.create_server(("127.0.0.1", options.port))
    api = Api(market, pace=options.pace, base_url=f"http://127.0.0.1:{listener.getsockname()[1]}")
    world.base_url = api.base_url
    config = uvicorn.Config(
        application(api, world, clock),
        http=DroppableH11,
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=60,
    )
    server = QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    heart = asyncio.create_task(world.run(market))
    try:
        await asyncio.to_thread(bucket.wait_ready)
        env = environment(api, bucket, options.pace)
        _write_env(options.root / "env", env)
        if options.env_file is not None:
            _write_env(options.env_file, env)
        announce(env)
        await _until_stopped(stop, parent, options.outlive_parent, serving, heart)
    finally:
        heart.cancel()
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        await world.close(market)
        listener.close()


async def _until_stopped(
    stop: asyncio.Event, parent: int, outlive: bool, serving: asyncio.Task[None], heart: asyncio.Task[None]
) -> None:
    while not stop.is_set() and (outlive or os.getppid() == parent):
        for task in (serving, heart):
            if task.done():
                task.result()
                raise RuntimeError("the rehearsal's own server ended")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(stop.wait(), PARENT_CHECK_S)


def environment(api: Api, bucket: Bucket, pace: float) -> dict[str, str]:
    """What the product must be told so that it runs against this rehearsal."""
    return {
        "LIVERY_MARKET": "vast",
        "LIVERY_MARKET_URL": api.base_url,
        "LIVERY_MARKET_API_KEY": api.market.account_key,
        "LIVERY_REAPER_API_KEY": api.market.reaper_key,
        "LIVERY_MARKET_PACE": str(pace),
        "LIVERY_S3_ENDPOINT_URL": bucket.endpoint_url,
        "LIVERY_S3_REGION": REGION,
        "LIVERY_BUCKET": BUCKET,
        "LIVERY_S3_ACCESS_KEY_ID": bucket.control.access_key_id,
        "LIVERY_S3_SECRET_ACCESS_KEY": bucket.control.secret_access_key,
        "LIVERY_BOX_S3_ACCESS_KEY_ID": bucket.box.access_key_id,
        "LIVERY_BOX_S3_SECRET_ACCESS_KEY": bucket.box.secret_access_key,
        "LIVERY_SSH_USER": getpass.getuser(),
    }


def application(api: Api, world: World, clock: RehearsalClock) -> Starlette:
    market = api.market

    async def answer(http: HttpRequest) -> Response:
        scheme, _, key = http.headers.get("authorization", "").partition(" ")
        request = Request(
            http.method,
            http.url.path,
            query_of(http.scope["query_string"]),
            await http.body(),
            key.strip() if scheme.lower() == "bearer" else None,
        )
        return await _sent(http, api.handle(request))

    async def state(http: HttpRequest) -> Response:
        return JSONResponse(state_of(api, world))

    async def arm(http: HttpRequest) -> Response:
        armed = market.arm(str((await http.json())["spec"]))
        return JSONResponse({"name": armed.name, "value": armed.value, "scope": armed.scope})

    async def disarm(http: HttpRequest) -> Response:
        name = http.path_params["name"]
        found = name in FAULTS and market.disarm(name)
        return JSONResponse({"name": name, "removed": found}, 200 if found else 404)

    async def advance(http: HttpRequest) -> Response:
        clock.ahead_s += float((await http.json())["advance_s"])
        market.settle()
        return JSONResponse({"now": clock()})

    async def lose(http: HttpRequest) -> Response:
        contract = market.contracts.get(http.path_params["id"])
        if contract is None or contract.gone:
            return JSONResponse({"error": f"no instance {http.path_params['id']}"}, 404)
        market.lose(contract)
        return JSONResponse({"lost": contract.id})

    async def logs(http: HttpRequest) -> Response:
        instance_id = api.log_tokens.get(http.path_params["token"])
        guest = world.guests.get(instance_id) if instance_id is not None else None
        return PlainTextResponse(guest.box.log() if guest else "no such log", 200 if guest else 404)

    async def refused(http: HttpRequest, problem: Exception) -> Response:
        return JSONResponse({"error": str(problem)}, 400)

    return Starlette(
        routes=[
            Route("/_rehearsal/state", state),
            Route("/_rehearsal/faults", arm, methods=["POST"]),
            Route("/_rehearsal/faults/{name}", disarm, methods=["DELETE"]),
            Route("/_rehearsal/clock", advance, methods=["POST"]),
            Route("/_rehearsal/instances/{id:int}/lose", lose, methods=["POST"]),
            Route("/_rehearsal/logs/{token}", logs),
            Route("/{path:path}", answer, methods=METHODS),
        ],
        exception_handlers={ValueError: refused, KeyError: refused},
    )


def state_of(api: Api, world: World) -> dict[str, Any]:
    """The whole truth about the market, which no client of it is ever told at once."""
    market = api.market
    now = market.settle()
    contracts = market.contracts.values()
    traffic = [market.host.traffic(c) for c in contracts]
    return {
        "now": now,
        "instances": [_instance_state(market, world, c) for c in contracts],
        "instances_left": len(market.alive()),
        "billed_now_usd_per_h": sum(c.billed_now_usd_h for c in contracts),
        "total_usd": market.total_usd(),
        "bytes": {"down": sum(t.down_bytes for t in traffic), "up": sum(t.up_bytes for t in traffic)},
        "faults": market.faults.rows(),
        "requests": dict(api.counts),
    }


def _instance_state(market: Market, world: World, contract: Contract) -> dict[str, Any]:
    guest, traffic, endpoints = world.guests.get(contract.id), market.host.traffic(contract), None
    if not contract.gone:
        endpoints = market.host.endpoints(contract)
    items = market.items_usd(contract)
    return {
        "id": contract.id,
        "machine_id": contract.offer.machine_id,
        "ask_id": contract.offer.id,
        "label": contract.label,
        "status": contract.status,
        "gone": contract.gone,
        "lost": contract.lost,
        "created_at": contract.created_at,
        "running_at": contract.running_at,
        "ended_at": contract.ended_at,
        "gpu_s": contract.bill.gpu_s,
        "billed_now_usd_per_h": contract.billed_now_usd_h,
        "usd": {**items, "total": sum(items.values())},
        "bytes": {"down": traffic.down_bytes, "up": traffic.up_bytes},
        "ssh": {"direct_port": endpoints.direct_port, "proxy_port": endpoints.proxy_port} if endpoints else None,
        "home": str(guest.box.home) if guest else None,
        "effects": dict(contract.effects),
    }


async def _sent(http: HttpRequest, reply: Reply) -> Response:
    if reply.hold_s:
        await asyncio.sleep(reply.hold_s)
    if reply.drop:
        assert http.client is not None
        transport = DroppableH11.open_by_peer.get((http.client.host, http.client.port))
        if transport is not None:
            transport.abort()
        return Response(status_code=500)
    if isinstance(reply.body, str):
        return PlainTextResponse(reply.body, reply.status, dict(reply.headers))
    return Response(json.dumps(reply.body), reply.status, dict(reply.headers), "application/json")


def _absolute(options: Options) -> Options:
    env_file = None if options.env_file is None else options.env_file.absolute()
    return replace(options, root=options.root.absolute(), env_file=env_file)


def _write_env(path: Path, env: dict[str, str]) -> None:
    """Whole or not at all, and never readable by others: it holds keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    draft.touch(mode=0o600)
    draft.chmod(0o600)
    draft.write_text("".join(f"{name}={value}\n" for name, value in env.items()))
    draft.replace(path)


def ssh_server_notice() -> str:
    program = sshd_program()
    return f"boxes run {program}" if program else "no sshd on this machine: boxes run the asyncssh server instead"
