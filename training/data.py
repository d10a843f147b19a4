"""From checked rows to the datasets that TRL's trainers take, without what trains silently wrong.

`enable_thinking: false` stands in every row: otherwise a prompt ends in `<think>` while the rendered answer begins with its closing tag,
and the trainer learns to write `</think>` first. Rows longer than the phase's `max_length` are dropped and counted, never cut:
a cut conversation loses the very turn that it is trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset

from training.contract.recipe import DpoPhase, GrpoPhase, KtoPhase, SftPhase
from training.contract.rows import Row, RowError

NO_THINKING = {"enable_thinking": False}


@dataclass(frozen=True)
class Prepared:
    dataset: Dataset
    dropped: int
    """Rows longer than `max_length`."""
    rows: int
    """Rows that the phase reads."""


def cpt(rows: Sequence[Row]) -> Prepared:
    return Prepared(Dataset.from_dict({"text": [row["text"] for row in rows]}), 0, len(rows))


def sft(rows: Sequence[Row], phase: SftPhase, tokenizer: Any) -> Prepared:
    fitting = [row for row in rows if _length(tokenizer, row["messages"], row) <= phase.max_length]
    return _prepared(rows, fitting, fitting, phase, ("messages",))


def dpo(rows: Sequence[Row], phase: DpoPhase, tokenizer: Any, seed: int) -> Prepared:
    sides = ("chosen", "rejected")
    fitting = [
        row
        for row in rows
        if all(_length(tokenizer, row["prompt"] + row[side], row) <= phase.max_length for side in sides)
    ]
    used = _shuffled(fitting, seed)[: _rows_read(phase)]
    return _prepared(rows, fitting, used, phase, ("prompt", "chosen", "rejected"))


def kto(rows: Sequence[Row], phase: KtoPhase, tokenizer: Any, seed: int) -> Prepared:
    """Good and bad answers take turns, shuffled here because TRL reads KTO rows in order; an odd last batch would pair a row with itself."""
    fitting = [row for row in rows if _length(tokenizer, row["prompt"] + row["completion"], row) <= phase.max_length]
    good, bad = ([row for row in _shuffled(fitting, seed) if row["label"] is label] for label in (True, False))
    mixed = [row for pair in zip(good, bad, strict=False) for row in pair][: _rows_read(phase)]
    used = mixed[: len(mixed) - len(mixed) % phase.batch_size]
    return _prepared(rows, fitting, used, phase, ("prompt", "completion", "label"))


def grpo(rows: Sequence[Row], phase: GrpoPhase, tokenizer: Any) -> Prepared:
    """Prompts rendered here, row by row: the trainer has no column for a row's own tools."""
    prompts = [render_prompt(tokenizer, row) for row in rows]
    kept = [
        {"prompt": prompt, "answer": json.dumps(row["answer"])}
        for row, prompt in zip(rows, prompts, strict=True)
        if len(tokenizer(prompt)["input_ids"]) <= phase.max_length
    ]
    _require_some(kept, len(rows), phase.max_length)
    return Prepared(Dataset.from_list(kept), len(rows) - len(kept), len(kept))


def render_prompt(tokenizer: Any, row: Row) -> str:
    """The text after which the model's answer begins."""
    return str(
        tokenizer.apply_chat_template(
            row["messages"], tools=row.get("tools"), add_generation_prompt=True, tokenize=False, **NO_THINKING
        )
    )


def to_dataset(rows: Sequence[Row]) -> Dataset:
    """A dataset that gives back exactly these rows. Arrow's own reading of tool calls fills the arguments that a row does not have with
    nulls, and the template renders them: the model learns to write `null`. So mixed columns are kept as JSON, and it is checked."""
    dataset = Dataset.from_list(list(rows), on_mixed_types="use_json")
    require_same(dataset, rows)
    return dataset


def require_same(dataset: Dataset, rows: Sequence[Row]) -> None:
    for number, (wanted, seen) in enumerate(zip(rows, dataset, strict=True), 1):
        if wanted != seen:
            field = next(name for name in wanted if wanted[name] != seen.get(name))
            raise RowError(
                f"row {number}: {field} changed on its way into the dataset (such as nulls for arguments it does not have);"
                f" seen {json.dumps(seen.get(field))[:120]}"
            )


def _prepared(
    rows: Sequence[Row],
    fitting: Sequence[Row],
    used: Sequence[Row],
    phase: SftPhase | DpoPhase | KtoPhase,
    fields: Sequence[str],
) -> Prepared:
    _require_some(used, len(rows), phase.max_length)
    shaped = [
        {field: row[field] for field in fields}
        | ({"tools": row["tools"]} if row.get("tools") else {})
        | {"chat_template_kwargs": NO_THINKING}
        for row in used
    ]
    return Prepared(to_dataset(shaped), len(rows) - len(fitting), len(used))


def _rows_read(phase: DpoPhase | KtoPhase) -> int:
    """No more rows than the phase will read: each costs a reference pass before the first step."""
    return phase.steps * phase.accumulation * phase.batch_size


def _require_some(kept: Sequence[Row], total: int, max_length: int) -> None:
    if not kept:
        raise RowError(
            f"none of {total} rows is usable within max_length {max_length}; raise it, or shorten prompts and tools"
        )


def _length(tokenizer: Any, messages: Sequence[Row], row: Row) -> int:
    text = tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False, **NO_THINKING)
    return len(tokenizer(text)["input_ids"])


def _shuffled(rows: Sequence[Row], seed: int) -> list[Row]:
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    return shuffled
