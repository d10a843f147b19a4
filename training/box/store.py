"""The one S3 module of the product: small objects, resumable uploads and downloads, and errors that say what to do.

How the client waits and where its key comes from is in training.box.client, what its answers mean in training.box.store_errors, how a large
file goes up in training.box.multipart, how one comes down in training.box.download.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from training.box.client import EXPIRY_VARIABLE, StillExpired, make_client, renewed_in
from training.box.download import Download
from training.box.multipart import PART_BYTES, Upload, md5_base64
from training.box.store_errors import (
    MachineFault,
    NoUpload,
    StoreConflict,
    StoreDenied,
    StoreError,
    StoreMissing,
    StoreUnreachable,
    brief,
    disk_fault,
    pause_s,
    told,
)

__all__ = [
    "PART_BYTES",
    "MachineFault",
    "Moved",
    "NoUpload",
    "ObjectInfo",
    "Progress",
    "Store",
    "StoreConflict",
    "StoreDenied",
    "StoreError",
    "StoreMissing",
    "StoreUnreachable",
    "disk_fault",
    "sha256_of",
]

T = TypeVar("T")
Progress = Callable[[int, int], None]
Moved = Callable[[int], None]

COPY_BYTES = 1 << 30  # S3 copies at most 5 GB in one request, and a smaller one answers sooner


@dataclass(frozen=True)
class ObjectInfo:
    key: str
    size: int
    modified: float
    """Epoch seconds."""


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
        key = {
            "aws_access_key_id": access_key_id,
            "aws_secret_access_key": secret_access_key,
            "aws_session_token": session_token,
        }
        self._client = make_client(
            key,
            endpoint_url=endpoint_url,
            region=region,
            stall_s=stall_s,
            private_env=private_env,
            expires=expires,
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
            private_env=renewed_in(environ),
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
        except StoreMissing:
            return None

    def stream(self, key: str) -> Iterator[bytes]:
        """The object's content in blocks as they arrive, for as long as the caller wants them. StoreMissing if there is no such object."""
        body = self._ask("read", key, lambda: self._client.get_object(Bucket=self.bucket, Key=key)["Body"])
        blocks = body.iter_chunks(1 << 16)
        try:
            while block := self._ask("read", key, lambda: next(blocks, b""), attempts=1):
                yield block
        finally:
            body.close()

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
                ContentMD5=md5_base64(data),
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

        `progress(done, total)` counts bytes that the bucket has acknowledged. `moved(n)` counts bytes that the socket took: a sign of life
        between two acknowledgements, and ahead of the truth by what the kernel buffers. An upload that was killed goes on from what the bucket
        has of it, and sends at most `part_bytes` again, over however many connections (at most `workers`) it went.
        StoreError if what arrived is not what was sent.
        """
        size = path.stat().st_size
        if self._holds(key, size, sha256):
            progress(size, size)
            return 0
        upload = Upload(
            self,
            path,
            key,
            size=size,
            sha256=sha256,
            part_bytes=part_bytes,
            workers=workers,
            progress=progress,
            moved=moved,
        )
        sent = upload.send()
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
        worked: Moved = lambda count: None,
        expect_bytes: int | None = None,
        expect_sha256: str | None = None,
        attempts: int = 5,
    ) -> str:
        """Fetch an object to `path`: resumes an interrupted download, verifies, and only then gives it its name; its sha256. `moved(n)` counts
        what came over the line, `worked(n)` what of it was hashed.

        Checked are the size, the sha256 (the expected one, else the one in the object's metadata) and, failing both, a plain
        MD5 ETag. StoreError if they differ, and the part file is deleted; StoreMissing if there is no such object.
        """
        download = Download(self, key, path, progress=progress, moved=moved, worked=worked)
        return download.fetch(expect_bytes, expect_sha256, attempts)

    def copy(self, source: str, key: str, *, sha256: str) -> int:
        """Put one object's content under another key without it crossing this machine's line; its bytes. StoreMissing if it is not there."""
        size = self.size(source)
        if size is None:
            raise StoreMissing(f"{self.where}: {source} does not exist")
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

    def _page(self, prefix: str, token: dict[str, str]) -> dict[str, Any]:
        page: dict[str, Any] = self._client.list_objects_v2(Bucket=self.bucket, Prefix=prefix, **token)
        return page

    def _head(self, key: str) -> Any | None:
        """None only if the bucket says that this key does not exist. A HEAD's refusal has no body: a GET is asked what is meant by it, a missing
        key or bucket, an expired key, a wrong clock."""

        def head() -> Any:
            return self._client.head_object(Bucket=self.bucket, Key=key)

        try:
            return self._ask("read", key, head)
        except StoreUnreachable:
            raise
        except StoreError:
            pass
        try:
            self._ask("read", key, lambda: self._client.get_object(Bucket=self.bucket, Key=key, Range="bytes=0-0"))
        except StoreMissing:
            return None
        return self._ask("read", key, head)

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
        with contextlib.suppress(NoUpload):
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
                problem = told(self.where, what, key, error)
            except StillExpired as error:
                raise StoreDenied(f"{self.where}: the temporary key has expired: {error}") from None
            except (BotoCoreError, HTTPClientError, OSError) as error:
                if isinstance(error, OSError) and (fault := disk_fault(error)):
                    raise MachineFault(f"{key}: {fault}") from None
                problem = StoreUnreachable(
                    f"{self.where} does not answer: could not {what} {key} ({brief(error)})".replace("  ", " ")
                )
            if not isinstance(problem, StoreUnreachable) or attempt + 1 == attempts:
                raise problem from None
            time.sleep(pause_s(attempt))
        raise AssertionError("attempts must be at least 1")


def sha256_of(path: Path, worked: Moved = lambda count: None) -> str:
    """`worked(n)` hears of every block: hashing a file of many GB takes as long as a stall."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            worked(len(block))
    return digest.hexdigest()
