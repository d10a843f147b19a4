"""The same layer in torch's own operations: the fallback, the cross-check at start-up, and the benchmark's peers.

Factors are grouped here, A [E, R, X] and B [E, O, R], and autograd makes the gradients.
Shape letters: T tokens, k experts a token, M = T·k rows, E experts, H hidden, I intermediate, J = 2I, R rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Factors = tuple[Tensor, Tensor, Tensor, Tensor]
"""A1 [E,R,H], B1 [E,J,R], A2 [E,R,I], B2 [E,H,R]."""
GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_mm(
    x_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, w1_EJH: Tensor, w2_EHI: Tensor, factors: Factors, scale: float
) -> Tensor:
    """torch's grouped_mm, each projection as three grouped products. Waits for the host where torch falls back to its own loop."""
    return _layer(x_TH, expert_Tk, weight_Tk, w1_EJH, w2_EHI, factors, scale, _grouped_product)


def host_loop(
    x_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, w1_EJH: Tensor, w2_EHI: Tensor, factors: Factors, scale: float
) -> Tensor:
    """One product an expert, the row counts read back to the host: what torch does in silence on a card its grouped_mm does not know."""
    return _layer(x_TH, expert_Tk, weight_Tk, w1_EJH, w2_EHI, factors, scale, _loop_product)


def folded(
    x_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, w1_EJH: Tensor, w2_EHI: Tensor, factors: Factors, scale: float
) -> Tensor:
    """As PEFT's ParamWrapper computes it: W + scale·B·A for every expert, then the base layer, so that backward makes a whole dW."""
    a1, b1, a2, b2 = factors
    w1 = torch.baddbmm(w1_EJH, b1, a1, alpha=scale)
    w2 = torch.baddbmm(w2_EHI, b2, a2, alpha=scale)
    order_M, ends_E = _order(expert_Tk, w1.shape[0])
    gate, up = _grouped_product(x_TH[order_M // expert_Tk.shape[1]], w1, ends_E).chunk(2, dim=-1)
    y_MH = _grouped_product(nn.functional.silu(gate) * up, w2, ends_E)
    return _combine(y_MH, order_M, weight_Tk)


def _layer(
    x_TH: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    w1_EJH: Tensor,
    w2_EHI: Tensor,
    factors: Factors,
    scale: float,
    product: GroupedProduct,
) -> Tensor:
    a1, b1, a2, b2 = factors
    order_M, ends_E = _order(expert_Tk, w1_EJH.shape[0])
    x_MH = x_TH[order_M // expert_Tk.shape[1]]
    h_MJ = product(x_MH, w1_EJH, ends_E) + product(product(x_MH, a1, ends_E) * scale, b1, ends_E)
    gate, up = h_MJ.chunk(2, dim=-1)
    act_MI = nn.functional.silu(gate) * up
    y_MH = product(act_MI, w2_EHI, ends_E) + product(product(act_MI, a2, ends_E) * scale, b2, ends_E)
    return _combine(y_MH, order_M, weight_Tk)


def _order(expert_Tk: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Slots sorted by expert, and each expert's last row + 1, without waiting for the host."""
    sorted_M, order_M = torch.sort(expert_Tk.reshape(-1), stable=True)
    each = torch.arange(experts, device=expert_Tk.device, dtype=sorted_M.dtype)
    return order_M, torch.searchsorted(sorted_M, each, right=True).to(torch.int32)


def _combine(y_MH: Tensor, order_M: Tensor, weight_Tk: Tensor) -> Tensor:
    y_MH = y_MH * weight_Tk.reshape(-1)[order_M, None]
    back_M = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(order_M.numel(), device=order_M.device))
    return y_MH[back_M].view(*weight_Tk.shape, -1).sum(1).to(y_MH.dtype)


def _grouped_product(x_MX: Tensor, w_EOX: Tensor, ends_E: Tensor) -> Tensor:
    return nn.functional.grouped_mm(x_MX, w_EOX.transpose(-2, -1), offs=ends_E)


def _loop_product(x_MX: Tensor, w_EOX: Tensor, ends_E: Tensor) -> Tensor:
    ends = ends_E.tolist()
    parts = [x_MX[start:end] @ w_EOX[e].T for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat(parts)
