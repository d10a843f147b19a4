"""Whole packed layers on the card, one at a time, the next one already under way.

A step asks for the layers upwards and, recomputing them, downwards again. Two places on the card hold the layer at work and the one to come; a copy
stream fills them from pinned host memory, or a gathering of every card's own experts does. What is read from a place is done before it is filled again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from training.contract.shapes import ModelShape
from training.sharded.ranks import Ranks
from training.sharded.storage import LayerExperts, empty_layer

Fill = Callable[[int, LayerExperts], None]
"""`fill(index, place)` enqueues what makes the place the layer of that number."""
PLACES = 2


class Layers(Protocol):
    """Where a step takes its layers from."""

    way: str

    def use(self, index: int) -> contextlib.AbstractContextManager[LayerExperts]:
        """The layer, whole and on the card, for the work that is enqueued inside the context."""


@dataclass(frozen=True)
class Resident:
    """All layers are whole on the card."""

    layers: Sequence[LayerExperts]
    way: str = "resident"

    @contextlib.contextmanager
    def use(self, index: int) -> Iterator[LayerExperts]:
        yield self.layers[index]


class _Place:
    def __init__(self, room: LayerExperts) -> None:
        self.room = room
        self.holds = -1
        self.arrived: Any = None
        self.free: Any = None


class Ahead:
    """Layers that are brought to the card before they are asked for, but for those that `stay` there."""

    def __init__(
        self,
        way: str,
        count: int,
        fill: Fill,
        shape: ModelShape,
        device: torch.device,
        stay: Mapping[int, LayerExperts] | None = None,
    ) -> None:
        self.way, self._count, self._fill, self._stay = way, count, fill, stay or {}
        moving = [index for index in range(count) if index not in self._stay]
        self._turn = {index: turn for turn, index in enumerate(moving)}
        self._places = [_Place(empty_layer(shape, 0, shape.experts, device)) for _ in range(PLACES)]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last = -1
        self.asked = self.unforeseen = 0
        """Layers asked for, and those of them that nobody had sent for before."""

    @contextlib.contextmanager
    def use(self, index: int) -> Iterator[LayerExperts]:
        self.asked += 1
        if index in self._stay:
            self._foresee(index)
            yield self._stay[index]
            return
        place = self._place(index)
        if place.holds != index:
            self.unforeseen += 1
            self._bring(index)
        self._foresee(index)
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(place.arrived)
        try:
            yield place.room
        finally:
            if self._stream is not None:
                place.free = torch.cuda.current_stream().record_event()

    def _foresee(self, index: int) -> None:
        """Down where the last layer asked for was this one or one above, else up; from the first, up: nothing comes after it the other way."""
        down = 0 < index <= self._last
        self._last = index
        step = -1 if down else 1
        coming = index + step
        while coming in self._stay:
            coming += step
        if 0 <= coming < self._count and self._place(coming).holds != coming:
            self._bring(coming)

    def _bring(self, index: int) -> None:
        place = self._place(index)
        place.holds = index
        if self._stream is None:
            self._fill(index, place.room)
            return
        if place.free is not None:
            self._stream.wait_event(place.free)
        with torch.cuda.stream(self._stream):
            self._fill(index, place.room)
            place.arrived = self._stream.record_event()

    def _place(self, index: int) -> _Place:
        return self._places[self._turn[index] % PLACES]


def from_host(layers: Sequence[LayerExperts], shape: ModelShape, device: torch.device, stay: int = 0) -> Ahead:
    """Layers copied from host memory, which must be pinned for the copies to run beside the work (`SharedHost.register`). So many of them `stay` on
    the card, evenly spread: where the bus is slower than the work, a step is so much shorter."""

    def fill(index: int, place: LayerExperts) -> None:
        for there, here in zip(place.buffers, layers[index].buffers, strict=True):
            there.copy_(here, non_blocking=True)

    kept = {}
    for turn in range(stay):
        index = turn * len(layers) // stay
        kept[index] = empty_layer(shape, 0, shape.experts, device)
        fill(index, kept[index])
    return Ahead("host", len(layers), fill, shape, device, kept)


def gathered(mine: Sequence[LayerExperts], shape: ModelShape, ranks: Ranks, device: torch.device) -> Ahead:
    """Layers put together from every rank's own experts. Every rank asks for the same ones in the same order."""

    def fill(index: int, place: LayerExperts) -> None:
        for whole, part in zip(place.buffers, mine[index].buffers, strict=True):
            ranks.gather(whole, part)

    return Ahead("all_gather", len(mine), fill, shape, device)
