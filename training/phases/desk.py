"""What every trainer shares: where things lie on the box, what it reports, how it saves, how it is told to stop.

Standard library only (and the contract), so that the runner starts at once and the counting trainer needs nothing else.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from training.box.store import Store
from training.checkpoint import Found, Identity, link_files
from training.contract.events import (
    CheckpointSaved,
    EventLog,
    GroupState,
    Guard,
    Heartbeat,
    Notice,
    PhaseEnd,
    PhaseStart,
    Step,
    finite,
)
from training.contract.manifest import Manifest, Parent
from training.contract.recipe import Assignment, Phase
from training.crew import Crew, Single
from training.phases import meter
from training.uploader import Uploader


class Interrupted(Exception):
    """SIGTERM: what could be saved is saved, and the phase is not done."""


class NotFinite(RuntimeError):
    """A loss or gradient is NaN or infinite; nothing after it may be kept."""


@dataclass(frozen=True)
class Home:
    """The box's folder, the one that the assignment lies in; see training.contract.layout."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def aborted(self) -> Path:
        """Why the last runner gave up for good; gone when one starts."""
        return self.root / "aborted.json"

    @property
    def private_env(self) -> Path:
        return self.root / "private.env"

    @property
    def work(self) -> Path:
        return self.root / "work"

    def data(self, name: str) -> Path:
        return self.root / "data" / f"{name}.jsonl"


class Pulse:
    """Where the runner is, for the heartbeat."""

    def __init__(self) -> None:
        self.phase: str | None = None
        self.step: int | None = None
        self.started = time.monotonic()
        self._began: float | None = None

    def begin_step(self, phase: str, step: int) -> None:
        self.phase, self.step, self._began = phase, step, time.monotonic()

    def end_step(self) -> float:
        """Seconds since the step began."""
        began, self._began = self._began, None
        return time.monotonic() - began if began is not None else 0.0

    def beat(self) -> Heartbeat:
        began = self._began
        in_step_s = round(time.monotonic() - began, 2) if began is not None else None
        gpu = meter.ask_gpu()
        return Heartbeat(
            phase=self.phase,
            step=self.step,
            in_step_s=in_step_s,
            memory_mb=_memory_mb(),
            gpu_util_percent=gpu.util_percent,
            gpu_power_w=gpu.power_w,
            gpu_memory_mb=gpu.memory_mb,
        )


@dataclass
class Desk:
    """One phase's desk: the trainer reports here and hands its checkpoints over."""

    assignment: Assignment
    phase: Phase
    home: Home
    events: EventLog
    pulse: Pulse
    stop: threading.Event
    uploader: Uploader
    store: Store
    identity: Identity
    start: Path | None
    """Directory of what the phase begins from: the last phase's adapter."""
    resume: Found | None = None
    resume_dir: Path | None = None
    """Files of the checkpoint to go on from; outside the trainer's own output folder, whose rotation goes by age."""
    began: float = field(default_factory=time.monotonic)
    saved_step: int = -1
    final: Parent | None = None
    """The phase's last manifest, once it is staged: what the next phase begins from."""
    crew: Crew = field(default_factory=Single)

    @property
    def name(self) -> str:
        return self.phase.name

    @property
    def output(self) -> Path:
        return self.home.work / "output" / self.name

    def told_to_stop(self) -> bool:
        """Whether anybody of the crew was. Collective."""
        return self.crew.any(self.stop.is_set())

    def clear(self, directory: Path) -> None:
        """Take away what an earlier runner left there, before anybody of the crew writes to it. Collective."""
        shutil.rmtree(directory, ignore_errors=True)
        self.crew.any(False)

    def started(self, step: int, rows: int | None) -> None:
        resumed_from = self.resume.key if self.resume else None
        self.events.emit(
            PhaseStart(phase=self.name, step=step, max_steps=self.phase.steps, resumed_from=resumed_from, rows=rows)
        )

    def guard(self, stage: str, step: int, groups: Mapping[str, float]) -> None:
        self.events.emit(Guard(phase=self.name, step=step, stage=stage, groups=dict(groups)))

    def notice(self, what: str, reason: str, *, routine: bool = False) -> None:
        self.events.emit(Notice(phase=self.name, what=what, reason=reason, routine=routine))

    @cached_property
    def _meter(self) -> meter.Meter:
        return meter.Meter.of(self.assignment, self.home.root)

    def stepped(
        self,
        step: int,
        loss: float,
        seconds: float,
        metrics: Mapping[str, float],
        *,
        tokens: int | None = None,
        rows: int | None = None,
        grad_norms: Mapping[str, float] | None = None,
    ) -> None:
        """Report one optimizer step over `rows` sequences of `tokens` together; NotFinite if its loss or gradient is not a number, after saying so
        in the events."""
        grad_norm = metrics.get("grad_norm")
        mfu = self._meter.mfu(tokens, rows, seconds)
        named = ("grad_norm", "learning_rate")
        self.events.emit(
            Step(
                phase=self.name,
                step=step,
                max_steps=self.phase.steps,
                loss=finite(loss),
                seconds=round(seconds, 4),
                learning_rate=finite(metrics.get("learning_rate")),
                grad_norm=finite(grad_norm),
                grad_norms=_finite_ones(grad_norms or {}),
                tokens=tokens,
                tokens_per_s=round(tokens / seconds, 1) if tokens is not None and seconds > 0 else None,
                mfu=round(mfu, 4) if mfu is not None else None,
                mfu_peak=self._meter.peak.source if mfu is not None and self._meter.peak else None,
                usd=round(seconds / 3600 * self.assignment.dph_usd, 6),
                usd_total=round((time.monotonic() - self.pulse.started) / 3600 * self.assignment.dph_usd, 6),
                eta_s=round((self.phase.steps - step) * seconds, 1),
                metrics=_finite_ones({name: value for name, value in metrics.items() if name not in named}),
            )
        )
        if finite(loss) is None:
            raise NotFinite(f"step {step}: the loss is {loss}")
        if grad_norm is not None and finite(grad_norm) is None:
            raise NotFinite(f"step {step}: the norm of the gradient is {grad_norm}")
        self.uploader.raise_if_failed()

    def save(
        self,
        source: Path,
        step: int,
        *,
        groups: Mapping[str, GroupState],
        losses: tuple[float | None, float | None],
        metrics: Mapping[str, float],
        extra: Sequence[str] = (),
    ) -> None:
        """Hand a checkpoint directory over to be made durable: the required files and the `extra` ones."""
        manifest = Manifest(
            run=self.assignment.run,
            phase=self.name,
            step=step,
            max_steps=self.phase.steps,
            created_at=round(time.time(), 3),
            phase_digest=self.identity.phase_digest,
            data_sha256=self.identity.data_sha256,
            parent=self.identity.parent,
            claim=self.uploader.checkpoints.claim,
            versions=self.identity.versions,
            files={},
            groups=dict(groups),
            loss_first=losses[0],
            loss_last=losses[1],
            metrics=dict(metrics),
            flow_run_id=self.assignment.flow_run_id,
            attempt=self.assignment.attempt,
        )
        staged = self.uploader.stage(source, (*self.identity.required, *extra), manifest)
        self.saved_step, self.final = step, staged.sealed
        self.events.emit(CheckpointSaved(phase=self.name, step=step, bytes=staged.bytes))

    def ended(
        self,
        step: int,
        *,
        groups: Mapping[str, GroupState],
        losses: tuple[float | None, float | None],
        metrics: Mapping[str, float],
    ) -> None:
        """Report the end of training of this phase. Interrupted if it ended early."""
        complete = step >= self.phase.steps
        self.events.emit(
            PhaseEnd(
                phase=self.name,
                step=step,
                max_steps=self.phase.steps,
                complete=complete,
                loss_first=losses[0],
                loss_last=losses[1],
                groups=dict(groups),
                seconds=round(time.monotonic() - self.began, 2),
                metrics=dict(metrics),
            )
        )
        if not complete:
            raise Interrupted(f"{self.name}: told to stop after step {step} of {self.phase.steps}")

    def keep_result(self, source: Path, names: Sequence[str]) -> Path:
        """Link the finished phase's adapter to where the next one begins; returns that directory."""
        return link_files(source, names, self.home.work / "result" / self.name)


def _finite_ones(values: Mapping[str, float]) -> dict[str, float]:
    return {name: number for name, value in values.items() if (number := finite(value)) is not None}


def _memory_mb() -> float | None:
    """Resident memory of this process, where the system tells it in /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
