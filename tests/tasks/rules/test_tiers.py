from __future__ import annotations

from itertools import combinations
from typing import get_args

import pytest

from tasks.rules.tiers import TIERS
from training.contract.recipe import Tier

# What listings have in their gpu_ram and compute_cap for each card.
LISTED: dict[str, tuple[int, int, Tier | None]] = {
    "A100 SXM4": (81_920, 800, "a100"),
    "A100 PCIE": (81_920, 800, "a100"),
    "A100 SXM4 of 40 GB": (40_960, 800, None),
    "H100 SXM": (81_559, 900, "h100"),
    "H100 NVL": (95_830, 900, None),
    "GH200": (97_871, 900, None),
    "H200": (143_771, 900, "h200"),
    "B200": (183_359, 1000, "b200"),
    "L40S": (46_068, 890, "l40s"),
    "RTX 6000Ada": (49_140, 890, "l40s"),
    "RTX A6000": (49_140, 860, None),
    "L4": (23_034, 890, None),
    "RTX 3090": (24_576, 860, None),
    "RTX 4090": (24_564, 890, "rtx4090"),
    "RTX 5090": (32_607, 1200, "rtx5090"),
    "RTX PRO 6000 WS": (97_887, 1200, "rtxpro6000"),
}


@pytest.mark.parametrize("name", LISTED)
def test_a_card_is_of_one_tier_at_most_and_of_the_right_one(name: str) -> None:
    memory_mb, capability, wanted = LISTED[name]
    found = [
        tier
        for tier, facts in TIERS.items()
        if facts.min_memory_mb <= memory_mb <= facts.max_memory_mb and facts.compute_cap == capability
    ]
    assert found == ([wanted] if wanted else [])


def test_every_tier_is_known_and_its_card_lies_in_its_band() -> None:
    assert set(TIERS) == set(get_args(Tier))
    for facts in TIERS.values():
        assert facts.min_memory_mb <= facts.memory_gb * 1e9 / 2**20 <= facts.max_memory_mb


def test_no_two_tiers_share_a_card() -> None:
    for one, other in combinations(TIERS.values(), 2):
        apart = one.max_memory_mb < other.min_memory_mb or other.max_memory_mb < one.min_memory_mb
        assert apart or one.compute_cap != other.compute_cap
