"""A folder keeps the promises of the S3 store; these are the ones that the training relies on."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from training.box.store import Store, StoreConflict, StoreError


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.from_environment(f"folder:{tmp_path / 'bucket'}", {})


def file_of(path: Path, data: bytes) -> tuple[Path, str]:
    path.write_bytes(data)
    return path, hashlib.sha256(data).hexdigest()


def test_small_objects_are_written_read_listed_and_deleted(store: Store) -> None:
    for key in ("a/2", "a/1", "ab", "b/1"):
        store.put_bytes(key, key.encode())
    assert store.get_bytes("a/1") == b"a/1" and store.get_bytes("a/9") is None and store.get_bytes("a") is None
    assert [info.key for info in store.list("a")] == ["a/1", "a/2", "ab"]
    assert [info.key for info in store.list("a/")] == ["a/1", "a/2"]
    assert store.list("none/at/all") == []
    assert (store.size("b/1"), store.size("b")) == (3, None)
    store.delete("a/1")
    store.delete("a/1")
    assert [info.key for info in store.list("a/")] == ["a/2"]


def test_create_only_has_one_winner_of_eight(store: Store) -> None:
    def create(number: int) -> bool:
        try:
            store.put_bytes("claim", str(number).encode(), create_only=True)
        except StoreConflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(create, range(8))) == 1


def test_create_only_of_the_same_content_is_no_conflict(store: Store) -> None:
    store.put_bytes("k", b"v", create_only=True)
    store.put_bytes("k", b"v", create_only=True)
    with pytest.raises(StoreConflict, match="already there"):
        store.put_bytes("k", b"w", create_only=True)


def test_a_file_is_stored_once_and_comes_back_verified(store: Store, tmp_path: Path) -> None:
    path, sha256 = file_of(tmp_path / "f", os.urandom(3 << 20))
    seen: list[int] = []
    assert store.upload_file(path, "blobs/x", sha256=sha256, progress=lambda done, _: seen.append(done)) == 3 << 20
    assert seen == sorted(seen) and seen[-1] == 3 << 20
    assert store.upload_file(path, "blobs/x", sha256=sha256) == 0
    store.download_file("blobs/x", tmp_path / "back" / "f", expect_bytes=3 << 20, expect_sha256=sha256)
    assert (tmp_path / "back" / "f").read_bytes() == path.read_bytes()


def test_an_object_that_is_not_what_was_asked_for_is_refused_and_not_kept(store: Store, tmp_path: Path) -> None:
    path, sha256 = file_of(tmp_path / "f", b"abc")
    store.upload_file(path, "x", sha256=sha256)
    with pytest.raises(StoreError, match="x has 3 bytes, want 4"):
        store.download_file("x", tmp_path / "g", expect_bytes=4)
    with pytest.raises(StoreError, match="sha256 of what is there"):
        store.download_file("x", tmp_path / "g", expect_sha256="0" * 64)
    with pytest.raises(StoreError, match="y does not exist"):
        store.download_file("y", tmp_path / "g")
    with pytest.raises(StoreError, match="is not what was to be stored"):
        store.upload_file(path, "z", sha256="0" * 64)
    assert not (tmp_path / "g").exists() and store.size("z") is None


def test_what_a_killed_writer_left_is_no_object(store: Store, tmp_path: Path) -> None:
    store.put_bytes("blobs/x", b"abc")
    (tmp_path / "bucket" / "blobs" / ".unfinished-1").write_bytes(b"half")
    assert [info.key for info in store.list("blobs/")] == ["blobs/x"]
    assert store.abort_uploads("blobs/") == 1
    assert store.abort_uploads("blobs/") == 0


@pytest.mark.parametrize("key", ["../out", "a/../../out", "/etc/x"])
def test_a_key_cannot_lead_out_of_the_folder(store: Store, key: str) -> None:
    with pytest.raises(StoreError, match="outside the folder"):
        store.put_bytes(key, b"x")


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="could not make"):
        Store.from_environment(f"folder:{tmp_path / 'file' / 'bucket'}")
