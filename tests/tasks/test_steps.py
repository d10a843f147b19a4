"""What stands around a run's steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tasks import steps


@contextmanager
def _lost_at_the_end(*_: Any, **__: Any) -> Iterator[None]:
    """Prefect's slot when the server is gone by the time it is given back."""
    yield
    raise ConnectionError("all connection attempts failed")


def test_a_run_that_ended_well_is_not_failed_by_a_slot_that_cannot_be_given_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(steps, "concurrency", _lost_at_the_end)
    with steps._slot():
        pass
    assert "not given back" in caplog.text


def test_what_the_body_raised_is_not_hidden_by_a_slot_that_cannot_be_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(steps, "concurrency", _lost_at_the_end)
    with pytest.raises(KeyboardInterrupt), steps._slot():
        raise KeyboardInterrupt


@pytest.mark.parametrize("task", [steps.destroy, steps.give_back], ids=lambda task: str(task.name))
def test_what_gives_boxes_back_needs_no_prefect_server(task: Any) -> None:
    """Before a task with tags begins, Prefect asks its server for the limits of each, and fails the task where none answers."""
    assert not task.tags
