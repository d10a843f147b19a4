"""Adapters of routed experts of which each process has a part: the experts are dealt out evenly, and everything else is whole everywhere.

A tensor that is a part carries a `Part`. Whoever compares an adapter with a file, digests it or measures it goes through here, and need not know whether
the run has one process or eight. What is said to be collective must be called by all processes, in one order.

Shape letters: n experts of this process, E of all, R rank, X in, O out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Which = Literal["lora_A", "lora_B"]


class Group(Protocol):
    """The processes, as `training.sharded.ranks` has them."""

    @property
    def size(self) -> int: ...

    def gather(self, whole: Tensor, mine: Tensor) -> None: ...

    def mean(self, tensor: Tensor) -> None: ...


@dataclass(frozen=True)
class Part:
    """This process's experts of a lora_A [n·R, X], the expert slowest, or of a lora_B [O, R·n], the expert *fastest*."""

    which: Which
    first: int
    count: int
    """n"""
    experts: int
    """E"""
    group: Group

    def whole_shape(self, shape: torch.Size) -> tuple[int, ...]:
        times = self.experts // self.count
        return (shape[0] * times, shape[1]) if self.which == "lora_A" else (shape[0], shape[1] * times)

    def of(self, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor."""
        if self.which == "lora_A":
            return whole.view(self.experts, -1, whole.shape[1])[self.first : self.first + self.count].flatten(0, 1)
        O = whole.shape[0]  # noqa: E741  the legend's letter
        return whole.view(O, -1, self.experts)[:, :, self.first : self.first + self.count].flatten(1)

    def join(self, mine: Tensor) -> Tensor:
        """The whole tensor. Collective."""
        if self.which == "lora_A":
            whole = mine.new_empty(self.whole_shape(mine.shape))
            self.group.gather(whole, mine.contiguous())
            return whole
        O = mine.shape[0]  # noqa: E741
        expert_first = mine.view(O, -1, self.count).permute(2, 0, 1).contiguous()
        joined = mine.new_empty(self.experts, *expert_first.shape[1:])
        self.group.gather(joined, expert_first)
        return joined.permute(1, 2, 0).reshape(O, -1)


def mark(lora_A: Tensor, lora_B: Tensor, first: int, count: int, experts: int, group: Group) -> None:
    """Say of one adapter that its experts are [first, first + count) of `experts`."""
    for which, tensor in (("lora_A", lora_A), ("lora_B", lora_B)):
        tensor.livery_part = Part(which, first, count, experts, group)  # type: ignore[attr-defined, arg-type]


def part_of(tensor: Tensor) -> Part | None:
    return getattr(tensor, "livery_part", None)


def whole_shape(tensor: Tensor) -> tuple[int, ...]:
    part = part_of(tensor)
    return part.whole_shape(tensor.shape) if part else tuple(tensor.shape)


def whole(tensor: Tensor) -> Tensor:
    """The tensor of all experts, detached. Collective where it is a part."""
    part = part_of(tensor)
    return part.join(tensor.detach()) if part else tensor.detach()


def mine(tensor: Tensor, stored: Tensor) -> Tensor:
    """What belongs to `tensor` of a whole one that was stored under its name."""
    part = part_of(tensor)
    return part.of(stored) if part else stored


def total_norms(tensors: list[Any], norms: list[float]) -> list[float]:
    """Norms of whole tensors from those of what is here. Collective if any of them is a part."""
    parts = [index for index, tensor in enumerate(tensors) if part_of(tensor)]
    if not parts:
        return norms
    group = tensors[parts[0]].livery_part.group
    squares = torch.tensor([norms[index] ** 2 for index in parts], dtype=torch.float64, device=tensors[parts[0]].device)
    group.mean(squares)
    found = list(norms)
    for index, square in zip(parts, squares.mul(group.size).tolist(), strict=True):
        found[index] = square**0.5
    return found
