"""Before a cent is spent: everything about a run that can be wrong for free."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from tasks.data import prepare_data
from tasks.errors import AuthError, UserError
from tasks.log import guard_secrets
from tasks.market import open_market
from tasks.recipes import find_recipe, load_recipe
from tasks.run import Run
from tasks.settings import Settings
from tasks.stores import checked_store

log = logging.getLogger(__name__)


def prepare_run(recipe: str, overrides: Mapping[str, Any], flow_run_id: str, settings: Settings) -> Run:
    """Settings, recipe, bucket, data and the market's key. UserError in one sentence for each mistake; nothing is rented."""
    guard_secrets(settings)
    wanted = load_recipe(recipe, overrides)
    if wanted.budget.max_hours > settings.max_age_hours:
        raise UserError(
            f"budget.max_hours: {wanted.budget.max_hours:g} is more than the reaper lets a box live "
            f"(LIVERY_MAX_AGE_HOURS={settings.max_age_hours:g}); raise that or lower this"
        )
    store = checked_store(settings)
    resolved, digests = prepare_data(wanted, store, find_recipe(recipe).parent)
    market = open_market(settings)
    try:
        account_id = market.account_id()
    except AuthError as error:
        raise UserError(f"LIVERY_MARKET_API_KEY: the market refuses this key ({error}); see .env.example") from None
    log.info("run '%s' in bucket %s, market account %s", resolved.name, settings.bucket, account_id)
    return Run(resolved, digests, flow_run_id, market, store, settings)
