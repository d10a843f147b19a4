"""Runs on a card with no orchestrator and no server: a folder is box and bucket in one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")

from tests.gpu.timeline import line
from training.contract.events import Event, read_events

ROOT = Path(__file__).parents[2]


@dataclass
class CardRun:
    """A run in a folder, and the command that starts or resumes it."""

    folder: Path
    recipe: Path
    world: Path
    starts: list[float] = field(default_factory=list)
    """When each runner was started, in seconds since the epoch."""
    _told: int = 0

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "training.runner", "--recipe", str(self.recipe), "--folder", str(self.folder)]
        command += ["--model", str(self.world / "model"), "--data-dir", str(self.world / "datasets")]
        self.folder.mkdir(parents=True, exist_ok=True)
        log = (self.folder / "log").open("ab")
        self.starts.append(time.time())
        return subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=log, stderr=subprocess.STDOUT)

    def run(self, timeout_s: float) -> None:
        runner = self.start()
        try:
            self.wait_for(lambda: runner.poll() is not None, timeout_s)
        finally:
            self.kill(runner)
        assert runner.returncode == 0, (self.folder / "log").read_text()[-6000:]

    def kill(self, runner: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(runner.pid, signal.SIGKILL)
        runner.wait()

    def wait_for(self, found: Callable[[], bool], timeout_s: float) -> None:
        """AssertionError with the end of the log after `timeout_s`. Events are printed as they come, so a run that is cut off shows how far it was."""
        deadline = time.monotonic() + timeout_s
        while not found():
            self._tell()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()[-3000:]
            time.sleep(0.2)
        self._tell()

    def of(self, kind: str) -> list[Any]:
        return [event for event in self.events() if event.kind == kind]

    def events(self) -> list[Event]:
        return list(read_events(self.folder / "events.jsonl"))

    def _tell(self) -> None:
        new = self.events()[self._told :]
        self._told += len(new)
        for event in new:
            if told := line(event, self.starts[-1]):
                print(told, flush=True)


def card_recipe(**changes: Any) -> dict[str, Any]:
    """The tiny recipe as a card trains it: bfloat16 and the 8-bit optimizer. `changes` replace top-level fields."""
    data: dict[str, Any] = yaml.safe_load((ROOT / "training" / "recipes" / "tiny-moe.yaml").read_text())
    data["model"]["dtype"] = "bfloat16"
    data["box"] |= {"tier": "h200", "device": "cuda"}
    data["optimizer"] = "adamw_8bit"
    return data | changes


@pytest.fixture
def card_run(tmp_path: Path) -> Callable[[dict[str, Any], Path], CardRun]:
    def make(recipe: dict[str, Any], world: Path) -> CardRun:
        return place(tmp_path, recipe, world)

    return make


def place(directory: Path, recipe: dict[str, Any], world: Path) -> CardRun:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return CardRun(directory / "run", path, world)
