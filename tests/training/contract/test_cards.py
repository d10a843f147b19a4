from __future__ import annotations

from typing import get_args

import pytest

from training.contract.cards import CARDS, MEASURED
from training.contract.flops import PEAK_TFLOPS
from training.contract.recipe import Tier


def test_every_tier_has_a_card_and_every_real_card_a_peak() -> None:
    assert set(CARDS) == set(get_args(Tier))
    assert set(PEAK_TFLOPS) == set(CARDS) - {"rehearsal"}
    assert MEASURED in PEAK_TFLOPS


@pytest.mark.parametrize("tier", CARDS)
def test_the_kind_without_links_is_never_the_faster_one(tier: Tier) -> None:
    card = CARDS[tier]
    assert card.pcie_tflops is None or card.pcie_tflops < card.peak_tflops
    assert bool(card.without_links) <= (card.link_gbs > 24)
