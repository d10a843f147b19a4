"""The end of a run on paper: its flight closed, its receipt written, shown and logged, whatever ended it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from tasks import alarms, artifacts
from tasks.errors import BudgetReached, MarketError
from tasks.receipt import table, write_receipt
from tasks.run import Run
from training.box.store import StoreError

log = logging.getLogger(__name__)


@contextmanager
def receipt_written(run: Run) -> Iterator[None]:
    """Write the receipt after the body, which must have given its boxes back. Never hides what the body raised."""
    try:
        yield
    except Exception as error:
        if isinstance(error, BudgetReached) and run.recorder is not None:
            _sound_cap(run, error)
        _settle(run, f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}", show=True)
        raise
    except BaseException as error:  # a signal or Prefect's Pause: the page may not be spoken to, the bucket may
        _settle(run, f"interrupted: {type(error).__name__}", show=False)
        raise
    else:
        _settle(run, "completed", show=True)


def _sound_cap(run: Run, error: BudgetReached) -> None:
    """A cap ends a run well, with what it made in the bucket; whoever pays wants to know that it did not finish."""
    reason = str(error).splitlines()[0]
    do = "its boxes are given back; raise the budget and start the run again under its name to go on"
    alarms.sound(
        run.store,
        alarms.of_run(run.store, run.flow_run_id, "cap_reached", reason=reason, do=do, at=run.clock()),
    )


def _settle(run: Run, outcome: str, *, show: bool) -> None:
    if run.recorder is None:
        log.info("nothing was rented, so there is nothing to bill")
        return
    run.recorder.attempt_failed(outcome, run.view.last_durable_at(), run.view.last_kept_at())
    run.recorder.end(outcome)
    try:
        receipt = write_receipt(
            run.store, run.market, run.flow_run_id, "flow", now=run.clock(), flight=run.recorder.flight
        )
    except (MarketError, StoreError) as error:
        log.error(
            "the receipt could not be written: %s; the daily audit writes it, or: python -m flows receipt %s",
            error,
            run.flow_run_id,
        )
        return
    if receipt is not None:
        log.info("%s", table(receipt))
        if show:
            artifacts.show_receipt(receipt)
