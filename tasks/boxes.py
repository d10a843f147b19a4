"""What the flow does with one box, step by step: plain code under the tasks of `tasks/steps.py`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tasks import hosts, install, preflight
from tasks import prefetch as prefetching
from tasks import rent as renting
from tasks.destroy import destroy_run, read_intents
from tasks.domain import Box, Label, RankedOffer
from tasks.errors import BootFailed, BoxError, BoxLost, DestroyUnverified, MarketError, OfferGone, Rejected
from tasks.flight import spent_usd
from tasks.phase import RUNNER, Watcher
from tasks.remote.bundle import box_zip, onstart
from tasks.remote.jobs import EventTail, Jobs
from tasks.remote.ssh import make_key, wait_for_login
from tasks.rules.interruption import lost_by_row
from tasks.rules.pricing import phase_s
from tasks.run import Run
from tasks.upload import UplinkWatch
from training.box.store import StoreError
from training.contract import layout
from training.contract.recipe import Assignment

log = logging.getLogger(__name__)
_PUT_S = 120


def rent(run: Run, ranked: RankedOffer, attempt: int) -> Box:
    """Rent, wait for the first login, send the first things. BoxError if this offer will not do."""
    offer = ranked.offer
    label = Label(flow_run_id=run.flow_run_id, attempt=attempt, hard_end=run.hard_end)
    run.flight.begin_attempt(attempt, label.text, offer)
    run.preflight_left_s = preflight.PREFLIGHT_S
    log.info(
        "attempt %d: offer %d on machine %d, %s, $%.3f an hour",
        attempt,
        offer.id,
        offer.machine_id,
        offer.gpu_name,
        offer.dph_total_usd,
    )
    with run.flight.span("boot"):
        began = run.clock()
        request = renting.RentRequest(
            recipe=run.recipe,
            run=run.recipe.name,
            flow_run_id=run.flow_run_id,
            attempt=attempt,
            offer=offer,
            public_key=make_key(run.key_path),
            onstart=onstart(
                hard_end=run.hard_end,
                silent_s=run.settings.deadman_silent_s,
                stalled_s=run.settings.deadman_stalled_s,
            ),
            hard_end=run.hard_end,
            hours=run.planned.hours,
        )
        try:
            instance = renting.rent(run.market, run.store, request, run.settings)
        except OfferGone as error:
            run.uncounted += 1
            raise BootFailed(f"{error}; next offer", blame="other") from None
        except Rejected as error:
            if error.instance_id is None:
                raise
            raise BootFailed(f"{error}; next offer", blame="other") from None
        run.flight.rented(instance)
        log.info("box %d is running after %.0f s", instance.id, run.clock() - began)
        box = Box(
            instance_id=instance.id,
            machine_id=offer.machine_id,
            label=label.text,
            run=run.recipe.name,
            flow_run_id=run.flow_run_id,
            attempt=attempt,
            ssh_user=run.settings.ssh_user,
            key_path=str(run.key_path),
            known_hosts_path=f"{run.key_path}-{instance.id}.known",
            dph_usd=instance.dph_total_usd or offer.dph_total_usd,
            offer=offer,
            rented_at=began,
        )
        wait_for_login(
            run.open(box, instance.endpoints),
            deadline=began + run.recipe.box.boot_s,
            poll_s=min(2.0, run.settings.poll_s),
        )
        _send_first_things(run, box)
    return box


def _send_first_things(run: Run, box: Box) -> None:
    """One zip, one assignment, one private file: all that ever goes to a box besides the wheel."""
    assignment = Assignment(
        recipe=run.recipe,
        run=run.recipe.name,
        flow_run_id=run.flow_run_id,
        attempt=box.attempt,
        bucket=run.settings.bucket,
        hard_end=run.hard_end,
        dph_usd=box.dph_usd,
        inet_up_usd_gb=box.offer.inet_up_usd_gb,
    )
    run.login.put(box_zip(), layout.BOX_ZIP, timeout_s=_PUT_S)
    run.login.put(assignment.model_dump_json(indent=1).encode(), layout.BOX_ASSIGNMENT, timeout_s=_PUT_S)
    run.send_key(run.login, run.fresh_key())
    run.login.put(b"", layout.BOX_ALIVE, timeout_s=_PUT_S)


def check(run: Run) -> None:
    with _timed(run, "preflight"):
        preflight.check_box(run.login, run.recipe, within_s=run.preflight_left_s)


def install_transfer(run: Run) -> None:
    with run.flight.span("install"):
        install.install_transfer(run.login, run.recipe, run.settings.state_dir, _ears(run))


def check_links(run: Run) -> None:
    with _timed(run, "preflight links"):
        preflight.check_links(run.login, run.recipe, within_s=run.preflight_left_s)


def start_prefetch(run: Run) -> None:
    prefetching.start(run.login, run.token)
    run.prefetch = prefetching.Prefetch(
        run.login, run.recipe, clock=run.clock, on_transfer=run.saw_bytes, on_silence=run.ask_market
    )


def install_training(run: Run) -> None:
    with run.flight.span("install"):
        ears = install.Ears(run.heard_installer, run.ask_market, meanwhile=run.downloading.look)
        install.install_training(run.login, run.recipe, run.settings.state_dir, ears)


def check_device(run: Run) -> None:
    offer = run.box.offer if run.box else None
    planned = {phase.name: phase_s(run.recipe, phase.name, offer=offer) / phase.steps for phase in run.recipe.phases}
    with run.flight.span("preflight device"):
        preflight.check_device(run.login, run.recipe, within_s=run.preflight_left_s, planned_step_s=planned)


def prefetch(run: Run) -> None:
    with run.flight.span("prefetch"):
        prefetching.wait(run.downloading)


def start_runner(run: Run) -> None:
    """One runner for all phases that are left. The token makes a second start of it impossible."""
    assert run.box is not None
    python = f"~/{layout.BOX_TRAIN_VENV}/bin/python"
    jobs = Jobs(run.login)
    jobs.start(
        RUNNER,
        run.token,
        [python, "-m", "training.runner", "--assignment", f"~/{layout.BOX_ASSIGNMENT}"],
        f"~/{layout.BOX_PRIVATE_ENV}",
    )
    run.watcher = Watcher(
        run.box,
        jobs,
        EventTail(run.login, clock=run.clock),
        run.market.show,
        run.recipe.budget,
        spent_usd=run.spent_usd,
        deadline=run.deadline,
        poll_s=run.settings.poll_s,
        around=run.around(),
        pace=run.settings.market_pace,
        clock=run.clock,
    )
    run.uplink = UplinkWatch(run.recipe.budget, run.clock, run.predicament, run.send_less, run.decided)
    log.info(
        "box %d: the runner has started; phases left: %s",
        run.box.instance_id,
        ", ".join(run.phases_left()) or "none, export only",
    )


def give_back(run: Run, error: BoxError) -> None:
    """Save what the box can still tell, destroy it, remember the machine. DestroyUnverified if it may still bill: then nothing more is rented."""
    error = _explained(run, error)
    log.warning("attempt %d given back: %s", run.attempts, error)
    keep_events(run)
    _recall_boxes(run)
    run.flight.attempt_failed(str(error).splitlines()[0], run.view.last_durable_at(), run.view.last_kept_at())
    machine_id = run.flight.flight.attempts[-1].machine_id
    run.close()
    run.watcher = run.uplink = None
    result = destroy_run(run.market, run.flow_run_id, store=run.store, poll_s=run.settings.poll_s)
    if not result.clean:
        raise DestroyUnverified(
            f"box {list(result.unverified)} may still bill: {result.reason}; no other is rented beside it"
        ) from error
    if error.blame == "host":
        _remember(run, machine_id, error)
    elif error.blame == "image":
        run.image_faults.setdefault(error.fault, []).append(machine_id)
    run.refresh()


def keep_events(run: Run) -> None:
    """The box's events, copied to the bucket while the box still answers."""
    if run.box is None or run.remote is None:
        return
    try:
        answer = run.remote.run(f"cat {layout.BOX_EVENTS}", timeout_s=20)
    except BoxError as error:  # it may be on its way out for the very reason that it cannot be reached
        log.warning("box %d: its events could not be kept: %s", run.box.instance_id, error)
        return
    if answer.code != 0:
        log.warning(
            "box %d: its events could not be kept: %s",
            run.box.instance_id,
            answer.err.decode(errors="replace").strip() or "no answer",
        )
        return
    try:
        run.store.put_bytes(
            layout.events(run.recipe.name, run.flow_run_id, run.box.attempt),
            answer.out,
            content_type="application/x-ndjson",
        )
    except StoreError as error:
        log.warning("box %d: its events are not in the bucket: %s", run.box.instance_id, error)


def _ears(run: Run) -> install.Ears:
    return install.Ears(run.heard_installer, run.ask_market)


def _explained(run: Run, error: BoxError) -> BoxError:
    """A box that fell silent in a step that does not ask the market may have been outbid: then its machine is innocent."""
    if run.box is None or not isinstance(error, BoxLost) or error.blame != "host":
        return error
    try:
        row = run.market.show(run.box.instance_id)
    except MarketError as trouble:
        log.warning("box %d: why it is lost cannot be asked for now: %s", run.box.instance_id, trouble)
        return error
    loss = lost_by_row(row, now=run.clock(), silent_s=0.0)
    return (
        BoxLost(f"{error}: {loss.sentence}", blame="other", fault=loss.fault)
        if loss and loss.blame == "other"
        else error
    )


def _recall_boxes(run: Run) -> None:
    """A box that failed before it ran is known by its intent only; the budget needs its id."""
    try:
        run.flight.know_boxes(read_intents(run.store, run.flow_run_id))
    except StoreError as error:
        log.warning("attempt %d: its intent cannot be read: %s", run.attempts, error)


def _remember(run: Run, machine_id: int, error: BoxError) -> None:
    """With what its box cost, by the price an hour: the market's own charges are known only later."""
    flight, now = run.flight.flight, run.clock()
    usd = spent_usd(flight.model_copy(update={"attempts": flight.attempts[-1:]}), now)
    offers = (ranked.offer for ranked in run.planned.offers)
    host_id = next((offer.host_id for offer in offers if offer.machine_id == machine_id), None)
    reason, kind = str(error).splitlines()[0], hosts.kind_of(error)
    try:
        hosts.remember(run.store, machine_id, kind, reason, now=now, host_id=host_id, usd=usd, run=run.recipe.name)
    except StoreError as trouble:
        log.warning("machine %d is not remembered: %s", machine_id, trouble)


@contextmanager
def _timed(run: Run, step: str) -> Iterator[None]:
    """A span that uses up the box's time for checks."""
    began = time.monotonic()
    with run.flight.span(step):
        yield
    run.preflight_left_s -= time.monotonic() - began
