"""What a tier is: names of cards vary from listing to listing, so a card is known by its memory, architecture and compute capability."""

from __future__ import annotations

from dataclasses import dataclass

from training.contract.recipe import Tier


@dataclass(frozen=True)
class TierFacts:
    """Memory in MB as the market reports it (really MiB)."""

    min_memory_mb: int
    max_memory_mb: int
    compute_cap: int
    memory_gb: float
    """What the card has, in GB of 10^9 bytes."""
    tokens_s: float
    """Training tokens a second that a plan may count on before anything was measured for a 35B-A3B; see `tasks/rules/pricing.py`."""
    cpu_arch: str = "amd64"
    num_gpus: int = 1


# Without the compute capability an H100 NVL (94 GB), an H20 or a GH200 (96 GB, arm64) passes for an RTX PRO 6000.
TIERS: dict[Tier, TierFacts] = {
    "rtxpro6000": TierFacts(90_000, 100_000, 1200, memory_gb=102.6, tokens_s=1_000),
    "h200": TierFacts(130_000, 150_000, 900, memory_gb=150.7, tokens_s=5_300),
    "b200": TierFacts(170_000, 190_000, 1000, memory_gb=192.3, tokens_s=5_300),
    "rehearsal": TierFacts(7_000, 9_000, 0, memory_gb=8.4, tokens_s=2_000),
}
