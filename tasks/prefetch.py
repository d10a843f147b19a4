"""The model and the data to the box: started as a detached job, watched from here by bytes, rate and budget."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tasks.errors import BoxLost, TransferFailed
from tasks.remote.jobs import EventTail, Jobs
from tasks.remote.ssh import Remote
from tasks.rules.stalls import TRIES_S, Sample, judge_transfer
from training.contract import layout
from training.contract.events import Notice, Transfer
from training.contract.recipe import Recipe

log = logging.getLogger(__name__)
JOB = "prefetch"
PREFIX = "prefetch"
_POLL_S = 1.0
_SILENT_S = 300.0
# Denied or refused; missing, or twice alike not what was promised.
_SAME_ELSEWHERE = (2, 6)


def start(remote: Remote, token: str) -> None:
    """Begin to download, or find that it is under way; returns at once, so that the training packages install meanwhile."""
    python = f"~/{layout.BOX_TRANSFER_VENV}/bin/python"
    argv = [python, "-m", "training.box.transfer", "prefetch", "--assignment", f"~/{layout.BOX_ASSIGNMENT}"]
    Jobs(remote).start(JOB, token, argv, f"~/{layout.BOX_PRIVATE_ENV}")


class Prefetch:
    """One download, watched in single looks, so that it is judged from its start on: while the packages install as well as afterwards."""

    def __init__(
        self,
        remote: Remote,
        recipe: Recipe,
        *,
        clock: Callable[[], float] = time.time,
        on_transfer: Callable[[Transfer], None] = lambda event: None,
        on_silence: Callable[[float], None] = lambda silent_s: None,
    ) -> None:
        self._recipe, self._clock = recipe, clock
        self._on_transfer, self._on_silence = on_transfer, on_silence
        self._jobs, self._tail = Jobs(remote), EventTail(remote, clock=clock)
        self._began = self._heard = clock()
        self._offset, self._output = 0, b""
        self._progress: dict[str, list[Sample]] = {}
        self._totals: dict[str, int] = {}
        self._done = False

    def look(self) -> bool:
        """Whether everything is on the box and verified. TransferFailed if it stalls, is too slow for the budget, or gave up (the rates are
        named); BoxLost if the box is silent or its job is gone."""
        if self._done:
            return True
        state = self._jobs.poll(JOB, self._offset)
        now = self._clock()
        if state.state != "unknown":
            self._heard, self._offset, self._output = now, state.offset, (self._output + state.log)[-4000:]
        else:
            self._on_silence(now - self._heard)
        self._read(now)
        if state.state == "exited" and not state.more:
            _ended(state.exit_code, self._output)
            self._done = True
        elif state.state in ("lost", "absent"):
            raise BoxLost(f"prefetch: the job is {state.state}; the box was restarted or its processes were ended")
        elif now - self._heard > _SILENT_S:
            raise BoxLost(f"prefetch: the box has not answered for {now - self._heard:.0f} s")
        elif state.state == "running":
            self._judge(now)
        return self._done

    def _read(self, now: float) -> None:
        for event in self._tail.read():
            if isinstance(event, Notice) and event.what == PREFIX:
                log.warning("prefetch: %s", event.reason)
            if isinstance(event, Transfer) and event.what.startswith(PREFIX):
                # Our clock: the box's may be off.
                self._progress.setdefault(event.what, []).append(Sample(now, event.done_bytes))
                self._totals[event.what] = event.total_bytes
                self._on_transfer(event)

    def _judge(self, now: float) -> None:
        """Model and data are judged as one: what has not been announced yet is estimated from the recipe."""
        budget = self._recipe.budget
        samples, expected = _together(self._progress), int(self._recipe.model.size_gb * 1e9)
        # The job on the box kills a stalled transfer and tries other settings; only when these too must have failed is it judged here.
        verdict = judge_transfer(
            "prefetch",
            samples,
            max(sum(self._totals.values()), expected, 1),
            started_at=self._began,
            now=now,
            budget_s=budget.prefetch_s,
            stall_s=TRIES_S * budget.stall_s,
        )
        if verdict.state != "ok":
            self._jobs.stop(JOB, 2)
            raise TransferFailed(f"{verdict.state}: {verdict.sentence}; next offer")


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
    """Wait until everything is on the box and verified; errors as of `Prefetch.look`. `on_silence` hears for how long the box has not
    answered, and may raise BoxLost sooner."""
    wait(Prefetch(remote, recipe, clock=clock, on_transfer=on_transfer, on_silence=on_silence), sleep, poll_s)


def wait(prefetch: Prefetch, sleep: Callable[[float], None] = time.sleep, poll_s: float = _POLL_S) -> None:
    while not prefetch.look():
        sleep(poll_s)


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
    # A missing file or a refused key is the same from every box; a full disk or a wrong clock (code 4) is this machine's own.
    raise TransferFailed(f"prefetch: exit code {code}: {last[0]}", blame="other" if code in _SAME_ELSEWHERE else "host")
