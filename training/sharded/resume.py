"""The state to go on from, in one file that does not know how many ranks wrote it: every adapter tensor in fp32 with its Adam moments, expert after
expert. Each rank writes its experts where they belong, and reads whichever it then has.

Moments that the optimizer keeps in 8 bits are written as its codes and scales, since packing them anew would change them; those whose blocks of 256
do not end with an expert, as the fp32 numbers that they stand for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from training.sharded.headers import CheckpointError, TensorAt, file_header, file_metadata
from training.sharded.ranks import Alone, Ranks
from training.sharded.tensorfile import Spec, Writer, create, publish, read_rows, spec

_FORMAT = "livery-resume-1"
_SIGNED = "exp_avg"
_MOMENTS = (_SIGNED, "exp_avg_sq")
_CODES, _SCALE = "codes", "scale"
_STEPS = "optimizer_steps"


class Placed(NamedTuple):
    """One trainable tensor of this rank."""

    tensor: Tensor
    first: int = 0
    """Its first row in the whole tensor."""
    rows: int = 0
    """Of the whole tensor, if the ranks have each a part of it; 0: every rank has it whole."""
    fastest: int = 0
    """Of a lora_B of routed experts [O, R·n]: n, its fastest index. In the file the experts are its rows [E, O, R], and so are `first` and `rows`."""

    def by_rows(self, values: Tensor) -> Tensor:
        """A view of `values`, which has the tensor's shape, as it lies in the file."""
        return values.view(len(values), -1, self.fastest).permute(2, 0, 1) if self.fastest else values

    @property
    def count(self) -> int:
        """Rows of this rank."""
        return self.fastest or self.tensor.shape[0]


def save(
    path: Path,
    tensors: Mapping[str, Placed],
    optimizer: torch.optim.Optimizer,
    *,
    ranks: Ranks | None = None,
    told: Mapping[str, str] | None = None,
) -> None:
    """Write `path`; every rank calls it with its own `tensors`, under names that all share. `told` are the trainer's own lines (its step, its
    schedule). The file appears when it is whole. OSError if the disk has no room."""
    ranks = ranks or Alone()
    if ranks.rank == 0:
        metadata = {**(told or {}), "format": _FORMAT, _STEPS: str(_steps(optimizer, tensors))}
        create(path, dict(_specs(tensors, optimizer)), metadata)
    ranks.barrier()
    with Writer(path) as file:
        for name, placed in tensors.items():
            if placed.rows or ranks.rank == 0:
                for kind, values in _values(placed, optimizer):
                    file.rows(f"{name}.{kind}", placed.first, values)
    ranks.barrier()
    if ranks.rank == 0:
        publish(path)
    ranks.barrier()


def load(path: Path, tensors: Mapping[str, Placed], optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Fill `tensors` and the optimizer's state from `path` and return what `told` was. CheckpointError if the file is torn, or holds other
    tensors than these; nothing is changed then."""
    stored = {tensor.name: tensor for tensor in file_header(path)}
    told = file_metadata(path)
    if told.pop("format", "") != _FORMAT:
        raise CheckpointError(f"{path.name}: is no resume file of this version; want format {_FORMAT}")
    steps = float(told.pop(_STEPS))
    _require_same(path, stored, tensors, _MOMENTS if steps else ())
    with torch.no_grad():
        for name, placed in tensors.items():
            tensor = placed.tensor
            placed.by_rows(tensor).copy_(read_rows(stored[f"{name}.weight"], placed.first, placed.count))
            if steps:
                state: dict[str, Any] = optimizer.state[tensor]
                state["step"] = torch.tensor(steps, device=tensor.device if _on_card(optimizer) else "cpu")
                for kind in _MOMENTS:
                    state[kind] = _room(optimizer, tensor, signed=kind == _SIGNED)
                    state[kind].copy_(_moment(stored, f"{name}.{kind}", placed, signed=kind == _SIGNED))
    return told


def _specs(tensors: Mapping[str, Placed], optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Spec]]:
    for name, placed in tensors.items():
        for kind, values in _values(placed, optimizer, shapes_only=True):
            yield f"{name}.{kind}", spec(values.dtype, placed.rows or values.shape[0], *values.shape[1:])


def _values(
    placed: Placed, optimizer: torch.optim.Optimizer, *, shapes_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """What is written of one tensor, each with its rows first."""
    tensor = placed.tensor.detach()
    yield "weight", placed.by_rows(tensor.float())
    state = optimizer.state.get(placed.tensor)
    for kind in _MOMENTS if state else ():
        moment = state[kind]
        if type(moment) is Tensor:
            yield kind, placed.by_rows(moment)
        elif placed.fastest or (placed.rows and moment.scale.numel() % tensor.shape[0]):
            yield kind, placed.by_rows(tensor.float() if shapes_only else moment.dequantize(torch.float32))
        else:
            yield f"{kind}.{_CODES}", moment.codes
            yield f"{kind}.{_SCALE}", moment.scale.view(tensor.shape[0], -1) if placed.rows else moment.scale


def _moment(stored: Mapping[str, TensorAt], name: str, placed: Placed, *, signed: bool) -> Tensor:
    """As it is stored: packed as torchao packs it, or plain."""
    count = placed.count
    if name in stored:
        plain = torch.empty(placed.tensor.shape)
        placed.by_rows(plain).copy_(read_rows(stored[name], placed.first, count))
        return plain
    from torchao.optim.subclass_8bit import OptimState8bit

    codes = read_rows(stored[f"{name}.{_CODES}"], placed.first, count)
    scale = stored[f"{name}.{_SCALE}"]
    scales = read_rows(scale, placed.first, count if placed.rows else scale.shape[0]).flatten()
    packed = OptimState8bit.zeros(codes.shape, signed, codes.numel() // scales.numel(), dtype=torch.float32)
    packed.codes.copy_(codes)
    packed.scale.copy_(scales)
    return packed.to(placed.tensor.device)


def _steps(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Placed]) -> float:
    """How often the optimizer has stepped, which must be the same for every tensor."""
    seen = {
        float(optimizer.state[each.tensor]["step"]) if optimizer.state.get(each.tensor) else 0.0
        for each in tensors.values()
    }
    if len(seen) != 1:
        raise ValueError(
            f"tensors were stepped {', '.join(map(str, sorted(seen)))} times; one that never gets a gradient does not train"
        )
    return seen.pop()


def _require_same(
    path: Path, stored: Mapping[str, TensorAt], tensors: Mapping[str, Placed], moments: tuple[str, ...]
) -> None:
    wanted: dict[str, tuple[int, ...] | None] = {}
    for name, each in tensors.items():
        mine = each.by_rows(each.tensor.detach()).shape
        shape = (each.rows or mine[0], *mine[1:])
        wanted[f"{name}.weight"] = shape
        for kind in moments:
            packed = f"{name}.{kind}.{_CODES}"
            wanted |= (
                {packed: shape, f"{name}.{kind}.{_SCALE}": None} if packed in stored else {f"{name}.{kind}": shape}
            )
    if missing := sorted(wanted.keys() - stored.keys()):
        raise CheckpointError(f"{path.name}: lacks {missing[0]} ({len(missing)} such); it is of another recipe")
    if unknown := sorted(stored.keys() - wanted.keys()):
        raise CheckpointError(
            f"{path.name}: holds {unknown[0]}, which is not trained here ({len(unknown)} such); it is of another recipe"
        )
    for name, expected in wanted.items():
        if expected and stored[name].shape != expected:
            raise CheckpointError(
                f"{path.name}: {name} has shape {list(stored[name].shape)}, want {list(expected)}; it is of another recipe"
            )


def _room(optimizer: torch.optim.Optimizer, tensor: Tensor, *, signed: bool) -> Tensor:
    """As the optimizer itself would make it at its first step: torchao's decides by the tensor's size whether it packs."""
    make = getattr(optimizer, "_new_buffer", None)
    return make(tensor.detach(), signed) if make else torch.zeros_like(tensor.detach())


def _on_card(optimizer: torch.optim.Optimizer) -> bool:
    """Where torch's own AdamW counts its steps."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
