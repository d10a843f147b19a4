"""A checkpoint to the bucket: what matters first, the manifest last."""

from __future__ import annotations

import time
from pathlib import Path

from training.box.child import WAYS, Fenced, Refused, Voice, Way
from training.box.files import Item, upload_all
from training.box.store import Moved, Store, StoreConflict, sha256_of
from training.contract import layout
from training.contract.claims import newest_claim
from training.contract.events import CheckpointDurable, EventLog
from training.contract.manifest import FileEntry, Manifest, key_of, parse_manifest

SMALL_BYTES = 16 << 20
# What only the trainer needs to go on, and the adapter can be used without.
_TRAINERS_OWN = ("optimizer.pt", "resume.safetensors", "scheduler.pt", "rng_state.pth")


def store_checkpoint(store: Store, run: str, directory: Path, claim: int, events: EventLog) -> int:
    """Make the checkpoint in `directory` durable in this process: for a bucket that cannot hang, which is a folder. Bytes sent."""
    manifest, began = read_local_manifest(directory), time.monotonic()
    sent = send(store, run, directory, claim, Voice(mute=True), WAYS[-1])
    events.emit(durable(run, manifest, sent, sent, began))
    return sent


def read_local_manifest(directory: Path, worked: Moved = lambda count: None) -> Manifest:
    """The manifest in a checkpoint directory, after each file was held against it. Refused if one is missing, empty or differs."""
    path = directory / "manifest.json"
    if not path.exists():
        raise Refused(f"{directory} holds no manifest.json: nothing to upload")
    manifest = parse_manifest(path.read_bytes(), str(path))
    for name, entry in manifest.files.items():
        file = directory / name
        if not file.is_file():
            raise Refused(f"{path}: names {name}, which is not in {directory}")
        size = file.stat().st_size
        if size == 0:
            raise Refused(f"{path}: {name} has 0 bytes: it was never written whole; the checkpoint is not sent")
        if size != entry.bytes or sha256_of(file, worked) != entry.sha256:
            raise Refused(f"{path}: {name} is not the file that the manifest describes; the checkpoint is not whole")
    return manifest


def send(store: Store, run: str, directory: Path, claim: int, voice: Voice, way: Way) -> int:
    """Files in the order of `by_importance`, then the manifest: a checkpoint exists only when its manifest does. Bytes sent.

    Idempotent: a blob that is in the bucket is not sent again. Fenced if a higher claim than `claim` has been made.
    """
    text = (directory / "manifest.json").read_bytes()
    manifest = parse_manifest(text, str(directory / "manifest.json"))
    key = key_of(run, manifest)
    replaced = store.version(key)
    require_unclaimed(store, run, claim)
    blobs = {entry.sha256: (name, entry) for name, entry in by_importance(manifest.files)}
    items = [
        Item(name=name, key=layout.blob(run, sha256), bytes=entry.bytes, sha256=sha256)
        for sha256, (name, entry) in blobs.items()
    ]
    sent = upload_all(store, directory, items, f"upload {manifest.phase}/{manifest.step}", voice, way)
    _write_manifest(store, run, claim, key, text, replaced)
    return sent


def by_importance(files: dict[str, FileEntry]) -> list[tuple[str, FileEntry]]:
    """Small files first, then the adapter, and last what only the trainer needs: if the link dies midway, what can be used is there."""

    def rank(item: tuple[str, FileEntry]) -> tuple[int, int, str]:
        name, entry = item
        group = 0 if entry.bytes <= SMALL_BYTES else 2 if name in _TRAINERS_OWN else 1
        return group, entry.bytes, name

    return sorted(files.items(), key=rank)


def require_unclaimed(store: Store, run: str, claim: int) -> None:
    """Fenced if a runner newer than the one of `claim` is at work on the run."""
    newest = newest_claim(store, run)
    if newest is not None and newest.number > claim:
        raise Fenced(
            f"run {run}: claim {newest.number} of flow run {newest.flow_run_id}, attempt {newest.attempt}, has superseded ours ({claim});"
            " this box writes nothing any more. Nothing is lost: the other goes on from the last checkpoint"
        )


def durable(run: str, manifest: Manifest, sent: int, line_bytes: int, began: float) -> CheckpointDurable:
    """The event for a checkpoint that is in the bucket; `began` by time.monotonic()."""
    return CheckpointDurable(
        phase=manifest.phase,
        step=manifest.step,
        manifest=key_of(run, manifest),
        bytes=sent,
        line_bytes=line_bytes,
        seconds=round(time.monotonic() - began, 3),
        complete=manifest.complete,
        light=manifest.light,
    )


def _write_manifest(store: Store, run: str, claim: int, key: str, text: bytes, replaced: str | None) -> None:
    """Only over what was there when the upload began: another runner may have claimed the run and written its own since."""
    require_unclaimed(store, run, claim)
    try:
        store.put_bytes(key, text, create_only=replaced is None, replaces=replaced)
    except StoreConflict:
        require_unclaimed(store, run, claim)  # who changed it has, as a rule, claimed the run
        raise
