"""The runner with nothing around it: a recipe, a folder, and lines for a person."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.conftest import RECIPES
from training.contract import layout
from training.contract.events import Event, read_events
from training.contract.recipe import Assignment, RecipeError
from training.local import load, prepare
from training.phases import counting
from training.runner import main


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """The runner takes SIGTERM and SIGINT for itself and completes the environment."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    environment = dict(os.environ)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Path]:
    """`recipe(shipped, **changes)`: a recipe's file with top-level fields replaced."""

    def write(shipped: str, **changes: Any) -> Path:
        data = yaml.safe_load((RECIPES / f"{shipped}.yaml").read_text()) | changes
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(data))
        return path

    return write


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """As much of a model and its data as is looked at before training."""
    (tmp_path / "world" / "model").mkdir(parents=True)
    (tmp_path / "world" / "model" / "config.json").write_text("{}")
    (tmp_path / "world" / "datasets").mkdir()
    for name in ("cpt", "sft", "dpo", "kto", "grpo", "evaluation"):
        (tmp_path / "world" / "datasets" / f"{name}.jsonl").write_text("{}\n")
    return tmp_path / "world"


def events(folder: Path) -> list[Event]:
    return list(read_events(folder / "events.jsonl"))


def test_a_recipe_runs_in_a_folder_and_a_second_start_trains_nothing_again(
    recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = recipe("counting", step_seconds=0.001), tmp_path / "run"
    words = ["--recipe", str(path), "--folder", str(run), "--dph-usd", "3600"]
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "phases: cpt, sft, dpo, kto, grpo" and said[-1].startswith("all phases done")
    (step,) = (line for line in said if line.startswith("kto 20/20"))
    assert "loss" in step and " s  $0.0" in step
    assert "sft 20: checkpoint stored, 0.3 MB new" in said
    assert (run / "bucket" / layout.exported("counting")).is_file()
    assert main(words) == 0
    assert "done before: cpt, sft, dpo, kto, grpo" in capsys.readouterr().out
    assert sum(event.kind == "step" for event in events(run)) == 100


def test_data_and_model_are_taken_from_the_given_directories_or_from_the_folders_own_bucket(
    recipe: Callable[..., Path], world: Path, tmp_path: Path
) -> None:
    path, run = recipe("tiny-moe"), tmp_path / "run"
    first = prepare(path, run, world / "model", world / "datasets")
    assert (run / "model").resolve() == (world / "model").resolve()
    assert (run / "data" / "evaluation.jsonl").read_text() == "{}\n"
    assert Assignment.model_validate_json(first.read_text()).bucket == f"folder:{run / 'bucket'}"

    bucket = tmp_path / "other" / "bucket"
    bucket.mkdir(parents=True)
    (bucket / "models").mkdir()
    (world / "model").rename(bucket / "models" / "tiny-moe")
    (bucket / "datasets").mkdir()
    (world / "datasets").rename(bucket / "datasets" / "tiny")
    prepare(path, tmp_path / "other", None, None)
    assert (tmp_path / "other" / "data" / "sft.jsonl").read_text() == "{}\n"


def test_what_is_not_there_is_named_with_the_field_and_the_way_out(
    recipe: Callable[..., Path], world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run = recipe("tiny-moe"), tmp_path / "run"
    assert main(["--recipe", str(path), "--folder", str(run)]) == 2
    assert "model.source: no model in" in capsys.readouterr().err
    (world / "datasets" / "dpo.jsonl").unlink()
    with pytest.raises(RecipeError, match=r"data of 'dpo': no file .*dpo\.jsonl; .*--data-dir"):
        prepare(path, run, world / "model", world / "datasets")
    phases = [{"kind": "sft", "data": "chats.parquet", "steps": 1, "learning_rate": 1e-3}]
    (tmp_path / "chats.parquet").write_bytes(b"")
    with pytest.raises(RecipeError, match=r"chats\.parquet is not JSON lines; convert it first"):
        prepare(recipe("tiny-moe", phases=phases), run, world / "model", None)
    hub = {"source": f"hub:owner/name@{'0' * 40}", "family": "qwen3_5_moe", "size_gb": 1}
    with pytest.raises(RecipeError, match="is not on this machine; give its directory with --model"):
        prepare(recipe("tiny-moe", model=hub), run, None, world / "datasets")


def test_a_recipe_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        load(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("phases: [")
    with pytest.raises(RecipeError, match=r"bad\.yaml: is not YAML: .*line 1"):
        load(tmp_path / "bad.yaml")
    (tmp_path / "bad.yaml").write_bytes(b"\xff")
    with pytest.raises(RecipeError, match="is not UTF-8 at byte 0"):
        load(tmp_path / "bad.yaml")


def test_rows_of_a_later_phase_are_looked_at_before_the_first_one_trains(
    recipe: Callable[..., Path], world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "datasets" / "cpt.jsonl").write_text('{"text": "x"}\n')
    words = ["--recipe", str(recipe("tiny-moe")), "--folder", str(tmp_path / "run")]
    assert main([*words, "--model", str(world / "model"), "--data-dir", str(world / "datasets")]) == 2
    assert capsys.readouterr().err.startswith("data of 'sft': sft.jsonl: line 1: ")
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_whatever_stands_in_the_runners_way_is_one_line(
    recipe: Callable[..., Path], world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def last(*words: str | Path) -> tuple[int, list[str]]:
        code = main([str(word) for word in words])
        said = capsys.readouterr()
        return code, (said.out + said.err).splitlines()

    counting, run = recipe("counting", step_seconds=0.001), tmp_path / "run"
    (tmp_path / "file").touch()
    code, (line,) = last("--recipe", counting, "--folder", tmp_path / "file")
    assert code == 1 and "file cannot be used: [Errno 20]" in line
    code, (line,) = last("--assignment", tmp_path / "none.json")
    assert code == 2 and "none.json: cannot be read" in line
    (tmp_path / "box.json").write_text("{}")
    code, lines = last("--assignment", tmp_path / "box.json")
    assert code == 2 and lines[0] == "stopped: box.json: recipe: Field required"
    run.mkdir()
    (run / "events.jsonl").write_text("a note of mine\n")
    code, lines = last("--recipe", counting, "--folder", run)
    assert code == 1 and "events.jsonl cannot be used: not an event: 'a note of mine" in lines[-1]
    assert (run / "events.jsonl").read_text() == "a note of mine\n"
    (tmp_path / "other" / "model").mkdir(parents=True)
    tiny = ("--recipe", recipe("tiny-moe"), "--folder", tmp_path / "other")
    code, (line,) = last(*tiny, "--model", world / "model", "--data-dir", world / "datasets")
    assert code == 2 and "other/model is in the way" in line


def test_a_run_that_stops_says_why_once_and_without_a_traceback(
    recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--recipe", str(recipe("counting", step_seconds=0.001)), "--folder", str(tmp_path / "run")]
    assert main(words) == 0
    capsys.readouterr()
    recipe("counting", step_seconds=0.001, seed=8)
    assert main(words) == 3
    said = capsys.readouterr()
    (line,) = [*said.out.splitlines(), *said.err.splitlines()]
    assert line.startswith("stopped: runs/counting/manifests/cpt/00000020.json: was trained by another recipe")


def test_ctrl_c_saves_first_and_a_second_one_ends_at_once(
    recipe: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped = counting._step

    def interrupted(value: float, desk: Any, step: int) -> tuple[float, float]:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return stepped(value, desk, step)

    monkeypatch.setattr(counting, "_step", interrupted)
    path = recipe("counting", step_seconds=0.001)
    assert main(["--recipe", str(path), "--folder", str(tmp_path / "run")]) == 143
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    said = capsys.readouterr().out
    assert "cpt 3: checkpoint stored" in said and "told to stop after step 3 of 20" in said


def test_a_recipe_and_its_folder_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--recipe", "x.yaml"])
    assert "--recipe and --folder go together" in capsys.readouterr().err
