from __future__ import annotations

import pytest

from training.toolcalls import parse_call, reward

ANSWER = {"name": "add", "arguments": {"a": 1, "b": "x"}}


def call(name: str = "add", **arguments: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        ("I do not know.", 0.0),
        ("<tool_call>\n<function=add>", 0.0),
        (call("sub", a="1", b="x"), 0.3),
        (call(a="2", b="x"), 0.5),
        (call(a="1"), 0.5),
        (call(a="1", b="x"), 1.0),
        (call(a="1", b="x") * 2, 0.0),
    ],
)
def test_a_call_is_worth_more_the_more_of_it_is_right(text: str, worth: float) -> None:
    assert reward(text, ANSWER) == pytest.approx(worth)


def test_a_value_of_several_lines_is_one_value() -> None:
    parsed = parse_call(call(a="one\ntwo"))
    assert parsed is not None and parsed.arguments == {"a": "one\ntwo"}
