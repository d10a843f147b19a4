"""The norms of an attention layer's heads and their rotation in one kernel, forward and backward, beside their plain twins.

Shape letters: T tokens, H heads, D numbers of a head, R of them rotated (the first ones), M = T·H rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import ceil_div
from kernels.norms import at_rows, plain_rms_norm, row_scale
from kernels.rows import blank, frozen, launch, own_dtype, rows_of, takes_kernel, tile


@own_dtype
def query_gate_norm_rope(
    qg_THD2: Tensor, weight: Tensor, cos_TR: Tensor, sin_TR: Tensor, eps: float, *, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """(normed and rotated queries [T, H, D], gates [T, H, D]) of a projection whose heads are [query | gate], 2·D each.

    The gates are a view of `qg_THD2`. `weight` [D] frozen; cos and sin [T, R] as transformers makes them, no gradient.
    """
    D = _check(qg_THD2, cos_TR, sin_TR, halves=2)
    weight = frozen("weight", weight, (D,))
    if not takes_kernel(qg_THD2, D):
        return plain_query_gate_norm_rope(qg_THD2, weight, cos_TR, sin_TR, eps, zero_centered)
    query_THD, gate_THD = _QueryGateNormRope.apply(qg_THD2, weight, cos_TR, sin_TR, eps, zero_centered)
    return query_THD, gate_THD


@own_dtype
def norm_rope(
    x_THD: Tensor, weight: Tensor, cos_TR: Tensor, sin_TR: Tensor, eps: float, *, zero_centered: bool
) -> Tensor:
    """Each head of `x_THD` normed over its D numbers, the first R of them rotated: [T, H, D]."""
    D = _check(x_THD, cos_TR, sin_TR, halves=1)
    weight = frozen("weight", weight, (D,))
    if not takes_kernel(x_THD, D):
        return plain_norm_rope(x_THD, weight, cos_TR, sin_TR, eps, zero_centered)
    y_THD: Tensor = _NormRope.apply(x_THD, weight, cos_TR, sin_TR, eps, zero_centered)
    return y_THD


def plain_query_gate_norm_rope(
    qg_THD2: Tensor, weight: Tensor, cos_TR: Tensor, sin_TR: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    query_THD, gate_THD = qg_THD2.chunk(2, dim=-1)
    return plain_norm_rope(query_THD, weight, cos_TR, sin_TR, eps, zero_centered), gate_THD


def plain_norm_rope(
    x_THD: Tensor, weight: Tensor, cos_TR: Tensor, sin_TR: Tensor, eps: float, zero_centered: bool
) -> Tensor:
    y_THD = plain_rms_norm(x_THD, weight, eps, zero_centered)
    R = cos_TR.shape[-1]
    turned, rest = y_THD[..., :R], y_THD[..., R:]
    low, high = turned.chunk(2, dim=-1)
    cos, sin = cos_TR[:, None].to(x_THD.dtype), sin_TR[:, None].to(x_THD.dtype)
    return torch.cat((turned * cos + torch.cat((-high, low), dim=-1) * sin, rest), dim=-1)


def _check(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, halves: int) -> int:
    """D, the numbers of a head; ValueError where shapes do not fit together."""
    if x_THD.ndim != 3 or x_THD.shape[-1] % halves:
        raise ValueError(f"heads: shape {tuple(x_THD.shape)}; want [tokens, heads, {halves}·D]")
    T, D = x_THD.shape[0], x_THD.shape[2] // halves
    R = cos_TR.shape[-1]
    if cos_TR.shape != (T, R) or sin_TR.shape != (T, R) or R % 2 or not 0 < R <= D:
        raise ValueError(
            f"cos, sin: shapes {tuple(cos_TR.shape)}, {tuple(sin_TR.shape)}; want both ({T}, R), R even and at most {D}"
        )
    return D


class _QueryGateNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qg_THD2: Tensor, weight: Tensor, cos_TR: Tensor, sin_TR: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        D = qg_THD2.shape[2] // 2
        query_THD = _forward(ctx, qg_THD2, D, weight, cos_TR, sin_TR, eps, zero_centered)
        return query_THD, qg_THD2[..., D:]

    @staticmethod
    def backward(ctx: Any, dquery_THD: Tensor, dgate_THD: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, dquery_THD, dgate_THD), None, None, None, None, None


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_THD: Tensor, weight: Tensor, cos_TR: Tensor, sin_TR: Tensor, eps: float, zero_centered: bool
    ) -> Tensor:
        return _forward(ctx, x_THD, x_THD.shape[2], weight, cos_TR, sin_TR, eps, zero_centered)

    @staticmethod
    def backward(ctx: Any, dy_THD: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, dy_THD, None), None, None, None, None, None


def _forward(
    ctx: Any, x_THX: Tensor, D: int, weight: Tensor, cos_TR: Tensor, sin_TR: Tensor, eps: float, zero_centered: bool
) -> Tensor:
    """Of heads that begin with D numbers to norm and rotate, X in all."""
    T, heads, _ = x_THX.shape
    x, cos, sin = rows_of(x_THX), rows_of(cos_TR), rows_of(sin_TR)
    y_THD = blank(x_THX, T, heads, D)
    height, width, warps = tile(D, a_thread=16)
    constants = (*x.strides, cos.outer, sin.outer, heads, D, cos_TR.shape[1], height, width, zero_centered)
    tensors = (x.tensor, weight, cos.tensor, sin.tensor, y_THD)
    launch(rotate, (ceil_div(T * heads, height),), tensors, (T * heads, eps), constants, warps)
    ctx.save_for_backward(x.tensor, weight, cos.tensor, sin.tensor)
    ctx.how = eps, zero_centered
    return y_THD


def _backward(ctx: Any, dy_THD: Tensor, dgate_THD: Tensor | None) -> Tensor:
    """The gradient of all X numbers of each head."""
    x_THX, weight, cos_TR, sin_TR = ctx.saved_tensors
    eps, zero_centered = ctx.how
    T, heads, X = x_THX.shape
    D, R = dy_THD.shape[2], cos_TR.shape[1]
    x, d, cos, sin = (rows_of(each) for each in (x_THX, dy_THD, cos_TR, sin_TR))
    gate = d if dgate_THD is None else rows_of(dgate_THD)
    dx_THX = blank(x_THX, T, heads, X)
    height, width, warps = tile(D, a_thread=16)
    constants = (*x.strides, *d.strides, *gate.strides, cos.outer, sin.outer, heads, X, D, R, height, width)
    tensors = (d.tensor, gate.tensor, x.tensor, weight, cos.tensor, sin.tensor, dx_THX)
    constants = (*constants, dgate_THD is not None, zero_centered)
    launch(rotate_backward, (ceil_div(T * heads, height),), tensors, (T * heads, eps), constants, warps)
    return dx_THX


@triton.jit(do_not_specialize=["M", "eps"])
def rotate(
    x,
    weight,
    cos,
    sin,
    y,
    M,
    eps,
    XG: tl.constexpr,
    XO: tl.constexpr,
    XI: tl.constexpr,
    CO: tl.constexpr,
    SO: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """y = normed·cos + partner's normed·sin, the partner read once more from where it lies, half the rotated numbers away."""
    dtype = y.dtype.element_ty
    row, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BD)[None, :]
    mask = (row < M)[:, None] & (cols < D)
    turns = (row < M)[:, None] & (cols < R)
    partner = (cols + R // 2) % R
    token = (row // HEADS)[:, None].to(tl.int64)
    value = tl.load(x + at_rows(row, cols, XG, XO, XI), mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x + at_rows(row, partner, XG, XO, XI), mask=turns, other=0.0).to(tl.float32)
    c = tl.load(cos + token * CO + cols, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + token * SO + cols, mask=turns, other=0.0).to(tl.float32)
    scale = row_scale(value, D, eps)
    value *= scale * _weights(weight + cols, mask, CENTERED)
    other *= scale * _weights(weight + partner, turns, CENTERED)
    result = value * c + tl.where(cols < R // 2, -other, other) * s
    tl.store(y + row[:, None].to(tl.int64) * D + cols, result.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M", "eps"])
def rotate_backward(
    dy,
    dgate,
    x,
    weight,
    cos,
    sin,
    dx,
    M,
    eps,
    XG: tl.constexpr,
    XO: tl.constexpr,
    XI: tl.constexpr,
    DG: tl.constexpr,
    DO: tl.constexpr,
    DI: tl.constexpr,
    GG: tl.constexpr,
    GO: tl.constexpr,
    GI: tl.constexpr,
    CO: tl.constexpr,
    SO: tl.constexpr,
    HEADS: tl.constexpr,
    X: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    GATE: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """The transposed rotation, then the norm's gradient; with GATE the gate's gradient is laid beside it."""
    dtype = dx.dtype.element_ty
    row, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BD)[None, :]
    mask = (row < M)[:, None] & (cols < D)
    turns = (row < M)[:, None] & (cols < R)
    partner = (cols + R // 2) % R
    token = (row // HEADS)[:, None].to(tl.int64)
    value = tl.load(x + at_rows(row, cols, XG, XO, XI), mask=mask, other=0.0).to(tl.float32)
    d = tl.load(dy + at_rows(row, cols, DG, DO, DI), mask=mask, other=0.0).to(tl.float32)
    other = tl.load(dy + at_rows(row, partner, DG, DO, DI), mask=turns, other=0.0).to(tl.float32)
    c = tl.load(cos + token * CO + cols, mask=turns, other=1.0).to(tl.float32)
    s = tl.load(sin + token * SO + partner, mask=turns, other=0.0).to(tl.float32)
    g = (d * c + tl.where(cols < R // 2, other, -other) * s) * _weights(weight + cols, mask, CENTERED)
    scale = row_scale(value, D, eps)
    x_hat = value * scale
    result = scale * (g - x_hat * (tl.sum(g * x_hat, 1) / D)[:, None])
    to = dx + row[:, None].to(tl.int64) * X + cols
    tl.store(to, result.to(dtype), mask=mask)
    if GATE:
        tl.store(to + D, tl.load(dgate + at_rows(row, cols, GG, GO, GI), mask=mask), mask=mask)


@triton.jit
def _weights(weight, mask, CENTERED: tl.constexpr):
    """A tile of the weights, laid out as the tiles that it multiplies."""
    w = tl.load(tl.broadcast_to(weight, mask.shape), mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        w += 1.0
    return w
