"""How many rows of a step go through the model at once. A small micro-batch leaves a card waiting for its host: 4,096 tokens of Qwen3.6-35B-A3B took an H200
twice as long a token as 16,384 did, which is as much as pays. The step is the same however it is split, because the loss of pretraining and of
supervised fine-tuning is divided by the tokens of the whole step.
"""

from __future__ import annotations

from training.contract.memory import MemoryPlan, has_room, moments, plan_memory
from training.contract.recipe import Phase, Recipe
from training.contract.shapes import ModelShape

ENOUGH_TOKENS = 16_384


def plan_regrouped(recipe: Recipe, shape: ModelShape, available_gb: float) -> MemoryPlan:
    """The memory plan of the run as the card will split its steps."""
    phases = tuple(regrouped(recipe, phase, shape, available_gb) for phase in recipe.phases)
    plan = plan_memory(recipe.model_copy(update={"phases": phases}), shape, available_gb)
    changed = {
        phase.name: (phase.batch_size, phase.accumulation)
        for phase, before in zip(phases, recipe.phases, strict=True)
        if phase.batch_size != before.batch_size
    }
    return plan.model_copy(update={"micro_batches": changed})


def regrouped(recipe: Recipe, phase: Phase, shape: ModelShape, available_gb: float, gpus: int = 1) -> Phase:
    """The phase with as many rows in a micro-batch as pay and fit, and so much less accumulation. As the recipe has it where it says so, on the CPU, for
    a base in 4 bits, and where a loss is a mean over a micro-batch's rows: of preferences, of reinforcement, and the router's auxiliary one."""
    if recipe.micro_batches == "recipe" or recipe.box.device != "cuda" or recipe.model.quantisation != "none":
        return phase
    if phase.kind not in ("cpt", "sft") or phase.router_aux_loss > 0:
        return phase
    each = phase.accumulation // gpus
    best = phase
    for more in range(2, each + 1):
        rows = phase.batch_size * more
        if each % more or rows * phase.max_length > ENOUGH_TOKENS:
            continue
        changed = phase.model_copy(update={"batch_size": rows, "accumulation": each // more * gpus})
        if has_room(next(moments(recipe, changed, shape)), available_gb):
            best = changed
    return best
