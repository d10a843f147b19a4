"""What a run says of itself, for a person who waits for it: each event as it comes, and at the end what the time went into."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

_SILENT = ("heartbeat", "transfer")


def line(event: Any, began: float) -> str:
    """One event, and how many seconds after the start of its runner; empty for those that tell nothing."""
    if event.kind in _SILENT:
        return ""
    return f"{event.t - began:7.1f} s  {_what(event)}"


def timeline(events: Sequence[Any], starts: Sequence[float]) -> Iterator[str]:
    """Of each runner, started at these seconds since the epoch: how long after the event before it each one came, and its steps together."""
    for number, (began, until) in enumerate(zip(starts, [*starts[1:], float("inf")], strict=True), 1):
        own = [event for event in events if began <= event.t < until and event.kind not in _SILENT]
        if not own:
            yield f"runner {number}: no event"
            continue
        yield f"runner {number}: {own[-1].t - began:.1f} s"
        before = began
        for event in own:
            if event.kind != "step" and getattr(event, "stage", "") != "running":
                yield f"  {event.t - before:6.1f} s until {_what(event)}"
            before = event.t
        seconds = [event.seconds for event in own if event.kind == "step"]
        if len(seconds) > 2:
            yield (
                f"  steps: first {seconds[0]:.2f} s, second {seconds[1]:.2f} s, median of the other {len(seconds) - 2}"
                f" {statistics.median(seconds[2:]):.3f} s; {sum(seconds):.1f} s in all"
            )


def _what(event: Any) -> str:
    match event.kind:
        case "guard":
            return f"guard {event.stage}" + (f" at step {event.step}" if event.step else "")
        case "step":
            loss = "not finite" if event.loss is None else f"{event.loss:.4f}"
            return f"step {event.step} loss {loss}, {event.seconds:.2f} s"
        case "checkpoint_saved" | "checkpoint_durable":
            return f"{event.kind} {event.step}, {event.bytes / 1e9:.2f} GB"
        case "notice":
            return f"notice: {event.what}: {event.reason}"[:160]
        case "abort" | "runner_end":
            return f"{event.kind}: {event.reason}"[:300]
        case "phase_start":
            return f"phase_start {event.phase} from step {event.step}"
        case _:
            return str(event.kind)
