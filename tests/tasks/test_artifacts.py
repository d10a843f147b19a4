"""The run's page is a view: whatever its server does, the run goes on."""

from __future__ import annotations

import threading
import time

import pytest

from tasks.artifacts import Page
from tests.tasks.pretend import Clock


def test_a_page_that_does_not_answer_holds_the_run_up_for_the_patience_alone(caplog: pytest.LogCaptureFixture) -> None:
    never = threading.Event()
    began = time.monotonic()
    Page(patience_s=0.1).show(never.wait)
    assert time.monotonic() - began < 2
    assert "no answer within 0 s" in caplog.text
    never.set()


def test_after_a_showing_that_failed_nothing_is_tried_for_a_while_and_then_again(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    page, tried = Page(quiet_s=120, clock=clock), list[float]()

    def refused() -> None:
        tried.append(clock.now)
        raise ConnectionRefusedError("nobody listens")

    page.show(refused)
    clock.now += 119
    page.show(refused)
    clock.now += 2
    page.show(refused)
    assert len(tried) == 2
    assert "ConnectionRefusedError: nobody listens" in caplog.text


def test_what_can_be_shown_is_shown_each_time(clock: Clock) -> None:
    page, shown = Page(clock=clock), list[int]()
    for number in range(3):
        page.show(lambda number=number: shown.append(number))
    assert shown == [0, 1, 2]
