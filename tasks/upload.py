"""Uplink monitoring: a checkpoint is worth nothing until it is in the bucket, and an uplink can die in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable

from tasks.errors import TransferFailed
from tasks.phase import RunView
from tasks.rules.stalls import Sample, judge_transfer
from training.contract.events import Transfer
from training.contract.recipe import Budget


class UplinkWatch:
    """Judges the last upload of a phase against `budget.upload_s` and `budget.stall_s`. Call it once a poll."""

    def __init__(self, phase: str, budget: Budget, clock: Callable[[], float]) -> None:
        self._phase, self._budget, self._clock = phase, budget, clock
        self._trained_at: float | None = None
        self._what = ""
        self._samples: list[Sample] = []

    def __call__(self, view: RunView) -> None:
        """TransferFailed if the upload stands still or cannot finish within its budget."""
        phase = view.phase(self._phase)
        if phase.end is None or phase.durable_complete:
            return
        now = self._clock()
        self._trained_at = now if self._trained_at is None else self._trained_at
        if phase.upload is None or phase.upload.finished:
            self._await_its_turn(now)
        else:
            self._judge(phase.upload, now)

    def _await_its_turn(self, now: float) -> None:
        """Nothing is being sent: the last checkpoint waits for an earlier one, or its manifest is on its way."""
        assert self._trained_at is not None
        if now - self._trained_at > self._budget.upload_s:
            raise TransferFailed(
                f"upload of {self._phase}: not durable {now - self._trained_at:.0f} s after training, budget.upload_s = {self._budget.upload_s}"
            )

    def _judge(self, upload: Transfer, now: float) -> None:
        assert self._trained_at is not None
        if upload.what != self._what:
            self._what, self._samples = upload.what, []
        self._samples.append(Sample(now, upload.done_bytes))
        began = self._samples[0].at
        verdict = judge_transfer(
            self._what,
            self._samples,
            upload.total_bytes,
            started_at=began,
            now=now,
            budget_s=max(1.0, self._budget.upload_s - (began - self._trained_at)),
            stall_s=self._budget.stall_s,
        )
        if verdict.state != "ok":
            raise TransferFailed(verdict.sentence)
