"""The routed experts of a 4-bit base: a layer's weights are unpacked for one call, and the adapters of all ranks are brought together for it.

What computes is whatever computes an unquantised layer (`training.experts.Layer`). The unpacked weights belong to that call: under checkpointing they go
with the forward pass and are unpacked again for the recomputation, which keeps them until its backward pass is done.

Shape letters: E experts, n of this rank, H hidden, I intermediate, R rank of the adapter, X in, O out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from training import experts
from training.contract.shapes import ModelShape
from training.experts import Active, Lora
from training.sharded.ranks import Ranks
from training.sharded.storage import LayerExperts
from training.sharded.streaming import Layers


@dataclass(frozen=True)
class Unpacked:
    """A layer's experts as `training.experts.Layer` wants them."""

    gate_up_proj: Tensor
    """[E, 2I, H]"""
    down_proj: Tensor
    """[E, H, I]"""
    num_experts: int
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]


@dataclass
class StreamedLayer:
    """One layer's routed computation (see `training.experts.Layer`) on packed weights."""

    index: int
    shape: ModelShape
    source: Layers
    ranks: Ranks
    inner: experts.Layer

    def __call__(self, experts: Any, hidden_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, active: Active) -> Tensor:
        dtype = experts.gate_up_proj.dtype
        whole = {name: [gather_adapter(lora, self.ranks, dtype) for lora in loras] for name, loras in active.items()}
        return self.inner(self.unpacked(experts), hidden_TH, expert_Tk, weight_Tk, whole)

    def without_adapter(self, experts: Any, hidden_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
        return self(experts, hidden_TH, expert_Tk, weight_Tk, {})

    @torch.no_grad()
    def unpacked(self, experts: Any) -> Unpacked:
        """The layer's weights in the model's dtype; `experts` is the module that they stand for."""
        with self.source.use(self.index) as layer:
            gate_up, down = unpack(layer, self.shape, experts.gate_up_proj.dtype)
        return Unpacked(gate_up, down, self.shape.experts, experts.act_fn, experts._apply_gate)


def unpack(layer: LayerExperts, shape: ModelShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I] of a whole layer, new on its device."""
    E, H, I = layer.last - layer.first, shape.hidden, shape.intermediate  # noqa: E741  the legend's letters
    like = {"dtype": dtype, "device": layer.gate_up.packed.device}
    gate_up = layer.gate_up.dequantise(torch.empty(E, 2 * I, H, **like))
    return gate_up, layer.down.dequantise(torch.empty(E, H, I, **like))


def gather_adapter(lora: Lora, ranks: Ranks, dtype: torch.dtype) -> Lora:
    """The adapter of all experts from every rank's own, in the dtype that the kernels multiply in. A gradient goes back to each rank as the mean over
    the ranks, as for what every rank has whole."""
    if ranks.size == 1:
        return lora
    A, B = _Gather.apply(lora.A, lora.B, lora.num_experts, ranks, dtype)
    return replace(lora, A=A, B=B, num_experts=lora.num_experts * ranks.size)


class _Gather(torch.autograd.Function):
    """A [n·R, X] and B [O, R·n], the expert fastest, to [E·R, X] and [O, R·E]; that B lies in memory as its transpose, as the kernels read it."""

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, n: int, ranks: Ranks, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        ctx.n, ctx.ranks, ctx.dtypes = n, ranks, (A.dtype, B.dtype)
        rank, out = A.shape[0] // n, B.shape[0]
        whole_A = A.new_empty(ranks.size * A.shape[0], A.shape[1], dtype=dtype)
        ranks.gather(whole_A, A.to(dtype))
        whole_B = B.new_empty(ranks.size * n, rank, out, dtype=dtype)
        ranks.gather(whole_B, B.view(out, rank, n).permute(2, 1, 0).to(dtype).contiguous())
        return whole_A, whole_B.transpose(0, 1).reshape(-1, out).t()

    @staticmethod
    def backward(ctx: Any, grad_A: Tensor, grad_B: Tensor) -> tuple[Any, ...]:
        n, ranks = ctx.n, ctx.ranks
        rank, out = grad_A.shape[0] // (n * ranks.size), grad_B.shape[0]
        # Summed in float32: the parts of a mean over many tokens would be rounded away in bfloat16.
        whole_A, mine_A = grad_A.float().contiguous(), grad_A.new_empty(n * rank, grad_A.shape[1], dtype=torch.float32)
        ranks.scatter_mean(mine_A, whole_A)
        whole_B = grad_B.float().t().reshape(rank, -1, out).transpose(0, 1).contiguous()
        mine_B = grad_B.new_empty(n, rank, out, dtype=torch.float32)
        ranks.scatter_mean(mine_B, whole_B)
        dtype_A, dtype_B = ctx.dtypes
        return mine_A.to(dtype_A), mine_B.permute(2, 1, 0).reshape(out, -1).to(dtype_B), None, None, None
