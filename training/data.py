"""From checked rows to the datasets that TRL's trainers take, without what trains silently wrong.

`enable_thinking: false` stands in every row: otherwise a prompt ends in `<think>` while the rendered answer begins with its closing tag,
and the trainer learns to write `</think>` first. Rows longer than the phase's `max_length` are dropped and counted, never cut:
a cut conversation loses the very turn that it is trained on.

    python -m training.data convert SOURCE OUT.jsonl
    python -m training.data check RECIPE|FILE [--kind KIND] --tokenizer DIR [--data DIR] [--max-length N] [--json]
    python -m training.data preview FILE --kind KIND --tokenizer DIR [--rows N] [--no-color]
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.contract.recipe import DpoPhase, GrpoPhase, KtoPhase, SftPhase
from training.contract.rows import Row, RowError

if TYPE_CHECKING:
    from datasets import Dataset

NO_THINKING = {"enable_thinking": False}
_FIELDS = {
    "sft": ("messages",),
    "dpo": ("prompt", "chosen", "rejected"),
    "kto": ("prompt", "completion", "label"),
}


@dataclass(frozen=True)
class Prepared:
    dataset: Dataset
    dropped: int
    """Rows longer than `max_length`."""
    rows: int
    """Rows that the phase reads."""


def cpt(rows: Sequence[Row]) -> Prepared:
    return Prepared(shaped(rows, "cpt"), 0, len(rows))


def sft(rows: Sequence[Row], phase: SftPhase, tokenizer: Any) -> Prepared:
    fitting = _fitting(rows, phase, tokenizer)
    return _prepared(rows, fitting, fitting, phase)


def dpo(rows: Sequence[Row], phase: DpoPhase, tokenizer: Any, seed: int) -> Prepared:
    fitting = _fitting(rows, phase, tokenizer)
    return _prepared(rows, fitting, _shuffled(fitting, seed)[: rows_read(phase)], phase)


def kto(rows: Sequence[Row], phase: KtoPhase, tokenizer: Any, seed: int) -> Prepared:
    """Good and bad answers take turns, shuffled here because TRL reads KTO rows in order; an odd last batch would pair a row with itself."""
    fitting = _fitting(rows, phase, tokenizer)
    good, bad = ([row for row in _shuffled(fitting, seed) if row["label"] is label] for label in (True, False))
    mixed = [row for pair in zip(good, bad, strict=False) for row in pair][: rows_read(phase)]
    return _prepared(rows, fitting, mixed[: len(mixed) - len(mixed) % phase.batch_size], phase)


def grpo(rows: Sequence[Row], phase: GrpoPhase, tokenizer: Any) -> Prepared:
    """Prompts rendered here, row by row: the trainer has no column for a row's own tools."""
    from datasets import Dataset

    kept = [
        {"prompt": render_prompt(tokenizer, row), "answer": json.dumps(row["answer"])}
        for row in _fitting(rows, phase, tokenizer)
    ]
    _require_some(kept, len(rows), phase.max_length)
    return Prepared(Dataset.from_list(kept), len(rows) - len(kept), len(kept))


def render_prompt(tokenizer: Any, row: Row) -> str:
    """The text after which the model's answer begins."""
    return rendered(tokenizer, row["messages"], row, add_generation_prompt=True)


def rendered(tokenizer: Any, messages: Sequence[Row], row: Row, **options: Any) -> str:
    """These messages, with the row's tools, as the chat template writes them."""
    text = tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False, **NO_THINKING, **options)
    return str(text)


def row_length(tokenizer: Any, row: Row, kind: str, template: str | None = None) -> int:
    """Tokens of a row as its phase trains it: of DPO's two sides the longer one, of GRPO the prompt. `template` is SFT's `training_template`."""
    if kind == "cpt":
        texts = [row["text"]]
    elif kind == "sft":
        texts = [rendered(tokenizer, row["messages"], row, chat_template=template)]
    elif kind in ("dpo", "kto"):
        sides = ("chosen", "rejected") if kind == "dpo" else ("completion",)
        texts = [rendered(tokenizer, row["prompt"] + row[side], row) for side in sides]
    else:
        texts = [render_prompt(tokenizer, row)]
    return max(len(tokenizer(text, add_special_tokens=kind == "cpt")["input_ids"]) for text in texts)


def training_template(tokenizer: Any) -> str | None:
    """The chat template that TRL's SFT takes in place of the tokenizer's own, to mark the assistant's tokens. It writes a thinking block into
    every earlier turn, so rows are longer by it than what the tokenizer's own template says. RowError if TRL knows no such template."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if not tokenizer.chat_template:
        raise RowError(
            "the tokenizer has no chat template; put the model's chat_template.jinja beside its tokenizer.json"
        )
    if has_generation_markers(tokenizer.chat_template):
        return None
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:
        raise RowError(
            "the tokenizer's chat template does not mark the assistant's tokens, and TRL has no marked one for it; "
            "want {% generation %} marks around what the assistant writes, or an unchanged template of Qwen's"
        ) from None


def shaped(rows: Sequence[Row], kind: str) -> Dataset:
    """Checked rows with the columns that the phase's trainer reads, in the given order."""
    if kind == "cpt":
        from datasets import Dataset

        return Dataset.from_dict({"text": [row["text"] for row in rows]})
    with_tools = any(row.get("tools") for row in rows)
    return to_dataset(
        [
            {field: row[field] for field in _FIELDS[kind]}
            | ({"tools": row.get("tools") or None} if with_tools else {})
            | {"chat_template_kwargs": NO_THINKING}
            for row in rows
        ]
    )


def to_dataset(rows: Sequence[Row]) -> Dataset:
    """A dataset that gives back exactly these rows, which all have the same columns.

    Arrow's own reading of tool calls fills the arguments that a row does not have with nulls, and makes 1 to 1.0 where another row has 1.5;
    the template renders both, and the model learns them. So columns are kept as JSON, and what comes back is compared.
    """
    from datasets import Dataset, Features, Json, Value

    _keep_numbers_exact()
    types = {name: Value("bool") if isinstance(value, bool) else Json() for name, value in rows[0].items()}
    dataset = Dataset.from_list(list(rows), features=Features(types))
    require_same(dataset, rows)
    return dataset


def require_same(dataset: Dataset, rows: Sequence[Row]) -> None:
    """RowError names the first row and field that is not rendered as it was given. Compared as text, since in Python 1 == 1.0 == True."""
    for number, (wanted, seen) in enumerate(zip(rows, dataset, strict=True), 1):
        for field, value in wanted.items():
            if json.dumps(seen.get(field)) != json.dumps(value):
                raise RowError(
                    f"row {number}: {field} changed on its way into the dataset (such as nulls for arguments it does not have);"
                    f" seen {json.dumps(seen.get(field))[:120]}"
                )


def _keep_numbers_exact() -> None:
    """datasets writes JSON columns with pandas' fast encoder, which keeps ten decimals and no integer above 64 bits; a position of
    48.85837012345678 would be trained as 48.8583701235. The standard library's encoder keeps what it is given."""
    from datasets.features import features
    from datasets.utils import json as datasets_json

    for module in (features, datasets_json, sys.modules["datasets.arrow_writer"]):
        for name, exact in (("ujson_dumps", json.dumps), ("ujson_loads", json.loads)):
            if hasattr(module, name):
                setattr(module, name, exact)


def rows_read(phase: DpoPhase | KtoPhase) -> int:
    """No more rows than the phase will read: each costs a reference pass before the first step."""
    return phase.steps * phase.accumulation * phase.batch_size


def _fitting(rows: Sequence[Row], phase: SftPhase | DpoPhase | KtoPhase | GrpoPhase, tokenizer: Any) -> list[Row]:
    template = training_template(tokenizer) if phase.kind == "sft" else None
    return [row for row in rows if row_length(tokenizer, row, phase.kind, template) <= phase.max_length]


def _prepared(
    rows: Sequence[Row], fitting: Sequence[Row], used: Sequence[Row], phase: SftPhase | DpoPhase | KtoPhase
) -> Prepared:
    _require_some(used, len(rows), phase.max_length)
    return Prepared(shaped(used, phase.kind), len(rows) - len(fitting), len(used))


def _require_some(kept: Sequence[Any], total: int, max_length: int) -> None:
    if not kept:
        raise RowError(
            f"none of {total} rows is usable within max_length {max_length}; raise it, or shorten prompts and tools"
        )


def _shuffled(rows: Sequence[Row], seed: int) -> list[Row]:
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    return shuffled


if __name__ == "__main__":
    from training.data_commands import run

    sys.exit(run())
