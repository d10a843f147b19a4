"""Write one safetensors file from many ranks at once: its header is known beforehand, so each rank writes its own part where it belongs.

The file has its name only when it is whole: until `publish` it is called `.partial`. Room for all of it is taken first, so that a full disk is an
error before the first byte, and never a signal in the middle.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from training.sharded.headers import ITEM_BYTES, TensorAt, file_header

DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8,
    "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F64": torch.float64, "I16": torch.int16, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_RAW = {1: (torch.uint8, numpy.uint8), 2: (torch.int16, numpy.int16), 4: (torch.int32, numpy.int32), 8: (torch.int64, numpy.int64)}  # fmt: skip
_WRITE_BYTES = 64 << 20


class Spec(NamedTuple):
    """A tensor of the file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def spec(dtype: torch.dtype, *shape: int) -> Spec:
    return Spec(NAMES[dtype], shape)


def create(path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> None:
    """The file `path`.partial with its header and room for all tensors. OSError if the disk has not that much."""
    header, offset = {"__metadata__": dict(metadata)} if metadata else {}, 0
    described: dict[str, object] = dict(header)
    for name, each in specs.items():
        described[name] = {
            "dtype": each.dtype,
            "shape": list(each.shape),
            "data_offsets": [offset, offset + each.bytes],
        }
        offset += each.bytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with partial(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + offset)


def publish(path: Path) -> None:
    """Give the finished file its name, for good."""
    os.replace(partial(path), path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


class Writer:
    """One rank's hand on `path`.partial; what it wrote is on the disk when the `with` ends."""

    def __init__(self, path: Path) -> None:
        self._path = partial(path)
        self._places = {tensor.name: tensor for tensor in file_header(self._path)}

    def __enter__(self) -> Writer:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def rows(self, name: str, first: int, tensor: Tensor) -> None:
        """Rows from `first` on."""
        place = self._places[name]
        assert tuple(tensor.shape[1:]) == place.shape[1:] and NAMES[tensor.dtype] == place.dtype, (name, tensor.shape)
        row = math.prod(place.shape[1:]) * place.item_bytes
        # A little at a time: the whole of it may be on a card, and would be twice in host memory.
        step = max(1, _WRITE_BYTES // max(row, 1))
        for start in range(0, tensor.shape[0], step):
            self._write(memoryview(_bytes(tensor[start : start + step])), place.offset + (first + start) * row)

    def run(self, first: str, last: str, values: Tensor) -> None:
        """Everything from one tensor to another, one behind the other as they were named to `create`."""
        start, end = self._places[first], self._places[last]
        whole = end.offset + end.bytes - start.offset
        assert NAMES[values.dtype] == start.dtype and values.numel() * start.item_bytes == whole, (first, last, whole)
        flat, step = values.flatten(), _WRITE_BYTES // start.item_bytes
        for at in range(0, flat.numel(), step):
            self._write(memoryview(_bytes(flat[at : at + step])), start.offset + at * start.item_bytes)

    def experts_fastest(self, name: str, first: int, experts: int, values: Tensor) -> None:
        """`values` [rows, n] as the experts from `first` on of a tensor that is, whatever its shape, [rows, experts] in memory. A stride, so it is
        written through a map of this tensor alone."""
        place = self._places[name]
        assert NAMES[values.dtype] == place.dtype and values.shape[0] * experts == place.numbers, (name, values.shape)
        raw_torch, raw_numpy = _RAW[place.item_bytes]
        shape = (values.shape[0], experts)
        table = numpy.memmap(self._path, dtype=raw_numpy, mode="r+", offset=place.offset, shape=shape)
        table[:, first : first + values.shape[1]] = values.detach().contiguous().view(raw_torch).cpu().numpy()

    def _write(self, view: memoryview, offset: int) -> None:
        while len(view):
            count = os.pwrite(self._descriptor, view, offset)
            view, offset = view[count:], offset + count


def read_rows(at: TensorAt, first: int, count: int) -> Tensor:
    """Rows [first, first + count) of a stored tensor, on the CPU."""
    row = at.bytes // at.shape[0]
    data = torch.empty(count * row, dtype=torch.uint8)
    view, offset = memoryview(data.numpy()), at.offset + first * row
    with at.file.open("rb", buffering=0) as file:
        while len(view):
            got = os.preadv(file.fileno(), [view], offset)
            if not got:
                raise OSError(f"{at.file.name}: ends before {at.name} does")
            view, offset = view[got:], offset + got
    return data.view(DTYPES[at.dtype]).view(count, *at.shape[1:])


def _bytes(tensor: Tensor) -> numpy.ndarray:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
