"""The processes of one run on one box: a leader, which alone talks to the world, and followers that compute with it, one a card.

The leader tells the followers what comes next; then all do it together. No torch here: a run of one process needs none for this.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from training.checkpoint import Found

T = TypeVar("T")


@dataclass(frozen=True)
class Train:
    """Train a phase."""

    phase: str
    start: Path | None
    resume: Found | None
    resume_dir: Path | None


@dataclass(frozen=True)
class Evaluate:
    """Score the base, or the base with an adapter."""

    adapter: Path | None


@dataclass(frozen=True)
class Dismiss:
    """Nothing comes any more."""


Order = Train | Evaluate | Dismiss


class Crew(Protocol):
    """One process's view of all of them. Every method is collective."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def order(self, order: Order | None = None) -> Order:
        """What the leader says comes next; only the leader gives one."""

    def share(self, value: T) -> T:
        """The leader's value, on all."""

    def collect(self, value: T) -> list[T]:
        """Everybody's value, by rank."""

    def any(self, mine: bool) -> bool:
        """Whether anybody says yes."""

    def total(self, mine: Sequence[int]) -> tuple[int, ...]:
        """Sums over all."""


@dataclass(frozen=True)
class Single:
    """A process alone."""

    rank: int = 0
    size: int = 1

    def order(self, order: Order | None = None) -> Order:
        assert order is not None, "nobody else gives orders"
        return order

    def share(self, value: T) -> T:
        return value

    def collect(self, value: T) -> list[T]:
        return [value]

    def any(self, mine: bool) -> bool:
        return mine

    def total(self, mine: Sequence[int]) -> tuple[int, ...]:
        return tuple(mine)


def rank_of(environ: os._Environ[str] | dict[str, str]) -> tuple[int, int] | None:
    """(rank, size) as torchrun and `training.launch` tell them; None in a process alone."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return int(environ["RANK"]), int(environ["WORLD_SIZE"])
