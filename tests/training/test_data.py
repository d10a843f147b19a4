from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tests.training.conftest import recipe_of
from training import data
from training.contract.rows import RowError, read_rows
from training.model import load_tokenizer

RECIPE = recipe_of("tiny-moe")


@pytest.fixture
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
