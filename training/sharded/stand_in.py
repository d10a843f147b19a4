"""What frameworks do with a base that no card holds: every expert's projection is a module of its own in pageable host memory, fetched when it is called:
in the forward pass, in its recomputation and in the backward pass. To measure ours against; nothing trains on it.

Shape letters: T tokens, k experts a token, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from training import experts
from training.contract.shapes import ModelShape
from training.experts import Active
from training.sharded.execution import gather_adapter
from training.sharded.ranks import Ranks
from training.sharded.storage import LayerExperts, Matrix, Packed


def install(model: nn.Module, layers: list[LayerExperts], shape: ModelShape, ranks: Ranks) -> None:
    """Let every layer's routed experts run so, on pageable copies of `layers`."""
    wrappers = [wrapper for _, wrapper in experts.outer_wrappers(model)]
    for wrapper, layer in zip(wrappers, layers, strict=True):
        copies = [Packed(part.packed.clone(), part.absmax.clone()) for part in (layer.gate_up, layer.down)]
        wrapper.livery_layer = PageableModules(LayerExperts(layer.first, layer.last, *copies), shape, ranks)


class PageableModules:
    """A whole routed layer (see `training.experts.Layer`) as 3·E small modules."""

    def __init__(self, layer: LayerExperts, shape: ModelShape, ranks: Ranks) -> None:
        self._layer, self._shape, self._ranks = layer, shape, ranks

    def __call__(self, experts: Any, hidden_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, active: Active) -> Tensor:
        E, H, I = self._shape.experts, self._shape.hidden, self._shape.intermediate  # noqa: E741  the legend's letters
        dtype = hidden_TH.dtype
        up, down = (gather_adapter(active[name][0], self._ranks, dtype) for name in ("gate_up_proj", "down_proj"))
        A1, B1, A2, B2 = (each.to(dtype) for lora in (up, down) for each in (lora.a_ERX(), lora.b_EOR()))
        out = torch.zeros_like(hidden_TH)
        order = torch.argsort(expert_Tk.flatten(), stable=True)
        counts = torch.bincount(expert_Tk.flatten(), minlength=E).tolist()
        for expert, places in enumerate(order.split(counts)):
            if not len(places):
                continue
            token = places // expert_Tk.shape[1]
            x = hidden_TH[token]
            both = self._layer.gate_up.part(expert * 2 * I * H, 2 * I * H)
            halves = [_Fetched.apply(x, both.part(half * I * H, I * H), (I, H)) for half in (0, 1)]
            gate_up = torch.cat(halves, 1) + (x @ A1[expert].t()) @ B1[expert].t() * up.scaling
            h = nn.functional.silu(gate_up[:, :I]) * gate_up[:, I:]
            y = _Fetched.apply(h, self._layer.down.part(expert * H * I, H * I), (H, I))
            y = y + (h @ A2[expert].t()) @ B2[expert].t() * down.scaling
            out = out.index_add(0, token, y * weight_Tk.flatten()[places].unsqueeze(-1).to(dtype))
        return out


class _Fetched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Packed, shape: tuple[int, int]) -> Tensor:
        ctx.values, ctx.shape = values, shape
        return x @ _fetch(values, shape, x).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ _fetch(ctx.values, ctx.shape, grad), None, None


def _fetch(values: Packed, shape: tuple[int, int], like: Tensor) -> Tensor:
    there = Packed(values.packed.to(like.device), values.absmax.to(like.device))
    return Matrix(there, shape).dequantise(like.dtype)
