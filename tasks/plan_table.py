"""A plan in words: for a terminal, for the run's page, and for the error when nothing fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.domain import FilterCount, Plan, RankedOffer
from tasks.rules.memory import parts_sentence
from tasks.rules.pricing import money
from training.contract.memory import MemoryPlan

ROWS = 15
NONE = "none"  # a page shows a lone dash as the bullet of an empty list


def plan_table(plan: Plan) -> str:
    """The plan for a terminal."""
    lines = [
        f"plan of run '{plan.run}': {', '.join(plan.phases)}"
        + (f" (done: {', '.join(plan.done)})" if plan.done else ""),
        *(f"  {sentence}" for sentence in facts(plan)),
    ]
    if plan.offers:
        lines.append(f"  {'offer':>10} {'machine':>8} {'card':<20}{'$ run':>9}{'$/h':>8}{'up':>7}{'down':>7}  where")
        lines += [_offer_line(ranked) for ranked in plan.offers[:ROWS]]
        if hidden := len(plan.offers) - ROWS:
            lines += [f"  {'…':>10} {hidden} more that fit"] if hidden > 0 else []
    if removing := [count for count in plan.funnel if count.removed]:
        lines.append(f"  {'filter':<20}{'removes':>8}{'cheapest':>10}{'alone':>7}{'gives $ run':>12}  to loosen it")
        lines += [_filter_line(count) for count in removing]
        lines.append(f"  {CAPTION}")
    return "\n".join(lines)


CAPTION = "removes: by this filter applied alone; alone: only this filter stands against them, so they come back when it is loosened"


def facts(plan: Plan) -> list[str]:
    """What the plan says apart from its tables, a sentence each."""
    fit = plan.memory
    cost = "no offer" if plan.run_usd is None else f"{money(plan.run_usd)} on the best offer"
    credit = "" if plan.credit_usd is None else f", credit {money(plan.credit_usd)}"
    said = [
        f"{plan.steps_left} steps left, {plan.hours:.2f} h ({plan.hours_from}), {cost}, budget {money(plan.max_usd)}{credit}"
    ]
    if plan.offers:
        said.append(f"best: {plan.offers[0].sentence}")
    said += plan.notes
    if fit:
        guess = "" if fit.exact else "; estimated from model.size_gb, no config.json was found in the bucket"
        each = f" on each of {fit.gpus} cards" if fit.gpus > 1 else ""
        host = f", {fit.host_gb:.0f} GB of host memory" if fit.host_gb is not None else ""
        said.append(
            f"memory: {fit.needed_gb:.1f} of {fit.available_gb:.1f} GB{each} in phase {fit.phase} ({parts_sentence(fit)}){host}{guess}"
        )
        if fit.recompute:
            said += _split(fit)
    said.append(f"{plan.found} offers found, {len(plan.offers)} pass every filter")
    return [*said, plan.advice] if plan.advice else said


def _split(fit: MemoryPlan) -> list[str]:
    """How the card takes a step: the rows at once, and what it computes again rather than keeps."""
    at_once = _by_phase({p: _rows(rows, times) for p, (rows, times) in fit.micro_batches.items()})
    said = [f"micro-batches: {at_once}; the step stays the recipe's"] if at_once else []
    return [*said, f"recompute: {_by_phase(fit.recompute)}"]


def _rows(rows: int, times: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''} at once, {times} a step"


def _by_phase(told: Mapping[str, str]) -> str:
    """`full in cpt, sft; experts_kept in kto`."""
    phases: dict[str, list[str]] = {}
    for phase, word in told.items():
        phases.setdefault(word, []).append(phase)
    return "; ".join(f"{word} in {', '.join(names)}" for word, names in phases.items())


def offer_rows(plan: Plan) -> list[dict[str, Any]]:
    """The offers that fit, cheapest run first, for a table on the run's page."""
    return [
        {
            "offer": ranked.offer.id,
            "machine": ranked.offer.machine_id,
            "card": ranked.offer.gpu_name,
            "$ run": f"{ranked.run_usd:.3f}",
            "$ bytes": f"{ranked.bytes_usd:.3f}",
            "$/h": f"{ranked.offer.dph_total_usd:.3f}",
            "Mbps down, up": f"{_whole(ranked.offer.inet_down_mbps)}, {_whole(ranked.offer.inet_up_mbps)}",
            "where": ranked.offer.geolocation or "not stated",
        }
        for ranked in plan.offers[:ROWS]
    ] or [{"offer": "none fits"}]


def filter_rows(plan: Plan) -> list[dict[str, Any]]:
    """The funnel: one row for each filter that removes anything."""
    return [
        {
            "filter": count.rule,
            "removes": count.removed,
            "cheapest $/h": _usd(count.cheapest_removed_usd),
            "alone": count.alone,
            "gives $ run": _usd(count.gain_run_usd),
            "to loosen it": count.loosen,
        }
        for count in plan.funnel
        if count.removed
    ] or [{"filter": "none removes anything"}]


def no_offers_sentence(plan: Plan) -> str:
    """Why nothing passes, and the single filter to loosen."""
    if plan.found == 0:
        return f"no offers: the market has nothing of this tier at all for run '{plan.run}'; wait, or take another box.tier"
    lines = [f"no offers: none of {plan.found} passes every filter; {plan.advice}", "  what each filter removes alone:"]
    for count in sorted(plan.funnel, key=lambda entry: -entry.removed):
        if count.removed:
            gain = "" if count.cheapest_lost_usd is None else f"; would give ${count.cheapest_lost_usd:.3f}/h"
            lines.append(f"  {count.rule}: {count.removed} ({count.loosen}{gain})")
    return "\n".join([*lines, "  nothing is loosened by itself; change the recipe or try again later"])


def _offer_line(ranked: RankedOffer) -> str:
    offer = ranked.offer
    return (
        f"  {offer.id:>10} {offer.machine_id:>8} {offer.gpu_name[:19]:<20}{ranked.run_usd:>9.3f}{offer.dph_total_usd:>8.3f}"
        f"{_whole(offer.inet_up_mbps):>7}{_whole(offer.inet_down_mbps):>7}  {offer.geolocation or 'not stated'}"
    )


def _filter_line(count: FilterCount) -> str:
    return (
        f"  {count.rule:<20}{count.removed:>8}{_usd(count.cheapest_removed_usd):>10}{count.alone:>7}"
        f"{_usd(count.gain_run_usd):>12}  {count.loosen}"
    )


def _usd(usd: float | None) -> str:
    return NONE if usd is None else f"{usd:.3f}"


def _whole(number: float | None) -> str:
    return NONE if number is None else f"{number:.0f}"
