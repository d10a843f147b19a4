from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from training import sinks
from training.contract.events import Evaluated, EventLog, Heartbeat, Notice, PhaseEnd, RunnerStart, Step, read_events

RECIPES = Path(__file__).parents[2] / "training" / "recipes"
STEPS = {"cpt": 3, "sft": 4}


def step(phase: str, number: int, **changes: Any) -> Step:
    given: dict[str, Any] = {
        "phase": phase,
        "step": number,
        "max_steps": STEPS[phase],
        "loss": 2.0 / number,
        "seconds": 1.0,
    }
    return Step.model_validate({**given, "grad_norms": {"attention": 0.5}, "metrics": {"reward": 0.25}, **changes})


def written(path: Path, *events: Any) -> Path:
    log = EventLog(path)
    for event in events:
        log.emit(event)
    return path


class Curves:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []

    def write(self, at: int, values: Mapping[str, float]) -> None:
        self.told.append((at, dict(values)))

    def close(self) -> None: ...


def test_every_number_of_a_step_is_a_curve_of_its_phase_and_what_is_unknown_is_none() -> None:
    assert sinks.numbers(step("sft", 2, tokens=700, mfu=0.25)) == {
        "sft/loss": 1.0,
        "sft/seconds": 1.0,
        "sft/tokens": 700.0,
        "sft/mfu": 0.25,
        "sft/grad_norm/attention": 0.5,
        "sft/reward": 0.25,
    }
    assert "sft/loss" not in sinks.numbers(step("sft", 2, loss=None))
    assert sinks.numbers(Heartbeat(memory_mb=10.0, gpu_power_w=640.0)) == {
        "box/memory_mb": 10.0,
        "box/gpu_power_w": 640.0,
    }
    assert sinks.numbers(Evaluated(when="base", rows=1, metrics={"valid_rate": 0.5})) == {
        "evaluation/base/valid_rate": 0.5
    }
    assert sinks.numbers(Notice(what="x", reason="y")) == {}


def test_phases_follow_each_other_on_one_axis_also_where_an_earlier_one_was_done_on_another_box(tmp_path: Path) -> None:
    curves = Curves()
    feed = sinks.Feed(curves, STEPS)
    for event in (step("sft", 1), Heartbeat(memory_mb=1.0), step("sft", 2)):
        feed(event)
    assert [at for at, _ in curves.told] == [4, 4, 5]


def test_a_replayed_file_gives_the_same_curves(tmp_path: Path) -> None:
    events = [RunnerStart(phases=("cpt", "sft")), *(step("cpt", n) for n in (1, 2, 3)), step("sft", 1)]
    path = written(tmp_path / "events.jsonl", *events, PhaseEnd(phase="sft", step=1, max_steps=4, complete=False))
    curves = Curves()
    assert sinks.replay(path, curves) == 4
    assert [(at, values.get("cpt/loss", values.get("sft/loss"))) for at, values in curves.told] == [
        (1, 2.0),
        (2, 1.0),
        (3, 2.0 / 3),
        (4, 2.0),
    ]


def test_a_tracker_whose_package_is_missing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(sinks.TrackerError, match=r"'trackio' is not installed here; install livery\[trackio\]"):
        sinks.require(["trackio"])


def test_wandb_without_a_key_is_refused_and_not_asked_for_at_a_terminal_that_nobody_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(sinks.TrackerError, match="LIVERY_WANDB_API_KEY"):
        sinks.require(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    sinks.require(["wandb"])


def test_a_tracker_that_fails_is_told_once_and_stops_nothing(tmp_path: Path) -> None:
    told: list[tuple[str, str]] = []
    path = written(tmp_path / "events.jsonl", step("cpt", 1))
    (tmp_path / "trackers").write_text("a file where the folder should be")
    with sinks.following(["tensorboard"], path, "r", STEPS, lambda *words: told.append(words), poll_s=0.01):
        for number in (2, 3):
            written(path, step("cpt", number))
    assert len(told) == 1 and told[0][0] == "tracker tensorboard stopped"


def test_a_run_whose_tracker_is_missing_stops_before_it_trains(tmp_path: Path) -> None:
    if importlib.util.find_spec("trackio"):
        pytest.skip("trackio is installed here")
    recipe = yaml.safe_load((RECIPES / "counting.yaml").read_text()) | {"trackers": ["trackio"]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    words = ["--recipe", str(tmp_path / "recipe.yaml"), "--folder", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-m", "training.runner", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    events = list(read_events(tmp_path / "run" / "events.jsonl"))
    assert [event.kind for event in events] == ["abort", "runner_end"]
    assert "'trackio' is not installed here" in events[0].reason and events[0].blame == "user"


def test_the_command_line_names_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    assert sinks.main(["tensorboard", "--events", str(tmp_path / "none"), "--into", str(tmp_path)]) == 2
    assert "no such file" in capsys.readouterr().err


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard's own reader finds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return [(each.step, each.value) for each in found.Scalars(name)]


def test_tensorboard_reads_what_was_replayed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    path = written(
        tmp_path / "box" / "events.jsonl", RunnerStart(phases=("cpt", "sft")), step("cpt", 1), step("cpt", 2)
    )
    assert sinks.main(["tensorboard", "--events", str(path), "--into", str(tmp_path)]) == 0
    assert scalars(tmp_path / "tensorboard" / "box", "cpt/loss") == [(1, 2.0), (2, 1.0)]


def test_tensorboard_follows_a_run_and_the_run_goes_on_in_the_same_curves_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    told: list[tuple[str, str]] = []
    path = tmp_path / "events.jsonl"
    for numbers in ((1, 2), (3,)):
        with sinks.following(["tensorboard"], path, "r", STEPS, lambda *words: told.append(words), poll_s=0.01):
            for number in numbers:
                written(path, step("cpt", number))
    assert told == []
    seen = scalars(tmp_path / "trackers" / "tensorboard" / "r", "cpt/loss")
    assert [at for at, _ in seen] == [1, 2, 3], "what an earlier runner told is not told again"
