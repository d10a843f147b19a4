"""Checkpoints in the bucket: who may write them, which to go on from, which to keep.

A checkpoint exists only when its manifest does. On the way up, see training.uploader. On the way down: the newest manifest that fits this
run and whose every file arrives and hashes; otherwise the next older one, with a notice.

A run may be claimed by one runner at a time (training.contract.claims): what a superseded one wrote after the claim does not count.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.box.child import Fenced
from training.box.files import Item
from training.box.light import TRAINERS_OWN
from training.box.store import Store, StoreConflict, sha256_of
from training.box.upload import require_unclaimed
from training.contract import layout
from training.contract.claims import Claim, counts, newest_claim
from training.contract.manifest import Manifest, ManifestError, Parent, check_fits, parse_manifest
from training.couriers import Courier, InProcess

KEEP_UNFINISHED = 2
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_CLAIM_TRIES = 10

Notice = Callable[[str, str], None]


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
        if self.manifest.stands_for is not None:
            return self.manifest.stands_for
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

    def __init__(self, store: Store, run: str, staging: Path, notice: Notice, courier: Courier | None = None) -> None:
        """`courier` brings a checkpoint's files here; by default this process does, which cannot be killed when its link hangs."""
        self.store, self.run = store, run
        self._courier = courier or InProcess(store)
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
        return sorted(
            fitting,
            key=lambda each: (each.manifest.step, not each.manifest.light, each.directory is not None),
            reverse=True,
        )

    def fetch(self, found: Found, into: Path, names: Sequence[str] | None = None) -> Path | None:
        """The checkpoint's files (or only `names`) in `into`, each verified; None with a notice if one is missing or damaged.

        StoreUnreachable, StoreDenied and MachineFault pass through: they say nothing about the checkpoint.
        """
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir(parents=True)
        names = names or tuple(found.manifest.files)
        problem = _copy_staged(found, names, into) if found.directory else self._bring(found, names, into)
        if problem:
            self._notice(f"checkpoint {found.key} not used", problem)
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
        kept = {each.manifest.step for each in ours[-keep:]}
        dropped = [each for each in found if each not in ours or each.manifest.step not in kept]
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
        for info in [each for prefix in self._prefixes() for each in self.store.list(prefix)]:
            text = self.store.get_bytes(info.key)
            if text is not None:
                used |= {entry.sha256 for entry in parse_manifest(text, info.key).files.values()}
        return used

    def _in_bucket(self, phase: str, claim: Claim | None) -> list[Found]:
        """Manifests of the phase (of all phases for "") that count by that claim."""
        found: list[Found] = []
        for prefix in self._prefixes(phase):
            for info in self.store.list(prefix):
                text = self.store.get_bytes(info.key)
                if text is not None:
                    self._parse(text, info.key, None, claim, found)
        return found

    def _prefixes(self, phase: str = "") -> tuple[str, str]:
        """Where manifests lie: the full ones, the light ones."""
        if phase:
            return layout.phase_manifests(self.run, phase), layout.light_manifests(self.run, phase)
        return f"{layout.run(self.run)}/manifests/", f"{layout.run(self.run)}/light/"

    def _staged(self, phase: str, claim: Claim | None) -> list[Found]:
        """Finished by an earlier runner on this box and perhaps not uploaded."""
        found: list[Found] = []
        for directory in sorted(self._staging.glob(f"{phase or '*'}_[0-9]*")):
            path = directory / "manifest.json"
            if path.exists() and not directory.suffix:
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
        if manifest.light and not manifest.complete:
            return "is light: it holds an adapter to use, and not what training goes on from"
        required = [name for name in identity.required if not (manifest.light and name in TRAINERS_OWN)]
        missing = [name for name in required if name not in manifest.files]
        if missing:
            return f"lacks {', '.join(missing)}; all of {', '.join(required)} are needed"
        if empty := [name for name in required if manifest.files[name].bytes == 0]:
            return f"{', '.join(empty)} has 0 bytes: it was never written whole"
        if manifest.run != self.run:
            return f"belongs to run {manifest.run}, this is {self.run}"
        if manifest.parent != identity.parent:
            changed = manifest.parent and identity.parent and manifest.parent.key == identity.parent.key
            why = "; that manifest was overwritten" if changed else ""
            return f"was begun from {manifest.parent}, the phase now begins from {identity.parent}{why}"
        return ""

    def _bring(self, found: Found, names: Sequence[str], into: Path) -> str:
        files = {name: found.manifest.files[name] for name in names}
        items = [
            Item(name=name, key=layout.blob(self.run, entry.sha256), bytes=entry.bytes, sha256=entry.sha256)
            for name, entry in files.items()
        ]
        return self._courier.fetch(f"restore {found.manifest.phase}/{found.manifest.step}", into, items)


def _copy_staged(found: Found, names: Sequence[str], into: Path) -> str:
    """The problem with it, or empty."""
    assert found.directory is not None
    for name in names:
        source = found.directory / name
        if not source.exists() or sha256_of(source) != found.manifest.files[name].sha256:
            return f"{name}: is missing or damaged on disk"
        (into / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, into / name)
    return ""


def link_files(source: Path, names: Sequence[str], into: Path) -> Path:
    """Hard links of the named files in `into`, in place of what had those names."""
    for name in names:
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        os.link(source / name, target)
    return into
