"""Before a cent is spent: everything about a run that can be wrong for free."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from tasks.clocks import wrong_clock
from tasks.data import prepare_data
from tasks.errors import AuthError, UserError
from tasks.lease import read_lease
from tasks.log import guard_secrets
from tasks.market import Market, open_market
from tasks.offers import refused_key, require_age
from tasks.recipes import find_recipe, load_recipe
from tasks.rules.filters import require_consistent
from tasks.rules.location import near_bucket
from tasks.run import Run
from tasks.s3_block import with_block
from tasks.settings import Settings
from tasks.stores import checked_store
from training.box.store import Store, StoreError

log = logging.getLogger(__name__)


def prepare_run(
    recipe: str, overrides: Mapping[str, Any], flow_run_id: str, settings: Settings, *, fresh: bool = False
) -> Run:
    """Settings, recipe, bucket, data and the market's key. UserError in one sentence for each mistake; nothing is rented.

    `fresh` gives the run a name of its own, so that it begins at the beginning.
    """
    guard_secrets(settings)
    wanted = load_recipe(recipe, overrides)
    if fresh:
        wanted = wanted.model_copy(update={"name": f"{wanted.name[:31]}-{flow_run_id[:8]}"})
    require_age(wanted, settings)
    require_consistent(wanted)
    settings = with_block(settings)
    guard_secrets(settings)
    wanted, location = near_bucket(wanted, settings.s3_region, settings.s3_endpoint_url)
    log.info("%s", location)
    store = checked_store(settings)
    if wrong := wrong_clock(store, time.time()):
        raise UserError(f"{wrong}: the reaper would take this run's boxes for dead ones; set the clock")
    market = open_market(settings)
    try:
        account_id = market.account_id()
        resolved, digests = prepare_data(wanted, store, find_recipe(recipe).parent)
        _refuse_second(resolved.name, flow_run_id, market, store)
        log.info("run '%s' in bucket %s, market account %s", resolved.name, settings.bucket, account_id)
        run = Run(resolved, digests, flow_run_id, market, store, settings)
        run.fresh_key()
        return run
    except AuthError as error:
        raise refused_key(error) from None
    except StoreError as error:
        raise UserError(f"bucket: {error}; the key of LIVERY_S3_* must list, read and write in the bucket") from None


def _refuse_second(run: str, flow_run_id: str, market: Market, store: Store) -> None:
    """Two boxes that train one run would overwrite each other's manifests. A dead run's lease is no obstacle once its box is gone."""
    now = time.time()
    for item in store.list("leases/"):
        lease = read_lease(store, item.key.removeprefix("leases/").removesuffix(".json"))
        if lease is None or lease.run != run or lease.flow_run_id == flow_run_id or lease.expires_at <= now:
            continue
        listing = market.list_all()
        if not listing.complete or listing.of_run(lease.flow_run_id):
            raise UserError(
                f"run '{run}' is being trained by flow run {lease.flow_run_id} (its lease is live for {lease.expires_at - now:.0f} s more); "
                "wait for it, cancel it, or give this run another name (run_name)"
            )
