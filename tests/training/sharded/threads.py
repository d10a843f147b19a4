"""Ranks that are threads of one process: what they hand to each other goes through a list, and they meet at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class _Table:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.places: list[object] = [None] * size


@dataclass(frozen=True)
class Thread:
    rank: int
    size: int
    table: _Table

    def barrier(self) -> None:
        self.table.barrier.wait()

    def broadcast(self, tensor: Tensor, owner: int) -> None:
        self.table.places[self.rank] = tensor
        self.barrier()
        given = self.table.places[owner]
        assert isinstance(given, Tensor)
        if self.rank != owner:
            tensor.copy_(given)
        self.barrier()

    def gather(self, whole: Tensor, mine: Tensor) -> None:
        whole.copy_(torch.cat([each.flatten() for each in self._everybodys(mine)]).view_as(whole))

    def scatter_mean(self, mine: Tensor, whole: Tensor) -> None:
        total = torch.stack([each.flatten() for each in self._everybodys(whole)]).mean(0)
        mine.copy_(total.chunk(self.size)[self.rank].view_as(mine))

    def mean(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._everybodys(tensor)).mean(0))

    def beside(self) -> Thread:
        return self

    def _everybodys(self, tensor: Tensor) -> list[Tensor]:
        self.table.places[self.rank] = tensor.detach().clone()
        self.barrier()
        given = list(self.table.places)
        self.barrier()
        return given  # type: ignore[return-value]

    def all(self, mine: bool) -> bool:
        self.table.places[self.rank] = mine
        self.barrier()
        said = all(self.table.places)
        self.barrier()
        return said


def on_ranks(size: int, work: Callable[[Thread], T]) -> list[T]:
    """What `work` returns on each of so many ranks; the first error of any of them."""
    table = _Table(size)

    def one(rank: int) -> T:
        try:
            return work(Thread(rank, size, table))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
