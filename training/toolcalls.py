"""Tool calls in Qwen3.5/3.6's own text form: read them, and reward them.

<tool_call>
<function=NAME>
<parameter=KEY>
VALUE
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>\s*<function=([^>\n]+)>(.*?)</function>\s*</tool_call>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n(.*?)\n</parameter>", re.DOTALL)
# One point for a right call; a part of it for each step on the way, so that groups of completions differ.
VALID, RIGHT_NAME, RIGHT_ARGUMENTS = 0.3, 0.2, 0.5


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: Mapping[str, str]


def parse_call(text: str) -> ToolCall | None:
    """The one tool call of a completion; None if there is none or more than one."""
    calls = _CALL.findall(text)
    if len(calls) != 1:
        return None
    name, body = calls[0]
    return ToolCall(name, dict(_PARAMETER.findall(body)))


def reward(text: str, answer: Mapping[str, Any]) -> float:
    """0 to 1: a call that parses, with the right name, with exactly the right arguments. `answer` is `{"name", "arguments"}`."""
    call = parse_call(text)
    if call is None:
        return 0.0
    if call.name != answer["name"]:
        return VALID
    return VALID + RIGHT_NAME + (RIGHT_ARGUMENTS if call.arguments == rendered(answer) else 0.0)


def rendered(answer: Mapping[str, Any]) -> dict[str, str]:
    """Arguments as the chat template writes them: texts as they are, everything else as JSON."""
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in answer["arguments"].items()
    }
