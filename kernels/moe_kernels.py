"""The Triton kernels of the experts layer: each projection with its adapter, forward and backward, and the adapter's gradients.

A tile of a product is [rows of one expert, columns]. The LoRA term enters as one more step of the K loop after its end: the rows' thin product
(R wide, made by a kernel of its own) times the tile of B. Two dots into one accumulator inside the loop would be as short to write, and
Triton miscompiles them on Blackwell without a word.

A tile of at most half the height has a body of its own: an expert's last rows cost half then. Grouped buffers are one tile longer than M, so
that a last tile may read (never write) past its rows.

Factors are read at expert·stride + r·stride + column, columns side by side, which covers PEFT's A and the transpose of PEFT's B.

Shape letters: T tokens, k experts a token, M = T·k rows, E experts, H hidden, I intermediate, J = 2I (gate rows, then up rows), R rank
(padded), RT the adapter's own rank.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.grouped_gemm import locate

# Up to this rank the LoRA term's operands are loaded before the loop of products, else a tile's end waits for them: beside the loop's own buffers
# there is shared memory for no more.
EARLY_RANK = tl.constexpr(32)


@triton.jit
def up(
    x,
    w,
    xa,
    b,
    h,
    act,
    order,
    tiles,
    H: tl.constexpr,
    I: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TALL: tl.constexpr,
    TMA: tl.constexpr,
    LORA: tl.constexpr,
    KEEP: tl.constexpr,
):
    """act = silu(gate) · up of the gathered rows, and h = (gate, up) if the backward pass will want it."""
    tl.static_assert(not TALL, "gathered loads eat what a taller tile gains")
    e, row0, end, n = locate(tl.program_id(0), tiles, I // BN, BM)
    if e >= E:
        return
    if end - row0 <= BM // 2:
        _up(x, w, xa, b, h, act, order, e, row0, end, n, H, I, E, R, TOP_K, BM // 2, BN, BK, TMA, LORA, KEEP)
    else:
        _up(x, w, xa, b, h, act, order, e, row0, end, n, H, I, E, R, TOP_K, BM, BN, BK, TMA, LORA, KEEP)


@triton.jit
def _up(
    x,
    w,
    xa,
    b,
    h,
    act,
    order,
    e,
    row0,
    end,
    n,
    H: tl.constexpr,
    I: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TMA: tl.constexpr,
    LORA: tl.constexpr,
    KEEP: tl.constexpr,
):
    J: tl.constexpr = 2 * I
    n0 = n * BN
    ns, ks, rs = tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, R)
    w_row = e * J + n0
    x_at = x + (_slots(order, row0, end, BM) // TOP_K)[:, None].to(tl.int64) * H + ks[None, :]
    xa_at = _grouped(xa, row0, rs, R, BM)
    b_at = b + e.to(tl.int64) * J + n0 + (rs[:, None] * (E * J) + ns[None, :])
    if LORA and R <= EARLY_RANK:
        xa_tile, b_gate, b_up = tl.load(xa_at), tl.load(b_at), tl.load(b_at + I)
    gate, up_ = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    if not TMA:
        w_at = w + w_row.to(tl.int64) * H + (ns[:, None] * H + ks[None, :])
    for k in range(0, H, BK):
        # The weights first: their addresses are known at once, and they come from the farthest.
        if TMA:
            w_gate, w_up = w.load([w_row, k]).T, w.load([w_row + I, k]).T
        else:
            w_gate, w_up = tl.load(w_at + k).T, tl.load(w_at + I * H + k).T
        x_tile = tl.load(x_at + k)
        gate = tl.dot(x_tile, w_gate, gate)
        up_ = tl.dot(x_tile, w_up, up_)
    if LORA:
        if R > EARLY_RANK:
            xa_tile, b_gate, b_up = tl.load(xa_at), tl.load(b_at), tl.load(b_at + I)
        gate = tl.dot(xa_tile, b_gate, gate)
        up_ = tl.dot(xa_tile, b_up, up_)
    dtype = act.dtype.element_ty
    # The backward pass reads both rounded, so the activation is made of the rounded ones: else its gradient would be of another function.
    gate, up_ = gate.to(dtype), up_.to(dtype)
    i, first = tl.arange(0, BM), row0.to(tl.int64)
    mask = (row0 + i < end)[:, None]
    if KEEP:
        h_at = h + first * J + n0 + (i[:, None] * J + ns[None, :])
        tl.store(h_at, gate, mask=mask)
        tl.store(h_at + I, up_, mask=mask)
    g = gate.to(tl.float32)
    value = g * tl.sigmoid(g) * up_.to(tl.float32)
    tl.store(act + first * I + n0 + (i[:, None] * I + ns[None, :]), value.to(dtype), mask=mask)


@triton.jit
def _grouped(rows, row0, ks, WIDTH: tl.constexpr, BM: tl.constexpr):
    return rows + row0.to(tl.int64) * WIDTH + (tl.arange(0, BM)[:, None] * WIDTH + ks[None, :])


@triton.jit
def _slots(order, row0, end, BM: tl.constexpr):
    """Asked for before the loop of products: after it, the tile's end would wait for them."""
    i = tl.arange(0, BM)
    return tl.load(order + row0 + i, mask=row0 + i < end, other=0)


@triton.jit
def _shares(shares, row0, end, BM: tl.constexpr):
    i = tl.arange(0, BM)
    return tl.load(shares + row0 + i, mask=row0 + i < end, other=0.0)


@triton.jit
def down(
    act,
    act_half,
    w,
    xa,
    b,
    y,
    shares,
    order,
    tiles,
    H: tl.constexpr,
    I: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TALL: tl.constexpr,
    TMA: tl.constexpr,
    LORA: tl.constexpr,
):
    """y[slot] = router weight · down projection of the row, put back to slot order."""
    e, row0, end, n = locate(tl.program_id(0), tiles, H // BN, BM + TALL * BM // 2)
    if e >= E:
        return
    if end - row0 <= BM // 2:
        _down(
            act_half,
            act_half,
            w,
            xa,
            b,
            y,
            shares,
            order,
            e,
            row0,
            end,
            n,
            H,
            I,
            E,
            R,
            BM // 2,
            BN,
            BK,
            False,
            TMA,
            LORA,
        )
    elif TALL:
        if end - row0 <= BM:
            _down(act, act_half, w, xa, b, y, shares, order, e, row0, end, n, H, I, E, R, BM, BN, BK, False, TMA, LORA)
        else:
            _down(act, act_half, w, xa, b, y, shares, order, e, row0, end, n, H, I, E, R, BM, BN, BK, True, TMA, LORA)
    else:
        _down(act, act_half, w, xa, b, y, shares, order, e, row0, end, n, H, I, E, R, BM, BN, BK, False, TMA, LORA)


@triton.jit
def _down(
    act,
    act_half,
    w,
    xa,
    b,
    y,
    shares,
    order,
    e,
    row0,
    end,
    n,
    H: tl.constexpr,
    I: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TALL: tl.constexpr,
    TMA: tl.constexpr,
    LORA: tl.constexpr,
):
    n0 = n * BN
    ns, ks = tl.arange(0, BN), tl.arange(0, BK)
    w_row = e * H + n0
    slot = _slots(order, row0, end, BM)
    share = _shares(shares, row0, end, BM)
    total = tl.zeros((BM, BN), tl.float32)
    if TALL:
        slot2 = _slots(order, row0 + BM, end, BM // 2)
        share2 = _shares(shares, row0 + BM, end, BM // 2)
        total2 = tl.zeros((BM // 2, BN), tl.float32)
    if not TMA:
        act_at = _grouped(act, row0, ks, I, BM)
        w_at = w + w_row.to(tl.int64) * I + (ns[:, None] * I + ks[None, :])
        if TALL:
            act_at2 = _grouped(act, row0 + BM, ks, I, BM // 2)
    for k in range(0, I, BK):
        if TMA:
            w_tile, act_tile = w.load([w_row, k]).T, act.load([row0, k])
        else:
            w_tile, act_tile = tl.load(w_at + k).T, tl.load(act_at + k)
        total = tl.dot(act_tile, w_tile, total)
        if TALL:
            if TMA:
                act_tile2 = act_half.load([row0 + BM, k])
            else:
                act_tile2 = tl.load(act_at2 + k)
            total2 = tl.dot(act_tile2, w_tile, total2)
    _down_end(total, xa, b, y, slot, share, e, row0, end, n0, H, E, R, BM, BN, LORA)
    if TALL:
        _down_end(total2, xa, b, y, slot2, share2, e, row0 + BM, end, n0, H, E, R, BM // 2, BN, LORA)


@triton.jit
def _down_end(
    total,
    xa,
    b,
    y,
    slot,
    share,
    e,
    row0,
    end,
    n0,
    H: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LORA: tl.constexpr,
):
    i, ns = tl.arange(0, BM), tl.arange(0, BN)
    inside = row0 + i < end
    if LORA:
        rs = tl.arange(0, R)
        b_at = b + e.to(tl.int64) * H + n0 + (rs[:, None] * (E * H) + ns[None, :])
        total = tl.dot(tl.load(_grouped(xa, row0, rs, R, BM)), tl.load(b_at), total)
    y_at = y + slot[:, None].to(tl.int64) * H + (n0 + ns)[None, :]
    tl.store(y_at, (total * share[:, None]).to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def down_backward(
    dout,
    w,
    u,
    a,
    h,
    dh,
    act,
    dweight_parts,
    shares,
    order,
    tiles,
    H: tl.constexpr,
    I: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TALL: tl.constexpr,
    TMA: tl.constexpr,
    LORA: tl.constexpr,
):
    """dh of the rows, act once more, and each column tile's part of the router weights' gradient.

    The gradient of a router weight is <dout, y/weight> = <dact/weight, act>: so y is never kept.
    """
    tl.static_assert(not TALL, "the end of a taller tile does not fit the registers")
    e, row0, end, n = locate(tl.program_id(0), tiles, I // BN, BM)
    if e >= E:
        return
    if end - row0 <= BM // 2:
        _down_backward(
            dout, w, u, a, h, dh, act, dweight_parts, shares, order, e, row0, end, n,
            H, I, R, TOP_K, BM // 2, BN, BK, TMA, LORA,
        )  # fmt: skip
    else:
        _down_backward(
            dout, w, u, a, h, dh, act, dweight_parts, shares, order, e, row0, end, n,
            H, I, R, TOP_K, BM, BN, BK, TMA, LORA,
        )  # fmt: skip


@triton.jit
def _down_backward(
    dout,
    w,
    u,
    a,
    h,
    dh,
    act,
    dweight_parts,
    shares,
    order,
    e,
    row0,
    end,
    n,
    H: tl.constexpr,
    I: tl.constexpr,
    R: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TMA: tl.constexpr,
    LORA: tl.constexpr,
):
    n0 = n * BN
    ns, ks, rs = tl.arange(0, BN), tl.arange(0, BK), tl.arange(0, R)
    w_row = e * H
    slot = _slots(order, row0, end, BM)
    share = _shares(shares, row0, end, BM)
    dout_at = dout + (slot // TOP_K)[:, None].to(tl.int64) * H + ks[None, :]
    u_at = _grouped(u, row0, rs, R, BM)
    a_at = a + (e * R).to(tl.int64) * I + n0 + (rs[:, None] * I + ns[None, :])
    if LORA and R <= EARLY_RANK:
        u_tile, a_tile = tl.load(u_at), tl.load(a_at)
    dact = tl.zeros((BM, BN), tl.float32)
    if not TMA:
        w_at = w + w_row.to(tl.int64) * I + n0 + (ks[:, None] * I + ns[None, :])
    for k in range(0, H, BK):
        if TMA:
            w_tile = w.load([w_row + k, n0])
        else:
            w_tile = tl.load(w_at + k * I)
        dact = tl.dot(tl.load(dout_at + k), w_tile, dact)
    if LORA:
        if R > EARLY_RANK:
            u_tile, a_tile = tl.load(u_at), tl.load(a_at)
        dact = tl.dot(u_tile, a_tile, dact)
    _down_backward_end(dact, h, dh, act, dweight_parts, slot, share, row0, end, n, I, BM, BN)


@triton.jit
def _down_backward_end(
    dact,
    h,
    dh,
    act,
    dweight_parts,
    slot,
    share,
    row0,
    end,
    n,
    I: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    n0 = n * BN
    i = tl.arange(0, BM)
    inside = row0 + i < end
    first = row0.to(tl.int64)
    # In eighths of the columns: whole, the SwiGLU's operands do not fit the registers and spill kilobytes a thread. Each eighth is asked for
    # before the one before it is worked on: no load may pass a store, so else each would wait for memory by itself.
    Q: tl.constexpr = BN // 8
    gate0, up0 = _pre_activations(h, first, n0, i, inside, I, Q)
    half0, half1 = _halves(dact, BM, BN)
    q0, q1 = _halves(half0, BM, BN // 2)
    d0, d1 = _halves(q0, BM, BN // 4)
    gate1, up1 = _pre_activations(h, first, n0 + Q, i, inside, I, Q)
    part = _swiglu_backward(d0, gate0, up0, dh, act, first, n0, i, share, inside, I, Q)
    gate0, up0 = _pre_activations(h, first, n0 + 2 * Q, i, inside, I, Q)
    part += _swiglu_backward(d1, gate1, up1, dh, act, first, n0 + Q, i, share, inside, I, Q)
    d0, d1 = _halves(q1, BM, BN // 4)
    gate1, up1 = _pre_activations(h, first, n0 + 3 * Q, i, inside, I, Q)
    part += _swiglu_backward(d0, gate0, up0, dh, act, first, n0 + 2 * Q, i, share, inside, I, Q)
    gate0, up0 = _pre_activations(h, first, n0 + 4 * Q, i, inside, I, Q)
    part += _swiglu_backward(d1, gate1, up1, dh, act, first, n0 + 3 * Q, i, share, inside, I, Q)
    q2, q3 = _halves(half1, BM, BN // 2)
    d0, d1 = _halves(q2, BM, BN // 4)
    gate1, up1 = _pre_activations(h, first, n0 + 5 * Q, i, inside, I, Q)
    part += _swiglu_backward(d0, gate0, up0, dh, act, first, n0 + 4 * Q, i, share, inside, I, Q)
    gate0, up0 = _pre_activations(h, first, n0 + 6 * Q, i, inside, I, Q)
    part += _swiglu_backward(d1, gate1, up1, dh, act, first, n0 + 5 * Q, i, share, inside, I, Q)
    d0, d1 = _halves(q3, BM, BN // 4)
    gate1, up1 = _pre_activations(h, first, n0 + 7 * Q, i, inside, I, Q)
    part += _swiglu_backward(d0, gate0, up0, dh, act, first, n0 + 6 * Q, i, share, inside, I, Q)
    part += _swiglu_backward(d1, gate1, up1, dh, act, first, n0 + 7 * Q, i, share, inside, I, Q)
    tl.store(dweight_parts + slot * (I // BN) + n, part, mask=inside)


@triton.jit
def _halves(tile, BM: tl.constexpr, BN: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(tile, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _pre_activations(h, first, n0, i, inside, I: tl.constexpr, BN: tl.constexpr):
    J: tl.constexpr = 2 * I
    at = h + first * J + (i[:, None] * J + (n0 + tl.arange(0, BN))[None, :])
    return tl.load(at, mask=inside[:, None], other=0.0), tl.load(at + I, mask=inside[:, None], other=0.0)


@triton.jit
def _swiglu_backward(dact, gate, up_, dh, act, first, n0, i, share, inside, I: tl.constexpr, BN: tl.constexpr):
    J: tl.constexpr = 2 * I
    cols = n0 + tl.arange(0, BN)
    at = first * J + (i[:, None] * J + cols[None, :])
    mask = inside[:, None]
    dtype = dh.dtype.element_ty
    gate, up_ = gate.to(tl.float32), up_.to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    value = (silu * up_).to(dtype)
    tl.store(act + first * I + (i[:, None] * I + cols[None, :]), value, mask=mask)
    part = tl.sum(dact * value.to(tl.float32), 1)
    dact *= share[:, None]
    tl.store(dh + I + at, (dact * silu).to(dtype), mask=mask)
    tl.store(dh + at, (dact * up_ * (sigmoid + silu * (1.0 - sigmoid))).to(dtype), mask=mask)
    return part


@triton.jit
def up_backward(
    dh,
    dh_half,
    w,
    v,
    a,
    dx_slots,
    order,
    tiles,
    H: tl.constexpr,
    I: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TALL: tl.constexpr,
    TMA: tl.constexpr,
    LORA: tl.constexpr,
):
    """dx of each row, put back to slot order."""
    e, row0, end, n = locate(tl.program_id(0), tiles, H // BN, BM + TALL * BM // 2)
    if e >= E:
        return
    if end - row0 <= BM // 2:
        _up_backward(
            dh_half, dh_half, w, v, a, dx_slots, order, e, row0, end, n, H, I, R, BM // 2, BN, BK, False, TMA, LORA
        )
    elif TALL:
        if end - row0 <= BM:
            _up_backward(dh, dh_half, w, v, a, dx_slots, order, e, row0, end, n, H, I, R, BM, BN, BK, False, TMA, LORA)
        else:
            _up_backward(dh, dh_half, w, v, a, dx_slots, order, e, row0, end, n, H, I, R, BM, BN, BK, True, TMA, LORA)
    else:
        _up_backward(dh, dh_half, w, v, a, dx_slots, order, e, row0, end, n, H, I, R, BM, BN, BK, False, TMA, LORA)


@triton.jit
def _up_backward(
    dh,
    dh_half,
    w,
    v,
    a,
    dx_slots,
    order,
    e,
    row0,
    end,
    n,
    H: tl.constexpr,
    I: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TALL: tl.constexpr,
    TMA: tl.constexpr,
    LORA: tl.constexpr,
):
    J: tl.constexpr = 2 * I
    n0 = n * BN
    ns, ks = tl.arange(0, BN), tl.arange(0, BK)
    w_row = e * J
    slot = _slots(order, row0, end, BM)
    total = tl.zeros((BM, BN), tl.float32)
    if TALL:
        slot2 = _slots(order, row0 + BM, end, BM // 2)
        total2 = tl.zeros((BM // 2, BN), tl.float32)
    if not TMA:
        dh_at = _grouped(dh, row0, ks, J, BM)
        w_at = w + w_row.to(tl.int64) * H + n0 + (ks[:, None] * H + ns[None, :])
        if TALL:
            dh_at2 = _grouped(dh, row0 + BM, ks, J, BM // 2)
    for k in range(0, J, BK):
        if TMA:
            w_tile, dh_tile = w.load([w_row + k, n0]), dh.load([row0, k])
        else:
            w_tile, dh_tile = tl.load(w_at + k * H), tl.load(dh_at + k)
        total = tl.dot(dh_tile, w_tile, total)
        if TALL:
            if TMA:
                dh_tile2 = dh_half.load([row0 + BM, k])
            else:
                dh_tile2 = tl.load(dh_at2 + k)
            total2 = tl.dot(dh_tile2, w_tile, total2)
    _up_backward_end(total, v, a, dx_slots, slot, e, row0, end, n0, H, R, BM, BN, LORA)
    if TALL:
        _up_backward_end(total2, v, a, dx_slots, slot2, e, row0 + BM, end, n0, H, R, BM // 2, BN, LORA)


@triton.jit
def _up_backward_end(
    total,
    v,
    a,
    dx_slots,
    slot,
    e,
    row0,
    end,
    n0,
    H: tl.constexpr,
    R: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LORA: tl.constexpr,
):
    i, ns = tl.arange(0, BM), tl.arange(0, BN)
    inside = row0 + i < end
    if LORA:
        rs = tl.arange(0, R)
        a_at = a + (e * R).to(tl.int64) * H + n0 + (rs[:, None] * H + ns[None, :])
        total = tl.dot(tl.load(_grouped(v, row0, rs, R, BM)), tl.load(a_at), total)
    at = dx_slots + slot[:, None].to(tl.int64) * H + (n0 + ns)[None, :]
    tl.store(at, total.to(dx_slots.dtype.element_ty), mask=inside[:, None])


@triton.jit
def factor_gradients(
    x,
    dout,
    dh,
    act,
    xa1,
    v,
    u,
    xa2,
    shares,
    order,
    starts,
    da1,
    db1,
    da2,
    db2,
    H: tl.constexpr,
    I: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    RT: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ADD_A: tl.constexpr,
    ADD_B: tl.constexpr,
):
    """All four factor gradients, one expert and BN columns a program; with ADD they are added to what stands there.

    da1 [E, RT, H] = vᵀ x, db1 [RT, E, J] = xa1ᵀ dh, da2 [E, RT, I] = (weight·u)ᵀ act, db2 [RT, E, H] = (weight·xa2)ᵀ dout.
    """
    NH: tl.constexpr = H // BN
    NJ: tl.constexpr = 2 * I // BN
    NI: tl.constexpr = I // BN
    e = tl.program_id(0) // (2 * NH + NJ + NI)
    j = tl.program_id(0) % (2 * NH + NJ + NI)
    start, end = tl.load(starts + e), tl.load(starts + e + 1)
    e64 = e.to(tl.int64)
    if j < NH:
        at = da1 + e64 * (RT * H) + j * BN
        _factor_gradient(x, v, at, order, shares, start, end, j * BN, H, H, R, RT, TOP_K, BM, BN, True, False, ADD_A)
    elif j < 2 * NH:
        at = db2 + e64 * H + (j - NH) * BN
        _factor_gradient(
            dout, xa2, at, order, shares, start, end, (j - NH) * BN, H, E * H, R, RT, TOP_K, BM, BN, True, True, ADD_B
        )
    elif j < 2 * NH + NJ:
        n0 = (j - 2 * NH) * BN
        at = db1 + e64 * (2 * I) + n0
        _factor_gradient(
            dh, xa1, at, order, shares, start, end, n0, 2 * I, E * 2 * I, R, RT, TOP_K, BM, BN, False, False, ADD_B
        )
    else:
        n0 = (j - 2 * NH - NJ) * BN
        at = da2 + e64 * (RT * I) + n0
        _factor_gradient(act, u, at, order, shares, start, end, n0, I, I, R, RT, TOP_K, BM, BN, False, True, ADD_A)


@triton.jit
def _factor_gradient(
    wide,
    thin,
    out,
    order,
    shares,
    start,
    end,
    n0,
    WIDTH: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    R: tl.constexpr,
    RT: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GATHER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ADD: tl.constexpr,
):
    ns, rs = tl.arange(0, BN), tl.arange(0, R)
    at = out + rs[:, None] * RANK_STRIDE + ns[None, :]
    real = (rs < RT)[:, None]
    if ADD:
        before = tl.load(at, mask=real, other=0.0).to(tl.float32)
    total = tl.zeros((BN, R), tl.float32)
    for row0 in range(start, end, BM):
        row = row0 + tl.arange(0, BM)
        inside = row < end
        source = row
        if GATHER:
            source = tl.load(order + row, mask=inside, other=0) // TOP_K
        wide_at = wide + source[:, None].to(tl.int64) * WIDTH + (n0 + ns)[None, :]
        wide_tile = tl.load(wide_at, mask=inside[:, None], other=0.0)
        thin_tile = tl.load(thin + row[:, None].to(tl.int64) * R + rs[None, :], mask=inside[:, None], other=0.0)
        if WEIGHTED:
            share = tl.load(shares + row, mask=inside, other=0.0)
            thin_tile = (thin_tile.to(tl.float32) * share[:, None]).to(thin_tile.dtype)
        total = tl.dot(wide_tile.T, thin_tile, total)
    value = tl.trans(total)
    if ADD:
        value += before
    tl.store(at, value.to(out.dtype.element_ty), mask=real)


@triton.jit
def combine(
    slots,
    out,
    dweight_parts,
    dweight,
    H: tl.constexpr,
    TOP_K: tl.constexpr,
    BH: tl.constexpr,
    PARTS: tl.constexpr,
    K2: tl.constexpr,
    PARTS2: tl.constexpr,
):
    """out[t] = sum of t's k slots, in their order; with PARTS also the router weights' gradients from their parts."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BH + tl.arange(0, BH)
    total = tl.zeros((BH,), tl.float32)
    for choice in tl.static_range(TOP_K):
        total += tl.load(slots + (token * TOP_K + choice) * H + cols).to(tl.float32)
    tl.store(out + token * H + cols, total.to(out.dtype.element_ty))
    if PARTS > 0 and tl.program_id(1) == 0:
        choices, parts = tl.arange(0, K2), tl.arange(0, PARTS2)
        at = (token * TOP_K + choices)[:, None] * PARTS + parts[None, :]
        mask = (choices < TOP_K)[:, None] & (parts < PARTS)[None, :]
        whole = tl.sum(tl.load(dweight_parts + at, mask=mask, other=0.0), 1)
        tl.store(dweight + token * TOP_K + choices, whole.to(dweight.dtype.element_ty), mask=choices < TOP_K)


@triton.jit
def transpose(source, out, rows: tl.constexpr, cols: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    """out [cols, rows] = source [rows, cols] transposed, or added to; converts to out's dtype."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(
        source + r[:, None].to(tl.int64) * cols + c[None, :], mask=(r < rows)[:, None] & (c < cols)[None, :], other=0.0
    )
    value = tl.trans(tile.to(tl.float32))
    at = out + c[:, None].to(tl.int64) * rows + r[None, :]
    mask = (c < cols)[:, None] & (r < rows)[None, :]
    if ADD:
        value += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, value.to(out.dtype.element_ty), mask=mask)
