"""The plan: what a run would take and which offers will do, before a cent is spent.

`python -m flows.plan RECIPE` prints the same on a terminal without a server.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence

from prefect import flow

from tasks import artifacts
from tasks.domain import Plan
from tasks.errors import LiveryError
from tasks.log import guard_secrets
from tasks.market import open_market
from tasks.offers import best_offer, done_phases, plan_run, plan_table
from tasks.recipes import load_recipe
from tasks.settings import settings
from tasks.stores import checked_store
from training.contract.recipe import Recipe, Tier


@flow(name="plan", flow_run_name="plan {recipe}", timeout_seconds=600, log_prints=True)
def plan(recipe: str, tier: Tier | None = None, max_dph_usd: float | None = None) -> Plan:
    """What a run would take and which offers fit; spends nothing. Fails if no offer fits.

    Args:
        recipe: a shipped recipe's name or the path of a YAML file
        tier: another tier than the recipe's
        max_dph_usd: another cap on $/h than the recipe's
    """
    planned = make_plan(load_recipe(recipe, {"tier": tier, "max_dph_usd": max_dph_usd}))
    artifacts.show_plan(planned)
    print(plan_table(planned))
    best_offer(planned)
    return planned


def make_plan(recipe: Recipe) -> Plan:
    """The plan by today's market and what the bucket already holds. Writes nothing anywhere."""
    current = settings()
    guard_secrets(current)
    store = checked_store(current)
    return plan_run(recipe, open_market(current), store, done=done_phases(recipe, store), now=time.time())


def main(argv: Sequence[str] | None = None) -> int:
    """0 an offer fits, 2 the recipe or the settings are wrong, 3 no offer fits."""
    parser = argparse.ArgumentParser(prog="python -m flows.plan", description=(plan.__doc__ or "").partition(";")[0])
    parser.add_argument("recipe", help="a shipped recipe's name or a YAML file")
    parser.add_argument("--tier", help="another tier than the recipe's")
    parser.add_argument("--max-dph", type=float, metavar="USD", help="another cap on $/h than the recipe's")
    parser.add_argument("--json", action="store_true", help="the whole plan as JSON on standard output")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    try:
        planned = make_plan(load_recipe(arguments.recipe, {"tier": arguments.tier, "max_dph_usd": arguments.max_dph}))
        print(planned.model_dump_json(indent=1) if arguments.json else plan_table(planned))
        best_offer(planned)
    except LiveryError as error:
        print(f"plan: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
