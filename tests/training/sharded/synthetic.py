"""Checkpoints that are all header: real shapes, and files that take no disk."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from training.contract.shapes import QWEN3_235B
from training.sharded.headers import INDEX
from training.sharded.synthetic import tensors_of

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


def write_235b(folder: Path, files: int = 118) -> None:
    """config.json, the index and sparse files of 470 GB together."""
    (folder / "config.json").write_text(json.dumps(CONFIG_235B))
    named = list(tensors_of(QWEN3_235B).items())
    each, weight_map = -(-len(named) // files), {}
    for number in range(files):
        name, header, end = f"model-{number + 1:05d}-of-{files:05d}.safetensors", {}, 0
        for tensor, wanted in named[number * each : (number + 1) * each]:
            size = 2 * math.prod(wanted)
            header[tensor] = {"dtype": "BF16", "shape": wanted, "data_offsets": [end, end + size]}
            end, weight_map[tensor] = end + size, name
        text = json.dumps(header).encode()
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
