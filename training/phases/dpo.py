"""Direct preference optimisation. The reference is the policy that the phase began with, computed once before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl import DPOConfig, DPOTrainer

from training import data, references
from training.contract.recipe import DpoPhase
from training.phases import common
from training.phases.desk import Desk


def train(desk: Desk) -> Path:
    phase, seed = desk.phase, desk.assignment.recipe.seed
    assert isinstance(phase, DpoPhase)
    return common.train(desk, lambda rows, tokenizer: data.dpo(rows, phase, tokenizer, seed), build)


def build(setting: common.Setting, prepared: data.Prepared) -> Any:
    phase = setting.desk.phase
    assert isinstance(phase, DpoPhase)
    arguments = DPOConfig(**setting.arguments(), max_length=phase.max_length, beta=phase.beta)
    with references.no_copy(setting.model):
        trainer = DPOTrainer(
            setting.model, args=arguments, train_dataset=prepared.dataset, processing_class=setting.tokenizer
        )
    return references.attach(trainer, setting.desk)
