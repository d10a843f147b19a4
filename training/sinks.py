"""Trackers, fed from the events file, which stays the truth: what a tracker loses can be replayed to it.

    python -m training.sinks tensorboard --events events.jsonl --into DIR      replay a file; also trackio (a local project) and wandb

While a run trains, a thread reads the file as it grows and tells the trackers that the recipe names. One that fails is told once and left
alone: no tracker ever stops training. A run keeps its name as its id, so that it goes on in the same curves after a lost box.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from training.contract.events import Evaluated, Event, EventError, Heartbeat, Step, parse_event, read_events

PROJECT = "livery"
POLL_S = 1.0
_CLOSE_S = 15.0
Notice = Callable[[str, str], None]


class TrackerError(RuntimeError):
    """A tracker that the recipe names cannot be used on this box."""


class Sink(Protocol):
    """One tracker's run."""

    def write(self, at: int, values: Mapping[str, float]) -> None:
        """Numbers by name at a step of the whole run."""

    def close(self) -> None: ...


def require(trackers: Sequence[str]) -> None:
    """TrackerError names the package or key that a tracker lacks here; called before anything is trained."""
    for name in trackers:
        if importlib.util.find_spec(name) is None:
            raise TrackerError(
                f"trackers: {name}: the package '{name}' is not installed here; install livery[{name}], or take it out of the recipe"
            )
        if name == "wandb" and not os.environ.get("WANDB_API_KEY") and os.environ.get("WANDB_MODE") != "offline":
            raise TrackerError(
                "trackers: wandb: no WANDB_API_KEY; give LIVERY_WANDB_API_KEY, or set WANDB_MODE=offline"
            )


def open_sink(tracker: str, run: str, into: Path) -> Sink:
    """The tracker's run of that name, new or continued. TensorBoard and offline files go under `into`."""
    return _SINKS[tracker](run, into)


def numbers(event: Event) -> dict[str, float]:
    """What of an event is a curve, by name: `sft/loss`, `sft/grad_norm/attention`, `box/gpu_power_w`, `evaluation/adapter/valid_rate`."""
    if isinstance(event, Step):
        return {f"{event.phase}/{name}": value for name, value in _of_step(event)}
    if isinstance(event, Heartbeat):
        named = event.model_dump(include={"memory_mb", "gpu_util_percent", "gpu_power_w", "gpu_memory_mb"})
        return {f"box/{name}": value for name, value in named.items() if value is not None}
    if isinstance(event, Evaluated):
        return {f"evaluation/{event.when}/{name}": value for name, value in event.metrics.items()}
    return {}


class Feed:
    """Tells one sink of events, at steps counted over the whole run: phases follow each other on one axis."""

    def __init__(self, sink: Sink, steps: Mapping[str, int]) -> None:
        """`steps` are the steps of each phase of the run, in order."""
        self._sink, self._at = sink, 0
        self._before = {name: sum(list(steps.values())[:index]) for index, name in enumerate(steps)}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Step):
            self._at = self._before.get(event.phase, 0) + event.step
        if values := numbers(event):
            self._sink.write(self._at, values)


def replay(path: Path, sink: Sink) -> int:
    """Tell a sink everything that a file holds; how many events had numbers."""
    events = list(read_events(path))
    steps: dict[str, int] = {}
    for event in events:
        if event.kind == "runner_start":
            steps.update({phase: steps.get(phase, 0) for phase in event.phases})
        elif isinstance(event, Step):
            steps[event.phase] = event.max_steps
    feed = Feed(sink, steps)
    for event in events:
        feed(event)
    return sum(bool(numbers(event)) for event in events)


@contextlib.contextmanager
def following(
    trackers: Sequence[str], path: Path, run: str, steps: Mapping[str, int], notice: Notice, poll_s: float = POLL_S
) -> Iterator[None]:
    """Feed the trackers with what is appended to the events file at `path` from now on, each in a thread of its own."""
    over = threading.Event()
    begin = path.stat().st_size if path.exists() else 0
    threads = [
        threading.Thread(
            target=_follow,
            args=(name, path, begin, run, steps, notice, over, poll_s),
            name=f"tracker {name}",
            daemon=True,
        )
        for name in trackers
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            # A tracker that hangs on its network is left behind; the file has everything.
            thread.join(_CLOSE_S)


def _follow(
    tracker: str,
    path: Path,
    offset: int,
    run: str,
    steps: Mapping[str, int],
    notice: Notice,
    over: threading.Event,
    poll_s: float,
) -> None:
    try:
        sink = open_sink(tracker, run, path.parent / "trackers")
        feed = Feed(sink, steps)
        last = False
        while not last:
            last = over.wait(poll_s)  # once more after the end: the last lines are written by then
            offset = _tell(path, offset, feed)
        sink.close()
    except Exception as error:  # noqa: BLE001  protects the training from whatever somebody else's client throws
        notice(f"tracker {tracker} stopped", f"{type(error).__name__}: {error}"[:300])


def _tell(path: Path, offset: int, feed: Feed) -> int:
    """Feed the whole lines after `offset`; the offset after them."""
    if not path.exists():
        return offset
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                break
            offset += len(line)
            with contextlib.suppress(EventError):  # a newer writer's line is no reason to lose the curves
                feed(parse_event(line))
    return offset


def _of_step(event: Step) -> Iterator[tuple[str, float]]:
    names = ("loss", "seconds", "learning_rate", "grad_norm", "tokens", "tokens_per_s", "mfu", "usd_total", "eta_s")
    for name in names:
        value = getattr(event, name)
        if value is not None:
            yield name, float(value)
    for group, norm in event.grad_norms.items():
        yield f"grad_norm/{group}", norm
    yield from event.metrics.items()


class _TensorBoard:
    def __init__(self, run: str, into: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(into / "tensorboard" / run), flush_secs=10)

    def write(self, at: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, at)

    def close(self) -> None:
        self._writer.close()


class _Trackio:
    def __init__(self, run: str, into: Path) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(into / "trackio"))
        import trackio

        self._run: Any = trackio.init(
            project=PROJECT, name=run, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
        )

    def write(self, at: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=at)

    def close(self) -> None:
        self._run.finish()


class _Wandb:
    def __init__(self, run: str, into: Path) -> None:
        import wandb

        into.mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(project=PROJECT, id=run, name=run, resume="allow", dir=str(into))
        # Its own step may only grow, and a resumed run repeats the steps since its last checkpoint.
        self._run.define_metric("*", step_metric="run_step")

    def write(self, at: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "run_step": at})

    def close(self) -> None:
        self._run.finish()


_SINKS: dict[str, Callable[[str, Path], Sink]] = {"tensorboard": _TensorBoard, "trackio": _Trackio, "wandb": _Wandb}


def main(argv: Sequence[str] | None = None) -> int:
    """0 replayed, 2 the file or the tracker cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m training.sinks", description="Replay an events file into a tracker."
    )
    parser.add_argument("tracker", choices=sorted(_SINKS))
    parser.add_argument(
        "--events", type=Path, required=True, metavar="FILE", help="events.jsonl of a box or of the bucket"
    )
    parser.add_argument("--into", type=Path, required=True, metavar="DIR", help="folder for the tracker's files")
    parser.add_argument("--run", help="name of the run; by default that of the file's folder")
    arguments = parser.parse_args(argv)
    try:
        require([arguments.tracker])
        if not arguments.events.exists():
            raise TrackerError(f"--events: '{arguments.events}': no such file")
        sink = open_sink(arguments.tracker, arguments.run or arguments.events.resolve().parent.name, arguments.into)
        told = replay(arguments.events, sink)
        sink.close()
    except (TrackerError, EventError) as error:
        print(f"sinks: {error}", file=sys.stderr)
        return 2
    print(f"{told} events of {arguments.events} are in {arguments.tracker} under {arguments.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
