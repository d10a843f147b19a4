"""A real S3 server, the tiny world, and boxes' folders for the runner."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

# Before torch is imported: with more threads than cores a tiny training step takes forty times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

from deployments.rehearsal.bucket import BUCKET, REGION, Bucket
from training.box.store import Store
from training.contract.events import Event, read_events
from training.contract.recipe import Assignment, Recipe, parse_recipe

RECIPES = Path(__file__).parents[2] / "training" / "recipes"


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

    @property
    def store(self) -> Store:
        return Store.from_environment(Assignment.model_validate_json(self.assignment.read_text()).bucket)

    def start(self) -> subprocess.Popen[bytes]:
        """The runner as the supervisor starts it, in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "training.runner", "--assignment", str(self.assignment)],
            env=self.environment,
            start_new_session=True,
            stdout=(self.root / "log").open("ab"),
            stderr=subprocess.STDOUT,
        )

    def run_here(self) -> int:
        """The runner in this process, which spares the seconds that torch's import takes."""
        from training.runner import main

        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        environment = dict(os.environ)
        try:
            return main(["--assignment", str(self.assignment)])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.environ.clear()
            os.environ.update(environment)

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
    bucket = Bucket(tmp_path_factory.mktemp("weed") / "bucket")
    bucket.start()
    try:
        bucket.wait_ready(timeout_s=60)
        yield {
            "AWS_ACCESS_KEY_ID": bucket.control.access_key_id,
            "AWS_SECRET_ACCESS_KEY": bucket.control.secret_access_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL_S3": bucket.endpoint_url,
        }
    finally:
        bucket.stop(keep=False)


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


@dataclass
class Cascade:
    """A run of seven phases that went through, on a bucket that also kept what the run had dropped."""

    box: Box
    bucket: Path
    cpu_s: float

    @property
    def store(self) -> Store:
        return Store.from_environment(f"folder:{self.bucket}")

    @property
    def ends(self) -> dict[str, Any]:
        return {event.phase: event for event in self.box.of("phase_end")}


def seven_phases() -> Recipe:
    """The tiny recipe as the most that a run may be: two SFT and two DPO phases with names and data of their own, GRPO with a KL term."""
    of = {phase["kind"]: phase for phase in recipe_of("tiny-moe").model_dump(mode="json")["phases"]}

    def phase(kind: str, steps: int, **changes: Any) -> dict[str, Any]:
        return of[kind] | {"steps": steps, "save_every_steps": -(-steps // 2)} | changes

    return recipe_of(
        "tiny-moe",
        phases=[
            phase("cpt", 4),
            phase("sft", 50),
            phase("sft", 4, name="sft-again", learning_rate=1e-3),
            phase("dpo", 4, accumulation=2),
            phase("dpo", 2, name="dpo-again"),
            phase("kto", 4),
            phase("grpo", 4, beta=0.05),
        ],
    )


@pytest.fixture(scope="session")
def cascade(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Cascade:
    """The uninterrupted run, in this process."""
    from training.box.folder import FolderStore

    root = tmp_path_factory.mktemp("cascade")
    box = place_box(root / "box", {}, seven_phases(), "cascade", tiny, bucket=f"folder:{root / 'bucket'}")
    for name in ("sft-again", "dpo-again"):
        path = box.root / "data" / f"{name}.jsonl"
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    before = time.process_time()
    with pytest.MonkeyPatch.context() as patch:
        # The checkpoints in the middle of a phase are what a lost box would leave; the run itself drops them when the phase is done.
        patch.setattr(FolderStore, "delete", lambda self, key: None)
        code = box.run_here()
    assert code == 0, box.of("abort")
    cascade = Cascade(box, root / "bucket", time.process_time() - before)
    steps = len(box.of("step"))
    print(f"cascade: {len(cascade.ends)} phases, {steps} steps in {cascade.cpu_s:.1f} CPU-seconds on one thread")
    return cascade


def desk_of(box: Box, phase: str, start: Path | None = None, stop: Any = None) -> Any:
    """A phase's desk in the box's folder, for a test that calls its parts in this process. Close its uploader."""
    import threading

    from training.checkpoint import Checkpoints, Identity
    from training.contract.events import EventLog
    from training.phases.desk import Desk, Home, Pulse
    from training.runner import versions
    from training.uploader import Uploader

    home = Home(box.root)
    assignment = Assignment.model_validate_json(box.assignment.read_text())
    store = Store.from_environment(assignment.bucket)
    checkpoints = Checkpoints(store, assignment.run, home.work / "staging", lambda *_: None)
    return Desk(
        assignment=assignment,
        phase=assignment.recipe.phase(phase),
        home=home,
        events=EventLog(home.events),
        pulse=Pulse(),
        stop=stop or threading.Event(),
        uploader=Uploader(box.assignment, home.work / "staging", checkpoints, lambda *_: None),
        store=store,
        identity=Identity("d", "", versions(counting=False), None, ("adapter_model.safetensors",)),
        start=start,
    )


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


@pytest.fixture
def make_local(tmp_path: Path) -> Callable[..., Box]:
    """As make_box, with a folder for the bucket, the same for all boxes of a test."""

    def make(recipe: Recipe, run: str, world: Path | None = None) -> Box:
        root = tmp_path / f"box-{len(list(tmp_path.glob('box-*')))}"
        return place_box(root, {}, recipe, run, world, bucket=f"folder:{tmp_path / 'bucket'}")

    return make


def place_box(
    root: Path, s3: dict[str, str], recipe: Recipe, run: str, world: Path | None = None, bucket: str = BUCKET
) -> Box:
    """Each phase finds the data of its own name or, without such a file, of its kind."""
    (root / "data").mkdir(parents=True)
    if world is not None:
        (root / "model").symlink_to(world / "model")
        for name, kind in [(phase.name, phase.kind) for phase in recipe.phases] + [("evaluation", "evaluation")]:
            own = world / "datasets" / f"{name}.jsonl"
            shutil.copy(own if own.exists() else own.with_stem(kind), root / "data" / f"{name}.jsonl")
        files = [path for folder in ("data", "model") for path in (root / folder).iterdir()]
        entries = {str(path.relative_to(root)): {"bytes": path.stat().st_size} for path in files}
        (root / "prefetched.json").write_text(json.dumps({"files": entries}))
    assignment = Assignment(
        recipe=recipe, run=run, flow_run_id="a" * 36, attempt=1, bucket=bucket, hard_end=4_000_000_000, dph_usd=1.0
    )
    (root / "recipe.json").write_text(assignment.model_dump_json())
    (root / "private.env").write_text("".join(f"{name}={value}\n" for name, value in s3.items()))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return Box(root, environment)
