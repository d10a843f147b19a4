"""vast.ai over its HTTP API, one short method per endpoint.

Written against httpx rather than the official client because that one retries the create call, loses the body of an error (the only
place where this market says what happened) and drops a whole listing for one null field. No key ever stands in a URL, and whatever
leaves this module as text has been redacted.
"""

from __future__ import annotations

import json
import logging
import random
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import httpx

from tasks.domain import Charge, Instance, Listing, Offer, UnparsedInstance
from tasks.errors import Ambiguous, InvalidRequest, MarketError, NotFound, RateLimited, ShapeError
from tasks.market import replies
from tasks.market.limiter import Limiter
from tasks.market.protocol import CreateRequest
from tasks.rules.tiers import TIERS
from training.contract.recipe import Box as BoxWanted

log = logging.getLogger(__name__)

RETRY_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
MAX_REPLY_BYTES = 8 << 20
PAGE_ROWS = 25
MAX_PAGES = 200
LISTING_TRIES = 3
SEARCH_ROWS = 500


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

    `budget_s` bounds all calls of this object together, for those who must be done in seconds: past it nothing is retried.
    """

    name = "vast"

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
        return offers

    def create(self, request: CreateRequest) -> int:
        """Sent once. A reply that says neither yes nor a definite no is Ambiguous, a 429 among them."""
        call = _Call(
            "PUT", "/api/v0/asks/{id}/", ids={"id": request.offer.id}, body=create_body(request), repeatable=False
        )
        try:
            body = self._send(call)
        except (RateLimited, ShapeError) as error:
            raise Ambiguous(str(error), instance_id=error.instance_id) from None
        instance_id = body.get("new_contract") if isinstance(body, dict) else None
        if not isinstance(instance_id, int) or isinstance(instance_id, bool):
            raise Ambiguous(f"{call.name}: HTTP 200 without the new box's id")
        return instance_id

    def show(self, instance_id: int) -> Instance | None:
        call = _Call("GET", "/api/v0/instances/{id}/", ids={"id": instance_id}, repeatable=True)
        try:
            return replies.one_instance(call.name, self._send(call))
        except NotFound:
            return None

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

    def charges(self, instance_ids: tuple[int, ...], since: float, until: float) -> list[Charge]:
        filters = {"day": {"gte": int(since), "lte": int(until) + 1}, "type": {"in": ["instance"]}}
        params = {"select_filters": json.dumps(filters), "limit": "500"}
        found: list[Charge] = []
        for _ in range(MAX_PAGES):
            call = _Call("GET", "/api/v0/charges/", params=params, repeatable=True)
            body = self._send(call)
            if not isinstance(body, dict) or not isinstance(body.get("results"), list):
                raise ShapeError(f"{call.name}: want an object with a list 'results', seen {str(body)[:200]!r}")
            for row in body["results"]:
                instance_id, charges = replies.charges_of(call.name, row)
                found += charges if instance_id in instance_ids else []
            if not body.get("next_token"):
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
        page = self._page(params)
        rows = list(page["instances"])
        for _ in range(MAX_PAGES):
            token = page.get("next_token")
            if not token:
                return rows, _miscounted(rows, page)
            try:
                page = self._page({**params, "after_token": str(token)})
            except MarketError as error:
                return rows, f"broke off after {len(rows)} rows: {error}"
            rows += page["instances"]
        return rows, f"more than {MAX_PAGES} pages"

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
        self._limiter.wait(call.method, call.template)
        try:
            with self._client.stream(call.method, call.path, params=call.params or None, json=call.body) as response:
                text = replies.redact(self._text(call, response), self._key)
                status, headers = response.status_code, response.headers
        except httpx.HTTPError as error:
            reason = replies.redact(str(error), self._key) or "no reply"
            raise Ambiguous(f"{call.name}: {type(error).__name__}: {reason}") from None
        problem = replies.error_of(call.name, status, headers, text)
        if problem is not None:
            raise problem
        return replies.json_of(call.name, text)

    def _text(self, call: _Call, response: httpx.Response) -> str:
        data = bytearray()
        for chunk in response.iter_bytes():
            data += chunk
            if len(data) > MAX_REPLY_BYTES:
                raise Ambiguous(f"{call.name}: the reply is longer than {MAX_REPLY_BYTES >> 20} MB")
        return data.decode("utf-8", errors="replace")


@cache
def _trusted() -> ssl.SSLContext:
    """The roots of trust, read once a process: thirty milliseconds for each client otherwise."""
    return httpx.create_ssl_context(trust_env=False)


def search_body(want: BoxWanted) -> dict[str, Any]:
    """Asks loosely (tier's memory band and GPU count, for rent now) so that our own filters can say what each of them removed.

    `allocated_storage` is the disk that will be asked for: without it the price is that of 5 or 8 GB.
    """
    tier = TIERS[want.tier]
    return {
        "gpu_ram": {"gte": tier.min_memory_mb, "lte": tier.max_memory_mb},
        "num_gpus": {"eq": tier.num_gpus},
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


def _miscounted(rows: list[Any], last_page: dict[str, Any]) -> str:
    total, labels = last_page.get("total_instances"), last_page.get("label_counts")
    if not isinstance(total, int) or isinstance(total, bool):
        return f"the market did not say how many boxes there are (total_instances {total!r})"
    if total != len(rows):
        return f"{len(rows)} rows were read, but the market counts {total} boxes"
    ids = [row.get("id") for row in rows if isinstance(row, dict)]
    if len(set(map(str, ids))) != len(ids):
        return "a box is listed twice"
    counted = Counter(str(row.get("label") or "") for row in rows if isinstance(row, dict))
    if isinstance(labels, dict) and labels and labels != counted:
        # Rows whose fields came back null would hide our boxes; the market's own count by label does not.
        return f"the labels of the rows do not agree with the market's count {labels}"
    return ""
