"""Markets that rent boxes, behind one protocol."""

from __future__ import annotations

from tasks.market.limiter import Limiter
from tasks.market.protocol import CreateRequest, Market
from tasks.market.vast import VastMarket
from tasks.settings import Settings

__all__ = ["CreateRequest", "Market", "open_market"]


def open_market(settings: Settings, *, reaper: bool = False, budget_s: float | None = None) -> Market:
    """The market of the settings; with the reaper's own key if it has one. `budget_s`: give up in time, for hooks and guards."""
    secret = settings.reaper_api_key if reaper and settings.reaper_api_key else settings.market_api_key
    key = secret.get_secret_value()
    limiter = Limiter(settings.state_dir, key, settings.market_pace)
    if budget_s is None:
        return VastMarket(settings.market_url, key, limiter)
    return VastMarket(settings.market_url, key, limiter, connect_s=3, read_s=min(5, budget_s), budget_s=budget_s)
