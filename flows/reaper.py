"""The reaper: every five minutes it judges each box of the account and destroys what nobody answers for.

It runs in a process of its own with a key of its own. `python -m flows.reaper --once` does the same where there is no Prefect.
"""

import sys

from tasks.reap import main

if __name__ == "__main__":
    # Before Prefect is imported: cron must be able to reap where Prefect is broken or absent.
    sys.exit(main())

import logging
from datetime import UTC, datetime
from typing import Any

from prefect import flow, runtime
from prefect.artifacts import create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks.log import guard_secrets
from tasks.reap import Sweep, sweep_now, swept_within
from tasks.settings import settings

log = logging.getLogger(__name__)
PERIOD_S = 300


@flow(name="reaper", timeout_seconds=240, log_prints=True)
def reaper(dry_run: bool = False, only_run: str | None = None) -> State[Any]:
    """Destroy boxes whose run is dead, and prove it.

    Fails if a box may still bill or cannot be judged; a failed reaper run is an alarm.

    Args:
        dry_run: judge and report, destroy nothing
        only_run: only boxes of this flow run; left out: all boxes
    """
    current = settings()
    late_s = _late_s()
    if late_s > 2 * PERIOD_S and swept_within(current, late_s):
        # After a pause of the server all missed runs start in the same second. Being late alone is no reason: a clock that is wrong, or a
        # queue that is always behind, would make every run late.
        return Completed(name="Skipped", message=f"{late_s:.0f} s late, and a sweep since then saw everything")
    guard_secrets(current)
    result = sweep_now(current, dry_run=dry_run, only_run=only_run)
    _show(result)
    result.raise_if_bad()
    return Completed(message=result.sentence)


def _late_s() -> float:
    scheduled = runtime.flow_run.scheduled_start_time
    return (datetime.now(UTC) - scheduled).total_seconds() if scheduled else 0.0


def _show(result: Sweep) -> None:
    try:
        create_table_artifact(
            table=result.table(),
            key="reaper",
            description=f"{result.sentence}{', dry run' if result.dry_run else ''}",
        )
    except Exception as error:  # noqa: BLE001 - protects the sweep's verdict: a server that does not answer must not turn it into another error
        log.warning("not shown on the run's page: %s: %s", type(error).__name__, error)
