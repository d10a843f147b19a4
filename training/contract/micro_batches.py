"""How many rows of a step go through the model at once. The step is the same however it is split, because the loss of pretraining and of supervised
fine-tuning is divided by the tokens of the whole step; what changes is how long it takes and how much memory.

The costs were fitted to whole steps of Qwen3.6-35B-A3B on an H200 (training/RESULTS.md), micro-batches as CUDA graphs: 58, 45 and 42 us a token at
2,048, 4,096 and 8,192 tokens with nothing recomputed, 49 at 12,288 with the mixer and 48 at 16,384 with all but the experts recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator

from training.contract.memory import MemoryPlan, has_room, is_measured, moments, plan_memory, recompute_for
from training.contract.recipe import Phase, Recipe, Recompute
from training.contract.shapes import ModelShape

ENOUGH_TOKENS = 16_384
"""More at once is hardly faster, and launched kernel by kernel: it keeps the card busy for longer than the host."""
# All weights are read forward and backward, which takes as long as so many tokens.
_WEIGHTS_TOKENS = 860
# Launching a micro-batch kernel by kernel takes the host about as long as the card takes for so many, however few are in it.
_HOST_TOKENS = 12_000
_RECOMPUTING: dict[Recompute, float] = {"none": 1.0, "mixer": 1.19, "experts_kept": 1.22, "full": 1.35}


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


def regrouped(
    recipe: Recipe, phase: Phase, shape: ModelShape, available_gb: float, gpus: int = 1, *, graphs: bool = True
) -> Phase:
    """The phase in the micro-batches that take a step the least time of those that fit, its rows a step unchanged: of up to ENOUGH_TOKENS, or of no more rows
    than the recipe's. One row at a time where none leaves a margin and the recipe's does not fit without one.

    As the recipe has it where it says so, on the CPU, for a base in 4 bits and for what was not measured, and where a loss is a mean over a micro-batch's
    rows: of preferences, of reinforcement, and the router's auxiliary one. Without `graphs`, for micro-batches that are launched kernel by kernel
    whatever the recipe says."""
    if recipe.micro_batches == "recipe" or recipe.box.device != "cuda" or recipe.model.quantisation != "none":
        return phase
    if phase.kind not in ("cpt", "sft") or phase.router_aux_loss > 0 or not is_measured(recipe):
        return phase
    graph = graphs and gpus == 1 and recipe.cuda_graphs != "off"
    best: Phase | None = None
    least = float("inf")
    for split in _splits(phase, gpus):
        tokens = split.batch_size * split.max_length
        if tokens > ENOUGH_TOKENS and split.batch_size > phase.batch_size:
            continue
        policy = recompute_for(recipe, split, shape, available_gb)
        if not has_room(next(moments(recipe, split, shape, policy)), available_gb):
            continue
        costs = cost(tokens, policy, graph=graph)
        if costs < least:
            best, least = split, costs
    return best or _barely(recipe, phase, shape, available_gb, gpus)


def cost(tokens: int, policy: Recompute, *, graph: bool) -> float:
    """Of a token in a micro-batch of so many, in what a token costs the card for itself with nothing recomputed."""
    card = (tokens + _WEIGHTS_TOKENS) * _RECOMPUTING[policy]
    return (card if graph else max(card, _HOST_TOKENS)) / tokens


def _barely(recipe: Recipe, phase: Phase, shape: ModelShape, available_gb: float, gpus: int) -> Phase:
    policy = recompute_for(recipe, phase, shape, available_gb)
    fits = sum(next(moments(recipe, phase, shape, policy)).values()) <= available_gb
    return phase if fits else next(_splits(phase, gpus))


def _splits(phase: Phase, gpus: int) -> Iterator[Phase]:
    """The phase with any number of rows at once that deals a card's share of a step out evenly."""
    rows = phase.batch_size * (phase.accumulation // gpus)
    for batch in range(1, rows + 1):
        if rows % batch == 0:
            yield phase.model_copy(update={"batch_size": batch, "accumulation": rows // batch * gpus})
