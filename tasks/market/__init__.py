"""Markets that rent boxes, behind one protocol."""

from __future__ import annotations

from importlib import import_module

from tasks.market.limiter import Limiter
from tasks.market.protocol import CreateRequest, Market
from tasks.market.vast import VastMarket
from tasks.settings import Settings

__all__ = ["CreateRequest", "Market", "open_market"]


def open_market(settings: Settings, *, reaper: bool = False, budget_s: float | None = None) -> Market:
    """The market of LIVERY_MARKET; with the reaper's own key if it has one. `budget_s`: give up in time, for hooks and guards."""
    if settings.market == "ssh_host":
        # Brings the SSH library along, which a plan on a market has no use for.
        market: Market = import_module("tasks.market.ssh_host").open_host(settings, budget_s)
        return market
    secret = settings.reaper_api_key if reaper and settings.reaper_api_key else settings.market_api_key
    key = secret.get_secret_value()
    limiter = Limiter(settings.state_dir, key, settings.market_pace)
    if budget_s is None:
        return VastMarket(settings.market_url, key, limiter)
    return VastMarket(settings.market_url, key, limiter, connect_s=3, read_s=min(5, budget_s), budget_s=budget_s)
