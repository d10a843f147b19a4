"""One object from the bucket to a file: continued where it was broken off, and hashed while it arrives, so that verifying costs no time after it."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from training.box.store_errors import StoreError, StoreMissing, StoreUnreachable, pause_s

if TYPE_CHECKING:
    from training.box.store import Moved, Progress, Store

_ARRIVES = 1 << 18
_BLOCK = 1 << 20


class Download:
    """One object on its way."""

    def __init__(self, store: Store, key: str, path: Path, *, progress: Progress, moved: Moved, worked: Moved) -> None:
        self._store, self._key, self._path = store, key, path
        self._progress, self._moved, self._worked = progress, moved, worked

    def fetch(self, expect_bytes: int | None, expect_sha256: str | None, attempts: int) -> str:
        """The sha256 of what arrived; see Store.download_file."""
        store, key = self._store, self._key
        head = store._head(key)
        if head is None:
            raise StoreMissing(f"{store.where}: {key} does not exist")
        size, etag = int(head["ContentLength"]), str(head["ETag"]).strip('"')
        if expect_bytes is not None and size != expect_bytes:
            raise StoreError(f"{store.where}: {key} has {size} bytes, want {expect_bytes}")
        wanted = expect_sha256 or head["Metadata"].get("sha256")
        # A plain MD5 is better than nothing. With a dash it is one of parts, whose sizes nobody tells.
        md5 = etag if not wanted and len(etag) == 32 and "-" not in etag else None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # The ETag in the name keeps a part of an older version of the object from being continued.
        part = self._path.with_name(f"{self._path.name}.{etag[:16]}.part")
        with _Follower(part, ("sha256", "md5") if md5 else ("sha256",), self._worked) as follower:
            self._fetch_all(part, size, head["ETag"], attempts, follower)
            got = follower.digests()
        algorithm, want = ("md5", md5) if md5 else ("sha256", wanted)
        if problem := _mismatch(part.stat().st_size, size, algorithm, got[algorithm], want):
            part.unlink()
            raise StoreError(f"{store.where}: {key}: {problem}; what was downloaded is deleted")
        os.replace(part, self._path)
        return got["sha256"]

    def _fetch_all(self, part: Path, size: int, etag: str, attempts: int, follower: _Follower) -> None:
        failures = 0
        while (start := part.stat().st_size if part.exists() else 0) < size or not part.exists():
            try:
                self._fetch_from(part, start, size, etag, follower)
            except StoreUnreachable:
                grown = part.exists() and part.stat().st_size > start
                failures = 0 if grown else failures + 1
                if failures >= attempts:
                    raise
                time.sleep(pause_s(failures))
        follower.grown(part.stat().st_size)

    def _fetch_from(self, part: Path, start: int, size: int, etag: str, follower: _Follower) -> None:
        place: dict[str, Any] = {"Bucket": self._store.bucket, "Key": self._key, "IfMatch": etag}
        place |= {"Range": f"bytes={start}-"} if start else {}

        def fetch() -> None:
            body = self._store._client.get_object(**place)["Body"]
            done = start
            with part.open("ab") as file:
                for chunk in body.iter_chunks(_ARRIVES):
                    file.write(chunk)
                    file.flush()
                    done += len(chunk)
                    follower.grown(done)
                    self._moved(len(chunk))
                    self._progress(done, size)

        self._store._ask("read", self._key, fetch, attempts=1)


class _Follower:
    """Hashes a file in a thread of its own while it grows."""

    def __init__(self, path: Path, algorithms: tuple[str, ...], worked: Moved) -> None:
        self._path, self._worked = path, worked
        self._digests = {name: hashlib.new(name, usedforsecurity=False) for name in algorithms}
        self._changed = threading.Condition()
        self._upto, self._over = 0, False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="hashing", daemon=True)

    def __enter__(self) -> _Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(give_up=error is not None)

    def grown(self, upto: int) -> None:
        """So many bytes are in the file."""
        with self._changed:
            self._upto = max(self._upto, upto)
            self._changed.notify_all()

    def digests(self) -> dict[str, str]:
        """In hexadecimal, of all that was told of; waits until it is hashed. OSError if the file cannot be read."""
        self._end(give_up=False)
        if self._error:
            raise self._error
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def _end(self, *, give_up: bool) -> None:
        with self._changed:
            self._over = True
            self._upto = 0 if give_up else self._upto
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        at = 0
        try:
            while upto := self._next(at):
                with self._path.open("rb") as file:
                    file.seek(at)
                    while at < upto and (block := file.read(min(_BLOCK, upto - at))):
                        for digest in self._digests.values():
                            digest.update(block)
                        at += len(block)
                        self._worked(len(block))
                if at < upto:
                    raise OSError(f"{self._path.name} became shorter while it was hashed")
        except OSError as error:
            self._error = error

    def _next(self, at: int) -> int:
        """Up to where there is something to hash; 0 when all is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or self._upto > at)
            return self._upto if self._upto > at else 0


def _mismatch(seen: int, size: int, algorithm: str, got: str, wanted: str | None) -> str:
    if seen != size:
        return f"{seen} bytes arrived, want {size}"
    return "" if wanted in (None, got) else f"{algorithm} of what arrived is {got[:12]}…, want {str(wanted)[:12]}…"
