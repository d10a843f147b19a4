"""A process that computes with the leader: it trains and evaluates when the leader does, tells nobody and keeps nothing."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from training.contract.recipe import Assignment
from training.crew import Crew, Dismiss, Evaluate, Train
from training.phases.desk import Desk, Home, Interrupted, Pulse


def follow(home: Home, assignment: Assignment, crew: Crew) -> None:
    """Carry out the leader's orders until it dismisses us. Whatever fails is raised."""
    while not isinstance(order := crew.order(), Dismiss):
        if isinstance(order, Evaluate):
            evaluate = import_module("training.evaluate").evaluate
            evaluate(home.model, home.data("evaluation"), assignment.recipe, order.adapter)
        else:
            _train(home, assignment, crew, order)


def _train(home: Home, assignment: Assignment, crew: Crew, order: Train) -> None:
    phase = assignment.recipe.phase(order.phase)
    # Events, uploads and the bucket are the leader's; a desk that has none of them fails where it would use one.
    nothing: Any = None
    desk = FollowersDesk(
        assignment=assignment,
        phase=phase,
        home=home,
        events=nothing,
        pulse=Pulse(),
        stop=threading.Event(),
        uploader=nothing,
        store=nothing,
        identity=nothing,
        start=order.start,
        resume=order.resume,
        resume_dir=order.resume_dir,
        crew=crew,
    )
    trainer: Any = import_module(f"training.phases.{phase.kind}")
    try:
        trainer.train(desk)
    except Interrupted:
        return  # so is the leader, who says what comes next


@dataclass
class FollowersDesk(Desk):
    """The desk of a process that nobody reads."""

    def started(self, step: int, rows: int | None) -> None:
        return

    def guard(self, stage: str, step: int, groups: Mapping[str, float]) -> None:
        return

    def notice(self, what: str, reason: str, *, routine: bool = False) -> None:
        return

    def stepped(self, step: int, loss: float, seconds: float, metrics: Mapping[str, float], **_: Any) -> None:
        return

    def save(self, source: Path, step: int, **_: Any) -> None:
        self.saved_step = step

    def ended(self, step: int, **_: Any) -> None:
        if step < self.phase.steps:
            raise Interrupted(f"{self.name}: the leader was told to stop after step {step}")

    def clear(self, directory: Path) -> None:
        self.crew.any(False)

    def keep_result(self, source: Path, names: Sequence[str]) -> Path:
        return self.home.work / "result" / self.name
