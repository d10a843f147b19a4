"""Rows of datasets: one JSON object a line, in the form that each phase's docstring names. Checked before a box is rented, and again on it.

The checks look for what trains silently wrong: arguments of a tool call as a JSON string, a null that stands for "not given",
a conversation without an assistant's turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

Row = dict[str, Any]
RowKind = Literal["cpt", "sft", "dpo", "kto", "grpo", "evaluation"]


class RowError(ValueError):
    """A dataset cannot be used; the message names file, line and field, what was seen and what is wanted."""


def read_rows(path: Path, kind: RowKind) -> list[Row]:
    """All rows of a dataset, checked. RowError at the first bad one, or if there is none at all."""
    rows = [_parse(line, path, number) for number, line in _lines(path)]
    if not rows:
        raise RowError(f"{path.name}: holds no rows; want JSON lines, one object a line")
    check = _CHECKS[kind]
    for number, row in enumerate(rows, 1):
        problem = check(row)
        if problem:
            raise RowError(f"{path.name}: row {number}: {problem}")
    if kind == "kto" and len({row["label"] for row in rows}) < 2:
        raise RowError(f"{path.name}: every label is {rows[0]['label']}; KTO needs rows of both labels")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _parse(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RowError(f"{path.name}: line {number}: not JSON ({error}); want one JSON object a line") from None
    if not isinstance(row, dict):
        raise RowError(f"{path.name}: line {number}: seen a {type(row).__name__}; want a JSON object")
    return row


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
        if value is None:
            return (
                f"{where}.{name}: is null; leave an argument that is not given out, or the model learns to write null"
            )
    return ""


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
