"""The processes of one box that share a base: who am I, wait for the others, take what the owner has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Ranks(Protocol):
    """One process's view of all of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def barrier(self) -> None:
        """Return when every rank has come here."""

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        """Fill every rank's `tensor` with the owner's."""

    def all(self, mine: bool) -> bool:
        """Whether every rank says yes."""


@dataclass(frozen=True)
class Alone:
    """A single process."""

    rank: int = 0
    size: int = 1

    def barrier(self) -> None:
        return

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        return

    def all(self, mine: bool) -> bool:
        return mine


class Distributed:
    """The default process group, which must be up."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def barrier(self) -> None:
        dist.barrier()

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        dist.broadcast(tensor, owner)

    def all(self, mine: bool) -> bool:
        said = torch.tensor(int(mine), device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(said, op=dist.ReduceOp.MIN)
        return bool(said.item())


def share(experts: int, ranks: Ranks) -> tuple[int, int]:
    """This rank's experts, [first, last). ValueError if they cannot be dealt out evenly."""
    if experts % ranks.size:
        raise ValueError(
            f"{experts} experts over {ranks.size} ranks: want a number of ranks that divides them, such as {_nearest(experts, ranks.size)}"
        )
    each = experts // ranks.size
    return ranks.rank * each, (ranks.rank + 1) * each


def _nearest(experts: int, size: int) -> int:
    return max(count for count in range(1, size + 1) if experts % count == 0)
