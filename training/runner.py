"""The box's entry point: runs the phases of an assignment, from wherever the bucket says that they are, to an exported adapter.

    python -m training.runner --assignment ~/livery/recipe.json                                on a box
    python -m training.runner --recipe FILE --folder RUN [--model DIR] [--data-dir DIR]        on this machine, with nothing around it

It is started detached and only watched. Everything that it says is in events.jsonl beside the assignment, everything that it makes is in
the bucket. Exit codes: 0 done, 2 a recipe that cannot be used, 3 aborted (the last event and aborted.json say why and whose fault it is),
4 another runner is at work here, 5 fenced (another box has claimed the run), 143 told to stop (saved, not done), 1 a fault of ours.

Heavy imports wait for the trainer that needs them: the counting trainer runs without torch.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import logging
import os
import platform
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from training import allocator, launch, sinks
from training import crew as crews
from training.box.child import Fenced
from training.box.folder import FolderStore
from training.box.prefetch import MARKER, marker_holds
from training.box.store import MachineFault, Store, StoreDenied, StoreError, StoreUnreachable, sha256_of
from training.box.transfer import load_private_env
from training.box.upload import require_unclaimed
from training.checkpoint import ADAPTER_FILES, Checkpoints, Found, Identity
from training.contract import layout
from training.contract.claims import ClaimError
from training.contract.events import Abort, Evaluated, EventError, EventLog, Guard, Notice, RunnerEnd, RunnerStart
from training.contract.manifest import (
    FROZEN_VERSIONS,
    REQUIRED_FILES,
    REQUIRED_QUANTISED,
    ManifestError,
    Parent,
)
from training.contract.model import explain
from training.contract.recipe import Assignment, Phase, Recipe, RecipeError
from training.contract.rows import RowError
from training.contract.shapes import ShapeError
from training.couriers import Commanded, Courier, InProcess
from training.errors import HostMemoryError, LivenessError, ModelError, NoCardError
from training.mirroring import Mirroring
from training.phases import counting
from training.phases.desk import Desk, Home, Interrupted, NotFinite, Pulse
from training.uploader import Uploader, UploadFailed, transfer_python

DONE, FAULT, UNUSABLE, ABORTED, LOCKED, FENCED, TOLD_TO_STOP = 0, 1, 2, 3, 4, 5, 143
HEARTBEAT_S = 5.0
# Set before anything of Hugging Face is imported: a box asks the hub for nothing while it trains, and sends it nothing.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
# What libraries say to whoever builds them, or once again what the events say by name (slow paths, packing's own convolution).
_NOISE = {
    "torchao": "Failed to load",
    "torch.utils._pytree": "register_constant",
    "transformers.integrations.hub_kernels": "is falling back to its reference",
    "transformers.trainer_utils": "mtime may not be reliable",
}
_QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}  # a log file shows no bars


class Unusable(RuntimeError):
    """The box is not ready for the runner: something that should have been put here is not."""


@dataclass
class Progress:
    """Where the run is: the phases whose last checkpoint is safe, and what to go on from."""

    done: list[Parent]
    """Their last manifests: what the next phase's manifests name as their parent."""
    result: Path | None
    """The adapter of the last phase done."""
    resume: Found | None = None
    resume_dir: Path | None = None

    @property
    def parent(self) -> Parent | None:
        return self.done[-1] if self.done else None


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    folder = (options.folder or options.assignment.parent).expanduser().resolve()
    home = Home(folder)
    rank = crews.rank_of(os.environ)
    try:
        home.work.mkdir(parents=True, exist_ok=True)
        if rank and rank[0] > 0:
            return _follow(folder / options.assignment.name, home, *rank)
        launched = launch.LAUNCHED in os.environ  # then the launcher holds the lock
        with contextlib.nullcontext(True) if launched else _only_runner(home.work / "runner.lock") as alone:
            if not alone:
                print(f"another runner is at work in {home.root}; attach to it, or stop it first", file=sys.stderr)
                return LOCKED
            if options.folder is None:
                return _guarded(folder / options.assignment.name, home, _events(home, printed=options.print))
            return _local(options, home)
    except (OSError, EventError) as error:
        # The folder or its events cannot be written, so this line is all that there will be.
        print(f"{home.events if isinstance(error, EventError) else folder} cannot be used: {error}", file=sys.stderr)
        return FAULT


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the phases of an assignment, or of a recipe on this machine.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--assignment", type=Path)
    what.add_argument("--recipe", type=Path)
    parser.add_argument("--folder", type=Path, help="with --recipe: everything of the run lies here")
    parser.add_argument("--model", type=Path, help="with --recipe: directory of the base model")
    parser.add_argument("--data-dir", type=Path, help="with --recipe: where the data files lie")
    parser.add_argument("--dph-usd", type=float, default=0.0, help="with --recipe: price of an hour, shown by the step")
    parser.add_argument("--print", action="store_true", help="with --assignment: show the events as they come")
    options = parser.parse_args(argv)
    if (options.recipe is None) != (options.folder is None):
        parser.error("--recipe and --folder go together")
    return options


def _local(options: argparse.Namespace, home: Home) -> int:
    local = import_module("training.local")
    try:
        path = local.prepare(options.recipe, home.root, options.model, options.data_dir, options.dph_usd)
        local.require_rows(home)
    except (RecipeError, RowError) as error:
        print(error, file=sys.stderr)
        return UNUSABLE
    return _guarded(path, home, _events(home, printed=True))


def _events(home: Home, *, printed: bool) -> EventLog:
    if not printed:
        return EventLog(home.events)
    log: EventLog = import_module("training.local").PrintedLog(home.events)
    return log


def _guarded(path: Path, home: Home, events: EventLog) -> int:
    """Run, and turn whatever ends the run into its last events and an exit code."""
    home.aborted.unlink(missing_ok=True)
    pulse, stop = Pulse(), _told_to_stop()
    try:
        assignment = _begin(path, home)
        sinks.require(assignment.recipe.trackers)
        if assignment.recipe.box.gpus > 1 and crews.rank_of(os.environ) is None:
            return _launched(path, home, assignment.recipe.box.gpus, printed=type(events) is not EventLog)
        with _heartbeat(events, pulse), _trackers(events, assignment):
            Runner(path, home, assignment, events, pulse, stop, _crew(assignment)).run()
    except Interrupted as told:
        events.emit(RunnerEnd(complete=False, reason=str(told)))
        return TOLD_TO_STOP
    except Exception as error:  # noqa: BLE001  protects the flow, which would otherwise see a process vanish without a word
        if launch.LAUNCHED in os.environ and _lost_a_process(error):
            return launch.LOST
        abort = _abort_of(error, pulse.phase)
        if abort.blame == "unknown":
            traceback.print_exc()  # of every other end the one line says all
        elif type(events) is EventLog:
            print(f"stopped: {abort.reason}", file=sys.stderr)
        events.emit(abort)
        _leave_word(home, abort)
        events.emit(RunnerEnd(complete=False, reason=abort.reason))
        if isinstance(error, (Fenced, RecipeError)):
            return FENCED if isinstance(error, Fenced) else UNUSABLE
        return FAULT if abort.blame in ("unknown", "us") else ABORTED
    events.emit(RunnerEnd(complete=True, reason="all phases done, the adapter is exported"))
    return DONE


def _launched(path: Path, home: Home, count: int, *, printed: bool) -> int:
    """The same once a card. What a follower ended with is told here, since the leader may have been waiting for it."""
    command = launch.command_of(["--assignment", str(path), *(["--print"] if printed else [])])
    code, said = launch.run(command, count, home.work)
    if not said:
        return code if code >= 0 else 128 - code
    # The leader has written to it since this process opened its own.
    events, abort = _events(home, printed=printed), Abort.model_validate(json.loads(said))
    events.emit(abort)
    _leave_word(home, abort)
    events.emit(RunnerEnd(complete=False, reason=abort.reason))
    return FAULT if abort.blame in ("unknown", "us") else ABORTED


def _crew(assignment: Assignment) -> crews.Crew:
    """This process's crew: itself alone, or those that were started beside it."""
    if crews.rank_of(os.environ) is None:
        return crews.Single()
    company: crews.Crew = import_module("training.sharded.company").Company(
        cards=assignment.recipe.box.device == "cuda"
    )
    return company


def _follow(path: Path, home: Home, rank: int, size: int) -> int:
    """Compute with the leader until it says that nothing comes any more."""
    # The leader is told to stop, and takes us along.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    try:
        assignment = _begin(path, home)
        import_module("training.follower").follow(home, assignment, _crew(assignment))
    except Exception as error:  # noqa: BLE001  protects the run, whose leader may wait for us without knowing why
        traceback.print_exc()
        abort = _abort_of(error, None)
        abort = abort.model_copy(update={"reason": f"process {rank} of {size}: {abort.reason}"})
        word = abort.model_dump_json(exclude={"v", "seq", "t"})
        (home.work / launch.ERROR_FILE.format(rank)).write_text(word, encoding="utf-8")
        return FAULT
    return DONE


def _told_to_stop() -> threading.Event:
    """Set by SIGTERM, and by the Ctrl-C of a person at a terminal, whose second one ends the process at once."""
    stop = threading.Event()

    def tell(number: int, _: object) -> None:
        stop.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, tell)
    return stop


def _begin(path: Path, home: Home) -> Assignment:
    """The assignment, and an environment to carry it out in. RecipeError if it cannot be read."""
    _load_environment(home)
    assignment = _read_assignment(path)
    if assignment.recipe.box.device == "cpu":
        # Before torch is imported: two threads on cores that others use cost up to 47 times the CPU of one.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    elif assignment.recipe.model.quantisation == "none":
        # A base in 4 bits is planned by what was measured without.
        allocator.grow_segments()
    return assignment


def _read_assignment(path: Path) -> Assignment:
    try:
        return Assignment.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read: {error}") from None
    except ValidationError as error:
        raise RecipeError(explain(error, path.name)) from None


class Runner:
    """One run of one assignment on this box."""

    def __init__(
        self,
        path: Path,
        home: Home,
        assignment: Assignment,
        events: EventLog,
        pulse: Pulse,
        stop: threading.Event,
        crew: crews.Crew,
    ) -> None:
        self._path, self._home, self._assignment, self._recipe = path, home, assignment, assignment.recipe
        self._events, self._pulse, self._stop, self._crew = events, pulse, stop, crew
        self._counting = assignment.recipe.trainer == "counting"
        self._versions = versions(counting=self._counting)
        self._required = counting.REQUIRED_FILES if self._counting else required_files(self._recipe)
        self._result_files = counting.RESULT_FILES if self._counting else ADAPTER_FILES
        self._store = Store.from_environment(assignment.bucket)
        staging = home.work / "staging"
        self._courier: Courier = (
            InProcess(self._store)
            if isinstance(self._store, FolderStore)
            else Commanded(path, transfer_python(), home.work, self._raise_if_told_to_stop)
        )
        self._checkpoints = Checkpoints(self._store, assignment.run, staging, self._notice, self._courier)
        self._uploader = Uploader(path, staging, self._checkpoints, self._notice, events)

    def run(self) -> None:
        """Train what is not done yet, score it, export it. Interrupted when told to stop; many other errors, see `_abort_of`."""
        mirroring: Mirroring | None = None
        try:
            self._require_inputs()
            if self._recipe.model.mirror and self._recipe.model.source.startswith("hub:"):
                mirroring = Mirroring(self._path, self._uploader.python, self._uploader.is_idle, self._notice)
            self._checkpoints.take_claim(self._assignment.flow_run_id, self._assignment.attempt)
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
            # Before the export, which takes from the last checkpoint what is in the bucket already.
            self._wait_for_uploads()
            self._export(self._uploader.light_results.get(self._recipe.phases[-1].name, progress.result))
            # Not before: told to stop while it exports, it would dismiss whom it has dismissed, and wait for nobody.
            self._crew.order(crews.Dismiss())
        except Interrupted:
            self._crew.order(crews.Dismiss())
            self._last_upload()
            raise
        finally:
            if mirroring:
                mirroring.close()
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
            store=self._store,
            identity=self._identity(phase, progress.parent),
            start=progress.result,
            resume=progress.resume,
            resume_dir=progress.resume_dir,
            crew=self._crew,
        )
        self._crew.order(crews.Train(phase.name, desk.start, desk.resume, desk.resume_dir))
        trainer: Any = counting if self._counting else import_module(f"training.phases.{phase.kind}")
        result = trainer.train(desk)
        assert desk.final is not None, "a finished phase has staged its last checkpoint"
        return Progress([*progress.done, desk.final], result)

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
            return Progress([each.as_parent for each in done], result, resume, resume_dir)

    def _newest_first(self, phase: Phase, done: list[Found], damaged: list[Found]) -> list[Found]:
        identity = self._identity(phase, done[-1].as_parent if done else None)
        return [each for each in self._checkpoints.newest_first(phase.name, identity) if each not in damaged]

    def _fetch_result(self, found: Found) -> Path | None:
        into = self._home.work / "result" / found.manifest.phase
        probe = layout.PROBE in found.manifest.files
        return self._checkpoints.fetch(found, into, (*self._result_files, *([layout.PROBE] if probe else [])))

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

    def _identity(self, phase: Phase, parent: Parent | None) -> Identity:
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
        self._crew.order(crews.Evaluate(adapter))
        evaluate = import_module("training.evaluate").evaluate
        rows, metrics, served = evaluate(self._home.model, self._home.data("evaluation"), self._recipe, adapter)
        if adapter is not None:
            last = self._recipe.phases[-1]
            self._events.emit(Guard(phase=last.name, step=last.steps, stage="serve", groups=served))
        self._events.emit(Evaluated(when=when, rows=rows, metrics=metrics))

    def _export(self, result: Path) -> None:
        self._raise_if_told_to_stop()
        # The adapter has one place in the bucket, and it belongs to the newest runner.
        require_unclaimed(self._store, self._assignment.run, self._checkpoints.claim)
        export = import_module("training.export").export
        source = self._recipe.model.source
        self._events.emit(
            export(
                self._store, self._courier, self._assignment.run, result, self._result_files, source, self._home.work
            )
        )

    def _wait_for_uploads(self) -> None:
        while not self._uploader.wait(timeout_s=0.5):
            self._raise_if_told_to_stop()

    def _last_upload(self) -> None:
        """Told to stop: what was saved gets a moment to become durable, since the box may not come back."""
        deadline = time.monotonic() + self._recipe.budget.last_upload_s
        with contextlib.suppress(UploadFailed, Fenced):  # it stays staged; the exit code is that of being told to stop
            while not self._uploader.wait(timeout_s=0.2) and time.monotonic() < deadline:
                pass

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


def required_files(recipe: Recipe) -> tuple[str, ...]:
    return REQUIRED_QUANTISED if recipe.model.quantisation == "nf4" else REQUIRED_FILES


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
    name = type(error).__name__
    blame = _blame(error, name, reason)
    if isinstance(error, Fenced):
        reason = f"fenced: {reason}"
    elif isinstance(error, OSError) and error.errno == errno.ENOSPC:
        reason = f"{reason}; what the manifests name is safe: make room, or take a larger disk, and start again"
    elif blame == "unknown":
        reason = f"{name}: {reason}"
    told = {field: getattr(error, field, None) for field in ("stage", "group", "tensor")}
    return Abort(phase=phase, reason=reason, blame=blame, likely_cause=getattr(error, "cause", None), **told)


def _lost_a_process(error: Exception) -> bool:
    """Whether a collective failed because somebody left it. Why they did, the launcher knows better."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "closed by peer"))


def _blame(error: Exception, name: str, reason: str) -> Any:
    if isinstance(error, UploadFailed):
        return "user" if error.user_fault else "host"
    if isinstance(error, _USER_FAULTS) or name in _USER_ERRORS:
        return "user"
    if isinstance(error, (StoreUnreachable, MachineFault)) or (
        isinstance(error, OSError) and error.errno in _HOST_ERRNO
    ):
        return "host"
    if isinstance(error, (NoCardError, HostMemoryError)) or "CUDA error" in reason or name == "AcceleratorError":
        return "host"
    if isinstance(error, StoreError):
        return "user"
    return "us" if isinstance(error, (Unusable, Fenced)) else "unknown"


_USER_FAULTS = (
    *(RecipeError, ManifestError, ClaimError, RowError, ShapeError, StoreDenied),
    *(NotFinite, LivenessError, ModelError, sinks.TrackerError),
)
_USER_ERRORS = ("PackingError", "OutOfMemoryError")  # by name, since their modules import torch
_HOST_ERRNO = (errno.ENOSPC, errno.EIO, errno.EROFS)


def _leave_word(home: Home, abort: Abort) -> None:
    """The abort for whoever finds the folder without its events."""
    with contextlib.suppress(OSError):  # the event, which is already written, says the same
        word = json.dumps(abort.model_dump(mode="json", exclude={"v", "seq", "t"}), indent=1)
        home.aborted.write_text(word, encoding="utf-8")


def _load_environment(home: Home) -> None:
    """Credentials from the private file, where the box's own environment does not say otherwise; caches inside the box's folder."""
    load_private_env(home.private_env)
    cache = {"HF_HOME": str(home.work / "cache"), "HF_DATASETS_CACHE": str(home.work / "cache" / "datasets")}
    for name, value in (_OFFLINE | _QUIET | cache).items():
        os.environ.setdefault(name, value)
    for logger, words in _NOISE.items():
        logging.getLogger(logger).addFilter(lambda record, words=words: words not in record.getMessage())
    # Arguments that TRL passes under their old names; the versions are pinned.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")


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


def _trackers(events: EventLog, assignment: Assignment) -> contextlib.AbstractContextManager[None]:
    recipe = assignment.recipe
    steps = {phase.name: phase.steps for phase in recipe.phases}

    def notice(what: str, reason: str) -> None:
        events.emit(Notice(what=what, reason=reason))

    return sinks.following(recipe.trackers, events.path, assignment.run, steps, notice)


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
    ended = main()
    if crews.rank_of(os.environ) is not None:
        # Taking a process group down waits for the others, who may wait for nobody any more.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended)
    sys.exit(ended)
