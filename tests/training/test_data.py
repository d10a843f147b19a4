from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.training.conftest import recipe_of
from training import data
from training.contract.rows import RowError, check_rows, read_rows
from training.model import load_tokenizer

RECIPE = recipe_of("tiny-moe")


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return load_tokenizer(tiny / "model")


def rows(tiny: Path, kind: Any) -> list[dict[str, Any]]:
    return read_rows(tiny / "datasets" / f"{kind}.jsonl", kind)


def test_calls_with_different_arguments_stay_as_they_are(tiny: Path, tokenizer: Any) -> None:
    prepared = data.sft(rows(tiny, "sft"), RECIPE.phase("sft"), tokenizer)
    rendered = [
        tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False) for row in prepared.dataset
    ]
    assert not any("null" in text or "None" in text for text in rendered)


def test_arguments_filled_with_nulls_on_the_way_are_caught(tiny: Path) -> None:
    """What datasets does by itself with rows whose calls have different arguments."""
    messages = [{"messages": row["messages"]} for row in rows(tiny, "sft")]
    with pytest.raises(RowError, match="changed on its way"):
        data.require_same(Dataset.from_list(messages, on_mixed_types=None), messages)


NAMES = st.text("abc", min_size=1, max_size=3)
# Texts that a reader of JSON takes for something else.
TEXTS = ("1.10", "007", "true", "1e5", "[]", "{}", '"')
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | NAMES
    | st.sampled_from(TEXTS),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    function = {"name": draw(NAMES), "arguments": draw(st.dictionaries(NAMES, VALUES, max_size=3))}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return {"messages": [{"role": "user", "content": draw(NAMES)}, call]}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(conversations(), min_size=1, max_size=4))
def test_no_row_that_is_accepted_teaches_the_model_to_write_null(tokenizer: Any, drawn: list[dict[str, Any]]) -> None:
    """Whatever arguments calls have, together in one dataset: what is rendered from it is what is rendered from each row alone."""
    good = [row for row in drawn if not check_rows("sft", [json.dumps(row).encode()], subject="x").problems]
    has_null = [row for row in drawn if row not in good]
    assert all("null" in json.dumps(row) for row in has_null)
    if not good:
        return
    for row, alone in zip(data.shaped(good, "sft"), good, strict=True):
        text = data.rendered(tokenizer, row["messages"], row)
        assert "null" not in text and "None" not in text
        assert text == data.rendered(tokenizer, alone["messages"], alone)


def test_a_whole_number_stays_one_beside_broken_ones(tokenizer: Any) -> None:
    """One set of argument names and no mixed types: Arrow makes floats of both without a word, and Python finds them equal."""
    values = (1, 2.5, 48.85837012345678)
    calls = [{"function": {"name": "f", "arguments": {"x": value}}} for value in values]
    given = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]}
        for call in calls
    ]
    bare = [{"arguments": {"x": value}} for value in values]
    with pytest.raises(RowError, match=r"row 1: arguments changed on its way .* seen \{\"x\": 1.0\}"):
        data.require_same(Dataset.from_list(bare, on_mixed_types="use_json"), bare)
    texts = [data.rendered(tokenizer, row["messages"], row) for row in data.shaped(given, "sft")]
    assert [text.partition("<parameter=x>\n")[2].split("\n")[0] for text in texts] == ["1", "2.5", "48.85837012345678"]


@pytest.mark.parametrize("order", [1, -1])
def test_rows_with_and_without_tools_train_together(tokenizer: Any, tiny: Path, order: int) -> None:
    with_tools = rows(tiny, "sft")[0]
    mixed = [with_tools, {"messages": with_tools["messages"]}][::order]
    prepared = data.sft(mixed, RECIPE.phase("sft"), tokenizer)
    assert [bool(row["tools"]) for row in prepared.dataset] == [True, False][::order]


@pytest.mark.parametrize(("template", "words"), [("{{ messages }}", "generation"), (None, "no chat template")])
def test_a_template_that_does_not_mark_the_assistants_tokens_is_refused(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, template: str | None, words: str
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(RowError, match=words):
        data.training_template(tokenizer)


def test_a_conversation_is_as_long_as_the_template_of_training_makes_it(tokenizer: Any) -> None:
    """Training shows a thinking block before every answer, serving only before the last; by the shorter text a row would be cut."""
    turn = [{"role": "user", "content": "Oslo?"}, {"role": "assistant", "content": "Sunny."}]
    row = {"messages": turn * 4}
    served, trained = (
        data.row_length(tokenizer, row, "sft", template) for template in (None, data.training_template(tokenizer))
    )
    assert served < trained
    for max_length, dropped in ((trained, 0), (trained - 1, 1)):
        phase = RECIPE.phase("sft").model_copy(update={"max_length": max_length})
        assert data.sft([row, {"messages": turn}], phase, tokenizer).dropped == dropped


def test_rows_that_are_too_long_are_dropped_and_counted(tiny: Path, tokenizer: Any) -> None:
    all_rows = rows(tiny, "sft")
    long = {**all_rows[0], "messages": [{"role": "user", "content": "Oslo " * 900}, *all_rows[0]["messages"]]}
    prepared = data.sft([*all_rows[:4], long], RECIPE.phase("sft"), tokenizer)
    assert (prepared.rows, prepared.dropped) == (4, 1)


def test_nothing_left_after_dropping_is_an_error(tiny: Path, tokenizer: Any) -> None:
    phase = RECIPE.phase("sft").model_copy(update={"max_length": 16})
    with pytest.raises(RowError, match="none of 240 rows is usable within max_length 16"):
        data.sft(rows(tiny, "sft"), phase, tokenizer)


def test_kto_batches_are_whole_and_labels_take_turns(tiny: Path, tokenizer: Any) -> None:
    phase = RECIPE.phase("kto").model_copy(update={"batch_size": 4, "steps": 3})
    labels = [row["label"] for row in data.kto(rows(tiny, "kto"), phase, tokenizer, 0).dataset]
    assert labels == [True, False] * 6


def test_dpo_reads_no_more_rows_than_its_steps_need(tiny: Path, tokenizer: Any) -> None:
    prepared = data.dpo(rows(tiny, "dpo"), RECIPE.phase("dpo"), tokenizer, 0)
    assert (prepared.rows, prepared.dropped) == (12, 0)


def test_a_grpo_prompt_holds_its_own_tools_and_ends_where_the_answer_begins(tiny: Path, tokenizer: Any) -> None:
    first = data.grpo(rows(tiny, "grpo"), RECIPE.phase("grpo"), tokenizer).dataset[0]
    assert "get_weather" in first["prompt"] and "get_time" in first["prompt"]
    assert first["prompt"].endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert json.loads(first["answer"]).keys() == {"name", "arguments"}
