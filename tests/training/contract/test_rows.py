from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from training.contract.rows import check_rows

ASKED = {"role": "user", "content": "Weather in Oslo?"}
SAID = {"role": "assistant", "content": "I do not know."}


def called(arguments: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": arguments}}],
    }


CALLED = called({"city": "Oslo"})
GOOD: dict[str, dict[str, Any]] = {
    "cpt": {"text": "words"},
    "sft": {"messages": [ASKED, CALLED], "tools": []},
    "dpo": {"prompt": [ASKED], "chosen": [CALLED], "rejected": [SAID]},
    "kto": {"prompt": [ASKED], "completion": [CALLED], "label": True},
    "grpo": {"messages": [ASKED], "answer": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
    "evaluation": {"messages": [ASKED], "answer": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
}


def problems(kind: str, *rows: Any) -> tuple[str, ...]:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows]
    return check_rows(kind, lines, subject="data.jsonl").problems


@pytest.mark.parametrize("kind", GOOD)
def test_a_good_row_of_each_kind_passes(kind: str) -> None:
    rows = [GOOD[kind], {**GOOD[kind], "label": False}] if kind == "kto" else [GOOD[kind]]
    assert problems(kind, *rows) == ()


@pytest.mark.parametrize(
    ("kind", "row", "words"),
    [
        ("cpt", {"text": "  "}, ["line 2", "text", "not empty"]),
        ("cpt", {"txt": "x"}, ["line 2", "text", "None"]),
        ("sft", {"messages": []}, ["line 2", "messages", "list"]),
        ("sft", {"messages": [ASKED]}, ["line 2", "role assistant"]),
        (
            "sft",
            {"messages": [ASKED, called('{"city": "Oslo"}')]},
            ["messages[1].tool_calls[0].function.arguments", "JSON string", "mapping"],
        ),
        ("sft", {"messages": [ASKED, called({"city": "Oslo", "day": None})]}, ["function.arguments.day", "null"]),
        (
            "sft",
            {"messages": [ASKED, called({"places": [{"city": None}]})]},
            ["function.arguments.places[0].city", "null"],
        ),
        ("dpo", {"prompt": [ASKED], "chosen": [CALLED]}, ["rejected"]),
        ("kto", {**GOOD["kto"], "label": "yes"}, ["label", "true or false"]),
        ("grpo", {"messages": [ASKED], "answer": "get_weather"}, ["answer", "name"]),
    ],
)
def test_a_bad_row_is_named_by_line_and_field(kind: str, row: dict[str, Any], words: list[str]) -> None:
    (problem,) = [problem for problem in problems(kind, GOOD[kind], row) if "every label" not in problem]
    assert not [word for word in words if word not in problem], problem


@pytest.mark.parametrize("line", [b"{not json\n", b"[1, 2]\n", b'{"text": "\xff"}\n', b"[" * 200_000])
def test_a_line_that_is_no_object_is_a_problem_and_never_a_crash(line: bytes) -> None:
    (problem,) = problems("cpt", line)
    assert problem.startswith("data.jsonl: line 1: ")


def test_an_empty_dataset_is_refused() -> None:
    assert "no rows" in problems("sft")[0]
    assert "no rows" in problems("sft", b"\n", b"  \n")[0]


def test_kto_needs_rows_of_both_labels() -> None:
    assert "both labels" in problems("kto", GOOD["kto"], GOOD["kto"])[0]


def test_all_problems_are_told_and_the_digest_is_of_the_bytes() -> None:
    lines = [b'{"text": ""}\n', b'{"text": "a"}\n', b"oops\n"]
    report = check_rows("cpt", lines, subject="data.jsonl")
    assert report.count == 3 and len(report.problems) == 2
    assert report.sha256 == hashlib.sha256(b"".join(lines)).hexdigest()
