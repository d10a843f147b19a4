"""Where each tensor of a safetensors checkpoint lies: file, offset, type and shape, from the headers alone. No tensor is read, nothing is mapped.

The format: eight bytes with the header's length, the header in JSON, then the data (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from training.errors import ModelError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
ITEM_BYTES = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2,
    "U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
_LARGEST_HEADER = 100_000_000
"""The format's own limit; a larger length is not a header's."""


class CheckpointError(ModelError):
    """A checkpoint's files are torn, missing, or not what they are taken for. Names the file, and what to do."""


class TensorAt(NamedTuple):
    """One tensor as it lies in its file."""

    name: str
    file: Path
    offset: int
    """Of its first byte, from the beginning of the file."""
    bytes: int
    dtype: str
    """As safetensors writes it: BF16, F32, U8 …"""
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)


def read_headers(model: Path) -> dict[str, TensorAt]:
    """Every tensor of a model folder by its name: of the files that the index names, or of model.safetensors. CheckpointError on a torn or missing
    file, and where index and files do not agree."""
    index = model / INDEX
    if not index.is_file():
        return {tensor.name: tensor for tensor in file_header(_single(model))}
    wanted = _weight_map(index)
    missing = sorted({name for name in wanted.values() if not (model / name).is_file()})
    if missing:
        raise CheckpointError(
            f"{INDEX}: names {missing[0]}, which is not there ({len(missing)} of {len(set(wanted.values()))} files missing); fetch the model again"
        )
    found: dict[str, TensorAt] = {}
    for name in sorted(set(wanted.values())):
        for tensor in file_header(model / name):
            if wanted.get(tensor.name) != name:
                place = wanted.get(tensor.name, "no file")
                raise CheckpointError(
                    f"{name}: holds {tensor.name}, which {INDEX} has in {place}; files of two versions are mixed, fetch the model again"
                )
            found[tensor.name] = tensor
    if lost := sorted(wanted.keys() - found.keys()):
        raise CheckpointError(
            f"{wanted[lost[0]]}: lacks {lost[0]}, which {INDEX} has in it ({len(lost)} such tensors); fetch the file again"
        )
    return found


def file_header(path: Path) -> Iterator[TensorAt]:
    """The tensors of one file. CheckpointError if its length is not what its header says, or the header is none."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise CheckpointError(
                f"{path.name}: {size} bytes, and its header alone says {length}; it is torn or no safetensors file, fetch it again"
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        tensors = [_tensor(path, 8 + length, name, entry) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path.name}: its header cannot be read ({error}); fetch the file again") from None
    end = max((tensor.offset + tensor.bytes for tensor in tensors), default=8 + length)
    if size != end:
        raise CheckpointError(
            f"{path.name}: {size} bytes, its header describes {end}; the file is torn, fetch it again"
        )
    yield from tensors


def file_metadata(path: Path) -> dict[str, str]:
    """The `__metadata__` of one file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        metadata: dict[str, str] = json.loads(file.read(length)).get("__metadata__", {})
    return metadata


def _tensor(path: Path, data: int, name: str, entry: Mapping[str, Any]) -> TensorAt:
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), entry["dtype"]
    if dtype not in ITEM_BYTES:
        raise ValueError(f"{name}: type {dtype} is not known; known are {', '.join(ITEM_BYTES)}")
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name}: {end - begin} bytes for {list(shape)} of {dtype}")
    return TensorAt(name, path, data + begin, end - begin, dtype, shape)


def _single(model: Path) -> Path:
    if (model / SINGLE).is_file():
        return model / SINGLE
    seen = sorted(path.name for path in model.glob("*.safetensors")) if model.is_dir() else []
    raise CheckpointError(
        f"{model.name}: neither {INDEX} nor {SINGLE} is there (seen: {', '.join(seen[:3]) or 'no .safetensors file'}); want a model's folder, with its index"
    )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        wanted = json.loads(index.read_bytes())["weight_map"]
        if wanted and all(isinstance(file, str) and Path(file).name == file for file in wanted.values()):
            return dict(wanted)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise CheckpointError(f"{INDEX}: want an object with a weight_map of tensor to file name; fetch it again")
