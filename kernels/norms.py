"""RMS norms with frozen weights: alone, behind a residual sum, and gated. Each kernel stands beside its plain twin.

Shape letters: N numbers of a row; any leading dimensions before it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from kernels.launch import ceil_div
from kernels.rows import Rows, blank, frozen, launch, own_dtype, rows_of, same_shape, takes_kernel, tile, wide


@own_dtype
def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool) -> Tensor:
    """x / rms(x) over the last dimension, times 1 + weight where the weight is `zero_centered` (Qwen3.5), else times weight (Qwen3).

    `x` [.., N] of any floating dtype, `weight` [N] frozen. ValueError for another shape or a weight that asks for a gradient.
    """
    weight = frozen("weight", weight, (x.shape[-1],))
    if not takes_kernel(x, x.shape[-1]):
        return plain_rms_norm(x, weight, eps, zero_centered)
    y: Tensor = _RmsNorm.apply(x, weight, eps, zero_centered)
    return y


@own_dtype
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """(x + residual, its rms_norm), both [.., N]; `x` and `residual` alike in shape and dtype."""
    same_shape(x=x, residual=residual)
    weight = frozen("weight", weight, (x.shape[-1],))
    if not takes_kernel(x, x.shape[-1]):
        return plain_add_rms_norm(x, residual, weight, eps, zero_centered)
    total, y = _AddRmsNorm.apply(x, residual, weight, eps, zero_centered)
    return total, y


@own_dtype
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x)·weight·silu(gate) over the last dimension, [.., N]: the norm before the gate, as the gated delta net wants it."""
    same_shape(x=x, gate=gate)
    weight = frozen("weight", weight, (x.shape[-1],))
    if not takes_kernel(x, x.shape[-1]):
        return plain_gated_rms_norm(x, gate, weight, eps)
    y: Tensor = _GatedRmsNorm.apply(x, gate, weight, eps)
    return y


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    x_hat = _normalised(x, eps)
    if zero_centered:
        return (x_hat * (1.0 + wide(weight))).to(x.dtype)
    return x_hat.to(x.dtype) * weight.to(x.dtype)


def plain_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, plain_rms_norm(total, weight, eps, zero_centered)


def plain_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    scaled = _normalised(x, eps).to(x.dtype) * weight.to(x.dtype)
    return (scaled * silu(wide(gate))).to(x.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    x_wide = wide(x)
    return x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        rows = rows_of(x)
        y = blank(x, *x.shape)
        _forward(rows, None, weight, y, y, eps, zero_centered)
        ctx.save_for_backward(rows.tensor, weight)
        ctx.how = eps, zero_centered
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = blank(x, *x.shape)
        _backward(dy, None, rows_of(x), weight, dx, *ctx.how)
        return dx, None, None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, Tensor]:
        total, y = blank(x, *x.shape), blank(x, *x.shape)
        _forward(rows_of(x), rows_of(residual), weight, total, y, eps, zero_centered)
        ctx.save_for_backward(total, weight)
        ctx.how = eps, zero_centered
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        if dy is None:
            return dtotal, dtotal, None, None, None
        dx = blank(total, *total.shape)
        _backward(dy, dtotal, rows_of(total), weight, dx, *ctx.how)
        return dx, dx, None, None, None


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        a, b, N = rows_of(x), rows_of(gate), x.shape[-1]
        y = blank(x, *x.shape)
        height, width, warps = tile(N)
        M = x.numel() // N
        constants = (*a.strides, *b.strides, N, height, width)
        launch(gated_norm, (ceil_div(M, height),), (a.tensor, b.tensor, weight, y), (M, eps), constants, warps)
        ctx.save_for_backward(a.tensor, b.tensor, weight)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        d, a, b, N = rows_of(dy), rows_of(x), rows_of(gate), x.shape[-1]
        dx, dgate = blank(x, *x.shape), blank(x, *x.shape)
        height, width, warps = tile(N, 2048, a_thread=16)
        M = x.numel() // N
        constants = (*d.strides, *a.strides, *b.strides, N, height, width)
        tensors = (d.tensor, a.tensor, b.tensor, weight, dx, dgate)
        launch(gated_norm_backward, (ceil_div(M, height),), tensors, (M, ctx.eps), constants, warps)
        return dx, dgate, None, None


def _forward(
    x: Rows, residual: Rows | None, weight: Tensor, total: Tensor, y: Tensor, eps: float, zero_centered: bool
) -> None:
    N, other = y.shape[-1], residual or x
    M = y.numel() // N
    height, width, warps = tile(N)
    constants = (*x.strides, *other.strides, N, height, width, residual is not None, zero_centered)
    launch(norm, (ceil_div(M, height),), (x.tensor, other.tensor, weight, total, y), (M, eps), constants, warps)


def _backward(
    dy: Tensor, dtotal: Tensor | None, x: Rows, weight: Tensor, dx: Tensor, eps: float, zero_centered: bool
) -> None:
    N, d = dx.shape[-1], rows_of(dy)
    M = dx.numel() // N
    also = d if dtotal is None else rows_of(dtotal)
    height, width, warps = tile(N)
    constants = (*d.strides, *also.strides, *x.strides, N, height, width, dtotal is not None, zero_centered)
    tensors = (d.tensor, also.tensor, x.tensor, weight, dx)
    launch(norm_backward, (ceil_div(M, height),), tensors, (M, eps), constants, warps)


@triton.jit
def at_rows(row, cols, GROUPS: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr):
    """Offsets [rows, cols] of a tensor's rows, as kernels.rows.Rows lays them out; cols [1, cols]."""
    r = row.to(tl.int64)
    if GROUPS == 1:
        first = r * OUTER
    else:
        first = (r // GROUPS) * OUTER + (r % GROUPS) * INNER
    return first[:, None] + cols


@triton.jit
def row_scale(value, N: tl.constexpr, eps):
    """One over the root mean square of each row, [rows, 1]. Made once more in the backward pass: its numbers are there anyhow."""
    return (1.0 / tl.sqrt(tl.sum(value * value, 1) / N + eps))[:, None]


@triton.jit(do_not_specialize=["M", "eps"])
def norm(
    x,
    residual,
    weight,
    total,
    y,
    M,
    eps,
    XG: tl.constexpr,
    XO: tl.constexpr,
    XI: tl.constexpr,
    RG: tl.constexpr,
    RO: tl.constexpr,
    RI: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """y = x̂·weight of each row; with ADD of total = x + residual, which is written too.

    Here and below the weight is read as a tile like all else: a row of it would be laid out otherwise, and the tile exchanged between threads.
    """
    dtype = y.dtype.element_ty
    row, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)[None, :]
    mask = (row < M)[:, None] & (cols < N)
    value = tl.load(x + at_rows(row, cols, XG, XO, XI), mask=mask, other=0.0).to(tl.float32)
    at = row[:, None].to(tl.int64) * N + cols
    if ADD:
        value += tl.load(residual + at_rows(row, cols, RG, RO, RI), mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(dtype)
        tl.store(total + at, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = row_scale(value, N, eps)
    w = tl.load(tl.broadcast_to(weight + cols, BM, BN), mask=mask, other=0.0).to(tl.float32)
    if CENTERED:
        result = value * scale * (1.0 + w)
    else:
        result = value * scale * w
    tl.store(y + at, result.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M", "eps"])
def norm_backward(
    dy,
    dtotal,
    x,
    weight,
    dx,
    M,
    eps,
    DG: tl.constexpr,
    DO: tl.constexpr,
    DI: tl.constexpr,
    TG: tl.constexpr,
    TO: tl.constexpr,
    TI: tl.constexpr,
    XG: tl.constexpr,
    XO: tl.constexpr,
    XI: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ADD: tl.constexpr,
    CENTERED: tl.constexpr,
):
    """dx = rstd·(g − x̂·mean(g·x̂)) with g = dy·weight; with ADD also the sum's own gradient."""
    row, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)[None, :]
    mask = (row < M)[:, None] & (cols < N)
    g = tl.load(dy + at_rows(row, cols, DG, DO, DI), mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + at_rows(row, cols, XG, XO, XI), mask=mask, other=0.0).to(tl.float32)
    w = tl.load(tl.broadcast_to(weight + cols, BM, BN), mask=mask, other=0.0).to(tl.float32)
    scale = row_scale(value, N, eps)
    if CENTERED:
        w += 1.0
    g *= w
    x_hat = value * scale
    result = scale * (g - x_hat * (tl.sum(g * x_hat, 1) / N)[:, None])
    if ADD:
        result += tl.load(dtotal + at_rows(row, cols, TG, TO, TI), mask=mask, other=0.0).to(tl.float32)
    tl.store(dx + row[:, None].to(tl.int64) * N + cols, result.to(dx.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "eps"])
def gated_norm(
    x,
    gate,
    weight,
    y,
    M,
    eps,
    XG: tl.constexpr,
    XO: tl.constexpr,
    XI: tl.constexpr,
    GG: tl.constexpr,
    GO: tl.constexpr,
    GI: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    dtype = y.dtype.element_ty
    row, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)[None, :]
    mask = (row < M)[:, None] & (cols < N)
    value = tl.load(x + at_rows(row, cols, XG, XO, XI), mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + at_rows(row, cols, GG, GO, GI), mask=mask, other=0.0).to(tl.float32)
    scale = row_scale(value, N, eps)
    w = tl.load(tl.broadcast_to(weight + cols, BM, BN), mask=mask, other=0.0).to(tl.float32)
    result = value * scale * w * (z / (1.0 + tl.exp(-z)))
    tl.store(y + row[:, None].to(tl.int64) * N + cols, result.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["M", "eps"])
def gated_norm_backward(
    dy,
    x,
    gate,
    weight,
    dx,
    dgate,
    M,
    eps,
    DG: tl.constexpr,
    DO: tl.constexpr,
    DI: tl.constexpr,
    XG: tl.constexpr,
    XO: tl.constexpr,
    XI: tl.constexpr,
    GG: tl.constexpr,
    GO: tl.constexpr,
    GI: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    row, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)[None, :]
    mask = (row < M)[:, None] & (cols < N)
    g = tl.load(dy + at_rows(row, cols, DG, DO, DI), mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + at_rows(row, cols, XG, XO, XI), mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + at_rows(row, cols, GG, GO, GI), mask=mask, other=0.0).to(tl.float32)
    g *= tl.load(tl.broadcast_to(weight + cols, BM, BN), mask=mask, other=0.0).to(tl.float32)
    scale = row_scale(value, N, eps)
    x_hat, sigmoid = value * scale, tl.sigmoid(z)
    silu_z = z * sigmoid
    at = row[:, None].to(tl.int64) * N + cols
    tl.store(dgate + at, (g * x_hat * (sigmoid + silu_z * (1.0 - sigmoid))).to(dgate.dtype.element_ty), mask=mask)
    g *= silu_z
    result = scale * (g - x_hat * (tl.sum(g * x_hat, 1) / N)[:, None])
    tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)
