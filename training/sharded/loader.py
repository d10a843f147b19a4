"""From a model folder to a 4-bit base: each rank reads its own experts and quantises them on its own card as they come; each byte of the checkpoint
is read once on the box. What is not routed experts is read by one rank and handed to the others, packed where it is packed.

At no time does the host hold more than the reader's buffers, or the card more than the base and one buffer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from training.sharded import cache, reader
from training.sharded.headers import CheckpointError, TensorAt
from training.sharded.inventory import PARTS, ROUTED, Inventory, part_numbers, quantisable, read_inventory
from training.sharded.ranks import Alone, Ranks, share
from training.sharded.reader import Read
from training.sharded.storage import BLOCK, LayerExperts, Matrix, Packed, empty_layer, empty_packed
from training.sharded.tensorfile import DTYPES

Notice = Callable[[str, str], None]
Linears = Literal["nf4", "bf16"]
"""How the linear layers outside the routed experts are kept: attention, linear attention, shared experts. Embeddings, norms and routers never are in
4 bits."""


@dataclass(frozen=True)
class Report:
    """What a rank holds after loading, and what that took."""

    held_bytes: Mapping[tuple[str, str], int]
    """By group and type, on this rank (or, of the routed experts in shared host memory, written by it)."""
    read_bytes: int
    """By this rank. Over all ranks, those of the checkpoint without what is left out, once."""
    checkpoint_bytes: int
    left_out_bytes: int
    seconds: float
    from_cache: bool

    def lines(self) -> list[str]:
        """A table for people."""
        held = [
            f"{group:18s} {dtype:9s} {size / 1e9:9.3f} GB" for (group, dtype), size in sorted(self.held_bytes.items())
        ]
        source = "the NF4 cache" if self.from_cache else f"a checkpoint of {self.checkpoint_bytes / 1e9:.2f} GB"
        rate = self.read_bytes / 1e9 / self.seconds if self.seconds else 0.0
        return [
            *held,
            f"read {self.read_bytes / 1e9:.2f} GB of {source} in {self.seconds:.1f} s ({rate:.2f} GB/s); {self.left_out_bytes / 1e9:.2f} GB of vision and MTP layers left out",
        ]


@dataclass(frozen=True)
class Base:
    """One rank's part of the frozen base."""

    inventory: Inventory
    first: int
    last: int
    experts: tuple[LayerExperts, ...]
    """The experts [first, last) of each layer: on the rank's device, or views of the box's shared copy."""
    matrices: Mapping[str, Tensor | Matrix]
    """Everything else, whole, by the text class's names."""
    report: Report


def load(
    model: Path,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    ranks: Ranks | None = None,
    linears: Linears = "nf4",
    into: Sequence[LayerExperts] | None = None,
    use_cache: bool = False,
    notice: Notice = lambda what, why: None,
    buffer_bytes: int = reader.BUFFER_BYTES,
    buffers: int = reader.BUFFERS,
) -> Base:
    """This rank's part of the base of `model`. Every rank calls it.

    `into` are the whole layers of a SharedHost; without it, the rank's experts lie on `device`. With `use_cache` the packed base is read from
    beside the model, or written there after this. CheckpointError if a file is torn, or a tensor is missing, unknown or unquantised.
    """
    started = time.monotonic()
    ranks = ranks or Alone()
    inventory = read_inventory(model)
    shape = inventory.shape
    first, last = share(shape.experts, ranks)
    if into is None:
        homes = tuple(empty_layer(shape, first, last, device) for _ in range(shape.layers))
    else:
        homes = tuple(layer.experts(first, last) for layer in into)
    work = _Work(inventory, ranks, homes, _rooms(inventory, linears, device, dtype), buffer_bytes)
    found = cache.find(model, inventory, work.packed_names) if use_cache else "not asked for"
    read, from_cache = 0, False
    # Asked of all, whatever is found: nobody may have begun to write a new one while another still looks.
    if use_cache and ranks.all(isinstance(found, cache.Cache)) and isinstance(found, cache.Cache):
        read, from_cache = _from_cache(found, work, device, buffers, notice)
    elif use_cache and found and ranks.rank == 0:
        notice("NF4 cache not used", f"{found}; it is made anew")
    if not from_cache:
        work.filled.clear()
        read = reader.stream(work.reads(), device, buffer_bytes=buffer_bytes, buffers=buffers).bytes
    work.require_quantised()
    _hand_round(work, ranks)
    report = Report(
        held_bytes=work.held(),
        read_bytes=read,
        checkpoint_bytes=inventory.bytes,
        left_out_bytes=sum(tensor.bytes for tensor in inventory.left_out),
        seconds=time.monotonic() - started,
        from_cache=from_cache,
    )
    if use_cache and not from_cache:
        cache.write(model, inventory, homes, work.packed(), ranks)
    if into is not None:
        ranks.barrier()  # the others' experts are in the shared copy, too, only now
    return Base(inventory, first, last, homes, work.matrices, report)


def _from_cache(
    found: cache.Cache, work: _Work, device: torch.device, buffers: int, notice: Notice
) -> tuple[int, bool]:
    reads = list(work.reads(found))
    longest = max(read.bytes for read in reads)
    read, reason = 0, ""
    try:
        read = reader.stream(reads, device, buffer_bytes=max(longest, work.buffer_bytes), buffers=buffers).bytes
    except CheckpointError as error:
        reason = str(error)
        notice("NF4 cache not used", f"{reason}; it is made anew")
    # All or none: the ranks go on to collectives, and one that reads the checkpoint alone would be waited for.
    return read, work.ranks.all(not reason)


def _rooms(
    inventory: Inventory, linears: Linears, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor | Matrix]:
    """Room for every matrix outside the routed experts."""
    rooms: dict[str, Tensor | Matrix] = {}
    for name, (group, at) in inventory.matrices.items():
        if linears == "nf4" and quantisable(inventory.shape, group, name):
            if at.numbers % BLOCK:
                raise CheckpointError(
                    f"{name}: {at.numbers} weights cannot be kept in 4 bits, want a multiple of {BLOCK}; load this model with linears bf16"
                )
            rooms[name] = Matrix(empty_packed(at.numbers, device), at.shape)
        else:
            rooms[name] = torch.empty(at.shape, dtype=dtype, device=device)
    return rooms


class _Work:
    """What one rank has to read, where it goes, and what has arrived."""

    def __init__(
        self,
        inventory: Inventory,
        ranks: Ranks,
        homes: tuple[LayerExperts, ...],
        matrices: dict[str, Tensor | Matrix],
        buffer_bytes: int,
    ) -> None:
        self.inventory, self.ranks, self.homes, self.matrices = inventory, ranks, homes, matrices
        self.buffer_bytes = buffer_bytes
        self.owners = _owners(inventory, ranks.size)
        self.filled: Counter[str] = Counter()
        """Numbers that have arrived, by tensor or layer and part."""

    @property
    def packed_names(self) -> tuple[str, ...]:
        return tuple(name for name, room in self.matrices.items() if isinstance(room, Matrix))

    def packed(self) -> dict[str, Packed]:
        return {name: room.values for name, room in self.matrices.items() if isinstance(room, Matrix)}

    def reads(self, found: cache.Cache | None = None) -> Iterator[Read]:
        """This rank's share of the box's reads; of what the cache has, from there."""
        for layer, home in enumerate(self.homes):
            for part in PARTS:
                key = _key(layer, part)
                if found is not None:
                    for read in found.expert_reads(layer, part, home.first, home.last):
                        yield self._raw(key, read, home.part(part))
                    continue
                for tensor, start, count, place in self.inventory.stretches(layer, part, home.first, home.last):
                    yield from self._quantising(key, tensor, start, count, home.part(part), place)
        for name, (_, at) in self.inventory.matrices.items():
            room = self.matrices[name]
            if self.owners[name] != self.ranks.rank:
                continue
            if isinstance(room, Tensor):
                yield from self._plain(name, at, room)
            elif found is not None:
                yield from (self._raw(name, read, room.values) for read in found.matrix_reads(name))
            else:
                yield from self._quantising(name, at, 0, at.numbers, room.values, 0)

    def require_quantised(self) -> None:
        """CheckpointError if a routed expert's weights did not all come and get packed."""
        for layer, home in enumerate(self.homes):
            for part in PARTS:
                wanted = (home.last - home.first) * part_numbers(self.inventory.shape, part)
                if (seen := self.filled[_key(layer, part)]) != wanted:
                    raise CheckpointError(
                        f"model.layers.{layer}.mlp.experts.{part}_proj: {seen} of {wanted} weights of the experts {home.first} to {home.last - 1} are quantised; "
                        "the checkpoint holds the rest in a form that is not known"
                    )

    def held(self) -> dict[tuple[str, str], int]:
        held: Counter[tuple[str, str]] = Counter()
        for home in self.homes:
            held[ROUTED, "nf4"] += home.bytes
        for name, room in self.matrices.items():
            group = self.inventory.matrices[name][0]
            if isinstance(room, Matrix):
                held[group, "nf4"] += room.bytes
            else:
                held[group, str(room.dtype).removeprefix("torch.")] += room.numel() * room.element_size()
        return dict(held)

    def _quantising(self, key: str, at: TensorAt, start: int, count: int, values: Packed, place: int) -> Iterator[Read]:
        offset = at.offset + start * at.item_bytes
        for where, size, done in reader.pieces(offset, count, at.item_bytes, self.buffer_bytes, BLOCK):

            def sink(data: Tensor, first: int = place + done, numbers: int = size // at.item_bytes) -> None:
                values.part(first, numbers).write(data.view(DTYPES[at.dtype]))
                self.filled[key] += numbers

            yield Read(at.file, where, size, sink, at.name)

    def _plain(self, name: str, at: TensorAt, room: Tensor) -> Iterator[Read]:
        flat = room.view(-1)
        for where, size, done in reader.pieces(at.offset, at.numbers, at.item_bytes, self.buffer_bytes, 1):

            def sink(data: Tensor, first: int = done, numbers: int = size // at.item_bytes) -> None:
                flat[first : first + numbers].copy_(data.view(DTYPES[at.dtype]), non_blocking=True)
                self.filled[name] += numbers

            yield Read(at.file, where, size, sink, at.name)

    def _raw(self, key: str, read: cache.Stored, values: Packed) -> Read:
        room = values.packed if read.packed else values.absmax

        def sink(data: Tensor) -> None:
            room.view(torch.uint8)[read.start : read.start + read.at_bytes].copy_(data, non_blocking=True)
            # Counted by the codes alone; the scales come along or the read fails.
            self.filled[key] += 2 * read.at_bytes if read.packed else 0

        return Read(read.file, read.offset, read.at_bytes, sink, read.name, read.crc32)


def _key(layer: int, part: str) -> str:
    return f"{layer}.{part}"


def _owners(inventory: Inventory, size: int) -> dict[str, int]:
    """Who reads which matrix: each goes to the rank with the least so far, the same on all of them."""
    loads, owners = [0] * size, {}
    for name, (_, at) in sorted(inventory.matrices.items(), key=lambda item: (-item[1][1].bytes, item[0])):
        owner = loads.index(min(loads))
        owners[name], loads[owner] = owner, loads[owner] + at.bytes
    return owners


def _hand_round(work: _Work, ranks: Ranks) -> None:
    """Every matrix from its owner to all, in one order everywhere."""
    if ranks.size == 1:
        return
    for name in sorted(work.matrices):
        room, owner = work.matrices[name], work.owners[name]
        for tensor in room.values if isinstance(room, Matrix) else (room,):
            ranks.broadcast(tensor, owner)
