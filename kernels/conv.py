"""The gated delta net's short convolution over packed documents, with its SiLU and the split into query, key and value.

Shape letters: T tokens, C = 2K + V channels (query K, key K, value V), 4 taps a channel.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.functional import silu

from kernels.launch import ceil_div
from kernels.rows import blank, frozen, launch, own_dtype, rows_of, takes_kernel

TAPS = 4
_FORWARD_ROWS, _FORWARD_CHANNELS = 32, 128
_BACKWARD_ROWS, _BACKWARD_CHANNELS = 64, 512


@own_dtype
def conv_silu_split(
    x_TC: Tensor, weight_CK: Tensor, document_T: Tensor, key_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """silu of the causal depthwise convolution, split into (query [T, K], key [T, K], value [T, V]), K = `key_size`.

    `weight_CK` [C, 4] frozen, the last tap the token's own. `document_T` int32: a tap counts only where its token bears the same number; a
    document's tokens lie side by side. ValueError for other shapes or dtypes.
    """
    T, C = x_TC.shape
    if not 0 < 2 * key_size < C:
        raise ValueError(f"key_size: {key_size} of {C} channels; want 2·key_size between 1 and {C - 1}")
    if document_T.dtype != torch.int32 or document_T.shape != (T,):
        raise ValueError(f"document_T: {document_T.dtype} {tuple(document_T.shape)}; want torch.int32 ({T},)")
    weight_CK = frozen("weight_CK", weight_CK, (C, TAPS))
    if not takes_kernel(x_TC):
        return plain_conv_silu_split(x_TC, weight_CK, document_T, key_size)
    q, k, v = _ConvSiluSplit.apply(x_TC, weight_CK, document_T.contiguous(), key_size)
    return q, k, v


def plain_conv_silu_split(
    x_TC: Tensor, weight_CK: Tensor, document_T: Tensor, key_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    weight, T = weight_CK.to(x_TC.dtype), len(x_TC)
    pre_TC = x_TC * weight[:, -1]
    for back in range(1, TAPS):
        earlier = nn.functional.pad(x_TC, (0, 0, back, 0))[:T]
        same = nn.functional.pad(document_T, (back, 0), value=-1)[:T] == document_T
        pre_TC = pre_TC + earlier * same[:, None] * weight[:, TAPS - 1 - back]
    q, k, v = silu(pre_TC).split([key_size, key_size, x_TC.shape[1] - 2 * key_size], dim=1)
    return q.contiguous(), k.contiguous(), v.contiguous()


class _ConvSiluSplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_CK: Tensor, document_T: Tensor, key_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = rows_of(x_TC)
        T, C = x_TC.shape
        q, k, v = (blank(x_TC, T, size) for size in (key_size, key_size, C - 2 * key_size))
        channels = _channels(C, key_size, _FORWARD_CHANNELS)
        grid = (ceil_div(T, _FORWARD_ROWS), C // channels)
        constants = (x.outer, key_size, C - 2 * key_size, _FORWARD_ROWS, channels)
        launch(conv, grid, (x.tensor, weight_CK, document_T, q, k, v), (T,), constants, 4)
        ctx.save_for_backward(x.tensor, weight_CK, document_T)
        ctx.key_size = key_size
        return q, k, v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_CK, document_T = ctx.saved_tensors
        x, d = rows_of(x_TC), [rows_of(part.flatten(1)) for part in (dq, dk, dv)]
        T, C = x_TC.shape
        dx = blank(x_TC, T, C)
        channels = _channels(C, ctx.key_size, _BACKWARD_CHANNELS)
        grid = (ceil_div(T, _BACKWARD_ROWS), C // channels)
        constants = (x.outer, *[part.outer for part in d], C, ctx.key_size, _BACKWARD_ROWS, channels)
        tensors = (x.tensor, weight_CK, document_T, *[part.tensor for part in d], dx)
        launch(conv_backward, grid, tensors, (T,), constants, max(1, channels // 128))
        return dx, None, None, None


def _channels(C: int, key_size: int, most: int) -> int:
    """Channels of a tile: a power of 2 that divides each of the three parts."""
    common = math.gcd(key_size, C - 2 * key_size)
    return min(most, common & -common)


@triton.jit(do_not_specialize=["T"])
def conv(
    x,
    weight,
    document,
    q,
    k,
    v,
    T,
    XO: tl.constexpr,
    CK: tl.constexpr,
    CV: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """A tile of tokens and channels, read once a tap: the later three reads find it in the first cache."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    c0 = tl.program_id(1) * BC
    cs = tl.arange(0, BC)
    inside = t < T
    own = tl.load(document + t, mask=inside, other=-1)
    total = tl.zeros((BT, BC), tl.float32)
    for tap in tl.static_range(4):
        s = t - 3 + tap
        there = inside & (s >= 0)
        there = there & (tl.load(document + s, mask=there, other=-1) == own)
        value = tl.load(x + s[:, None].to(tl.int64) * XO + (c0 + cs)[None, :], mask=there[:, None], other=0.0)
        total += value.to(tl.float32) * tl.load(weight + (c0 + cs) * 4 + tap).to(tl.float32)[None, :]
    y = (total / (1.0 + tl.exp(-total))).to(q.dtype.element_ty)
    row, mask = t[:, None].to(tl.int64), inside[:, None]
    if c0 < CK:
        tl.store(q + row * CK + (c0 + cs)[None, :], y, mask=mask)
    elif c0 < 2 * CK:
        tl.store(k + row * CK + (c0 - CK + cs)[None, :], y, mask=mask)
    else:
        tl.store(v + row * CV + (c0 - 2 * CK + cs)[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["T"])
def conv_backward(
    x,
    weight,
    document,
    dq,
    dk,
    dv,
    dx,
    T,
    XO: tl.constexpr,
    QO: tl.constexpr,
    KO: tl.constexpr,
    VO: tl.constexpr,
    C: tl.constexpr,
    CK: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """A strip of channels, token after token: each token's pre-activation and its gradient are made once and stay in registers for the three
    tokens that want them besides. A token's dx is complete, and written, three tokens later."""
    t0 = tl.program_id(0) * BT
    c0 = tl.program_id(1) * BC
    cs = tl.arange(0, BC)
    x += c0 + cs
    dx += c0 + cs
    weight += (c0 + cs) * 4
    w0, w1 = tl.load(weight).to(tl.float32), tl.load(weight + 1).to(tl.float32)
    w2, w3 = tl.load(weight + 2).to(tl.float32), tl.load(weight + 3).to(tl.float32)
    if c0 < CK:
        _conv_backward(x, w0, w1, w2, w3, document, dq + (c0 + cs), dx, t0, T, XO, QO, C, BT)
    elif c0 < 2 * CK:
        _conv_backward(x, w0, w1, w2, w3, document, dk + (c0 - CK + cs), dx, t0, T, XO, KO, C, BT)
    else:
        _conv_backward(x, w0, w1, w2, w3, document, dv + (c0 - 2 * CK + cs), dx, t0, T, XO, VO, C, BT)


@triton.jit
def _conv_backward(
    x,
    w0,
    w1,
    w2,
    w3,
    document,
    dy,
    dx,
    t0,
    T,
    XO: tl.constexpr,
    DO: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
):
    # Suffixes count tokens back: x1 is the one before, e1 its document, d1 the gradient of its pre-activation.
    x3, e3 = _token(x, document, t0 - 3, T, XO)
    x2, e2 = _token(x, document, t0 - 2, T, XO)
    x1, e1 = _token(x, document, t0 - 1, T, XO)
    xa, ea = _token(x, document, t0, T, XO)
    xb, eb = _token(x, document, t0 + 1, T, XO)
    xc, ec = _token(x, document, t0 + 2, T, XO)
    ya, yb, yc = _row(dy, t0, T, DO), _row(dy, t0 + 1, T, DO), _row(dy, t0 + 2, T, DO)
    d3 = _slope(ya, xa, x1, x2, x3, ea, e1, e2, e3, w0, w1, w2, w3)
    d2 = _slope(yb, xb, xa, x1, x2, eb, ea, e1, e2, w0, w1, w2, w3)
    d1 = _slope(yc, xc, xb, xa, x1, ec, eb, ea, e1, w0, w1, w2, w3)
    x3, x2, x1, e3, e2, e1 = xa, xb, xc, ea, eb, ec
    for done in range(0, BT, 4):
        t = t0 + 3 + done
        # All of the four tokens' loads before the first store, which no load may pass.
        xa, ea = _token(x, document, t, T, XO)
        xb, eb = _token(x, document, t + 1, T, XO)
        xc, ec = _token(x, document, t + 2, T, XO)
        xd, ed = _token(x, document, t + 3, T, XO)
        ya, yb = _row(dy, t, T, DO), _row(dy, t + 1, T, DO)
        yc, yd = _row(dy, t + 2, T, DO), _row(dy, t + 3, T, DO)
        da = _slope(ya, xa, x1, x2, x3, ea, e1, e2, e3, w0, w1, w2, w3)
        _store(dx, t - 3, T, C, d3, d2, d1, da, e3, e2, e1, ea, w0, w1, w2, w3)
        db = _slope(yb, xb, xa, x1, x2, eb, ea, e1, e2, w0, w1, w2, w3)
        _store(dx, t - 2, T, C, d2, d1, da, db, e2, e1, ea, eb, w0, w1, w2, w3)
        dc = _slope(yc, xc, xb, xa, x1, ec, eb, ea, e1, w0, w1, w2, w3)
        _store(dx, t - 1, T, C, d1, da, db, dc, e1, ea, eb, ec, w0, w1, w2, w3)
        dd = _slope(yd, xd, xc, xb, xa, ed, ec, eb, ea, w0, w1, w2, w3)
        _store(dx, t, T, C, da, db, dc, dd, ea, eb, ec, ed, w0, w1, w2, w3)
        x3, x2, x1, e3, e2, e1, d3, d2, d1 = xb, xc, xd, eb, ec, ed, db, dc, dd


@triton.jit
def _token(x, document, t, T, XO: tl.constexpr):
    """(the token's channels, its document); of a token that is not there, zeros and −1."""
    there = (t >= 0) & (t < T)
    return _row(x, t, T, XO), tl.load(document + t, mask=there, other=-1)


@triton.jit
def _row(rows, t, T, STRIDE: tl.constexpr):
    return tl.load(rows + t.to(tl.int64) * STRIDE, mask=(t >= 0) & (t < T), other=0.0)


@triton.jit
def _slope(dy, x0, x1, x2, x3, e0, e1, e2, e3, w0, w1, w2, w3):
    """dy·silu'(pre-activation of the token whose channels are x0)."""
    pre = x0.to(tl.float32) * w3
    pre += tl.where(e1 == e0, x1.to(tl.float32), 0.0) * w2
    pre += tl.where(e2 == e0, x2.to(tl.float32), 0.0) * w1
    pre += tl.where(e3 == e0, x3.to(tl.float32), 0.0) * w0
    sigmoid = tl.sigmoid(pre)
    return dy.to(tl.float32) * sigmoid * (1.0 + pre * (1.0 - sigmoid))


@triton.jit
def _store(dx, t, T, C: tl.constexpr, d0, d1, d2, d3, e0, e1, e2, e3, w0, w1, w2, w3):
    """dx of token t, of which the suffixes here count tokens onward."""
    total = d0 * w3
    total += tl.where(e1 == e0, d1, 0.0) * w2
    total += tl.where(e2 == e0, d2, 0.0) * w1
    total += tl.where(e3 == e0, d3, 0.0) * w0
    tl.store(dx + t.to(tl.int64) * C, total.to(dx.dtype.element_ty), mask=t < T)
