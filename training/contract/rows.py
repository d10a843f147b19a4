"""Rows of datasets: one JSON object a line, in the form that each phase's docstring names. Checked before a box is rented, and again on it.

The checks look for what trains silently wrong: arguments of a tool call as a JSON string, a null that stands for "not given",
a conversation without an assistant's turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Row = dict[str, Any]
RowKind = Literal["cpt", "sft", "dpo", "kto", "grpo", "evaluation"]


class RowError(ValueError):
    """A dataset cannot be used; the message names file, line and field, what was seen and what is wanted."""


@dataclass(frozen=True)
class RowReport:
    """What a dataset holds: how many rows, what is wrong with which line, and the digest of its bytes."""

    count: int
    problems: tuple[str, ...]
    sha256: str


def check_rows(kind: str, lines: Iterable[bytes], *, subject: str) -> RowReport:
    """Check every line of a dataset in one pass, holding one row at a time; all problems, each with its line."""
    digest, count, problems, labels = hashlib.sha256(), 0, [], set()
    for number, line in enumerate(lines, 1):
        digest.update(line)
        if not line.strip():
            continue
        count += 1
        row, problem = _parsed(line)
        problem = problem or _CHECKS[kind](row)
        if problem:
            problems.append(f"{subject}: line {number}: {problem}")
        elif kind == "kto":
            labels.add(row["label"])
    if not count:
        problems.append(f"{subject}: holds no rows; want JSON lines, one object a line")
    if len(labels) == 1 and not problems:
        problems.append(f"{subject}: every label is {labels.pop()}; KTO needs rows of both labels")
    return RowReport(count, tuple(problems), digest.hexdigest())


def read_rows(path: Path, kind: RowKind) -> list[Row]:
    """All rows of a dataset that was checked; RowError with its first problem if it should not have passed."""
    with path.open("rb") as lines:
        report = check_rows(kind, lines, subject=path.name)
    if report.problems:
        raise RowError(report.problems[0])
    with path.open("rb") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def _parsed(line: bytes) -> tuple[Row, str]:
    """The row and no problem, or an empty row and what is wrong."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8 at byte {error.start}; want UTF-8 text"
    except (ValueError, RecursionError) as error:
        return {}, f"not JSON ({error}); want one JSON object a line"
    if not isinstance(row, dict):
        return {}, f"seen a {type(row).__name__}; want a JSON object"
    return row, ""


def _cpt(row: Row) -> str:
    text = row.get("text")
    return "" if isinstance(text, str) and text.strip() else f"text: seen {_shown(text)}; want a text that is not empty"


def _sft(row: Row) -> str:
    problem = _messages(row, "messages") or _tools(row)
    if problem:
        return problem
    if not any(message["role"] == "assistant" for message in row["messages"]):
        return "messages: no message of role assistant; there would be nothing to train on"
    return ""


def _dpo(row: Row) -> str:
    return _messages(row, "prompt") or _messages(row, "chosen") or _messages(row, "rejected") or _tools(row)


def _kto(row: Row) -> str:
    problem = _messages(row, "prompt") or _messages(row, "completion") or _tools(row)
    if not problem and not isinstance(row.get("label"), bool):
        return f"label: seen {_shown(row.get('label'))}; want true or false"
    return problem


def _task(row: Row) -> str:
    problem = _messages(row, "messages") or _tools(row)
    if problem:
        return problem
    answer = row.get("answer")
    if not isinstance(answer, dict) or not isinstance(answer.get("name"), str):
        return f'answer: seen {_shown(answer)}; want {{"name": TOOL, "arguments": {{...}}}}'
    return _arguments(answer, "answer.arguments")


def _messages(row: Row, field: str) -> str:
    messages = row.get(field)
    if not isinstance(messages, list) or not messages:
        return f"{field}: seen {_shown(messages)}; want a list of messages that is not empty"
    for index, message in enumerate(messages):
        where = f"{field}[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"{where}: seen {_shown(message)}; want a message with a role"
        if not isinstance(message.get("content", ""), str):
            return f"{where}.content: seen {_shown(message['content'])}; want a text"
        for call_index, call in enumerate(message.get("tool_calls") or []):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return f"{where}.tool_calls[{call_index}]: seen {_shown(call)}; want a function with name and arguments"
            problem = _arguments(function, f"{where}.tool_calls[{call_index}].function.arguments")
            if problem:
                return problem
    return ""


def _arguments(function: Row, where: str) -> str:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        return f"{where}: seen a JSON string; want a mapping (the chat template renders a string wrongly or not at all)"
    if not isinstance(arguments, dict):
        return f"{where}: seen {_shown(arguments)}; want a mapping"
    for name, value in arguments.items():
        if (null := _null_in(value, f"{where}.{name}")) is not None:
            return f"{null}: is null; leave an argument that is not given out, or the model learns to write null"
    return ""


def _null_in(value: Any, where: str) -> str | None:
    """Where the first null lies; None if there is none."""
    if value is None:
        return where
    if isinstance(value, dict):
        return next((null for key, inner in value.items() if (null := _null_in(inner, f"{where}.{key}"))), None)
    if isinstance(value, list):
        return next((null for index, inner in enumerate(value) if (null := _null_in(inner, f"{where}[{index}]"))), None)
    return None


def _tools(row: Row) -> str:
    tools = row.get("tools")
    if tools is None:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return f"tools: seen {_shown(tools)}; want a list of tool schemas, or leave it out"
    return ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_CHECKS: dict[str, Callable[[Row], str]] = {
    "cpt": _cpt,
    "sft": _sft,
    "dpo": _dpo,
    "kto": _kto,
    "grpo": _task,
    "evaluation": _task,
}
