"""Makes checkpoints durable while training goes on.

Hard links into a staging directory (so that the trainer's own rotation cannot delete a file under the uploader), sha256 of each file, the
manifest, the upload by a child process. Not every save is sent: how often is decided by training.contract.durable, from what the uplink was
measured to do. A phase's last checkpoint is always sent; on an uplink that is too slow for it, in its light form if that is allowed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.box.child import DAMAGED, FENCED, OK, STALLED, USER, Fenced, Refused
from training.box.files import Item
from training.box.folder import FolderStore
from training.box.light import light_bytes, light_names, make_first, make_light
from training.box.store import StoreDenied, StoreError, sha256_of
from training.box.upload import require_unclaimed, store_checkpoint
from training.checkpoint import Checkpoints, Notice, link_files
from training.contract import layout
from training.contract.durable import BID_LOSSES_PER_H, LOSSES_PER_H, Interval, durable_interval
from training.contract.events import EventLog
from training.contract.events import Notice as NoticeEvent
from training.contract.manifest import FileEntry, Manifest, Parent
from training.contract.recipe import Assignment
from training.couriers import Commanded

MEASURED_BYTES = 8 << 20
"""An upload of less than this tells nothing of the uplink: its round trips take longer than its bytes."""
_PAUSES_S = (2.0, 5.0, 15.0, 30.0, 60.0)
_LIGHTER = -2
_LOOK_S = 1.0
# A changed interval is told when it differs by so much from the one that was told before.
_CHANGED = 1.5


def transfer_python() -> str:
    """The interpreter of the environment that moves files."""
    return os.environ.get("LIVERY_TRANSFER_PYTHON") or sys.executable


class UploadFailed(RuntimeError):
    """A checkpoint was not written whole, or the last one of a phase did not become durable."""

    def __init__(self, message: str, *, user_fault: bool) -> None:
        super().__init__(message)
        self.user_fault = user_fault


class _Closing(Exception):
    pass


@dataclass(frozen=True)
class Staged:
    bytes: int
    sealed: Parent | None
    """The manifest that the next phase's checkpoints name, if this was the phase's last checkpoint."""


@dataclass
class _Job:
    directory: Path
    manifest: Manifest
    final: bool
    due_at: float = 0.0
    """By the durable interval."""
    failures: int = 0
    ready_at: float = 0.0
    """After a failure."""
    light: bool = False
    """Only its light form is sent any more."""
    sent_first: bool = False

    @property
    def is_sealed(self) -> bool:
        return self.directory.suffix != ".partial"

    @property
    def what(self) -> str:
        return f"upload of {self.manifest.phase}/{self.manifest.step}"


@dataclass
class Uploader:
    """Makes checkpoints durable in the background, one child process at a time.

    The newest wins: a waiting checkpoint of a phase is dropped for a newer one of it, except the final one, which is never dropped and
    goes before everything after it, so that no later phase is durable before the one it began from.
    """

    assignment_path: Path
    staging: Path
    checkpoints: Checkpoints
    notice: Notice
    events: EventLog | None = None
    """Where an upload in this process reports; by default the file beside the assignment."""
    python: str = field(default_factory=transfer_python)
    attempts: int = 6
    pauses_s: Sequence[float] = _PAUSES_S

    def __post_init__(self) -> None:
        self.staging.mkdir(parents=True, exist_ok=True)
        self.light_results: dict[str, Path] = {}
        """Directories of the last checkpoints, by phase, that only went to the bucket in their light form."""
        self._rhythm = _Rhythm(self.assignment_path, self._tell)
        self._jobs: list[_Job] = []
        self._changed = threading.Condition()
        self._closing = False
        self._busy = False
        self._failed: UploadFailed | Fenced | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._work, name="uploader", daemon=True)
        self._thread.start()

    def stage(self, source: Path, names: Sequence[str], manifest: Manifest) -> Staged:
        """Link the checkpoint's files out of the trainer's reach and queue them. Hashing happens in the background, but for the last
        checkpoint of a phase: the next phase's manifests hold its digest. UploadFailed if a file is empty."""
        sizes = {name: (source / name).stat().st_size for name in names}
        if empty := [name for name, size in sizes.items() if size == 0]:
            raise UploadFailed(
                f"{source.name}: {', '.join(empty)} has 0 bytes right after it was saved; is the disk full?",
                user_fault=False,
            )
        partial = self.staging / f"{manifest.phase}_{manifest.step:08d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        link_files(source, names, partial)
        job = _Job(partial, manifest, manifest.complete)
        self._rhythm.saved(manifest.phase)
        sealed = self._seal(job) if job.final else None
        self._queue(job)
        return Staged(sum(sizes.values()), sealed)

    def submit(self, directory: Path, manifest: Manifest) -> None:
        """Queue what an earlier runner on this box staged."""
        self._queue(_Job(directory, manifest, manifest.complete))

    def is_idle(self) -> bool:
        """Whether the uplink is free for something that can wait."""
        with self._changed:
            now = time.monotonic()
            return not self._busy and all(max(job.due_at, job.ready_at) > now for job in self._jobs)

    def wait(self, timeout_s: float) -> bool:
        """Whether everything queued is durable, after at most `timeout_s`; nothing waits for its interval any more. UploadFailed if the last
        checkpoint of a phase was given up, Fenced if another runner has claimed the run."""
        with self._changed:
            for job in self._jobs:
                job.due_at = 0.0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._failed or not (self._jobs or self._busy), timeout_s)
            self.raise_if_failed()
            return not (self._jobs or self._busy)

    def raise_if_failed(self) -> None:
        if self._failed:
            raise self._failed

    def close(self) -> None:
        """Stop at once: a running child is killed, but what waits is hashed and stays staged for the next runner on this box."""
        with self._changed:
            self._closing = True
            if self._child and self._child.poll() is None:
                self._child.kill()
            self._changed.notify_all()
        self._thread.join(timeout=60)

    def _queue(self, job: _Job) -> None:
        with self._changed:
            for old in [each for each in self._jobs if each.manifest.phase == job.manifest.phase and not each.final]:
                if job.final or old.manifest.step < job.manifest.step:
                    self._jobs.remove(old)
                    shutil.rmtree(old.directory, ignore_errors=True)
            job.due_at = 0.0 if job.final else self._rhythm.next_at
            self._jobs.append(job)
            self._changed.notify_all()

    def _work(self) -> None:
        while job := self._next():
            try:
                self._seal(job)
                if self._closing or not self._is_time(job):
                    self._put_back(job)
                else:
                    self._upload(job)
            except Fenced as fenced:
                with self._changed:
                    self._failed, self._closing = fenced, True
            except Exception as error:  # noqa: BLE001  protects the run, which would take a dead thread's empty queue for durable checkpoints
                self._give_up_or_retry(
                    job, f"{type(error).__name__}: {error}", user_fault=isinstance(error, StoreDenied)
                )
            finally:
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _next(self) -> _Job | None:
        """The first job that is to be sealed or sent now; when closing, each that is left once."""
        with self._changed:
            while not self._closing:
                first = self._jobs[0] if self._jobs else None
                if first and (not first.is_sealed or self._is_time(first)):
                    break
                self._changed.wait(max(first.due_at, first.ready_at) - time.monotonic() if first else None)
            if not self._jobs:
                return None
            self._busy = True
            return self._jobs.pop(0)

    def _is_time(self, job: _Job) -> bool:
        return time.monotonic() >= max(job.due_at, job.ready_at)

    def _put_back(self, job: _Job) -> None:
        """Sealed and not due: unless a newer one of its phase came meanwhile, it waits."""
        with self._changed:
            if self._closing:
                return
            if any(other.manifest.phase == job.manifest.phase for other in self._jobs):
                shutil.rmtree(job.directory, ignore_errors=True)
            else:
                self._jobs.insert(0, job)

    def _seal(self, job: _Job) -> Parent:
        """Hash the files, write the manifest last, and only then give the directory its name."""
        if not job.is_sealed:
            job.manifest = _write_manifest(job.directory, job.manifest)
            final_name = job.directory.with_suffix("")
            shutil.rmtree(final_name, ignore_errors=True)
            job.directory = job.directory.rename(final_name)
        key = layout.manifest(self.checkpoints.run, job.manifest.phase, job.manifest.step)
        return Parent(key=key, sha256=sha256_of(job.directory / "manifest.json"))

    def _upload(self, job: _Job) -> None:
        store = self.checkpoints.store
        code = self._store_here(job, store) if isinstance(store, FolderStore) else self._send_somehow(job)
        if code == OK:
            shutil.rmtree(job.directory, ignore_errors=True)
            self.checkpoints.retain(job.manifest.phase, job.manifest.parent)
            self._drop_first(job)
            self._drop_stray_uploads()
        elif code == FENCED:
            require_unclaimed(store, self.checkpoints.run, self.checkpoints.claim)
            raise Fenced(f"run {self.checkpoints.run}: another runner has claimed it")
        elif not self._closing:
            self._give_up_or_retry(job, f"the transfer ended with code {code}", user_fault=code in (USER, DAMAGED))

    def _store_here(self, job: _Job, store: FolderStore) -> int:
        claim = self.checkpoints.claim or job.manifest.claim
        try:
            store_checkpoint(store, self.checkpoints.run, job.directory, claim, self._log)
        except Refused as error:
            self._tell(job.what, str(error))
            return USER
        return OK

    def _send_somehow(self, job: _Job) -> int:
        """Whole, or in the light form once that was ordered, or allowed and the whole did not make it."""
        if not job.light:
            self._rhythm.began()
            code = self._send(job.directory, obeys=job.final)
            slow = code == STALLED and job.final and self._rhythm.may_go_light
            if code != _LIGHTER and not slow:
                return code
            job.light = True
            self._tell(
                f"{job.what} goes on in its light form",
                f"{'the uplink is too slow' if slow else 'told from outside'}: {light_bytes(job.manifest.files) / 1e9:.3g} GB instead of"
                f" {job.manifest.total_bytes / 1e9:.3g}, the adapter in bfloat16 without the trainer's state",
            )
        light = self._lighten(job)
        self._send_first(job, light)
        code = self._send(light, obeys=False)
        if code == OK:
            self.light_results[job.manifest.phase] = light
        return code

    def _send_first(self, job: _Job, light: Path) -> None:
        """What matters first on a line that may die: the adapter without its routed experts, a few percent of the bytes. It fails no upload."""
        folder, prefix = job.directory.with_suffix(".first"), self._first(job)
        if job.sent_first or not (names := make_first(light, folder)):
            return
        require_unclaimed(self.checkpoints.store, self.checkpoints.run, self.checkpoints.claim)
        items = [
            Item(
                name=name,
                key=prefix + name,
                bytes=(folder / name).stat().st_size,
                sha256=sha256_of(folder / name),
            )
            for name in names
        ]
        courier = Commanded(self.assignment_path, self.python, self.staging, self._raise_if_closing)
        try:
            courier.send(f"first of {job.manifest.phase}/{job.manifest.step}", folder, items)
        except _Closing:
            return
        except (StoreError, RuntimeError) as error:
            self._tell(f"first of {job.manifest.phase}/{job.manifest.step} not sent", str(error))
            return
        job.sent_first = True
        self._tell(
            f"first of {job.manifest.phase}/{job.manifest.step} is in the bucket",
            f"the adapter without its routed experts, at {prefix}: what there is if the line dies",
        )

    def _drop_first(self, job: _Job) -> None:
        """The checkpoint is there, so nobody needs the part of it; an earlier box may have sent that."""
        shutil.rmtree(job.directory.with_suffix(".first"), ignore_errors=True)
        for each in self.checkpoints.store.list(self._first(job)) if job.final else ():
            self.checkpoints.store.delete(each.key)

    def _first(self, job: _Job) -> str:
        return layout.first(self.checkpoints.run, job.manifest.phase, job.manifest.step)

    def _raise_if_closing(self) -> None:
        if self._closing:
            raise _Closing

    def _lighten(self, job: _Job) -> Path:
        """The light form beside the staged checkpoint; its manifest names the full one as what it stands for."""
        directory = job.directory.with_suffix(".light")
        if not (directory / "manifest.json").exists():
            shutil.rmtree(directory, ignore_errors=True)
            make_light(job.directory, light_names(job.manifest.files), directory)
            _write_manifest(directory, job.manifest.model_copy(update={"stands_for": self._seal(job)}))
        return directory

    def _send(self, directory: Path, *, obeys: bool) -> int:
        """The exit code of an upload by the transfer command, or _LIGHTER if it `obeys` and was ended because less is to be sent."""
        if obeys and self._rhythm.is_told_to_go_light():
            return _LIGHTER
        command = [self.python, "-m", "training.box.transfer", "upload"]
        command += ["--assignment", str(self.assignment_path), "--directory", str(directory)]
        command += ["--claim", str(self.checkpoints.claim)] if self.checkpoints.claim else []
        with self._changed:
            if self._closing:
                return -1
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        while True:
            try:
                said, _ = self._child.communicate(timeout=_LOOK_S)
            except subprocess.TimeoutExpired:
                if not (obeys and self._rhythm.is_told_to_go_light()):
                    continue
                self._child.kill()
                self._child.communicate()
                return _LIGHTER
            if self._child.returncode == OK:
                self._rhythm.measured(json.loads(said.splitlines()[-1]))
            return self._child.returncode

    def _drop_stray_uploads(self) -> None:
        """Half-sent blobs of checkpoints that were dropped are billed until they are aborted. A superseded runner never gets here."""
        with self._changed:
            if self._jobs:
                return
        self.checkpoints.store.abort_uploads(f"{layout.run(self.checkpoints.run)}/")

    def _give_up_or_retry(self, job: _Job, reason: str, *, user_fault: bool) -> None:
        if not job.directory.exists():
            # It became durable and only the tidying up afterwards failed; older checkpoints stay a while longer.
            self._tell(f"retention after {job.what} failed", reason)
            return
        job.failures += 1
        with self._changed:
            newer = any(other.manifest.phase == job.manifest.phase for other in self._jobs)
            if user_fault or (job.failures >= self.attempts and job.final):
                self._failed = UploadFailed(
                    f"{job.what} failed {job.failures} times, last: {reason}", user_fault=user_fault
                )
            elif job.failures < self.attempts and (job.final or not newer):
                job.ready_at = time.monotonic() + self.pauses_s[min(job.failures, len(self.pauses_s)) - 1]
                self._jobs.insert(0, job)
            else:
                shutil.rmtree(job.directory, ignore_errors=True)
        self._tell(f"{job.what} failed", reason)

    def _tell(self, what: str, reason: str, *, routine: bool = False) -> None:
        with contextlib.suppress(OSError):  # a full disk is reported by the next step; here it would end the thread
            if routine:
                self._log.emit(NoticeEvent(what=what, reason=reason, routine=True))
            else:
                self.notice(what, reason)

    @property
    def _log(self) -> EventLog:
        return self.events or EventLog(self.assignment_path.parent / "events.jsonl")


class _Rhythm:
    """When a checkpoint is to be sent, and in which form: from what was measured, what the recipe allows and what was ordered."""

    def __init__(self, assignment_path: Path, tell: Any) -> None:
        self._assignment = Assignment.model_validate_json(assignment_path.read_bytes())
        self._order_path = assignment_path.parent / Path(layout.BOX_UPLINK).name
        self._tell = tell
        self._saved_at: tuple[str, float] = ("", 0.0)
        self._save_s = 0.0
        self._began_at = 0.0
        self._interval: Interval | None = None
        self._told_s = 0.0
        self._bad_order = b""

    @property
    def may_go_light(self) -> bool:
        return "light_checkpoints" in self._assignment.recipe.allow

    @property
    def next_at(self) -> float:
        """When the next upload is due, by time.monotonic()."""
        return self._began_at + self._interval.seconds if self._interval else 0.0

    def saved(self, phase: str) -> None:
        before, at = self._saved_at
        now = time.monotonic()
        self._save_s = now - at if phase == before else 0.0
        self._saved_at = phase, now

    def began(self) -> None:
        self._began_at = time.monotonic()

    def measured(self, word: dict[str, Any]) -> None:
        """Bytes that an upload sent, and its seconds."""
        if word["sent"] < MEASURED_BYTES:
            return
        recipe = self._assignment.recipe
        self._interval = durable_interval(
            size_bytes=word["sent"],
            uplink_mbps=word["sent"] * 8 / 1e6 / max(word["seconds"], 1e-3),
            dph_usd=self._assignment.dph_usd,
            up_usd_gb=self._assignment.inet_up_usd_gb,
            losses_per_h=BID_LOSSES_PER_H if recipe.box.interruptible else LOSSES_PER_H,
            save_s=self._save_s,
        )
        now_s = self._interval.seconds
        if not self._told_s or not 1 / _CHANGED < now_s / max(self._told_s, 1e-3) < _CHANGED:
            self._told_s = now_s
            self._tell("durable interval", self._interval.sentence, routine=True)

    def is_told_to_go_light(self) -> bool:
        """Whether the outside has ordered it, and the recipe allows it. An order that cannot be read, or is not allowed, is said once and obeyed
        by nobody."""
        try:
            text = self._order_path.read_bytes()
        except FileNotFoundError:
            return False
        try:
            light = {"all": False, "light": True}[json.loads(text)["send"]]
        except (ValueError, KeyError, TypeError):
            what, want = "not understood", 'want {"send": "all"} or {"send": "light"}'
        else:
            if not light or self.may_go_light:
                return light
            what, want = "not obeyed", "the recipe does not say allow: [light_checkpoints]"
        if text != self._bad_order:
            self._bad_order = text
            self._tell(f"order for the uplink {what}", f"{self._order_path.name} holds {text[:80]!r}; {want}")
        return False


def _write_manifest(directory: Path, manifest: Manifest) -> Manifest:
    """With the sizes and digests of all that lies in the directory."""
    path = directory / "manifest.json"
    files = {
        str(file.relative_to(directory)): FileEntry(sha256=sha256_of(file), bytes=file.stat().st_size)
        for file in sorted(directory.rglob("*"))
        if file.is_file() and file != path
    }
    manifest = manifest.model_copy(update={"files": files})
    fresh = directory / "manifest.json.new"
    fresh.write_text(manifest.model_dump_json(), encoding="utf-8")
    os.replace(fresh, path)
    return manifest
