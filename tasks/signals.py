"""Signals that must not strike between two lines: held back until both are done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_held() -> Iterator[None]:
    """SIGTERM and SIGINT wait until the body has ended, then strike as they would have. For bodies of seconds: a cancelled flow is killed after 30.

    Only the main thread may set handlers; in another one signals do not arrive anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, _: FrameType | None) -> None:
        held.append(number)

    before = {number: signal.signal(number, hold) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        for caught in dict.fromkeys(held):
            signal.raise_signal(caught)
