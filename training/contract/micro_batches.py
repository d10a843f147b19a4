"""How many rows of a step go through the model at once. A small micro-batch leaves a card waiting for its host: 4,096 tokens of Qwen3.6-35B-A3B took an H200
twice as long a token as 16,384 did, which is as much as pays. The step is the same however it is split, because the loss of pretraining and of
supervised fine-tuning is divided by the tokens of the whole step.
"""

from __future__ import annotations

from training.contract.memory import moments
from training.contract.recipe import Phase, Recipe
from training.contract.shapes import ModelShape

ENOUGH_TOKENS = 16_384


def regrouped(recipe: Recipe, phase: Phase, shape: ModelShape, available_gb: float, gpus: int = 1) -> Phase:
    """The phase with as many rows in a micro-batch as pay and fit, and so much less accumulation. As the recipe has it on the CPU, for preferences and
    for reinforcement, whose losses are means over a micro-batch's rows, and for a base in 4 bits."""
    if recipe.box.device != "cuda" or recipe.model.quantisation != "none" or phase.kind not in ("cpt", "sft"):
        return phase
    each = phase.accumulation // gpus
    best = phase
    for more in range(2, each + 1):
        rows = phase.batch_size * more
        if each % more or rows * phase.max_length > ENOUGH_TOKENS:
            continue
        changed = phase.model_copy(update={"batch_size": rows, "accumulation": each // more * gpus})
        if sum(next(moments(recipe, changed, shape, "full")).values()) <= available_gb:
            best = changed
    return best
