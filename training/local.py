"""A run on this machine, with no orchestrator and no server: a folder that is box and bucket in one.

    RUN/recipe.json, events.jsonl, model/, data/, work/     as on a box
    RUN/bucket/                                             what would lie in the bucket: checkpoints, the adapter

`bucket:` sources of the recipe are looked for in RUN/bucket, unless a directory is given for them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from training.box.prefetch import MARKER
from training.contract.events import Event, EventLog
from training.contract.recipe import Assignment, Recipe, RecipeError, parse_recipe
from training.contract.recipe_yaml import read_yaml
from training.contract.rows import RowError, check_rows
from training.phases.desk import Home

_NO_END = 2**31 - 1


def prepare(recipe_path: Path, folder: Path, model: Path | None, data_dir: Path | None, dph_usd: float = 0.0) -> Path:
    """Lay everything where the runner looks for it; returns the assignment's path. RecipeError names the field whose source is not there."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    recipe, home, bucket = load(recipe_path), Home(folder), folder / "bucket"
    bucket.mkdir(exist_ok=True)
    if recipe.trainer != "counting":
        _link(_model(recipe, bucket, model), home.model)
        files = [path for path in home.model.rglob("*") if path.is_file()]
        for name, source in _data(recipe).items():
            found = _file(source, name, recipe_path.parent, bucket, data_dir)
            home.data(name).parent.mkdir(exist_ok=True)
            shutil.copyfile(found, home.data(name))
            files.append(home.data(name))
        entries = {str(path.relative_to(folder)): {"bytes": path.stat().st_size} for path in files}
        (folder / MARKER).write_text(json.dumps({"files": entries}), encoding="utf-8")
    assignment = Assignment(
        recipe=recipe,
        run=recipe.name,
        flow_run_id="local",
        attempt=1,
        bucket=f"folder:{bucket}",
        hard_end=_NO_END,
        dph_usd=dph_usd,
    )
    path = folder / "recipe.json"
    path.write_text(assignment.model_dump_json(indent=1), encoding="utf-8")
    return path


def require_rows(home: Home) -> None:
    """RowError for the first dataset that cannot be trained on: a long run must not end at the rows of its last phase."""
    assignment = Assignment.model_validate_json((home.root / "recipe.json").read_text(encoding="utf-8"))
    if assignment.recipe.trainer == "counting":
        return
    kinds = {phase.name: phase.kind for phase in assignment.recipe.phases}
    for name in _data(assignment.recipe):
        with home.data(name).open("rb") as lines:
            problems = check_rows(kinds.get(name, "evaluation"), lines, subject=home.data(name).name).problems
        if problems:
            more = f" (and {len(problems) - 1} more; `python -m training.data check` shows all)" if problems[1:] else ""
            raise RowError(f"data of '{name}': {problems[0]}{more}")


def load(path: Path) -> Recipe:
    """The recipe in a YAML file; RecipeError with a line for each problem."""
    import yaml  # comes with transformers; a box reads JSON and does without

    try:
        data: Any = read_yaml(path.read_text(encoding="utf-8"), yaml)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is not UTF-8 at byte {error.start}; want a YAML file") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    return parse_recipe(data, path.name)


class PrintedLog(EventLog):
    """Events that are also told to a person, a line each where there is something to say."""

    _aborted = False

    def emit(self, event: Event) -> None:
        super().emit(event)
        line = told(event)
        if line and not (self._aborted and event.kind == "runner_end"):  # the abort has said why
            print(line, flush=True)
        self._aborted = event.kind == "abort"


def told(event: Event) -> str:
    """One line for a person; empty for events that only a program needs."""
    match event.kind:
        case "runner_start":
            done = f", done before: {', '.join(event.done)}" if event.done else ""
            return f"phases: {', '.join(event.phases)}{done}"
        case "phase_start":
            return f"{event.phase}: from step {event.step} of {event.max_steps}"
        case "step":
            loss = "not finite" if event.loss is None else f"{event.loss:.4f}"
            reward = f"  reward {event.metrics['reward']:.3f}" if "reward" in event.metrics else ""
            money = f"  ${event.usd:.6f}" if event.usd else ""
            return f"{event.phase} {event.step}/{event.max_steps}  loss {loss}{reward}  {event.seconds:.2f} s{money}"
        case "checkpoint_durable":
            return f"{event.phase} {event.step}: checkpoint stored, {event.bytes / 1e6:.1f} MB new"
        case "evaluated":
            return f"evaluation of the {event.when}: " + ", ".join(
                f"{name} {value:.3f}" for name, value in event.metrics.items()
            )
        case "exported":
            return f"adapter: bucket/{event.prefix}"
        case "notice":
            return f"note: {event.what}: {event.reason}"
        case "abort":
            return f"stopped: {event.reason}" + (f" (likely cause: {event.likely_cause})" if event.likely_cause else "")
        case "runner_end":
            return event.reason
    return ""


def _model(recipe: Recipe, bucket: Path, given: Path | None) -> Path:
    source = recipe.model.source
    if given is None and not source.startswith("bucket:"):
        raise RecipeError(f"model.source: '{source}' is not on this machine; give its directory with --model")
    directory = given or bucket / source.removeprefix("bucket:")
    if not (directory / "config.json").is_file():
        raise RecipeError(
            f"model.source: no model in {directory}; give its directory with --model (`python -m training.tiny --out DIR` makes a tiny one)"
        )
    return directory.absolute()


def _data(recipe: Recipe) -> dict[str, str]:
    sources = {phase.name: phase.data for phase in recipe.phases}
    return sources | ({"evaluation": recipe.evaluation.data} if recipe.evaluation.data else {})


def _file(source: str, name: str, beside: Path, bucket: Path, data_dir: Path | None) -> Path:
    """`bucket:KEY` lies in the run's bucket, or under its last name in the given directory; a path is relative to the recipe."""
    if not source.startswith("bucket:"):
        path = beside / source
    else:
        key = source.removeprefix("bucket:")
        path = data_dir / Path(key).name if data_dir else bucket / key
    if not path.is_file():
        raise RecipeError(f"data of '{name}': no file {path}; put it there, or give its directory with --data-dir")
    if path.suffix != ".jsonl":
        raise RecipeError(
            f"data of '{name}': {path.name} is not JSON lines; convert it first (python -m training.data convert)"
        )
    return path


def _link(source: Path, place: Path) -> None:
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        raise RecipeError(f"--folder: {place} is in the way, want a link there; move it, or give another folder")
    place.symlink_to(source)
