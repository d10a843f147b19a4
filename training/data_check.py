"""What a dataset will be to its phase, told before renting: lengths, trained tokens, how full packs are, how often each row is seen.

It needs the tokenizer and no model. The numbers come from the code that trains: the phase's own lengths, TRL's labels and TRL's packing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from training import data
from training.contract.recipe import Phase
from training.contract.rows import Row, check_rows, numbered_rows


@dataclass
class Facts:
    """One phase and its dataset. Token counts are of what is trained once through the data."""

    phase: str
    kind: str
    rows: int = 0
    too_long: int = 0
    """Rows over `max_length`: dropped, but for CPT, which splits them."""
    longest: int = 0
    median: int = 0
    p95: int = 0
    tokens: int | None = None
    """Of all rows that fit, both sides of a preference counted."""
    trained: float | None = None
    """Share of `tokens` that the loss is on; None for GRPO, which writes its own."""
    packs: int | None = None
    """Rows of `max_length` after packing."""
    pack_fill: float | None = None
    """Share of the packs' places that hold a token."""
    units_a_step: float = 0
    """Packs, rows or prompts an optimizer step."""
    epochs: float | None = None
    """How often the phase's steps go through the data."""
    duplicates: int = 0
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check(path: Path, phase: Phase, open_tokenizer: Callable[[], Any], *, steps_known: bool = True) -> Facts:
    """All that can be known of a phase's dataset from its rows and the tokenizer, which is opened (seconds) once the rows alone are right.
    Problems are one line each, with file and line."""
    subject = path.resolve().name
    with path.open("rb") as lines:
        report = check_rows(phase.kind, lines, subject=subject)
    facts = Facts(phase.name, phase.kind, report.count, duplicates=report.duplicates)
    facts.problems += report.problems
    facts.warnings += report.warnings
    if report.problems:
        return facts
    rows, tokenizer = numbered_rows(path, phase.kind), open_tokenizer()
    fitting = _measure(facts, subject, rows, phase, tokenizer)
    if facts.problems:
        return facts
    if not fitting:
        facts.problems.append(
            f"{subject}: all {len(rows)} rows are longer than max_length {phase.max_length}, the shortest has "
            f"{min(data.row_length(tokenizer, row, phase.kind) for _, row in rows)} tokens; raise max_length"
        )
        return facts
    try:
        _train_like(facts, subject, fitting, phase, tokenizer)
    except RuntimeError as error:  # so TRL says that the template marks none of a row's tokens as the assistant's; it does not say which row
        facts.problems.append(f"{subject}: the trainer refuses it: {error}")
        return facts
    _pace(facts, [row for _, row in fitting], phase, steps_known)
    return facts


def table(found: Sequence[Facts]) -> str:
    """The facts side by side, then warnings and problems."""
    columns: tuple[tuple[str, Callable[[Facts], str]], ...] = (
        ("phase", lambda facts: facts.phase),
        ("rows", lambda facts: str(facts.rows)),
        (
            "too long",
            lambda facts: str(facts.too_long) + (" (split)" if facts.kind == "cpt" and facts.too_long else ""),
        ),
        ("repeated", lambda facts: str(facts.duplicates)),
        ("median", lambda facts: _or_dash(facts.median or None, "{}")),
        ("p95", lambda facts: _or_dash(facts.p95 or None, "{}")),
        ("longest", lambda facts: _or_dash(facts.longest or None, "{}")),
        ("tokens", lambda facts: _or_dash(facts.tokens, "{:,}")),
        ("trained", lambda facts: _or_dash(facts.trained, "{:.0%}")),
        ("packs", lambda facts: _or_dash(facts.packs, "{}")),
        ("fill", lambda facts: _or_dash(facts.pack_fill, "{:.0%}")),
        ("a step", lambda facts: f"{facts.units_a_step:g} {_unit(facts)}" if facts.units_a_step else "-"),
        ("epochs", lambda facts: _or_dash(facts.epochs, "{:.2f}")),
    )
    cells = [[name for name, _ in columns], *([show(facts) for _, show in columns] for facts in found)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    lines += [f"warning: {facts.phase}: {warning}" for facts in found for warning in facts.warnings]
    return "\n".join(lines)


def as_json(found: Sequence[Facts]) -> str:
    return json.dumps([asdict(facts) for facts in found], indent=1, ensure_ascii=False)


def _measure(
    facts: Facts, subject: str, rows: Sequence[tuple[int, Row]], phase: Phase, tokenizer: Any
) -> list[tuple[int, Row]]:
    """Lengths of all rows, and what is wrong with one only in the eyes of the tokenizer; returns the rows that train."""
    from jinja2 import TemplateError

    template = data.training_template(tokenizer) if phase.kind == "sft" else None
    lengths: list[int] = []
    fitting: list[tuple[int, Row]] = []
    otherwise_served: list[int] = []
    control = tokenizer.all_special_tokens if phase.kind != "cpt" else []
    for line, row in rows:
        where = f"{subject}: line {line}"
        try:
            lengths.append(data.row_length(tokenizer, row, phase.kind, template))
            split = _split_prompt(tokenizer, row, phase.kind, template)
        except (TemplateError, TypeError) as error:
            facts.problems.append(f"{where}: the chat template refuses it: {error}")
            continue
        if token := next((token for token in control for text in _texts(row) if token in text), None):
            facts.problems.append(
                f"{where}: a text holds {token}, which the tokenizer reads as a control token; remove or reword it"
            )
        elif split and phase.kind == "sft":
            otherwise_served.append(line)
        elif split:
            facts.problems.append(f"{where}: {split}")
        if lengths[-1] <= phase.max_length or phase.kind == "cpt":
            fitting.append((line, row))
    if lengths:
        facts.longest, facts.median, facts.p95 = max(lengths), _percentile(lengths, 50), _percentile(lengths, 95)
    facts.too_long = sum(length > phase.max_length for length in lengths)
    if otherwise_served:
        facts.warnings.append(
            f"{subject}: {len(otherwise_served)} rows (first: line {otherwise_served[0]}) with earlier answers, before which training shows "
            "a thinking block and serving none; the last answer is trained after a slightly other text than it will see"
        )
    return fitting


def _split_prompt(tokenizer: Any, row: Row, kind: str, template: str | None) -> str:
    """What is wrong if the prompt alone is not how the whole conversation begins; the model would train after another text than it will see."""
    if kind == "sft":
        pairs = [("messages", row["messages"][:-1], row["messages"])]
    elif kind in ("dpo", "kto"):
        sides = ("chosen", "rejected") if kind == "dpo" else ("completion",)
        pairs = [(side, row["prompt"], row["prompt"] + row[side]) for side in sides]
    else:
        return ""
    for side, prompt, whole in pairs:
        begins = data.rendered(tokenizer, prompt, row, add_generation_prompt=True)
        text = data.rendered(tokenizer, whole, row, chat_template=template)
        if not text.startswith(begins):
            at = next((i for i, (a, b) in enumerate(zip(begins, text, strict=False)) if a != b), len(text))
            return (
                f"{side}: the prompt as served goes on with {begins[at : at + 40]!r}, the conversation as trained with {text[at : at + 40]!r}; "
                "the answer would be trained after another text than it will see"
            )
    return ""


def _train_like(facts: Facts, subject: str, fitting: Sequence[tuple[int, Row]], phase: Phase, tokenizer: Any) -> None:
    """Tokens, and which of them are trained, as TRL's trainer counts them."""
    if phase.kind == "grpo":
        facts.tokens = sum(data.row_length(tokenizer, row, "grpo") for _, row in fitting)
        return
    from training.preview import samples

    lengths: list[int] = []
    trained = 0
    found = samples([row for _, row in fitting], phase, tokenizer)
    for (line, _), sequences in zip(fitting, found, strict=True):
        lengths += [len(sequence.ids) for sequence in sequences]
        counts = [sum(sequence.trained) for sequence in sequences]
        trained += sum(counts)
        if not all(counts):
            facts.problems.append(
                f"{subject}: line {line}: no token of it is trained; want an answer that the chat template shows"
            )
    facts.tokens = sum(lengths)
    facts.trained = round(trained / facts.tokens, 4)
    if phase.kind in ("cpt", "sft"):
        facts.packs = _packs(lengths, phase)
        facts.pack_fill = round(facts.tokens / (facts.packs * phase.max_length), 4)


def _packs(lengths: Sequence[int], phase: Phase) -> int:
    """How many packed rows TRL makes of sequences of these lengths."""
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    dataset = Dataset.from_dict({"input_ids": [[0] * length for length in lengths]})
    return len(pack_dataset(dataset, phase.max_length, "bfd_split" if phase.kind == "cpt" else "bfd"))


def _pace(facts: Facts, rows: Sequence[Row], phase: Phase, steps_known: bool) -> None:
    facts.units_a_step = phase.batch_size * phase.accumulation
    units: float = facts.packs or len(rows)
    if phase.kind == "grpo":
        facts.units_a_step /= phase.generations
    elif phase.kind == "kto":
        good = sum(row["label"] for row in rows)
        units = 2 * min(good, len(rows) - good)
        if units < len(rows):
            facts.warnings.append(
                f"{good} good and {len(rows) - good} bad answers; they take turns, so {units:g} rows are read"
            )
    if steps_known:
        facts.epochs = round(phase.steps * facts.units_a_step / units, 3)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)


def _percentile(lengths: Sequence[int], share: int) -> int:
    return round(quantiles(lengths, n=100, method="inclusive")[share - 1]) if len(lengths) > 1 else lengths[0]


def _unit(facts: Facts) -> str:
    if facts.packs:
        return "packs"
    return "prompts" if facts.kind == "grpo" else "rows"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
