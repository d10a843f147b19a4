"""Watching the runner: the box trains by itself, this side reads its events in short polls and never starts a second one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tasks.domain import Box, Instance
from tasks.errors import BoxError, BoxLost, BudgetReached, MarketError, RunAborted
from tasks.remote.jobs import EventTail, Jobs, JobState
from tasks.rules.interruption import contract_ending, money_over, price_rise, time_over
from tasks.rules.stalls import Headway, runner_silent, step_hangs
from tasks.silence import MarketWord
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
# For a runner told to stop to save, once the step that it is in has ended; the upload of what it saved comes on top.
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
# A box that answers is asked about seldom, for its price and the end of its contract.
_LOOK_EVERY_S = 60.0


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
    saved_at: dict[int, float] = field(default_factory=dict)
    """By step: when its checkpoint was on the box's disk."""
    started_at: float | None = None
    upload: Transfer | None = None

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
    trained_at: float | None = None
    """By the box's clock: when training last got anywhere."""
    transfers: dict[str, Transfer] = field(default_factory=dict)
    """The last word of each transfer, checkpoints' uploads and all others, by its name."""

    def absorb(self, events: Sequence[Event]) -> None:
        for event in events:
            self._absorb(event)

    def phase(self, kind: str) -> PhaseView:
        return self.phases.setdefault(kind, PhaseView(kind))

    def last_durable_at(self) -> float | None:
        moments = [view.durable_at for view in self.phases.values() if view.durable_at is not None]
        return max(moments, default=None)

    def last_kept_at(self) -> float | None:
        """Training up to then need not be done again: the newest durable checkpoint was saved then, and became durable later."""
        kept = [view.saved_at.get(view.durable.step) for view in self.phases.values() if view.durable is not None]
        return max((moment for moment in kept if moment is not None), default=None)

    def uploading(self) -> Transfer | None:
        """The upload that is under way: the one that spoke last, unless it has finished."""
        spoken = [view.upload for view in self.phases.values() if view.upload is not None]
        newest = max(spoken, key=lambda event: event.seq, default=None)
        return None if newest is None or newest.finished else newest

    def awaits_upload(self) -> bool:
        """Whether a phase was trained to its end here and its last manifest is not in the bucket."""
        return any(view.end is not None and not view.durable_complete for view in self.phases.values())

    def is_last_of_its_phase(self, upload: Transfer) -> bool:
        phase, _, step = upload.what.removeprefix("upload ").partition("/")
        view = self.phases.get(phase)
        return view is not None and view.end is not None and step == str(view.end.step)

    def unsaved_s(self) -> float:
        """Seconds of training on this box that a new box would have to do again."""
        begun = min((view.started_at for view in self.phases.values() if view.started_at is not None), default=None)
        since = self.last_kept_at() or begun
        return 0.0 if since is None or self.trained_at is None else max(0.0, self.trained_at - since)

    def step_s(self) -> float:
        """Seconds of the newest step of the slowest phase seen here; 0 before the first."""
        return max((view.newest.seconds for view in self.phases.values() if view.newest), default=0.0)

    def upload_s(self) -> float | None:
        """How long the newest checkpoint took to become durable; None if none has yet."""
        durable = [view.durable for view in self.phases.values() if view.durable is not None]
        return max(durable, key=lambda event: event.t).seconds if durable else None

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
                self.trained_at = event.t
                self._step(event)
            case Guard():
                groups = ", ".join(f"{name} {value:.3g}" for name, value in sorted(event.groups.items()))
                stage = _STAGES.get(event.stage, event.stage)
                log.info(
                    "phase %s step %d: alive: %s%s", event.phase, event.step, stage, f": {groups}" if groups else ""
                )
            case CheckpointSaved():
                self.phase(event.phase).saved_at[event.step] = event.t
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
        self.transfers[event.what] = event
        kind = event.what.removeprefix("upload ").partition("/")[0]
        if event.direction == "up" and kind in self.phases:
            self.phases[kind].upload = event


@dataclass(frozen=True)
class Around:
    """What the watcher must know of the run around its box, and whom it tells. The defaults do for a box that is watched alone."""

    headway: Headway = field(default_factory=lambda: Headway(0.0))
    max_dph_usd: float = float("inf")
    rest_s: Callable[[RunView], float] = lambda view: 0.0
    """Seconds of training that are left at this box's pace."""
    elsewhere_usd: Callable[[], float | None] = lambda: None
    """What the rest would take on the best other offer; None if there is none."""
    repriced: Callable[[float], None] = lambda dph_usd: None
    saved: Callable[[], str] = lambda: "what the manifests name is in the bucket"
    """What the bucket itself says is safe, in a sentence."""


class Watcher:
    """Reads one box's events and decides whether it still lives and is still worth its price. Times are injected so that tests wait for nothing.

    `pace` shortens the pauses between two looks at the market, as the rehearsal's clock needs it.
    """

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
        around: Around | None = None,
        pace: float = 1.0,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.view = RunView()
        self._box, self._jobs, self._tail, self._show, self._budget = box, jobs, tail, show, budget
        self._spent_usd, self._deadline, self._poll_s = spent_usd, deadline, poll_s
        self._around, self._pace, self._clock, self._sleep = around or Around(), min(1.0, pace), clock, sleep
        self._dph_usd = box.dph_usd
        self._ask_market = MarketWord(box.instance_id, lambda box_id: self._show(box_id), pace=pace, clock=clock)
        self._looked_at = 0.0
        self._job_gone = False
        self._log_offset = 0
        self._log_end = b""

    def until(self, done: Callable[[RunView], bool], *, tick: Callable[[RunView], None] = lambda view: None) -> None:
        """Poll until `done`. RunAborted, BoxLost or BudgetReached when that will never be; what can still be saved is saved before."""
        while True:
            heard = self._listen()
            tick(self.view)
            if done(self.view):
                return
            self._refuse_aborted()
            self._refuse_overspent()
            self._refuse_hung()
            # A box that speaks lives: only silence is worth a second question.
            if heard:
                self._refuse_dearer_or_ending()
            else:
                self._refuse_dead()
            self._sleep(self._poll_s)

    def _listen(self) -> bool:
        events = self._tail.read()
        self.view.absorb(events)
        self._around.headway.absorb(events, self._clock())
        return bool(events)

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
        # Near its end a run is better finished than saved.
        save_s = min(self._save_s(), self._around.rest_s(self.view))
        if over := money_over(self._budget, spent_usd=self._spent_usd(), dph_usd=self._dph_usd, save_s=save_s):
            raise BudgetReached(f"{over}; {self._wind_down()}; raise the budget and run again to go on")
        if over := time_over(self._budget, now=self._clock(), deadline=self._deadline, save_s=save_s):
            raise BudgetReached(f"{over}; {self._wind_down()}; run again to go on")

    def _refuse_hung(self) -> None:
        if hangs := step_hangs(self.view.in_step_s, self._budget.silent_s):
            raise BoxLost(f"box {self._box.instance_id}: {hangs}")

    def _refuse_dearer_or_ending(self) -> None:
        """The box works, so nothing but its price and the end of its contract is asked about, and what it has done is saved before it is left."""
        row = self._row(_LOOK_EVERY_S)
        if row is None:
            return
        save_s = self._save_s() + 2 * _LOOK_EVERY_S * self._pace
        rest_s = self._around.rest_s(self.view)
        if why := contract_ending(row.end_date, now=self._clock(), save_s=save_s, rest_s=rest_s):
            self._leave(why, "contract")
        if row.dph_total_usd is not None:
            self._judge_price(row.dph_total_usd)

    def _judge_price(self, seen_usd: float) -> None:
        why = price_rise(
            self._dph_usd,
            seen_usd,
            cap_usd=self._around.max_dph_usd,
            rest_s=self._around.rest_s(self.view),
            spent_usd=self._spent_usd(),
            max_usd=self._budget.max_usd,
            elsewhere_usd=self._around.elsewhere_usd(),
        )
        if abs(seen_usd - self._dph_usd) > 0.001 * self._dph_usd:
            log.warning(
                "box %d: its price was $%.3f/h and is $%.3f/h now", self._box.instance_id, self._dph_usd, seen_usd
            )
            self._dph_usd = seen_usd
            self._around.repriced(seen_usd)
        if why:
            self._leave(why, "price")

    def _leave(self, why: str, fault: str) -> None:
        log.warning("box %d: %s; it saves and is left", self._box.instance_id, why)
        raise BoxLost(f"box {self._box.instance_id}: {why}; {self._wind_down()}", blame="other", fault=fault)

    def _refuse_dead(self) -> None:
        job = self._poll_runner()
        if job.state in {"exited", "lost", "absent"}:
            if not self._job_gone:
                # One more round: the last events may have been written after we read them.
                self._job_gone = True
                return
            raise BoxLost(self._ended(job), blame="host" if job.state == "lost" else "other")
        self._job_gone = False
        silent_s = self._tail.silent_s(self._clock())
        if job.state == "unknown":
            self._ask_market(silent_s)
        if silent := runner_silent(silent_s, self._budget.silent_s):
            raise BoxLost(f"box {self._box.instance_id}: {silent}")

    def _poll_runner(self) -> JobState:
        job = self._jobs.poll(RUNNER, self._log_offset)
        self._log_offset = job.offset
        self._log_end = (self._log_end + job.log)[-2000:]
        return job

    def _ended(self, job: JobState) -> str:
        how = {
            "exited": f"ended with code {job.exit_code} without finishing",
            "lost": "is gone without an exit code: the box was restarted, or its processes were killed",
            "absent": "was never started here, or its folder is gone",
        }[job.state]
        said = self._log_end.decode(errors="replace").strip().splitlines()[-3:]
        return f"box {self._box.instance_id}: the runner {how}" + (f"; it said: {' | '.join(said)}" if said else "")

    def _row(self, every_s: float) -> Instance | None:
        """The market's row of a box that answers; None if it was asked a moment ago, or cannot say."""
        now = self._clock()
        if now - self._looked_at < every_s * self._pace:
            return None
        self._looked_at = now
        try:
            return self._show(self._box.instance_id)
        except MarketError as error:
            log.warning("box %d: its price and end cannot be asked for now: %s", self._box.instance_id, error)
            return None

    def _save_s(self) -> float:
        """Seconds that a runner told to stop takes for the step that it is in, its save, and the upload."""
        upload_s = self.view.upload_s()
        longest_s = self._budget.last_upload_s
        return LAST_SAVE_S + self.view.step_s() + (longest_s if upload_s is None else min(longest_s, upload_s))

    def _wind_down(self) -> str:
        """Have the runner save, upload and end; what is safe afterwards, by the bucket's own word. A box that no longer answers has nothing to add."""
        grace_s = LAST_SAVE_S + self.view.step_s() + self._budget.last_upload_s
        end = self._clock() + grace_s + 2 * LAST_SAVE_S
        try:
            self._jobs.tell_to_stop(RUNNER, grace_s=grace_s)
        except BoxError as error:
            return f"the runner could not be told to save ({error}); {self._around.saved()}"
        while self._clock() < end:
            heard, state = self._listen(), self._poll_runner().state
            if state in {"exited", "lost", "absent"} and not heard:
                break
            if state == "unknown":
                try:
                    self._ask_market(self._tail.silent_s(self._clock()))
                except BoxLost as lost:
                    return f"it was lost while it saved ({lost}); {self._around.saved()}"
            self._sleep(self._poll_s)
        return self._around.saved()
