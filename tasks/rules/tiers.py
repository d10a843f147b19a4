"""What a tier is: names of cards vary from listing to listing, so a card is known by its memory, architecture and compute capability."""

from __future__ import annotations

from dataclasses import dataclass

from training.contract.cards import CARDS
from training.contract.recipe import Tier


@dataclass(frozen=True)
class TierFacts:
    """Memory of one card in MB as the market reports it (really MiB); how many cards a box has is the recipe's."""

    min_memory_mb: int
    max_memory_mb: int
    compute_cap: int
    memory_gb: float
    """What the card has, in GB of 10^9 bytes."""
    tokens_s: float
    """Training tokens a second of an unquantised base that a plan may count on before anything was measured for a 35B-A3B; see
    `tasks/rules/pricing.py`. Of other code on rtxpro6000 and h200, elsewhere scaled by peak rates."""
    packed_tokens_s: float
    """The same for CPT and SFT. On h200 three quarters of what ours was measured at (training/RESULTS.md), h100 and b200 from it; ours has not run on the
    other tiers."""
    cpu_arch: str = "amd64"


def _tier(
    tier: Tier, min_mb: int, max_mb: int, compute_cap: int, tokens_s: float, packed_tokens_s: float | None = None
) -> TierFacts:
    packed = packed_tokens_s or tokens_s
    return TierFacts(min_mb, max_mb, compute_cap, CARDS[tier].memory_gb, tokens_s=tokens_s, packed_tokens_s=packed)


# Without the compute capability an H100 NVL (94 GB), an H20 or a GH200 (96 GB, arm64) passes for an RTX PRO 6000. Listings have 81,920 MB for the
# A100 of 80 GB, 81,559 for the H100, 46,068 for the L40S and 49,140 for the RTX 6000 Ada beside it, 32,607 and 24,564 for the RTX 5090 and 4090;
# an L4 (23,034) and an RTX 3090 (24,576, 860) are none of them.
TIERS: dict[Tier, TierFacts] = {
    "rtxpro6000": _tier("rtxpro6000", 90_000, 100_000, 1200, tokens_s=1_000),
    "h200": _tier("h200", 130_000, 150_000, 900, tokens_s=5_300, packed_tokens_s=17_000),
    "b200": _tier("b200", 170_000, 190_000, 1000, tokens_s=5_300, packed_tokens_s=17_000),
    "h100": _tier("h100", 79_000, 83_000, 900, tokens_s=4_000, packed_tokens_s=12_800),
    "a100": _tier("a100", 79_000, 83_000, 800, tokens_s=1_600),
    "l40s": _tier("l40s", 44_000, 50_000, 890, tokens_s=700),
    "rtx5090": _tier("rtx5090", 31_000, 34_000, 1200, tokens_s=400),
    "rtx4090": _tier("rtx4090", 23_500, 25_500, 890, tokens_s=300),
    "rehearsal": _tier("rehearsal", 7_000, 9_000, 0, tokens_s=2_000),
}
