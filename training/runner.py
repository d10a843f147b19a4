"""The box's entry point: runs the phases of an assignment, from wherever the bucket says that they are, to an exported adapter.

    python -m training.runner --assignment ~/livery/recipe.json

It is started detached and only watched. Everything that it says is in events.jsonl beside the assignment, everything that it makes is in
the bucket. Exit codes: 0 done, 3 aborted (the last event says why and whose fault it is), 4 another runner is at work here, 143 told to
stop (saved, not done), 1 a fault of ours.

Heavy imports wait for the trainer that needs them: the counting trainer runs without torch.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import platform
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from training.box.store import Store, StoreDenied, StoreError, StoreUnreachable
from training.box.supervisor import read_env_file
from training.box.transfer import MARKER, marker_holds
from training.checkpoint import ADAPTER_FILES, Checkpoints, Found, Identity, Uploader, UploadFailed, sha256_of
from training.contract import layout
from training.contract.events import Abort, Evaluated, EventLog, Notice, RunnerEnd, RunnerStart
from training.contract.manifest import FROZEN_VERSIONS, REQUIRED_FILES, ManifestError
from training.contract.recipe import Assignment, Phase
from training.contract.rows import RowError
from training.phases import counting
from training.phases.desk import Desk, Home, Interrupted, NotFinite, Pulse

DONE, FAULT, ABORTED, LOCKED, TOLD_TO_STOP = 0, 1, 3, 4, 143
HEARTBEAT_S = 5.0
# Set before anything of Hugging Face is imported: a box asks the hub for nothing while it trains, and sends it nothing.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


class Unusable(RuntimeError):
    """The box is not ready for the runner: something that should have been put here is not."""


@dataclass
class Progress:
    """Where the run is: the phases whose last checkpoint is safe, and what to go on from."""

    done: list[str]
    """Keys of their last manifests: what the next phase's manifests name as their parent."""
    result: Path | None
    """The adapter of the last phase done."""
    resume: Found | None = None
    resume_dir: Path | None = None

    @property
    def parent(self) -> str | None:
        return self.done[-1] if self.done else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the phases of an assignment on this box.")
    parser.add_argument("--assignment", type=Path, required=True)
    path = parser.parse_args(argv).assignment.expanduser().resolve()
    home = Home(path.parent)
    home.work.mkdir(parents=True, exist_ok=True)
    with _only_runner(home.work / "runner.lock") as alone:
        if not alone:
            print(f"another runner is at work in {home.root}; attach to it, or stop it first", file=sys.stderr)
            return LOCKED
        return _guarded(path, home)


def _guarded(path: Path, home: Home) -> int:
    """Run, and turn whatever ends the run into its last events and an exit code."""
    events, stop = EventLog(home.events), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    pulse = Pulse()
    try:
        _load_environment(home)
        assignment = Assignment.model_validate_json(path.read_text(encoding="utf-8"))
        if assignment.recipe.box.device == "cpu":
            # Before torch is imported: two threads on cores that others use cost up to 47 times the CPU of one.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        with _heartbeat(events, pulse):
            Runner(path, home, assignment, events, pulse, stop).run()
    except Interrupted as told:
        events.emit(RunnerEnd(complete=False, reason=str(told)))
        return TOLD_TO_STOP
    except Exception as error:  # noqa: BLE001  protects the flow, which would otherwise see a process vanish without a word
        traceback.print_exc()
        abort = _abort_of(error, pulse.phase)
        events.emit(abort)
        events.emit(RunnerEnd(complete=False, reason=abort.reason))
        return FAULT if abort.blame in ("unknown", "us") else ABORTED
    events.emit(RunnerEnd(complete=True, reason="all phases done, the adapter is exported"))
    return DONE


class Runner:
    """One run of one assignment on this box."""

    def __init__(
        self, path: Path, home: Home, assignment: Assignment, events: EventLog, pulse: Pulse, stop: threading.Event
    ) -> None:
        self._home, self._assignment, self._recipe = home, assignment, assignment.recipe
        self._events, self._pulse, self._stop = events, pulse, stop
        self._counting = assignment.recipe.trainer == "counting"
        self._versions = versions(counting=self._counting)
        self._required = counting.REQUIRED_FILES if self._counting else REQUIRED_FILES
        self._result_files = counting.RESULT_FILES if self._counting else ADAPTER_FILES
        self._store = Store.from_environment(assignment.bucket)
        staging = home.work / "staging"
        self._checkpoints = Checkpoints(self._store, assignment.run, staging, self._notice)
        self._uploader = Uploader(path, staging, self._checkpoints, self._notice)

    def run(self) -> None:
        """Train what is not done yet, score it, export it. Interrupted when told to stop; many other errors, see `_abort_of`."""
        try:
            self._require_inputs()
            progress = self._find_progress()
            done = self._recipe.phase_names[: len(progress.done)]
            self._events.emit(RunnerStart(phases=self._recipe.phase_names, done=done, versions=self._versions))
            if not progress.done and progress.resume is None:
                self._evaluate("base", None)
            for phase in self._recipe.phases[len(progress.done) :]:
                progress = self._train(phase, progress)
            self._pulse.phase = None
            assert progress.result is not None
            self._evaluate("adapter", progress.result)
            self._export(progress.result)
            self._wait_for_uploads()
        finally:
            self._uploader.close()

    def _train(self, phase: Phase, progress: Progress) -> Progress:
        """Train one phase; what comes back is done, and its last checkpoint is at least on its way to the bucket."""
        self._raise_if_told_to_stop()
        self._pulse.phase = phase.name
        desk = Desk(
            assignment=self._assignment,
            phase=phase,
            home=self._home,
            events=self._events,
            pulse=self._pulse,
            stop=self._stop,
            uploader=self._uploader,
            identity=self._identity(phase, progress.parent),
            start=progress.result,
            resume=progress.resume,
            resume_dir=progress.resume_dir,
        )
        trainer: Any = counting if self._counting else import_module(f"training.phases.{phase.kind}")
        result = trainer.train(desk)
        key = layout.manifest(self._assignment.run, phase.name, phase.steps)
        return Progress([*progress.done, key], result)

    def _find_progress(self) -> Progress:
        """The longest row of finished phases whose last result can really be fetched, and the next phase's newest usable checkpoint."""
        shutil.rmtree(self._home.work / "resume", ignore_errors=True)
        done: list[Found] = []
        damaged: list[Found] = []
        while True:
            phase = self._recipe.phases[len(done)] if len(done) < len(self._recipe.phases) else None
            found = self._newest_first(phase, done, damaged) if phase else []
            if found and found[0].manifest.complete:
                done.append(found[0])
                continue
            result = self._fetch_result(done[-1]) if done else None
            if done and result is None:
                damaged.append(done.pop())
                continue
            resume, resume_dir = self._first_usable(found)
            self._requeue([*done, *([resume] if resume else [])])
            return Progress([each.key for each in done], result, resume, resume_dir)

    def _newest_first(self, phase: Phase, done: list[Found], damaged: list[Found]) -> list[Found]:
        identity = self._identity(phase, done[-1].key if done else None)
        return [each for each in self._checkpoints.newest_first(phase.name, identity) if each not in damaged]

    def _fetch_result(self, found: Found) -> Path | None:
        into = self._home.work / "result" / found.manifest.phase
        return self._checkpoints.fetch(found, into, self._result_files)

    def _first_usable(self, found: list[Found]) -> tuple[Found | None, Path | None]:
        for each in found:
            directory = self._checkpoints.fetch(each, self._home.work / "resume" / each.manifest.phase)
            if directory is not None:
                return each, directory
        return None, None

    def _requeue(self, wanted: list[Found]) -> None:
        """Upload what an earlier runner on this box staged and did not get out; forget what is no longer of use."""
        staged = [found for found in wanted if found.directory is not None]
        keep = {found.directory for found in staged}
        for directory in (self._home.work / "staging").glob("*"):
            if directory not in keep:
                shutil.rmtree(directory, ignore_errors=True)
        for found in staged:
            assert found.directory is not None
            self._uploader.submit(found.directory, found.manifest)

    def _identity(self, phase: Phase, parent: str | None) -> Identity:
        data = self._home.data(phase.name)
        return Identity(
            phase_digest=self._recipe.phase_digest(phase.name),
            data_sha256=sha256_of(data) if data.exists() else "",
            versions=self._versions,
            parent=parent,
            required=self._required,
        )

    def _evaluate(self, when: Any, adapter: Path | None) -> None:
        if self._counting or self._recipe.evaluation.data is None:
            return
        self._raise_if_told_to_stop()
        evaluate = import_module("training.evaluate").evaluate
        rows, metrics = evaluate(self._home.model, self._home.data("evaluation"), self._recipe, adapter)
        self._events.emit(Evaluated(when=when, rows=rows, metrics=metrics))

    def _export(self, result: Path) -> None:
        self._raise_if_told_to_stop()
        export = import_module("training.export").export
        source = self._recipe.model.source
        self._events.emit(
            export(self._store, self._assignment.run, result, self._result_files, source, self._home.work)
        )

    def _wait_for_uploads(self) -> None:
        while not self._uploader.wait(timeout_s=0.5):
            self._raise_if_told_to_stop()

    def _require_inputs(self) -> None:
        if self._counting:
            return
        wanted = [self._home.model / "config.json", *(self._home.data(name) for name in self._recipe.phase_names)]
        if self._recipe.evaluation.data is not None:
            wanted.append(self._home.data("evaluation"))
        missing = [str(path.relative_to(self._home.root)) for path in wanted if not path.exists()]
        if missing:
            raise Unusable(f"not on this box: {', '.join(missing)}; run the prefetch to its end first")
        if not marker_holds(self._home.root):
            raise Unusable(f"{MARKER} is missing, or files it names are not whole; run the prefetch to its end first")

    def _raise_if_told_to_stop(self) -> None:
        if self._stop.is_set():
            raise Interrupted("told to stop between two phases")

    def _notice(self, what: str, reason: str) -> None:
        self._events.emit(Notice(phase=self._pulse.phase, what=what, reason=reason))


def versions(*, counting: bool) -> dict[str, str]:
    """What decides how a checkpoint is read, and what else may explain a difference. The counting trainer's checkpoints depend on nothing."""
    seen = {"python": platform.python_version()}
    for name in ("livery",) if counting else ("livery", *FROZEN_VERSIONS, "torch", "datasets", "accelerate"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            seen[name] = metadata.version(name)
    return seen


def _abort_of(error: Exception, phase: str | None) -> Abort:
    """Whose fault an error is decides whether another box is tried: a user's mistake would fail on every box alike."""
    reason = str(error) or type(error).__name__
    group, tensor = getattr(error, "group", None), getattr(error, "tensor", None)
    told = Abort(phase=phase, reason=reason, group=group, tensor=tensor, likely_cause=getattr(error, "cause", None))
    name = type(error).__name__
    if isinstance(error, UploadFailed):
        blame = "user" if error.user_fault else "host"
    elif isinstance(error, (ManifestError, RowError, StoreDenied, NotFinite)) or name in _USER_ERRORS:
        blame = "user"
    elif (
        isinstance(error, StoreUnreachable)
        or (isinstance(error, OSError) and error.errno in _HOST_ERRNO)
        or "CUDA error" in reason
        or name == "AcceleratorError"
    ):
        blame = "host"
    elif isinstance(error, StoreError):
        blame = "user"
    elif isinstance(error, Unusable):
        blame = "us"
    else:
        blame, told = "unknown", told.model_copy(update={"reason": f"{name}: {reason}"})
    return told.model_copy(update={"blame": blame})


# By name, since their modules import torch.
_USER_ERRORS = ("LivenessError", "ModelError", "ExpertsError", "PackingError", "OutOfMemoryError")
_HOST_ERRNO = (errno.ENOSPC, errno.EIO, errno.EROFS)


def _load_environment(home: Home) -> None:
    """Credentials from the private file, where the box's own environment does not say otherwise; caches inside the box's folder."""
    if home.private_env.exists():
        for name, value in read_env_file(str(home.private_env)).items():
            os.environ.setdefault(name, value)
    cache = {"HF_HOME": str(home.work / "cache"), "HF_DATASETS_CACHE": str(home.work / "cache" / "datasets")}
    for name, value in (_OFFLINE | cache).items():
        os.environ.setdefault(name, value)


@contextlib.contextmanager
def _only_runner(path: Path) -> Iterator[bool]:
    """Hold the lock that makes this the only runner here; the kernel releases it when the process ends, however it ends."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextlib.contextmanager
def _heartbeat(events: EventLog, pulse: Pulse) -> Iterator[None]:
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):  # a full disk is reported by the next step, not by a dead thread
                events.emit(pulse.beat())

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


if __name__ == "__main__":
    sys.exit(main())
