"""Keeps the market's own limits: a least interval between two calls of one endpoint by one key, over all processes of this machine.

Two processes that each wait two seconds still collide, so the next free moment of each endpoint lies in one file under a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

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
# A reservation further away than this was made before the clock was set back.
_BELIEVABLE_S = 300.0


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

    def wait(self, method: str, template: str) -> None:
        """Reserve the endpoint's next free moment and sleep until then."""
        now = self._clock()
        delay = self._reserve(f"{method} {template}", self.interval_s(method, template), now) - now
        if delay > 0:
            self._sleep(delay)

    def interval_s(self, method: str, template: str) -> float:
        return INTERVALS_S.get((method, template), DEFAULT_INTERVAL_S) * self._pace

    def _reserve(self, slot: str, interval_s: float, now: float) -> float:
        with self._free_at() as free_at:
            at = max(now, free_at.get(slot, 0.0))
            if at > now + _BELIEVABLE_S:
                at = now
            free_at[slot] = at + interval_s
            return at

    @contextlib.contextmanager
    def _free_at(self) -> Iterator[dict[str, float]]:
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
            free_at = _read(descriptor)
            yield free_at
            data = json.dumps(free_at).encode()
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
