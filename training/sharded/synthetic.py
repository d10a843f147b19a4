"""Checkpoints and bases that nobody has trained: any shape, names as transformers writes them, random numbers. For measuring, and for tests.

Shape letters: H hidden, I intermediate.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from training.contract.shapes import ModelShape
from training.sharded.headers import INDEX, TensorAt
from training.sharded.inventory import Inventory, layer_kinds, quantisable, take_inventory, wanted_matrices
from training.sharded.loader import Base, Report
from training.sharded.ranks import Ranks, share
from training.sharded.storage import LayerExperts, Matrix, SharedHost, empty_layer, empty_packed, open_shared_host

_FULL_ATTENTION_INTERVAL = 4  # of Qwen3.5 and 3.6
_FILL_BYTES = 64 << 20
_SCALE = 0.035
"""Of each block: with uniform codes the weights have a deviation of about 0.02."""


def with_layers(shape: ModelShape, layers: int) -> ModelShape:
    """So many layers of it, all of full attention."""
    return replace(shape, attention_layers=layers, linear_layers=0)


def kinds_of(shape: ModelShape) -> tuple[str, ...]:
    return layer_kinds({"full_attention_interval": _FULL_ATTENTION_INTERVAL}, shape)


def matrices_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes outside the routed experts."""
    return {name: size for name, (_, size) in wanted_matrices(shape, kinds_of(shape)).items()}


def experts_of(shape: ModelShape, layer: int) -> dict[str, tuple[int, ...]]:
    """Those of a layer's routed experts, one matrix an expert and projection."""
    H, I = shape.hidden, shape.intermediate  # noqa: E741  the legend's letters
    return {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": (H, I) if part == "down" else (I, H)
        for expert, part in itertools.product(range(shape.experts), ("gate", "up", "down"))
    }


def tensors_of(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every name and shape of the checkpoint."""
    routed = (experts_of(shape, layer).items() for layer in range(shape.layers))
    return matrices_of(shape) | dict(itertools.chain.from_iterable(routed))


def inventory_of(shape: ModelShape) -> Inventory:
    headers = {
        name: TensorAt(name, Path("model.safetensors"), 0, 2 * math.prod(size), "BF16", size)
        for name, size in tensors_of(shape).items()
    }
    return take_inventory(headers, shape, kinds_of(shape))


def config_of(shape: ModelShape) -> Any:
    """The text configuration that has this shape."""
    common = {
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocabulary,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.intermediate,
        "tie_word_embeddings": shape.tied,
    }
    if shape.family == "qwen3_moe":
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(**common, rope_theta=5e6, decoder_sparse_step=1, mlp_only_layers=[])
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(**common, layer_types=list(kinds_of(shape)))


def write_checkpoint(folder: Path, shape: ModelShape, ranks: Ranks, device: torch.device) -> int:
    """Random bf16 weights, a file a layer, and config.json; returns the bytes of their tensors. Collective."""
    matrices = matrices_of(shape)
    weight_map = dict.fromkeys(matrices, "model-rest.safetensors")
    for layer in range(shape.layers):
        experts, name = experts_of(shape, layer), f"model-{layer:05d}.safetensors"
        weight_map |= dict.fromkeys(experts, name)
        if layer % ranks.size == ranks.rank:
            _save(folder / name, experts, device)
    if ranks.rank == 0:
        _save(folder / "model-rest.safetensors", matrices, device)
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        (folder / "config.json").write_text(json.dumps(config_of(shape).to_dict()))
    ranks.barrier()
    return 2 * (sum(map(math.prod, matrices.values())) + shape.expert_parameters)


def random_base(shape: ModelShape, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Base:
    """This rank's part of a base on its card, every linear layer in NF4."""
    first, last = share(shape.experts, ranks)
    layers = tuple(empty_layer(shape, first, last, device) for _ in range(shape.layers))
    for layer in layers:
        _fill(layer)
    return _base(shape, first, last, layers, device, dtype)


def random_host_base(
    shape: ModelShape, distinct: int, ranks: Ranks, device: torch.device, dtype: torch.dtype
) -> tuple[Base, SharedHost, list[LayerExperts]]:
    """The same with the experts in host memory: so many layers that differ, handed out in turn as the whole layers. Collective."""
    first, last = share(shape.experts, ranks)
    host = open_shared_host(with_layers(shape, distinct), ranks, device)
    kept = list(host.layers())
    for layer in kept:
        _fill(layer.experts(first, last))
    ranks.barrier()
    if device.type == "cuda":
        host.register()
    whole = list(itertools.islice(itertools.cycle(kept), shape.layers))
    mine = tuple(layer.experts(first, last) for layer in whole)
    return _base(shape, first, last, mine, device, dtype), host, whole


def _base(
    shape: ModelShape,
    first: int,
    last: int,
    layers: tuple[LayerExperts, ...],
    device: torch.device,
    dtype: torch.dtype,
) -> Base:
    inventory = inventory_of(shape)
    matrices = _random_matrices(inventory, dtype, device)
    return Base(inventory, first, last, layers, matrices, Report({}, 0, 0, 0, 0.0, False))


def _fill(layer: LayerExperts) -> None:
    """Random codes: a block of them again and again, since only the bytes count."""
    for packed in (layer.gate_up, layer.down):
        room = packed.packed
        codes = torch.randint(0, 256, (min(_FILL_BYTES, room.numel()),), dtype=torch.uint8, device=room.device)
        for part in room.split(codes.numel()):
            part.copy_(codes[: part.numel()])
        packed.absmax.fill_(_SCALE)


def _random_matrices(
    inventory: Inventory, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor | Matrix]:
    torch.manual_seed(7)  # what every process has whole must be the same
    found: dict[str, torch.Tensor | Matrix] = {}
    for name, (group, at) in inventory.matrices.items():
        if quantisable(inventory.shape, group, name):
            values = empty_packed(at.numbers, device)
            values.packed.random_(0, 256)
            values.absmax.fill_(_SCALE)
            found[name] = Matrix(values, at.shape)
        elif group == "norms":
            found[name] = torch.ones(at.shape, dtype=dtype, device=device)
        else:
            found[name] = torch.randn(at.shape, dtype=dtype, device=device) * 0.02
    return found


def _save(path: Path, sizes: dict[str, tuple[int, ...]], device: torch.device) -> None:
    weights = {name: torch.randn(size, device=device) * 0.02 for name, size in sizes.items()}
    save_file({name: each.to(torch.bfloat16).cpu() for name, each in weights.items()}, path)
