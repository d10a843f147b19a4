"""The processes of one box that share a base: who am I, wait for the others, take what the owner has."""

from __future__ import annotations

import functools
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

    def gather(self, whole: Tensor, mine: Tensor) -> None:
        """Fill `whole` with every rank's `mine`, one after another."""

    def scatter_mean(self, mine: Tensor, whole: Tensor) -> None:
        """Fill `mine` with this rank's part of the mean of all ranks' `whole`."""

    def mean(self, tensor: Tensor) -> None:
        """Replace `tensor` by the mean of all ranks'."""


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

    def gather(self, whole: Tensor, mine: Tensor) -> None:
        whole.copy_(mine.view_as(whole))

    def scatter_mean(self, mine: Tensor, whole: Tensor) -> None:
        mine.copy_(whole.view_as(mine))

    def mean(self, tensor: Tensor) -> None:
        return


class Distributed:
    """A process group of all ranks: the default one, which must be up, or another beside it, whose transfers wait for none of the first's."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def beside(self) -> Distributed:
        """The same ranks in a group of its own. Every rank calls it."""
        return Distributed(dist.new_group())

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        dist.broadcast(tensor, owner, group=self._group)

    def all(self, mine: bool) -> bool:
        said = torch.tensor(int(mine), device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(said, op=dist.ReduceOp.MIN, group=self._group)
        return bool(said.item())

    def gather(self, whole: Tensor, mine: Tensor) -> None:
        dist.all_gather_into_tensor(whole, mine, group=self._group)

    def scatter_mean(self, mine: Tensor, whole: Tensor) -> None:
        dist.reduce_scatter_tensor(mine, whole, group=self._group)
        mine.div_(self.size)

    def mean(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)
        tensor.div_(self.size)


@functools.cache
def current() -> Ranks:
    """The processes of this run: all that a launcher started beside this one, or this one alone. To be asked once the process group is up."""
    return Distributed() if dist.is_available() and dist.is_initialized() else Alone()


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
