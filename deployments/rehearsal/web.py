"""The market's API and the rehearsal's own levers over HTTP: a thin starlette application, run by uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from deployments.rehearsal.api import Api, Reply, Request, query_of
from deployments.rehearsal.faults import FAULTS
from deployments.rehearsal.market import Contract, Market
from deployments.rehearsal.world import World

METHODS = ["GET", "POST", "PUT", "DELETE", "PATCH"]


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


def server(api: Api, world: World, advance_clock: Callable[[float], None]) -> uvicorn.Server:
    config = uvicorn.Config(
        application(api, world, advance_clock),
        http=DroppableH11,
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=60,
    )
    return QuietServer(config)


def application(api: Api, world: World, advance_clock: Callable[[float], None]) -> Starlette:
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
        advance_clock(float((await http.json())["advance_s"]))
        return JSONResponse({"now": market.settle()})

    async def lose(http: HttpRequest) -> Response:
        contract = market.contracts.get(http.path_params["id"])
        if contract is None or contract.gone:
            return JSONResponse({"error": f"no instance {http.path_params['id']}"}, 404)
        market.lose(contract)
        return JSONResponse({"lost": contract.id})

    async def logs(http: HttpRequest) -> Response:
        instance_id = api.instances.log_tokens.get(http.path_params["token"])
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
