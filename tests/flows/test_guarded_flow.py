"""The guard and the hook inside real flow runs."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import Pause

from tasks.destroy import destroy_run
from tasks.domain import Destruction
from tasks.guard import box_guard, destroy_hook
from tasks.market.vast import VastMarket
from tests.tasks.pretend import Pretend, rehearsal_recipe
from training.box.store import Store


class Run:
    """What the guard sees of a run."""

    clock = staticmethod(time.time)
    progress_at = None

    def __init__(self, store: Store, pretend: Pretend, state_dir: Path) -> None:
        self.store, self.settings, self.recipe = store, pretend.settings(state_dir), rehearsal_recipe()
        self.flow_run_id = str(runtime.flow_run.id)

    def tell_alive(self) -> None: ...


@pytest.mark.parametrize("how", ["fails", "is suspended", "runs out of time", "ends well"])
def test_a_flow_that_ends_in_any_way_leaves_no_box(
    pretend: Pretend, market: VastMarket, store: Store, environment: dict[str, str], tmp_path: Path, how: str
) -> None:
    @task(cache_policy=NO_CACHE)
    def destroy(run: Run) -> Destruction:
        if how == "is suspended":
            raise Pause(state=None)  # what Prefect raises again from any task of a suspended run
        return destroy_run(market, run.flow_run_id, clock=pretend.clock, sleep=pretend.clock.sleep)

    @flow(timeout_seconds=1 if how == "runs out of time" else None)
    def training() -> str:
        run = Run(store, pretend, tmp_path)
        with box_guard(run, destroy, keep=False):
            pretend.rented(run.flow_run_id)
            # In short polls, as a run watches its box: where another timeout holds the alarm, Prefect's strikes only between two.
            while how == "runs out of time":
                time.sleep(0.05)
            if how == "fails":
                raise RuntimeError("a phase failed")
            if how == "is suspended":
                raise Pause(state=None)
        return "done"

    try:
        state = training(return_state=True)
        assert state.is_completed() is (how == "ends well")
    except Pause:
        assert how == "is suspended"
    assert len(pretend.market.contracts) == 1 and not pretend.market.alive()


def test_the_hook_of_a_flow_without_a_guard_finds_the_box_by_the_run(
    pretend: Pretend, environment: dict[str, str]
) -> None:
    @flow(on_failure=[destroy_hook])
    def forgetful() -> None:
        pretend.rented(str(runtime.flow_run.id))
        raise RuntimeError("died without giving the box back")

    assert forgetful(return_state=True).is_failed()
    assert len(pretend.market.contracts) == 1 and not pretend.market.alive()
