"""A bucket that is a plain folder: the same calls and the same promises as the S3 store, for a run on one machine with nothing around it.

Objects are files under their keys. A file gets its name only when it is whole, so a killed writer leaves no half object behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from training.box.store import (
    PART_BYTES,
    Moved,
    ObjectInfo,
    Progress,
    Store,
    StoreConflict,
    StoreError,
    StoreMissing,
    sha256_of,
)

_BLOCK = 1 << 20
_UNFINISHED = ".unfinished-"


class FolderStore(Store):
    """One folder, opened by `Store.from_environment("folder:/path")`. Made if it is not there."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.bucket, self.where = f"folder:{self.root}", f"folder {self.root}"
        with self._explained("make", ""):
            self.root.mkdir(parents=True, exist_ok=True)

    def check(self) -> None:
        """StoreError if the folder cannot be written."""
        if not os.access(self.root, os.R_OK | os.W_OK | os.X_OK):
            raise StoreError(f"{self.where} may not be read and written by this user; correct its permissions")

    def get_bytes(self, key: str) -> bytes | None:
        path = self._path(key)
        with self._explained("read", key):
            return path.read_bytes() if path.is_file() else None

    def stream(self, key: str) -> Iterator[bytes]:
        data = self.get_bytes(key)
        if data is None:
            raise StoreMissing(f"{self.where}: {key} does not exist")
        yield data

    def put_bytes(
        self,
        key: str,
        data: bytes,
        *,
        create_only: bool = False,
        replaces: str | None = None,
        content_type: str = "application/json",
    ) -> None:
        """As in Store."""
        with self._explained("write", key), self._half(key) as (file, unfinished):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if replaces and self.version(key) not in (replaces, hashlib.sha256(data).hexdigest()):
                raise StoreConflict(f"{self.where}: {key} has changed meanwhile")
            if replaces or not create_only:
                os.replace(unfinished, self._path(key))
                return
            try:
                os.link(unfinished, self._path(key))  # unlike a rename, it fails if the name is taken
            except FileExistsError:
                if self._path(key).read_bytes() != data:
                    raise StoreConflict(f"{self.where}: {key} is already there") from None

    def size(self, key: str) -> int | None:
        path = self._path(key)
        return path.stat().st_size if path.is_file() else None

    def version(self, key: str) -> str | None:
        path = self._path(key)
        return sha256_of(path) if path.is_file() else None

    def list(self, prefix: str) -> list[ObjectInfo]:
        top = self._path(prefix.rpartition("/")[0])
        found = []
        for path in top.rglob("*") if top.is_dir() else ():
            key = path.relative_to(self.root).as_posix()
            if key.startswith(prefix) and not path.name.startswith(_UNFINISHED) and path.is_file():
                found.append(ObjectInfo(key, path.stat().st_size, path.stat().st_mtime))
        return sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        with self._explained("delete", key):
            self._path(key).unlink(missing_ok=True)

    def server_time(self) -> float:
        return time.time()

    def upload_file(
        self,
        path: Path,
        key: str,
        *,
        sha256: str,
        progress: Progress = lambda done, total: None,
        moved: Moved = lambda taken: None,
        part_bytes: int = PART_BYTES,
        workers: int = 4,
    ) -> int:
        size = path.stat().st_size
        target = self._path(key)
        if target.is_file() and target.stat().st_size == size and sha256_of(target) == sha256:
            progress(size, size)
            return 0
        with self._explained("write", key), self._half(key) as (file, unfinished):
            done, digest = 0, hashlib.sha256()
            with path.open("rb") as source:
                while block := source.read(_BLOCK):
                    file.write(block)
                    digest.update(block)
                    done += len(block)
                    moved(len(block))
                    progress(done, size)
            if digest.hexdigest() != sha256:
                raise StoreError(
                    f"{path} is not what was to be stored: sha256 {digest.hexdigest()[:12]}, want {sha256[:12]}"
                )
            file.flush()
            os.fsync(file.fileno())
            os.replace(unfinished, target)
        progress(size, size)
        return size

    def download_file(
        self,
        key: str,
        path: Path,
        *,
        progress: Progress = lambda done, total: None,
        moved: Moved = lambda taken: None,
        worked: Moved = lambda count: None,
        expect_bytes: int | None = None,
        expect_sha256: str | None = None,
        attempts: int = 5,
    ) -> str:
        source = self._path(key)
        if not source.is_file():
            raise StoreMissing(f"{self.where}: {key} does not exist")
        size = source.stat().st_size
        if expect_bytes is not None and size != expect_bytes:
            raise StoreError(f"{self.where}: {key} has {size} bytes, want {expect_bytes}")
        seen = sha256_of(source, worked)
        if expect_sha256 not in (None, seen):
            raise StoreError(
                f"{self.where}: {key}: sha256 of what is there is {seen[:12]}…, want {str(expect_sha256)[:12]}…"
            )
        with self._explained("read", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{path.name}.part")
            shutil.copyfile(source, part)
            os.replace(part, path)
        moved(size)
        progress(size, size)
        return seen

    def copy(self, source: str, key: str, *, sha256: str) -> int:
        self.upload_file(self._path(source), key, sha256=sha256)
        return self._path(source).stat().st_size

    def abort_uploads(self, prefix: str) -> int:
        """Remove what killed writers left under a prefix; how many files."""
        left = [
            path
            for path in self.root.rglob(f"{_UNFINISHED}*")
            if path.parent.relative_to(self.root).as_posix().startswith(prefix.rstrip("/"))
        ]
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)

    def _path(self, key: str) -> Path:
        if key.startswith("/") or ".." in key.split("/"):
            raise StoreError(f"{self.where}: '{key}' would lie outside the folder")
        return self.root / key

    @contextlib.contextmanager
    def _half(self, key: str) -> Iterator[tuple[IO[bytes], Path]]:
        """A file beside the object's place; what is left of it at the end is removed."""
        place = self._path(key).parent
        place.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=place)
        path = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file, path
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _explained(self, what: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(f"{self.where}: could not {what} {key}: {error.strerror}") from None
