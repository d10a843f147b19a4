from __future__ import annotations

from pathlib import Path

import pytest

from tasks.market.vast import VastMarket
from tests.tasks.pretend import Clock, Pretend
from tests.tasks.pretend_fixtures import (  # noqa: F401
    bucket_admin,
    bucket_server,
    clock,
    environment,
    market,
    pretend,
    store,
    whole_store,
)
from tests.tasks.sweeping import Reaper
from training.box.store import Store


@pytest.fixture
def reaper(market: VastMarket, store: Store, pretend: Pretend, clock: Clock, tmp_path: Path) -> Reaper:  # noqa: F811
    return Reaper(market, store, pretend, clock, tmp_path)
