"""`python -m training.data`: convert, check and preview datasets. Exit codes: 0 all is well, 1 rows are wrong, 2 the command or its inputs are."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from training.contract.recipe import Phase, PhaseKind, Recipe, RecipeError
from training.contract.rows import RowError, numbered_rows
from training.convert import MissingPackage, convert

# Nothing here asks the hub, and a tokenizer's threads only fight each other on small rows.
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


_SHOWN = 100  # a dataset of the wrong kind is wrong in every line


class Unusable(ValueError):
    """The command's own inputs are wrong."""


def run() -> int:
    """`main` in a process of its own, which may quiet what others would want to hear."""
    for name, value in _OFFLINE.items():
        os.environ.setdefault(name, value)
    # What libraries say while they load is for who writes this program; what they say of data is checked here, row by row.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return main()


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except RowError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (Unusable, MissingPackage, RecipeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.data", description="Look at datasets before anything is rented."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    to_lines = commands.add_parser("convert", help="a parquet file, a folder of them or a saved dataset, to JSON lines")
    to_lines.add_argument("source", type=Path)
    to_lines.add_argument("out", type=Path)
    to_lines.set_defaults(run=_convert)
    check = commands.add_parser(
        "check", help="every row by its rules and by the tokenizer: lengths, trained tokens, packs, epochs"
    )
    check.add_argument(
        "subject", type=Path, metavar="RECIPE|FILE", help="a recipe (.yaml, .json) or a dataset (.jsonl)"
    )
    check.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="where a recipe's datasets lie as PHASE.jsonl; else its own local paths",
    )
    check.add_argument("--json", action="store_true")
    check.set_defaults(run=_check)
    preview = commands.add_parser("preview", help="the first rows as they train, the trained tokens in green")
    preview.add_argument("subject", type=Path, metavar="FILE")
    preview.add_argument("--rows", type=_positive, default=2)
    preview.add_argument("--no-color", action="store_true", help="trained tokens in ⟦brackets⟧")
    preview.set_defaults(run=_preview)
    for command in (check, preview):
        command.add_argument("--kind", choices=get_args(PhaseKind), help="what the dataset is for; the recipe knows")
        command.add_argument(
            "--tokenizer",
            type=Path,
            required=True,
            metavar="DIR",
            help="folder of the model, or of its tokenizer's files",
        )
        command.add_argument("--max-length", type=int, default=2048)
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"seen {text}, want a number from 1")
    return int(text)


def _convert(arguments: argparse.Namespace) -> int:
    report = convert(arguments.source, arguments.out)
    print(json.dumps({"rows": report.rows, "sha256": report.sha256, "notes": report.notes()}))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    from training.data_check import as_json, check, table

    is_recipe = arguments.subject.suffix in (".yaml", ".yml", ".json")
    phases = list(_of_recipe(arguments) if is_recipe else [(_phase(arguments), _file(arguments.subject))])
    open_tokenizer = cache(lambda: _tokenizer(arguments.tokenizer))
    found = [check(path, phase, open_tokenizer, steps_known=is_recipe) for phase, path in phases]
    print(as_json(found) if arguments.json else table(found))
    problems = [f"{facts.phase}: {problem}" for facts in found for problem in facts.problems]
    for problem in problems[:_SHOWN]:
        print(f"error: {problem}", file=sys.stderr)
    if problems[_SHOWN:]:
        print(f"error: and {len(problems) - _SHOWN} more; --json holds them all", file=sys.stderr)
    return 1 if problems else 0


def _preview(arguments: argparse.Namespace) -> int:
    from training.preview import preview

    phase = _phase(arguments)
    rows = numbered_rows(_file(arguments.subject), phase.kind)[: arguments.rows]
    for text in preview(rows, phase, _tokenizer(arguments.tokenizer), color=not arguments.no_color):
        print(text)
    return 0


def _of_recipe(arguments: argparse.Namespace) -> Iterator[tuple[Phase, Path]]:
    for phase in _recipe(arguments.subject).phases:
        if arguments.data:
            yield phase, _file(arguments.data / f"{phase.name}.jsonl")
        elif phase.data.startswith("bucket:") or not phase.data.endswith(".jsonl"):
            raise Unusable(
                f"{phase.name}: its data is {phase.data}; give --data DIR with {phase.name}.jsonl in it, "
                "or run `python -m flows check RECIPE --data`, which fetches and converts"
            )
        else:
            yield phase, _file(arguments.subject.parent / Path(phase.data).expanduser())


def _recipe(path: Path) -> Recipe:
    from training.local import load

    return load(_file(path))


def _phase(arguments: argparse.Namespace) -> Any:
    """The settings of a dataset that comes without a recipe: only its kind and length matter."""
    if arguments.kind is None:
        raise Unusable(f"--kind: what is {arguments.subject.name} for? want one of {', '.join(get_args(PhaseKind))}")
    fields = {"kind": arguments.kind, "data": str(arguments.subject), "steps": 1, "learning_rate": 1e-4}
    try:
        return TypeAdapter(Phase).validate_python({**fields, "max_length": arguments.max_length})
    except ValidationError as error:
        raise Unusable(f"--max-length: seen {arguments.max_length}: {error.errors()[0]['msg']}") from None


def _file(path: Path) -> Path:
    if not path.is_file():
        seen = "is a folder" if path.is_dir() else "no such file"
        raise Unusable(f"{path}: {seen}; want JSON lines (see `convert` for other formats)")
    return path


def _tokenizer(path: Path) -> Any:
    if not path.is_dir():
        raise Unusable(
            f"--tokenizer: {path} is no folder; want the model's, or one with its tokenizer.json and chat template"
        )
    try:
        from datasets import disable_progress_bars
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingPackage(
            f"{error.name} is not installed here, and these checks need a tokenizer; install the extra 'train' (pip install 'livery[train]')"
        ) from None
    disable_progress_bars()
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise Unusable(
            f"--tokenizer: {path} holds no tokenizer that loads: {' '.join(str(error).split())[:200]}"
        ) from None
