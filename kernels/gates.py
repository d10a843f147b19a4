"""Activations that multiply: SwiGLU, the attention's output gate, and the shared expert's with the sums around it. Each kernel beside its plain twin.

Shape letters: T tokens, H hidden, N numbers of a row; any leading dimensions before it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from kernels.launch import ceil_div
from kernels.norms import at_rows
from kernels.rows import blank, launch, own_dtype, rows_of, same_shape, takes_kernel, tile

_COLUMNS = 2048


@own_dtype
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate)·up, alike in shape [.., N]; either may be a strided view."""
    same_shape(gate=gate, up=up)
    if not takes_kernel(gate):
        return plain_silu_mul(gate, up)
    out: Tensor = _Gated.apply(gate, up, True)
    return out


@own_dtype
def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x·sigmoid(gate), alike in shape [.., N]; either may be a strided view."""
    same_shape(x=x, gate=gate)
    if not takes_kernel(x):
        return plain_sigmoid_mul(x, gate)
    out: Tensor = _Gated.apply(gate, x, False)
    return out


@own_dtype
def shared_add(expert: Tensor, shared: Tensor, gate_T1: Tensor, residual: Tensor | None = None) -> Tensor:
    """residual + (expert + sigmoid(gate)·shared), [.., H]; the gate is one number a token, [.., 1]. Without a residual, the rest."""
    same_shape(expert=expert, shared=shared, residual=expert if residual is None else residual)
    if gate_T1.shape != (*expert.shape[:-1], 1) or gate_T1.dtype != expert.dtype:
        raise ValueError(
            f"gate_T1: {gate_T1.dtype} {tuple(gate_T1.shape)}; want {expert.dtype} {(*expert.shape[:-1], 1)}"
        )
    if not takes_kernel(expert, expert.shape[-1]):
        return plain_shared_add(expert, shared, gate_T1, residual)
    out: Tensor = _SharedAdd.apply(expert, shared, gate_T1, residual)
    return out


def plain_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def plain_sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)


def plain_shared_add(expert: Tensor, shared: Tensor, gate_T1: Tensor, residual: Tensor | None) -> Tensor:
    total = expert + torch.sigmoid(gate_T1) * shared
    return total if residual is None else residual + total


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, other: Tensor, with_silu: bool) -> Tensor:
        a, b = rows_of(gate), rows_of(other)
        out = blank(gate, *gate.shape)
        M, N, grid, tiles, warps = _grid(out)
        launch(gated, grid, (a.tensor, b.tensor, out), (M,), (*a.strides, *b.strides, N, *tiles, with_silu), warps)
        ctx.save_for_backward(a.tensor, b.tensor)
        ctx.with_silu = with_silu
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate, other = ctx.saved_tensors
        d, a, b = rows_of(dout), rows_of(gate), rows_of(other)
        dgate, dother = (blank(gate, *gate.shape) for _ in range(2))
        M, N, grid, tiles, warps = _grid(dgate)
        constants = (*d.strides, *a.strides, *b.strides, N, *tiles, ctx.with_silu)
        launch(gated_backward, grid, (d.tensor, a.tensor, b.tensor, dgate, dother), (M,), constants, warps)
        return dgate, dother, None


class _SharedAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, expert: Tensor, shared: Tensor, gate_T1: Tensor, residual: Tensor | None) -> Tensor:
        parts = [rows_of(part) for part in (expert, shared, expert if residual is None else residual)]
        gate = gate_T1.reshape(-1)
        out = blank(expert, *expert.shape)
        M, N = gate.numel(), out.shape[-1]
        height, width, warps = tile(N, a_thread=16)
        constants = (*(n for part in parts for n in part.strides), gate.stride(0), N, height, width)
        constants = (*constants, residual is not None)
        tensors = (*(part.tensor for part in parts), gate, out)
        launch(add_shared, (ceil_div(M, height),), tensors, (M,), constants, warps)
        ctx.save_for_backward(parts[1].tensor, gate)
        ctx.gate_shape, ctx.has_residual = gate_T1.shape, residual is not None
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        shared, gate = ctx.saved_tensors
        d, s = rows_of(dout), rows_of(shared)
        dshared = blank(shared, *shared.shape)
        dgate = blank(gate, *ctx.gate_shape)
        M, N = gate.numel(), shared.shape[-1]
        height, width, warps = tile(N)
        constants = (*d.strides, *s.strides, gate.stride(0), N, height, width)
        launch(
            add_shared_backward,
            (ceil_div(M, height),),
            (d.tensor, s.tensor, gate, dshared, dgate),
            (M,),
            constants,
            warps,
        )
        return dout, dshared, dgate, dout if ctx.has_residual else None


def _grid(out: Tensor) -> tuple[int, int, tuple[int, int], tuple[int, int], int]:
    """(rows, their width, grid, tile, warps) of an op that does each number by itself."""
    N = out.shape[-1]
    M = out.numel() // N
    height, width, warps = tile(min(N, _COLUMNS), 2 * _COLUMNS, a_thread=16)
    return M, N, (ceil_div(M, height), ceil_div(N, width)), (height, width), warps


@triton.jit(do_not_specialize=["M"])
def gated(
    gate,
    other,
    out,
    M,
    GG: tl.constexpr,
    GO: tl.constexpr,
    GI: tl.constexpr,
    OG: tl.constexpr,
    OO: tl.constexpr,
    OI: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SILU: tl.constexpr,
):
    row, cols = tl.program_id(0) * BM + tl.arange(0, BM), (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    mask = (row < M)[:, None] & (cols < N)
    z = tl.load(gate + at_rows(row, cols, GG, GO, GI), mask=mask, other=0.0).to(tl.float32)
    value = tl.load(other + at_rows(row, cols, OG, OO, OI), mask=mask, other=0.0).to(tl.float32)
    share = 1.0
    if SILU:
        share = z
    result = share / (1.0 + tl.exp(-z)) * value
    tl.store(out + row[:, None].to(tl.int64) * N + cols, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def gated_backward(
    dout,
    gate,
    other,
    dgate,
    dother,
    M,
    DG: tl.constexpr,
    DO: tl.constexpr,
    DI: tl.constexpr,
    GG: tl.constexpr,
    GO: tl.constexpr,
    GI: tl.constexpr,
    OG: tl.constexpr,
    OO: tl.constexpr,
    OI: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SILU: tl.constexpr,
):
    row, cols = tl.program_id(0) * BM + tl.arange(0, BM), (tl.program_id(1) * BN + tl.arange(0, BN))[None, :]
    mask = (row < M)[:, None] & (cols < N)
    d = tl.load(dout + at_rows(row, cols, DG, DO, DI), mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + at_rows(row, cols, GG, GO, GI), mask=mask, other=0.0).to(tl.float32)
    value = tl.load(other + at_rows(row, cols, OG, OO, OI), mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(z)
    slope = share * (1.0 - share)
    if SILU:
        slope = share + z * slope
        share *= z
    at = row[:, None].to(tl.int64) * N + cols
    tl.store(dother + at, (d * share).to(dother.dtype.element_ty), mask=mask)
    tl.store(dgate + at, (d * value * slope).to(dgate.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def add_shared(
    expert,
    shared,
    residual,
    gate,
    out,
    M,
    EG: tl.constexpr,
    EO: tl.constexpr,
    EI: tl.constexpr,
    SG: tl.constexpr,
    SO: tl.constexpr,
    SI: tl.constexpr,
    RG: tl.constexpr,
    RO: tl.constexpr,
    RI: tl.constexpr,
    GATE: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    row, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)[None, :]
    mask = (row < M)[:, None] & (cols < N)
    z = tl.load(gate + row.to(tl.int64) * GATE, mask=row < M, other=0.0).to(tl.float32)
    share = tl.sigmoid(z)[:, None]
    routed = tl.load(expert + at_rows(row, cols, EG, EO, EI), mask=mask, other=0.0).to(tl.float32)
    common = tl.load(shared + at_rows(row, cols, SG, SO, SI), mask=mask, other=0.0).to(tl.float32)
    result = routed + share * common
    if RESIDUAL:
        result += tl.load(residual + at_rows(row, cols, RG, RO, RI), mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row[:, None].to(tl.int64) * N + cols, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def add_shared_backward(
    dout,
    shared,
    gate,
    dshared,
    dgate,
    M,
    DG: tl.constexpr,
    DO: tl.constexpr,
    DI: tl.constexpr,
    SG: tl.constexpr,
    SO: tl.constexpr,
    SI: tl.constexpr,
    GATE: tl.constexpr,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    row, cols = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, BN)[None, :]
    mask = (row < M)[:, None] & (cols < N)
    d = tl.load(dout + at_rows(row, cols, DG, DO, DI), mask=mask, other=0.0).to(tl.float32)
    common = tl.load(shared + at_rows(row, cols, SG, SO, SI), mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(tl.load(gate + row.to(tl.int64) * GATE, mask=row < M, other=0.0).to(tl.float32))
    at = row[:, None].to(tl.int64) * N + cols
    tl.store(dshared + at, (d * share[:, None]).to(dshared.dtype.element_ty), mask=mask)
    slope = tl.sum(d * common, 1) * share * (1.0 - share)
    tl.store(dgate + row, slope.to(dgate.dtype.element_ty), mask=row < M)
