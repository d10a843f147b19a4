"""Score tool calls on held-out rows: greedy answers, the share that parse and the share that are exactly right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from training import liveness, packing, toolcalls
from training.contract.recipe import Recipe
from training.contract.rows import Row, read_rows
from training.data import render_prompt
from training.model import attach, load_base, load_tokenizer, release
from training.sharded.ranks import current

_BATCH = 16


def evaluate(
    model_dir: Path, data: Path, recipe: Recipe, adapter: Path | None
) -> tuple[int, dict[str, float], dict[str, float]]:
    """(rows, metrics, distances) of the base model, or of the base with `adapter`; the distances are what `liveness.require_served` saw."""
    rows = read_rows(data, "evaluation")[: recipe.evaluation.rows]
    try:
        answers, served = _answers(model_dir, rows, recipe, adapter)
        return len(rows), score(answers, rows), served
    finally:
        release()


def score(answers: Sequence[str], rows: Sequence[Row]) -> dict[str, float]:
    calls = [toolcalls.parse_call(answer) for answer in answers]
    exact = [
        call is not None and call.name == row["answer"]["name"] and call.arguments == toolcalls.rendered(row["answer"])
        for call, row in zip(calls, rows, strict=True)
    ]
    return {"valid_rate": sum(call is not None for call in calls) / len(rows), "exact_rate": sum(exact) / len(rows)}


def _answers(
    model_dir: Path, rows: Sequence[Row], recipe: Recipe, adapter: Path | None
) -> tuple[list[str], dict[str, float]]:
    tokenizer = load_tokenizer(model_dir)
    packing.install()
    model = load_base(model_dir, recipe)
    served: dict[str, float] = {}
    if adapter is not None:
        model = attach(model, recipe, adapter)
        served = _require_adapter(model, tokenizer, rows[0], adapter)
    return generate(model.eval(), tokenizer, rows, recipe.evaluation.max_new_tokens), served


def _require_adapter(model: Any, tokenizer: Any, row: Row, adapter: Path) -> dict[str, float]:
    """A freshly loaded base with the stored adapter answers as the model did when training ended. Without its probe (an adapter of an older run),
    it must at least answer otherwise than the base."""
    liveness.require_static(model, "serve")
    probe = liveness.read_probe(adapter)
    if probe is None:
        ids = tokenizer(render_prompt(tokenizer, row), return_tensors="pt")["input_ids"].to(model.device)
        probe = liveness.probe_of(model, ids)
    return liveness.require_served(
        probe, liveness.log_probabilities(model, torch.tensor([probe.ids], device=model.device))
    )


@torch.no_grad()
def generate(model: Any, tokenizer: Any, rows: Sequence[Row], max_new_tokens: int) -> list[str]:
    """Greedy completions, left-padded in batches; the mask keeps the padding out of the gated delta net's state."""
    answers: list[str] = []
    for first in range(0, len(rows), _BATCH):
        prompts = [render_prompt(tokenizer, row) for row in rows[first : first + _BATCH]]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        output = model.generate(
            **batch,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
            # Several processes bring the layers together: one whose answers end sooner, by a rounding, must go on with the others.
            synced_gpus=current().size > 1,
        )
        answers += tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers
