"""What recomputed layers start from, in pinned host memory between their forward and their backward pass: of 94 layers with 16,384 tokens each that is
12.6 GB less on a card while the backward pass begins; at its end the gradients are there, which is what remains.

    home = HostInputs(device)
    with home.keeping():                      # around the checkpointed call, whose own saved tensors are none of ours
        out = checkpoint(layer, hidden, use_reentrant=False)

Copies run beside the work: out on one stream, back on another, the next one asked for while its successor is at work. On a CPU they are plain copies.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_LEAST_BYTES = 1 << 16
"""Smaller tensors stay where they are."""


class HostInputs:
    """The home of one model's inputs. Memory taken stays taken, for the next micro-batch."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._away = torch.cuda.Stream(device) if self._cuda else None
        self._back = torch.cuda.Stream(device) if self._cuda else None
        self._rooms: defaultdict[tuple[Any, ...], list[_Room]] = defaultdict(list)
        self._kept: list[weakref.ref[_Kept]] = []
        self.bytes = 0
        """Of host memory taken so far."""

    def keeping(self) -> contextlib.AbstractContextManager[Any]:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.nbytes < _LEAST_BYTES or tensor.is_cuda != self._cuda or isinstance(tensor, torch.nn.Parameter):
            return tensor
        kept = _Kept(self, self._room(tensor))
        self._send(tensor.detach(), kept.room)
        self._kept = [each for each in self._kept if each() is not None]
        self._kept.append(weakref.ref(kept))
        return kept

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        found = kept.back if kept.back is not None else self._bring(kept)
        kept.back = None
        self._bring_before(kept)
        if self._back is not None:
            current = torch.cuda.current_stream()
            current.wait_event(kept.room.idle)
            found.record_stream(current)
        return found  # type: ignore[no-any-return]

    def _bring_before(self, kept: _Kept) -> None:
        """A backward pass wants them in the reverse order: ask for the one that was kept just before."""
        order = [each for each in (ref() for ref in self._kept) if each is not None]
        place = order.index(kept)
        if place and order[place - 1].back is None:
            order[place - 1].back = self._bring(order[place - 1])

    def _room(self, tensor: Tensor) -> _Room:
        free = self._rooms[(tuple(tensor.shape), tensor.dtype)]
        if free:
            return free.pop()
        self.bytes += tensor.nbytes
        return _Room(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._cuda))

    def _free(self, room: _Room) -> None:
        self._rooms[(tuple(room.tensor.shape), room.tensor.dtype)].append(room)

    def _send(self, tensor: Tensor, room: _Room) -> None:
        if self._away is None:
            room.tensor.copy_(tensor)
            return
        self._away.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._away):
            if room.idle is not None:
                self._away.wait_event(room.idle)
            room.tensor.copy_(tensor, non_blocking=True)
            room.idle = self._away.record_event()
        # Its memory may be given to others only when it is away.
        tensor.record_stream(self._away)

    def _bring(self, kept: _Kept) -> Tensor:
        room = kept.room
        if self._back is None:
            return room.tensor.clone()
        self._back.wait_event(room.idle)
        with torch.cuda.stream(self._back):
            found = torch.empty_like(room.tensor, device=self._back.device, pin_memory=False)
            found.copy_(room.tensor, non_blocking=True)
            room.idle = self._back.record_event()
        return found


class _Room:
    """Pinned memory, and the event after which nobody copies from or to it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.idle: Any = None


class _Kept:
    """One input that is away. Autograd holds it; when that lets go, the room is free."""

    def __init__(self, home: HostInputs, room: _Room) -> None:
        self._home, self.room = home, room
        self.back: Tensor | None = None

    def __del__(self) -> None:
        self._home._free(self.room)
