"""What the transfers cost against the plain client: bytes a second, and the length of a step while a checkpoint is sent.

    AWS_ENDPOINT_URL_S3=… AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… python -m training.box.benchmark --bucket NAME [--mb 256] [--rounds 3] [--uplink-mbps 400]

Compared is boto3's own `upload_file` and `download_file` (s3transfer, its default threads and parts) with `Store.upload_file` and
`Store.download_file`, which also count, hash and verify; they take turns, on one file of random bytes, and the best round of each counts.
The step is a fixed amount of arithmetic on one core in this process, while the transfer runs in a child as on a box.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from training.box.store import Store, sha256_of

PREFIX = "runs/_benchmark/"
_STEPS, _TURNS = 4, 25


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="training.box.benchmark", description="The transfers against the plain client."
    )
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--uplink-mbps", type=float, default=400, help="rate of the upload beside the steps")
    parser.add_argument("--send", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    store = Store.from_environment(options.bucket)
    if options.send:
        return _send_for_ever(store, options.send, options.uplink_mbps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        _write_random(path, options.mb << 20)
        try:
            found = {**speeds(store, path, options.rounds), **steps(options.bucket, path, options.uplink_mbps)}
        finally:
            store.abort_uploads(PREFIX)
            for item in store.list(PREFIX):
                store.delete(item.key)
    found |= {"mb": options.mb, "cores": os.cpu_count(), "load": [round(each, 2) for each in os.getloadavg()]}
    print(json.dumps(found, indent=1))
    return 0


def speeds(store: Store, path: Path, rounds: int) -> dict[str, Any]:
    """MB/s of the best of `rounds`, for ours and for the plain client, each way."""
    sha256, client = sha256_of(path), store._client
    back = path.with_name("back")
    ours: dict[str, list[float]] = {"up": [], "down": []}
    plain: dict[str, list[float]] = {"up": [], "down": []}
    for number in range(rounds):
        key = f"{PREFIX}{secrets.token_hex(4)}-{number}"
        plain["up"].append(_seconds(lambda key=key: client.upload_file(str(path), store.bucket, f"{key}p")))
        ours["up"].append(_seconds(lambda key=key: store.upload_file(path, f"{key}o", sha256=sha256)))
        plain["down"].append(_seconds(lambda key=key: client.download_file(store.bucket, f"{key}o", str(back))))
        back.unlink()
        ours["down"].append(_seconds(lambda key=key: store.download_file(f"{key}o", back, expect_sha256=sha256)))
        back.unlink()
        for suffix in "op":
            store.delete(key + suffix)
    mb = path.stat().st_size / 1e6
    rates = {
        f"{way}_{name}_mb_s": round(mb / min(times[way]), 1)
        for name, times in (("ours", ours), ("boto3", plain))
        for way in ("up", "down")
    }
    return rates | {f"{way}_share": round(min(plain[way]) / min(ours[way]), 3) for way in ("up", "down")}


def steps(bucket: str, path: Path, uplink_mbps: float) -> dict[str, Any]:
    """Median seconds of a step with and without an upload at `uplink_mbps` beside it. They take turns, the uploading process being stopped in
    between, so that a change of the machine's load meets both. A box has more cores than its training thread: where the system can, the step
    has one for itself and the upload the others."""
    alone, beside = [], []
    command = [sys.executable, "-m", "training.box.benchmark", "--bucket", bucket, "--send", str(path)]
    ours = _cores()
    child = subprocess.Popen([*command, "--uplink-mbps", str(uplink_mbps)], stdout=subprocess.PIPE)
    if len(ours) > 1:
        os.sched_setaffinity(child.pid, ours[1:])
        os.sched_setaffinity(0, ours[:1])
    assert child.stdout is not None
    try:
        child.stdout.readline()  # it is on its way
        for _ in range(_TURNS):
            beside += [_step() for _ in range(_STEPS)]
            child.send_signal(signal.SIGSTOP)
            alone += [_step() for _ in range(_STEPS)]
            child.send_signal(signal.SIGCONT)
    finally:
        if len(ours) > 1:
            os.sched_setaffinity(0, ours)
        child.kill()
        child.communicate()
    before, during = statistics.median(alone), statistics.median(beside)
    return {
        "step_s": round(before, 4),
        "step_uploading_s": round(during, 4),
        "step_longer": round(during / before - 1, 4),
        "uplink_mbps": uplink_mbps,
    }


def _send_for_ever(store: Store, path: Path, uplink_mbps: float) -> int:
    sha256, number = sha256_of(path), 0
    pace = _Paced(uplink_mbps)
    print("sending", flush=True)
    while True:
        store.upload_file(path, f"{PREFIX}step-{os.getpid()}-{number}", sha256=sha256, moved=pace)
        number += 1


class _Paced:
    """Holds the senders back to a box's uplink: loopback would take more than any of them has, and the server works on this machine, too."""

    def __init__(self, mbps: float) -> None:
        self._bytes_s = mbps * 1e6 / 8
        self._free_at = 0.0
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._bytes_s
            wait = self._free_at - time.monotonic()
        if wait > 0.005:
            time.sleep(wait)


def _cores() -> list[int]:
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _step() -> float:
    block = b"x" * (1 << 20)
    began = time.perf_counter()
    for _ in range(100):
        hashlib.sha256(block).digest()
    return time.perf_counter() - began


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _write_random(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for begin in range(0, size, 1 << 20):
            file.write(os.urandom(min(1 << 20, size - begin)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
