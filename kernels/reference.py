"""The maths of the kernels as plain loops, in any dtype: slow, and easy to believe. Every kernel is tested beside it.

Shape letters: T tokens, k experts a token, E experts, H hidden, I intermediate, J = 2I (gate rows, then up rows), R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

RESULTS = ("out", "dx", "dweight", "dA1", "dB1", "dA2", "dB2")


def experts_with_lora(
    x_TH: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    w1_EJH: Tensor,
    w2_EHI: Tensor,
    a1_ERH: Tensor,
    b1_EJR: Tensor,
    a2_ERI: Tensor,
    b2_EHR: Tensor,
    scale: float,
) -> Tensor:
    """out[t] = sum over t's experts of weight * down(silu(gate) * up), LoRA on both projections: [T, H], in the dtype of `x_TH`."""
    out_TH = torch.zeros_like(x_TH)
    dtype = x_TH.dtype
    for expert in range(w1_EJH.shape[0]):
        token, choice = (expert_Tk == expert).nonzero(as_tuple=True)
        if not len(token):
            continue
        x = x_TH[token]
        gate, up = _linear(x, w1_EJH[expert].to(dtype), a1_ERH[expert], b1_EJR[expert], scale).chunk(2, dim=-1)
        y = _linear(silu(gate) * up, w2_EHI[expert].to(dtype), a2_ERI[expert], b2_EHR[expert], scale)
        out_TH = out_TH.index_add(0, token, y * weight_Tk[token, choice, None])
    return out_TH


def all_results(
    x_TH: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    w1_EJH: Tensor,
    w2_EHI: Tensor,
    factors: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    dout_TH: Tensor,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Output and all six gradients in `dtype`, by autograd of the loop; `factors` are A1 [E,R,H], B1 [E,J,R], A2 [E,R,I], B2 [E,H,R]."""
    wanted = [tensor.detach().to(dtype).requires_grad_() for tensor in (x_TH, weight_Tk, *factors)]
    x, weight, *lora = wanted
    with torch.enable_grad():
        out_TH = experts_with_lora(x, expert_Tk, weight, w1_EJH, w2_EHI, *lora, scale)
        gradients = torch.autograd.grad(out_TH, wanted, dout_TH.to(dtype))
    return dict(zip(RESULTS, (out_TH.detach(), *gradients), strict=True))


def relative_error(seen: Tensor, wanted: Tensor) -> float:
    """‖seen − wanted‖ / ‖wanted‖ in float64; NaN if anything is NaN, and NaN passes no comparison."""
    seen, wanted = seen.double(), wanted.double()
    norm = wanted.norm().item()
    return (seen - wanted).norm().item() / norm if norm else seen.norm().item()


def flat_a(a_ERX: Tensor) -> Tensor:
    """PEFT's lora_A [E·R, X]: rows expert-slowest."""
    return a_ERX.reshape(-1, a_ERX.shape[-1]).contiguous()


def flat_b(b_EOR: Tensor) -> Tensor:
    """PEFT's lora_B [O, R·E]: columns expert-fastest."""
    return b_EOR.permute(1, 2, 0).reshape(b_EOR.shape[1], -1).contiguous()


def grouped_a(a_flat: Tensor, experts: int) -> Tensor:
    """[E, R, X] from PEFT's lora_A."""
    return a_flat.reshape(experts, -1, a_flat.shape[-1])


def grouped_b(b_flat: Tensor, experts: int) -> Tensor:
    """[E, O, R] from PEFT's lora_B."""
    return b_flat.reshape(b_flat.shape[0], -1, experts).permute(2, 0, 1)


def _linear(x: Tensor, w_OX: Tensor, a_RX: Tensor, b_OR: Tensor, scale: float) -> Tensor:
    return x @ w_OX.T + scale * (x @ a_RX.T) @ b_OR.T


def tolerance(dtype: torch.dtype, longest_sum: int) -> float:
    """The relative error that a right kernel may have beside float64.

    Results are rounded to `dtype` about four times on their way (x·A, h, act, y), each a random relative error of up to half an epsilon: together
    about 4e-3 in bfloat16, and 2.56 half-epsilons (5e-3) is the limit. Sums are float32: a random walk of half-epsilons, eight times over.
    """
    return 2.56 * torch.finfo(dtype).eps / 2 + 8 * longest_sum**0.5 * torch.finfo(torch.float32).eps / 2


def quantise_nf4(weights: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """(packed, absmax) as kernels.nf4 makes them, in plain operations."""
    blocks = weights.reshape(-1, 64).float()
    absmax = blocks.abs().amax(1)
    scaled = blocks * torch.where(absmax > 0, 1 / absmax, 0)[:, None]
    code = torch.bucketize(scaled, (codes[1:] + codes[:-1]) / 2).to(torch.uint8).view(-1, 2)
    return (code[:, 0] << 4) | code[:, 1], absmax


def dequantise_nf4(packed: Tensor, absmax: Tensor, codes: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = torch.stack([codes[(packed >> 4).long()], codes[(packed & 15).long()]], 1)
    return (pairs.view(-1, 64) * absmax[:, None]).view(-1).to(dtype)
