from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from training.contract.rows import RowError, read_rows

USER = {"role": "user", "content": "Weather in Oslo?"}


def call(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "get_weather", "arguments": arguments}}],
    }


def write(path: Path, *rows: Any) -> Path:
    file = path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


GOOD = call({"city": "Oslo"})
ANSWER = {"name": "get_weather", "arguments": {"city": "Oslo"}}
BAD_ROWS = [
    ("cpt", {"text": ""}, "text"),
    ("cpt", {"txt": "hello"}, "text"),
    ("sft", {"messages": [USER]}, "no message of role assistant"),
    ("sft", {"messages": [USER, call('{"city": "Oslo"}')]}, "JSON string"),
    ("sft", {"messages": [USER, call({"city": "Oslo", "unit": None})]}, "unit: is null"),
    ("sft", {"messages": [USER, GOOD], "tools": "none"}, "tools"),
    ("dpo", {"prompt": [USER], "chosen": [GOOD]}, "rejected"),
    ("kto", {"prompt": [USER], "completion": [GOOD], "label": "yes"}, "label"),
    ("grpo", {"messages": [USER]}, "answer"),
    ("evaluation", {"messages": [USER], "answer": {"name": "f", "arguments": "{}"}}, "JSON string"),
]


@pytest.mark.parametrize(("kind", "row", "named"), BAD_ROWS)
def test_a_bad_row_is_refused_by_number_and_field(tmp_path: Path, kind: Any, row: Any, named: str) -> None:
    with pytest.raises(RowError, match=r"rows\.jsonl: row 1: ") as caught:
        read_rows(write(tmp_path, row), kind)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("cpt", {"text": "hello"}),
        ("sft", {"messages": [USER, GOOD]}),
        ("dpo", {"prompt": [USER], "chosen": [GOOD], "rejected": [{"role": "assistant", "content": "no"}]}),
        ("grpo", {"messages": [USER], "answer": ANSWER}),
    ],
)
def test_a_good_row_is_read_as_it_is(tmp_path: Path, kind: Any, row: Any) -> None:
    assert read_rows(write(tmp_path, row), kind) == [row]


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(RowError, match=r"line 2: not JSON"):
        read_rows(file, "cpt")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="holds no rows"):
        read_rows(write(tmp_path), "cpt")


def test_kto_wants_both_labels(tmp_path: Path) -> None:
    row = {"prompt": [USER], "completion": [GOOD], "label": True}
    with pytest.raises(RowError, match="both labels"):
        read_rows(write(tmp_path, row, row), "kto")
