"""Log-probabilities of the labels without ever holding all logits.

A few thousand tokens at a time: logits = hidden @ Wᵀ, then (onehot − p) in their place, then its product with W, which is what the backward pass
will want. So the logits are made once, and any loss of the log-probabilities is exact: backward only scales the kept rows.

Shape letters: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import power_of_2
from kernels.rows import blank, frozen, launch, own_dtype, takes_kernel, wide

IGNORED = -100
_IGNORED = tl.constexpr(IGNORED)


@own_dtype
def token_log_probs(
    hidden_TH: Tensor, weight_VH: Tensor, label_T: Tensor, *, temperature: float = 1.0, rows: int = 2048
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability of its label [T], entropy in nats [T], whether the label is the likeliest token [T] bool) of each token.

    Both are made of logits / `temperature` in float32 (float64 of a float64 `hidden_TH`). A label −100 gives 0, 0, False and no gradient; of
    equally likely tokens the lowest counts as the likeliest. Only the log-probability carries a gradient, and only to `hidden_TH`; `weight_VH`
    is frozen. The logits live `rows` tokens at a time. ValueError for other shapes, a label dtype that is not int64, or a temperature ≤ 0.
    """
    if hidden_TH.ndim != 2 or weight_VH.ndim != 2:
        raise ValueError(f"hidden_TH, weight_VH: {hidden_TH.ndim} and {weight_VH.ndim} dimensions; want 2 and 2")
    if label_T.dtype != torch.int64 or label_T.shape != hidden_TH.shape[:1]:
        raise ValueError(f"label_T: {label_T.dtype} {tuple(label_T.shape)}; want torch.int64 ({len(hidden_TH)},)")
    if not temperature > 0 or rows < 1:
        raise ValueError(f"temperature {temperature}, rows {rows}; want a temperature above 0 and at least 1 row")
    weight_VH = frozen("weight_VH", weight_VH, (weight_VH.shape[0], hidden_TH.shape[1])).to(hidden_TH.dtype)
    wants_gradient = torch.is_grad_enabled() and hidden_TH.requires_grad
    log_prob_T, entropy_T, top_T = _TokenLogProbs.apply(
        hidden_TH, weight_VH, label_T, 1.0 / temperature, rows, wants_gradient
    )
    return log_prob_T, entropy_T, top_T


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TH: Tensor, weight_VH: Tensor, label_T: Tensor, scale: float, rows: int, wants_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        T = len(hidden_TH)
        dtype = torch.promote_types(hidden_TH.dtype, torch.float32)
        log_prob_T, entropy_T = blank(hidden_TH, T, dtype=dtype), blank(hidden_TH, T, dtype=dtype)
        top_T = blank(hidden_TH, T, dtype=torch.bool)
        slope_TH = blank(hidden_TH, *hidden_TH.shape) if wants_gradient else None
        for start in range(0, T, rows):
            part = slice(start, start + rows)
            logits = hidden_TH[part] @ weight_VH.T
            fill = _label_stats if takes_kernel(logits) else plain_label_stats
            fill(logits, label_T[part], log_prob_T[part], entropy_T[part], top_T[part], scale, wants_gradient)
            if slope_TH is not None:
                torch.mm(logits, weight_VH, out=slope_TH[part])
            del logits
        if slope_TH is not None:
            ctx.save_for_backward(slope_TH)
        ctx.mark_non_differentiable(entropy_T, top_T)
        return log_prob_T, entropy_T, top_T

    @staticmethod
    def backward(ctx: Any, dlog_prob_T: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (slope_TH,) = ctx.saved_tensors
        # Multiplied in the log-probabilities' dtype and rounded once: the loss' weights may need more digits than the hidden states have.
        dhidden_TH = torch.mul(slope_TH, dlog_prob_T[:, None], out=torch.empty_like(slope_TH))
        return dhidden_TH, None, None, None, None, None


def plain_label_stats(
    logits_TV: Tensor,
    label_T: Tensor,
    log_prob_T: Tensor,
    entropy_T: Tensor,
    top_T: Tensor,
    scale: float,
    wants_gradient: bool,
) -> None:
    """Fill `log_prob_T`, `entropy_T` and `top_T`; with `wants_gradient` the logits become scale·(onehot − p), which is the log-probability's gradient."""
    counts = label_T != IGNORED
    at = label_T.clamp(min=0)[:, None]
    log_p_TV = torch.log_softmax(wide(logits_TV) * scale, dim=-1)
    p_TV = log_p_TV.exp()
    log_prob_T.copy_(log_p_TV.gather(1, at)[:, 0]).masked_fill_(~counts, 0.0)
    entropy_T.copy_(-(p_TV * log_p_TV).sum(-1)).masked_fill_(~counts, 0.0)
    torch.logical_and(counts, logits_TV.argmax(-1) == at[:, 0], out=top_T)
    if wants_gradient:
        slope_TV = -p_TV
        slope_TV.scatter_add_(1, at, torch.ones_like(at, dtype=slope_TV.dtype))
        logits_TV.copy_(slope_TV * (scale * counts.to(p_TV.dtype))[:, None])


def _label_stats(
    logits_TV: Tensor,
    label_T: Tensor,
    log_prob_T: Tensor,
    entropy_T: Tensor,
    top_T: Tensor,
    scale: float,
    wants_gradient: bool,
) -> None:
    T, V = logits_TV.shape
    tensors = (logits_TV, label_T, log_prob_T, entropy_T, top_T.view(torch.uint8))
    launch(label_stats, (T,), tensors, (scale,), (V, min(4096, power_of_2(V)), wants_gradient), 8)


@triton.jit(do_not_specialize=["scale"])
def label_stats(
    logits,
    label,
    log_prob,
    entropy,
    top,
    scale,
    V: tl.constexpr,
    BV: tl.constexpr,
    GRADIENT: tl.constexpr,
):
    """One token a program: a pass for the sum of exponentials, and one for what needs it, with the gradient written over the logits."""
    row = tl.program_id(0)
    logits += row.to(tl.int64) * V
    cs = tl.arange(0, BV)
    wanted = tl.load(label + row)
    if wanted == _IGNORED:
        tl.store(log_prob + row, 0.0)
        tl.store(entropy + row, 0.0)
        tl.store(top + row, 0)
        if GRADIENT:
            for first in range(0, V, BV):
                zeros = tl.zeros((BV,), logits.dtype.element_ty)
                tl.store(logits + first + cs, zeros, mask=first + cs < V)
        return
    # A label outside the vocabulary makes NaN of the log-probability, which no training step survives: refusing it here would wait for the card.
    own = tl.load(logits + wanted, mask=(wanted >= 0) & (wanted < V), other=float("nan")).to(tl.float32)
    wanted = wanted.to(tl.int32)
    largest = -float("inf")
    total = 0.0
    best_block = 0
    # Each block is asked for before the one ahead of it is worked on: a reduction, or the store of a gradient, holds up all loads behind it.
    raw = tl.load(logits + cs, mask=cs < V, other=-float("inf"))
    for first in range(0, V, BV):
        x = raw.to(tl.float32)
        raw = tl.load(logits + first + BV + cs, mask=first + BV + cs < V, other=-float("inf"))
        block_largest = tl.max(x, 0)
        best_block = tl.where(block_largest > largest, first, best_block)
        larger = tl.maximum(largest, block_largest)
        total = total * tl.exp((largest - larger) * scale) + tl.sum(tl.exp((x - larger) * scale), 0)
        largest = larger
    log_total = largest * scale + tl.log(total)
    x = tl.load(logits + best_block + cs, mask=best_block + cs < V, other=-float("inf")).to(tl.float32)
    likeliest = best_block + tl.min(tl.where(x == largest, cs, BV), 0)
    spread = tl.zeros((BV,), tl.float32)
    raw = tl.load(logits + cs, mask=cs < V, other=-float("inf"))
    for first in range(0, V, BV):
        token = first + cs
        inside = token < V
        x = raw.to(tl.float32)
        raw = tl.load(logits + token + BV, mask=token + BV < V, other=-float("inf"))
        log_p = x * scale - log_total
        p = tl.exp(log_p)
        spread += tl.where(inside, p * log_p, 0.0)
        if GRADIENT:
            slope = (tl.where(token == wanted, 1.0, 0.0) - p) * scale
            tl.store(logits + token, slope.to(logits.dtype.element_ty), mask=inside)
    tl.store(log_prob + row, own * scale - log_total)
    tl.store(entropy + row, -tl.sum(spread, 0))
    tl.store(top + row, ((likeliest == wanted) & (own == largest)).to(tl.uint8))
