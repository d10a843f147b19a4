from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from training.contract.rows import RowReport, check_rows

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


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
RESULT = {"role": "tool", "content": "sunny"}
SYSTEM = {"role": "system", "content": "Be brief."}


def report(kind: str, *rows: Any) -> RowReport:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows]
    return check_rows(kind, lines, subject="data.jsonl")


def problems(kind: str, *rows: Any) -> tuple[str, ...]:
    return report(kind, *rows).problems


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
        ("sft", {"messages": [{"role": "human", "content": "?"}, SAID]}, ["messages[0].role", "'human'", "assistant"]),
        ("sft", {"messages": [ASKED, SYSTEM, SAID]}, ["messages[1].role", "want it first"]),
        ("sft", {"messages": [ASKED, RESULT, SAID]}, ["messages[1].role", "no call asked for"]),
        ("sft", {"messages": [ASKED, SAID, RESULT, SAID]}, ["messages[2].role", "no call asked for"]),
        ("sft", {"messages": [ASKED, SAID, ASKED]}, ["last message is of role user", "assistant"]),
        ("sft", {"messages": [SYSTEM, SAID]}, ["no message of role user"]),
        ("sft", {"messages": [ASKED, {"role": "assistant", "content": " "}]}, ["messages[1]", "answer nothing"]),
        ("sft", {"messages": [{"role": "user", "content": " "}, SAID]}, ["messages[0].content", "' '", "text"]),
        ("sft", {"messages": [ASKED, {"role": "assistant", "content": None}]}, ["messages[1].content", "None", "text"]),
        ("sft", {"messages": [ASKED, {**SAID, "tool_calls": "get_weather"}]}, ["messages[1].tool_calls", "a list"]),
        ("sft", {"messages": [{**CALLED, "role": "user", "content": "?"}, SAID]}, ["only the assistant calls tools"]),
        ("sft", {"messages": [ASKED, {**SAID, "tool_calls": [{"function": {"name": ""}}]}]}, ["tool_calls[0]", "name"]),
        (
            "sft",
            {"messages": [ASKED, CALLED], "tools": [{"function": {"name": "get_time"}}]},
            ["tool_calls[0].function.name", "'get_weather'", "get_time"],
        ),
        ("sft", {"messages": [ASKED, SAID], "tools": [{"function": {}}]}, ["tools[0]", "name"]),
        ("sft", {"messages": [ASKED, SAID], "tools": "[]"}, ["tools", "list of tool schemas"]),
        (
            "sft",
            {
                "messages": [ASKED, SAID],
                "tools": [{"function": {"name": "f", "parameters": {"properties": {"city": {}, "zone": None}}}}],
            },
            ["tools[0].function.parameters.properties.zone", "null"],
        ),
        ("dpo", {"prompt": [ASKED, SAID], "chosen": [CALLED], "rejected": [SAID]}, ["prompt", "user or tool"]),
        ("dpo", {"prompt": [ASKED], "chosen": [SAID], "rejected": [SAID]}, ["rejected", "same as chosen"]),
        ("dpo", {"prompt": [ASKED], "chosen": [], "rejected": [SAID]}, ["chosen", "not empty"]),
        (
            "dpo",
            {"prompt": [ASKED], "chosen": [CALLED, RESULT, SAID], "rejected": [SAID]},
            ["chosen[1].role", "seen tool", "prompt"],
        ),
        ("kto", {**GOOD["kto"], "label": 1}, ["label", "seen 1"]),
        ("kto", {**GOOD["kto"], "tools": [{"name": "get_time"}]}, ["completion[0]", "get_time"]),
        ("grpo", {**GOOD["grpo"], "messages": [ASKED, SAID]}, ["messages", "user or tool"]),
        ("grpo", {**GOOD["grpo"], "tools": [{"name": "get_time"}]}, ["answer.name", "'get_weather'", "get_time"]),
        (
            "evaluation",
            {"messages": [ASKED], "answer": {"name": "f", "arguments": {"x": None}}},
            ["answer.arguments.x"],
        ),
        ("evaluation", {"messages": [ASKED], "answer": {"name": "f", "arguments": "{}"}}, ["JSON string"]),
    ],
)
def test_a_bad_row_is_named_by_line_and_field(kind: str, row: dict[str, Any], words: list[str]) -> None:
    (problem,) = [problem for problem in problems(kind, GOOD[kind], row) if "every label" not in problem]
    assert not [word for word in words if word not in problem], problem


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("sft", {"messages": [SYSTEM, ASKED, CALLED, RESULT, RESULT, SAID], "tools": [WEATHER]}),
        ("sft", {"messages": [ASKED, {"role": "assistant", "tool_calls": CALLED["tool_calls"]}], "tools": [WEATHER]}),
        ("sft", {"messages": [ASKED, SAID, ASKED, CALLED], "tools": None}),
        ("dpo", {"prompt": [ASKED, CALLED, RESULT], "chosen": [SAID], "rejected": [CALLED], "tools": [WEATHER]}),
        ("dpo", {"prompt": [ASKED], "chosen": [SAID], "rejected": [CALLED], "tools": [{"name": "get_time"}]}),
        ("grpo", {**GOOD["grpo"], "messages": [SYSTEM, ASKED], "tools": [WEATHER]}),
    ],
)
def test_what_is_unusual_and_right_passes(kind: str, row: dict[str, Any]) -> None:
    assert problems(kind, row) == ()


def test_repeated_rows_are_counted_with_their_first_lines_and_allowed() -> None:
    row, other = {"text": "a"}, {"text": "b"}
    seen = report("cpt", row, other, b"\n", row, row)
    assert (seen.count, seen.duplicates, seen.problems) == (4, 2, ())
    assert seen.warnings == (
        "data.jsonl: 2 rows (lines 4, 5) are the same as an earlier one; what is repeated weighs more",
    )


def test_a_key_in_another_place_does_not_make_another_row() -> None:
    assert report("cpt", b'{"text": "a", "id": 1}\n', b'{"id": 1, "text": "a"}\n').duplicates == 1


def test_a_call_of_a_tool_that_the_model_is_not_shown_is_warned_of() -> None:
    assert (
        "line 1" in report("sft", GOOD["sft"]).warnings[0] and "not shown" in report("grpo", GOOD["grpo"]).warnings[0]
    )
    assert report("sft", {**GOOD["sft"], "tools": [WEATHER]}).warnings == ()


def test_a_call_without_an_argument_that_its_schema_requires_is_warned_of() -> None:
    row = {"messages": [ASKED, called({"town": "Oslo"})], "tools": [WEATHER]}
    assert "an argument that its schema requires" in report("sft", row).warnings[0]
    rejected = {"prompt": [ASKED], "chosen": [CALLED], "rejected": [called({})], "tools": [WEATHER]}
    assert report("dpo", rejected).warnings == ()


@pytest.mark.parametrize(
    ("line", "words"), [(b'{"text": "a", "x": NaN}\n', "NaN"), (b'{"text": "a \\ud83d"}\n', "surrogate")]
)
def test_what_json_of_python_writes_and_nobody_else_reads_is_refused(line: bytes, words: str) -> None:
    (problem,) = problems("cpt", line)
    assert words in problem
    assert problems("cpt", b'{"text": "a \\ud83d\\ude00"}\n') == ()


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
    seen = check_rows("cpt", lines, subject="data.jsonl")
    assert seen.count == 3 and len(seen.problems) == 2
    assert seen.sha256 == hashlib.sha256(b"".join(lines)).hexdigest()
