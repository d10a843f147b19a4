"""The market's HTTP forms over a `Market`: routes, keys, rate limits, reply bodies, and the faults that garble replies.

Pure: a `Request` in, a `Reply` out, on the market's clock. Shapes and texts are those gathered in 2026-11 from the
official client's source, its OpenAPI file and public reports.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import re
import secrets
import shlex
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl

from deployments.rehearsal import search
from deployments.rehearsal.catalogue import Offer, driver_number
from deployments.rehearsal.market import Contract, Market, Rental, SshKey

PAGE_ROWS = 25
PAGE_ROWS_IF_NOT_POSITIVE = 5
DISK_MIN_GB = 8
LABEL_MAX = 256
LABEL_MAX_MANAGE = 1024
ONSTART_MAX = 4096
ENV_VARIABLE_MAX = 256
ENV_TOTAL_MAX = 32_768
PRICE_RANGE_USD = (0.001, 128.0)

STORED_COLUMNS = {
    "id",
    "label",
    "actual_status",
    "intended_status",
    "cur_state",
    "gpu_name",
    "verification",
    "machine_id",
    "host_id",
    "start_date",
    "image_uuid",
}
NULLABLE = (
    "label",
    "actual_status",
    "status_msg",
    "ports",
    "public_ipaddr",
    "start_date",
    "end_date",
    "extra_env",
    "uptime_mins",
    "gpu_util",
    "gpu_temp",
    "mem_usage",
    "geolocation",
)
GATEWAY_TIMEOUT = "<html><head><title>504 Gateway Time-out</title></head><body>nginx</body></html>"


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    bearer: str | None = None


@dataclass(frozen=True)
class Reply:
    """`drop` closes the connection without a word, after `hold_s` seconds of silence."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    drop: bool = False
    hold_s: float = 0.0


@dataclass(frozen=True)
class Caller:
    kind: Literal["account", "reaper", "instance"]
    key: str
    instance_id: int | None = None


@dataclass(frozen=True)
class Route:
    """One endpoint. `every_s` is the documented least interval between two calls of it by one key."""

    method: str
    template: str
    handler: Callable[..., Reply]
    every_s: float = 0.0
    per_minute: int = 0
    penalty_s: float = 0.0
    for_instance_key: bool = False

    def match(self, method: str, path: str) -> dict[str, int] | None:
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[0-9]+)", self.template)
        found = re.fullmatch(pattern, path) if method == self.method else None
        return {name: int(text) for name, text in found.groupdict().items()} if found else None


class InvalidJson(ValueError):
    """The body is not a JSON object."""


class Limiter:
    """The market's limiter: a least interval per (method, template, key), scaled by `pace`; 0 turns it off."""

    # A client that waits exactly the interval must not be refused for the jitter of a busy machine.
    SLACK_SHARE = 0.05
    SLACK_S = 0.05

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self._free_at: dict[tuple[str, str, str], float] = {}
        self._recent: dict[tuple[str, str, str], deque[float]] = defaultdict(deque)

    def refusal(self, route: Route, key: str, now: float) -> Reply | None:
        slot = (route.method, route.template, key)
        if route.per_minute and self.pace:
            recent = self._recent[slot]
            while recent and recent[0] <= now - self._scaled(60):
                recent.popleft()
            if len(recent) >= route.per_minute:
                return too_frequent(None)
            recent.append(now)
        if route.every_s and self.pace:
            if now < self._free_at.get(slot, now):
                if route.penalty_s:
                    self._free_at[slot] = now + self._scaled(route.penalty_s)
                return too_frequent(route.every_s)
            self._free_at[slot] = now + self._scaled(route.every_s)
        return None

    def _scaled(self, seconds: float) -> float:
        scaled = seconds * self.pace
        return scaled - max(scaled * self.SLACK_SHARE, self.SLACK_S)


class Api:
    """`handle` answers one request as the market would."""

    def __init__(self, market: Market, *, pace: float = 1.0, base_url: str = "http://127.0.0.1") -> None:
        self.market = market
        self.limiter = Limiter(pace)
        self.base_url = base_url
        self.counts: Counter[str] = Counter()
        self.log_tokens: dict[str, int] = {}
        self._revocation_noted = False
        instance = "/api/v0/instances/{id}/"
        self.routes = [
            Route("POST", "/api/v0/bundles/", self._search, per_minute=10),
            Route("PUT", "/api/v0/search/asks/", self._search_asks, per_minute=10),
            Route("PUT", "/api/v0/asks/{id}/", self._create, every_s=4.5, penalty_s=12.0),
            Route("GET", "/api/v0/instances/", self._list_v0),
            Route("GET", "/api/v1/instances/", self._list, every_s=1.0),
            Route("DELETE", "/api/v0/instances/", self._destroy_many, every_s=3.0),
            Route("GET", instance, self._show, every_s=2.0, for_instance_key=True),
            Route("PUT", instance, self._manage, every_s=1.0, for_instance_key=True),
            Route("DELETE", instance, self._destroy, every_s=3.0, for_instance_key=True),
            Route("PUT", "/api/v0/instances/reboot/{id}/", self._reboot, every_s=1.0),
            Route("PUT", "/api/v0/instances/recycle/{id}/", self._recycle, every_s=1.0),
            Route("PUT", "/api/v0/instances/bid_price/{id}/", self._bid_price, every_s=5.5),
            Route("PUT", "/api/v0/instances/request_logs/{id}/?", self._request_logs),
            Route("GET", "/api/v0/ssh/", self._account_keys),
            Route("POST", "/api/v0/ssh/", self._add_account_key, every_s=1.0),
            Route("DELETE", "/api/v0/ssh/{id}/", self._remove_account_key),
            Route("GET", instance + "ssh/", self._instance_keys),
            Route("POST", instance + "ssh/", self._attach_key),
            Route("DELETE", instance + "ssh/{key_id}/", self._detach_key, every_s=2.0),
            Route("GET", "/api/v0/users/current/?", self._user),
            Route("GET", "/api/v0/charges/", self._charges, every_s=1.0),
        ]

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

    def _session_expired(self) -> Reply | None:
        if self.market.faults.take("auth.session_expired_404") is None:
            return None
        return Reply(404, error("auth_error", "Session expired. Please log in again."))

    def _forbidden(self, route: Route, caller: Caller, ids: dict[str, int]) -> Reply | None:
        if caller.kind != "instance" or (route.for_instance_key and ids.get("id") == caller.instance_id):
            return None
        return Reply(403, error("auth_error", "This key may only start, stop or destroy its own instance."))

    def _answer(self, route: Route, request: Request, ids: dict[str, int]) -> Reply:
        try:
            return route.handler(request, **ids)
        except InvalidJson as problem:
            return Reply(400, {"error": "invalid_request", "msg": str(problem)})
        except search.InvalidArgs as problem:
            return invalid_args(str(problem))

    # Search

    def _search(self, request: Request) -> Reply:
        return self._found(parse_body(request))

    def _search_asks(self, request: Request) -> Reply:
        query = parse_body(request).get("q")
        if not isinstance(query, dict):
            raise search.InvalidArgs("q: wanted an object of filters")
        return self._found(query)

    def _found(self, query: dict[str, Any]) -> Reply:
        now = self.market.clock()
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
        return Reply(body={"offers": found[:limit]})

    # Create

    def _create(self, request: Request, id: int) -> Reply:
        market, body = self.market, parse_body(request)
        offer = market.offers.get(id)
        machine_id = offer.machine_id if offer else None
        if market.faults.take("create.504_before_commit", machine_id) is not None:
            return Reply(504, GATEWAY_TIMEOUT)
        if offer is None or market.faults.take("create.offer_gone_404", machine_id) is not None:
            return no_such_ask(id)
        if market.faults.take("create.offer_gone_410", machine_id) is not None:
            return ask_unavailable(id)
        if market.faults.take("create.spend_limit", machine_id) is not None:
            return Reply(body=error("spend_rate_limit", "Your account has reached its spend rate limit."))
        if market.faults.peek("credit.zero") is not None:
            market.faults.note("credit.zero")
            return Reply(body=error("insufficient_credit", "Your account lacks credit; see the billing page."))
        rental = self._rental(body, offer)
        if market.is_rented(offer):
            return ask_unavailable(id) if body.get("cancel_unavail") else no_such_ask(id)
        return self._accept(offer, rental, body)

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
        if market.faults.take("create.drop_after_commit", offer.machine_id) is not None:
            return Reply(drop=True)
        if market.faults.take("create.504_after_commit", offer.machine_id) is not None:
            return Reply(504, GATEWAY_TIMEOUT)
        if market.faults.take("create.success_false_with_contract", offer.machine_id) is not None:
            return Reply(body={**error("internal_error", "Instance may not start."), "new_contract": contract.id})
        return Reply(body={"success": True, "new_contract": contract.id, "instance_api_key": contract.api_key})

    def _rental(self, body: dict[str, Any], offer: Offer) -> Rental:
        disk_gb = number(body.get("disk", 10), "disk")
        if not DISK_MIN_GB <= disk_gb <= offer.disk_gb:
            raise search.InvalidArgs(f"disk: got {disk_gb} GB, wanted {DISK_MIN_GB} to {offer.disk_gb}")
        label, onstart = body.get("label"), body.get("onstart") or ""
        if label is not None and len(str(label)) > LABEL_MAX:
            raise search.InvalidArgs(f"label_too_long: {len(label)} > {LABEL_MAX}")
        args = " ".join(body.get("args") or []) + (body.get("args_str") or "")
        if len(onstart) + len(args) > ONSTART_MAX:
            raise search.InvalidArgs(f"onstart and args: {len(onstart) + len(args)} characters > {ONSTART_MAX}")
        price = body.get("price")
        bid_usd = None if price is None else number(price, "price")
        if bid_usd is not None and not PRICE_RANGE_USD[0] <= bid_usd <= PRICE_RANGE_USD[1]:
            raise search.InvalidArgs(f"price: got {bid_usd}, wanted {PRICE_RANGE_USD[0]} to {PRICE_RANGE_USD[1]}")
        return Rental(disk_gb, label, str(body.get("image") or ""), onstart, container_env(body.get("env")), bid_usd)

    # Show and list

    def _show(self, request: Request, id: int) -> Reply:
        faults = self.market.faults
        contract = self.market.contracts.get(id)
        if contract is None or contract.gone:
            return Reply(body={"instances": None})
        if contract.show_lag_polls > 0:
            contract.show_lag_polls -= 1
            return no_such_instance(id)
        if faults.take("show.null") is not None:
            return Reply(body={"instances": None})
        if faults.take("show.empty_list") is not None:
            return Reply(body={"instances": []})
        gone = self._gone_when_looked_at(contract)
        return Reply(body={"instances": None if gone else self._row(contract)})

    def _list_v0(self, request: Request) -> Reply:
        return deprecated("GET /api/v0/instances/ is deprecated. Use GET /api/v1/instances/.")

    def _list(self, request: Request) -> Reply:
        faults = self.market.faults
        if faults.take("list.410") is not None:
            return deprecated("This endpoint is deprecated.")
        if self.market.alive() and faults.take("list.empty_but_success") is not None:
            return Reply(body=listing([], 0, {}, None))
        if request.query.get("after_token") and faults.take("list.page2_429") is not None:
            return too_frequent(1.0)
        filters = json_query(request, "select_filters", dict)
        if unknown := set(filters) - STORED_COLUMNS:
            raise search.InvalidArgs(f"select_filters: cannot filter on {sorted(unknown)}")
        rows = [self._row(c) for c in self.market.alive() if not self._gone_when_looked_at(c)]
        rows = [row for row in rows if row_passes(row, filters)]
        return self._page(request, rows)

    def _page(self, request: Request, rows: list[dict[str, Any]]) -> Reply:
        order = json_query(request, "order_by", list)
        column, descending = "id", False
        if order and isinstance(order[0], dict):
            column, descending = str(order[0].get("col", "id")), order[0].get("dir") == "desc"
        rows.sort(key=lambda row: (sortable(row.get(column)), row["id"]), reverse=descending)
        limit = int(number(request.query.get("limit", PAGE_ROWS), "limit"))
        limit = min(limit, PAGE_ROWS) if limit > 0 else PAGE_ROWS_IF_NOT_POSITIVE
        start = 0
        if token := request.query.get("after_token"):
            after = cursor_key(token)
            if after is None:
                return Reply(400, error("invalid_token", "Invalid paging cursor."))
            passed = [(sortable(row.get(column)), row["id"]) for row in rows]
            start = sum(1 for key in passed if (key >= after if descending else key <= after))
        page = rows[start : start + limit]
        more = start + limit < len(rows)
        token_out = cursor_token(page[-1].get(column), page[-1]["id"]) if more and page else None
        return Reply(body=self._garbled(page, rows, token_out, request))

    def _garbled(
        self, page: list[dict[str, Any]], rows: list[dict[str, Any]], token: str | None, request: Request
    ) -> dict[str, Any]:
        faults, total = self.market.faults, len(rows)
        counts = Counter(str(row["label"] or "") for row in rows)
        if page and (missing := faults.take("list.missing_row")) is not None:
            missing_id = int(missing) or max(row["id"] for row in page)
            page = [row for row in page if row["id"] != missing_id]
        if faults.take("list.bad_total") is not None:
            total += 1
        if page and faults.take("list.null_fields") is not None:
            page = [{**row, **dict.fromkeys(NULLABLE)} for row in page]
        if page and faults.take("list.one_malformed_row") is not None:
            broken = {"machine_id": "n/a", "start_date": "yesterday", "dph_total": {"value": None}, "ports": 7}
            page = [{**page[0], **broken}, *page[1:]]
        if select := json_query(request, "select_cols", list):
            page = page if "*" in select else [{name: row.get(name) for name in select} for row in page]
        return listing(page, total, dict(counts), token)

    def _gone_when_looked_at(self, contract: Contract) -> bool:
        """Counts one look at a box whose destroy was answered 200 but has not happened yet."""
        if contract.stays_polls is not None:
            if contract.stays_polls <= 0:
                self.market.destroy(contract)
            else:
                contract.stays_polls -= 1
        return contract.gone

    def _row(self, contract: Contract) -> dict[str, Any]:
        offer, now = contract.offer, self.market.clock()
        endpoints = self.market.host.endpoints(contract)
        reachable = contract.running_at is not None and endpoints is not None
        state = contract.intended
        return {
            "id": contract.id,
            "actual_status": contract.status,
            "intended_status": state,
            "cur_state": state,
            "next_state": state,
            "status_msg": contract.status_msg,
            "label": contract.label,
            "machine_id": offer.machine_id,
            "host_id": offer.host_id,
            "bundle_id": offer.id - 23_100_901,
            "num_gpus": offer.num_gpus,
            "gpu_name": contract.gpu_name,
            "gpu_ram": contract.gpu_ram_mb,
            "gpu_totalram": contract.gpu_ram_mb * offer.num_gpus,
            "gpu_util": 0.0 if contract.status == "running" else None,
            "gpu_temp": None,
            "gpu_arch": "nvidia",
            "cpu_util": 0.0,
            "cpu_ram": offer.cpu_ram_mb,
            "cpu_cores": offer.cpu_cores,
            "cpu_cores_effective": offer.cpu_cores_effective,
            "mem_usage": None,
            "mem_limit": None,
            "vmem_usage": None,
            "ssh_host": "127.0.0.1",
            "ssh_port": endpoints.proxy_port if endpoints else None,
            "ssh_idx": "5",
            # The real rows carry this trailing space too.
            "public_ipaddr": "127.0.0.1 ",
            "direct_port_start": -1,
            "direct_port_end": -1,
            "direct_port_count": 24,
            "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(endpoints.direct_port)}]}
            if reachable and endpoints
            else None,
            "image_uuid": contract.image,
            # The misspelling is the market's own.
            "image_runtype": "ssh ssh_direc ssh_proxy",
            "image_args": [],
            "extra_env": [[name, value] for name, value in contract.env.items()],
            "onstart": contract.onstart,
            "template_hash_id": None,
            "template_name": None,
            "jupyter_token": None,
            "is_bid": contract.is_bid,
            "min_bid": offer.min_bid_usd,
            "dph_base": contract.dph_base_usd,
            "dph_total": contract.dph_total_usd,
            "storage_cost": offer.storage_cost_usd_gb_month,
            "storage_total_cost": contract.storage_usd_h,
            "inet_up": offer.inet_up_mbps,
            "inet_down": offer.inet_down_mbps,
            "inet_up_cost": offer.inet_cost_usd_gb,
            "inet_down_cost": offer.inet_cost_usd_gb,
            "start_date": contract.created_at,
            "end_date": contract.created_at + offer.duration_s,
            "duration": contract.created_at + offer.duration_s - now,
            "uptime_mins": None if contract.running_at is None else (now - contract.running_at) / 60,
            "time_remaining": "",
            "disk_space": contract.disk_gb,
            "disk_usage": -1,
            "disk_util": -1,
            "disk_bw": 3120.0,
            "cuda_max_good": offer.cuda_max_good,
            "compute_cap": offer.compute_cap,
            "driver_version": offer.driver_version,
            "driver_vers": driver_number(offer.driver_version),
            "reliability2": offer.reliability,
            "verification": offer.verification,
            "geolocation": offer.geolocation,
            "country_code": offer.country,
            "static_ip": True,
            "hosting_type": 0,
            "dlperf": 231.2,
            "total_flops": offer.total_tflops,
        }

    # Change and destroy

    def _manage(self, request: Request, id: int) -> Reply:
        contract, body = self.market.contracts.get(id), parse_body(request)
        if contract is None or contract.gone:
            return no_such_instance(id)
        if "label" in body:
            if len(str(body["label"])) > LABEL_MAX_MANAGE:
                return Reply(400, error("label_too_long", f"Label is longer than {LABEL_MAX_MANAGE}."))
            contract.label = str(body["label"])
        match body.get("state"):
            case None:
                pass
            case "stopped":
                self.market.stop(contract)
            case "running" if not contract.lost:
                self.market.start(contract)
            case "running":
                return Reply(body=error("no_capacity", "Required resources are currently unavailable."))
            case other:
                raise search.InvalidArgs(f"state: got {other!r}, wanted running or stopped")
        return Reply(body={"success": True})

    def _destroy(self, request: Request, id: int) -> Reply:
        market, contract = self.market, self.market.contracts.get(id)
        if contract is None or contract.gone:
            return no_such_instance(id)
        machine_id = contract.offer.machine_id
        if market.faults.take("destroy.429", machine_id) is not None:
            return too_frequent(3.0)
        if (hang_s := market.faults.take("destroy.hang", machine_id)) is not None:
            return Reply(drop=True, hold_s=float(hang_s))
        if (polls := market.faults.take("destroy.200_but_stays", machine_id)) is not None:
            contract.stays_polls = int(polls)
            return Reply(body={"success": True, "msg": f"Instance {id} destroyed."})
        market.destroy(contract)
        if market.faults.take("destroy.500_but_done", machine_id) is not None:
            return Reply(500, "Internal Server Error")
        return Reply(body={"success": True, "msg": f"Instance {id} destroyed."})

    def _destroy_many(self, request: Request) -> Reply:
        ids = parse_body(request).get("instance_ids")
        if not isinstance(ids, list):
            raise search.InvalidArgs("instance_ids: wanted a list")
        for id in ids:
            contract = self.market.contracts.get(int(id))
            if contract is None or contract.gone:
                return no_such_instance(int(id))
            self.market.destroy(contract)
        return Reply(body={"success": True})

    def _reboot(self, request: Request, id: int) -> Reply:
        return self._restart(id, wipe=False)

    def _recycle(self, request: Request, id: int) -> Reply:
        return self._restart(id, wipe=True)

    def _restart(self, id: int, *, wipe: bool) -> Reply:
        contract = self.market.contracts.get(id)
        if contract is None or contract.gone:
            return no_such_instance(id)
        if contract.status != "running":
            return Reply(400, error("invalid_args", f"Instance {id} is {contract.status}, not running."))
        self.market.reboot(contract, wipe=wipe)
        return Reply(body={"success": True})

    def _bid_price(self, request: Request, id: int) -> Reply:
        contract = self.market.contracts.get(id)
        if contract is None or contract.gone:
            return no_such_instance(id)
        price = number(parse_body(request).get("price"), "price")
        if not contract.is_bid or not PRICE_RANGE_USD[0] <= price <= PRICE_RANGE_USD[1]:
            return Reply(400, error("invalid_price", f"price {price} refused; the instance must be a bid."))
        contract.bid_usd = contract.dph_base_usd = price
        return Reply(body={"success": True})

    def _request_logs(self, request: Request, id: int) -> Reply:
        if id not in self.market.contracts:
            return no_such_instance(id)
        token = secrets.token_urlsafe(16)
        self.log_tokens[token] = id
        return Reply(body={"success": True, "result_url": f"{self.base_url}/_rehearsal/logs/{token}", "msg": ""})

    # SSH keys

    def _account_keys(self, request: Request) -> Reply:
        return Reply(body=[key_row(k, self.market.user_id) for k in self.market.account_ssh_keys])

    def _add_account_key(self, request: Request) -> Reply:
        key = self.market.add_account_key(public_key(parse_body(request)))
        return Reply(body={"success": True, "key": key_row(key, self.market.user_id)})

    def _remove_account_key(self, request: Request, id: int) -> Reply:
        keys = self.market.account_ssh_keys
        if id not in {k.id for k in keys}:
            return Reply(404, error("not_found", f"SSH key {id} not found."))
        self.market.account_ssh_keys = [k for k in keys if k.id != id]
        return Reply(body={"success": True})

    def _instance_keys(self, request: Request, id: int) -> Reply:
        contract = self.market.contracts.get(id)
        if contract is None or contract.gone:
            return no_such_instance(id)
        rows = [key_row(k, self.market.user_id) for k in contract.ssh_keys]
        # JSON inside JSON, as the market sends it.
        return Reply(body={"success": True, "ssh_keys": json.dumps(rows)})

    def _attach_key(self, request: Request, id: int) -> Reply:
        contract = self.market.contracts.get(id)
        if contract is None or contract.gone:
            return no_such_instance(id)
        self.market.attach_key(contract, public_key(parse_body(request)))
        return Reply(body={"success": True, "msg": "SSH key added to instance."})

    def _detach_key(self, request: Request, id: int, key_id: int) -> Reply:
        contract = self.market.contracts.get(id)
        if contract is None or contract.gone:
            return no_such_instance(id)
        if not self.market.detach_key(contract, key_id):
            return Reply(404, error("not_found", f"SSH key {key_id} not found on instance {id}."))
        return Reply(body={"success": True})

    # Account

    def _user(self, request: Request) -> Reply:
        if "owner" in request.query:
            return invalid_args("owner is not a parameter")
        market = self.market
        other = market.faults.take("list.wrong_account") is not None
        credit = round(market.remaining_credit_usd(), 6)
        return Reply(
            body={
                "id": market.user_id + (1 if other else 0),
                "email": "rehearsal@localhost",
                "username": "rehearsal",
                "balance": 0.0,
                "credit": credit,
                "ssh_key": market.account_ssh_keys[-1].text if market.account_ssh_keys else None,
                "key_id": 1,
                "has_billing": True,
                "total_spend": -round(market.total_usd(), 6),
            }
        )

    def _charges(self, request: Request) -> Reply:
        filters = json_query(request, "select_filters", dict)
        day = filters.get("day")
        if not (isinstance(day, dict) and {"gte", "lte"} <= set(day)):
            raise search.InvalidArgs("select_filters: day needs gte and lte")
        since, until = number(day["gte"], "day.gte"), number(day["lte"], "day.lte")
        rows = [
            self._charge(contract)
            for contract in self.market.contracts.values()
            if contract.created_at <= until and (contract.ended_at or until) >= since
        ]
        limit = int(number(request.query.get("limit", 100), "limit"))
        return Reply(
            body={"success": True, "count": min(limit, len(rows)), "total": len(rows), "results": rows[:limit]}
        )

    def _charge(self, contract: Contract) -> dict[str, Any]:
        items = self.market.items_usd(contract)
        return {
            "type": "instance",
            "source": f"instance-{contract.id}",
            "description": f"Instance {contract.id}",
            "metadata": {"label": contract.label, "machine_id": contract.offer.machine_id},
            "start": contract.created_at,
            "end": contract.ended_at if contract.ended_at is not None else self.market.clock(),
            "amount": sum(items.values()),
            "items": [{"type": name, "amount": amount} for name, amount in items.items()],
        }


# Bodies


def error(name: str, msg: str) -> dict[str, Any]:
    return {"success": False, "error": name, "msg": msg}


def unknown_key() -> Reply:
    """A wrong or revoked key is a 404 on this market, not a 401."""
    return Reply(404, error("auth_error", "Invalid user key"))


def invalid_args(msg: str) -> Reply:
    return Reply(400, error("invalid_args", f"error 400/3467: Invalid args: {msg}"))


def no_such_ask(ask_id: int) -> Reply:
    msg = f"error 404/3603: no_such_ask Instance type by id {ask_id} is not available."
    return Reply(404, {**error("invalid_args", msg), "ask_id": ask_id})


def ask_unavailable(ask_id: int) -> Reply:
    return Reply(410, error("no_such_ask", f"Instance type by id {ask_id} is no longer available."))


def no_such_instance(instance_id: int) -> Reply:
    return Reply(404, error("no_such_instance", f"Instance {instance_id} not found."))


def deprecated(msg: str) -> Reply:
    return Reply(410, error("deprecated_endpoint", msg))


def too_frequent(every_s: float | None) -> Reply:
    text = "API requests too frequent"
    return Reply(429, text if every_s is None else f"{text}: endpoint threshold={every_s}")


def listing(page: list[dict[str, Any]], total: int, labels: dict[str, int], token: str | None) -> dict[str, Any]:
    return {
        "success": True,
        "instances_found": len(page),
        "total_instances": total,
        "label_counts": labels,
        "next_token": token,
        "instances": page,
    }


def key_row(key: SshKey, user_id: int) -> dict[str, Any]:
    return {"id": key.id, "user_id": user_id, "key": key.text, "public_key": key.text, "deleted_at": None}


# What callers send


def parse_body(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(request.body or b"{}")
    except ValueError:
        raise InvalidJson("Invalid json body") from None
    if not isinstance(body, dict):
        raise InvalidJson("Invalid json body: wanted an object")
    return body


def number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise search.InvalidArgs(f"{name}: got {value!r}, wanted a number") from None


def public_key(body: dict[str, Any]) -> str:
    text = str(body.get("ssh_key") or "").strip()
    if not re.match(r"(ssh-(ed25519|rsa)|ecdsa-sha2-\S+) [A-Za-z0-9+/=]+", text) or "\n" in text:
        raise search.InvalidArgs("ssh_key: wanted one OpenSSH public key")
    return text


def json_query(request: Request, name: str, kind: type[Any]) -> Any:
    text = request.query.get(name)
    if not text:
        return kind()
    try:
        value = json.loads(text)
    except ValueError:
        raise search.InvalidArgs(f"{name}: not JSON") from None
    if not isinstance(value, kind):
        raise search.InvalidArgs(f"{name}: got {type(value).__name__}, wanted {kind.__name__}")
    return value


def container_env(env: Any) -> dict[str, str]:
    """The create call's env (an object, or docker flags) without its port mappings."""
    if not env:
        return {}
    if isinstance(env, str):
        words = shlex.split(env)
        pairs = [b for a, b in itertools.pairwise(words) if a == "-e" and "=" in b]
        env = dict(pair.split("=", 1) for pair in pairs)
    if not isinstance(env, dict):
        raise search.InvalidArgs("env: wanted an object or docker flags")
    result = {str(k): str(v) for k, v in env.items() if not str(k).startswith("-")}
    if any(len(k) + len(v) > ENV_VARIABLE_MAX for k, v in result.items()):
        raise search.InvalidArgs(f"env: a variable is longer than {ENV_VARIABLE_MAX} characters")
    if sum(len(k) + len(v) for k, v in result.items()) > ENV_TOTAL_MAX:
        raise search.InvalidArgs(f"env: more than {ENV_TOTAL_MAX} characters")
    return result


def row_passes(row: dict[str, Any], filters: dict[str, Any]) -> bool:
    """The listing's filters; unlike the search's, a label may be compared with null."""
    for name, ops in filters.items():
        if not isinstance(ops, dict):
            raise search.InvalidArgs(f"{name}: got {ops!r}, wanted {{op: value}}")
        for op, wanted in ops.items():
            if wanted is None and op in ("eq", "neq"):
                if (row[name] is None) != (op == "eq"):
                    return False
            elif not search.matches({name: row[name]}, {name: {op: wanted}}):
                return False
    return True


def sortable(value: Any) -> tuple[int, Any]:
    """Orders nulls before everything and never compares text with numbers."""
    if value is None:
        return (0, 0)
    return (1, float(value)) if isinstance(value, (int, float)) else (2, str(value))


def cursor_token(value: Any, id: int) -> str:
    return base64.urlsafe_b64encode(json.dumps([value, id]).encode()).decode()


def cursor_key(token: str) -> tuple[tuple[int, Any], int] | None:
    try:
        value, id = json.loads(base64.urlsafe_b64decode(token))
        return sortable(value), int(id)
    except (ValueError, TypeError, binascii.Error):
        return None


def query_of(raw: bytes) -> dict[str, str]:
    return dict(parse_qsl(raw.decode("latin-1"), keep_blank_values=True))
