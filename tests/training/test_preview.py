"""The preview shows what trains: held against the first batches of the phases' own trainers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.training.conftest import recipe_of
from training import data
from training.contract.rows import numbered_rows
from training.crew import Single
from training.model import load_tokenizer
from training.phases import cpt, sft
from training.phases.common import Setting
from training.preview import DIM, GREEN, PLAIN, Sample, _stand_in, decoded, preview, samples

RECIPE = recipe_of("tiny-moe")
ROWS = 6
Told = tuple[tuple[int, ...], tuple[bool, ...]]


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Any:
    return load_tokenizer(tiny / "model")


@pytest.fixture
def rows(tiny: Path) -> Any:
    return lambda kind: numbered_rows(tiny / "datasets" / f"{kind}.jsonl", kind)[:ROWS]


def shown(rows: list[tuple[int, dict[str, Any]]], phase: Any, tokenizer: Any) -> list[Told]:
    found = samples([row for _, row in rows], phase, tokenizer)
    return sorted((tuple(each.ids), tuple(each.trained)) for sequences in found for each in sequences)


def packed_documents(trainer: Any) -> Iterator[Told]:
    """The documents of packed batches, cut apart where positions begin again."""
    for batch in trainer.get_train_dataloader():
        ends = batch["cu_seq_lens_q"].tolist()
        for start, end in pairwise(ends):
            ids, labels = batch["input_ids"][0, start:end], batch["labels"][0, start:end]
            yield tuple(ids.tolist()), tuple((labels != -100).tolist())


@pytest.mark.parametrize("kind", ["cpt", "sft"])
def test_what_is_shown_as_trained_is_what_the_phases_trainer_has_labels_for(
    kind: str, rows: Any, tokenizer: Any, tmp_path: Path
) -> None:
    phase = RECIPE.phase(kind).model_copy(update={"max_length": 2048})
    desk: Any = SimpleNamespace(phase=phase, output=tmp_path, assignment=SimpleNamespace(recipe=RECIPE), crew=Single())
    setting = Setting(desk, _stand_in(tokenizer), tokenizer, [], packed=True)
    prepared = data.Prepared(data.shaped([row for _, row in rows(kind)], kind), 0, ROWS)
    trainer = {"cpt": cpt, "sft": sft}[kind].build(setting, prepared)
    assert sorted(packed_documents(trainer)) == shown(rows(kind), phase, tokenizer)


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_of_a_preference_only_the_answers_are_trained_and_all_of_them(kind: str, rows: Any, tokenizer: Any) -> None:
    """The labels are TRL's own here; that they are the right ones is read from the text."""
    sides = ("chosen", "rejected") if kind == "dpo" else ("completion",)
    found = samples([row for _, row in rows(kind)], RECIPE.phase(kind), tokenizer)
    for (_, row), sequences in zip(rows(kind), found, strict=True):
        prompt = data.rendered(tokenizer, row["prompt"], row, add_generation_prompt=True)
        for side, sequence in zip(sides, sequences, strict=True):
            text = decoded(sequence, tokenizer, color=False)
            answer = data.rendered(tokenizer, row["prompt"] + row[side], row).removeprefix(prompt)
            assert text == f"{prompt}⟦{answer}⟧"


def test_of_a_conversation_each_answer_is_trained_with_its_end(tokenizer: Any) -> None:
    turns = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, "abcd", strict=True)]
    (line, label, text) = preview([(7, {"messages": turns})], RECIPE.phase("sft"), tokenizer, color=False)
    assert line.startswith("── line 7, ") and label.startswith("── ")
    trained = [part.partition("⟧")[0] for part in text.split("⟦")[1:]]
    assert trained == [f"<think>\n\n</think>\n\n{answer}<|im_end|>\n" for answer in "bd"]


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_numbers_are_trained_to_the_last_digit(kind: str, tokenizer: Any) -> None:
    """Through all of the trainer's own tables, too."""
    call = {"function": {"name": "f", "arguments": {"x": 48.85837012345678, "y": 1, "z": "1.10"}}}
    other = {"function": {"name": "f", "arguments": {"y": 0.5}}}
    asked = {"role": "user", "content": "?"}
    answers = [{"role": "assistant", "content": "", "tool_calls": [each]} for each in (call, other)]
    if kind == "sft":
        given: list[dict[str, Any]] = [{"messages": [asked, answer]} for answer in answers]
    else:
        given = [{"prompt": [asked], "chosen": answers[:1], "rejected": answers[1:]}]
    found = samples(given, RECIPE.phase(kind), tokenizer)
    first, second = (tokenizer.decode(each.ids) for sequences in found for each in sequences)
    for text in ("=x>\n48.85837012345678\n", "=y>\n1\n", "=z>\n1.10\n"):
        assert text in first
    assert "=y>\n0.5\n" in second and "=x>" not in second


def test_a_grpo_row_shows_the_prompt_and_what_is_rewarded(rows: Any, tokenizer: Any) -> None:
    text = list(preview(rows("grpo")[:1], RECIPE.phase("grpo"), tokenizer, color=False))[1]
    assert "<|im_start|>assistant\n<think>\n\n</think>\n\n\n── the answer rewarded: {" in text


def test_a_row_that_is_too_long_is_told_to_be_dropped(rows: Any, tokenizer: Any) -> None:
    phase = RECIPE.phase("sft").model_copy(update={"max_length": 100})
    assert "dropped, not trained" in list(preview(rows("sft")[:1], phase, tokenizer, color=False))[1]


def test_colours_and_brackets_tell_the_same(tokenizer: Any) -> None:
    sample = Sample(tokenizer("in Oslo")["input_ids"], [False, True])
    assert decoded(sample, tokenizer, color=True) == f"{DIM}in{PLAIN}{GREEN} Oslo{PLAIN}"
    assert decoded(sample, tokenizer, color=False) == "in⟦ Oslo⟧"


def test_padding_is_not_shown(rows: Any, tokenizer: Any) -> None:
    for sequences in samples([row for _, row in rows("dpo")], RECIPE.phase("dpo"), tokenizer):
        assert all(sequence.ids[-1] != tokenizer.pad_token_id for sequence in sequences)
