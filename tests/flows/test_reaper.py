from __future__ import annotations

import json
import time
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows import reaper as module
from flows.reaper import reaper
from tasks.reap import LAST_SUCCESS
from tests.tasks.pretend import Pretend
from training.box.store import Store


def _table() -> list[dict[str, Any]]:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["reaper"])))
    newest = max(found, key=lambda artifact: artifact.created)
    rows: list[dict[str, Any]] = json.loads(str(newest.data))
    return rows


@pytest.fixture
def overdue(pretend: Pretend, environment: dict[str, str]) -> int:
    """A box whose hard end lies years back by the reaper's clock."""
    pretend.clock.now = 1_700_000_000
    return pretend.rented(hours=1)


def test_a_dry_run_shows_every_box_and_destroys_none(pretend: Pretend, overdue: int) -> None:
    assert reaper(dry_run=True, return_state=True).is_completed()
    row = _table()[0]
    assert row["box"] == overdue and row["outcome"] == "would be destroyed" and row["$/h"] > 0
    assert pretend.market.alive()


def test_an_overdue_box_is_destroyed_and_shown_with_its_reason(pretend: Pretend, overdue: int) -> None:
    assert reaper(return_state=True).is_completed()
    row = _table()[0]
    assert (row["box"], row["verdict"], row["outcome"]) == (overdue, "destroy", "destroyed")
    assert "hard end passed" in row["reason"] and not pretend.market.alive()


def test_a_reaper_that_cannot_see_fails_loudly(pretend: Pretend, overdue: int) -> None:
    pretend.arm("list.bad_total@always")
    state = reaper(return_state=True)
    assert state.is_failed() and "incomplete" in str(state.message)
    assert pretend.market.alive()


def test_an_empty_field_of_the_form_is_not_taken_for_every_box(pretend: Pretend, overdue: int) -> None:
    state = reaper(only_run="", return_state=True)
    assert state.is_failed() and "want the id of a flow run" in str(state.message)
    assert pretend.market.alive()


@pytest.mark.parametrize(("success_ago_s", "skipped"), [(300, True), (900, False), (None, False)])
def test_a_run_that_is_late_leaves_the_work_only_to_one_that_has_done_it(
    pretend: Pretend,
    store: Store,
    overdue: int,
    monkeypatch: pytest.MonkeyPatch,
    success_ago_s: int | None,
    skipped: bool,
) -> None:
    """A machine whose clock is ahead of the server's finds every run late; it must not call that a sweep."""
    monkeypatch.setattr(module, "_late_s", lambda: 601.0)
    if success_ago_s is not None:
        store.put_bytes(LAST_SUCCESS, json.dumps({"at": time.time() - success_ago_s}).encode())
    state = reaper(return_state=True)
    assert (state.name == "Skipped", bool(pretend.market.alive())) == (skipped, skipped)


def test_a_run_started_by_hand_is_never_late() -> None:
    assert module._late_s() < 60


def test_the_flow_is_bounded_and_has_the_two_parameters_of_its_deployment() -> None:
    assert reaper.timeout_seconds == 240
    assert set(reaper.parameters.properties) == {"dry_run", "only_run"}
