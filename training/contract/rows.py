"""Rows of datasets: one JSON object a line, in the form that each phase's docstring names. Checked before a box is rented, and again on it.

The checks look for what trains silently wrong: arguments of a tool call as a JSON string, a null that stands for "not given", a call of a
tool that the model is not shown, an empty answer, a tool's result among the tokens that the model learns to write.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

Row = dict[str, Any]
RowKind = Literal["cpt", "sft", "dpo", "kto", "grpo", "evaluation"]
ROLES = ("system", "user", "assistant", "tool")
_SHOWN_LINES = 5


class RowError(ValueError):
    """A dataset cannot be used; the message names file, line and field, what was seen and what is wanted."""


@dataclass(frozen=True)
class RowReport:
    """What a dataset holds: how many rows, what is wrong with which line, and the digest of its bytes."""

    count: int
    problems: tuple[str, ...]
    """The dataset cannot be used; at most one a line."""
    sha256: str
    warnings: tuple[str, ...] = ()
    """It can be used, and is probably not what was meant; one sentence a kind, with the first lines."""
    duplicates: int = 0
    """Rows equal to an earlier one."""


def check_rows(kind: str, lines: Iterable[bytes], *, subject: str) -> RowReport:
    """Check every line of a dataset in one pass, holding one row at a time (and a digest of each); all problems, each with its line."""
    digest, count, problems, labels, doubts = hashlib.sha256(), 0, [], set(), _Doubts()
    for number, line in enumerate(lines, 1):
        digest.update(line)
        if not line.strip():
            continue
        count += 1
        row, problem = _parsed(line)
        problem = problem or _CHECKS[kind](row)
        if problem:
            problems.append(f"{subject}: line {number}: {problem}")
            continue
        doubts.look(kind, number, row)
        if kind == "kto":
            labels.add(row["label"])
    if not count:
        problems.append(f"{subject}: holds no rows; want JSON lines, one object a line")
    if len(labels) == 1 and not problems:
        problems.append(f"{subject}: every label is {labels.pop()}; KTO needs rows of both labels")
    warnings = tuple(f"{subject}: {warning}" for warning in doubts.told())
    return RowReport(count, tuple(problems), digest.hexdigest(), warnings, len(doubts.again))


def read_rows(path: Path, kind: RowKind) -> list[Row]:
    """All rows of a dataset that was checked; RowError with its first problem if it should not have passed."""
    return [row for _, row in numbered_rows(path, kind)]


def numbered_rows(path: Path, kind: RowKind) -> list[tuple[int, Row]]:
    """The same, each row with its line."""
    with path.open("rb") as lines:
        report = check_rows(kind, lines, subject=path.name)
    if report.problems:
        raise RowError(report.problems[0])
    with path.open("rb") as lines:
        return [(number, json.loads(line)) for number, line in enumerate(lines, 1) if line.strip()]


@dataclass
class _Doubts:
    """What is suspicious of a dataset without being wrong in any one row."""

    seen: set[bytes] = field(default_factory=set)
    again: list[int] = field(default_factory=list)
    toolless: list[int] = field(default_factory=list)
    incomplete: list[int] = field(default_factory=list)

    def look(self, kind: str, number: int, row: Row) -> None:
        digest = hashlib.blake2b(json.dumps(row, sort_keys=True).encode(), digest_size=12).digest()
        if digest in self.seen:
            self.again.append(number)
        self.seen.add(digest)
        if not row.get("tools") and any(calls(row)):
            self.toolless.append(number)
        if any(missing_arguments(function, row) for where, function in calls(row) if not where.startswith("rejected")):
            self.incomplete.append(number)

    def told(self) -> Iterator[str]:
        if self.again:
            yield f"{_rows_at(self.again)} the same as an earlier one; what is repeated weighs more"
        if self.toolless:
            yield f"{_rows_at(self.toolless)} without `tools`, and a tool is called; the model is not shown what it may call"
        if self.incomplete:
            yield f"{_rows_at(self.incomplete)} calling a tool without an argument that its schema requires; the model would learn that"


def calls(row: Row) -> Iterator[tuple[str, Row]]:
    """(where it stands, `{"name", "arguments"}`) of every tool call and of the answer; also of a row that was not checked."""
    for part in ("messages", "prompt", "chosen", "rejected", "completion"):
        for index, message in enumerate(_list(row.get(part))):
            for call_index, call in enumerate(_list(message.get("tool_calls")) if isinstance(message, dict) else []):
                function = call.get("function") if isinstance(call, dict) else None
                if isinstance(function, dict):
                    yield f"{part}[{index}].tool_calls[{call_index}].function", function
    if isinstance(row.get("answer"), dict):
        yield "answer", row["answer"]


def missing_arguments(function: Row, row: Row) -> list[str]:
    """Arguments that the row's schema of this tool requires and the call does not give."""
    given = function.get("arguments")
    for tool in _list(row.get("tools")):
        if isinstance(tool, dict) and tool_name(tool) == function.get("name") and isinstance(given, dict):
            parameters = tool.get("function", tool).get("parameters")
            required = _list(parameters.get("required")) if isinstance(parameters, dict) else []
            return [name for name in required if isinstance(name, str) and name not in given]
    return []


def tool_name(tool: Row) -> str:
    """The name in a tool's schema, in either of the usual forms; empty if it has none."""
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _rows_at(lines: list[int]) -> str:
    shown = ", ".join(map(str, lines[:_SHOWN_LINES])) + (", …" if len(lines) > _SHOWN_LINES else "")
    if len(lines) == 1:
        return f"1 row (line {shown}) is"
    return f"{len(lines)} rows (lines {shown}) are"


def _parsed(line: bytes) -> tuple[Row, str]:
    """The row and no problem, or an empty row and what is wrong."""
    try:
        row = json.loads(line.decode("utf-8"), parse_constant=_no_number)
        if b"\\ud" in line.lower():
            json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        return {}, f"not UTF-8 at byte {error.start}; want UTF-8 text"
    except UnicodeEncodeError:
        return {}, "holds half of a surrogate pair (\\ud…), which no tokenizer can read; want whole characters"
    except (ValueError, RecursionError) as error:
        return {}, f"not JSON ({error}); want one JSON object a line"
    if not isinstance(row, dict):
        return {}, f"seen a {type(row).__name__}; want a JSON object"
    return row, ""


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _cpt(row: Row) -> str:
    text = row.get("text")
    return "" if isinstance(text, str) and text.strip() else f"text: seen {_shown(text)}; want a text that is not empty"


def _sft(row: Row) -> str:
    return _messages(row, "messages") or _sft_turns(row["messages"]) or _tools(row) or _known_calls(row, "messages")


def _dpo(row: Row) -> str:
    problem = _prompt(row, "prompt") or _completion(row, "chosen") or _completion(row, "rejected") or _tools(row)
    problem = problem or _known_calls(row, "prompt") or _known_calls(row, "chosen")
    # A rejected answer may well call a tool that is not there.
    if not problem and row["chosen"] == row["rejected"]:
        return "rejected: the same as chosen; a preference needs two answers that differ"
    return problem


def _kto(row: Row) -> str:
    problem = _prompt(row, "prompt") or _completion(row, "completion") or _tools(row) or _known_calls(row, "prompt")
    if not problem and not isinstance(row.get("label"), bool):
        return f"label: seen {_shown(row.get('label'))}; want true or false"
    return problem or (_known_calls(row, "completion") if row["label"] else "")


def _task(row: Row) -> str:
    problem = _prompt(row, "messages") or _tools(row) or _known_calls(row, "messages")
    if problem:
        return problem
    answer = row.get("answer")
    if not isinstance(answer, dict) or not isinstance(answer.get("name"), str):
        return f'answer: seen {_shown(answer)}; want {{"name": TOOL, "arguments": {{...}}}}'
    return _arguments(answer, "answer.arguments") or _known(answer["name"], row, "answer.name")


def _messages(row: Row, field: str) -> str:
    """A list of messages, each well formed and in a place that its role may have."""
    messages = row.get(field)
    if not isinstance(messages, list) or not messages:
        return f"{field}: seen {_shown(messages)}; want a list of messages that is not empty"
    for index, message in enumerate(messages):
        where = f"{field}[{index}]"
        if problem := _message(message, where) or _place(messages, index, where):
            return problem
    return ""


def _message(message: Any, where: str) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return f"{where}: seen {_shown(message)}; want a message with a role"
    role = message["role"]
    if role not in ROLES:
        return f"{where}.role: seen {_shown(role)}; want one of {', '.join(ROLES)}"
    if not isinstance(message.get("content", ""), str):
        return f'{where}.content: seen {_shown(message["content"])}; want a text ("" beside tool calls)'
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        return f"{where}.tool_calls: seen {_shown(calls)}; want a list of calls"
    if calls and role != "assistant":
        return f"{where}.tool_calls: in a message of role {role}; only the assistant calls tools"
    for index, call in enumerate(calls):
        if problem := _call(call, f"{where}.tool_calls[{index}]"):
            return problem
    if role == "user" and not message.get("content", "").strip():
        return f"{where}.content: seen {_shown(message.get('content'))}; want a text, or leave the row out"
    if role == "assistant" and not calls and not _says_something(message):
        return f"{where}: seen neither content nor tool calls; the model would learn to answer nothing"
    return ""


def _call(call: Any, where: str) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        return f"{where}: seen {_shown(call)}; want a function with name and arguments"
    return _arguments(function, f"{where}.function.arguments")


def _says_something(message: Row) -> bool:
    texts = (message.get("content"), message.get("reasoning_content"))
    return any(isinstance(text, str) and text.strip() for text in texts)


def _place(messages: list[Row], index: int, where: str) -> str:
    role = messages[index]["role"]
    if role == "system" and index:
        return f"{where}.role: a system message after others; want it first (templates refuse or misplace it)"
    if role == "tool":
        before = next((message for message in reversed(messages[:index]) if message["role"] != "tool"), {})
        if not before.get("tool_calls"):
            return f"{where}.role: a tool's result that no call asked for; want an assistant's message with tool_calls before it"
    return ""


def _sft_turns(messages: list[Row]) -> str:
    if not any(message["role"] == "user" for message in messages):
        return "messages: no message of role user; want a question before the answer"
    last = messages[-1]["role"]
    if last != "assistant":
        return f"messages: the last message is of role {last}; want one of role assistant, only its answers are trained"
    return ""


def _prompt(row: Row, field: str) -> str:
    """Messages after which the model answers."""
    problem = _messages(row, field)
    if problem:
        return problem
    last = row[field][-1]["role"]
    if last not in ("user", "tool"):
        return f"{field}: the last message is of role {last}; want user or tool, the answer comes after it"
    if not any(message["role"] == "user" for message in row[field]):
        return f"{field}: no message of role user; want a question before the answer"
    return ""


def _completion(row: Row, field: str) -> str:
    """Messages that the model is to write. All tokens of them are trained, so nobody else may speak in them."""
    problem = _messages(row, field)
    if problem:
        return problem
    for index, message in enumerate(row[field]):
        if message["role"] != "assistant":
            return (
                f"{field}[{index}].role: seen {message['role']}; want assistant alone: every token here is trained as the model's own, "
                "so earlier turns and tool results belong in the prompt"
            )
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
    for index, tool in enumerate(tools):
        if not tool_name(tool):
            return f'tools[{index}]: seen {_shown(tool)}; want {{"type": "function", "function": {{"name", …}}}}'
        if where := _null_property(tool, f"tools[{index}]"):
            return f"{where}: is null; leave a parameter that this tool does not have out, the prompt would show it"
    return ""


def _null_property(value: Any, where: str) -> str | None:
    """Where a schema has a property that is null: what converters leave when tools with different parameters share a table."""
    if isinstance(value, list):
        return next((at for i, inner in enumerate(value) if (at := _null_property(inner, f"{where}[{i}]"))), None)
    if not isinstance(value, dict):
        return None
    properties = value.get("properties")
    if isinstance(properties, dict):
        for name, schema in properties.items():
            if schema is None:
                return f"{where}.properties.{name}"
    return next((at for key, inner in value.items() if (at := _null_property(inner, f"{where}.{key}"))), None)


def _known_calls(row: Row, field: str) -> str:
    for index, message in enumerate(row[field]):
        for call_index, call in enumerate(message.get("tool_calls") or []):
            where = f"{field}[{index}].tool_calls[{call_index}].function.name"
            if problem := _known(call["function"]["name"], row, where):
                return problem
    return ""


def _known(name: str, row: Row, where: str) -> str:
    names = [tool_name(tool) for tool in row.get("tools") or []]
    if not names or name in names:
        return ""
    return f"{where}: seen {_shown(name)}; want one of this row's tools: {', '.join(names)}"


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
