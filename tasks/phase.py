"""Watching the runner: the box trains by itself, this side reads its events in short polls and never starts a second one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tasks.domain import Box, Instance
from tasks.errors import BoxLost, BudgetReached, MarketError, RunAborted
from tasks.remote.jobs import EventTail, Jobs
from training.contract.events import (
    Abort,
    CheckpointDurable,
    CheckpointSaved,
    Evaluated,
    Event,
    Exported,
    Guard,
    Heartbeat,
    Notice,
    PhaseEnd,
    PhaseStart,
    RunnerEnd,
    RunnerStart,
    Step,
    Transfer,
)
from training.contract.recipe import Budget

log = logging.getLogger(__name__)
RUNNER = "runner"
# For a runner told to stop to end its micro-batch and save; the upload of what it saved comes on top.
LAST_SAVE_S = 30
PHASES_CAPTION = "Loss first and last, reward (mean ± deviation), of each LoRA group its norm at the end of the phase (and the norm of its change in it), and the mean pace of the steps on this box"
# What a passed liveness check measured, by its stage.
_STAGES = {
    "attach": "lora_B tensors of each group",
    "packing": "packed rows equal unpacked ones, largest difference",
    "canary": "noise in lora_B moves the loss by",
    "step1": "gradient norm of lora_B",
    "step2": "gradient norm of lora_A",
    "end": "norm of the change in this phase",
}
# Asking the market costs one of its rate-limited calls; a box that answers need not be asked about.
_MARKET_EVERY_S = 10.0
_RETURNED = {"exited", "offline", "stopped", "unknown", "frozen"}


@dataclass
class Pace:
    """Sums over the steps that were seen on this box: what a step took, made and cost on average."""

    steps: int = 0
    seconds: float = 0.0
    tokens: int = 0
    usd: float = 0.0
    busy_s: float = 0.0
    """Seconds that would have done at the card's peak, over the steps whose MFU is known."""
    known_s: float = 0.0

    def add(self, step: Step) -> None:
        self.steps += 1
        self.seconds += step.seconds
        self.tokens += step.tokens or 0
        self.usd += step.usd or 0.0
        if step.mfu is not None:
            self.busy_s += step.mfu * step.seconds
            self.known_s += step.seconds

    @property
    def step_s(self) -> float | None:
        return self.seconds / self.steps if self.steps else None

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.tokens and self.seconds else None

    @property
    def mfu(self) -> float | None:
        return self.busy_s / self.known_s if self.known_s else None


@dataclass
class PhaseView:
    """One phase as its events tell it."""

    kind: str
    max_steps: int = 0
    step: int = 0
    resumed_at: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    newest: Step | None = None
    pace: Pace = field(default_factory=lambda: Pace())
    metrics: dict[str, float] = field(default_factory=dict)
    end: PhaseEnd | None = None
    durable: CheckpointDurable | None = None
    durable_at: float | None = None
    started_at: float | None = None
    upload: Transfer | None = None
    uploads: list[Transfer] = field(default_factory=list)

    @property
    def durable_complete(self) -> bool:
        return self.durable is not None and self.durable.complete

    @property
    def percent(self) -> float:
        return 100.0 * self.step / self.max_steps if self.max_steps else 0.0

    @property
    def sentence(self) -> str:
        if not self.max_steps:
            return f"{self.kind} is being prepared"
        said = [f"{self.kind} step {self.step}/{self.max_steps}"]
        if self.loss_last is not None:
            said.append(f"loss {self.loss_last:.4f}")
        return ", ".join(said + (step_facts(self.newest) if self.newest else []))


def step_facts(step: Step) -> list[str]:
    """How fast, how dear and how far a step was, as far as it is known."""
    facts = [f"{step.seconds:.2f} s a step"] if step.seconds else []
    if step.tokens_per_s is not None:
        facts.append(f"{step.tokens_per_s:,.0f} tok/s")
    if step.mfu is not None:
        facts.append(f"MFU {100 * step.mfu:.1f} % of the {step.mfu_peak} peak")
    if step.usd_total is not None:
        facts.append(f"${step.usd_total:.2f} on this box so far")
    if step.eta_s:
        facts.append(f"{duration(step.eta_s)} left in this phase")
    return facts


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.4 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@dataclass
class RunView:
    """All that the events of one box have said so far."""

    phases: dict[str, PhaseView] = field(default_factory=dict)
    abort: Abort | None = None
    end: RunnerEnd | None = None
    exported: Exported | None = None
    evaluated: list[Evaluated] = field(default_factory=list)
    done_before: tuple[str, ...] = ()
    in_step_s: float = 0.0
    """How long the present step has gone on, by the runner's last heartbeat."""
    gpu_util_percent: float | None = None
    gpu_power_w: float | None = None

    def absorb(self, events: Sequence[Event]) -> None:
        for event in events:
            self._absorb(event)

    def phase(self, kind: str) -> PhaseView:
        return self.phases.setdefault(kind, PhaseView(kind))

    def last_durable_at(self) -> float | None:
        moments = [view.durable_at for view in self.phases.values() if view.durable_at is not None]
        return max(moments, default=None)

    def _absorb(self, event: Event) -> None:
        match event:
            case Heartbeat():
                self.in_step_s = event.in_step_s or 0.0
                self.gpu_util_percent, self.gpu_power_w = event.gpu_util_percent, event.gpu_power_w
            case RunnerStart():
                self.done_before = event.done
            case PhaseStart():
                view = self.phase(event.phase)
                view.max_steps, view.step, view.resumed_at, view.started_at = (
                    event.max_steps,
                    event.step,
                    event.step,
                    event.t,
                )
                where = f"resumed from {event.resumed_from}" if event.resumed_from else "from its beginning"
                log.info("phase %s: %d steps, %s", event.phase, event.max_steps, where)
            case Step():
                self._step(event)
            case Guard():
                groups = ", ".join(f"{name} {value:.3g}" for name, value in sorted(event.groups.items()))
                stage = _STAGES.get(event.stage, event.stage)
                log.info(
                    "phase %s step %d: alive: %s%s", event.phase, event.step, stage, f": {groups}" if groups else ""
                )
            case CheckpointSaved():
                log.info(
                    "phase %s step %d: checkpoint saved on the box, %.1f MB", event.phase, event.step, event.bytes / 1e6
                )
            case CheckpointDurable():
                view = self.phase(event.phase)
                view.durable, view.durable_at = event, event.t
                log.info(
                    "phase %s step %d: durable in the bucket (%.1f MB in %.1f s): %s",
                    event.phase,
                    event.step,
                    event.bytes / 1e6,
                    event.seconds,
                    event.manifest,
                )
            case PhaseEnd():
                self.phase(event.phase).end = event
                self.phase(event.phase).metrics.update(event.metrics)
            case Transfer():
                self._transfer(event)
            case Notice():
                log.log(logging.INFO if event.routine else logging.WARNING, "box: %s: %s", event.what, event.reason)
            case Evaluated():
                self.evaluated.append(event)
                log.info(
                    "evaluation of the %s on %d rows: %s",
                    event.when,
                    event.rows,
                    ", ".join(f"{k} {v:.3f}" for k, v in event.metrics.items()),
                )
            case Exported():
                self.exported = event
            case Abort():
                self.abort = event
            case RunnerEnd():
                self.end = event
            case _:
                pass

    def _step(self, event: Step) -> None:
        view = self.phase(event.phase)
        view.step, view.max_steps, view.newest = event.step, event.max_steps, event
        view.pace.add(event)
        view.loss_first = event.loss if view.loss_first is None else view.loss_first
        view.loss_last = event.loss if event.loss is not None else view.loss_last
        view.metrics.update(event.metrics)

    def _transfer(self, event: Transfer) -> None:
        if event.direction == "up":
            kind = event.what.removeprefix("upload ").partition("/")[0]
            if kind in self.phases:
                view = self.phases[kind]
                view.upload = event
                view.uploads.append(event)


class Watcher:
    """Reads one box's events and decides whether it still lives. Times are injected so that tests wait for nothing."""

    def __init__(
        self,
        box: Box,
        jobs: Jobs,
        tail: EventTail,
        show: Callable[[int], Instance | None],
        budget: Budget,
        *,
        spent_usd: Callable[[], float],
        deadline: float,
        poll_s: float,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.view = RunView()
        self._box, self._jobs, self._tail, self._show, self._budget = box, jobs, tail, show, budget
        self._spent_usd, self._deadline, self._poll_s, self._clock, self._sleep = (
            spent_usd,
            deadline,
            poll_s,
            clock,
            sleep,
        )
        self._asked_market_at = 0.0
        self._job_gone = False
        self._log_offset = 0
        self._log_end = b""

    def until(self, done: Callable[[RunView], bool], *, tick: Callable[[RunView], None] = lambda view: None) -> None:
        """Poll until `done`. RunAborted, BoxLost or BudgetReached when that will never be."""
        while True:
            events = self._tail.read()
            self.view.absorb(events)
            tick(self.view)
            if done(self.view):
                return
            self._refuse_aborted()
            self._refuse_overspent()
            self._refuse_hung()
            # A box that speaks lives: only silence is worth a second question.
            if not events:
                self._refuse_dead()
            self._sleep(self._poll_s)

    def _refuse_aborted(self) -> None:
        abort = self.view.abort
        if abort is None:
            return
        details = [
            abort.reason,
            *(
                f"{name} {value}"
                for name, value in (
                    ("group", abort.group),
                    ("tensor", abort.tensor),
                    ("likely cause:", abort.likely_cause),
                )
                if value
            ),
        ]
        sentence = f"box {self._box.instance_id}: the runner stopped in phase {abort.phase or '(before the first)'}: {'; '.join(details)}"
        if abort.blame == "host":
            raise BoxLost(sentence)
        raise RunAborted(sentence)

    def _refuse_overspent(self) -> None:
        spent = self._spent_usd()
        if spent >= self._budget.max_usd:
            self._jobs.stop(RUNNER, grace_s=LAST_SAVE_S + self._budget.last_upload_s)
            raise BudgetReached(
                f"spent about ${spent:.4f} of budget.max_usd = ${self._budget.max_usd:.2f}; what the manifests name is in the bucket, raise the budget and run again to go on"
            )
        if self._clock() >= self._deadline:
            self._jobs.stop(RUNNER, grace_s=LAST_SAVE_S + self._budget.last_upload_s)
            raise BudgetReached(
                f"budget.max_hours = {self._budget.max_hours:g} is over; what the manifests name is in the bucket, run again to go on"
            )

    def _refuse_hung(self) -> None:
        """A heart may beat beside a step that never ends, and each beat is an event: only the step's own length tells."""
        if self.view.in_step_s > self._budget.silent_s:
            raise BoxLost(
                f"box {self._box.instance_id}: a step has not ended for {self.view.in_step_s:.0f} s (budget.silent_s = {self._budget.silent_s})"
            )

    def _refuse_dead(self) -> None:
        job = self._jobs.poll(RUNNER, self._log_offset)
        self._log_offset = job.offset
        self._log_end = (self._log_end + job.log)[-2000:]
        if job.state in {"exited", "lost", "absent"}:
            if not self._job_gone:
                # One more round: the last events may have been written after we read them.
                self._job_gone = True
                return
            code = f" with code {job.exit_code}" if job.exit_code is not None else ""
            said = self._log_end.decode(errors="replace").strip().splitlines()[-3:]
            sentence = f"box {self._box.instance_id}: the runner has {job.state}{code} without finishing" + (
                f"; it said: {' | '.join(said)}" if said else ""
            )
            raise BoxLost(sentence, blame="host" if job.state == "lost" else "other")
        self._job_gone = False
        if job.state == "unknown":
            self._refuse_vanished()
        silent = self._tail.silent_s(self._clock())
        if silent > self._budget.silent_s:
            raise BoxLost(
                f"box {self._box.instance_id}: no event for {silent:.0f} s (budget.silent_s = {self._budget.silent_s})"
            )

    def _refuse_vanished(self) -> None:
        """The box does not answer: ask the market, which knows of hosts that are gone. An unsure answer decides nothing."""
        now = self._clock()
        if now - self._asked_market_at < _MARKET_EVERY_S:
            return
        self._asked_market_at = now
        try:
            instance = self._show(self._box.instance_id)
        except MarketError as error:
            log.warning("box %d does not answer, nor does the market: %s", self._box.instance_id, error)
            return
        if instance is None:
            raise BoxLost(f"box {self._box.instance_id}: the market no longer has it")
        if instance.taken_back and instance.is_bid:
            raise BoxLost(f"box {self._box.instance_id}: outbid", blame="other", fault="outbid")
        if instance.actual_status in _RETURNED:
            raise BoxLost(
                f"box {self._box.instance_id}: does not answer and the market says '{instance.actual_status}'"
            )
        log.warning(
            "box %d does not answer; the market says '%s', still waiting", self._box.instance_id, instance.actual_status
        )
