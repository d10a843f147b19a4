"""Objects on their way down from a real S3 server, over links that break."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.box.conftest import Weed
from tests.training.box.netfault import Link
from training.box.download import _Follower
from training.box.store import Store, StoreError, StoreUnreachable

MB = 1 << 20
Blob = Callable[[int], tuple[Path, str]]


def test_an_interrupted_download_continues_where_it_was(weed: Weed, link: Link, blob: Blob, tmp_path: Path) -> None:
    path, sha256 = blob(20 * MB)
    weed.store().upload_file(path, "down/big", sha256=sha256)
    threading.Timer(0.05, link.reset).start()
    cut: list[int] = []

    def progress(done: int, total: int) -> None:
        if done > 8 * MB and not cut:
            cut.append(done)
            link.reset()

    weed.store(link.port).download_file("down/big", tmp_path / "big", progress=progress, expect_sha256=sha256)
    assert cut and hashlib.sha256((tmp_path / "big").read_bytes()).hexdigest() == sha256
    assert link.bytes_down < 32 * MB
    assert not list(tmp_path.glob("*.part"))


def test_a_corrupted_download_is_refused_and_not_kept(weed: Weed, link: Link, blob: Blob, tmp_path: Path) -> None:
    path, sha256 = blob(1 * MB)
    weed.store().upload_file(path, "down/damaged", sha256=sha256)
    link.flip_down_byte_at = 500_000
    with pytest.raises(StoreError, match="sha256 of what arrived is"):
        weed.store(link.port).download_file("down/damaged", tmp_path / "d")
    assert not list(tmp_path.glob("d*"))
    weed.store(link.port).download_file("down/damaged", tmp_path / "d")
    assert (tmp_path / "d").read_bytes() == path.read_bytes()


def test_an_object_of_another_size_or_content_is_refused(store: Store, tmp_path: Path) -> None:
    store.put_bytes("down/small", b"12345")
    with pytest.raises(StoreError, match="has 5 bytes, want 6"):
        store.download_file("down/small", tmp_path / "s", expect_bytes=6)
    with pytest.raises(StoreError, match="want 000000000000"):
        store.download_file("down/small", tmp_path / "s", expect_sha256="0" * 64)
    with pytest.raises(StoreError, match="down/none does not exist"):
        store.download_file("down/none", tmp_path / "s")


def test_a_full_disk_is_not_called_a_bucket_that_does_not_answer(store: Store, tmp_path: Path) -> None:
    store.put_bytes("down/full", b"12345")
    etag = hashlib.md5(b"12345").hexdigest()
    (tmp_path / f"f.{etag[:16]}.part").symlink_to("/dev/full")
    with pytest.raises(StoreError, match="this machine's disk failed: No space left") as caught:
        store.download_file("down/full", tmp_path / "f")
    assert not isinstance(caught.value, StoreUnreachable)


def test_the_line_is_counted_by_what_came_over_it(store: Store, blob: Blob, tmp_path: Path) -> None:
    path, sha256 = blob(3 * MB)
    store.upload_file(path, "moved/a", sha256=sha256)
    moved: list[int] = []
    worked: list[int] = []
    store.download_file("moved/a", tmp_path / "a", moved=moved.append, worked=worked.append)
    assert sum(moved) == sum(worked) == 3 * MB, "the hashing is heard of, too: of many GB it takes as long as a stall"


def test_an_empty_object_where_a_file_was_promised_is_named(store: Store, tmp_path: Path) -> None:
    store.put_bytes("empty/a", b"")
    with pytest.raises(StoreError, match="empty/a has 0 bytes, want 5"):
        store.download_file("empty/a", tmp_path / "a", expect_bytes=5)
    assert not list(tmp_path.glob("a*"))


def test_what_arrives_is_hashed_on_the_way_from_wherever_it_is_continued(
    weed: Weed, link: Link, blob: Blob, tmp_path: Path
) -> None:
    path, sha256 = blob(6 * MB)
    weed.store().upload_file(path, "down/hashed", sha256=sha256)
    link.down_bps = 3e6
    threading.Timer(0.7, link.reset).start()
    worked: list[int] = []
    got = weed.store(link.port).download_file("down/hashed", tmp_path / "h", worked=worked.append)
    assert got == sha256 and sum(worked) == 6 * MB
    etag = (weed.store().version("down/hashed") or "").strip('"')
    os.rename(tmp_path / "h", tmp_path / f"h.{etag[:16]}.part")
    before = link.bytes_down
    assert weed.store(link.port).download_file("down/hashed", tmp_path / "h") == sha256
    assert link.bytes_down - before < MB, "it was all there and is only hashed"


def test_a_file_that_becomes_shorter_while_it_is_hashed_is_no_digest(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    with _Follower(tmp_path / "f", ("sha256",), lambda count: None) as follower:
        follower.grown(9)
        with pytest.raises(OSError, match="became shorter"):
            follower.digests()
