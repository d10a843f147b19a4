"""What all endpoints share: requests and replies, routes, the rate limits, error bodies, and reading what callers send."""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qsl

from deployments.rehearsal import search

GATEWAY_TIMEOUT = "<html><head><title>504 Gateway Time-out</title></head><body>nginx</body></html>"
BAD_GATEWAY = "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"


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
    searches: bool = False

    @property
    def reads(self) -> bool:
        """Changes nothing, whatever its method says."""
        return self.method == "GET" or self.searches

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


# Error bodies


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


def query_of(raw: bytes) -> dict[str, str]:
    return dict(parse_qsl(raw.decode("latin-1"), keep_blank_values=True))
