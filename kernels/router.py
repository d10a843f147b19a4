"""The router's choice of experts, and its gradient, each in one kernel beside its plain twin.

Shape letters: T tokens, E experts, k chosen of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import ceil_div, power_of_2
from kernels.rows import blank, launch, own_dtype, rows_of, takes_kernel, tile, wide


@own_dtype
def top_k_router(logits_TE: Tensor, k: int, *, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """(weights [T, k] in the logits' dtype, experts [T, k] int64): softmax over E in float32, the k largest in falling order, of equal ones
    the lowest expert first; `normalise` makes a token's weights sum to 1. The weights carry the logits' gradient."""
    if logits_TE.ndim != 2 or not 1 <= k <= logits_TE.shape[1]:
        raise ValueError(f"k: {k}, logits_TE: {tuple(logits_TE.shape)}; want [tokens, experts] and k from 1 to experts")
    if not takes_kernel(logits_TE, logits_TE.shape[1]):
        return plain_top_k_router(logits_TE, k, normalise)
    weight_Tk, expert_Tk = _TopK.apply(logits_TE, k, normalise)
    return weight_Tk, expert_Tk


def plain_top_k_router(logits_TE: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    share_TE = torch.softmax(wide(logits_TE), dim=-1)
    # A stable sort, for topk does not say which of two equal ones comes first.
    expert_Tk = logits_TE.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    weight_Tk = share_TE.gather(1, expert_Tk)
    if normalise:
        weight_Tk = weight_Tk / weight_Tk.sum(-1, keepdim=True)
    return weight_Tk.to(logits_TE.dtype), expert_Tk


class _TopK(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        logits, (T, E) = rows_of(logits_TE), logits_TE.shape
        weight_Tk = blank(logits_TE, T, k)
        expert_Tk = blank(logits_TE, T, k, dtype=torch.int64)
        height, width, warps = tile(E, 256, a_thread=8)
        constants = (logits.outer, E, k, power_of_2(k), height, width, normalise)
        launch(choose, (ceil_div(T, height),), (logits.tensor, weight_Tk, expert_Tk), (T,), constants, warps)
        ctx.save_for_backward(logits.tensor, expert_Tk)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(expert_Tk)
        return weight_Tk, expert_Tk

    @staticmethod
    def backward(ctx: Any, dweight_Tk: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        logits_TE, expert_Tk = ctx.saved_tensors
        logits, (T, E), k = rows_of(logits_TE), logits_TE.shape, expert_Tk.shape[1]
        dlogits_TE = blank(logits_TE, T, E)
        height, width, warps = tile(E, 256, a_thread=8)
        constants = (logits.outer, E, k, height, width, ctx.normalise)
        tensors = (logits.tensor, expert_Tk, dweight_Tk.contiguous(), dlogits_TE)
        launch(choose_backward, (ceil_div(T, height),), tensors, (T,), constants, warps)
        return dlogits_TE, None, None


@triton.jit(do_not_specialize=["T"])
def choose(
    logits,
    weight,
    expert,
    T,
    LO: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    row, es, ks = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BE)[None, :], tl.arange(0, K2)[None, :]
    x, largest = _logits(logits, row, es, T, LO, E)
    left = x
    share, index = tl.zeros((BM, K2), tl.float32), tl.zeros((BM, K2), tl.int32)
    for choice in tl.static_range(K):
        best = tl.max(left, 1)
        # Of a row of NaN no expert is the best: the last one then, so that no index points out of the experts.
        at = tl.minimum(tl.min(tl.where(left == best[:, None], es, E - 1), 1), E - 1)
        share = tl.where(ks == choice, tl.exp(best - largest)[:, None], share)
        index = tl.where(ks == choice, at[:, None], index)
        left = tl.where(es == at[:, None], -float("inf"), left)
    if NORMALISE:
        total = tl.sum(share, 1)
    else:
        total = tl.sum(tl.exp(x - largest[:, None]), 1)
    mask = (row < T)[:, None] & (ks < K)
    to = row[:, None].to(tl.int64) * K + ks
    tl.store(weight + to, (share / total[:, None]).to(weight.dtype.element_ty), mask=mask)
    tl.store(expert + to, index.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["T"])
def choose_backward(
    logits,
    expert,
    dweight,
    dlogits,
    T,
    LO: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BE: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """dlogits = share·(d − Σ share·d), d the weights' gradient where an expert was chosen; normalised shares are a softmax of the chosen alone."""
    row, es = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BE)[None, :]
    x, largest = _logits(logits, row, es, T, LO, E)
    d, chosen = tl.zeros((BM, BE), tl.float32), tl.zeros((BM, BE), tl.float32)
    for choice in tl.static_range(K):
        at = row.to(tl.int64) * K + choice
        this = es == tl.load(expert + at, mask=row < T, other=0)[:, None]
        d = tl.where(this, tl.load(dweight + at, mask=row < T, other=0.0).to(tl.float32)[:, None], d)
        chosen = tl.where(this, 1.0, chosen)
    share = tl.exp(x - largest[:, None])
    if NORMALISE:
        share *= chosen
    share /= tl.sum(share, 1)[:, None]
    result = share * (d - tl.sum(share * d, 1)[:, None])
    mask = (row < T)[:, None] & (es < E)
    tl.store(dlogits + row[:, None].to(tl.int64) * E + es, result.to(dlogits.dtype.element_ty), mask=mask)


@triton.jit
def _logits(logits, row, es, T, LO: tl.constexpr, E: tl.constexpr):
    """(logits of the rows, −inf where there is no expert; each row's largest)."""
    inside = (row < T)[:, None] & (es < E)
    x = tl.load(logits + row[:, None].to(tl.int64) * LO + es, mask=inside, other=0.0).to(tl.float32)
    x = tl.where(es < E, x, -float("inf"))
    return x, tl.max(x, 1)
