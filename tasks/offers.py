"""From a recipe to a plan: does it fit, which offers will do, what does each cost for the whole run. Spends nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tasks.domain import Offer, Plan, RankedOffer
from tasks.errors import NoOffers, UserError
from tasks.hosts import bad_machines
from tasks.market.protocol import Market
from tasks.rules.filters import Want, funnel, survivors
from tasks.rules.memory import parts_sentence, require_fit
from tasks.rules.pricing import Cost, run_cost
from tasks.rules.tiers import TIERS
from training.box.store import Store
from training.contract.claims import ClaimError, newest_manifest
from training.contract.manifest import ManifestError, parse_manifest
from training.contract.recipe import Recipe
from training.contract.shapes import ModelShape, ShapeError, read_shape


def plan_run(
    recipe: Recipe,
    market: Market,
    store: Store,
    *,
    now: float,
    done: Collection[str] = (),
    tried: Collection[int] = (),
) -> Plan:
    """The plan of a run: memory, hours, dollars, ranked offers, and what each filter removed.

    `done` are phases complete in the bucket, `tried` machines of this run's earlier attempts; machines remembered in the bucket are
    left out. UserError if the recipe does not fit its card; errors of market and bucket as they are.
    """
    shape = mirrored_shape(recipe, store)
    memory = require_fit(recipe, shape)
    offers = market.search(recipe.box)
    bad = bad_machines(store, now=now)
    costs = {offer.id: run_cost(recipe, offer, done, shape) for offer in offers}
    expected = _expected(recipe, done, offers, costs, shape)
    want = Want(
        box=recipe.box,
        needed_s=expected.hours * 3600,
        bad_machines={**bad, **dict.fromkeys(tried, "tried in this run")},
        max_usd=recipe.budget.max_usd,
        run_usd={offer_id: cost.usd for offer_id, cost in costs.items()},
    )
    ranked = rank(survivors(offers, want), costs)
    best = costs[ranked[0].offer.id] if ranked else expected
    return Plan(
        run=recipe.name,
        phases=recipe.phase_names,
        done=tuple(name for name in recipe.phase_names if name in done),
        steps_left=sum(phase.steps for phase in recipe.phases if phase.name not in done),
        memory=memory,
        hours=round(best.hours, 4),
        hours_from=best.hours_from,
        run_usd=ranked[0].run_usd if ranked else None,
        max_usd=recipe.budget.max_usd,
        offers=tuple(ranked),
        funnel=funnel(offers, want),
        found=len(offers),
    )


def mirrored_shape(recipe: Recipe, store: Store) -> ModelShape | None:
    """The model's shape by the config.json of its mirror in the bucket; None if there is no mirror or no such file yet.

    UserError if the file describes another family than the recipe's, or a model that Livery does not know.
    """
    if not recipe.model.source.startswith("bucket:"):
        return None
    key = f"{recipe.model.source.removeprefix('bucket:').rstrip('/')}/config.json"
    data = store.get_bytes(key)
    if data is None:
        return None
    try:
        shape = read_shape(data, key)
    except ShapeError as error:
        raise UserError(f"model.source: {error}") from None
    if shape.family != recipe.model.family:
        raise UserError(f"model.family: seen {recipe.model.family}, but {key} says {shape.family}; write that")
    return shape


def done_phases(recipe: Recipe, store: Store) -> tuple[str, ...]:
    """Phases that need no training any more by their manifests alone. A run checks their data as well, a plan has no need of it."""
    done: list[str] = []
    for name in recipe.phase_names:
        try:
            newest = newest_manifest(store, recipe.name, name)
            if newest is None:
                break
            manifest = parse_manifest(newest[1], newest[0])
        except (ClaimError, ManifestError) as error:
            raise UserError(str(error)) from None
        if not manifest.complete or manifest.phase_digest != recipe.phase_digest(name):
            break
        done.append(name)
    return tuple(done)


def rank(offers: Sequence[Offer], costs: Mapping[int, Cost]) -> list[RankedOffer]:
    """Cheapest run first; among equals the more reliable machine."""
    order = sorted(offers, key=lambda offer: (round(costs[offer.id].usd, 4), -(offer.reliability or 0.0), offer.id))
    return [
        RankedOffer(offer=offer, run_usd=round(costs[offer.id].usd, 4), sentence=costs[offer.id].sentence)
        for offer in order
    ]


def best_offer(plan: Plan) -> RankedOffer:
    """The offer to rent; NoOffers with what each filter removed if there is none."""
    if plan.offers:
        return plan.offers[0]
    raise NoOffers(no_offers_sentence(plan))


def no_offers_sentence(plan: Plan) -> str:
    if plan.found == 0:
        return f"no offers: the market has nothing of this tier at all for run '{plan.run}'; wait, or take another box.tier"
    lines = [f"no offers: none of {plan.found} passes every filter (a count is what the filter removes alone):"]
    for count in sorted(plan.funnel, key=lambda entry: -entry.removed):
        if count.removed:
            gain = "" if count.cheapest_lost_usd is None else f"; would give ${count.cheapest_lost_usd:.3f}/h"
            lines.append(f"  {count.rule}: {count.removed} ({count.loosen}{gain})")
    return "\n".join([*lines, "  nothing is loosened by itself; change the recipe or try again later"])


def plan_table(plan: Plan, *, rows: int = 15) -> str:
    """The plan for a terminal."""
    fit = plan.memory
    lines = [
        f"plan of run '{plan.run}': {', '.join(plan.phases)}"
        + (f" (done: {', '.join(plan.done)})" if plan.done else ""),
        f"  {plan.steps_left} steps left, {plan.hours:.2f} h ({plan.hours_from}), "
        + ("no offer" if plan.run_usd is None else f"${plan.run_usd:.2f} on the best offer")
        + f", budget ${plan.max_usd:.2f}",
    ]
    if fit:
        guess = "" if fit.exact else "; estimated from model.size_gb, no config.json was found in the bucket"
        lines.append(
            f"  memory: {fit.needed_gb:.1f} of {fit.available_gb:.1f} GB in phase {fit.phase} ({parts_sentence(fit)}){guess}"
        )
    if plan.offers:
        lines.append(f"  {'offer':>10} {'machine':>8} {'card':<20}{'$ run':>9}{'$/h':>8}{'up':>7}{'down':>7}  where")
    for ranked in plan.offers[:rows]:
        offer = ranked.offer
        lines.append(
            f"  {offer.id:>10} {offer.machine_id:>8} {offer.gpu_name[:19]:<20}{ranked.run_usd:>9.3f}{offer.dph_total_usd:>8.3f}"
            f"{offer.inet_up_mbps or 0:>7.0f}{offer.inet_down_mbps or 0:>7.0f}  {offer.geolocation or '-'}"
        )
    lines.append(f"  {plan.found} offers found, {len(plan.offers)} pass; each filter alone removes:")
    for count in plan.funnel:
        if count.removed:
            gain = (
                "" if count.cheapest_lost_usd is None else f"; only this one keeps out ${count.cheapest_lost_usd:.3f}/h"
            )
            lines.append(f"  {count.removed:>10} {count.rule}: {count.loosen}{gain}")
    return "\n".join(lines)


def _expected(
    recipe: Recipe,
    done: Collection[str],
    offers: Sequence[Offer],
    costs: Mapping[int, Cost],
    shape: ModelShape | None,
) -> Cost:
    """The hours to plan with before an offer is chosen: the slowest of those that keep the recipe's floors, or the floors themselves."""
    box = recipe.box
    fast = [
        costs[offer.id]
        for offer in offers
        if (offer.inet_down_mbps or 0) >= box.min_inet_down_mbps and (offer.inet_up_mbps or 0) >= box.min_inet_up_mbps
    ]
    at_the_floor = run_cost(recipe, _floor_offer(recipe), done, shape)
    return max(fast, key=lambda cost: cost.hours, default=at_the_floor)


def _floor_offer(recipe: Recipe) -> Offer:
    """An offer that keeps the recipe's floors and no more, for a plan when there is none."""
    box, tier = recipe.box, TIERS[recipe.box.tier]
    return Offer(
        id=0,
        machine_id=0,
        gpu_name=box.tier,
        num_gpus=tier.num_gpus,
        gpu_ram_mb=tier.min_memory_mb,
        disk_space_gb=box.disk_gb,
        dph_total_usd=box.max_dph_usd,
        inet_down_mbps=max(box.min_inet_down_mbps, 50),
        inet_up_mbps=max(box.min_inet_up_mbps, 50),
    )
