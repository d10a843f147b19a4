"""The routed experts on our own kernels: what `experts.install` takes on a card, after the card has shown that they are right on it.

The choice is made once a process for each shape of layer, by `kernels.dispatch`, on random data of the model's own sizes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kernels.adapter import Adapter
from kernels.dispatch import GROUPED_MM, Choice, Shapes, choose
from kernels.moe_lora import Plan, experts_with_lora

if TYPE_CHECKING:
    from training.experts import Active, Lora

_choose = functools.cache(choose)


@dataclass(frozen=True)
class KernelLayer:
    """A whole routed layer (see `training.experts.Layer`) on the kernels of one plan."""

    plan: Plan
    keep_copies: bool = True
    """Keep what the kernels read of the adapters until the masters change: half of the masters' memory again. False makes it anew for each call."""

    def __call__(self, experts: Any, hidden_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, active: Active) -> Tensor:
        w1, w2 = experts.gate_up_proj, experts.down_proj
        weight = weight_Tk if weight_Tk.dtype == torch.float32 else weight_Tk.to(w1.dtype)
        up, down = _pair(active, experts.num_experts, w1, w2, self.keep_copies)
        out = experts_with_lora(
            hidden_TH.to(w1.dtype).contiguous(),
            expert_Tk.contiguous(),
            weight.contiguous(),
            w1,
            w2,
            up,
            down,
            plan=self.plan,
            accumulate=True,
            check_experts=False,  # the router's top-k names experts below E, and looking would wait for the card
        )
        return out.to(hidden_TH.dtype)


def best(experts: Any, top_k: int, rank: int, tokens: int = 4096) -> Choice:
    """The path for this layer of experts on its card; NoPathError if nothing computes it rightly there."""
    weight = experts.gate_up_proj
    if not _is_silu(experts):
        return Choice(GROUPED_MM, None, "our kernels compute SiLU gates, this model's are others", slow=True, trials=())
    _, J, H = weight.shape
    shapes = Shapes(H, J // 2, experts.num_experts, top_k, rank, tokens)
    return _choose(shapes, weight.device, weight.dtype)


def _pair(
    active: Active, experts: int, w1_EJH: Tensor, w2_EHI: Tensor, keep_copies: bool = True
) -> tuple[Adapter | None, Adapter | None]:
    """Both adapters or none, as the kernels want them: one that is switched on alone gets a partner of zeros."""
    up, down = (_adapter(active.get(name, ()), keep_copies) for name in ("gate_up_proj", "down_proj"))
    if up and not down:
        down = _silent(experts, up.rank, w2_EHI.shape[2], w2_EHI.shape[1], up.lora_A.dtype, up.lora_A.device)
    elif down and not up:
        up = _silent(experts, down.rank, w1_EJH.shape[2], w1_EJH.shape[1], down.lora_A.dtype, down.lora_A.device)
    return up, down


@functools.lru_cache(maxsize=2)
def _silent(experts: int, rank: int, size_in: int, size_out: int, dtype: torch.dtype, device: torch.device) -> Adapter:
    """One for all layers: nothing ever writes to it."""
    lora_A = torch.zeros(experts * rank, size_in, dtype=dtype, device=device)
    return Adapter(lora_A, torch.zeros(size_out, rank * experts, dtype=dtype, device=device), experts, 1.0)


def _adapter(loras: Any, keep_copies: bool = True) -> Adapter | None:
    if not loras:
        return None
    if len(loras) > 1:
        raise ValueError(f"{len(loras)} adapters switched on at once; the kernels take one, switch the others off")
    (lora,) = loras
    return _kept(lora) if keep_copies else _passing(lora)


def _kept(lora: Lora) -> Adapter:
    """One Adapter a pair of masters, kept on the parameter itself: its copies for the kernels then live exactly as long as it does. What was computed
    for one call gets one for that call: kept on its tensor it would be a ring, and stay until somebody collects."""
    if not lora.A.is_leaf:
        return _passing(lora)
    kept: Adapter | None = getattr(lora.A, "livery_adapter", None)
    if kept is None or kept.lora_B is not lora.B or kept.scale != lora.scaling:
        kept = Adapter(lora.A, lora.B, lora.num_experts, lora.scaling)
        lora.A.livery_adapter = kept  # type: ignore[attr-defined]
    return kept


def _passing(lora: Lora) -> Adapter:
    return Adapter(lora.A, lora.B, lora.num_experts, lora.scaling, keep_copies=False)


def _is_silu(experts: Any) -> bool:
    probe = torch.linspace(-4, 4, 9)
    return torch.allclose(experts.act_fn(probe), nn.functional.silu(probe))
