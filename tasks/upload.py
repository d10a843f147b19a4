"""Uplink monitoring: a checkpoint is worth nothing until it is in the bucket, and an uplink can die in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable

from tasks.errors import TransferFailed
from tasks.phase import RunView
from tasks.rules.stalls import Sample, judge_transfer
from training.contract.recipe import Budget


class UplinkWatch:
    """Judges the last upload of a phase against `budget.upload_s` and `budget.stall_s`. Call it once a poll."""

    def __init__(self, kind: str, budget: Budget, clock: Callable[[], float]) -> None:
        self._kind, self._budget, self._clock = kind, budget, clock
        self._began: float | None = None
        self._samples: list[Sample] = []

    def __call__(self, view: RunView) -> None:
        """TransferFailed if the upload stands still or cannot finish within its budget."""
        phase = view.phase(self._kind)
        if phase.end is None or phase.durable_complete:
            return
        now = self._clock()
        self._began = now if self._began is None else self._began
        upload = phase.upload
        done, total = (upload.done_bytes, upload.total_bytes) if upload and not upload.finished else (0, 1)
        self._samples.append(Sample(now, done))
        verdict = judge_transfer(
            f"upload of {self._kind}",
            self._samples,
            total,
            started_at=self._began,
            now=now,
            budget_s=self._budget.upload_s,
            stall_s=self._budget.stall_s,
        )
        if verdict.state != "ok":
            raise TransferFailed(verdict.sentence)
