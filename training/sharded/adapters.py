"""Write the adapters as PEFT's own directory, from each rank's part and without the base: one tensor at a time, each rank where its numbers belong.

Two layouts. `fused` is what PEFT writes and reads, the routed experts as two parameters a layer: A [E·R, X] with the expert slowest, B [O, R·E] with
the expert *fastest*. `per_expert` has two-dimensional pairs for each expert and projection, which serving engines take; gate and up share A.

Shape letters: n experts of this rank, E of all, R rank of the adapter, X in, O out, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from training.contract.recipe import Adapters
from training.model import WEIGHTS, lora_config, require_same_keys
from training.sharded.headers import file_header
from training.sharded.ranks import Alone, Ranks
from training.sharded.tensorfile import Spec, Writer, create, publish, read_rows, spec

Layout = Literal["fused", "per_expert"]
_PREFIX = "base_model.model."
_FORMAT = {"format": "pt"}


@dataclass(frozen=True)
class Factors:
    """A and B of one adapted matrix, whole on every rank; or those of this rank's experts of a fused parameter."""

    module: str
    """`model.layers.0.self_attn.q_proj` or `model.layers.0.mlp.experts`, as the text class names it."""
    A: Tensor
    """[R, X] or [n, R, X]"""
    B: Tensor
    """[O, R] or [n, O, R]"""
    parameter: Literal["", "gate_up_proj", "down_proj"] = ""
    """Which of the experts' parameters; empty for a linear layer."""
    first: int = 0
    """The first expert of this rank."""
    experts: int = 0
    """E; 0 for a linear layer."""

    @property
    def group(self) -> str:
        return f"routed_experts.{self.parameter}" if self.parameter else self.module.split(".")[-2]


def save(
    directory: Path,
    factors: Sequence[Factors],
    adapters: Adapters,
    family: str,
    *,
    base: str,
    ranks: Ranks | None = None,
    dtype: torch.dtype = torch.float32,
    layout: Layout = "fused",
) -> None:
    """adapter_config.json and adapter_model.safetensors in `directory`. Every rank calls it with its own factors, in one order; `base` is written as
    the model that they belong to. OSError if the disk has no room."""
    ranks = ranks or Alone()
    path = directory / WEIGHTS
    if ranks.rank == 0:
        directory.mkdir(parents=True, exist_ok=True)
        create(path, {key: whole for each in factors for key, whole in _specs(each, dtype, layout)}, _FORMAT)
    ranks.barrier()
    with Writer(path) as file:
        for each in factors:
            # What every rank has whole, the first one writes.
            if each.experts or ranks.rank == 0:
                _write(file, each, dtype, layout)
    ranks.barrier()
    if ranks.rank == 0:
        _config(adapters, family, base, layout).save_pretrained(str(directory))
        publish(path)
    ranks.barrier()


def load(directory: Path, factors: Sequence[Factors]) -> None:
    """Fill `factors` from a PEFT directory in the fused layout. LivenessError if it holds other tensors than these, or of other shapes."""
    stored = {tensor.name: tensor for tensor in file_header(directory / WEIGHTS)}
    wanted = {}
    for each in factors:
        for key, whole in _specs(each, torch.float32, "fused"):
            wanted[key] = (each.group, torch.empty(whole.shape, device="meta"))
    require_same_keys(wanted, {name: tensor.shape for name, tensor in stored.items()}, "load")
    with torch.no_grad():
        for each in factors:
            key_a, key_b = (key for key, _ in _specs(each, torch.float32, "fused"))
            if not each.experts:
                each.A.copy_(read_rows(stored[key_a], 0, each.A.shape[0]))
                each.B.copy_(read_rows(stored[key_b], 0, each.B.shape[0]))
                continue
            n, R, _ = each.A.shape
            each.A.copy_(read_rows(stored[key_a], each.first * R, n * R).view(each.A.shape))
            whole_b = read_rows(stored[key_b], 0, each.B.shape[1]).view(each.B.shape[1], R, each.experts)
            each.B.copy_(whole_b[:, :, each.first : each.first + n].permute(2, 0, 1))


def _specs(each: Factors, dtype: torch.dtype, layout: Layout) -> Iterator[tuple[str, Spec]]:
    """Every tensor that comes of these factors, whole: A before B."""
    R, X, O = each.A.shape[-2], each.A.shape[-1], each.B.shape[-2]  # noqa: E741  the legend's letters
    if each.experts and layout == "per_expert":
        for expert in range(each.experts):
            for name, rows in _projections(each.parameter, O):
                base = f"{_PREFIX}{each.module}.{expert}.{name}"
                yield f"{base}.lora_A.weight", spec(dtype, R, X)
                yield f"{base}.lora_B.weight", spec(dtype, rows.stop - rows.start, R)
        return
    count = max(each.experts, 1)
    yield f"{_key(each)}.lora_A.weight", spec(dtype, count * R, X)
    yield f"{_key(each)}.lora_B.weight", spec(dtype, O, R * count)


def _write(file: Writer, each: Factors, dtype: torch.dtype, layout: Layout) -> None:
    A, B = each.A.detach().to(dtype), each.B.detach().to(dtype)
    if each.experts and layout == "per_expert":
        projections = _projections(each.parameter, B.shape[1])
        pairs = [half.flatten(1) for _, rows in projections for half in (A, B[:, rows])]
        # All of this rank's experts lie one behind the other in the file: one piece, not some hundred thousand small ones.
        first, last = (f"{_PREFIX}{each.module}.{expert}" for expert in (each.first, each.first + len(A) - 1))
        ends = f"{first}.{projections[0][0]}.lora_A.weight", f"{last}.{projections[-1][0]}.lora_B.weight"
        file.run(*ends, torch.cat(pairs, 1))
        return
    if not each.experts:
        file.rows(f"{_key(each)}.lora_A.weight", 0, A)
        file.rows(f"{_key(each)}.lora_B.weight", 0, B)
        return
    file.rows(f"{_key(each)}.lora_A.weight", each.first * A.shape[1], A.flatten(0, 1))
    # [n, O, R] to [O·R, n]: this rank's columns of each row of [O, R, E].
    file.experts_fastest(f"{_key(each)}.lora_B.weight", each.first, each.experts, B.permute(1, 2, 0).flatten(0, 1))


def _key(each: Factors) -> str:
    # PEFT wraps the parameters in their order in the module: gate_up_proj inside, down_proj around it.
    return f"{_PREFIX}{each.module}{'.base_layer' if each.parameter == 'gate_up_proj' else ''}"


def _projections(parameter: str, rows: int) -> tuple[tuple[str, slice], ...]:
    if parameter == "down_proj":
        return (("down_proj", slice(0, rows)),)
    return ("gate_proj", slice(0, rows // 2)), ("up_proj", slice(rows // 2, rows))


def _config(adapters: Adapters, family: str, base: str, layout: Layout) -> Any:
    config = lora_config(adapters, family)
    config.base_model_name_or_path, config.inference_mode = base, True
    if layout == "per_expert" and config.target_parameters:
        config.target_parameters = None
        leaves = {*(config.target_modules or ()), "gate_proj", "up_proj", "down_proj"}
        config.target_modules = sorted(leaves)
    return config
