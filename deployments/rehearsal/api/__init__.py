"""The market's HTTP forms over a `Market`: routes, keys, rate limits, reply bodies, and the faults that garble replies.

Pure: a `Request` in, a `Reply` out, on the market's clock. Shapes and texts are those gathered in 2026-11 from the
official client's source, its OpenAPI file and public reports.
"""

from __future__ import annotations

import secrets
from collections import Counter

from deployments.rehearsal.api.account import Account
from deployments.rehearsal.api.instances import Instances
from deployments.rehearsal.api.listing import Listings
from deployments.rehearsal.api.offers import Offers
from deployments.rehearsal.api.transport import (
    BAD_GATEWAY,
    Caller,
    InvalidJson,
    Limiter,
    Reply,
    Request,
    Route,
    error,
    invalid_args,
    query_of,
    too_frequent,
    unknown_key,
)
from deployments.rehearsal.market import Market
from deployments.rehearsal.search import InvalidArgs

__all__ = ["Api", "Reply", "Request", "query_of"]


class Api:
    """`handle` answers one request as the market would."""

    def __init__(self, market: Market, *, pace: float = 1.0, base_url: str = "http://127.0.0.1") -> None:
        self.market = market
        self.limiter = Limiter(pace)
        self.base_url = base_url
        self.counts: Counter[str] = Counter()
        self.instances = Instances(market, base_url)
        self.routes: list[Route] = [
            *Offers(market).routes,
            *Listings(market).routes,
            *self.instances.routes,
            *Account(market).routes,
        ]
        self._revocation_noted = False

    def handle(self, request: Request) -> Reply:
        self.market.settle()
        caller = self._authenticate(request)
        if isinstance(caller, Reply):
            return caller
        for route in self.routes:
            if (ids := route.match(request.method, request.path)) is not None:
                self.counts[f"{route.method} {route.template.rstrip('?')}"] += 1
                return (
                    self._forbidden(route, caller, ids)
                    or self.limiter.refusal(route, caller.key, self.market.clock())
                    or self._session_expired()
                    or self._unreadable(route)
                    or self._answer(route, request, ids)
                )
        return Reply(404, "Not Found")

    # Who may ask

    def _authenticate(self, request: Request) -> Caller | Reply:
        if request.bearer is None:
            return Reply(403, error("auth_error", "This action requires login."))
        for kind, key in (("account", self.market.account_key), ("reaper", self.market.reaper_key)):
            if secrets.compare_digest(request.bearer.encode(), key.encode()):
                if kind == "account" and self._revoked():
                    return unknown_key()
                return Caller(kind, key)  # type: ignore[arg-type]
        for contract in self.market.alive():
            if secrets.compare_digest(request.bearer.encode(), contract.api_key.encode()):
                return Caller("instance", contract.api_key, contract.id)
        return unknown_key()

    def _revoked(self) -> bool:
        after_s, since = self.market.faults.peek("auth.revoked_midway"), self.market.first_accepted_at
        if after_s is None or since is None or self.market.clock() < since + float(after_s):
            return False
        if not self._revocation_noted:
            self._revocation_noted = True
            self.market.faults.note("auth.revoked_midway")
        return True

    def _forbidden(self, route: Route, caller: Caller, ids: dict[str, int]) -> Reply | None:
        if caller.kind == "account" and not route.reads and self.market.faults.peek("auth.read_only") is not None:
            self.market.faults.note("auth.read_only")
            return Reply(403, error("auth_error", "This key lacks the permission instance_write."))
        if caller.kind != "instance" or (route.for_instance_key and ids.get("id") == caller.instance_id):
            return None
        return Reply(403, error("auth_error", "This key may only start, stop or destroy its own instance."))

    # Answers that have nothing to do with the question

    def _session_expired(self) -> Reply | None:
        if self.market.faults.take("auth.session_expired_404") is None:
            return None
        return Reply(404, error("auth_error", "Session expired. Please log in again."))

    def _unreadable(self, route: Route) -> Reply | None:
        if not route.reads:
            return None
        if self.market.faults.take("read.429") is not None:
            return too_frequent(route.every_s or None)
        if self.market.faults.take("read.502") is not None:
            return Reply(502, BAD_GATEWAY)
        return None

    def _answer(self, route: Route, request: Request, ids: dict[str, int]) -> Reply:
        try:
            return route.handler(request, **ids)
        except InvalidJson as problem:
            return Reply(400, {"error": "invalid_request", "msg": str(problem)})
        except InvalidArgs as problem:
            return invalid_args(str(problem))
