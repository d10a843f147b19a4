"""Checkpoints that are all header: real shapes, and files that take no disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.contract.shapes import QWEN3_235B, QWEN36_35B, ModelShape
from training.sharded.headers import INDEX, TensorAt
from training.sharded.inventory import Inventory, take_inventory, wanted_matrices

CONFIG_235B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "vocab_size": 151_936,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "tie_word_embeddings": False,
}


def kinds(shape: ModelShape) -> tuple[str, ...]:
    if not shape.linear_layers:
        return ("full_attention",) * shape.layers
    return tuple("linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(shape.layers))


def tensors(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every name and shape of the checkpoint, one matrix an expert and projection."""
    found = {name: wanted for name, (_, wanted) in wanted_matrices(shape, kinds(shape)).items()}
    wide, narrow = (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
    for layer in range(shape.layers):
        for expert in range(shape.experts):
            base = f"model.layers.{layer}.mlp.experts.{expert}"
            found[f"{base}.gate_proj.weight"] = found[f"{base}.up_proj.weight"] = wide
            found[f"{base}.down_proj.weight"] = narrow
    return found


def inventory(shape: ModelShape) -> Inventory:
    headers = {
        name: TensorAt(name, Path("model.safetensors"), 0, 2 * _product(wanted), "BF16", wanted)
        for name, wanted in tensors(shape).items()
    }
    return take_inventory(headers, shape, kinds(shape))


def write_235b(folder: Path, files: int = 118) -> None:
    """config.json, the index and sparse files of 470 GB together."""
    (folder / "config.json").write_text(json.dumps(CONFIG_235B))
    named = list(tensors(QWEN3_235B).items())
    each, weight_map = -(-len(named) // files), {}
    for number in range(files):
        name, header, end = f"model-{number + 1:05d}-of-{files:05d}.safetensors", {}, 0
        for tensor, wanted in named[number * each : (number + 1) * each]:
            size = 2 * _product(wanted)
            header[tensor] = {"dtype": "BF16", "shape": wanted, "data_offsets": [end, end + size]}
            end, weight_map[tensor] = end + size, name
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


__all__ = ["QWEN3_235B", "QWEN36_35B", "inventory", "kinds", "tensors", "write_235b"]
