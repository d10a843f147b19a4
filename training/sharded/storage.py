"""The 4-bit base in memory: one layout for every way of running it.

A layer's routed experts are four flat buffers, expert after expert, so that the buffers of consecutive ranks joined end to end are those of the
whole layer: what one rank holds, what an all-gather makes of it, and a shared copy in host memory are the same type.

Shape letters: n experts held, H hidden, I intermediate. 4 bits a weight, and one float32 scale for 64 of them (kernels.nf4).
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import nf4, reference
from training.contract.shapes import ModelShape
from training.errors import HostMemoryError
from training.sharded.host_memory import require_memory
from training.sharded.inventory import Part, part_numbers
from training.sharded.ranks import Ranks

BLOCK = nf4.BLOCK
_PATH_BYTES = 64


class Packed(NamedTuple):
    """Some weights in NF4."""

    packed: Tensor
    """uint8 [numbers / 2]; the earlier weight in the high half."""
    absmax: Tensor
    """float32 [numbers / 64]"""

    @property
    def numbers(self) -> int:
        return 2 * self.packed.numel()

    @property
    def bytes(self) -> int:
        return self.packed.numel() + 4 * self.absmax.numel()

    def part(self, first: int, count: int) -> Packed:
        """A view of the weights [first, first + count): whole blocks."""
        assert first % BLOCK == 0 and count % BLOCK == 0, (first, count)
        return Packed(
            self.packed[first // 2 : (first + count) // 2], self.absmax[first // BLOCK : (first + count) // BLOCK]
        )

    def write(self, weights: Tensor) -> None:
        """Quantise `weights` on the device where they are, into this place, which may be on another."""
        packed, absmax = quantise(weights)
        self.packed.copy_(packed, non_blocking=True)
        self.absmax.copy_(absmax, non_blocking=True)

    def dequantise(self, out: Tensor) -> Tensor:
        """Write the weights into `out`, on the same device, and return it."""
        if out.is_cuda:
            return nf4.dequantise(self.packed, self.absmax, out)
        codes, _ = nf4.tables(out.device)
        plain = reference.dequantise_nf4(self.packed, self.absmax, codes, out.dtype)
        return out.copy_(plain.view(out.shape))


def quantise(weights: Tensor) -> Packed:
    """NF4 of contiguous weights whose number 64 divides; the plain way where there is no card."""
    if weights.is_cuda:
        return Packed(*nf4.quantise(weights))
    codes, _ = nf4.tables(weights.device)
    return Packed(*reference.quantise_nf4(weights, codes))


@dataclass(frozen=True)
class Matrix:
    """One matrix in NF4."""

    values: Packed
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return self.values.bytes

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        return self.values.dequantise(torch.empty(self.shape, dtype=dtype, device=self.values.packed.device))


@dataclass(frozen=True)
class LayerExperts:
    """The experts [first, last) of one layer: gate_up as [n, 2I, H] (gate rows first), down as [n, H, I], flat."""

    first: int
    last: int
    gate_up: Packed
    down: Packed

    @property
    def bytes(self) -> int:
        return self.gate_up.bytes + self.down.bytes

    @property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a collective or a copy moves, in one order everywhere."""
        return (*self.gate_up, *self.down)

    def part(self, name: Part) -> Packed:
        return self.gate_up if name == "gate_up" else self.down

    def experts(self, first: int, last: int) -> LayerExperts:
        """A view of the experts [first, last), numbered as the model does."""
        held = self.last - self.first
        parts = []
        for values in (self.gate_up, self.down):
            each = values.numbers // held
            parts.append(values.part((first - self.first) * each, (last - first) * each))
        return LayerExperts(first, last, *parts)


def part_bytes(shape: ModelShape, part: Part, experts: int) -> int:
    return experts * part_numbers(shape, part) * 36 // BLOCK


def layer_bytes(shape: ModelShape, experts: int) -> int:
    """4.5 bits a weight, of so many experts of one layer."""
    return part_bytes(shape, "gate_up", experts) + part_bytes(shape, "down", experts)


def empty_packed(numbers: int, device: torch.device) -> Packed:
    return Packed(
        torch.empty(numbers // 2, dtype=torch.uint8, device=device),
        torch.empty(numbers // BLOCK, dtype=torch.float32, device=device),
    )


def empty_layer(shape: ModelShape, first: int, last: int, device: torch.device) -> LayerExperts:
    """Room for the experts [first, last) of one layer on `device`."""
    require_blocks(shape)
    gate_up, down = (empty_packed((last - first) * part_numbers(shape, part), device) for part in ("gate_up", "down"))
    return LayerExperts(first, last, gate_up, down)


def require_blocks(shape: ModelShape) -> None:
    """ValueError if an expert does not end with a block: then a piece of the layer has not the bits of the whole."""
    if shape.intermediate * shape.hidden % BLOCK:
        raise ValueError(
            f"experts of {shape.hidden} x {shape.intermediate} weights: want a multiple of {BLOCK} in each, the block that shares a scale"
        )


class SharedHost:
    """Every layer's experts once in the memory of the box, seen by all its ranks. HostMemoryError if the box has not that much left.

    A file without a name (memfd): it is bound by no mount's size, as /dev/shm is to 64 MB in most containers, and goes when the last process that
    has it does. The first rank makes it; others open `path`, which is good as long as that rank lives.
    """

    def __init__(self, shape: ModelShape, path: str | None = None) -> None:
        require_blocks(shape)
        self.shape = shape
        self.bytes = shape.layers * layer_bytes(shape, shape.experts)
        if path is None:
            require_memory(self.bytes, "the base in 4 bits")
            self._descriptor = os.memfd_create("livery-base", os.MFD_CLOEXEC)
            os.truncate(self._descriptor, self.bytes)
        else:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if (seen := os.fstat(self._descriptor).st_size) != self.bytes:
                raise ValueError(
                    f"{path}: {seen} bytes, this model's layers want {self.bytes}; the ranks load two models"
                )
        weakref.finalize(self, os.close, self._descriptor)
        self._map = mmap.mmap(self._descriptor, self.bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def layers(self) -> Iterator[LayerExperts]:
        """Views of the whole layers."""
        E, start = self.shape.experts, 0
        for _ in range(self.shape.layers):
            parts = []
            for part in ("gate_up", "down"):
                numbers = E * part_numbers(self.shape, part)
                scales = start + numbers // 2
                end = scales + numbers // BLOCK * 4
                parts.append(Packed(self._bytes[start:scales], self._bytes[scales:end].view(torch.float32)))
                start = end
            yield LayerExperts(0, E, *parts)

    def register(self) -> None:
        """Lock the pages and tell the driver, so that copies to this rank's card run at the bus's speed and beside its work: pageable memory does
        a tenth. HostMemoryError if the driver refuses. Every rank that copies calls it."""
        start = self._bytes.data_ptr()
        code = torch.cuda.cudart().cudaHostRegister(start, self.bytes, 0)
        if int(code):
            raise HostMemoryError(
                f"the driver does not lock {self.bytes / 1e9:.1f} GB of host memory (cudaHostRegister: error {int(code)}); want a box with the memory free and no lock limit (ulimit -l)"
            )
        # Before the map goes: the driver would keep the pages, and refuse whatever is mapped at the same place later.
        weakref.finalize(self, torch.cuda.cudart().cudaHostUnregister, start).atexit = False


def open_shared_host(shape: ModelShape, ranks: Ranks, device: torch.device) -> SharedHost:
    """The box's one copy, made by the first rank and opened by the others. Every rank calls it; `device` is one that its collectives take."""
    mine = SharedHost(shape) if ranks.rank == 0 else None
    path = (mine.path if mine else "").encode().ljust(_PATH_BYTES, b"\0")
    told = torch.tensor(list(path), dtype=torch.uint8, device=device)
    ranks.broadcast(told, 0)
    return mine or SharedHost(shape, bytes(told.tolist()).rstrip(b"\0").decode())


def join(pieces: Sequence[LayerExperts]) -> LayerExperts:
    """The layer that consecutive pieces make, as an all-gather does."""
    parts = [
        Packed(*(torch.cat(tensors) for tensors in zip(*(piece.part(name) for piece in pieces), strict=True)))
        for name in ("gate_up", "down")
    ]
    return LayerExperts(pieces[0].first, pieces[-1].last, *parts)
