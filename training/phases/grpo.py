"""Group-relative policy optimisation, rewarded for valid and for right tool calls.

Completions come from transformers' own generate: TRL's way to vLLM merges the adapter into the bfloat16 base and back, which changes a
fifth of its weights at the first cycle. One generation per optimizer step, or a checkpoint could fall inside a batch of completions and
the resumed run would go another way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trl import GRPOConfig, GRPOTrainer

from training import data, references, toolcalls
from training.contract.recipe import GrpoPhase
from training.phases import common
from training.phases.desk import Desk


def train(desk: Desk) -> Path:
    phase = desk.phase
    assert isinstance(phase, GrpoPhase)
    return common.train(desk, lambda rows, tokenizer: data.grpo(rows, phase, tokenizer), build)


def build(setting: common.Setting, prepared: data.Prepared) -> Any:
    phase = setting.desk.phase
    assert isinstance(phase, GrpoPhase)
    arguments = GRPOConfig(
        **setting.arguments(),
        num_generations=phase.generations,
        max_completion_length=phase.max_completion_length,
        temperature=phase.temperature,
        beta=phase.beta,
        steps_per_generation=phase.accumulation,
        num_iterations=1,
        mask_truncated_completions=True,
        chat_template_kwargs=data.NO_THINKING,
    )
    trainer = GRPOTrainer(
        setting.model,
        reward_funcs=[call_reward],
        args=arguments,
        train_dataset=prepared.dataset,
        processing_class=setting.tokenizer,
    )
    references.require_copy(trainer.model, wanted=phase.beta > 0)
    return trainer


def call_reward(
    completions: Sequence[str], answer: Sequence[str], log_metric: Callable[[str, float], None] | None = None, **_: Any
) -> list[float]:
    """Graded reward in 0..1 a completion; `answer` is the JSON of `{"name", "arguments"}`."""
    if log_metric is not None:
        valid = [toolcalls.parse_call(text) is not None for text in completions]
        log_metric("valid_calls", sum(valid) / len(valid))
    return [toolcalls.reward(text, json.loads(wanted)) for text, wanted in zip(completions, answer, strict=True)]
