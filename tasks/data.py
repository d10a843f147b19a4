"""The datasets of a recipe: found, read row by row and put into the bucket before a cent is spent."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.errors import UserError
from training.box.store import Store
from training.contract import layout
from training.contract.recipe import Recipe
from training.contract.rows import RowReport, check_rows

log = logging.getLogger(__name__)
_SHOWN_PROBLEMS = 5


def prepare_data(recipe: Recipe, store: Store, folder: Path) -> tuple[Recipe, dict[str, str]]:
    """Check every row of every dataset; copy local files to the bucket.

    Returns the recipe with all data in the bucket, and each dataset's sha256 by phase name (`evaluation` too).
    UserError names the file, the line and the field of each of the first problems.
    """
    digests: dict[str, str] = {}
    sources: dict[str, str] = {}
    problems: list[str] = []
    for name, kind, source in _sources(recipe):
        report = _check(name, kind, source, store, folder)
        shown = [f"{name} data: {problem}" for problem in report.problems[:_SHOWN_PROBLEMS]]
        more = len(report.problems) - len(shown)
        problems += [*shown, *([f"{name} data: and {more} more problems"] if more > 0 else [])]
        digests[name], sources[name] = report.sha256, source
    if problems:
        raise UserError("\n".join(problems))
    return _with_bucket_data(recipe, sources, digests, store, folder), digests


def _sources(recipe: Recipe) -> Iterable[tuple[str, str, str]]:
    for phase in recipe.phases:
        yield phase.name, phase.kind, phase.data
    if recipe.evaluation.data:
        yield "evaluation", "evaluation", recipe.evaluation.data


def _check(name: str, kind: str, source: str, store: Store, folder: Path) -> RowReport:
    with _opened(name, source, store, folder) as path, path.open("rb") as lines:
        report = check_rows(kind, lines, subject=source.rsplit("/", 1)[-1])
    log.info(
        "%s data: %s: %d rows, %d problems, sha256 %s",
        name,
        source,
        report.count,
        len(report.problems),
        report.sha256[:12],
    )
    return report


@contextmanager
def _opened(name: str, source: str, store: Store, folder: Path) -> Iterator[Path]:
    if not source.startswith("bucket:"):
        yield _local(name, source, folder)
        return
    key = source.removeprefix("bucket:")
    if store.size(key) is None:
        raise UserError(f"{name} data: '{source}': no such object in the bucket; upload it, or give a local path")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "data.jsonl"
        store.download_file(key, path)
        yield path


def _local(name: str, source: str, folder: Path) -> Path:
    path = Path(source).expanduser()
    path = path if path.is_absolute() else folder / path
    if not path.is_file():
        raise UserError(
            f"{name} data: '{source}': no such file (looked at {path}); paths are relative to the recipe's file"
        )
    return path


def _with_bucket_data(
    recipe: Recipe, sources: dict[str, str], digests: dict[str, str], store: Store, folder: Path
) -> Recipe:
    placed = {name: _place(name, source, digests[name], store, folder) for name, source in sources.items()}
    phases = tuple(phase.model_copy(update={"data": placed[phase.name]}) for phase in recipe.phases)
    evaluation = recipe.evaluation.model_copy(update={"data": placed.get("evaluation")})
    return recipe.model_copy(update={"phases": phases, "evaluation": evaluation})


def _place(name: str, source: str, sha256: str, store: Store, folder: Path) -> str:
    if source.startswith("bucket:"):
        return source
    key = layout.dataset(sha256)
    sent = store.upload_file(_local(name, source, folder), key, sha256=sha256)
    log.info("%s data: %s in the bucket as %s (%d bytes sent)", name, source, key, sent)
    return f"bucket:{key}"
