"""The model and the data to the box: started as a detached job, watched from here by bytes, rate and budget."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tasks.errors import BoxLost, TransferFailed
from tasks.remote.jobs import EventTail, Jobs
from tasks.remote.ssh import Remote
from tasks.rules.stalls import Sample, judge_transfer
from training.contract import layout
from training.contract.events import Notice, Transfer
from training.contract.recipe import Recipe

log = logging.getLogger(__name__)
JOB = "prefetch"
PREFIX = "prefetch"
_POLL_S = 1.0
_SILENT_S = 300.0
_DENIED = 2


def start(remote: Remote, token: str) -> None:
    """Begin to download, or find that it is under way; returns at once, so that the training packages install meanwhile."""
    python = f"~/{layout.BOX_TRANSFER_VENV}/bin/python"
    argv = [python, "-m", "training.box.transfer", "prefetch", "--assignment", f"~/{layout.BOX_ASSIGNMENT}"]
    Jobs(remote).start(JOB, token, argv, f"~/{layout.BOX_PRIVATE_ENV}")


def watch(
    remote: Remote,
    recipe: Recipe,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    poll_s: float = _POLL_S,
    on_transfer: Callable[[Transfer], None] = lambda event: None,
    on_silence: Callable[[float], None] = lambda silent_s: None,
) -> None:
    """Wait until everything is on the box and verified.

    TransferFailed if it stalls, is too slow for the budget, or gives up (the rates are named); BoxLost if the box is silent. `on_silence` hears for
    how long it has not answered, and may raise BoxLost sooner.
    """
    jobs, tail = Jobs(remote), EventTail(remote, clock=clock)
    began = heard = clock()
    offset, output = 0, b""
    progress: dict[str, list[Sample]] = {}
    totals: dict[str, int] = {}
    while True:
        state = jobs.poll(JOB, offset)
        now = clock()
        if state.state != "unknown":
            heard, offset, output = now, state.offset, (output + state.log)[-4000:]
        else:
            on_silence(now - heard)
        for event in tail.read():
            if isinstance(event, Notice) and event.what == PREFIX:
                log.warning("prefetch: %s", event.reason)
            if isinstance(event, Transfer) and event.what.startswith(PREFIX):
                progress.setdefault(event.what, []).append(
                    Sample(now, event.done_bytes)
                )  # our clock: the box's may be off
                totals[event.what] = event.total_bytes
                on_transfer(event)
        if state.state == "exited" and not state.more:
            _ended(state.exit_code, output)
            return
        if state.state in ("lost", "absent"):
            raise BoxLost(f"prefetch: the job is {state.state}; the box was restarted or its processes were ended")
        if now - heard > _SILENT_S:
            raise BoxLost(f"prefetch: the box has not answered for {now - heard:.0f} s")
        if state.state == "running":
            _judge(recipe, progress, totals, began, now, jobs)
        sleep(poll_s)


def _judge(
    recipe: Recipe,
    progress: dict[str, list[Sample]],
    totals: dict[str, int],
    began: float,
    now: float,
    jobs: Jobs,
) -> None:
    """Model and data are judged as one: what has not been announced yet is estimated from the recipe."""
    samples = _together(progress)
    total = max(sum(totals.values()), int(recipe.model.size_gb * 1e9)) if samples else int(recipe.model.size_gb * 1e9)
    # The job on the box kills a stalled transfer and tries other settings; only when these too must have failed is it judged here.
    verdict = judge_transfer(
        "prefetch",
        samples,
        max(total, 1),
        started_at=began,
        now=now,
        budget_s=recipe.budget.prefetch_s,
        stall_s=3.5 * recipe.budget.stall_s,
    )
    if verdict.state != "ok":
        jobs.stop(JOB, 2)
        raise TransferFailed(f"{verdict.state}: {verdict.sentence}; next offer")


def _together(progress: dict[str, list[Sample]]) -> list[Sample]:
    """One series of all bytes done, from several that follow each other or run side by side."""
    latest: dict[str, int] = {}
    joined = []
    for at, what, done in sorted((s.at, what, s.done_bytes) for what, samples in progress.items() for s in samples):
        latest[what] = done
        joined.append(Sample(at, sum(latest.values())))
    return joined


def _ended(code: int | None, output: bytes) -> None:
    if code == 0:
        return
    last = output.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
    # A missing file or a refused key is the same from every box.
    raise TransferFailed(f"prefetch: exit code {code}: {last[0]}", blame="other" if code == _DENIED else "host")
