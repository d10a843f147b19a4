"""A real SeaweedFS server on loopback for the store and the transfers, and a link that can be broken in front of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from deployments.rehearsal.bucket import BUCKET, Bucket
from tests.training.box.netfault import Link
from training.box.store import Store


@dataclass(frozen=True)
class Weed:
    port: int
    access_key_id: str
    secret_access_key: str

    def store(self, port: int | None = None, *, bucket: str = BUCKET, stall_s: float = 5, secret: str = "") -> Store:
        return Store(
            bucket,
            endpoint_url=f"http://127.0.0.1:{port or self.port}",
            region="us-east-1",
            access_key_id=self.access_key_id,
            secret_access_key=secret or self.secret_access_key,
            stall_s=stall_s,
        )

    def environ(self, port: int | None = None) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port or self.port}",
        }


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    bucket = Bucket(tmp_path_factory.mktemp("weed") / "bucket")
    bucket.start()
    try:
        bucket.wait_ready(timeout_s=60)
        yield Weed(bucket.port, bucket.control.access_key_id, bucket.control.secret_access_key)
    finally:
        bucket.stop(keep=False)


@pytest.fixture
def link(weed: Weed) -> Iterator[Link]:
    link = Link(weed.port)
    yield link
    link.close()


@pytest.fixture
def store(weed: Weed) -> Store:
    return weed.store()


@pytest.fixture
def blob(tmp_path: Path) -> Callable[[int], tuple[Path, str]]:
    """Makes a file of random bytes; its path and sha256."""
    import hashlib

    def make(size: int) -> tuple[Path, str]:
        data = os.urandom(size)
        path = tmp_path / f"blob-{secrets.token_hex(4)}"
        path.write_bytes(data)
        return path, hashlib.sha256(data).hexdigest()

    return make
