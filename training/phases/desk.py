"""What every trainer shares: where things lie on the box, what it reports, how it saves, how it is told to stop.

Standard library only (and the contract), so that the runner starts at once and the counting trainer needs nothing else.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from training.checkpoint import Found, Identity, Uploader, link_files
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
from training.contract.manifest import Manifest
from training.contract.recipe import Assignment, Phase


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
        return Heartbeat(phase=self.phase, step=self.step, in_step_s=in_step_s, memory_mb=_memory_mb())


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
    identity: Identity
    start: Path | None
    """Directory of what the phase begins from: the last phase's adapter."""
    resume: Found | None = None
    resume_dir: Path | None = None
    """Files of the checkpoint to go on from; outside the trainer's own output folder, whose rotation goes by age."""
    began: float = field(default_factory=time.monotonic)
    saved_step: int = -1

    @property
    def name(self) -> str:
        return self.phase.name

    @property
    def output(self) -> Path:
        return self.home.work / "output" / self.name

    def started(self, step: int, rows: int | None) -> None:
        resumed_from = self.resume.key if self.resume else None
        self.events.emit(
            PhaseStart(phase=self.name, step=step, max_steps=self.phase.steps, resumed_from=resumed_from, rows=rows)
        )

    def guard(self, stage: str, step: int, groups: Mapping[str, float]) -> None:
        self.events.emit(Guard(phase=self.name, step=step, stage=stage, groups=dict(groups)))

    def notice(self, what: str, reason: str) -> None:
        self.events.emit(Notice(phase=self.name, what=what, reason=reason))

    def stepped(self, step: int, loss: float, seconds: float, metrics: Mapping[str, float]) -> None:
        """Report one optimizer step; NotFinite if its loss or gradient is not a number, after saying so in the events."""
        grad_norm, tokens = metrics.get("grad_norm"), metrics.get("tokens")
        named = ("grad_norm", "learning_rate", "tokens")
        self.events.emit(
            Step(
                phase=self.name,
                step=step,
                max_steps=self.phase.steps,
                loss=finite(loss),
                seconds=round(seconds, 4),
                learning_rate=finite(metrics.get("learning_rate")),
                grad_norm=finite(grad_norm),
                tokens=int(tokens) if tokens is not None else None,
                usd=round(seconds / 3600 * self.assignment.dph_usd, 6),
                eta_s=round((self.phase.steps - step) * seconds, 1),
                metrics={
                    name: number
                    for name, value in metrics.items()
                    if name not in named and (number := finite(value)) is not None
                },
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
    ) -> None:
        """Hand a checkpoint directory over to be made durable."""
        manifest = Manifest(
            run=self.assignment.run,
            phase=self.name,
            step=step,
            max_steps=self.phase.steps,
            created_at=round(time.time(), 3),
            phase_digest=self.identity.phase_digest,
            data_sha256=self.identity.data_sha256,
            parent=self.identity.parent,
            versions=self.identity.versions,
            files={},
            groups=dict(groups),
            loss_first=losses[0],
            loss_last=losses[1],
            metrics=dict(metrics),
            flow_run_id=self.assignment.flow_run_id,
            attempt=self.assignment.attempt,
        )
        size = self.uploader.stage(source, self.identity.required, manifest)
        self.saved_step = step
        self.events.emit(CheckpointSaved(phase=self.name, step=step, bytes=size))

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


def _memory_mb() -> float | None:
    """Resident memory of this process, where the system tells it in /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1)
