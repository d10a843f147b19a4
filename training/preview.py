"""The first samples exactly as they train: decoded tokens, those that the loss is on in green, the others dim.

Which tokens those are is asked of TRL's own trainers, built with the phase's settings around a stand-in model that is never run: their
preparation and their collator make the labels here as they do in training.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from training import data
from training.contract.recipe import Phase
from training.contract.rows import Row

GREEN, DIM, PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"
# Enough of a model for a trainer to be built around.
_STAND_IN = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


@dataclass(frozen=True)
class Sample:
    """One sequence as the trainer sees it."""

    ids: list[int]
    trained: list[bool]
    """Which tokens the loss is on."""


def samples(rows: Sequence[Row], phase: Phase, tokenizer: Any) -> Iterator[list[Sample]]:
    """The sequences of each checked row, in order: one, or DPO's chosen and rejected. GRPO has none: it writes its own answers.

    Rows longer than `max_length` must be gone already. CPT's texts are whole here, before packing splits them.
    """
    assert phase.kind != "grpo", "GRPO trains on what the model writes"
    with tempfile.TemporaryDirectory() as scratch:
        trainer = _trainer(data.shaped(rows, phase.kind), phase, tokenizer, scratch)
        assert len(trainer.train_dataset) == len(rows), "the trainer dropped rows that fit"
        for example in trainer.train_dataset:
            yield list(_sequences(trainer.data_collator([example])))


def preview(rows: Sequence[tuple[int, Row]], phase: Phase, tokenizer: Any, *, color: bool) -> Iterator[str]:
    """The text of each (line, row), with a heading a row."""
    template = data.training_template(tokenizer) if phase.kind == "sft" else None
    for line, row in rows:
        length = data.row_length(tokenizer, row, phase.kind, template)
        yield f"── line {line}, {length} tokens"
        if phase.kind == "grpo":
            yield f"{data.render_prompt(tokenizer, row)}\n── the answer rewarded: {json.dumps(row['answer'], ensure_ascii=False)}"
        elif phase.kind != "cpt" and length > phase.max_length:
            yield f"longer than max_length {phase.max_length}: dropped, not trained"
        else:
            sides = ("chosen: ", "rejected: ") if phase.kind == "dpo" else ("",)
            (sequences,) = samples([row], phase, tokenizer)
            for side, sample in zip(sides, sequences, strict=True):
                label = f", {'good' if row['label'] else 'bad'} answer" if phase.kind == "kto" else ""
                yield f"── {side}{sum(sample.trained)} of {len(sample.ids)} tokens trained{label}"
                yield decoded(sample, tokenizer, color=color)


def decoded(sample: Sample, tokenizer: Any, *, color: bool) -> str:
    """The sample's text; the trained parts green and the others dim, or the trained parts in ⟦brackets⟧."""
    parts = []
    for trained, pairs in groupby(zip(sample.trained, sample.ids, strict=True), key=lambda pair: pair[0]):
        text = tokenizer.decode([token for _, token in pairs])
        if color:
            parts.append(f"{GREEN if trained else DIM}{text}{PLAIN}")
        else:
            parts.append(f"⟦{text}⟧" if trained else text)
    return "".join(parts)


def _sequences(batch: dict[str, Any]) -> Iterator[Sample]:
    """What the collator made of one example; its padding is cut off."""
    trained = batch["labels"] != -100 if "labels" in batch else batch["completion_mask"] == 1
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 1
    for ids, mask, kept in zip(batch["input_ids"], trained, real, strict=True):
        yield Sample(ids[kept].tolist(), mask[kept].tolist())


def _trainer(dataset: Any, phase: Phase, tokenizer: Any, scratch: str) -> Any:
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

    shared: dict[str, Any] = {
        "output_dir": str(Path(scratch)),
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "per_device_train_batch_size": phase.batch_size,
    }
    parts = {"model": _stand_in(tokenizer), "train_dataset": dataset, "processing_class": tokenizer}
    if phase.kind == "dpo":
        return DPOTrainer(args=DPOConfig(**shared, max_length=phase.max_length), **parts)
    if phase.kind == "kto":
        return KTOTrainer(args=KTOConfig(**shared, max_length=phase.max_length), **parts)
    # Unpacked, so that sequences stay in the order of the rows; without padding, as in packed rows, whose first token has no loss.
    arguments = SFTConfig(
        **shared,
        padding_free=True,
        max_length=None,
        assistant_only_loss=phase.kind == "sft",
        dataset_text_field="text",
    )
    return SFTTrainer(args=arguments, **parts)


def _stand_in(tokenizer: Any) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **_STAND_IN))
    return get_peft_model(model, LoraConfig(r=1, target_modules=["q_proj"], task_type="CAUSAL_LM"))
