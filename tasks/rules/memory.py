"""Does the run fit the card of its tier? The arithmetic is the contract's, the cards are the tiers'."""

from __future__ import annotations

from tasks.errors import UserError
from tasks.rules.tiers import TIERS
from training.contract.memory import USABLE, MemoryPlan, plan_memory, suggest
from training.contract.recipe import Recipe, Tier
from training.contract.shapes import ModelShape, shape_of


def memory_plan(recipe: Recipe, shape: ModelShape | None = None) -> MemoryPlan:
    """The hungriest phase against the tier's card; without a shape, that of the recipe's model by family and size."""
    return plan_memory(recipe, shape or shape_of(recipe.model), usable_gb(recipe.box.tier))


def require_fit(recipe: Recipe, shape: ModelShape | None = None) -> MemoryPlan:
    """The plan; UserError with the parts and the first change that would make it fit if it does not."""
    shape = shape or shape_of(recipe.model)
    plan = memory_plan(recipe, shape)
    if plan.fits:
        return plan
    guess = "" if plan.exact else " (estimated from model.size_gb: no config.json was found)"
    would = suggest(recipe, shape, {tier: usable_gb(tier) for tier in TIERS if tier in (recipe.box.tier, *_LARGER)})
    raise UserError(
        f"box.tier: {recipe.box.tier} has {plan.available_gb:.1f} GB for use, phase {plan.phase} needs {plan.needed_gb:.1f} GB{guess}: "
        f"{parts_sentence(plan)}; "
        + (f"would fit: {would}" if would else "nothing smaller fits and no tier holds it: take a smaller model")
    )


def parts_sentence(plan: MemoryPlan) -> str:
    """The parts, largest first."""
    return ", ".join(f"{name} {gb:.1f}" for name, gb in sorted(plan.parts.items(), key=lambda part: -part[1]))


def usable_gb(tier: Tier) -> float:
    """GB of the tier's cards that a plan may count on."""
    return TIERS[tier].memory_gb * TIERS[tier].num_gpus * USABLE


_LARGER: tuple[Tier, ...] = ("rtxpro6000", "h200", "b200")
