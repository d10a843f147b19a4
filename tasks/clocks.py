"""The time of day, where boxes live or die by it: leases and hard ends are written by one machine and read by another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from training.box.store import Store, StoreError

log = logging.getLogger(__name__)
# Leases are minutes long and written by another machine's clock.
MAX_SKEW_S = 120.0


def wrong_clock(store: Store, now: float) -> str:
    """How wrong this machine's clock is by the bucket's; empty if it is right, or if the bucket does not say."""
    try:
        skew_s = now - store.server_time()
    except StoreError as error:
        log.warning("this machine's clock cannot be held against the bucket's: %s", error)
        return ""
    if abs(skew_s) <= MAX_SKEW_S:
        return ""
    way = "ahead of" if skew_s > 0 else "behind"
    return f"this machine's clock is {abs(skew_s):.0f} s {way} the bucket's, at most {MAX_SKEW_S:.0f}"


class SteadyClock:
    """Epoch seconds that are never set back: by a clock that is, each renewal of a lease would be an old one, and the box reaped.

    A machine that slept is the other way round: its monotonic clock stood still, and the time of day is right.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._began = wall() - monotonic()

    def __call__(self) -> float:
        lived = self._began + self._monotonic()
        return max(self._wall(), lived)
