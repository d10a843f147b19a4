"""Keeps the market's own limits: a least interval between two calls of one endpoint by one key, over all processes of this machine.

Two processes that each wait two seconds still collide, so the next free moment of each endpoint lies in one file under a lock.
Beside it lies when the last call really went out: who overslept on a busy machine must not have the next in line on his heels.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tasks.errors import RateLimited

log = logging.getLogger(__name__)

# Seconds between two calls, from the market's documentation (November 2026); search is "10 a minute". Where nothing is
# documented one second is used.
INTERVALS_S: dict[tuple[str, str], float] = {
    ("PUT", "/api/v0/asks/{id}/"): 4.5,
    ("GET", "/api/v0/instances/{id}/"): 2.0,
    ("DELETE", "/api/v0/instances/{id}/"): 3.0,
    ("GET", "/api/v1/instances/"): 1.0,
    ("POST", "/api/v0/bundles/"): 6.0,
    ("GET", "/api/v0/charges/"): 1.0,
}
DEFAULT_INTERVAL_S = 1.0
# Between our clock and the market's lies a network whose delay differs from call to call.
SPACING = 1.1
# A create call that comes too early costs more than its interval.
PENALTIES_S: dict[tuple[str, str], float] = {("PUT", "/api/v0/asks/{id}/"): 12.0}
# A reservation further away than this was made before the clock was set back.
_BELIEVABLE_S = 300.0
_SAME_MOMENT_S = 1e-3


class Limiter:
    """`wait` returns when the call may be sent. `pace` scales every interval; a pretend market runs with a small one."""

    def __init__(
        self,
        state_dir: Path,
        api_key: str,
        pace: float = 1.0,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        # The file's name must tell keys apart and must not give one away.
        self._path = state_dir / f"limiter-{hashlib.sha256(api_key.encode()).hexdigest()[:16]}.json"
        self._pace = pace
        self._clock, self._sleep = clock, sleep
        self._memory: dict[str, float] = {}
        self._warned = False

    def wait(self, method: str, template: str, *, at_most_s: float = math.inf) -> None:
        """Reserve the endpoint's next free moment and sleep until then. RateLimited, nothing reserved, if that is too long to wait."""
        slot, interval_s, now = f"{method} {template}", self.interval_s(method, template), self._clock()
        early_s = self._reserve(slot, interval_s, now, at_most_s) - now
        while True:
            if early_s > 0:
                self._sleep(early_s)
            early_s = self._still_early(slot, interval_s)
            if early_s == 0:
                return

    def hold_back(self, method: str, template: str, seconds: float | None = None) -> None:
        """The market has refused a call: nobody with this key asks again for so long, by default the interval or its penalty."""
        with self._kept() as kept:
            if seconds is None:
                penalty_s = PENALTIES_S.get((method, template), 0.0) * self._pace
                seconds = max(penalty_s, self.interval_s(method, template))
            slot = f"{method} {template}"
            kept[slot] = max(kept.get(slot, 0.0), self._clock() + seconds)

    def interval_s(self, method: str, template: str) -> float:
        return INTERVALS_S.get((method, template), DEFAULT_INTERVAL_S) * SPACING * self._pace

    def _reserve(self, slot: str, interval_s: float, now: float, at_most_s: float) -> float:
        with self._kept() as kept:
            at = max(now, kept.get(slot, 0.0))
            if at > now + _BELIEVABLE_S:
                at = now
            if at - now > at_most_s:
                raise RateLimited(
                    f"{slot}: other calls with this key are in line for {at - now:.1f} s, {at_most_s:.1f} s are left; not sent"
                )
            kept[slot] = at + interval_s
            return at

    def _still_early(self, slot: str, interval_s: float) -> float:
        """Seconds until this call may go, by when the last one really went; 0 notes that it goes now."""
        with self._kept() as kept:
            now, sent = self._clock(), kept.get(f"sent {slot}", -math.inf)
            early_s = sent + interval_s - now
            if sent <= now and early_s > _SAME_MOMENT_S:
                return early_s
            kept[f"sent {slot}"] = now
            return 0.0

    @contextlib.contextmanager
    def _kept(self) -> Iterator[dict[str, float]]:
        try:
            descriptor = self._locked()
        except OSError as error:
            # A full or read-only disk must not keep a box from being destroyed: pace within this process, and say so.
            if not self._warned:
                log.warning("market limiter: %s; other processes with this key are not waited for", error)
                self._warned = True
            yield self._memory
            return
        try:
            kept = _read(descriptor)
            yield kept
            data = json.dumps(kept).encode()
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)

    def _locked(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor


def _read(descriptor: int) -> dict[str, float]:
    try:
        data = json.loads(os.pread(descriptor, 1 << 16, 0) or b"{}")
        return {str(slot): float(at) for slot, at in data.items()}
    except (ValueError, AttributeError, TypeError):
        return {}  # a write cut short by a power loss: the worst case is one early call
