"""Several processes as one crew, over torch.distributed: tensors over NCCL where there are cards, words over gloo beside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from training.crew import Order

T = TypeVar("T")
# The followers wait through uploads and evaluations; a lost process is seen by the launcher, not by a time-out.
_PATIENCE = timedelta(hours=24)
# A collective of tensors that takes longer than this has lost somebody.
_STUCK = timedelta(minutes=30)


class Company:
    """All processes that a launcher started; see `training.crew.Crew`."""

    def __init__(self, *, cards: bool) -> None:
        """Meet the others, as RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say; with `cards`, each on the card of its LOCAL_RANK."""
        if cards:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cards else "gloo", timeout=_STUCK)
        self._words = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def order(self, order: Order | None = None) -> Order:
        told = self.share(order)
        assert told is not None, "the leader gives the orders"
        return told

    def share(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._words, device=torch.device("cpu"))
        return box[0]

    def collect(self, value: T) -> list[T]:
        found: list[T] = [value] * self.size
        dist.all_gather_object(found, value, group=self._words)
        return found

    def any(self, mine: bool) -> bool:
        return any(self.total([int(mine)]))

    def total(self, mine: Sequence[int]) -> tuple[int, ...]:
        sums = torch.tensor(mine, dtype=torch.int64)
        dist.all_reduce(sums, group=self._words)
        return tuple(sums.tolist())
