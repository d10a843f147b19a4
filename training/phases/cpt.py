"""Continued pretraining: texts packed by `bfd_split`, because `bfd` throws away what does not fit and `wrapped` mixes documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import SFTConfig, SFTTrainer

from training import data
from training.phases import common
from training.phases.desk import Desk


def train(desk: Desk) -> Path:
    return common.train(desk, lambda rows, tokenizer: data.cpt(rows), build, packed=True)


def build(setting: common.Setting, prepared: data.Prepared) -> Any:
    arguments = SFTConfig(
        **setting.arguments(),
        packing=setting.packed,
        packing_strategy="bfd_split",
        max_length=setting.desk.phase.max_length,
        dataset_text_field="text",
    )
    return SFTTrainer(setting.model, args=arguments, train_dataset=prepared.dataset, processing_class=setting.tokenizer)
