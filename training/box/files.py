"""Several files to or from the bucket as one transfer: counted together, each verified, none done twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from training.box.child import Voice, Way
from training.box.store import Store, StoreError, sha256_of
from training.contract.manifest import FileEntry
from training.contract.model import Frozen


class Item(Frozen):
    """One file, and where it lies in the bucket."""

    name: str
    """Relative to the transfer's folder, such as `data/sft.jsonl`."""
    key: str
    bytes: int
    sha256: str | None = None
    """None: as the object's own metadata says. An upload needs it."""


class Errand(Frozen):
    """A transfer that another process of this box asks for, as a file: see `python -m training.box.transfer fetch` and `send`."""

    what: str
    """Its name in the events, such as `restore sft/40`."""
    folder: Path
    items: tuple[Item, ...]


def download_all(
    store: Store, folder: Path, items: Sequence[Item], what: str, voice: Voice, way: Way
) -> dict[str, FileEntry]:
    """Fetch the files, several at a time; what arrived, by name. A file that has its name was verified before it got it."""
    total, done = sum(item.bytes for item in items), {item.name: 0 for item in items}
    lock = threading.Lock()

    def count(name: str, bytes_done: int) -> None:
        with lock:
            done[name] = bytes_done
            voice.progress(what, sum(done.values()), total)

    def fetch(item: Item) -> tuple[str, FileEntry]:
        target = folder / item.name
        there = target.is_file() and target.stat().st_size == item.bytes
        sha256 = sha256_of(target, voice.worked) if there else download(item, target)
        if item.sha256 not in (None, sha256):
            target.unlink()
            raise StoreError(
                f"{item.name}: sha256 on the disk is {sha256[:12]}…, want {str(item.sha256)[:12]}…; it is deleted"
            )
        count(item.name, item.bytes)
        return item.name, FileEntry(sha256=sha256, bytes=item.bytes)

    def download(item: Item, target: Path) -> str:
        try:
            return store.download_file(
                item.key,
                target,
                # All of it is there only when it is verified: until then it may be fetched again.
                progress=lambda so_far, _: count(item.name, max(0, min(so_far, item.bytes - 1))),
                moved=voice.moved,
                worked=voice.worked,
                expect_bytes=item.bytes,
                expect_sha256=item.sha256,
            )
        except StoreError as error:
            raise type(error)(f"{item.name}: {error}") from None  # a key in the bucket may be a mere digest

    with ThreadPoolExecutor(way.workers) as pool:
        try:
            return dict(job.result() for job in as_completed([pool.submit(fetch, item) for item in items]))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def upload_all(store: Store, folder: Path, items: Sequence[Item], what: str, voice: Voice, way: Way) -> int:
    """Send the files one after the other, in the order given; bytes really sent."""
    total, before, sent = sum(item.bytes for item in items), 0, 0
    voice.progress(what, 0, total)
    for item in items:
        assert item.sha256 is not None, "what is sent is known"

        def progress(done: int, _: int, before: int = before) -> None:
            voice.progress(what, before + done, total)

        count = store.upload_file(
            folder / item.name,
            item.key,
            sha256=item.sha256,
            progress=progress,
            moved=voice.moved,
            part_bytes=way.part_bytes,
            workers=way.workers,
        )
        voice.sent(count)
        before, sent = before + item.bytes, sent + count
    return sent
