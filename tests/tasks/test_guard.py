from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import Pause

from tasks import alarms
from tasks.destroy import destroy_in_a_hurry
from tasks.domain import Destruction
from tasks.errors import BudgetReached, DestroyUnverified
from tasks.guard import box_guard, destroy_hook, signals_ignored
from tasks.lease import read_lease
from tasks.settings import Settings
from tests.tasks.pretend import FLOW_RUN, Pretend, dead_store, rehearsal_recipe
from training.box.store import Store, StoreError
from training.contract.recipe import Recipe


@dataclass
class Run:
    """What the guard sees of a run; the clock is real, as in a hook."""

    store: Store
    settings: Settings
    flow_run_id: str = FLOW_RUN
    recipe: Recipe = field(default_factory=rehearsal_recipe)
    clock: Any = time.time
    box: object | None = "a box that answers at a login"
    told: int = 0
    progress_at: float | None = None

    held_until: float | None = None

    def tell_alive(self, until: float | None = None) -> None:
        self.told += 1
        self.held_until = until


@pytest.fixture
def run(store: Store, environment: dict[str, str], pretend: Pretend, tmp_path: Path) -> Run:
    return Run(store, pretend.settings(tmp_path))


def _destroyed(run: Run) -> Destruction:
    return destroy_in_a_hurry(run.flow_run_id)


def test_the_box_goes_back_by_the_task_after_a_good_end(run: Run, pretend: Pretend) -> None:
    box, plain = pretend.rented(), []
    with box_guard(
        run, _destroyed, keep=False, in_a_hurry=lambda one: plain.append(one) or Destruction(flow_run_id=one)
    ):
        assert pretend.market.alive()[0].id == box
        lease = read_lease(run.store, FLOW_RUN)
        assert lease is not None and lease.expires_at > time.time()
    assert not pretend.market.alive() and not plain


@pytest.mark.parametrize("error", [RuntimeError("x"), KeyboardInterrupt(), SystemExit(3), Pause(), GeneratorExit()])
def test_whatever_ends_the_body_the_box_goes_back_and_the_error_goes_on(
    run: Run, pretend: Pretend, error: BaseException
) -> None:
    pretend.rented()
    with pytest.raises(type(error)), box_guard(run, _destroyed, keep=False):
        raise error
    assert not pretend.market.alive()


@pytest.mark.parametrize("error", [Pause(), RuntimeError("the API is down"), KeyboardInterrupt()])
def test_a_suspended_run_whose_destroy_task_raises_again_is_destroyed_by_plain_call(
    run: Run, pretend: Pretend, error: BaseException
) -> None:
    pretend.rented()

    def task_that_raises(_: Run) -> None:
        raise error

    with pytest.raises(type(error)), box_guard(run, task_that_raises, keep=False):
        raise Pause
    assert not pretend.market.alive()


def test_a_task_that_could_not_verify_fails_a_run_that_went_well(run: Run, pretend: Pretend) -> None:
    box = pretend.rented()
    pretend.arm("destroy.200_but_stays=1000@always")
    unverified = Destruction(flow_run_id=FLOW_RUN, unverified=(box,), reason="still listed")
    plain: list[str] = []

    def hurry(flow_run_id: str) -> Destruction:
        plain.append(flow_run_id)
        return unverified

    with (
        pytest.raises(DestroyUnverified, match="still listed"),
        box_guard(run, lambda _: unverified, keep=False, in_a_hurry=hurry),
    ):
        pass
    assert plain == [FLOW_RUN]


def test_without_a_lease_the_body_never_runs(run: Run) -> None:
    run.store = dead_store()
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:9"), box_guard(run, _destroyed, keep=False):
        pytest.fail("the body ran without a lease")


def test_the_lease_thread_ends_with_the_guard(run: Run) -> None:
    with box_guard(run, _destroyed, keep=False):
        assert "lease" in {thread.name for thread in threading.enumerate()}
    assert "lease" not in {thread.name for thread in threading.enumerate()}


def test_keep_keeps_until_it_expires_and_the_hook_honours_it(run: Run, pretend: Pretend) -> None:
    box = pretend.rented()
    with pytest.raises(RuntimeError), box_guard(run, _destroyed, keep=True):
        raise RuntimeError("something to debug")
    assert [made.id for made in pretend.market.alive()] == [box]
    lease = read_lease(run.store, FLOW_RUN)
    assert lease is not None and lease.hold_until == pytest.approx(time.time() + 2 * 3600, abs=60)
    assert lease.expires_at <= time.time()
    assert run.held_until == lease.hold_until, "the dead-man switch must not end it before"
    assert destroy_in_a_hurry(FLOW_RUN).kept_until == lease.hold_until
    assert pretend.market.alive()


def test_a_kept_box_is_an_alarm_that_says_how_long_and_how_to_end_it(run: Run, pretend: Pretend) -> None:
    pretend.rented()
    with pytest.raises(RuntimeError), box_guard(run, _destroyed, keep=True):
        raise RuntimeError("something to debug")
    (alarm,) = alarms.standing(run.store)
    assert (alarm.what, alarm.subject) == ("box_kept", FLOW_RUN)
    assert "2.0 h more" in alarm.reason and f"python -m flows release {FLOW_RUN}" in alarm.do and "console" in alarm.do


def test_when_the_boxes_are_given_back_nobody_answers_for_what_comes_to_light_later(run: Run, pretend: Pretend) -> None:
    with box_guard(run, lambda _: Destruction(flow_run_id=FLOW_RUN), keep=False):
        pass
    lease = read_lease(run.store, FLOW_RUN)
    assert lease is not None and lease.expires_at <= time.time()


def test_the_box_of_a_run_that_succeeded_is_never_kept(run: Run, pretend: Pretend) -> None:
    pretend.rented()
    with box_guard(run, _destroyed, keep=True):
        pass
    assert not pretend.market.alive()


def test_the_box_of_a_run_whose_money_is_spent_is_never_kept(run: Run, pretend: Pretend) -> None:
    pretend.rented()
    with pytest.raises(BudgetReached), box_guard(run, _destroyed, keep=True):
        raise BudgetReached("spent about $30")
    assert not pretend.market.alive()


def test_a_box_that_nobody_can_log_in_to_is_never_kept(run: Run, pretend: Pretend) -> None:
    pretend.rented()
    run.box = None
    with pytest.raises(DestroyUnverified), box_guard(run, _destroyed, keep=True):
        raise DestroyUnverified("an earlier box may still bill")
    assert not pretend.market.alive() and (lease := read_lease(run.store, FLOW_RUN)) and lease.hold_until is None


def test_keep_does_not_swallow_what_the_body_raised(run: Run, pretend: Pretend) -> None:
    pretend.rented()
    with pytest.raises(RuntimeError, match="of the body"), box_guard(run, _destroyed, keep=True):
        raise RuntimeError("of the body")
    assert pretend.market.alive()


def test_a_hold_that_cannot_be_written_destroys(run: Run, pretend: Pretend) -> None:
    pretend.rented()

    def fail() -> None:
        run.store.bucket = "gone"
        raise RuntimeError("something to debug")

    with pytest.raises(RuntimeError), box_guard(run, _destroyed, keep=True):
        fail()
    assert not pretend.market.alive()


@pytest.mark.parametrize(("word", "kept"), [("0", False), ("false", False), ("no", False), ("", False), ("1", True)])
def test_the_keep_flag_is_read_by_its_value(
    run: Run, pretend: Pretend, monkeypatch: pytest.MonkeyPatch, word: str, kept: bool
) -> None:
    from tasks.settings import read_settings

    monkeypatch.setenv("LIVERY_KEEP_BOX", word)
    run.settings = read_settings()
    pretend.rented()
    with pytest.raises(RuntimeError), box_guard(run, _destroyed, keep=run.settings.keep_box):
        raise RuntimeError("something to debug")
    assert bool(pretend.market.alive()) is kept


def test_signals_do_nothing_while_a_box_goes_back_and_come_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with signals_ignored():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_may_use_the_guard_too() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with signals_ignored():
                pass
        except ValueError as error:  # what signal.signal raises outside the main thread
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed


PROGRAM = """
import signal, sys, time
from tasks.guard import box_guard
from tasks.settings import read_settings
from tasks.stores import open_store
from tests.tasks.test_guard import Run

class Terminated(BaseException): pass
def raise_(*_): raise Terminated
signal.signal(signal.SIGTERM, raise_)
settings = read_settings()

def slow_destroy(run):
    print("destroying", flush=True)
    time.sleep(1.5)
    from tasks.destroy import destroy_in_a_hurry
    result = destroy_in_a_hurry(run.flow_run_id)
    print("destroyed", result.gone, flush=True)
    return result

with box_guard(Run(open_store(settings), settings), slow_destroy, keep=False):
    print("training", flush=True)
    time.sleep(60)
"""


def test_a_second_sigterm_does_not_interrupt_the_destroy(run: Run, pretend: Pretend) -> None:
    box = pretend.rented()
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": root}
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], stdout=subprocess.PIPE, text=True, env=environ
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "training\n"
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "destroying\n"
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == f"destroyed ({box},)\n"
        assert child.wait(30) != 0, "the first signal still ends the process"
    finally:
        child.kill()
    assert not pretend.market.alive()


def test_the_hook_needs_nothing_but_the_environment_and_the_id(run: Run, pretend: Pretend) -> None:
    """As Prefect runs it after the flow's process is dead: a fresh process that imports the hook by name."""
    box = pretend.rented()
    program = (
        "import importlib, types\n"
        "hook = getattr(importlib.import_module('tasks.guard'), 'destroy_hook')\n"
        f"hook(None, types.SimpleNamespace(id='{FLOW_RUN}'), types.SimpleNamespace(name='Crashed'))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=environ)
    assert pretend.market.contracts[box].gone


def test_the_hook_ends_well_where_no_receipt_can_be_written(
    run: Run, pretend: Pretend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace as Made

    pretend.rented()
    monkeypatch.setenv("LIVERY_S3_ENDPOINT_URL", "http://127.0.0.1:9")
    destroy_hook(None, Made(id=FLOW_RUN), Made(name="Failed"))  # type: ignore[arg-type]
    assert not pretend.market.alive()
    assert "no receipt" in caplog.text
