"""vast.ai over its HTTP API, one short method per endpoint.

Written against httpx rather than the official client because that one retries the create call, loses the body of an error (the only
place where this market says what happened) and drops a whole listing for one null field. No key ever stands in a URL, and whatever
leaves this module as text has been redacted.
"""

from __future__ import annotations

import json
import logging
import math
import random
import re
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from tasks.domain import LABEL_PREFIX, Charge, Instance, Listing, Offer, UnparsedInstance
from tasks.errors import (
    Ambiguous,
    InvalidRequest,
    MarketError,
    NotFound,
    QuotaExhausted,
    RateLimited,
    ShapeError,
    UserError,
)
from tasks.market import replies
from tasks.market.limiter import Limiter
from tasks.market.protocol import CreateRequest
from tasks.rules.tiers import TIERS
from training.contract.recipe import Box as BoxWanted

log = logging.getLogger(__name__)

RETRY_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
# The time-outs of a connection start anew with each byte; a reply that drips is ended by this.
CALL_S = 120.0
# What the last call of somebody in a hurry gets all the same.
LAST_CALL_S = 5.0
MAX_REPLY_BYTES = 8 << 20
PAGE_ROWS = 25
MAX_PAGES = 200
LISTING_TRIES = 3
SEARCH_ROWS = 1000
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class _Call:
    method: Literal["GET", "POST", "PUT", "DELETE"]
    template: str
    ids: dict[str, int] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    body: dict[str, Any] | None = None
    repeatable: bool = False
    """Sending it twice does what sending it once does."""

    @property
    def path(self) -> str:
        return self.template.format(**self.ids)

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"


class VastMarket:
    """The market protocol on vast.ai. May be shared by threads.

    `budget_s` bounds all calls of this object together, for those who must be done in seconds: past it nothing is retried, and a
    call whose turn comes later is not sent. UserError for an address without TLS beyond loopback, or a key that cannot be sent.
    """

    name = "vast"
    owned = False

    def __init__(
        self,
        base_url: str,
        api_key: str,
        limiter: Limiter,
        *,
        connect_s: float = 10,
        read_s: float = 30,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        _require_safe(base_url, api_key)
        self._key, self._limiter = api_key, limiter
        self._clock, self._sleep, self._jitter = clock, sleep, jitter
        self._give_up_at = None if budget_s is None else clock() + budget_s
        self._account: str | None = None
        self._client = httpx.Client(
            base_url=base_url,
            timeout=httpx.Timeout(read_s, connect=connect_s, pool=connect_s),
            headers={"Authorization": f"Bearer {api_key}", "User-Agent": "livery", "Accept": "application/json"},
            follow_redirects=False,
            trust_env=False,
            verify=_trusted(),
            transport=transport,
        )

    def account_id(self) -> str:
        user = self._user()
        if user.get("id") is None:
            raise ShapeError(f"GET /api/v0/users/current/: no account id among {', '.join(sorted(user))}")
        return str(user["id"])

    def credit_usd(self) -> float | None:
        credit = self._user().get("credit")
        return float(credit) if isinstance(credit, (int, float)) and not isinstance(credit, bool) else None

    def search(self, want: BoxWanted) -> list[Offer]:
        body = self._send(_Call("POST", "/api/v0/bundles/", body=search_body(want), repeatable=True))
        rows = body.get("offers") if isinstance(body, dict) else None
        if not isinstance(rows, list):
            raise ShapeError(f"search: want an object with a list 'offers', seen {str(body)[:200]!r}")
        offers, problems = [], []
        for row in rows:
            try:
                offers.append(replies.offer_of(row))
            except ValueError as error:
                problems.append(str(error))
        if problems:
            log.warning("search: %d of %d offers cannot be read, such as: %s", len(problems), len(rows), problems[0])
        if rows and not offers:
            raise ShapeError(f"search: none of {len(rows)} offers can be read: {problems[0]}")
        if len(rows) >= SEARCH_ROWS:
            log.warning("search: the market gave the %d cheapest offers of the tier and may have more", len(rows))
        return offers

    def create(self, request: CreateRequest) -> int:
        """Sent once. A reply that says neither yes nor a definite no is Ambiguous, a 429 among them."""
        call = _Call(
            "PUT", "/api/v0/asks/{id}/", ids={"id": request.offer.id}, body=create_body(request), repeatable=False
        )
        try:
            body = self._send(call)
        except (RateLimited, QuotaExhausted, ShapeError) as error:
            raise Ambiguous(str(error), instance_id=error.instance_id) from None
        instance_id = replies.created_id(body)
        if instance_id is None:
            raise Ambiguous(f"{call.name}: HTTP 200 without the new box's id")
        return instance_id

    def show(self, instance_id: int) -> Instance | None:
        call = _Call("GET", "/api/v0/instances/{id}/", ids={"id": instance_id}, repeatable=True)
        try:
            box = replies.one_instance(call.name, self._send(call))
        except NotFound:
            return None
        if box is not None and box.id != instance_id:
            raise ShapeError(f"{call.name}: the reply is about box {box.id}")
        return box

    def list_all(self) -> Listing:
        """Complete means: every page read, as many rows as the market counts, and the same account before and after.

        Raises when not even the first page can be read; a listing that breaks off later comes back incomplete with what it has.
        """
        listing = self._list_once()
        for _ in range(LISTING_TRIES - 1):
            if listing.complete:
                break
            log.info("listing is read again: %s", listing.problem)
            listing = self._list_once()
        return listing

    def destroy(self, instance_id: int) -> None:
        try:
            self._send(_Call("DELETE", "/api/v0/instances/{id}/", ids={"id": instance_id}, body={}))
        except NotFound:
            log.info("box %d: the market knows it no more", instance_id)

    def attach_key(self, instance_id: int, public_key: str) -> None:
        call = _Call(
            "POST",
            "/api/v0/instances/{id}/ssh/",
            ids={"id": instance_id},
            body={"ssh_key": public_key},
            repeatable=True,
        )
        try:
            self._send(call)
        except InvalidRequest as error:
            # An attach whose reply was lost makes its own repetition a duplicate.
            if "already" not in str(error).lower() and "duplicate" not in str(error).lower():
                raise

    def charges(self, instance_ids: tuple[int, ...] | None, since: float, until: float) -> list[Charge]:
        filters = {"day": {"gte": int(since), "lte": int(until) + 1}, "type": {"in": ["instance"]}}
        params = {"select_filters": json.dumps(filters), "limit": "500"}
        found: list[Charge] = []
        read = 0
        for _ in range(MAX_PAGES):
            call = _Call("GET", "/api/v0/charges/", params=params, repeatable=True)
            body = self._send(call)
            if not isinstance(body, dict) or not isinstance(body.get("results"), list):
                raise ShapeError(f"{call.name}: want an object with a list 'results', seen {str(body)[:200]!r}")
            for row in body["results"]:
                instance_id, charges = replies.charges_of(call.name, row)
                found += charges if instance_ids is None or instance_id in instance_ids else []
            read += len(body["results"])
            if not body.get("next_token"):
                if isinstance(body.get("total"), int) and read < body["total"]:
                    raise ShapeError(f"charges: {read} of {body['total']} rows, and no token for the rest")
                return found
            params["after_token"] = str(body["next_token"])
        raise ShapeError(f"charges: more than {MAX_PAGES} pages")

    def _user(self) -> dict[str, Any]:
        body = self._send(_Call("GET", "/api/v0/users/current/", repeatable=True))
        if not isinstance(body, dict):
            raise ShapeError(f"GET /api/v0/users/current/: want an object, seen {str(body)[:200]!r}")
        return body

    def _list_once(self) -> Listing:
        before = self._account or self.account_id()
        rows, problem = self._all_pages()
        instances, unparsed = _sorted_out(rows)
        after = self.account_id()
        # A key that answers for two accounts is asked again from the start next time.
        self._account = after if after == before else None
        if after != before:
            problem = f"the key answered for account {before} before the listing and for {after} after it"
        return Listing(instances=instances, unparsed=unparsed, account_id=after, complete=not problem, problem=problem)

    def _all_pages(self) -> tuple[list[Any], str]:
        """All rows, and what is wrong with them ('' if nothing is)."""
        params = {"limit": str(PAGE_ROWS), "order_by": json.dumps([{"col": "id", "dir": "asc"}])}
        pages, tokens = [self._page(params)], set[str]()
        while (token := str(pages[-1].get("next_token") or "")) and len(pages) <= MAX_PAGES and token not in tokens:
            tokens.add(token)
            try:
                pages.append(self._page({**params, "after_token": token}))
            except MarketError as error:
                rows = _rows(pages)
                return rows, f"broke off after {len(rows)} rows: {error}"
        return _rows(pages), "the pages do not end" if token else _miscounted(pages)

    def _page(self, params: dict[str, str]) -> dict[str, Any]:
        call = _Call("GET", "/api/v1/instances/", params=params, repeatable=True)
        body = self._send(call)
        if not isinstance(body, dict) or not isinstance(body.get("instances"), list):
            raise ShapeError(f"{call.name}: want an object with a list 'instances', seen {str(body)[:200]!r}")
        return body

    def _send(self, call: _Call) -> Any:
        """The parsed JSON of a success. A repeatable call is sent again on 429, 5xx and broken connections, any other once."""
        for pause_s in RETRY_PAUSES_S if call.repeatable else ():
            try:
                return self._send_once(call)
            except (RateLimited, Ambiguous) as error:
                wait_s = pause_s * (1 + 0.25 * self._jitter())
                if isinstance(error, RateLimited):
                    wait_s = max(wait_s, error.retry_after_s or 0.0)
                if self._give_up_at is not None and self._clock() + wait_s > self._give_up_at:
                    raise
                log.info("%s; again in %.1f s", error, wait_s)
                self._sleep(wait_s)
        return self._send_once(call)

    def _send_once(self, call: _Call) -> Any:
        self._limiter.wait(call.method, call.template, at_most_s=self._left_s())
        until = self._clock() + min(CALL_S, max(LAST_CALL_S, self._left_s()))
        try:
            with self._client.stream(call.method, call.path, params=call.params or None, json=call.body) as response:
                text = replies.redact(self._text(call, response, until), self._key)
                status, headers = response.status_code, response.headers
        except httpx.HTTPError as error:
            reason = replies.redact(str(error), self._key) or "no reply"
            raise Ambiguous(f"{call.name}: {type(error).__name__}: {reason}") from None
        problem = replies.error_of(call.name, status, headers, text)
        if isinstance(problem, RateLimited):
            self._limiter.hold_back(call.method, call.template, problem.retry_after_s)
        if problem is not None:
            raise problem
        return replies.json_of(call.name, text)

    def _left_s(self) -> float:
        return math.inf if self._give_up_at is None else max(0.0, self._give_up_at - self._clock())

    def _text(self, call: _Call, response: httpx.Response, until: float) -> str:
        data = bytearray()
        for chunk in response.iter_bytes():
            data += chunk
            if self._clock() > until:
                raise Ambiguous(f"{call.name}: {len(data)} bytes of a reply, no end of it, and the time is up")
            if len(data) > MAX_REPLY_BYTES:
                raise Ambiguous(f"{call.name}: the reply is longer than {MAX_REPLY_BYTES >> 20} MB")
        return data.decode("utf-8", errors="replace")


def _require_safe(base_url: str, api_key: str) -> None:
    url = urlsplit(base_url)
    if url.scheme != "https" and (url.scheme, url.hostname) not in {("http", host) for host in _LOOPBACK}:
        raise UserError(
            f"the market's address {base_url}: want https:// (plain http only on loopback: the key travels on it)"
        )
    if not re.fullmatch(r"[!-~]+", api_key):
        # The HTTP library would quote the whole header, key included, in its complaint.
        raise UserError(
            "LIVERY_MARKET_API_KEY (or LIVERY_REAPER_API_KEY): empty, or holds a blank, a line break or a character outside ASCII; "
            "copy the key again, without quotes"
        )


@cache
def _trusted() -> ssl.SSLContext:
    """The roots of trust, read once a process: thirty milliseconds for each client otherwise."""
    return httpx.create_ssl_context(trust_env=False)


def search_body(want: BoxWanted) -> dict[str, Any]:
    """Asks loosely (tier's memory band and the GPU count, for rent now) so that our own filters can say what each of them removed.

    `allocated_storage` is the disk that will be asked for: without it the price is that of 5 or 8 GB.
    """
    tier = TIERS[want.tier]
    return {
        "gpu_ram": {"gte": tier.min_memory_mb, "lte": tier.max_memory_mb},
        "num_gpus": {"eq": want.gpus},
        "external": {"eq": False},
        "rentable": {"eq": True},
        "type": "bid" if want.interruptible else "on-demand",
        "allocated_storage": want.disk_gb,
        "order": [["dph_total", "asc"]],
        "limit": SEARCH_ROWS,
    }


def create_body(request: CreateRequest) -> dict[str, Any]:
    """`cancel_unavail` keeps a losing bid from becoming a stopped box that bills its disk."""
    return {
        "client_id": "me",
        "image": request.image,
        "disk": request.disk_gb,
        "label": request.label,
        "onstart": request.onstart,
        "runtype": "ssh_direct",
        "target_state": "running",
        "cancel_unavail": True,
        "price": request.bid_usd,
        "env": {},
    }


def _sorted_out(rows: list[Any]) -> tuple[tuple[Instance, ...], tuple[UnparsedInstance, ...]]:
    parsed = [replies.instance_of(row) for row in rows]
    return (
        tuple(box for box in parsed if isinstance(box, Instance)),
        tuple(box for box in parsed if isinstance(box, UnparsedInstance)),
    )


def _rows(pages: list[dict[str, Any]]) -> list[Any]:
    return [row for page in pages for row in page["instances"]]


def _miscounted(pages: list[dict[str, Any]]) -> str:
    rows, seen = _rows(pages), pages[-1].get("total_instances")
    total = replies.whole_number(seen)
    if total is None:
        return f"the market did not say how many boxes there are (total_instances {seen!r})"
    if total != len(rows):
        return f"{len(rows)} rows were read, but the market counts {total} boxes"
    ids = [str(row.get("id")) for row in rows if isinstance(row, dict)]
    if len(set(ids)) != len(ids):
        return "a box is listed twice"
    read = Counter(str(row.get("label")) for row in rows if isinstance(row, dict))
    return next((problem for page in pages if (problem := _hidden(read, page.get("label_counts")))), "")


def _hidden(read: Counter[str], counts: Any) -> str:
    """Rows whose labels came back null would hide our boxes; the market's own count by label does not.

    Only our labels are compared, and only for too few rows: how a box without a label is counted, and whether the counts are of the
    page or of the account, is nowhere written down.
    """
    ours = counts if isinstance(counts, dict) else {}
    for label, wanted in ours.items():
        number = replies.whole_number(wanted)
        if str(label).startswith(f"{LABEL_PREFIX}:") and (number is None or read[str(label)] < number):
            return f"{read[str(label)]} rows have the label {label}, but by the market's count of labels there are {wanted}"
    return ""
