"""Tables to JSON lines: what comes out is what a person put in, without what Arrow added."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, Json

from training.contract.rows import RowError, check_rows
from training.convert import Converted, convert
from training.data import to_dataset
from training.data_commands import main
from training.tiny import datasets

KINDS = ("cpt", "sft", "dpo", "kto", "grpo")
ROWS = datasets()
Write = Callable[[Dataset, Path], Path]


def parquet(dataset: Dataset, folder: Path) -> Path:
    dataset.to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def plain_parquet(dataset: Dataset, folder: Path) -> Path:
    """Without the types that datasets notes in the file: as any other program writes it."""
    pq.write_table(dataset.data.table.replace_schema_metadata(None), folder / "rows.parquet")
    return folder / "rows.parquet"


def parquet_folder(dataset: Dataset, folder: Path) -> Path:
    half = len(dataset) // 2
    for number, rows in enumerate((range(half), range(half, len(dataset)))):
        dataset.select(rows).to_parquet(folder / f"train-{number:05d}-of-00002.parquet")
    return folder


def saved(dataset: Dataset, folder: Path) -> Path:
    dataset.save_to_disk(folder / "saved")
    return folder / "saved"


def converted(source: Path, tmp_path: Path) -> tuple[list[dict[str, Any]], Converted]:
    report = convert(source, tmp_path / "out.jsonl")
    data = (tmp_path / "out.jsonl").read_bytes()
    assert report.sha256 == hashlib.sha256(data).hexdigest()
    return [json.loads(line) for line in data.splitlines()], report


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.mark.parametrize("write", [parquet, plain_parquet, parquet_folder, saved], ids=lambda write: write.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_come_back_as_they_were_put_into_a_table(kind: str, write: Write, folder: Path, tmp_path: Path) -> None:
    """Arrow's own reading, with one set of arguments for all calls: the nulls that it filled in are gone again, and counted."""
    rows = ROWS[kind][:24]
    back, report = converted(write(Dataset.from_list(rows, on_mixed_types=None), folder), tmp_path)
    assert back == rows and report.rows == len(rows)
    assert (report.argument_nulls > 0) == (kind != "cpt")
    with (tmp_path / "out.jsonl").open("rb") as lines:
        assert check_rows(kind, lines, subject="out").problems == ()


@pytest.mark.parametrize("write", [parquet, plain_parquet, saved], ids=lambda write: write.__name__)
def test_columns_of_arrows_json_type_are_taken_as_they_are(write: Write, folder: Path, tmp_path: Path) -> None:
    rows = [{**row, "extra": [{"a": None}, {"b": 1}, "c"]} for row in ROWS["sft"][:8]]
    back, report = converted(write(Dataset.from_list(rows, on_mixed_types="use_json"), folder), tmp_path)
    assert back == rows and report.notes() == []


def test_tools_and_arguments_stored_as_json_text_are_read_and_counted(folder: Path, tmp_path: Path) -> None:
    rows = ROWS["sft"][:4]
    as_text = json.loads(json.dumps(rows))
    for row in as_text:
        row["tools"] = json.dumps(row["tools"])
        for message in row["messages"]:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    back, report = converted(parquet(Dataset.from_list(as_text), folder), tmp_path)
    assert back == rows and report.texts_read == 8
    assert "8 tools, arguments or answers read from JSON text" in report.notes()


def test_a_users_null_in_a_json_text_is_not_dropped_but_refused_by_the_row_check(folder: Path, tmp_path: Path) -> None:
    row = {"messages": [], "answer": '{"name": "f", "arguments": {"x": null}}'}
    back, _ = converted(parquet(Dataset.from_list([row]), folder), tmp_path)
    assert back[0]["answer"]["arguments"] == {"x": None}


def test_a_null_where_the_schema_requires_an_argument_is_no_guess_of_ours(folder: Path, tmp_path: Path) -> None:
    rows = json.loads(json.dumps(ROWS["sft"][:6]))
    number = next(i for i, row in enumerate(rows) if "get_weather" in json.dumps(row["messages"]))
    rows[number]["messages"][1]["tool_calls"][0]["function"]["arguments"]["city"] = None
    source = parquet(Dataset.from_list(rows, on_mixed_types=None), folder)
    with pytest.raises(
        RowError, match=rf"row {number + 1}: messages\[1\].tool_calls\[0\].function.arguments.city: is null"
    ):
        convert(source, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_in_a_map_nothing_is_filled_in_and_nothing_left_out(folder: Path, tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.string())
    pq.write_table(pa.table({"labels": pa.array([[("a", "x")], [("b", None)]], kind)}), folder / "rows.parquet")
    back, report = converted(folder / "rows.parquet", tmp_path)
    assert back == [{"labels": {"a": "x"}}, {"labels": {"b": None}}] and report.notes() == []


def test_numbers_come_back_to_the_last_digit(folder: Path, tmp_path: Path) -> None:
    rows = [{"x": [{"v": 48.85837012345678}, {"v": [2**53 + 1]}, "s"]}, {"x": [0.1 + 0.2]}]
    types = Features({"x": Json()})
    to_dataset(rows)  # datasets' own JSON encoder rounds; ours is what is put in its place
    back, _ = converted(parquet(Dataset.from_list(rows, features=types), folder), tmp_path)
    assert json.dumps(back) == json.dumps(rows)


def test_the_same_table_makes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    source = parquet(Dataset.from_list(ROWS["dpo"], on_mixed_types=None), folder)
    assert convert(source, tmp_path / "a").sha256 == convert(source, tmp_path / "b").sha256


def test_a_value_that_json_does_not_have_is_named_by_row_and_field(folder: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"], "score": [0.5, float("nan")]}), folder / "rows.parquet")
    with pytest.raises(RowError, match=r"rows.parquet: row 2: score: seen float nan; want .* finite numbers"):
        convert(folder / "rows.parquet", tmp_path / "out.jsonl")


def splits(folder: Path) -> Path:
    rows = Dataset.from_list(ROWS["cpt"][:2])
    DatasetDict(train=rows, test=rows).save_to_disk(folder / "both")
    return folder / "both"


def mixed_shards(folder: Path) -> Path:
    for split in ("train", "test"):
        Dataset.from_list(ROWS["cpt"][:2]).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def torn(folder: Path) -> Path:
    path = parquet(Dataset.from_list(ROWS["cpt"]), folder)
    path.write_bytes(path.read_bytes()[:-100])
    return path


def other_files(folder: Path) -> Path:
    (folder / "rows.csv").write_text("text\na\n")
    return folder


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (splits, "holds the splits test, train; name the folder of one, such as both/test"),
        (mixed_shards, "holds files of the splits test, train"),
        (torn, "rows.parquet: cannot be read as parquet"),
        (other_files, "seen rows.csv; want .parquet files, or what Dataset.save_to_disk writes"),
        (lambda folder: folder / "none.parquet", "none.parquet: seen no file or folder"),
    ],
    ids=["splits", "mixed shards", "torn", "other files", "nothing"],
)
def test_a_source_that_is_not_one_table_is_told_in_one_sentence(
    make: Callable[[Path], Path], words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(make(folder)), str(tmp_path / "out.jsonl")]) == 1
    # Above it stand the progress bars of the test's own writing.
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and words in error
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_place_that_cannot_be_written_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = parquet(Dataset.from_list(ROWS["cpt"]), folder)
    assert main(["convert", str(source), str(tmp_path / "nowhere" / "out.jsonl")]) == 2
    assert "nowhere/out.jsonl" in capsys.readouterr().err.splitlines()[-1]


def test_a_missing_library_is_named_with_the_extra_that_brings_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = parquet(Dataset.from_list(ROWS["cpt"]), folder)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert main(["convert", str(source), str(tmp_path / "out.jsonl")]) == 2
    assert "pyarrow.parquet is not installed here" in (error := capsys.readouterr().err) and "livery[train]" in error
