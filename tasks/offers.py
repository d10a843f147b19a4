"""From a recipe to a plan: does it fit, which offers will do, what does each cost for the whole run. Spends nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from tasks.domain import Offer, Plan, RankedOffer
from tasks.errors import AuthError, NoOffers, UserError
from tasks.experience import read_experience
from tasks.hosts import bad_machines
from tasks.log import guard_secrets
from tasks.market import open_market
from tasks.market.protocol import Market
from tasks.plan_table import no_offers_sentence
from tasks.rules.filters import Want, require_consistent, sift
from tasks.rules.location import near_bucket
from tasks.rules.memory import hardware, memory_plan, no_room, require_fit
from tasks.rules.pricing import (
    CREDIT_MARGIN,
    Cost,
    Experience,
    Work,
    checkpoint_gb,
    cost_of,
    mbps_for,
    money,
    uploads_of,
    work_left,
)
from tasks.rules.tiers import TIERS
from tasks.s3_block import with_block
from tasks.settings import Settings
from tasks.stores import checked_store
from training.box.store import Store
from training.contract.claims import ClaimError, newest_manifests
from training.contract.manifest import ManifestError
from training.contract.memory import MemoryPlan
from training.contract.quantised import Hardware
from training.contract.recipe import Recipe
from training.contract.shapes import ModelShape, ShapeError, read_shape, shape_of


def plan_today(recipe: Recipe, settings: Settings) -> Plan:
    """The plan by today's market and what the bucket already holds. Writes nothing anywhere.

    UserError for a mistake in recipe or settings, a refused key among them; other errors of the market as they are.
    """
    require_age(recipe, settings)
    settings = with_block(settings)
    guard_secrets(settings)
    recipe, location = near_bucket(recipe, settings.s3_region, settings.s3_endpoint_url)
    store, market = checked_store(settings), open_market(settings)
    try:
        plan = plan_run(recipe, market, store, now=time.time(), done=done_phases(recipe, store))
    except AuthError as error:
        raise refused_key(error) from None
    return plan.model_copy(update={"notes": (*plan.notes, location)})


def require_age(recipe: Recipe, settings: Settings) -> None:
    """UserError if the run may take longer than its boxes may live."""
    if recipe.budget.max_hours > settings.max_age_hours:
        raise UserError(
            f"budget.max_hours: {recipe.budget.max_hours:g} is more than the reaper lets a box live "
            f"(LIVERY_MAX_AGE_HOURS={settings.max_age_hours:g}); raise that or lower this"
        )


def refused_key(error: AuthError) -> UserError:
    return UserError(f"LIVERY_MARKET_API_KEY: the market refuses this key ({error}); see .env.example")


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
    left out. UserError if the recipe contradicts itself or does not fit its card; errors of market and bucket as they are.
    """
    require_consistent(recipe)
    shape = mirrored_shape(recipe, store)
    memory = require_fit(recipe, shape)
    offers = market.search(recipe.box)
    bad = {**bad_machines(store, now=now, offers=offers), **dict.fromkeys(tried, "tried in this run")}
    experience = read_experience(store, recipe, done)
    plan = choose(recipe, offers, done=done, shape=shape, memory=memory, bad=bad, experience=experience)
    credit_usd = market.credit_usd()
    # A host of one's own is never short of money, and no JSON knows infinity.
    known = credit_usd is not None and math.isfinite(credit_usd)
    return plan.model_copy(update={"credit_usd": credit_usd if known else None})


def choose(
    recipe: Recipe,
    offers: Sequence[Offer],
    *,
    done: Collection[str] = (),
    shape: ModelShape | None = None,
    memory: MemoryPlan | None = None,
    bad: Mapping[int, str] | None = None,
    experience: Experience | None = None,
) -> Plan:
    """Filter, price and rank: the whole decision, without asking anybody anything."""
    works = _Works(recipe, done, shape, experience)
    costs = {offer.id: cost_of(works.on(offer), offer) for offer in offers}
    want = Want(
        box=recipe.box,
        prefetch_mbps=mbps_for(recipe.model.size_gb, recipe.budget.prefetch_s),
        upload_mbps=mbps_for(checkpoint_gb(recipe, shape or shape_of(recipe.model)), recipe.budget.upload_s),
        bad_machines=bad or {},
        no_room={offer.id: why for offer in offers if (why := no_room(recipe, shape, offer))},
        max_usd=recipe.budget.max_usd,
        run_usd={offer_id: cost.usd for offer_id, cost in costs.items()},
    )
    expected = _expected(want, works.on(None), offers, costs)
    sifted = sift(offers, replace(want, needed_s=expected.hours * 3600))
    ranked = rank(sifted.passed, costs)
    chosen = ranked[0].offer if ranked else None
    best, work = costs[chosen.id] if chosen else expected, works.on(chosen)
    if memory and memory.execution and chosen:
        memory = memory_plan(recipe, shape, chosen)
    return Plan(
        run=recipe.name,
        phases=recipe.phase_names,
        done=tuple(name for name in recipe.phase_names if name in done),
        steps_left=sum(phase.steps for phase in recipe.phases if phase.name not in done),
        memory=memory,
        hours=round(best.hours, 4),
        hours_from=best.hours_from,
        phase_hours={
            name: round(seconds / 3600, 4)
            for name, (seconds, _) in zip([n for n in recipe.phase_names if n not in done], work.phases, strict=True)
        },
        notes=(*work.notes, *_uploads(work, ranked), *_over_time(recipe, best.hours)),
        run_usd=ranked[0].run_usd if ranked else None,
        max_usd=recipe.budget.max_usd,
        offers=tuple(ranked),
        funnel=sifted.counts,
        found=len(offers),
        advice=sifted.advice,
    )


class _Works:
    """What is left to do, on each box. It is the same on all, except that a 4-bit base waits for the links: boxes that are alike share it."""

    def __init__(
        self, recipe: Recipe, done: Collection[str], shape: ModelShape | None, experience: Experience | None
    ) -> None:
        self._recipe, self._done, self._shape, self._experience = recipe, done, shape, experience
        self._by_box: dict[Hardware | None, Work] = {}

    def on(self, offer: Offer | None) -> Work:
        """On the box of `offer`; None: on one that keeps the recipe's floors."""
        quantised = self._recipe.model.quantisation != "none"
        box = replace(hardware(self._recipe.box, offer), dph_usd=0.0) if quantised else None
        if box not in self._by_box:
            self._by_box[box] = work_left(self._recipe, self._done, self._shape, self._experience, offer)
        return self._by_box[box]


def _uploads(work: Work, ranked: Sequence[RankedOffer]) -> list[str]:
    return [f"uploads on the best offer: {uploads_of(work, ranked[0].offer).sentence}"] if ranked else []


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
    try:
        for _, manifest in newest_manifests(store, recipe.name, recipe.phase_names):
            if not manifest.complete or manifest.phase_digest != recipe.phase_digest(manifest.phase):
                break
            done.append(manifest.phase)
    except (ClaimError, ManifestError) as error:
        raise UserError(str(error)) from None
    return tuple(done)


def rank(offers: Sequence[Offer], costs: Mapping[int, Cost]) -> list[RankedOffer]:
    """Cheapest run first; among equals the more reliable machine."""
    order = sorted(offers, key=lambda offer: (round(costs[offer.id].usd, 4), -(offer.reliability or 0.0), offer.id))
    return [
        RankedOffer(offer=offer, run_usd=round(cost.usd, 4), bytes_usd=round(cost.bytes_usd, 4), sentence=cost.sentence)
        for offer in order
        if (cost := costs[offer.id])
    ]


def require_rentable(plan: Plan) -> RankedOffer:
    """The offer to rent. NoOffers with what each filter removed if there is none, UserError if the account cannot pay for it."""
    if not plan.offers:
        raise NoOffers(no_offers_sentence(plan))
    require_credit(plan)
    return plan.offers[0]


def require_credit(plan: Plan) -> None:
    """UserError if the account's money will not last for the best offer. A market that does not say is asked again before renting."""
    if plan.credit_usd is None or not plan.offers:
        return
    needed = plan.offers[0].run_usd * CREDIT_MARGIN
    if plan.credit_usd < needed:
        raise UserError(
            f"credit: {money(plan.credit_usd)} left in the market's account, run '{plan.run}' needs {money(needed)} "
            f"({money(plan.offers[0].run_usd)} on the best offer and a fifth more); add at least {money(needed - plan.credit_usd)} or train less"
        )


def _over_time(recipe: Recipe, hours: float) -> list[str]:
    allowed = recipe.budget.max_hours
    if hours <= allowed:
        return []
    return [
        f"about {hours:.1f} h are needed and budget.max_hours allows {allowed:g}: it will stop at a manifest and go on when it is run again"
    ]


def _expected(want: Want, work: Work, offers: Sequence[Offer], costs: Mapping[int, Cost]) -> Cost:
    """The hours to plan with before an offer is chosen: the slowest of those that keep the floors, or the floors themselves."""
    down_mbps, up_mbps = want.down_floor_mbps, want.up_floor_mbps
    fast = [
        costs[offer.id]
        for offer in offers
        if (offer.inet_down_mbps or 0) >= down_mbps and (offer.inet_up_mbps or 0) >= up_mbps
    ]
    return max(fast, key=lambda cost: cost.hours, default=None) or cost_of(work, _floor_offer(want))


def _floor_offer(want: Want) -> Offer:
    """An offer that keeps the floors and no more, for a plan when there is none."""
    box, tier = want.box, TIERS[want.box.tier]
    return Offer(
        id=0,
        machine_id=0,
        gpu_name=box.tier,
        num_gpus=box.gpus,
        gpu_ram_mb=tier.min_memory_mb,
        disk_space_gb=box.disk_gb,
        dph_total_usd=box.max_dph_usd,
        inet_down_mbps=max(want.down_floor_mbps, 50),
        inet_up_mbps=max(want.up_floor_mbps, 50),
    )
