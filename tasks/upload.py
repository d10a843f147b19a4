"""Uplink monitoring: a checkpoint is worth nothing until it is in the bucket, and an uplink can die in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable

from tasks.errors import TransferFailed
from tasks.phase import RunView
from training.contract.events import Transfer
from training.contract.recipe import Budget


class UplinkWatch:
    """Judges the uploads of one phase against `budget.upload_s` and `budget.stall_s`. Call it once a poll."""

    def __init__(self, kind: str, budget: Budget, clock: Callable[[], float]) -> None:
        self._kind, self._budget, self._clock = kind, budget, clock
        self._began: float | None = None
        self._moved: tuple[int, float] = (-1, 0.0)

    def __call__(self, view: RunView) -> None:
        """TransferFailed if the upload stands still or cannot finish within its budget."""
        phase = view.phase(self._kind)
        if phase.durable_complete or phase.end is None:
            return
        now = self._clock()
        self._began = now if self._began is None else self._began
        self._refuse_slow(phase.upload, now - self._began, now)

    def _refuse_slow(self, upload: Transfer | None, elapsed: float, now: float) -> None:
        done = upload.done_bytes if upload else 0
        if done != self._moved[0]:
            self._moved = (done, now)
        still = now - self._moved[1]
        if still > self._budget.stall_s:
            raise TransferFailed(
                f"upload of {self._kind}: no byte for {still:.0f} s (budget.stall_s = {self._budget.stall_s})"
            )
        if upload is None or upload.finished or not upload.mbps:
            self._refuse_late(elapsed)
            return
        left_s = (upload.total_bytes - upload.done_bytes) * 8e-6 / upload.mbps
        # A projection from the first moments of a transfer is noise, so a fifth of the budget must have passed.
        if elapsed > self._budget.upload_s / 5 and elapsed + left_s > self._budget.upload_s:
            raise TransferFailed(
                f"upload of {self._kind}: {upload.mbps:.2f} Mbps leave {left_s:.0f} s for {(upload.total_bytes - upload.done_bytes) / 1e6:.1f} MB, "
                f"{elapsed:.0f} s are gone, budget.upload_s = {self._budget.upload_s}"
            )

    def _refuse_late(self, elapsed: float) -> None:
        if elapsed > self._budget.upload_s:
            raise TransferFailed(
                f"upload of {self._kind}: not durable after {elapsed:.0f} s (budget.upload_s = {self._budget.upload_s})"
            )
