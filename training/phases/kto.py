"""Kahneman-Tversky optimisation: single answers judged good or bad. Reference as in DPO; rows in turns and in whole batches (training.data)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import KTOConfig, KTOTrainer

from training import data, references
from training.contract.recipe import KtoPhase
from training.phases import common
from training.phases.desk import Desk


def train(desk: Desk) -> Path:
    phase, seed = desk.phase, desk.assignment.recipe.seed
    assert isinstance(phase, KtoPhase)
    return common.train(desk, lambda rows, tokenizer: data.kto(rows, phase, tokenizer, seed), build)


def build(setting: common.Setting, prepared: data.Prepared) -> Any:
    phase = setting.desk.phase
    assert isinstance(phase, KtoPhase)
    arguments = KTOConfig(**setting.arguments(), max_length=phase.max_length, beta=phase.beta)
    with references.no_copy(setting.model):
        trainer = KTOTrainer(
            setting.model, args=arguments, train_dataset=prepared.dataset, processing_class=setting.tokenizer
        )
    return references.attach(trainer, setting.desk)
