"""Supervised fine-tuning on conversations with tool calls: the loss is on the assistant's tokens, whole conversations are packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import SFTConfig, SFTTrainer

from training import data
from training.contract.recipe import SftPhase
from training.phases import common
from training.phases.desk import Desk


def train(desk: Desk) -> Path:
    phase = desk.phase
    assert isinstance(phase, SftPhase)
    return common.train(desk, lambda rows, tokenizer: data.sft(rows, phase, tokenizer), build, packed=True)


def build(setting: common.Setting, prepared: data.Prepared) -> Any:
    arguments = SFTConfig(
        **setting.arguments(),
        packing=setting.packed,
        packing_strategy="bfd",
        max_length=setting.desk.phase.max_length,
        assistant_only_loss=True,
    )
    return SFTTrainer(setting.model, args=arguments, train_dataset=prepared.dataset, processing_class=setting.tokenizer)
