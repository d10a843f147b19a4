"""A signal that must not strike between two lines, sent for real."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from tasks.signals import signals_held


class Struck(BaseException):
    """What Prefect's handler of SIGTERM raises, under another name."""


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    def strike(number: int, frame: FrameType | None) -> None:
        raise Struck(signal.Signals(number).name)

    before = {number: signal.signal(number, strike) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, old in before.items():
        signal.signal(number, old)


def _two_lines(number: int, done: list[str]) -> None:
    with signals_held():
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        done.append("both lines")


def _a_line_that_fails() -> None:
    with signals_held():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("the second line")


def test_a_signal_strikes_when_the_lines_are_done_and_once() -> None:
    done: list[str] = []
    with pytest.raises(Struck, match="SIGTERM"):
        _two_lines(signal.SIGTERM, done)
    assert done == ["both lines"]
    with pytest.raises(Struck):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_is_not_lost_when_the_lines_fail() -> None:
    with pytest.raises(Struck, match="SIGINT"):
        _a_line_that_fails()


def test_without_a_signal_nothing_strikes_and_in_another_thread_nothing_is_touched() -> None:
    with signals_held():
        pass
    ran = threading.Event()

    def inside() -> None:
        with signals_held():
            ran.set()

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert ran.is_set()
