"""The packed base beside the model, so that a restart reads 0.28 of the bytes and quantises nothing. For any number of ranks.

It is used only if its source is the very same (names, sizes and times of the model's files) and each piece has the checksum that was written with it;
otherwise it is made anew, and that is said.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from training.sharded.headers import CheckpointError, TensorAt, file_header
from training.sharded.inventory import PARTS, Inventory, Part, part_numbers
from training.sharded.ranks import Ranks
from training.sharded.storage import BLOCK, LayerExperts, Packed
from training.sharded.tensorfile import Spec, Writer, create, publish, read_rows, spec

FORMAT = 1
FOLDER, DATA, MANIFEST = "nf4-cache", "base.safetensors", "manifest.json"
_SUMS = "crc32"
_HALVES = ("packed", "absmax")


class Stored(NamedTuple):
    """One stretch of the cache, and its place in the bytes of a room."""

    file: Path
    offset: int
    at_bytes: int
    name: str
    crc32: int
    packed: bool
    """Codes; otherwise scales."""
    start: int


@dataclass(frozen=True)
class Cache:
    """A cache that belongs to this model and has its full length; its bytes are checked as they are read."""

    tensors: Mapping[str, TensorAt]
    sums: Mapping[str, Tensor]

    def expert_reads(self, layer: int, part: Part, first: int, last: int) -> Iterator[Stored]:
        """What fills one part of the experts [first, last), expert after expert."""
        for expert in range(first, last):
            for half in _HALVES:
                yield self._stored(f"{_layer(layer, part)}.{half}", expert, expert - first)

    def matrix_reads(self, name: str) -> Iterator[Stored]:
        yield from (self._stored(f"{name}.{half}", 0, 0) for half in _HALVES)

    def _stored(self, name: str, row: int, place: int) -> Stored:
        at = self.tensors[name]
        size = at.bytes // at.shape[0]
        crc32 = int(self.sums[name][row])
        return Stored(at.file, at.offset + row * size, size, name, crc32, name.endswith(_HALVES[0]), place * size)


def find(model: Path, inventory: Inventory, matrices: Sequence[str]) -> Cache | str:
    """The cache beside the model, or why there is none that can be used; "" if there is none at all."""
    folder = model / FOLDER
    if not folder.exists():
        return ""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        told = {key: manifest[key] for key in ("format", "source")}
    except (OSError, ValueError, KeyError, TypeError):
        return f"{FOLDER} has no {MANIFEST} that can be read: its writing was cut short"
    if told["format"] != FORMAT:
        return f"{FOLDER} is of format {told['format']}, this version reads {FORMAT}"
    if told["source"] != source_digest(model):
        return f"{FOLDER} was made from other files than those of {model.name} now"
    try:
        tensors = {tensor.name: tensor for tensor in file_header(folder / DATA)}
    except (OSError, CheckpointError) as error:
        return f"{FOLDER}: {error}"
    for name, wanted in _specs(inventory, {each: inventory.matrices[each][1].numbers for each in matrices}).items():
        if name not in tensors or Spec(tensors[name].dtype, tensors[name].shape) != wanted:
            return f"{FOLDER} lacks {name}: it was made with other matrices in 4 bits"
    sums = {
        name: read_rows(tensors[_sum(name)], 0, at.shape[0]) for name, at in tensors.items() if _sum(name) in tensors
    }
    return Cache(tensors, sums)


def write(
    model: Path, inventory: Inventory, homes: Sequence[LayerExperts], matrices: Mapping[str, Packed], ranks: Ranks
) -> None:
    """Write the cache; every rank its experts, the first one the matrices, too. OSError if the disk is full."""
    folder = model / FOLDER
    source = source_digest(model)
    if ranks.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        create(folder / DATA, _specs(inventory, {name: values.numbers for name, values in matrices.items()}), {})
    ranks.barrier()
    with Writer(folder / DATA) as file:
        for layer, home in enumerate(homes):
            for part in PARTS:
                _write(file, _layer(layer, part), home.part(part), home.first, home.last - home.first)
        for name, values in matrices.items() if ranks.rank == 0 else ():
            _write(file, name, values, 0, 1)
    ranks.barrier()
    if ranks.rank == 0:
        publish(folder / DATA)
        told = {"format": FORMAT, "source": source}
        # Last: a cache without it is half a cache.
        (folder / f"{MANIFEST}.partial").write_text(json.dumps(told), encoding="utf-8")
        os.replace(folder / f"{MANIFEST}.partial", folder / MANIFEST)
    ranks.barrier()


def source_digest(model: Path) -> str:
    """Of the names, sizes and times of the weights and config.json: reading 470 GB to hash them would take longer than quantising them."""
    files = sorted([*model.glob("*.safetensors"), model / "config.json"])
    told = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files if path.exists()]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _write(file: Writer, name: str, values: Packed, first: int, count: int) -> None:
    """One expert after another, so that the host holds one."""
    for half, tensor in zip(_HALVES, values, strict=True):
        rows, sums = tensor.view(count, -1), torch.empty(count, dtype=torch.int64)
        for row in range(count):
            data = rows[row : row + 1].cpu()
            sums[row] = zlib.crc32(memoryview(data.view(-1).view(torch.uint8).numpy()))
            file.rows(f"{name}.{half}", first + row, data)
        file.rows(_sum(f"{name}.{half}"), first, sums)


def _specs(inventory: Inventory, matrices: Mapping[str, int]) -> dict[str, Spec]:
    shape = inventory.shape
    specs: dict[str, Spec] = {}
    for layer in range(shape.layers):
        for part in PARTS:
            specs |= _pair(_layer(layer, part), shape.experts, part_numbers(shape, part))
    for name, numbers in matrices.items():
        specs |= _pair(name, 1, numbers)
    return specs


def _pair(name: str, rows: int, numbers: int) -> dict[str, Spec]:
    specs = {
        f"{name}.packed": spec(torch.uint8, rows, numbers // 2),
        f"{name}.absmax": spec(torch.float32, rows, numbers // BLOCK),
    }
    return specs | {_sum(each): spec(torch.int64, rows) for each in specs}


def _layer(layer: int, part: Part) -> str:
    return f"layers.{layer}.{part}"


def _sum(name: str) -> str:
    return f"{name}.{_SUMS}"
