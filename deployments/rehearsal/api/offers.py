"""Searching offers and accepting one."""

from __future__ import annotations

import itertools
import shlex
import time
from typing import Any

from deployments.rehearsal import search
from deployments.rehearsal.api.transport import (
    GATEWAY_TIMEOUT,
    Reply,
    Request,
    Route,
    ask_unavailable,
    error,
    no_such_ask,
    number,
    parse_body,
    too_frequent,
)
from deployments.rehearsal.catalogue import Offer
from deployments.rehearsal.market import Contract, Market, Rental

DISK_MIN_GB = 8
LABEL_MAX = 256
IMAGE_MAX = 1024
ONSTART_MAX = 4096
ENV_VARIABLE_MAX = 256
ENV_TOTAL_MAX = 32_768
PORTS_MAX = 64
PRICE_RANGE_USD = (0.001, 128.0)
CREATE_EVERY_S = 4.5
DAY_S = 86_400


class Offers:
    def __init__(self, market: Market) -> None:
        self.market = market
        self.routes = [
            Route("POST", "/api/v0/bundles/", self.search, per_minute=10, searches=True),
            Route("PUT", "/api/v0/search/asks/", self.search_asks, per_minute=10, searches=True),
            Route("PUT", "/api/v0/asks/{id}/", self.create, every_s=CREATE_EVERY_S, penalty_s=12.0),
        ]

    def search(self, request: Request) -> Reply:
        return self._found(parse_body(request))

    def search_asks(self, request: Request) -> Reply:
        query = parse_body(request).get("q")
        if not isinstance(query, dict):
            raise search.InvalidArgs("q: wanted an object of filters")
        return self._found(query)

    def create(self, request: Request, id: int) -> Reply:
        market, body = self.market, parse_body(request)
        offer = market.offers.get(id)
        machine_id = offer.machine_id if offer else None
        if market.faults.take("create.504_before_commit", machine_id) is not None:
            return Reply(504, GATEWAY_TIMEOUT)
        if market.faults.take("create.429", machine_id) is not None:
            return too_frequent(CREATE_EVERY_S)
        if offer is None or market.faults.take("create.offer_gone_404", machine_id) is not None:
            return no_such_ask(id)
        if market.faults.take("create.offer_gone_410", machine_id) is not None:
            return ask_unavailable(id)
        if market.faults.take("create.spend_limit", machine_id) is not None:
            return Reply(body=error("spend_rate_limit", "Your account has reached its spend rate limit."))
        if market.faults.peek("credit.zero") is not None:
            market.faults.note("credit.zero")
            return Reply(body=error("insufficient_credit", "Your account lacks credit; see the billing page."))
        rental = _rental(body, offer)
        if market.is_rented(offer):
            return ask_unavailable(id) if body.get("cancel_unavail") else no_such_ask(id)
        return self._accept(offer, rental, body)

    def _found(self, query: dict[str, Any]) -> Reply:
        now, faults = self.market.clock(), self.market.faults
        if faults.take("search.quota") is not None:
            return _quota_exceeded(now)
        allocated_gb = number(query.get("allocated_storage", search.DEFAULT_ALLOCATED_GB), "allocated_storage")
        limit = int(number(query.get("limit") or search.DEFAULT_LIMIT, "limit"))
        bid = query.get("type") in ("bid", "interruptible")
        filters = {name: ops for name, ops in query.items() if name not in search.NOT_FILTERS}
        rows = [
            offer.row(now=now, allocated_gb=allocated_gb, rented=self.market.is_rented(offer), bid=bid)
            for offer in self.market.offers.values()
            if offer.disk_gb >= allocated_gb
        ]
        found = search.ordered([row for row in rows if search.matches(row, filters)], query.get("order"))
        if found and faults.take("search.object_not_list") is not None:
            return Reply(body={"offers": found[0]})
        return Reply(body={"offers": found[:limit]})

    def _accept(self, offer: Offer, rental: Rental, body: dict[str, Any]) -> Reply:
        market = self.market
        losing_bid = rental.bid_usd is not None and rental.bid_usd < offer.min_bid_usd
        if losing_bid and body.get("cancel_unavail"):
            return Reply(400, error("invalid_price", f"Bid is below the minimum of {offer.min_bid_usd}."))
        contract = market.rent(offer, rental)
        if market.faults.take("create.double_accept", offer.machine_id) is not None:
            market.rent(offer, rental)
        if losing_bid:
            market.stop(contract)
            return Reply(410, {**error("no_such_ask", "Bid is too low."), "new_contract": contract.id})
        lag = market.faults.take("show.404_lag", offer.machine_id)
        contract.show_lag_polls = 0 if lag is None else int(lag)
        return self._said(contract)

    def _said(self, contract: Contract) -> Reply:
        """The reply to a create call that made this box, which is not always the truth."""
        faults, machine_id = self.market.faults, contract.offer.machine_id
        if faults.take("create.drop_after_commit", machine_id) is not None:
            return Reply(drop=True)
        if faults.take("create.504_after_commit", machine_id) is not None:
            return Reply(504, GATEWAY_TIMEOUT)
        if faults.take("create.success_false_with_contract", machine_id) is not None:
            return Reply(body={**error("internal_error", "Instance may not start."), "new_contract": contract.id})
        if faults.take("create.200_without_id", machine_id) is not None:
            return Reply(body={"success": True})
        return Reply(body={"success": True, "new_contract": contract.id, "instance_api_key": contract.api_key})


def _rental(body: dict[str, Any], offer: Offer) -> Rental:
    disk_gb = number(body.get("disk", 10), "disk")
    if not DISK_MIN_GB <= disk_gb <= offer.disk_gb:
        raise search.InvalidArgs(f"disk: got {disk_gb} GB, wanted {DISK_MIN_GB} to {offer.disk_gb}")
    label, image, onstart = body.get("label"), str(body.get("image") or ""), body.get("onstart") or ""
    if label is not None and len(str(label)) > LABEL_MAX:
        raise search.InvalidArgs(f"label_too_long: {len(label)} > {LABEL_MAX}")
    if len(image) > IMAGE_MAX:
        raise search.InvalidArgs(f"image: {len(image)} characters > {IMAGE_MAX}")
    args = " ".join(body.get("args") or []) + (body.get("args_str") or "")
    if len(onstart) + len(args) > ONSTART_MAX:
        raise search.InvalidArgs(f"onstart and args: {len(onstart) + len(args)} characters > {ONSTART_MAX}")
    price = body.get("price")
    bid_usd = None if price is None else number(price, "price")
    if bid_usd is not None and not PRICE_RANGE_USD[0] <= bid_usd <= PRICE_RANGE_USD[1]:
        raise search.InvalidArgs(f"price: got {bid_usd}, wanted {PRICE_RANGE_USD[0]} to {PRICE_RANGE_USD[1]}")
    return Rental(disk_gb, label, image, onstart, _container_env(body.get("env")), bid_usd)


def _container_env(env: Any) -> dict[str, str]:
    """The create call's env (an object, or docker flags) without its port mappings."""
    if not env:
        return {}
    if isinstance(env, str):
        words = shlex.split(env)
        flags = [(a, b) for a, b in itertools.pairwise(words) if a in ("-e", "-p")]
        env = dict(pair.split("=", 1) for flag, pair in flags if flag == "-e" and "=" in pair)
        env |= {f"-p {pair}": "1" for flag, pair in flags if flag == "-p"}
    if not isinstance(env, dict):
        raise search.InvalidArgs("env: wanted an object or docker flags")
    if sum(str(name).startswith("-p ") for name in env) > PORTS_MAX:
        raise search.InvalidArgs(f"env: more than {PORTS_MAX} ports")
    result = {str(k): str(v) for k, v in env.items() if not str(k).startswith("-")}
    if any(len(k) + len(v) > ENV_VARIABLE_MAX for k, v in result.items()):
        raise search.InvalidArgs(f"env: a variable is longer than {ENV_VARIABLE_MAX} characters")
    if sum(len(k) + len(v) for k, v in result.items()) > ENV_TOTAL_MAX:
        raise search.InvalidArgs(f"env: more than {ENV_TOTAL_MAX} characters")
    return result


def _quota_exceeded(now: float) -> Reply:
    midnight = time.gmtime((now // DAY_S + 1) * DAY_S)
    body = error("search_quota_exceeded", "Daily search quota exceeded.")
    return Reply(429, body, {"X-RateLimit-Reset": time.strftime("%Y-%m-%dT%H:%M:%SZ", midnight)})
