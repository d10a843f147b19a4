"""The plan: what a run would take and which offers will do, before a cent is spent.

`python -m flows plan RECIPE` prints the same on a terminal, without a server and without Prefect.
"""

from __future__ import annotations

from prefect import flow

from tasks import artifacts
from tasks.domain import Plan
from tasks.offers import plan_today, require_rentable
from tasks.plan_table import plan_table
from tasks.recipes import load_recipe
from tasks.settings import settings
from training.contract.recipe import Tier


@flow(name="plan", flow_run_name="plan {recipe}", timeout_seconds=600, log_prints=True)
def plan(recipe: str, tier: Tier | None = None, max_dph_usd: float | None = None) -> Plan:
    """What a run would take and which offers fit; spends nothing. Fails if no offer fits or the account cannot pay for the best.

    Args:
        recipe: a shipped recipe's name or the path of a YAML file
        tier: another tier than the recipe's
        max_dph_usd: another cap on $/h than the recipe's
    """
    planned = plan_today(load_recipe(recipe, {"tier": tier, "max_dph_usd": max_dph_usd}), settings())
    artifacts.show_plan(planned)
    print(plan_table(planned))
    require_rentable(planned)
    return planned
