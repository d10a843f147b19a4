"""Parquet files and saved datasets to JSON lines, once, before renting: what trains is the file that was checked.

The trap is Arrow's way with records: all calls of a column share one set of arguments, and those that a call does not have are filled with
nulls that cannot be told from the user's own. A null is never a legal argument here, so keys whose value is null are left out of every
record, and counted; where the tool's schema requires the argument, leaving it out would be a guess, and the row is refused.
Columns that were stored as JSON (as text, or in Arrow's JSON type) hold exactly what was put in and are taken as they are.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from training.contract.rows import Row, RowError, calls, missing_arguments

_ROWS_AT_ONCE = 1000
# The usual way to keep calls with different arguments apart in a table.
_AS_TEXT = ("tools", "arguments", "answer")
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}\.parquet")


class MissingPackage(RuntimeError):
    """What reads the format is not installed here."""


@dataclass
class Converted:
    """What came out, and what was changed on the way."""

    rows: int = 0
    sha256: str = ""
    argument_nulls: int = 0
    """Null keys left out of calls' arguments."""
    other_nulls: int = 0
    """Null keys left out elsewhere: tool schemas, message fields, columns."""
    texts_read: int = 0
    """Tools, arguments and answers that were stored as JSON text."""

    def notes(self) -> list[str]:
        told = (
            (self.argument_nulls, "nulls left out of calls' arguments (Arrow fills in what a call does not have)"),
            (self.other_nulls, "nulls left out of other records and columns"),
            (self.texts_read, "tools, arguments or answers read from JSON text"),
        )
        return [f"{count} {what}" for count, what in told if count]


def convert(source: Path, out: Path) -> Converted:
    """Write `source` as JSON lines to `out`: a .parquet file, a folder of them, or a folder that `Dataset.save_to_disk` wrote.

    RowError names file, row and field of the first row that cannot be written, or says what kind of folder was seen; MissingPackage which
    extra to install.
    """
    report, digest = Converted(), hashlib.sha256()
    partial = out.with_name(out.name + ".partial")
    try:
        with partial.open("wb") as file:
            for where, row, schema in _rows(source):
                line = _line(where, row, schema, report)
                digest.update(line)
                file.write(line)
                report.rows += 1
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    report.sha256 = digest.hexdigest()
    return report


def _line(where: str, raw: Row, schema: Any, report: Converted) -> bytes:
    row = _record(raw, schema, report, ())
    _refuse_guesses(where, raw, row)
    try:
        text = json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        raise RowError(f"{where}: holds half of a surrogate pair; want whole characters") from None
    except (TypeError, ValueError):
        field, value = next((name, value) for name, value in row.items() if not _writable(value))
        raise RowError(
            f"{where}: {field}: seen {type(value).__name__} {str(value)[:60]}; want texts, finite numbers, lists and records, as JSON has them"
        ) from None


def _plain(value: Any, kind: Any, report: Converted, path: tuple[str, ...]) -> Any:
    """A value of an Arrow type, without the nulls that its record's type filled in."""
    if isinstance(value, dict):
        return _record(value, kind, report, path)
    if isinstance(value, list):
        if hasattr(kind, "item_type"):  # a map: pairs, in which nothing is filled in
            return {str(key): _plain(each, kind.item_type, report, (*path, str(key))) for key, each in value}
        inner = getattr(kind, "value_type", None)
        return value if inner is None else [_plain(each, inner, report, path) for each in value]
    if not isinstance(value, str):
        return value
    if getattr(kind, "extension_name", "") == "arrow.json":
        return json.loads(value)
    if path[-1:] and path[-1] in _AS_TEXT and value.lstrip()[:1] in ("{", "["):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value  # the row check refuses a text here, with its line
        report.texts_read += 1
        return parsed
    return value


def _record(value: Row, kind: Any, report: Converted, path: tuple[str, ...]) -> Row:
    kept = {}
    for name, each in value.items():
        if each is None:
            if "arguments" in path:
                report.argument_nulls += 1
            else:
                report.other_nulls += 1
        else:
            kept[name] = _plain(each, kind.field(name).type, report, (*path, name))
    return kept


def _refuse_guesses(where: str, raw: Row, row: Row) -> None:
    for (place, before), (_, after) in zip(calls(raw), calls(row), strict=False):
        given = before.get("arguments")
        for name in missing_arguments(after, row) if not place.startswith("rejected") else ():
            if isinstance(given, dict) and name in given:
                raise RowError(
                    f"{where}: {place}.arguments.{name}: is null, and {after.get('name')} requires it; "
                    "give it a value, or store arguments as JSON text so that none are filled in"
                )


def _writable(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _rows(source: Path) -> Iterator[tuple[str, Row, Any]]:
    """(where it stands, row, its types) of every row."""
    if source.is_file() and source.suffix == ".parquet":
        yield from _parquet_rows(source)
    elif (source / "state.json").is_file():
        yield from _saved_rows(source)
    elif source.is_dir():
        for path in _parquet_files(source):
            yield from _parquet_rows(path)
    else:
        raise RowError(
            f"{source.name}: seen no file or folder of that name that is .parquet; JSON lines need no conversion"
        )


def _parquet_files(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        raise RowError(
            f"{folder.name}: holds the splits {', '.join(splits)}; name the folder of one, such as {folder.name}/{splits[0]}"
        )
    files = sorted(folder.glob("*.parquet"))
    if not files:
        seen = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise RowError(
            f"{folder.name}: seen {seen}; want .parquet files, or what Dataset.save_to_disk writes (state.json and .arrow files)"
        )
    splits = sorted({match[1] for path in files if (match := _SHARD.fullmatch(path.name))})
    if len(splits) > 1:
        raise RowError(f"{folder.name}: holds files of the splits {', '.join(splits)}; keep those of one in the folder")
    return files


def _parquet_rows(path: Path) -> Iterator[tuple[str, Row, Any]]:
    arrow, parquet = _arrow("pyarrow"), _arrow("pyarrow.parquet")
    try:
        with parquet.ParquetFile(path) as file:
            yield from _numbered(file.iter_batches(_ROWS_AT_ONCE), path.name, 1)
    except (arrow.ArrowInvalid, arrow.ArrowNotImplementedError, OSError) as error:
        raise RowError(f"{path.name}: cannot be read as parquet: {str(error).splitlines()[0]}") from None


def _saved_rows(folder: Path) -> Iterator[tuple[str, Row, Any]]:
    """state.json names the files, each an Arrow stream, in order."""
    arrow, number = _arrow("pyarrow"), 1
    try:
        state = json.loads((folder / "state.json").read_bytes())
        names = [str(each["filename"]) for each in state["_data_files"]]
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise RowError(
                f"{folder.name}: was saved with its rows in another order than in its files; save it again with flatten_indices()"
            )
        for name in names:
            with arrow.memory_map(str(folder / Path(name).name)) as file, arrow.ipc.open_stream(file) as stream:
                for batch in stream:
                    yield from _numbered([batch], folder.name, number)
                    number += batch.num_rows
    except (arrow.ArrowInvalid, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise RowError(f"{folder.name}: cannot be read as a saved dataset: {str(error).splitlines()[0]}") from None


def _numbered(batches: Iterable[Any], name: str, first: int) -> Iterator[tuple[str, Row, Any]]:
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            for number, row in enumerate(batch.slice(start, _ROWS_AT_ONCE).to_pylist(), first + start):
                yield f"{name}: row {number}", row, batch.schema
        first += batch.num_rows


def _arrow(name: str) -> Any:
    """pyarrow alone: it reads what datasets writes, in a tenth of the time that datasets takes to load, and every number exactly."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingPackage(
            f"{error.name} is not installed here, and parquet files and saved datasets need it; "
            "install the extra 'train' (pip install 'livery[train]'), or give JSON lines"
        ) from None
