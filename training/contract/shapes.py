"""A model's shape: the numbers of its config.json that decide its parameters, its memory and its arithmetic. Counts are exact.

Shape letters: H hidden, I intermediate, E experts, V vocabulary. Names of configuration keys as transformers 5.23 writes and older files have them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from training.contract.families import FAMILIES
from training.contract.recipe import Adapters, Model

_BYTES = {"bfloat16": 2, "float32": 4}
_WIDTH_STEP = 32


class ShapeError(ValueError):
    """A config.json does not say what is needed, or describes a model that these counts are not written for."""


@dataclass(frozen=True)
class ModelShape:
    """The text model alone: vision towers and MTP layers are neither loaded nor counted."""

    family: str
    hidden: int
    vocabulary: int
    attention_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    experts_per_token: int
    intermediate: int
    """Width of one routed expert."""
    linear_layers: int = 0
    """Layers with a gated delta net instead of attention."""
    key_heads: int = 0
    value_heads: int = 0
    key_head_dim: int = 0
    value_head_dim: int = 0
    convolution: int = 0
    shared_intermediate: int = 0
    """0 = no shared expert."""
    gated_query: bool = False
    """The query projection also makes an output gate of its own width."""
    tied: bool = False
    exact: bool = True
    """False for an estimate that was scaled from another model of the family."""

    @property
    def layers(self) -> int:
        return self.attention_layers + self.linear_layers

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_head_dim

    @property
    def expert_parameters(self) -> int:
        """All routed experts of all layers."""
        return self.layers * self.experts * 3 * self.intermediate * self.hidden

    @property
    def parameters(self) -> int:
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        shared = (3 * self.shared_intermediate + 1) * self.hidden if self.shared_intermediate else 0
        block = 2 * self.hidden + self.experts * self.hidden + shared
        mixers = self.attention_layers * self._attention() + self.linear_layers * self._linear_attention()
        return embeddings + self.hidden + self.layers * block + mixers + self.expert_parameters

    @property
    def active_parameters(self) -> int:
        """Weights that one token is multiplied with: its experts alone, and the head but not the look-up of the embedding."""
        lookup = 0 if self.tied else self.vocabulary * self.hidden
        idle = self.expert_parameters * (self.experts - self.experts_per_token) // self.experts
        return self.parameters - lookup - idle

    @property
    def linear_parameters(self) -> int:
        """The linear layers outside the routed experts that LoRA may adapt, tiny gates left out: what of the rest may be kept in 4 bits."""
        return sum(
            layers * size_in * size_out
            for group, family in FAMILIES[self.family].linears.items()
            for leaf, (size_in, size_out) in self.linears(group).items()
            if leaf in family.leaves and (layers := self._layers_of(group))
        )

    def lora_parameters(self, adapters: Adapters) -> dict[str, int]:
        """Trainable parameters a group at the adapters' rank, A and B together; groups that this model lacks have 0."""
        return {group: adapters.rank * sum(self._widths(group, adapters)) for group in adapters.groups}

    def active_lora_parameters(self, adapters: Adapters) -> int:
        """Those that one token meets."""
        counts = self.lora_parameters(adapters)
        routed = counts.pop("routed_experts", 0)
        return sum(counts.values()) + routed * self.experts_per_token // self.experts

    def bytes_per_weight(self, dtype: str) -> int:
        return _BYTES[dtype]

    def _attention(self) -> int:
        # The norms of query and key, besides the four projections.
        return sum(x * y for x, y in self.linears("attention").values()) + 2 * self.head_dim

    def _linear_attention(self) -> int:
        projections = sum(x * y for x, y in self.linears("linear_attention").values())
        convolved = (2 * self.key_width + self.value_width) * self.convolution
        return projections + convolved + 2 * self.value_heads + self.value_head_dim

    def _widths(self, group: str, adapters: Adapters) -> Iterator[int]:
        """Input plus output width of every adapted matrix of the group: what one unit of rank costs."""
        if group == "routed_experts":
            yield self.layers * self.experts * (self.hidden + 2 * self.intermediate)
            yield self.layers * self.experts * (self.intermediate + self.hidden)
            return
        family = FAMILIES[self.family]
        if group not in family.linears:
            return
        linears = self.linears(group)
        for leaf in family.leaves(group, gate_projections=adapters.gate_projections):
            yield self._layers_of(group) * sum(linears[leaf])

    def _layers_of(self, group: str) -> int:
        layers = {None: self.layers, "full_attention": self.attention_layers, "linear_attention": self.linear_layers}
        return layers[FAMILIES[self.family].linears[group].layer_type]

    def linears(self, group: str) -> dict[str, tuple[int, int]]:
        """(in, out) of each linear layer of a group, by its leaf name."""
        H, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        if group == "attention":
            made = queries * (2 if self.gated_query else 1)
            return {"q_proj": (H, made), "k_proj": (H, keys), "v_proj": (H, keys), "o_proj": (queries, H)}
        if group == "linear_attention":
            return {
                "in_proj_qkv": (H, 2 * self.key_width + self.value_width),
                "in_proj_z": (H, self.value_width),
                "in_proj_a": (H, self.value_heads),
                "in_proj_b": (H, self.value_heads),
                "out_proj": (self.value_width, H),
            }
        inner = self.shared_intermediate
        return {"gate_proj": (H, inner), "up_proj": (H, inner), "down_proj": (inner, H)}


QWEN36_35B = ModelShape(
    family="qwen3_5_moe",
    hidden=2048,
    vocabulary=248_320,
    attention_layers=10,
    heads=16,
    kv_heads=2,
    head_dim=256,
    experts=256,
    experts_per_token=8,
    intermediate=512,
    linear_layers=30,
    key_heads=16,
    value_heads=32,
    key_head_dim=128,
    value_head_dim=128,
    convolution=4,
    shared_intermediate=512,
    gated_query=True,
)
QWEN3_235B = ModelShape(
    family="qwen3_moe",
    hidden=4096,
    vocabulary=151_936,
    attention_layers=94,
    heads=64,
    kv_heads=4,
    head_dim=128,
    experts=128,
    experts_per_token=8,
    intermediate=1536,
)
TINY = replace(
    QWEN36_35B,
    hidden=64,
    vocabulary=1536,
    attention_layers=1,
    heads=4,
    head_dim=16,
    experts=8,
    experts_per_token=2,
    intermediate=32,
    linear_layers=3,
    key_heads=2,
    value_heads=4,
    key_head_dim=16,
    value_head_dim=16,
    shared_intermediate=32,
)
KNOWN = (QWEN36_35B, QWEN3_235B, TINY)


def shape_of(model: Model) -> ModelShape:
    """The shape of a model whose config.json is not at hand: a known one of the family whose weights have about that size, else an estimate
    (`exact` is False) scaled from the nearest. The files on the hub hold up to 4 % more than the text model: vision and MTP layers."""
    size = model.size_gb * 1e9 / _BYTES[model.dtype]
    family = [shape for shape in KNOWN if shape.family == model.family] or [
        replace(shape, family=model.family, exact=False) for shape in KNOWN
    ]
    nearest = min(family, key=lambda shape: abs(math.log(size / shape.parameters)))
    if 0.97 <= size / nearest.parameters <= 1.06:
        return nearest
    # Widths scale by the root: embeddings, experts and projections are all products of two of them.
    scale = math.sqrt(size / nearest.parameters)
    widths = (
        "hidden",
        "vocabulary",
        "head_dim",
        "intermediate",
        "key_head_dim",
        "value_head_dim",
        "shared_intermediate",
    )
    # In whole steps, as real ones are: no kernel takes a width of 61, and a probe at that shape would blame the card.
    scaled: dict[str, Any] = {name: _stepped(value * scale) for name in widths if (value := getattr(nearest, name))}
    hidden = [scaled["hidden"] + steps * _WIDTH_STEP for steps in range(-4, 5)]
    candidates = [replace(nearest, exact=False, **scaled | {"hidden": each}) for each in hidden if each > 0]
    return min(candidates, key=lambda shape: abs(shape.parameters - size))


def _stepped(width: float) -> int:
    return _WIDTH_STEP * max(1, round(width / _WIDTH_STEP))


def shape_in(folder: Path, model: Model) -> ModelShape:
    """By the config.json in `folder`, if it is there by now and known; else by family and size."""
    try:
        return read_shape((folder / "config.json").read_bytes())
    except (OSError, ShapeError):
        return shape_of(model)


def read_shape(config: bytes | str, subject: str = "config.json") -> ModelShape:
    """The shape that a model's own config.json gives. ShapeError names what is missing or not known."""
    try:
        data = json.loads(config)
    except ValueError as error:
        raise ShapeError(f"{subject}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ShapeError(f"{subject}: want an object, seen {type(data).__name__}")
    text = data.get("text_config") or data
    family = str(text.get("model_type", "")).removesuffix("_text")
    if family not in FAMILIES:
        raise ShapeError(f"{subject}: model_type: seen '{family}', want one of {', '.join(FAMILIES)}")
    if text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1:
        raise ShapeError(
            f"{subject}: some layers have a dense MLP (mlp_only_layers, decoder_sparse_step); not known here"
        )
    tied = bool(data.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    number = _Numbers(text, subject)
    linear = _linear_layers(text, number)
    gated_delta_net = FAMILIES[family].packing == "gated_delta_net"
    return ModelShape(
        family=family,
        hidden=number("hidden_size"),
        vocabulary=number("vocab_size"),
        attention_layers=number("num_hidden_layers") - linear,
        heads=number("num_attention_heads"),
        kv_heads=number("num_key_value_heads"),
        head_dim=number("head_dim"),
        experts=number("num_experts", "num_local_experts"),
        experts_per_token=number("num_experts_per_tok"),
        intermediate=number("moe_intermediate_size"),
        linear_layers=linear,
        key_heads=number("linear_num_key_heads") if linear else 0,
        value_heads=number("linear_num_value_heads") if linear else 0,
        key_head_dim=number("linear_key_head_dim") if linear else 0,
        value_head_dim=number("linear_value_head_dim") if linear else 0,
        convolution=number("linear_conv_kernel_dim") if linear else 0,
        shared_intermediate=number("shared_expert_intermediate_size") if gated_delta_net else 0,
        gated_query=gated_delta_net,
        tied=tied,
    )


def _linear_layers(text: Mapping[str, Any], number: _Numbers) -> int:
    kinds = text.get("layer_types")
    if kinds is not None:
        return sum(kind == "linear_attention" for kind in kinds)
    interval = text.get("full_attention_interval")
    return number("num_hidden_layers") * (interval - 1) // interval if interval else 0


@dataclass(frozen=True)
class _Numbers:
    """Whole numbers of a configuration by any of their names."""

    text: Mapping[str, Any]
    subject: str

    def __call__(self, *names: str) -> int:
        for name in names:
            value = self.text.get(name)
            if isinstance(value, int) and value > 0:
                return value
        raise ShapeError(f"{self.subject}: {names[0]}: seen {self.text.get(names[0])!r}, want a whole number above 0")
