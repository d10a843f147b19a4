"""The box's events: one JSON object a line in an append-only file, and the only word that leaves a box besides objects in the bucket.

A line has `v`, `seq`, `t` (epoch seconds, UTC), `kind` and that kind's fields. `seq` grows by one a line over all writers of the file,
so a reader that remembers its byte offset and the last `seq` notices lost lines. There are no NaN or Infinity literals.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from training.contract.model import Frozen

VERSION = 1


class _Event(Frozen):
    v: int = VERSION
    seq: int = 0
    t: float = 0.0


class RunnerStart(_Event):
    """The runner is up; it has decided where to begin."""

    kind: Literal["runner_start"] = "runner_start"
    phases: tuple[str, ...]
    done: tuple[str, ...] = ()
    """Phases whose final manifest was already in the bucket."""
    versions: dict[str, str] = {}


class PhaseStart(_Event):
    kind: Literal["phase_start"] = "phase_start"
    phase: str
    step: int
    max_steps: int
    resumed_from: str | None = None
    """Key of the manifest it goes on from; None at the phase's own beginning."""
    rows: int | None = None


class Step(_Event):
    """One optimizer step, as the trainer measured it. `loss` is None when it was not finite (the run then aborts)."""

    kind: Literal["step"] = "step"
    phase: str
    step: int
    max_steps: int
    loss: float | None
    seconds: float
    learning_rate: float | None = None
    grad_norm: float | None = None
    grad_norms: dict[str, float] = {}
    """Norm of the gradient a LoRA group, as clipped."""
    tokens: int | None = None
    """Real tokens, without padding, of all micro-batches of this step, counted on their way into the model."""
    tokens_per_s: float | None = None
    mfu: float | None = None
    """Share of the card's peak that went into useful arithmetic (training.contract.flops); None on a CPU and where the model is not understood."""
    mfu_peak: Literal["measured", "data sheet"] | None = None
    """Which peak: what the device probe reached on this very card, or what its maker promises."""
    usd: float | None = None
    """This step's seconds at the box's price."""
    usd_total: float | None = None
    """Since the runner started on this box, pauses and loading included. The bill is the market's."""
    eta_s: float | None = None
    """To the end of this phase."""
    metrics: dict[str, float] = {}
    """What the method logs of itself: reward, reward_std, rewards/chosen, kl, entropy …"""


class Heartbeat(_Event):
    """The process lives; `in_step_s` tells a long step from a hang."""

    kind: Literal["heartbeat"] = "heartbeat"
    phase: str | None = None
    step: int | None = None
    in_step_s: float | None = None
    memory_mb: float | None = None
    """Of the runner, in the box's own memory."""
    gpu_util_percent: float | None = None
    gpu_power_w: float | None = None
    """A throttled card looks busy and draws little."""
    gpu_memory_mb: float | None = None


class GroupState(Frozen):
    """One LoRA group of the adapter at a moment."""

    tensors: int
    """Number of lora_B tensors."""
    zero_b: int
    """Of these, how many are zero everywhere."""
    norm: float
    """Frobenius norm over all lora_A and lora_B of the group."""
    delta_norm: float | None = None
    """Frobenius norm of the change since the phase began."""
    digest: str
    """sha256 over names and bytes; must differ from one phase to the next."""


class Guard(_Event):
    """A liveness check that passed (a failed one is an abort)."""

    kind: Literal["guard"] = "guard"
    phase: str
    step: int
    stage: str
    """Where it was made: a stage of training.errors.Stage, or `packing`."""
    groups: dict[str, float] = {}
    """Per group what the stage measured: gradient norm, loss moved by noise, change."""


class CheckpointSaved(_Event):
    kind: Literal["checkpoint_saved"] = "checkpoint_saved"
    phase: str
    step: int
    bytes: int


class Transfer(_Event):
    """Progress of a transfer, at most every two seconds; bytes are those acknowledged by the other side (or on disk)."""

    kind: Literal["transfer"] = "transfer"
    what: str
    """`prefetch model`, `prefetch data`, `upload sft/40` …"""
    direction: Literal["down", "up"]
    done_bytes: int
    total_bytes: int
    mbps: float
    """Over the line, in the last half minute; of the whole transfer in its last word."""
    eta_s: float | None = None
    finished: bool = False
    light_bytes: int | None = None
    """What the light form of this checkpoint has; None if it cannot be sent lighter."""
    line_bytes: int = 0
    """Bytes that crossed the line in this transfer so far, all its tries and what was sent again among them: what the market bills."""


class CheckpointDurable(_Event):
    """The manifest is in the bucket: from now on losing the box loses nothing before this step."""

    kind: Literal["checkpoint_durable"] = "checkpoint_durable"
    phase: str
    step: int
    manifest: str
    bytes: int
    """Bytes really sent (blobs already there are not sent again)."""
    line_bytes: int = 0
    """Bytes that crossed the line for it, what was sent again among them: what the market bills."""
    seconds: float
    complete: bool
    light: bool = False
    """Only the adapter, in bfloat16: the next phase can begin from it, this one cannot go on from it."""


class PhaseEnd(_Event):
    """Training of the phase is over; durable only once checkpoint_durable says complete."""

    kind: Literal["phase_end"] = "phase_end"
    phase: str
    step: int
    max_steps: int
    complete: bool
    loss_first: float | None = None
    loss_last: float | None = None
    groups: dict[str, GroupState] = {}
    seconds: float = 0.0
    metrics: dict[str, float] = {}
    """Last logged metrics; for GRPO the mean reward and the share of groups without variance over the phase."""


class Notice(_Event):
    """Something a person should know: a slower path, rows dropped, a retry. Never a secret."""

    kind: Literal["notice"] = "notice"
    phase: str | None = None
    what: str
    reason: str
    routine: bool = False
    """Worth a line and no worry."""


class Evaluated(_Event):
    kind: Literal["evaluated"] = "evaluated"
    when: Literal["base", "adapter"]
    rows: int
    metrics: dict[str, float]


class Exported(_Event):
    """The final adapter lies in the bucket in PEFT's own layout."""

    kind: Literal["exported"] = "exported"
    prefix: str
    files: dict[str, int]


class Abort(_Event):
    """The run must not go on. The runner exits non-zero after this line."""

    kind: Literal["abort"] = "abort"
    phase: str | None = None
    stage: str | None = None
    """The liveness check that failed, if it was one."""
    reason: str
    group: str | None = None
    tensor: str | None = None
    likely_cause: str | None = None
    blame: Literal["user", "host", "us", "unknown"] = "unknown"
    """user: another box would fail alike, so none is rented; host: try the next offer."""


class RunnerEnd(_Event):
    kind: Literal["runner_end"] = "runner_end"
    complete: bool
    reason: str


Event = Annotated[
    RunnerStart
    | PhaseStart
    | Step
    | Heartbeat
    | Guard
    | CheckpointSaved
    | Transfer
    | CheckpointDurable
    | PhaseEnd
    | Notice
    | Evaluated
    | Exported
    | Abort
    | RunnerEnd,
    Field(discriminator="kind"),
]
_ADAPTER: TypeAdapter[Event] = TypeAdapter(Event)


class EventError(ValueError):
    """A line of the events file is not an event."""


class EventLog:
    """Appends events to one file from any number of processes of the box; each line is whole and on disk when `emit` returns."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True)

    def emit(self, event: Event) -> None:
        """Stamp `seq` and `t` and append. OSError if the disk is full: an event that cannot be written is an error, not a loss. EventError if the
        file's last line is no event: then it is not ours to write into."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            seq, end = _last_whole_line(descriptor)
            # What follows the last whole line is the beginning of one whose writer was killed or met a full disk: nobody has read it.
            os.ftruncate(descriptor, end)
            stamped = event.model_copy(update={"seq": seq + 1, "t": round(self._clock(), 3)})
            line = json.dumps(stamped.model_dump(mode="json"), allow_nan=False, separators=(",", ":")) + "\n"
            _write_all(descriptor, line.encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _last_whole_line(descriptor: int) -> tuple[int, int]:
    """`seq` of the last line that ends with its newline, and the offset after it; (0, 0) if there is none."""
    size, window = os.fstat(descriptor).st_size, 1 << 16
    while True:
        first = max(0, size - window)
        tail = os.pread(descriptor, size - first, first)
        end = tail.rfind(b"\n") + 1
        begin = tail.rfind(b"\n", 0, max(0, end - 1)) + 1
        if end and (begin or not first):
            return parse_event(tail[begin:end]).seq, first + end
        if not first:
            return 0, 0
        window *= 16


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def parse_event(line: str | bytes) -> Event:
    """One line to its typed event; EventError quotes what was seen."""
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        shown = line.decode(errors="replace") if isinstance(line, bytes) else line
        raise EventError(f"not an event: {shown[:200]!r}: {error.errors(include_url=False)[0]['msg']}") from None


def read_events(path: Path) -> Iterator[Event]:
    """All whole lines of a local events file; a last line without its newline is still being written and is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield parse_event(line)


def finite(value: Any) -> float | None:
    """A float for an event, or None where it is missing, NaN or infinite."""
    number = float(value) if value is not None else float("nan")
    return number if number == number and abs(number) != float("inf") else None
