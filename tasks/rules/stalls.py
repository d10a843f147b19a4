"""Is it still getting somewhere? Transfers by budget, stall and projected finish; the runner by its silence and the length of its step;
the whole run by when it last came forward. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from training.contract.events import Event, Heartbeat, Notice, PhaseStart, Step, Transfer

# A reading of an idle card is not always a clean zero.
IDLE_GPU_PERCENT = 1.0
# In stall rules: the job on the box tries three settings, each until nothing moves for one rule; half a rule is for its own start and end.
TRIES_S = 3.5


@dataclass(frozen=True)
class Sample:
    """Bytes acknowledged by the other side (or on disk) at a moment."""

    at: float
    done_bytes: int


@dataclass(frozen=True)
class TransferVerdict:
    state: Literal["ok", "stalled", "too slow", "over budget"]
    sentence: str
    mbps: float


def judge_transfer(
    what: str,
    samples: Sequence[Sample],
    total_bytes: int,
    *,
    started_at: float,
    now: float,
    budget_s: float,
    stall_s: float,
    done_bytes: int | None = None,
) -> TransferVerdict:
    """Judge a transfer by its samples, oldest first. `done_bytes` is given where the samples count what crosses the line, which is told
    long before the other side has acknowledged it.

    Too slow means that at the rate of the last `patience_s` seconds it would not end within the budget. Waiting for the budget
    to run out instead would pay for a box whose end is already known; judging by one short dip would lose a good one.
    """
    done = done_bytes if done_bytes is not None else samples[-1].done_bytes if samples else 0
    if done >= total_bytes:
        return TransferVerdict("ok", f"{what}: {_gb(total_bytes)} done", 0.0)
    patience = patience_s(budget_s)
    mbps = _recent_mbps(samples, started_at, now, patience)
    seen = f"{what}: {_gb(done)} of {_gb(total_bytes)} after {now - started_at:.0f} s at {mbps:.1f} Mbps"
    if now - started_at > budget_s:
        return TransferVerdict("over budget", f"{seen}, budget {budget_s:.0f} s", mbps)
    still_s = now - _last_growth(samples, started_at)
    if still_s > stall_s:
        return TransferVerdict("stalled", f"{seen}; no byte for {still_s:.0f} s, at most {stall_s:.0f}", mbps)
    remaining_s = budget_s - (now - started_at)
    # What stands still has no rate to be judged by: the box may be about to try another way, and the stall rule bounds that.
    moves = still_s <= patience / 2
    if moves and now - started_at >= patience and mbps > 0 and (total_bytes - done) * 8 / (mbps * 1e6) > remaining_s:
        wanted = (total_bytes - done) * 8 / 1e6 / remaining_s if remaining_s > 0 else float("inf")
        return TransferVerdict("too slow", f"{seen}; {wanted:.1f} Mbps are needed for {budget_s:.0f} s in all", mbps)
    return TransferVerdict("ok", seen, mbps)


def patience_s(budget_s: float) -> float:
    """How long a rate is watched before it is believed."""
    return min(120.0, budget_s / 5)


def runner_silent(silence_s: float, limit_s: float) -> str:
    """The sentence if the runner has said nothing for too long, else empty. It has a heartbeat, so a long step is no silence."""
    return "" if silence_s <= limit_s else f"no event for {silence_s:.0f} s (budget.silent_s = {limit_s:g})"


def step_hangs(in_step_s: float, limit_s: float) -> str:
    """The sentence if the step has gone on for too long, else empty. A heart beats beside a step that never ends: only its own length tells."""
    return "" if in_step_s <= limit_s else f"a step has not ended for {in_step_s:.0f} s (budget.silent_s = {limit_s:g})"


@dataclass
class Headway:
    """When a run last got anywhere. A heart beats beside a step that never ends, so heartbeats and notices are no progress, nor is a
    transfer that says the same bytes again. Outside of steps (evaluating, loading) there is nothing to count, and a busy card is the sign of work."""

    at: float
    _furthest: dict[str, int] = field(default_factory=dict)

    def mark(self, now: float) -> None:
        self.at = max(self.at, now)

    def begin_box(self, now: float) -> None:
        """A new box does again what the lost one did, and that is progress."""
        self._furthest.clear()
        self.mark(now)

    def absorb(self, events: Sequence[Event], now: float) -> None:
        """`now` is our clock: the box's may be off."""
        for event in events:
            if self._is_progress(event):
                self.mark(now)

    def _is_progress(self, event: Event) -> bool:
        match event:
            case Heartbeat():
                return event.in_step_s is None and (event.gpu_util_percent or 0.0) > IDLE_GPU_PERCENT
            case Notice():
                return False
            case PhaseStart():
                self._furthest[event.phase] = event.step
                return True
            case Step():
                return self._further(event.phase, event.step)
            case Transfer():
                return self._further(event.what, event.done_bytes)
            case _:
                return True

    def _further(self, what: str, reached: int) -> bool:
        before = self._furthest.get(what, 0)
        self._furthest[what] = max(before, reached)
        return reached > before


def _recent_mbps(samples: Sequence[Sample], started_at: float, now: float, window_s: float) -> float:
    since = max(started_at, now - window_s)
    before = [sample for sample in samples if sample.at <= since]
    base = before[-1].done_bytes if before else 0
    done = samples[-1].done_bytes if samples else 0
    return max(0, done - base) * 8 / 1e6 / (now - since) if now > since else 0.0


def _last_growth(samples: Sequence[Sample], started_at: float) -> float:
    grown_at, done = started_at, 0
    for sample in samples:
        if sample.done_bytes > done:
            grown_at, done = sample.at, sample.done_bytes
    return grown_at


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 10_000_000 else f"{count / 1e6:.2f} MB"
