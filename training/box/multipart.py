"""One large file to the bucket: in pieces, over several connections, and resumed from what the server says that it has.

There is no state on disk: an interrupted upload is found again by asking the server (ListMultipartUploads, ListParts), and every
piece that is already there is checked against the file before it is believed.

A *part* is what an upload that is killed at the worst moment may have to send again. It goes over several connections at once, cut into
*pieces* (which are what S3 calls parts): so many that together they never exceed it, however many connections are allowed.
"""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from training.box.store_errors import NoUpload

if TYPE_CHECKING:
    from training.box.store import Moved, Progress, Store

T = TypeVar("T")

MIN_PIECE_BYTES = 5 << 20
"""S3's own floor for all parts but the last."""
PART_BYTES = 20 << 20
"""Four pieces of S3's least size: at 1 Gbps it is a sixth of a second, and on a slow line only one piece of it is under way."""
MAX_PIECES = 10_000
# Pieces between two looks whether more connections would be faster, and how much faster they must be.
_STEADY_PIECES = 32
_WORTH_IT = 1.2


def pieces_of(size: int, part_bytes: int, workers: int) -> tuple[int, int]:
    """Bytes of a piece, and how many of them may be under way at once so that together they are at most `part_bytes`."""
    piece_bytes = max(MIN_PIECE_BYTES, part_bytes // workers, -(-size // MAX_PIECES))
    return piece_bytes, abreast(piece_bytes, part_bytes, workers)


def abreast(piece_bytes: int, part_bytes: int, workers: int) -> int:
    return max(1, min(workers, part_bytes // piece_bytes))


class Upload:
    """One file on its way. Pieces are counted once the bucket has acknowledged them."""

    def __init__(
        self,
        store: Store,
        path: Path,
        key: str,
        *,
        size: int,
        sha256: str,
        part_bytes: int,
        workers: int,
        progress: Progress,
        moved: Moved,
    ) -> None:
        self._store, self._path, self._key, self._size, self._sha256 = store, path, key, size, sha256
        self._part_bytes, self._workers = part_bytes, workers
        self._piece_bytes, self._abreast = pieces_of(size, part_bytes, workers)
        self._progress, self._moved = progress, moved
        self._lock = threading.Lock()
        self._done = self._sent = 0

    def send(self) -> int:
        """Bytes really sent. Begins again once if the half-done upload has vanished meanwhile."""
        if self._size <= self._piece_bytes:
            return self._whole()
        try:
            return self._in_pieces()
        except NoUpload:
            if self._store._holds(self._key, self._size, self._sha256):  # completed, and only the reply was lost
                return self._sent
            self._done = 0
            return self._in_pieces()

    def _whole(self) -> int:
        data = self._path.read_bytes()
        self._ask(
            "write",
            lambda client, place: client.put_object(
                **place,
                Body=_Counted(data, self._moved),
                ContentMD5=md5_base64(data),
                Metadata={"sha256": self._sha256},
            ),
        )
        self._acknowledged(len(data), sent=True)
        return self._sent

    def _in_pieces(self) -> int:
        upload_id, there = self._resume()
        self._adopt_size(there)
        numbers = range(1, -(-self._size // self._piece_bytes) + 1)
        with ThreadPoolExecutor(self._workers) as pool:
            try:
                found = pool.map(lambda number: self._arrived(number, there), sorted(set(there) & set(numbers)))
                pieces = [piece for piece in found if piece is not None]
                known = {piece["PartNumber"] for piece in pieces}
                pieces += self._send_missing([number for number in numbers if number not in known], upload_id, pool)
            finally:
                # The first failure ends the upload; what is queued would only fail again, and is resumable anyway.
                pool.shutdown(wait=True, cancel_futures=True)
        whole = {"Parts": sorted(pieces, key=lambda piece: int(piece["PartNumber"]))}
        self._ask(
            "complete",
            lambda client, place: client.complete_multipart_upload(**place, UploadId=upload_id, MultipartUpload=whole),
        )
        return self._sent

    def _send_missing(self, numbers: list[int], upload_id: str, pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
        """Over as few connections as reach the line's rate, found by trying twice as many now and then: on a line that one connection fills,
        more of them only make more of what a kill loses."""
        pieces: list[dict[str, Any]] = []
        width, rates = 1, dict[int, float]()
        while numbers:
            trial = next((each for each in (width, 2 * width) if each <= self._abreast and each not in rates), None)
            count = trial if trial else _STEADY_PIECES
            batch, numbers = numbers[:count], numbers[count:]
            began = time.monotonic()
            for each in _at_most(pool, trial or width, batch, lambda number: self._piece(number, upload_id)):
                pieces.append(each)
            if trial is None:
                width, rates = max(1, width // 2), {}  # the line may have changed
            elif len(batch) == trial:
                rates[trial] = trial / max(1e-6, time.monotonic() - began)
                width = trial if rates[trial] > _WORTH_IT * rates.get(width, 0.0) else width
        return pieces

    def _adopt_size(self, there: dict[int, tuple[str, int]]) -> None:
        """Go on in pieces of the size that arrived before: cut otherwise, none of them could be used."""
        last = max(there, default=0)
        sizes = {size for number, (_, size) in there.items() if number < last or number == 1}
        if len(sizes) == 1 and (size := sizes.pop()) >= MIN_PIECE_BYTES and size * MAX_PIECES >= self._size:
            self._piece_bytes, self._abreast = size, abreast(size, self._part_bytes, self._workers)

    def _resume(self) -> tuple[str, dict[int, tuple[str, int]]]:
        """The unfinished upload of this key that holds most, with its pieces; older ones are aborted. A new one if none."""
        best: tuple[str, dict[int, tuple[str, int]]] | None = None
        for item in self._store._unfinished(self._key):
            if item["Key"] != self._key:
                continue
            pieces = self._pieces_of(item["UploadId"])
            if best and len(best[1]) >= len(pieces):
                self._store._abort(self._key, item["UploadId"])
                continue
            if best:
                self._store._abort(self._key, best[0])
            best = item["UploadId"], pieces
        if best:
            return best
        reply = self._ask(
            "write", lambda client, place: client.create_multipart_upload(**place, Metadata={"sha256": self._sha256})
        )
        return reply["UploadId"], {}

    def _pieces_of(self, upload_id: str) -> dict[int, tuple[str, int]]:
        """By number: ETag and size of what the bucket has."""
        pieces: dict[int, tuple[str, int]] = {}
        marker = 0
        while True:
            try:
                page = self._ask(
                    "list parts of",
                    lambda client, place, marker=marker: client.list_parts(  # type: ignore[misc]
                        **place, UploadId=upload_id, PartNumberMarker=marker
                    ),
                )
            except NoUpload:
                return {}
            for piece in page.get("Parts", []):
                pieces[piece["PartNumber"]] = piece["ETag"], int(piece["Size"])
            if not page.get("IsTruncated"):
                return pieces
            marker = int(page["NextPartNumberMarker"])

    def _arrived(self, number: int, there: dict[int, tuple[str, int]]) -> dict[str, Any] | None:
        """The piece, if what the bucket has of it is what the file has."""
        data, (etag, size) = self._cut(number), there[number]
        if size != len(data) or etag.strip('"') != hashlib.md5(data, usedforsecurity=False).hexdigest():
            return None
        self._acknowledged(len(data), sent=False)
        return {"PartNumber": number, "ETag": etag}

    def _cut(self, number: int) -> bytes:
        with self._path.open("rb") as file:
            file.seek((number - 1) * self._piece_bytes)
            return file.read(self._piece_bytes)

    def _piece(self, number: int, upload_id: str) -> dict[str, Any]:
        data = self._cut(number)
        md5 = md5_base64(data)
        reply = self._ask(
            "write",
            lambda client, place: client.upload_part(
                **place,
                UploadId=upload_id,
                PartNumber=number,
                Body=_Counted(data, self._moved),
                ContentMD5=md5,
            ),
        )
        self._acknowledged(len(data), sent=True)
        return {"PartNumber": number, "ETag": reply["ETag"]}

    def _ask(self, what: str, call: Callable[[Any, dict[str, str]], T]) -> T:
        place = {"Bucket": self._store.bucket, "Key": self._key}
        return self._store._ask(what, self._key, lambda: call(self._store._client, place))

    def _acknowledged(self, count: int, *, sent: bool) -> None:
        with self._lock:
            self._done += count
            self._sent += count if sent else 0
            self._progress(self._done, self._size)


class _Counted(io.BytesIO):
    """A body that tells how much of it the socket took. On plain http botocore reads it once more before, to sign it."""

    def __init__(self, data: bytes, moved: Moved) -> None:
        super().__init__(data)
        self._moved = moved
        self._signing_block = 1 << 20  # botocore hashes in blocks of this size, the socket takes smaller ones

    def read(self, size: int | None = -1, /) -> bytes:
        chunk = super().read(size)
        if chunk and size != self._signing_block:
            self._moved(len(chunk))
        return chunk


def md5_base64(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _at_most(pool: ThreadPoolExecutor, width: int, items: list[int], call: Callable[[int], T]) -> Iterator[T]:
    """The results of `call` for all items, at most `width` at a time."""
    waiting, running = iter(items), set[Future[T]]()
    while True:
        running |= {pool.submit(call, item) for item in itertools.islice(waiting, width - len(running))}
        if not running:
            return
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for each in done:
            yield each.result()
