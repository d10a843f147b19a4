"""The light form of a checkpoint, for an uplink that the full one is too large for: the adapter in bfloat16, without the trainer's state.
And what of it goes first: the adapter without the routed experts' part, which is nearly all of its bytes.

Standard library only: the conversion runs in whatever environment the uploader has.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from training.contract.manifest import FileEntry

TRAINERS_OWN = frozenset({"optimizer.pt", "resume.safetensors", "scheduler.pt", "rng_state.pth"})
"""What only the trainer needs to go on; the adapter can be used, and another phase begun, without."""
_BLOCK = 4 << 20
_ADAPTER, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_EXPERTS = ".experts."  # in the name of every tensor of the routed ones; the shared expert's have .shared_expert.
_RAW = "weights.bin"
"""What stands for the adapter in the counting trainer's checkpoints: fp32 numbers without a header."""


def light_names(files: dict[str, FileEntry]) -> list[str]:
    return [name for name in files if name not in TRAINERS_OWN]


def light_bytes(files: dict[str, FileEntry]) -> int:
    """What the light form has, nearly: a header keeps its size, and tensors that are not fp32 keep theirs."""
    return sum(files[name].bytes // (2 if _is_adapter(name) else 1) for name in light_names(files))


def make_light(source: Path, names: list[str], into: Path) -> None:
    """The named files of `source` in `into`, the adapter's tensors rounded to bfloat16, all others as hard links."""
    for name in names:
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        if name == _RAW:
            size = (source / name).stat().st_size
            with (source / name).open("rb") as file, target.open("wb") as out:
                out.writelines(_to_bfloat16(block) for block in _blocks(file, size - size % 4))
        elif _is_adapter(name):
            round_safetensors(source / name, target)
        else:
            os.link(source / name, target)


def make_first(source: Path, into: Path) -> list[str]:
    """The adapter of `source` without its routed experts in `into`, as PEFT loads it (what is missing there changes nothing); its files. Empty
    where that is nothing or all of it."""
    if not (source / _ADAPTER).exists():
        return []
    with (source / _ADAPTER).open("rb") as file:
        names = [name for name, _ in _tensors(_header(file)[0])]
    if len({_EXPERTS in name for name in names}) < 2:
        return []
    into.mkdir(parents=True, exist_ok=True)
    round_safetensors(source / _ADAPTER, into / _ADAPTER, keep=lambda name: _EXPERTS not in name)
    (into / _CONFIG).unlink(missing_ok=True)
    os.link(source / _CONFIG, into / _CONFIG)
    return [_CONFIG, _ADAPTER]


def round_safetensors(source: Path, target: Path, keep: Callable[[str], bool] = lambda name: True) -> None:
    """A copy whose fp32 tensors are bfloat16, rounded to the nearest even as torch does; others are copied. Of the tensors to `keep` only."""
    with source.open("rb") as file, target.open("wb") as out:
        header, length = _header(file)
        tensors = [(name, entry) for name, entry in _tensors(header) if keep(name)]
        metadata = {name: entry for name, entry in header.items() if name == "__metadata__"}
        text = json.dumps(metadata | dict(_placed(tensors)), separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        out.write(struct.pack("<Q", len(text)) + text)
        for _, entry in tensors:
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            for block in _blocks(file, end - begin):
                out.write(_to_bfloat16(block) if entry["dtype"] == "F32" else block)


def _header(file: IO[bytes]) -> tuple[dict[str, Any], int]:
    """The header, and how long its text is; the file stands behind it."""
    (length,) = struct.unpack("<Q", file.read(8))
    return json.loads(file.read(length)), length


def _tensors(header: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """In the order of their bytes."""
    tensors = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
    return sorted(tensors, key=lambda item: item[1]["data_offsets"])


def _placed(tensors: list[tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The header's entries after the rounding, one behind the other."""
    at = 0
    for name, entry in tensors:
        begin, end = entry["data_offsets"]
        rounded = entry["dtype"] == "F32"
        size = (end - begin) // 2 if rounded else end - begin
        yield name, {**entry, "dtype": "BF16" if rounded else entry["dtype"], "data_offsets": [at, at + size]}
        at += size


def _is_adapter(name: str) -> bool:
    return name.endswith(".safetensors") or name == _RAW


def _to_bfloat16(block: bytes) -> bytes:
    """Little-endian fp32 to bfloat16. One large integer does all lanes at once: adding 0x7FFF and the last bit that is kept rounds to the nearest
    even; only a NaN with every high bit set would carry into its neighbour, and a checkpoint with a NaN is never made."""
    lanes = len(block) // 4
    ones = int.from_bytes(b"\1\0\0\0" * lanes, "little")
    bits = int.from_bytes(block, "little")
    rounded = (bits + ones * 0x7FFF + ((bits >> 16) & ones)).to_bytes(len(block) + 4, "little")[: len(block)]
    result = bytearray(2 * lanes)
    result[0::2], result[1::2] = rounded[2::4], rounded[3::4]
    return bytes(result)


def _blocks(file: IO[bytes], size: int) -> Iterator[bytes]:
    while size > 0 and (block := file.read(min(_BLOCK, size))):
        size -= len(block)
        yield block
