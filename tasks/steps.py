"""The steps of a run as Prefect tasks: name, retries and timeout here, one call down to the plain code that does the work.

A task is called directly, never submitted: only then do timeouts and signals reach it. Nothing is cached, since the bucket is the truth.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect import runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.sync import concurrency

from tasks import artifacts, billing, boxes, offers
from tasks.destroy import destroy_run
from tasks.domain import BOX_LIMIT, Box, Destruction, RankedOffer
from tasks.errors import BoxError, InstallFailed, LiveryError, PreflightFailed, RunAborted, TransferFailed
from tasks.experience import remember_pace
from tasks.guard import box_guard
from tasks.log import to_terminal
from tasks.prepare import prepare_run
from tasks.receipt import dollars
from tasks.run import Run
from tasks.settings import settings
from tasks.upload import drop_half_sent

log = logging.getLogger(__name__)
_MINUTE, _HOUR = 60, 3600


def _unforeseen(failed: Any, run: TaskRun, state: State[Any]) -> bool:
    """Retry only what has no name: our own errors say what to do next, and doing the same again is never it."""
    try:
        state.result()
    except LiveryError:
        return False
    except Exception:  # noqa: BLE001 - anything else is the network's or a library's, and one more try is cheap
        return True
    return False


_PLAIN: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
_RETRIED: dict[str, Any] = {**_PLAIN, "retries": 2, "retry_delay_seconds": [2, 10], "retry_condition_fn": _unforeseen}


@task(name="prepare", task_run_name="prepare", timeout_seconds=_HOUR, **_RETRIED)
def prepare(recipe: str, overrides: Mapping[str, Any], fresh: bool) -> Run:
    """Everything that can be wrong for free: settings, recipe, bucket, data, market key. Nothing is rented."""
    to_terminal()
    return prepare_run(recipe, overrides, str(runtime.flow_run.id), settings(), fresh=fresh)


@task(name="plan", task_run_name="plan", timeout_seconds=10 * _MINUTE, **_RETRIED)
def plan(run: Run) -> None:
    """What it will take, and the offers that fit; shown before anything is rented."""
    planned = offers.plan_run(
        run.recipe, run.market, run.store, now=run.clock(), done=run.phases_done(), tried=run.tried
    )
    artifacts.show_plan(planned)
    log.info(
        "plan: phases %s, about %.2f h (%s), %d of %d offers fit, the best takes %s for the run, at most %s may be spent",
        ", ".join(run.phases_left()) or "none left",
        planned.hours,
        planned.hours_from,
        len(planned.offers),
        planned.found,
        dollars(planned.run_usd),
        dollars(planned.max_usd),
    )
    left_h = (run.deadline - run.clock()) / 3600
    if planned.hours > left_h:
        log.warning(
            "about %.1f h are needed and %.1f h are allowed (budget.max_hours): it will stop at a manifest and go on when it is run again",
            planned.hours,
            left_h,
        )
    run.take_off(planned)
    offers.require_credit(planned)


def rent_fit_box(run: Run) -> Box:
    """The next offers in turn, until a box passes every check. One that fails is destroyed and its machine remembered."""
    while True:
        offer = run.next_offer()
        try:
            box = rent(run, offer, run.attempts)
            check_box(run, box)
            install_transfer(run, box)
            check_links(run, box)
            boxes.start_prefetch(run)
            install_training(run, box)
            check_device(run, box)
            prefetch(run, box)
            boxes.start_runner(run)
        except BoxError as error:
            _raise_if_kept(run, error)
            give_back(run, error)
            _raise_if_hopeless(run, error)
        else:
            return box


@contextmanager
def replaced_if_lost(run: Run, box: Box) -> Iterator[None]:
    """A box lost on the way is given back and the caller's loop rents another; what it made durable stays."""
    try:
        yield
    except BoxError as error:
        _raise_if_kept(run, error)
        give_back(run, error)
        _raise_if_hopeless(run, error)
    except LiveryError:
        boxes.keep_events(run)  # the box that could tell why is destroyed next
        raise
    else:
        run.flight.attempt_done()


def _raise_if_kept(run: Run, error: BoxError) -> None:
    """A box to be debugged is not replaced: the run ends with it."""
    if run.keep and run.box is not None:
        raise error


def _raise_if_hopeless(run: Run, error: BoxError) -> None:
    """A failed check, install or transfer that is not the host's fault fails on every box alike, and each is paid for.

    What looks like the image's fault is believed when a second machine says the same: a registry may refuse one address only, and a
    compatibility library stands in the way of some drivers only.
    """
    seen_on = run.image_faults.get(error.fault, [])
    if error.blame == "image" and len(seen_on) > 1:
        raise RunAborted(
            f"box.image: {run.recipe.box.image} failed alike ({error.fault}) on machines {', '.join(map(str, seen_on))}, the last time: {error}; "
            "no other box is rented: name an image in box.image that can be pulled and runs, or wait if its registry is refusing"
        ) from error
    if error.blame == "other" and isinstance(error, (PreflightFailed, InstallFailed, TransferFailed)):
        raise RunAborted(f"{error}; another box would fail alike, so none is rented") from error


@task(
    name="rent",
    task_run_name="rent {offer.offer.gpu_name} machine {offer.offer.machine_id}",
    timeout_seconds=2 * _HOUR,
    **_PLAIN,
)
def rent(run: Run, offer: RankedOffer, attempt: int) -> Box:
    """Intent, create once, boot, log in. Not retried: the next offer is."""
    return boxes.rent(run, offer, attempt)


@task(name="check box", task_run_name="check box", timeout_seconds=10 * _MINUTE, **_RETRIED)
def check_box(run: Run, box: Box) -> None:
    """Preflight A at the first login: card, driver, memory, disk, pids, clock."""
    boxes.check(run)


@task(name="install transfer", task_run_name="install transfer", timeout_seconds=_HOUR, **_RETRIED)
def install_transfer(run: Run, box: Box) -> None:
    """The small environment that moves files, so that the model is on its way while the large one installs."""
    boxes.install_transfer(run)


@task(name="check links", task_run_name="check links", timeout_seconds=10 * _MINUTE, **_RETRIED)
def check_links(run: Run, box: Box) -> None:
    """Up- and downlink measured to the real bucket: advertised numbers are to a server next door."""
    boxes.check_links(run)


@task(name="install training", task_run_name="install training", timeout_seconds=2 * _HOUR, **_RETRIED)
def install_training(run: Run, box: Box) -> None:
    """The pinned training packages, proved by an import probe that answers with our nonce."""
    boxes.install_training(run)


@task(name="check device", task_run_name="check device", timeout_seconds=20 * _MINUTE, **_RETRIED)
def check_device(run: Run, box: Box) -> None:
    """Preflight B in the installed environment: the card really computes."""
    boxes.check_device(run)


@task(name="prefetch", task_run_name="prefetch", timeout_seconds=12 * _HOUR, **_RETRIED)
def prefetch(run: Run, box: Box) -> None:
    """The base model and the data, within the recipe's bandwidth budget."""
    boxes.prefetch(run)


@task(name="phase", task_run_name="phase {phase}", timeout_seconds=72 * _HOUR, **_RETRIED)
def train(run: Run, box: Box, phase: str) -> None:
    """Watch one phase of the box's runner until its training ends. A retry re-attaches; it never starts a second runner."""
    with run.flight.span(f"phase {phase}"):
        run.watch(lambda view: view.phase(phase).end is not None or phase in view.done_before)
    view = run.view.phase(phase)
    log.info("phase %s trained: %s", phase, view.sentence)


@task(name="upload", task_run_name="upload {phase}", timeout_seconds=12 * _HOUR, **_RETRIED)
def upload(run: Run, box: Box, phase: str) -> None:
    """Wait until the phase's last manifest is in the bucket; an uplink that will not make it is decided about."""
    with run.flight.span(f"upload {phase}"):
        run.watch(lambda view: view.phase(phase).durable_complete or phase in view.done_before)
    run.refresh()
    pace = run.view.phase(phase).pace
    remember_pace(
        run.store,
        run.recipe,
        phase,
        steps=pace.steps,
        step_s=pace.step_s,
        machine_id=box.machine_id,
        gpu_name=box.offer.gpu_name,
        now=run.clock(),
    )
    artifacts.show_phases(artifacts.phase_rows(run.recipe, run.view, run.manifests))


@task(name="evaluate", task_run_name="evaluate", timeout_seconds=12 * _HOUR, **_RETRIED)
def evaluate(run: Run, box: Box) -> None:
    """The adapter's score on the held-out rows, if the recipe has any."""
    if run.recipe.evaluation.data:
        with run.flight.span("evaluate"):
            run.watch(
                lambda view: any(event.when == "adapter" for event in view.evaluated) or view.exported is not None
            )


@task(name="export", task_run_name="export", timeout_seconds=12 * _HOUR, **_RETRIED)
def export(run: Run, box: Box) -> None:
    """Wait until the adapter lies in the bucket as stock PEFT loads it."""
    with run.flight.span("export"):
        run.watch(lambda view: view.exported is not None and view.end is not None and view.end.complete)
    run.exported = True
    run.progress(run.view, now=True)
    boxes.keep_events(run)
    artifacts.show_adapter(run.adapter_uri)
    log.info("adapter: %s", run.adapter_uri)


# No tags on what gives boxes back: Prefect asks its server for the limits of each tag before a task begins, and it may be gone.
@task(
    name="destroy",
    task_run_name="destroy",
    retries=4,
    retry_delay_seconds=[1, 2, 4, 8],
    timeout_seconds=20 * _MINUTE,
    **_PLAIN,
)
def destroy(run: Run) -> Destruction:
    """Destroy every box of this flow run and prove it by complete listings."""
    run.close()
    result = destroy_run(run.market, run.flow_run_id, store=run.store, poll_s=run.settings.poll_s)
    if result.clean:
        drop_half_sent(run.store, run.recipe.name, run.flow_run_id)
    return result


@task(name="give back", task_run_name="give back", timeout_seconds=20 * _MINUTE, **_PLAIN)
def give_back(run: Run, error: BoxError) -> None:
    """A box that will not do: save its story, destroy it, remember the machine if it is to blame."""
    boxes.give_back(run, error)


@contextmanager
def always_destroyed_and_billed(run: Run, *, keep: bool) -> Iterator[None]:
    """Whatever happens inside: boxes destroyed first, then the receipt, written even if Prefect no longer answers."""
    run.keep = keep or run.settings.keep_box
    with (
        billing.receipt_written(run),
        _slot(),
        box_guard(run, destroy, keep=run.keep),
    ):
        run.started_at = run.clock()  # budget.max_hours must not be used up by the wait for a slot
        yield


@contextmanager
def _slot() -> Iterator[None]:
    """A place among the runs that may hold a box. It is given back by its own lease if the server is gone by then: no reason to fail a run that ended well."""
    slot = concurrency(BOX_LIMIT, raise_on_lease_renewal_failure=False)
    slot.__enter__()
    try:
        yield
    finally:
        try:
            slot.__exit__(None, None, None)
        except Exception as error:  # noqa: BLE001 - protects the run's own outcome from a server that does not answer
            log.warning("the slot '%s' is not given back yet: %s: %s", BOX_LIMIT, type(error).__name__, error)
