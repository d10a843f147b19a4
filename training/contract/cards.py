"""What is known of each tier's card before one is rented: by its maker's data sheet, except where something else is said.

Peaks are dense bf16 with fp32 sums: NVIDIA's RTX Blackwell PRO, RTX Blackwell and Ada papers, the A100, H100, H200, L40S and DGX B200 data sheets (half of
what they give with sparsity). What a card really reaches is less: 790 was measured on an H200, which then is the better peak. GB are 10^9 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.contract.recipe import Tier

MEASURED: Tier = "h200"
"""The card that the rates of `training.contract.quantised` were measured on; every other is scaled from it."""
THROUGH_HOST_GBS = 24.0
"""What a card takes in while all gather and none reaches another directly: measured with peer access turned off."""
_PCIE_4, _PCIE_5 = 27.0, 54.9
"""From pinned host memory to one card over 16 lanes: 54.9 was measured on generation 5; 4 has half the rate."""


@dataclass(frozen=True)
class Card:
    """One card of a tier. Where two kinds share a tier, the lesser one."""

    memory_gb: float
    """As CUDA tells a program, some 0.5 % less than nvidia-smi's: 150.1 was read on an H200, public reports have 79.11 GiB of an H100, 94.97 of an RTX PRO
    6000 and 31.37 of an RTX 5090. The other cards' are nvidia-smi's."""
    peak_tflops: float
    host_gbs: float
    """GB/s from pinned host memory to it."""
    link_gbs: float = THROUGH_HOST_GBS
    """GB/s that it takes in while all cards of a box gather: 313 was measured over NVLink 4, NVLink 3 and 5 have two thirds and twice of that."""
    without_links: tuple[str, ...] = ()
    """Words in a listing's name for the kinds that have no NVLink among all cards of a box."""
    pcie_tflops: float | None = None
    """Peak of the kind whose name says PCIE, where it is another."""


CARDS: dict[Tier, Card] = {
    "a100": Card(85.9, 312.0, _PCIE_4, link_gbs=209.0, without_links=("PCIE",)),
    "h100": Card(84.9, 989.0, _PCIE_5, link_gbs=313.0, without_links=("PCIE",), pcie_tflops=756.0),
    "h200": Card(150.1, 989.0, _PCIE_5, link_gbs=313.0, without_links=("NVL",)),
    "b200": Card(192.3, 2250.0, _PCIE_5, link_gbs=626.0),
    "l40s": Card(48.3, 362.0, _PCIE_4),
    "rtx4090": Card(25.7, 165.2, _PCIE_4),
    "rtx5090": Card(33.7, 209.5, _PCIE_5),
    "rtxpro6000": Card(102.0, 503.8, _PCIE_5),
    "rehearsal": Card(8.4, 0.5, _PCIE_4),
}
