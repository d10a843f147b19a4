"""The guard around a rented box: whatever ends the body, the box is given back, and the hooks that do it when the process is gone.

Measured on Prefect 3.9: a suspended run raises Pause again from any task called in `finally`, and a second SIGTERM interrupts a destroy
that is under way. So signals are ignored while the box is given back, the task goes first because people see it, and a plain call that
needs nothing of Prefect stands behind it.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from tasks import alarms
from tasks.destroy import destroy_in_a_hurry
from tasks.domain import Destruction
from tasks.errors import BudgetReached, DestroyUnverified
from tasks.lease import LeaseThread, end_lease, hold
from tasks.settings import Settings
from training.box.store import Store, StoreError
from training.contract.recipe import Recipe

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun, State
    from prefect.flows import Flow

log = logging.getLogger(__name__)


class Guarded(Protocol):
    """What the guard needs to know of a run."""

    flow_run_id: str
    store: Store
    settings: Settings
    clock: Callable[[], float]

    @property
    def recipe(self) -> Recipe: ...

    @property
    def box(self) -> object | None:
        """The box that a person could log in to, if there is one."""

    @property
    def progress_at(self) -> float | None:
        """When the run last got anywhere; None if that is not known."""

    def tell_alive(self, until: float | None = None) -> None:
        """Touch the box's sign of life, for its dead-man switch; with `until` as if it were touched then."""


R = TypeVar("R", bound=Guarded)


@contextmanager
def box_guard(
    run: R,
    destroy: Callable[[R], object],
    *,
    keep: bool,
    in_a_hurry: Callable[[str], Destruction] = destroy_in_a_hurry,
) -> Iterator[LeaseThread]:
    """Hold the lease while the body runs; afterwards give the box back by `destroy` (the task), or plainly if that raises anything.

    With `keep` the box of a body that raised is held for `keep_hours` instead, unless that cannot be written to the bucket: there is
    nothing to debug on the box of a run that succeeded or whose money is spent, nor on one that never let us in. Raises what the body raised;
    DestroyUnverified, or what `destroy` raised, if the box may still bill, for that is then the more urgent news.
    """
    lease = LeaseThread(
        run.store,
        run.flow_run_id,
        run.recipe.name,
        lease_s=run.settings.lease_s,
        renew_s=run.settings.lease_renew_s,
        on_renew=run.tell_alive,
        progress_at=lambda: run.progress_at,
        max_age_s=run.settings.max_age_hours * 3600,
        patience_s=_patience_s(run.recipe),
        clock=run.clock,
    )
    lease.start()
    failed = True
    try:
        yield lease
        failed = False
    except BudgetReached:
        keep = False
        raise
    finally:
        # A signal may still strike before the first line inside has run, so the plain call stands outside as well.
        try:
            with signals_ignored():
                lease.stop()
                if not (keep and failed and run.box is not None and _held(run)):
                    _destroy_or_say(destroy, run)
                    _lease_over(run)
        except BaseException as error:
            with signals_ignored():
                log.warning("giving the box back by plain call (%s: %s)", type(error).__name__, error)
                in_a_hurry(run.flow_run_id)
            raise


@contextmanager
def signals_ignored() -> Iterator[None]:
    """SIGTERM and SIGINT do nothing inside. Only the main thread may set handlers; in another one they do not arrive anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def destroy_hook(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:
    """For on_failure, on_cancellation and on_crashed. May run in a fresh process, after the flow's own is dead, with nothing but the environment."""
    flow_run_id = str(flow_run.id)
    result = destroy_in_a_hurry(flow_run_id)
    if result.kept_until is not None:
        log.warning("flow run %s: its box is kept for debugging", flow_run_id)
    elif result.clean:
        log.info("flow run %s (%s): boxes destroyed: %s", flow_run_id, state.name, list(result.gone) or "none left")
    settle_if_possible(flow_run_id, "hook")


def settle_if_possible(flow_run_id: str, written_by: Literal["hook", "reaper"]) -> None:
    """Write the run's receipt. Whatever is wrong with it must not look like a failed destroy."""
    try:
        import_module("tasks.receipt").settle(flow_run_id, written_by)
    except Exception as error:  # noqa: BLE001 - protects the hook or the sweep: the box is what matters, the receipt can be made again
        log.error("no receipt for flow run %s: %s: %s", flow_run_id, type(error).__name__, error)


def _patience_s(recipe: Recipe) -> float:
    """The longest that a run may go without progress and give the box up by itself; the reaper comes after that."""
    return max(recipe.budget.silent_s, recipe.budget.install_s, recipe.box.boot_s) + 300.0


def _held(run: Guarded) -> bool:
    now = run.clock()
    until = now + run.settings.keep_hours * 3600
    try:
        hold(
            run.store,
            run.flow_run_id,
            run.recipe.name,
            now=now,
            until=until,
            max_age_s=run.settings.max_age_hours * 3600,
        )
    except StoreError as error:
        log.error("the box was to be kept, but that cannot be written to the bucket, so it is destroyed: %s", error)
        return False
    try:
        run.tell_alive(until)
    except Exception as error:  # noqa: BLE001 - whatever reaching the box raises, the hold is promised and the box merely goes earlier
        log.warning("the box was not told of its hold; its dead-man switch may end it sooner: %s", error)
    kept = alarms.of_run(
        run.store,
        run.flow_run_id,
        "box_kept",
        reason=f"KEPT for debugging and billed for {run.settings.keep_hours:.1f} h more, or until its hard end; the reaper destroys it then",
        do=f"to end it now: python -m flows release {run.flow_run_id}, or {alarms.CONSOLE}",
        at=now,
    )
    alarms.sound(run.store, kept)
    return True


def _lease_over(run: Guarded) -> None:
    """Whatever comes to light of this run from now on is nobody's."""
    try:
        end_lease(run.store, run.flow_run_id, run.clock())
    except StoreError as error:
        log.warning("the lease is not ended and runs out by itself: %s", error)


def _destroy_or_say(destroy: Callable[[R], object], run: R) -> None:
    result = destroy(run)
    if isinstance(result, Destruction) and not result.clean:
        raise DestroyUnverified(f"box {list(result.unverified) or '(unknown)'} may still bill: {result.reason}")
