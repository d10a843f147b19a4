"""A transformers model on a 4-bit base: the very text class, its modules and names, so that adapters, trainers and checks are those of an unquantised
one. Only where a weight would lie is another thing.

A packed weight's parameter is there by shape and type and holds nothing but NaN, in the memory of one number: who reads it past us gets a loss that says
so, and not a silent zero.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from training import experts
from training.contract.families import FAMILIES
from training.errors import LivenessError
from training.model import EXPERTS_IMPLEMENTATION
from training.sharded.execution import StreamedLayer
from training.sharded.headers import CheckpointError
from training.sharded.inventory import PARTS
from training.sharded.loader import Base
from training.sharded.ranks import Ranks
from training.sharded.storage import Matrix
from training.sharded.streaming import Layers


class _FrozenProduct(torch.autograd.Function):
    """x @ W^T with W unpacked for the call, and once more for the backward pass; nothing of it is kept in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Matrix) -> Tensor:
        ctx.matrix = matrix
        return x @ matrix.dequantise(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.matrix.dequantise(grad.dtype), None


class PackedLinear(nn.Linear):
    """A frozen linear layer in NF4. To PEFT it is a linear layer; it can carry an adapter, and cannot be merged into."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = matrix.shape
        self.matrix = matrix
        self.weight = absent(matrix.shape, dtype, matrix.values.packed.device)
        self.livery_packed = {"weight": matrix.values.packed}
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return _FrozenProduct.apply(x.to(self.weight.dtype), self.matrix)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in], new."""
        return self.matrix.dequantise(dtype)


def absent(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter that has a shape, and NaN for every number."""
    one = torch.full((), float("nan"), dtype=dtype, device=device)
    return nn.Parameter(one.expand(shape), requires_grad=False)


def assemble(base: Base, config: Any, *, family: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The family's text class on `base`: frozen, the routed experts' parameters absent and those of this rank's experts alone. `run_experts` must follow
    before it computes. CheckpointError if a parameter of the class is not in the base; LivenessError if the class is another one."""
    config = config.get_text_config()
    config.dtype = dtype
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", experts_implementation=EXPERTS_IMPLEMENTATION
        )
    known = FAMILIES[family]
    if type(model).__name__ != known.text_class:
        raise LivenessError(f"config.json makes a {type(model).__name__}; want {known.text_class}", stage="load")
    shape, mine = base.inventory.shape, base.last - base.first
    wide, narrow = (mine, 2 * shape.intermediate, shape.hidden), (mine, shape.hidden, shape.intermediate)
    for _, module in routed(model, family):
        module.gate_up_proj, module.down_proj = absent(wide, dtype, device), absent(narrow, dtype, device)
    for name, room in base.matrices.items():
        _put(model, name, room, dtype)
    if not shape.tied and "lm_head.weight" not in base.matrices:
        raise CheckpointError(
            "lm_head.weight: is not in the checkpoint, and config.json does not tie it to the embedding"
        )
    if shape.tied:
        model.lm_head.weight = model.get_input_embeddings().weight
    _require_whole(model)
    model.to(device)
    return model.eval().requires_grad_(False)


def routed(model: nn.Module, family: str) -> Iterator[tuple[str, Any]]:
    """(name, module) of the routed experts of each layer, from the first."""
    for name, module in model.named_modules():
        if type(module).__name__ == FAMILIES[family].experts_class:
            yield name, module


def run_experts(model: nn.Module, layers: Layers, inner: experts.Layer, base: Base, ranks: Ranks, family: str) -> int:
    """Let every layer's routed experts run on what `layers` brings; returns how many there are. May be called again, with other layers."""
    shape = base.inventory.shape
    wrapped = {id(list(experts.chain(wrapper))[-1].base_layer): wrapper for _, wrapper in experts.outer_wrappers(model)}
    modules = [module for _, module in routed(model, family)]
    for index, module in enumerate(modules):
        streamed = StreamedLayer(index, shape, layers, ranks, inner)
        module.livery_packed = {f"{part}_proj": base.experts[index].part(part).absmax for part in PARTS}
        if id(module) in wrapped:
            wrapped[id(module)].livery_layer = streamed
            vars(module).pop("forward", None)
        else:
            module.forward = functools.partial(streamed.without_adapter, module)
    return len(modules)


def _put(model: nn.Module, name: str, room: Tensor | Matrix, dtype: torch.dtype) -> None:
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(room, Matrix):
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, PackedLinear(room, dtype))
        return
    if tuple(getattr(module, leaf).shape) != tuple(room.shape):
        raise CheckpointError(
            f"{name}: has shape {list(room.shape)}, the class wants {list(getattr(module, leaf).shape)}; files and transformers are of two models"
        )
    setattr(module, leaf, nn.Parameter(room, requires_grad=False))


def _require_whole(model: nn.Module) -> None:
    lost = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if lost:
        raise CheckpointError(
            f"{lost[0]}: is in no file, and the model's class wants it ({len(lost)} such); fetch the model again"
        )
