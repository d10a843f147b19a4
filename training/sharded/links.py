"""How fast this box's links are, in a second or two: from pinned host memory to the card, and between the cards. All ranks at once, as a step uses them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from training.sharded.ranks import Ranks

_BYTES = 256 << 20
_TRIES = 4


def host_to_card_gbs(device: torch.device, ranks: Ranks) -> float:
    """GB/s (10^9) that this card takes from pinned host memory while the others do so too. Collective."""
    source = torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True)
    room = torch.empty(_BYTES, dtype=torch.uint8, device=device)
    return _rate(lambda: room.copy_(source, non_blocking=True), _BYTES, ranks)


def gather_gbs(device: torch.device, ranks: Ranks) -> float:
    """GB/s that this card takes in from the others while all gather. Collective."""
    mine = torch.empty(_BYTES // ranks.size, dtype=torch.uint8, device=device)
    whole = torch.empty(mine.numel() * ranks.size, dtype=torch.uint8, device=device)
    return _rate(lambda: ranks.gather(whole, mine), mine.numel() * (ranks.size - 1), ranks)


def _rate(move: Callable[[], object], size: int, ranks: Ranks) -> float:
    """The best of a few: the first one wakes the link up, and whatever disturbs only slows."""
    best = float("inf")
    for _ in range(_TRIES):
        torch.cuda.synchronize()
        ranks.barrier()
        began = time.monotonic()
        move()
        torch.cuda.synchronize()
        best = min(best, time.monotonic() - began)
    return size / 1e9 / best
