"""What each tensor of a checkpoint is, and that none is missing, left over or of another shape. From headers and config.json: no torch.

Names are the text class's (`model.layers.0…`). A vision-language checkpoint has `model.language_model.` instead, and holds a vision tower and
MTP layers, which are not loaded. Routed experts lie either one matrix an expert and projection, or fused as transformers holds them.

Shape letters: H hidden, I intermediate, E experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from training.contract.families import FAMILIES
from training.contract.shapes import ModelShape, read_shape
from training.sharded.headers import CheckpointError, TensorAt, read_headers

Part = Literal["gate_up", "down"]
PARTS: tuple[Part, ...] = ("gate_up", "down")
FLOATS = ("BF16", "F16", "F32")
ROUTED = "routed_experts"
_LEFT_OUT = re.compile(r"(model\.)?(visual|mtp)\.")
_EXPERTS = "mlp.experts"


class Stretch(NamedTuple):
    """Numbers of one stored tensor, and where they go in a rank's fused part."""

    tensor: TensorAt
    first: int
    numbers: int
    place: int


@dataclass(frozen=True)
class Inventory:
    """A whole checkpoint, sorted."""

    shape: ModelShape
    experts: Mapping[tuple[int, Part], tuple[TensorAt, ...]]
    """Per layer and part: the fused tensor alone, or expert after expert (for gate_up: gate, then up)."""
    matrices: Mapping[str, tuple[str, TensorAt]]
    """Everything else that is loaded, by the text class's name: its group and where it lies."""
    left_out: tuple[TensorAt, ...]

    @property
    def bytes(self) -> int:
        """Of what is loaded, as stored."""
        routed = sum(tensor.bytes for sources in self.experts.values() for tensor in sources)
        return routed + sum(tensor.bytes for _, tensor in self.matrices.values())

    def stretches(self, layer: int, part: Part, first: int, last: int) -> Iterator[Stretch]:
        """Where the experts [first, last) of a layer's part come from."""
        sources, each = self.experts[layer, part], part_numbers(self.shape, part)
        if len(sources) == 1:
            yield Stretch(sources[0], first * each, (last - first) * each, 0)
            return
        pieces = 2 if part == "gate_up" else 1
        for place, tensor in enumerate(sources[first * pieces : last * pieces]):
            yield Stretch(tensor, 0, tensor.numbers, place * tensor.numbers)


def read_inventory(model: Path) -> Inventory:
    """What a model folder holds, from its config.json and headers. CheckpointError or ShapeError says what is wrong with it."""
    try:
        config = (model / "config.json").read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{model.name}: config.json cannot be read: {error.strerror}; want a model's folder"
        ) from None
    shape = read_shape(config)
    return take_inventory(read_headers(model), shape, layer_kinds(json.loads(config), shape))


def part_numbers(shape: ModelShape, part: Part) -> int:
    """Weights of one expert in that part: 2·I·H or H·I."""
    return (2 if part == "gate_up" else 1) * shape.intermediate * shape.hidden


def take_inventory(headers: Mapping[str, TensorAt], shape: ModelShape, kinds: tuple[str, ...]) -> Inventory:
    """Sort the tensors of `headers`; `kinds` has each layer's type (see `layer_kinds`). CheckpointError names the first tensor that is missing,
    that nobody takes, or whose shape or type is not the wanted one."""
    text = {text_name(name): tensor for name, tensor in headers.items() if not _LEFT_OUT.match(name)}
    left_out = tuple(tensor for name, tensor in headers.items() if _LEFT_OUT.match(name))
    if shape.tied:
        text.pop("lm_head.weight", None)  # some exports repeat the embedding under the head's name
    matrices = {}
    for name, (group, wanted) in wanted_matrices(shape, kinds).items():
        matrices[name] = (group, _take(text, name, wanted))
    experts = {
        (layer, part): _take_experts(text, shape, layer, part) for layer in range(shape.layers) for part in PARTS
    }
    if text:
        raise CheckpointError(_unknown(sorted(text), text, shape))
    return Inventory(shape, experts, matrices, left_out)


def text_name(name: str) -> str:
    return name.replace("model.language_model.", "model.", 1) if name.startswith("model.language_model.") else name


def layer_kinds(config: Mapping[str, object], shape: ModelShape) -> tuple[str, ...]:
    """`full_attention` or `linear_attention` for each layer, as config.json has it or as its interval says."""
    text = config.get("text_config") or config
    assert isinstance(text, Mapping)
    kinds = text.get("layer_types")
    if kinds and shape.linear_layers:
        return tuple(map(str, kinds))
    interval = int(text.get("full_attention_interval") or 0) if shape.linear_layers else 0
    return tuple(
        "linear_attention" if interval and (layer + 1) % interval else "full_attention" for layer in range(shape.layers)
    )


def wanted_matrices(shape: ModelShape, kinds: tuple[str, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Group and shape of every tensor outside the routed experts, by name."""
    H, V = shape.hidden, shape.vocabulary
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": ("embeddings", (V, H))}
    if not shape.tied:
        wanted["lm_head.weight"] = ("embeddings", (V, H))
    wanted["model.norm.weight"] = ("norms", (H,))
    for layer, kind in enumerate(kinds):
        base = f"model.layers.{layer}"
        wanted |= {f"{base}.{norm}.weight": ("norms", (H,)) for norm in ("input_layernorm", "post_attention_layernorm")}
        wanted[f"{base}.mlp.gate.weight"] = ("router", (shape.experts, H))
        wanted |= dict(_mixer(shape, base, kind))
        if shape.shared_intermediate:
            wanted |= dict(_linears(shape, "shared_expert", f"{base}.mlp.shared_expert"))
            wanted[f"{base}.mlp.shared_expert_gate.weight"] = ("router", (1, H))
    return wanted


def _mixer(shape: ModelShape, base: str, kind: str) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    if kind != "linear_attention":
        yield from _linears(shape, "attention", f"{base}.self_attn")
        for norm in ("q_norm", "k_norm"):
            yield f"{base}.self_attn.{norm}.weight", ("norms", (shape.head_dim,))
        return
    place = f"{base}.linear_attn"
    yield from _linears(shape, "linear_attention", place)
    convolved = 2 * shape.key_width + shape.value_width
    yield f"{place}.conv1d.weight", ("state", (convolved, 1, shape.convolution))
    yield f"{place}.A_log", ("state", (shape.value_heads,))
    yield f"{place}.dt_bias", ("state", (shape.value_heads,))
    yield f"{place}.norm.weight", ("norms", (shape.value_head_dim,))


def _linears(shape: ModelShape, group: str, place: str) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    for leaf, (size_in, size_out) in shape.linears(group).items():
        yield f"{place}.{leaf}.weight", (group, (size_out, size_in))


def quantisable(shape: ModelShape, group: str, name: str) -> bool:
    """Whether a matrix outside the routed experts may be kept in 4 bits: the linear layers that LoRA may adapt, the tiny gates left alone."""
    linears = FAMILIES[shape.family].linears.get(group)
    return linears is not None and name.removesuffix(".weight").rpartition(".")[2] in linears.leaves


def _take_experts(text: dict[str, TensorAt], shape: ModelShape, layer: int, part: Part) -> tuple[TensorAt, ...]:
    H, I, E = shape.hidden, shape.intermediate, shape.experts  # noqa: E741  the legend's letters
    base = f"model.layers.{layer}.{_EXPERTS}"
    fused = f"{base}.{part}_proj"
    if fused in text:
        return (_take(text, fused, (E, 2 * I, H) if part == "gate_up" else (E, H, I)),)
    if part == "down":
        return tuple(_take(text, f"{base}.{expert}.down_proj.weight", (H, I)) for expert in range(E))
    return tuple(
        _take(text, f"{base}.{expert}.{half}_proj.weight", (I, H)) for expert in range(E) for half in ("gate", "up")
    )


def _take(text: dict[str, TensorAt], name: str, wanted: tuple[int, ...]) -> TensorAt:
    tensor = text.pop(name, None)
    if tensor is None:
        near = next((other for other in text if _EXPERTS in other), "")
        hint = f"; its experts are called otherwise, such as {near}" if near and _EXPERTS in name else ""
        raise CheckpointError(f"{name}: is in no file, and config.json wants it{hint}; fetch the model again")
    if tensor.shape != wanted:
        raise CheckpointError(
            f"{tensor.file.name}: {tensor.name} has shape {list(tensor.shape)}, config.json wants {list(wanted)}; files and config.json are of two models"
        )
    if tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{tensor.file.name}: {tensor.name} is {tensor.dtype}; want {', '.join(FLOATS)}: take the model's unquantised weights"
        )
    return tensor


def _unknown(names: list[str], text: Mapping[str, TensorAt], shape: ModelShape) -> str:
    name = next((each for each in names if _EXPERTS in each), names[0])
    what = "is a routed expert's and would stay unquantised" if _EXPERTS in name else "has no place in the model"
    return (
        f"{text[name].file.name}: {name} {what} ({len(names)} such tensors); {shape.family} with the layers of config.json has no such name: "
        "files and config.json are of two models, or the family's entry lacks it"
    )
