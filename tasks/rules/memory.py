"""Does the run fit the card of its tier? The arithmetic is the contract's, the cards are the tiers'."""

from __future__ import annotations

from dataclasses import replace

from tasks.domain import Offer
from tasks.errors import UserError
from tasks.rules.tiers import TIERS
from training.contract.memory import USABLE, MemoryPlan, suggest
from training.contract.micro_batches import plan_regrouped
from training.contract.quantised import (
    Hardware,
    Option,
    QuantisedPlan,
    hardware_of,
    hungriest,
    packed_gb,
    plan_quantised,
)
from training.contract.recipe import STREAMED_PHASES, Box, Recipe, Tier
from training.contract.shapes import ModelShape, shape_of


def memory_plan(recipe: Recipe, shape: ModelShape | None = None, offer: Offer | None = None) -> MemoryPlan:
    """The hungriest phase against one of the tier's cards; without a shape, that of the recipe's model by family and size.

    A 4-bit base is planned for the box of `offer`, or for the recipe's floors; without a strategy that fits, for the one that comes nearest.
    """
    shape = shape or shape_of(recipe.model)
    if recipe.model.quantisation == "none":
        return plan_regrouped(recipe, shape, usable_gb(recipe.box.tier))
    planned = quantised_plan(recipe, shape, offer)
    option = planned.chosen or min(planned.options, key=lambda each: each.needed_gb)
    return _of_option(recipe, shape, planned.hardware, option)


def quantised_plan(recipe: Recipe, shape: ModelShape, offer: Offer | None = None) -> QuantisedPlan:
    """How a 4-bit base would run on the box of `offer`, or on one that keeps the recipe's floors and no more. UserError for what no box mends."""
    planned = plan_quantised(recipe, shape, hardware(recipe.box, offer))
    if not planned.options:
        raise UserError("; ".join(planned.refusals))
    return planned


def no_room(recipe: Recipe, shape: ModelShape | None, offer: Offer) -> str | None:
    """Why a 4-bit base does not fit a box that states less host memory than the recipe's floor; None if it does. Lowering the floor alone would
    then gain nothing."""
    stated = offer.host_memory_gb
    if recipe.model.quantisation == "none" or stated is None or stated >= recipe.box.min_host_memory_gb:
        return None
    box = replace(hardware(recipe.box, offer), host_gb=stated)
    planned = plan_quantised(recipe, shape or shape_of(recipe.model), box)
    return None if planned.chosen else f"no room for the 4-bit base: {'; '.join(planned.refusals)}"


def hardware(box: Box, offer: Offer | None = None) -> Hardware:
    """The box as the arithmetic wants it. What an offer does not state is taken to be the recipe's floor: the first login measures it."""
    if offer is None:
        return hardware_of(box.tier, box.gpus, box.min_host_memory_gb, dph_usd=box.max_dph_usd)
    return hardware_of(
        box.tier,
        box.gpus,
        max(offer.host_memory_gb or 0.0, box.min_host_memory_gb),
        dph_usd=offer.dph_total_usd,
        name=offer.gpu_name,
        pcie_gbs=offer.pcie_gbs,
    )


def require_fit(recipe: Recipe, shape: ModelShape | None = None) -> MemoryPlan:
    """The plan; UserError with the parts and the first change that would make it fit if it does not."""
    shape = shape or shape_of(recipe.model)
    if recipe.model.quantisation != "none":
        return _require_quantised_fit(recipe, shape)
    plan = memory_plan(recipe, shape)
    if plan.fits:
        return plan
    tiers: dict[str, float] = {tier: usable_gb(tier) for tier in TIERS if tier in (recipe.box.tier, *_LARGER)}
    would = suggest(recipe, shape, tiers, plan_regrouped)
    raise UserError(
        f"box.tier: {recipe.box.tier} has {plan.available_gb:.1f} GB for use, phase {plan.phase} needs {plan.needed_gb:.1f} GB{_guess(plan)}: "
        f"{parts_sentence(plan)}; "
        + (f"would fit: {would}" if would else "nothing smaller fits and no tier holds it: take a smaller model")
        + _in_4_bits(recipe, shape)
    )


def parts_sentence(plan: MemoryPlan) -> str:
    """The parts, largest first."""
    return ", ".join(f"{name} {gb:.1f}" for name, gb in sorted(plan.parts.items(), key=lambda part: -part[1]))


def usable_gb(tier: Tier) -> float:
    """GB of one of the tier's cards that a plan may count on."""
    return TIERS[tier].memory_gb * USABLE


_LARGER: tuple[Tier, ...] = ("rtxpro6000", "h200", "b200")


def _in_4_bits(recipe: Recipe, shape: ModelShape) -> str:
    """The same recipe with a 4-bit base, if its phases and its box take that."""
    if any(phase.kind not in STREAMED_PHASES for phase in recipe.phases):
        return ""
    quantised = recipe.model_copy(update={"model": recipe.model.model_copy(update={"quantisation": "nf4"})})
    chosen = quantised_plan(quantised, shape).chosen
    return f"; or model.quantisation nf4: {chosen.needed_gb:.1f} GB" if chosen else ""


def _require_quantised_fit(recipe: Recipe, shape: ModelShape) -> MemoryPlan:
    planned, box = quantised_plan(recipe, shape), recipe.box
    plan = memory_plan(recipe, shape)
    if planned.chosen is None:
        raise UserError(
            f"box: {box.gpus} x {box.tier} with {box.min_host_memory_gb:g} GB of host memory (box.min_host_memory_gb) cannot hold the 4-bit base{_guess(plan)}: "
            f"{'; '.join(planned.refusals)}; "
            + (f"would fit: {'; or '.join(planned.would_fit)}" if planned.would_fit else "nothing that was tried fits")
        )
    needed = recipe.model.size_gb + (packed_gb(recipe, shape) if recipe.model.nf4_cache else 0.0)
    if needed > box.disk_gb:
        raise UserError(
            f"box.disk_gb: {box.disk_gb}, but the model has {recipe.model.size_gb:g} GB and its 4-bit cache {needed - recipe.model.size_gb:.0f}; "
            f"want more than {needed:.0f}, or leave model.nf4_cache out"
        )
    return plan


def _of_option(recipe: Recipe, shape: ModelShape, box: Hardware, option: Option) -> MemoryPlan:
    return MemoryPlan(
        phase=hungriest(recipe).name,
        needed_gb=round(option.needed_gb, 2),
        available_gb=round(box.usable_gb, 2),
        fits=option.fits,
        parts={part: round(gb, 2) for part, gb in option.card_gb.items() if gb},
        exact=shape.exact,
        gpus=box.gpus,
        execution=option.strategy,
        host_gb=round(option.host_gb, 2),
    )


def _guess(plan: MemoryPlan) -> str:
    return "" if plan.exact else " (estimated from model.size_gb: no config.json was found)"
