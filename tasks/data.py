"""The datasets of a recipe: found, made JSON lines where they are not, read row by row and put into the bucket before a cent is spent."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tasks.errors import UserError
from training.box.store import Store
from training.contract import layout
from training.contract.recipe import Recipe
from training.contract.rows import RowReport, check_rows

log = logging.getLogger(__name__)
_SHOWN_PROBLEMS = 5
# Half a million long rows take minutes; what takes longer hangs.
_COMMAND_S = 3600
_TOKENIZER_FILES = {
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
}


@dataclass(frozen=True)
class _Dataset:
    """A dataset of the recipe as JSON lines on this machine."""

    name: str
    kind: str
    source: str
    path: Path
    key: str | None
    """Where the bucket holds these very lines already."""


def prepare_data(recipe: Recipe, store: Store, folder: Path) -> tuple[Recipe, dict[str, str]]:
    """Check every row of every dataset; put what is not JSON lines in the bucket there, under its digest.

    Returns the recipe with all data in the bucket, and each dataset's sha256 by phase name (`evaluation` too).
    UserError names the file, the line and the field of each of the first problems.
    """
    with _fetched(recipe, lambda: store, folder) as datasets:
        reports = {dataset.name: _check(dataset) for dataset in datasets}
        _refuse(datasets, reports)
        placed = {dataset.name: _place(dataset, reports[dataset.name].sha256, store) for dataset in datasets}
    phases = tuple(phase.model_copy(update={"data": placed[phase.name]}) for phase in recipe.phases)
    evaluation = recipe.evaluation.model_copy(update={"data": placed.get("evaluation")})
    resolved = recipe.model_copy(update={"phases": phases, "evaluation": evaluation})
    return resolved, {name: report.sha256 for name, report in reports.items()}


def check_data(recipe: Recipe, folder: Path, open_store: Callable[[], Store]) -> str:
    """What the datasets are, as text; nothing is written anywhere. The bucket is opened only if data or model lie there.

    UserError has a line for each problem found, first by the rows' own rules, then by the tokenizer's.
    """
    with _fetched(recipe, open_store, folder) as datasets:
        reports = {dataset.name: _check(dataset) for dataset in datasets}
        _refuse(datasets, reports)
        told = [
            f"{dataset.name}: {dataset.source}: {reports[dataset.name].count} rows, sha256 {reports[dataset.name].sha256[:12]}"
            for dataset in datasets
        ]
        table = _by_tokenizer(recipe, datasets[0].path.parent, open_store)
        warnings = (warning for report in reports.values() for warning in report.warnings)
        return "\n".join([*told, table, *(f"warning: {warning}" for warning in warnings if warning not in table)])


@contextmanager
def _fetched(recipe: Recipe, open_store: Callable[[], Store], folder: Path) -> Iterator[list[_Dataset]]:
    """All datasets, as PHASE.jsonl in one folder, which goes away afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        yield [_fetch(*source, open_store, folder, Path(scratch)) for source in _sources(recipe)]


def _sources(recipe: Recipe) -> Iterable[tuple[str, str, str]]:
    for phase in recipe.phases:
        yield phase.name, phase.kind, phase.data
    if recipe.evaluation.data:
        yield "evaluation", "evaluation", recipe.evaluation.data


def _fetch(name: str, kind: str, source: str, open_store: Callable[[], Store], folder: Path, scratch: Path) -> _Dataset:
    lines = scratch / f"{name}.jsonl"
    if source.startswith("bucket:"):
        raw, key = _download(name, source, open_store(), scratch / name), source.removeprefix("bucket:")
    else:
        raw, key = _local(name, source, folder), None
    if raw.is_dir() or raw.suffix == ".parquet":
        # Under the source's own name, which is what messages about its rows show.
        made = scratch / ".made" / name / raw.name
        made.parent.mkdir(parents=True)
        _convert(name, source, raw, made)
        raw, key = made, None
    lines.symlink_to(raw.resolve())
    return _Dataset(name, kind, source, lines, key)


def _local(name: str, source: str, folder: Path) -> Path:
    path = Path(source).expanduser()
    path = path if path.is_absolute() else folder / path
    if not path.exists():
        raise UserError(
            f"{name} data: '{source}': no such file or folder (looked at {path}); paths are relative to the recipe's file"
        )
    return path


def _download(name: str, source: str, store: Store, into: Path) -> Path:
    """One object, or all objects under a prefix."""
    key = source.removeprefix("bucket:").rstrip("/")
    into.mkdir()
    if store.size(key) is not None:
        path = into / PurePosixPath(key).name
        store.download_file(key, path)
        return path
    found = store.list(f"{key}/")
    if not found:
        raise UserError(
            f"{name} data: '{source}': no such object in the bucket, and nothing under it; upload it, or give a local path"
        )
    for item in found:
        relative = PurePosixPath(item.key.removeprefix(f"{key}/"))
        if item.key.endswith("/"):
            continue
        if ".." in relative.parts or relative.is_absolute():
            raise UserError(f"{name} data: '{source}': holds an object called '{item.key}'; want plain names")
        (into / relative).parent.mkdir(parents=True, exist_ok=True)
        store.download_file(item.key, into / relative)
    return into


def _convert(name: str, source: str, raw: Path, lines: Path) -> None:
    code, output, errors = _training_data("convert", str(raw), str(lines))
    if code != 0:
        raise UserError(f"{name} data: '{source}': {errors or f'the conversion ended with {code}'}")
    made = json.loads(output)
    log.info("%s data: %s: %d rows made JSON lines, sha256 %s", name, source, made["rows"], made["sha256"][:12])
    for note in made["notes"]:
        log.warning("%s data: %s: %s", name, source, note)


def _check(dataset: _Dataset) -> RowReport:
    with dataset.path.open("rb") as lines:
        report = check_rows(dataset.kind, lines, subject=PurePosixPath(dataset.source).name)
    log.info(
        "%s data: %s: %d rows, %d problems, sha256 %s",
        dataset.name,
        dataset.source,
        report.count,
        len(report.problems),
        report.sha256[:12],
    )
    for warning in report.warnings:
        log.warning("%s data: %s", dataset.name, warning)
    return report


def _refuse(datasets: list[_Dataset], reports: dict[str, RowReport]) -> None:
    problems: list[str] = []
    for dataset in datasets:
        found = reports[dataset.name].problems
        problems += [f"{dataset.name} data: {problem}" for problem in found[:_SHOWN_PROBLEMS]]
        if len(found) > _SHOWN_PROBLEMS:
            problems.append(f"{dataset.name} data: and {len(found) - _SHOWN_PROBLEMS} more problems")
    if problems:
        raise UserError("\n".join(problems))


def _place(dataset: _Dataset, sha256: str, store: Store) -> str:
    if dataset.key is not None:
        return dataset.source
    key = layout.dataset(sha256)
    sent = store.upload_file(dataset.path, key, sha256=sha256)
    log.info("%s data: %s in the bucket as %s (%d bytes sent)", dataset.name, dataset.source, key, sent)
    return f"bucket:{key}"


def _by_tokenizer(recipe: Recipe, data: Path, open_store: Callable[[], Store]) -> str:
    """The table that `python -m training.data check` prints, or why there is none."""
    if recipe.trainer == "counting":
        return "no checks by the tokenizer: the counting trainer has none"
    if not recipe.model.source.startswith("bucket:"):
        return f"no checks by the tokenizer: {recipe.model.source} is not in the bucket; `python -m training.data check` takes a local copy"
    tokenizer, prefix = data / ".tokenizer", recipe.model.source.removeprefix("bucket:").rstrip("/")
    store = open_store()
    names = [item.key for item in store.list(f"{prefix}/") if item.key.removeprefix(f"{prefix}/") in _TOKENIZER_FILES]
    if not any(name.endswith("/tokenizer_config.json") for name in names):
        raise UserError(
            f"model.source: '{recipe.model.source}' has no tokenizer_config.json; mirror the whole model into the bucket"
        )
    tokenizer.mkdir()
    for key in names:
        store.download_file(key, tokenizer / PurePosixPath(key).name)
    (data / ".recipe.json").write_text(recipe.model_dump_json(), encoding="utf-8")
    code, output, errors = _training_data(
        "check", str(data / ".recipe.json"), "--data", str(data), "--tokenizer", str(tokenizer)
    )
    if code == 2:
        return f"no checks by the tokenizer: {errors}"
    if code != 0:
        raise UserError(errors or f"`python -m training.data check` ended with {code}")
    return output.rstrip()


def _training_data(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `python -m training.data`: in a process of its own, because it loads what flows never load.
    It is given no secret; it needs none."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("LIVERY_", "AWS_", "HF_TOKEN"))
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "training.data", *arguments],
            env=environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"`python -m training.data {arguments[0]}` took more than {_COMMAND_S} s; split the data"
        ) from None
    errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
    return done.returncode, done.stdout, "\n".join(errors) or "\n".join(done.stderr.splitlines()[-1:])
