"""Checkpoints: make them durable in the bucket, and find the one to go on from.

A checkpoint exists only when its manifest does. On the way up: hard links into a staging directory (so that the trainer's own rotation
cannot delete a file under the uploader), sha256 of each file, the manifest, the upload by a child process. On the way down: the newest
manifest that fits this run and whose every file arrives and hashes; otherwise the next older one, with a notice.

A run may be claimed by one runner at a time (training.contract.claims): what a superseded one wrote after the claim does not count.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from training.box.folder import FolderStore
from training.box.store import Store, StoreConflict, StoreDenied, StoreError, StoreUnreachable, sha256_of
from training.box.transfer import FENCED, OK, USER, Fenced, Refused, require_unclaimed, store_checkpoint
from training.contract import layout
from training.contract.claims import Claim, counts, newest_claim
from training.contract.events import EventLog
from training.contract.manifest import FileEntry, Manifest, ManifestError, Parent, check_fits, parse_manifest

KEEP_UNFINISHED = 2
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_CLAIM_TRIES = 10
_PAUSES_S = (2.0, 5.0, 15.0, 30.0, 60.0)

Notice = Callable[[str, str], None]


class UploadFailed(RuntimeError):
    """The last checkpoint of a phase did not become durable."""

    def __init__(self, message: str, *, user_fault: bool) -> None:
        super().__init__(message)
        self.user_fault = user_fault


@dataclass(frozen=True)
class Found:
    """A checkpoint's manifest, in the bucket or (with `directory`) staged on this box by an earlier runner."""

    key: str
    manifest: Manifest
    sha256: str
    """Of the manifest's bytes."""
    directory: Path | None = None

    @property
    def as_parent(self) -> Parent:
        return Parent(key=self.key, sha256=self.sha256)


@dataclass(frozen=True)
class Identity:
    """What a checkpoint must have been made with, to go on from it."""

    phase_digest: str
    data_sha256: str
    versions: dict[str, str]
    parent: Parent | None
    """The manifest that the phase begins from."""
    required: tuple[str, ...]
    """Files without which a trainer resumes silently wrong."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, store: Store, run: str, staging: Path, notice: Notice) -> None:
        self.store, self.run = store, run
        self._staging, self._notice = staging, notice
        self._claim: Claim | None = None

    @property
    def claim(self) -> int:
        """Number of the claim taken; 0 before."""
        return self._claim.number if self._claim else 0

    def take_claim(self, flow_run_id: str, attempt: int) -> Claim:
        """Make this the one runner that may write the run's manifests; every older one stops at its next checkpoint."""
        for _ in range(_CLAIM_TRIES):
            last = newest_claim(self.store, self.run)
            known = [*self._in_bucket("", last), *self._staged("", last)]
            claim = Claim(
                number=last.number + 1 if last else 1,
                runner=secrets.token_hex(8),
                flow_run_id=flow_run_id,
                attempt=attempt,
                at=round(time.time(), 3),
                found={each.key: each.sha256 for each in known},
            )
            key = layout.claim(self.run, claim.number)
            try:
                self.store.put_bytes(key, claim.model_dump_json().encode(), create_only=True)
            except StoreConflict:
                continue  # another runner was faster; the claim after its own is the newest
            self._claim = claim
            return claim
        raise Fenced(f"run {self.run}: {_CLAIM_TRIES} other runners claimed it in a row; stop all but one")

    def newest_first(self, phase: str, identity: Identity) -> list[Found]:
        """Every checkpoint of the phase that may be gone on from. ManifestError if one is of another recipe, other data or versions: that is
        the user's to decide. One that is damaged, incomplete, begun from elsewhere or written by a superseded runner is left out with a
        notice."""
        fitting = []
        for each in [*self._staged(phase, self._claim), *self._in_bucket(phase, self._claim)]:
            problem = self._defect(each, identity)
            if problem:
                self._notice(f"checkpoint {each.key} left out", problem)
                continue
            check_fits(
                each.manifest,
                each.key,
                phase_digest=identity.phase_digest,
                data_sha256=identity.data_sha256,
                versions=identity.versions,
            )
            fitting.append(each)
        return sorted(fitting, key=lambda each: (each.manifest.step, each.directory is not None), reverse=True)

    def fetch(self, found: Found, into: Path, names: Sequence[str] | None = None) -> Path | None:
        """The checkpoint's files (or only `names`) in `into`, each verified; None with a notice if one is missing or damaged.

        StoreUnreachable and StoreDenied pass through: they say nothing about the checkpoint.
        """
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        for name in names or tuple(found.manifest.files):
            problem = self._fetch_one(found, name, into / name)
            if problem:
                self._notice(f"checkpoint {found.key} not used", f"{name}: {problem}")
                shutil.rmtree(into, ignore_errors=True)
                return None
        return into

    def retain(self, phase: str, parent: Parent | None) -> None:
        """Keep the last checkpoint of a finished phase, the last two of an unfinished one, of those that begin from `parent`. Manifests go
        first: a manifest without its files would be a lie, files without a manifest are only rubbish."""
        require_unclaimed(self.store, self.run, self.claim)
        found = sorted(self._in_bucket(phase, self._claim), key=lambda each: each.manifest.step)
        # When an earlier phase had to be trained again, what was begun from its old end lies at later steps, and nobody can go on from it:
        # counted in, it would push out each new checkpoint as it arrives.
        ours = [each for each in found if each.manifest.parent == parent]
        keep = 1 if ours and ours[-1].manifest.complete else KEEP_UNFINISHED
        dropped = [each for each in found if each not in ours[-keep:]]
        if not dropped:
            return
        for each in dropped:
            self.store.delete(each.key)
        unused = {entry.sha256 for each in dropped for entry in each.manifest.files.values()} - self._digests_in_use()
        for digest in unused:
            self.store.delete(layout.blob(self.run, digest))

    def _digests_in_use(self) -> set[str]:
        """Of all phases, since they share blobs. ManifestError if one cannot be read: then nothing may be deleted."""
        used: set[str] = set()
        for info in self.store.list(f"{layout.run(self.run)}/manifests/"):
            text = self.store.get_bytes(info.key)
            if text is not None:
                used |= {entry.sha256 for entry in parse_manifest(text, info.key).files.values()}
        return used

    def _in_bucket(self, phase: str, claim: Claim | None) -> list[Found]:
        """Manifests of the phase (of all phases for "") that count by that claim."""
        found: list[Found] = []
        prefix = layout.phase_manifests(self.run, phase) if phase else f"{layout.run(self.run)}/manifests/"
        for info in self.store.list(prefix):
            text = self.store.get_bytes(info.key)
            if text is not None:
                self._parse(text, info.key, None, claim, found)
        return found

    def _staged(self, phase: str, claim: Claim | None) -> list[Found]:
        """Finished by an earlier runner on this box and perhaps not uploaded."""
        found: list[Found] = []
        for directory in sorted(self._staging.glob(f"{phase or '*'}_[0-9]*")):
            path = directory / "manifest.json"
            if path.exists() and directory.suffix != ".partial":
                name, _, step = directory.name.rpartition("_")
                self._parse(path.read_bytes(), layout.manifest(self.run, name, int(step)), directory, claim, found)
        return found

    def _parse(self, text: bytes, key: str, directory: Path | None, claim: Claim | None, into: list[Found]) -> None:
        sha256 = hashlib.sha256(text).hexdigest()
        try:
            manifest = parse_manifest(text, key)
        except ManifestError as error:
            self._notice(f"checkpoint {key} left out", str(error))
            return
        if counts(key, sha256, manifest.claim, claim):
            into.append(Found(key, manifest, sha256, directory))
        elif claim is not None:
            self._notice(
                f"checkpoint {key} left out",
                f"was written under claim {manifest.claim} after claim {claim.number} had been made: by a superseded box",
            )

    def _defect(self, found: Found, identity: Identity) -> str:
        manifest = found.manifest
        missing = [name for name in identity.required if name not in manifest.files]
        if missing:
            return f"lacks {', '.join(missing)}; all of {', '.join(identity.required)} are needed"
        if manifest.run != self.run:
            return f"belongs to run {manifest.run}, this is {self.run}"
        if manifest.parent != identity.parent:
            changed = manifest.parent and identity.parent and manifest.parent.key == identity.parent.key
            why = "; that manifest was overwritten" if changed else ""
            return f"was begun from {manifest.parent}, the phase now begins from {identity.parent}{why}"
        return ""

    def _fetch_one(self, found: Found, name: str, path: Path) -> str:
        entry = found.manifest.files[name]
        if found.directory is not None:
            source = found.directory / name
            if not source.exists() or sha256_of(source) != entry.sha256:
                return "is missing or damaged on disk"
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
            return ""
        key = layout.blob(self.run, entry.sha256)
        try:
            self.store.download_file(key, path, expect_bytes=entry.bytes, expect_sha256=entry.sha256)
        except (StoreUnreachable, StoreDenied):
            raise
        except StoreError as error:
            return str(error)
        return ""


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
    failures: int = 0
    ready_at: float = 0.0


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
    python: str = field(default_factory=lambda: os.environ.get("LIVERY_TRANSFER_PYTHON") or sys.executable)
    attempts: int = 6
    pauses_s: Sequence[float] = _PAUSES_S

    def __post_init__(self) -> None:
        self.staging.mkdir(parents=True, exist_ok=True)
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
        checkpoint of a phase: the next phase's manifests hold its digest."""
        partial = self.staging / f"{manifest.phase}_{manifest.step:08d}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        link_files(source, names, partial)
        size = sum((source / name).stat().st_size for name in names)
        job = _Job(partial, manifest, manifest.complete)
        sealed = self._seal(job) if job.final else None
        self._queue(job)
        return Staged(size, sealed)

    def submit(self, directory: Path, manifest: Manifest) -> None:
        """Queue what an earlier runner on this box staged."""
        self._queue(_Job(directory, manifest, manifest.complete))

    def _queue(self, job: _Job) -> None:
        with self._changed:
            for old in [each for each in self._jobs if each.manifest.phase == job.manifest.phase and not each.final]:
                if job.final or old.manifest.step < job.manifest.step:
                    self._jobs.remove(old)
                    shutil.rmtree(old.directory, ignore_errors=True)
            self._jobs.append(job)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Whether everything queued is durable, after at most `timeout_s`. UploadFailed if the last checkpoint of a phase was given up, Fenced
        if another runner has claimed the run."""
        with self._changed:
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

    def _work(self) -> None:
        while job := self._next():
            try:
                self._seal(job)
                if not self._closing:
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
        with self._changed:
            while not self._closing:
                if self._jobs:
                    pause = self._jobs[0].ready_at - time.monotonic()
                    if pause <= 0:
                        self._busy = True
                        return self._jobs.pop(0)
                    self._changed.wait(pause)
                else:
                    self._changed.wait()
            if not self._jobs:
                return None
            self._busy = True
            return self._jobs.pop(0)

    def _seal(self, job: _Job) -> Parent:
        """Hash the files, write the manifest last, and only then give the directory its name."""
        path = job.directory / "manifest.json"
        if job.directory.suffix == ".partial":
            files = {
                str(file.relative_to(job.directory)): FileEntry(sha256=sha256_of(file), bytes=file.stat().st_size)
                for file in sorted(job.directory.rglob("*"))
                if file.is_file() and file != path
            }
            job.manifest = job.manifest.model_copy(update={"files": files})
            path.write_text(job.manifest.model_dump_json(), encoding="utf-8")
            final_name = job.directory.with_suffix("")
            shutil.rmtree(final_name, ignore_errors=True)
            job.directory = job.directory.rename(final_name)
        key = layout.manifest(self.checkpoints.run, job.manifest.phase, job.manifest.step)
        return Parent(key=key, sha256=sha256_of(job.directory / "manifest.json"))

    def _upload(self, job: _Job) -> None:
        store = self.checkpoints.store
        code = self._store_here(job, store) if isinstance(store, FolderStore) else self._send(job)
        if code == OK:
            shutil.rmtree(job.directory, ignore_errors=True)
            self.checkpoints.retain(job.manifest.phase, job.manifest.parent)
        elif code == FENCED:
            require_unclaimed(store, self.checkpoints.run, self.checkpoints.claim)
            raise Fenced(f"run {self.checkpoints.run}: another runner has claimed it")
        elif not self._closing:
            self._give_up_or_retry(job, f"the transfer ended with code {code}", user_fault=code == USER)

    def _store_here(self, job: _Job, store: FolderStore) -> int:
        events = self.events or EventLog(self.assignment_path.parent / "events.jsonl")
        claim = self.checkpoints.claim or job.manifest.claim
        try:
            store_checkpoint(store, self.checkpoints.run, job.directory, claim, events)
        except Refused as error:
            self._tell(f"upload of {job.manifest.phase}/{job.manifest.step}", str(error))
            return USER
        return OK

    def _send(self, job: _Job) -> int:
        command = [self.python, "-m", "training.box.transfer", "upload"]
        command += ["--assignment", str(self.assignment_path), "--directory", str(job.directory)]
        command += ["--claim", str(self.checkpoints.claim)] if self.checkpoints.claim else []
        with self._changed:
            if self._closing:
                return -1
            self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        return self._child.wait()

    def _give_up_or_retry(self, job: _Job, reason: str, *, user_fault: bool) -> None:
        what = f"upload of {job.manifest.phase}/{job.manifest.step}"
        if not job.directory.exists():
            # It became durable and only the tidying up afterwards failed; older checkpoints stay a while longer.
            self._tell(f"retention after {what} failed", reason)
            return
        job.failures += 1
        with self._changed:
            newer = any(other.manifest.phase == job.manifest.phase for other in self._jobs)
            if user_fault or (job.failures >= self.attempts and job.final):
                self._failed = UploadFailed(
                    f"{what} failed {job.failures} times, last: {reason}", user_fault=user_fault
                )
            elif job.failures < self.attempts and (job.final or not newer):
                job.ready_at = time.monotonic() + self.pauses_s[min(job.failures, len(self.pauses_s)) - 1]
                self._jobs.insert(0, job)
            else:
                shutil.rmtree(job.directory, ignore_errors=True)
        self._tell(f"{what} failed", reason)

    def _tell(self, what: str, reason: str) -> None:
        with contextlib.suppress(OSError):  # a full disk is reported by the next step; here it would end the thread
            self.notice(what, reason)


def link_files(source: Path, names: Sequence[str], into: Path) -> Path:
    """Hard links of the named files in `into`, in place of what had those names."""
    for name in names:
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        os.link(source / name, target)
    return into
