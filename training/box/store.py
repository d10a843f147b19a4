"""The one S3 module of the product: small objects, resumable uploads and downloads, and errors that say what to do.

The time-outs look odd for a reason. urllib3 leaves the *connect* time-out on the socket while a body is sent, so in botocore
`connect_timeout` is what notices a frozen uplink and `read_timeout` only bounds the wait for the reply.
There is no state on disk: an interrupted upload is found again by asking the server (ListMultipartUploads, ListParts), and every
part that is already there is checked against the file before it is believed.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import hashlib
import io
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from training.box.supervisor import read_env_file

T = TypeVar("T")
Progress = Callable[[int, int], None]
Moved = Callable[[int], None]

MIN_PART_BYTES = 5 << 20  # S3's own floor for all parts but the last
PART_BYTES = 8 << 20
MAX_PARTS = 10_000
COPY_BYTES = 1 << 30  # S3 copies at most 5 GB in one request, and a smaller one answers sooner
# Parts between two looks whether more connections would be faster, and how much faster they must be.
_STEADY_PARTS = 32
_WORTH_IT = 1.2
EXPIRY_VARIABLE = "AWS_CREDENTIAL_EXPIRATION"
KEY_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", EXPIRY_VARIABLE)
PRIVATE_ENV_VARIABLE = "LIVERY_PRIVATE_ENV"
_DENIED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthFailure"}
_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"}
_CONFLICT = {"PreconditionFailed", "ConditionalRequestConflict"}
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
# Damage or haste on the way, not a verdict on the request.
_PASSING = {"SlowDown", "RequestTimeout", "IncompleteBody", "BadDigest", "InvalidDigest", "InternalError"}


class StoreError(Exception):
    """The bucket answered something that cannot be used. The message never holds a key or a secret."""


class StoreUnreachable(StoreError):
    """No answer, a broken connection, a 5xx: nothing is known about the object."""


class StoreDenied(StoreError):
    """401 or 403: the key is wrong or may not do this."""


class StoreConflict(StoreError):
    """412: the object is already there and `create_only` was asked, or is no longer the one that was to be replaced."""


class MachineFault(StoreError):
    """This machine's own fault, its disk or its clock: no other setting helps, another machine does."""


@dataclass(frozen=True)
class ObjectInfo:
    key: str
    size: int
    modified: float
    """Epoch seconds."""


# Using a client is safe in many threads, making one is not.
_making_a_client = threading.Lock()


@functools.cache
def _session() -> Any:
    """One a process: it keeps S3's description, a tenth of a second to read, for the next client."""
    import boto3  # most of a second: a process that only names this module's errors does not pay it

    session = boto3.session.Session()
    session._session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
    return session


def _timestamp(value: Any) -> Any:
    """A listing's times without botocore's guessing of their format, which costs a listing of a thousand objects half of its time."""
    if isinstance(value, str) and value[4:5] == "-":
        return datetime.fromisoformat(value.replace("Z", "+00:00"))
    from botocore.utils import parse_timestamp

    return parse_timestamp(value)


class _StillExpired(Exception):
    pass


def _renewing_session(private_env: Path, key: dict[str, Any], expires: str) -> Any:
    """A session whose key is read again from the private file shortly before it expires."""
    import boto3
    import botocore.session
    from botocore.credentials import RefreshableCredentials

    def renew() -> dict[str, Any]:
        fresh = read_env_file(str(private_env)) if private_env.exists() else {}
        until = fresh.get(EXPIRY_VARIABLE, expires)
        if datetime.fromisoformat(until).timestamp() <= time.time():
            raise _StillExpired(f"{private_env.name} holds one that was good until {until}; the flow renews it there")
        names = {"access_key": "AWS_ACCESS_KEY_ID", "secret_key": "AWS_SECRET_ACCESS_KEY", "token": "AWS_SESSION_TOKEN"}
        return {name: fresh.get(variable) for name, variable in names.items()} | {"expiry_time": until}

    first = {
        "access_key": key["aws_access_key_id"],
        "secret_key": key["aws_secret_access_key"],
        "token": key["aws_session_token"],
        "expiry_time": expires,
    }
    session = botocore.session.get_session()
    session._credentials = RefreshableCredentials.create_from_metadata(first, renew, "livery-private-env")
    return boto3.session.Session(botocore_session=session)


def _renewed_in(environ: Mapping[str, str]) -> Path | None:
    expires, place = environ.get(EXPIRY_VARIABLE), environ.get(PRIVATE_ENV_VARIABLE)
    return Path(place) if expires and place else None


class Store:
    """One bucket. Thread-safe; every call gives up by itself (a few attempts, `stall_s` each)."""

    def __init__(
        self,
        bucket: str,
        *,
        endpoint_url: str | None,
        region: str,
        access_key_id: str,
        secret_access_key: str,
        stall_s: float = 15,
        session_token: str | None = None,
        private_env: Path | None = None,
        expires: str = "",
    ) -> None:
        """`private_env`: where a key that `expires` (ISO 8601) is renewed while the store is in use."""
        self.bucket = bucket
        self.where = f"bucket '{bucket}'" + (f" at {endpoint_url}" if endpoint_url else "")
        key: dict[str, Any] = {
            "aws_access_key_id": access_key_id,
            "aws_secret_access_key": secret_access_key,
            "aws_session_token": session_token,
        }
        with _making_a_client:
            session, key = (_renewing_session(private_env, key, expires), {}) if private_env else (_session(), key)
            self._client: Any = session.client(
                "s3",
                endpoint_url=endpoint_url,
                region_name=region,
                config=_config(stall_s, path_style=endpoint_url is not None),
                **key,
            )

    @classmethod
    def from_environment(cls, bucket: str, environ: Mapping[str, str] = os.environ, *, stall_s: float = 15) -> Store:
        """A store from the usual AWS_* variables; StoreError names each one that is missing. `folder:/path` is a folder of this machine.

        With AWS_CREDENTIAL_EXPIRATION the key is read again, before it expires, from the file that LIVERY_PRIVATE_ENV names.
        """
        if bucket.startswith("folder:"):
            from training.box.folder import FolderStore

            return FolderStore(Path(bucket.removeprefix("folder:")))
        missing = [name for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") if not environ.get(name)]
        if missing:
            raise StoreError(f"bucket '{bucket}': {' and '.join(missing)} not set in the environment")
        return cls(
            bucket,
            endpoint_url=environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or None,
            region=environ.get("AWS_DEFAULT_REGION") or environ.get("AWS_REGION") or "us-east-1",
            access_key_id=environ["AWS_ACCESS_KEY_ID"],
            secret_access_key=environ["AWS_SECRET_ACCESS_KEY"],
            session_token=environ.get("AWS_SESSION_TOKEN") or None,
            private_env=_renewed_in(environ),
            expires=environ.get(EXPIRY_VARIABLE, ""),
            stall_s=stall_s,
        )

    def check(self) -> None:
        """One signed question to the bucket; StoreUnreachable, StoreDenied or StoreError in one clear sentence."""
        self._ask("list", "", lambda: self._client.list_objects_v2(Bucket=self.bucket, MaxKeys=1), attempts=2)

    def get_bytes(self, key: str) -> bytes | None:
        """The object's content; None only if the bucket says that this key does not exist."""

        def get() -> bytes:
            body: bytes = self._client.get_object(Bucket=self.bucket, Key=key)["Body"].read()
            return body

        try:
            return self._ask("read", key, get)
        except _NoSuchKey:
            return None

    def put_bytes(
        self,
        key: str,
        data: bytes,
        *,
        create_only: bool = False,
        replaces: str | None = None,
        content_type: str = "application/json",
    ) -> None:
        """Write a small object whole. StoreConflict if another content is already there and `create_only` was asked, or if what is there is not
        the `version` that it `replaces`."""
        condition = {"IfMatch": replaces} if replaces else {"IfNoneMatch": "*"} if create_only else {}

        def put() -> None:
            self._client.put_object(
                Bucket=self.bucket,
                Key=key,
                Body=data,
                ContentType=content_type,
                ContentMD5=_md5_base64(data),
                **condition,
            )

        try:
            self._ask("write", key, put)
        except StoreConflict:
            # A first attempt whose reply was lost makes the second one conflict with itself.
            if self.get_bytes(key) != data:
                raise

    def size(self, key: str) -> int | None:
        """Bytes of the object; None only if the bucket says that this key does not exist."""
        head = self._head(key)
        return None if head is None else int(head["ContentLength"])

    def version(self, key: str) -> str | None:
        """What `put_bytes(replaces=…)` takes: it changes with the content. None only if the bucket says that this key does not exist."""
        head = self._head(key)
        return None if head is None else str(head["ETag"])

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects under a prefix, all pages, in key order."""
        found: list[ObjectInfo] = []
        token: dict[str, str] = {}
        while True:
            page = self._ask("list", prefix, lambda token=token: self._page(prefix, token))  # type: ignore[misc]
            for item in page.get("Contents", []):
                found.append(ObjectInfo(item["Key"], int(item["Size"]), item["LastModified"].timestamp()))
            if not page.get("IsTruncated"):
                return found
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, key: str) -> None:
        """Remove one object; removing what is not there is no error."""
        self._ask("delete", key, lambda: self._client.delete_object(Bucket=self.bucket, Key=key))

    def server_time(self) -> float:
        """Epoch seconds by the bucket's own clock, from the Date header (whole seconds). A refusal has one, too."""
        try:
            reply = self._client.list_objects_v2(Bucket=self.bucket, MaxKeys=1)
        except ClientError as error:
            reply = error.response
        except (BotoCoreError, HTTPClientError, OSError) as error:
            raise StoreUnreachable(f"{self.where} does not answer ({type(error).__name__})") from None
        header = reply["ResponseMetadata"]["HTTPHeaders"].get("date")
        if not header:
            raise StoreError(f"{self.where} sent no Date header")
        return parsedate_to_datetime(header).timestamp()

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
        """Put a file under `key` with its sha256 as metadata; the bytes really sent, 0 if the same content was there.

        `progress(done, total)` counts bytes in parts that the bucket has acknowledged. `moved(n)` counts bytes that the
        socket took: a sign of life between two parts, and ahead of the truth by what the kernel buffers.
        StoreError if what arrived is not what was sent.
        """
        size = path.stat().st_size
        if self._holds(key, size, sha256):
            progress(size, size)
            return 0
        upload = _Upload(self, path, key, size, sha256, _part_bytes(size, part_bytes), progress, moved)
        sent = upload.whole() if size <= upload.part_bytes else upload.in_parts(workers)
        if not self._holds(key, size, sha256):
            raise StoreError(f"{self.where}: {key} does not hold what was sent ({size} bytes, sha256 {sha256[:12]})")
        return sent

    def download_file(
        self,
        key: str,
        path: Path,
        *,
        progress: Progress = lambda done, total: None,
        moved: Moved = lambda taken: None,
        expect_bytes: int | None = None,
        expect_sha256: str | None = None,
        attempts: int = 5,
    ) -> None:
        """Fetch an object to `path`: resumes an interrupted download, verifies, and only then gives it its name. `moved(n)` counts what came
        over the line.

        Checked are the size, the sha256 (the expected one, else the one in the object's metadata) and, failing both, a plain
        MD5 ETag. StoreError if they differ: the part file is deleted, for what is wrong now would be wrong again.
        """
        head = self._head(key)
        if head is None:
            raise StoreError(f"{self.where}: {key} does not exist")
        size, etag = int(head["ContentLength"]), str(head["ETag"]).strip('"')
        if expect_bytes is not None and size != expect_bytes:
            raise StoreError(f"{self.where}: {key} has {size} bytes, want {expect_bytes}")
        path.parent.mkdir(parents=True, exist_ok=True)
        # The ETag in the name keeps a part of an older version of the object from being continued.
        part = path.with_name(f"{path.name}.{etag[:16]}.part")
        self._fetch(key, part, size, head["ETag"], progress, moved, attempts)
        wanted = expect_sha256 or head["Metadata"].get("sha256")
        problem = _mismatch(part, size, wanted, etag)
        if problem:
            part.unlink()
            raise StoreError(f"{self.where}: {key}: {problem}; what was downloaded is deleted")
        os.replace(part, path)

    def copy(self, source: str, key: str, *, sha256: str) -> int:
        """Put one object's content under another key without it crossing this machine's line; its bytes. StoreError if it is not there."""
        size = self.size(source)
        if size is None:
            raise StoreError(f"{self.where}: {source} does not exist")
        if self._holds(key, size, sha256):
            return size
        place = {"Bucket": self.bucket, "Key": key}
        origin, metadata = {"Bucket": self.bucket, "Key": source}, {"sha256": sha256}
        if size <= COPY_BYTES:
            self._ask(
                "copy",
                source,
                lambda: self._client.copy_object(
                    **place, CopySource=origin, Metadata=metadata, MetadataDirective="REPLACE"
                ),
            )
            return size
        upload = self._ask("write", key, lambda: self._client.create_multipart_upload(**place, Metadata=metadata))
        upload_id, parts = upload["UploadId"], []
        for number, begin in enumerate(range(0, size, COPY_BYTES), 1):
            span = f"bytes={begin}-{min(size, begin + COPY_BYTES) - 1}"
            reply = self._ask(
                "copy",
                source,
                lambda number=number, span=span: self._client.upload_part_copy(  # type: ignore[misc]
                    **place, UploadId=upload_id, PartNumber=number, CopySource=origin, CopySourceRange=span
                ),
            )
            parts.append({"PartNumber": number, "ETag": reply["CopyPartResult"]["ETag"]})
        whole = {"Parts": parts}
        self._ask(
            "complete",
            key,
            lambda: self._client.complete_multipart_upload(**place, UploadId=upload_id, MultipartUpload=whole),
        )
        return size

    def abort_uploads(self, prefix: str) -> int:
        """Abort unfinished multipart uploads under a prefix (they are billed until then); how many there were."""
        uploads = [(item["Key"], item["UploadId"]) for item in self._unfinished(prefix)]
        for key, upload_id in uploads:
            self._abort(key, upload_id)
        return len(uploads)

    def _fetch(
        self, key: str, part: Path, size: int, etag: str, progress: Progress, moved: Moved, attempts: int
    ) -> None:
        failures = 0
        while (start := part.stat().st_size if part.exists() else 0) < size or not part.exists():
            try:
                self._fetch_from(key, part, start, size, etag, progress, moved)
            except StoreUnreachable:
                grown = part.exists() and part.stat().st_size > start
                failures = 0 if grown else failures + 1
                if failures >= attempts:
                    raise
                time.sleep(_pause(failures))

    def _fetch_from(
        self, key: str, part: Path, start: int, size: int, etag: str, progress: Progress, moved: Moved
    ) -> None:
        span = {"Range": f"bytes={start}-"} if start else {}

        def fetch() -> None:
            body = self._client.get_object(Bucket=self.bucket, Key=key, IfMatch=etag, **span)["Body"]
            done = start
            with part.open("ab") as file:
                for chunk in body.iter_chunks(1 << 18):
                    file.write(chunk)
                    done += len(chunk)
                    moved(len(chunk))
                    progress(done, size)

        self._ask("read", key, fetch, attempts=1)

    def _page(self, prefix: str, token: dict[str, str]) -> dict[str, Any]:
        page: dict[str, Any] = self._client.list_objects_v2(Bucket=self.bucket, Prefix=prefix, **token)
        return page

    def _head(self, key: str) -> Any | None:
        try:
            return self._ask("read", key, lambda: self._client.head_object(Bucket=self.bucket, Key=key))
        except _NoSuchKey:
            pass
        # A HEAD has no body, so its 404 could be the bucket's; a GET says which.
        try:
            self._ask("read", key, lambda: self._client.get_object(Bucket=self.bucket, Key=key, Range="bytes=0-0"))
        except _NoSuchKey:
            return None
        return self._ask("read", key, lambda: self._client.head_object(Bucket=self.bucket, Key=key))

    def _holds(self, key: str, size: int, sha256: str) -> bool:
        head = self._head(key)
        return head is not None and int(head["ContentLength"]) == size and head["Metadata"].get("sha256") == sha256

    def _unfinished(self, prefix: str) -> Iterator[dict[str, Any]]:
        marker: dict[str, str] = {}
        while True:
            page = self._ask(
                "list uploads",
                prefix,
                lambda marker=marker: self._client.list_multipart_uploads(  # type: ignore[misc]
                    Bucket=self.bucket, Prefix=prefix, **marker
                ),
            )
            yield from page.get("Uploads", [])
            if not page.get("IsTruncated"):
                return
            marker = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _abort(self, key: str, upload_id: str) -> None:
        with contextlib.suppress(_NoSuchUpload):
            self._ask(
                "abort an upload of",
                key,
                lambda: self._client.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload_id),
            )

    def _ask(self, what: str, key: str, call: Callable[[], T], *, attempts: int = 4) -> T:
        """Make one call; retried only when nothing is known of its fate. All errors leave here as StoreError."""
        for attempt in range(attempts):
            try:
                return call()
            except ClientError as error:
                told = self._told(what, key, error)
            except _StillExpired as error:
                raise StoreDenied(f"{self.where}: the temporary key has expired: {error}") from None
            except (BotoCoreError, HTTPClientError, OSError) as error:
                if isinstance(error, OSError) and (fault := disk_fault(error)):
                    raise MachineFault(f"{key}: {fault}") from None
                told = StoreUnreachable(
                    f"{self.where} does not answer: could not {what} {key} ({_brief(error)})".replace("  ", " ")
                )
            if not isinstance(told, StoreUnreachable) or attempt + 1 == attempts:
                raise told from None
            time.sleep(_pause(attempt))
        raise AssertionError("attempts must be at least 1")

    def _told(self, what: str, key: str, error: ClientError) -> StoreError:
        """What the server's answer means, in one sentence. Its own message is left out: it may quote the key."""
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code == "NoSuchBucket":
            return StoreError(f"{self.where} does not exist; create it, or correct its name")
        if code == "NoSuchUpload":
            return _NoSuchUpload(f"{self.where}: the upload of {key} is no longer there")
        if code == "NoSuchKey" or (status == 404 and code in ("404", "NotFound", "")):
            return _NoSuchKey(f"{self.where}: {key} does not exist")
        if code == "RequestTimeTooSkewed":
            return MachineFault(
                f"{self.where}: this machine's clock is more than 15 minutes wrong; set it, or take another machine"
            )
        if code in _EXPIRED:
            return StoreDenied(
                f"{self.where}: the temporary key has expired ({code}); start again with a fresh one, or one that lasts as long as the run"
            )
        if code in _CONFLICT or status == 412:
            return StoreConflict(f"{self.where}: {key} is already there, or has changed meanwhile")
        if status >= 500 or status == 429 or code in _PASSING:
            return StoreUnreachable(f"{self.where} answered {status} {code} when asked to {what} {key}")
        if status in (401, 403) or code in _DENIED:
            return StoreDenied(
                f"{self.where} refused to {what} {key}".rstrip()
                + f" ({code or status}): check the access key, its secret and what the key is allowed to do"
            )
        return StoreError(f"{self.where} refused to {what} {key} ({status} {code})")


class _NoSuchKey(StoreError):
    pass


class _NoSuchUpload(StoreError):
    pass


class _Upload:
    """One file on its way. Parts are counted once the bucket has acknowledged them."""

    def __init__(
        self,
        store: Store,
        path: Path,
        key: str,
        size: int,
        sha256: str,
        part_bytes: int,
        progress: Progress,
        moved: Moved,
    ) -> None:
        self.store, self.path, self.key, self.size, self.sha256 = store, path, key, size, sha256
        self.part_bytes = part_bytes
        self._progress, self._moved = progress, moved
        self._lock = threading.Lock()
        self._done = self._sent = 0

    def whole(self) -> int:
        data = self.path.read_bytes()
        self.store._ask(
            "write",
            self.key,
            lambda: self.store._client.put_object(
                Bucket=self.store.bucket,
                Key=self.key,
                Body=_Counted(data, self._moved),
                ContentMD5=_md5_base64(data),
                Metadata={"sha256": self.sha256},
            ),
        )
        self._acknowledged(len(data), sent=True)
        return self._sent

    def in_parts(self, workers: int) -> int:
        """Send the missing parts and join them; begins again once if the half-done upload has vanished meanwhile."""
        try:
            return self._in_parts(workers)
        except _NoSuchUpload:
            if self.store._holds(self.key, self.size, self.sha256):  # completed, and only the reply was lost
                return self._sent
            self._done = 0
            return self._in_parts(workers)

    def _in_parts(self, workers: int) -> int:
        upload_id, there = self._resume()
        self._adopt_part_size(there)
        numbers = range(1, -(-self.size // self.part_bytes) + 1)
        with ThreadPoolExecutor(workers) as pool:
            try:
                found = pool.map(lambda number: self._arrived(number, there), sorted(set(there) & set(numbers)))
                parts = [part for part in found if part is not None]
                known = {part["PartNumber"] for part in parts}
                missing = [number for number in numbers if number not in known]
                parts += self._send_missing(missing, upload_id, pool, workers)
            finally:
                # The first failure ends the upload; what is queued would only fail again, and is resumable anyway.
                pool.shutdown(wait=True, cancel_futures=True)
        parts.sort(key=lambda part: int(part["PartNumber"]))
        self.store._ask(
            "complete",
            self.key,
            lambda: self.store._client.complete_multipart_upload(
                Bucket=self.store.bucket, Key=self.key, UploadId=upload_id, MultipartUpload={"Parts": parts}
            ),
        )
        return self._sent

    def _send_missing(
        self, numbers: list[int], upload_id: str, pool: ThreadPoolExecutor, most: int
    ) -> list[dict[str, Any]]:
        """Over as few connections as reach the line's rate, found by trying twice as many now and then: what is in flight when an upload is
        killed must be sent again, and on a line that one connection fills, more of them only make that more."""
        parts: list[dict[str, Any]] = []
        width, rates = 1, dict[int, float]()
        while numbers:
            trial = next((each for each in (width, 2 * width) if each <= most and each not in rates), None)
            count = trial if trial else _STEADY_PARTS
            batch, numbers = numbers[:count], numbers[count:]
            began = time.monotonic()
            for each in _at_most(pool, trial or width, batch, lambda number: self._part(number, upload_id)):
                parts.append(each)
            if trial is None:
                width, rates = max(1, width // 2), {}  # the line may have changed
            elif len(batch) == trial:
                rates[trial] = trial / max(1e-6, time.monotonic() - began)
                width = trial if rates[trial] > _WORTH_IT * rates.get(width, 0.0) else width
        return parts

    def _adopt_part_size(self, there: dict[int, tuple[str, int]]) -> None:
        """Go on in parts of the size that arrived before: cut otherwise, none of them could be used."""
        last = max(there, default=0)
        sizes = {size for number, (_, size) in there.items() if number < last or number == 1}
        if len(sizes) == 1 and (size := sizes.pop()) >= MIN_PART_BYTES and size * MAX_PARTS >= self.size:
            self.part_bytes = size

    def _resume(self) -> tuple[str, dict[int, tuple[str, int]]]:
        """The unfinished upload of this key that holds most, with its parts; older ones are aborted. A new one if none."""
        best: tuple[str, dict[int, tuple[str, int]]] | None = None
        for item in self.store._unfinished(self.key):
            if item["Key"] != self.key:
                continue
            parts = self._parts_of(item["UploadId"])
            if best and len(best[1]) >= len(parts):
                self.store._abort(self.key, item["UploadId"])
                continue
            if best:
                self.store._abort(self.key, best[0])
            best = item["UploadId"], parts
        if best:
            return best
        reply = self.store._ask(
            "write",
            self.key,
            lambda: self.store._client.create_multipart_upload(
                Bucket=self.store.bucket, Key=self.key, Metadata={"sha256": self.sha256}
            ),
        )
        return reply["UploadId"], {}

    def _parts_of(self, upload_id: str) -> dict[int, tuple[str, int]]:
        parts: dict[int, tuple[str, int]] = {}
        marker = 0
        while True:
            try:
                page = self.store._ask(
                    "list parts of",
                    self.key,
                    lambda marker=marker: self.store._client.list_parts(  # type: ignore[misc]
                        Bucket=self.store.bucket, Key=self.key, UploadId=upload_id, PartNumberMarker=marker
                    ),
                )
            except _NoSuchUpload:
                return {}
            for part in page.get("Parts", []):
                parts[part["PartNumber"]] = part["ETag"], int(part["Size"])
            if not page.get("IsTruncated"):
                return parts
            marker = int(page["NextPartNumberMarker"])

    def _arrived(self, number: int, there: dict[int, tuple[str, int]]) -> dict[str, Any] | None:
        """The part, if what the bucket has of it is what the file has."""
        data, (etag, size) = self._cut(number), there[number]
        if size != len(data) or etag.strip('"') != hashlib.md5(data, usedforsecurity=False).hexdigest():
            return None
        self._acknowledged(len(data), sent=False)
        return {"PartNumber": number, "ETag": etag}

    def _cut(self, number: int) -> bytes:
        with self.path.open("rb") as file:
            file.seek((number - 1) * self.part_bytes)
            return file.read(self.part_bytes)

    def _part(self, number: int, upload_id: str) -> dict[str, Any]:
        data = self._cut(number)
        reply = self.store._ask(
            "write",
            self.key,
            lambda: self.store._client.upload_part(
                Bucket=self.store.bucket,
                Key=self.key,
                UploadId=upload_id,
                PartNumber=number,
                Body=_Counted(data, self._moved),
                ContentMD5=_md5_base64(data),
            ),
        )
        self._acknowledged(len(data), sent=True)
        return {"PartNumber": number, "ETag": reply["ETag"]}

    def _acknowledged(self, count: int, *, sent: bool) -> None:
        with self._lock:
            self._done += count
            self._sent += count if sent else 0
            self._progress(self._done, self.size)


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


def _config(stall_s: float, *, path_style: bool) -> Any:
    from botocore.config import Config

    return Config(
        signature_version="s3v4",
        connect_timeout=stall_s,
        read_timeout=4 * stall_s,
        # Retries are ours: botocore's would hide how long nothing has moved.
        retries={"mode": "standard", "total_max_attempts": 1},
        tcp_keepalive=True,
        max_pool_connections=16,
        # Newer botocore adds trailers that some S3-compatibles store inside the object.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if path_style else "auto", "payload_signing_enabled": False},
    )


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


def _part_bytes(size: int, asked: int) -> int:
    return max(asked, MIN_PART_BYTES, -(-size // MAX_PARTS))


def _pause(attempt: int) -> float:
    return min(10.0, 0.3 * 2.0**attempt)


def _md5_base64(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _brief(error: Exception) -> str:
    """The kind of failure, and the socket's own word for it, without the request."""
    cause = error.__context__ or error.__cause__
    name = type(error).__name__
    return f"{name}, {type(cause).__name__}" if cause and not isinstance(cause, ClientError) else name


def _mismatch(path: Path, size: int, sha256: str | None, etag: str) -> str:
    seen = path.stat().st_size
    if seen != size:
        return f"{seen} bytes arrived, want {size}"
    algorithm, wanted = ("sha256", sha256) if sha256 else ("md5", etag if len(etag) == 32 and "-" not in etag else None)
    if wanted is None:
        return ""
    with path.open("rb") as file:
        got = hashlib.file_digest(file, algorithm).hexdigest()
    return "" if got == wanted else f"{algorithm} of what arrived is {got[:12]}…, want {wanted[:12]}…"


def disk_fault(error: OSError) -> str:
    """In words, if the disk is to blame for it; else empty."""
    return f"this machine's disk failed: {error.strerror}" if error.errno in _DISK else ""


def sha256_of(path: Path, worked: Moved = lambda count: None) -> str:
    """`worked(n)` hears of every block: hashing a file of many GB takes as long as a stall."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            worked(len(block))
    return digest.hexdigest()
