"""Our computation and PEFT must read the same delta out of lora_A and lora_B.

A kernel that reads them in another order keeps every shape, moves the loss, gets its gradients and trains: an adapter that is nonsense to
everybody but itself, and passes every other check here. So one layer's answers are held against PEFT's own delta weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from training import experts, parts
from training.errors import LivenessError
from training.experts import ADAPTER

_TOKENS, _TOP_K = 8, 2
_TOLERANCE = 0.1  # of the delta's own effect; bfloat16 explains 0.02, another order of the experts makes 1.4


@torch.no_grad()
def require_reading(model: Any) -> None:
    """LivenessError at stage `canary` names the parameter whose delta comes out otherwise than PEFT's in the first layer of routed experts. Its lora_B
    hold noise meanwhile, and are put back bit for bit. Memory for one layer's delta, twice."""
    for name, wrapper in experts.outer_wrappers(model):
        for link in experts.chain(wrapper):
            off = _with_noise(wrapper, link)
            if not off <= _TOLERANCE:
                raise LivenessError(
                    f"{name}: the delta of {link.parameter_name} comes out {off:.2g} of its size away from PEFT's own",
                    stage="canary",
                    group=f"routed_experts.{link.parameter_name}",
                    tensor=f"{name}.lora_B" if link is wrapper else f"{name}.base_layer.lora_B",
                    cause="the computation reads the experts' factors in another order, or scales them otherwise",
                )
        return


def _with_noise(wrapper: Any, link: Any) -> float:
    a, b = link.lora_A[ADAPTER].weight, link.lora_B[ADAPTER].weight
    kept = b.detach().clone()
    # As large a delta as the weight itself, or a small alpha would drown in bfloat16's rounding.
    weight = getattr(experts.weights(wrapper), link.parameter_name)[0].float()
    size = weight.std() / (link.scaling[ADAPTER] * link.r[ADAPTER] ** 0.5 * a.std())
    try:
        b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(0)).to(b) * size)
        return _distance(wrapper, link)
    finally:
        b.copy_(kept)


def _distance(wrapper: Any, link: Any) -> float:
    """How far this one parameter's delta is from PEFT's, both by what they change in the layer's answers; relative."""
    module, active = experts._active_factors(wrapper)
    base, parameter = experts.weights(wrapper), link.parameter_name
    weight, part = base.gate_up_proj, parts.part_of(link.lora_A[ADAPTER].weight)
    first = part.first if part else 0
    hidden_TH = torch.randn(_TOKENS, weight.shape[-1], generator=torch.Generator().manual_seed(1)).to(weight)
    # Experts whose factors are here: PEFT's delta is theirs.
    here_Tk = (torch.arange(_TOKENS * _TOP_K, device=weight.device) % link.num_experts).view(_TOKENS, _TOP_K)
    expert_Tk = here_Tk + first
    weight_Tk = torch.full_like(expert_Tk, 1, dtype=weight.dtype) / _TOP_K

    ours = wrapper.livery_layer(module, hidden_TH, expert_Tk, weight_Tk, {parameter: active.get(parameter, ())})
    bare = _plain(base, hidden_TH, expert_Tk, None, parameter)
    wanted = _plain(base, hidden_TH, expert_Tk, link.get_delta_weight(ADAPTER), parameter, first) - bare
    return float((ours.float() - bare - wanted).norm() / wanted.norm())


def _plain(
    base: Any, hidden_TH: Tensor, expert_Tk: Tensor, delta: Tensor | None, parameter: str, first: int = 0
) -> Tensor:
    """The layer in float32, expert by expert, with PEFT's delta [n, O, I] of the experts from `first` on one parameter; each expert weighs the same."""

    def linear(x_H: Tensor, name: str, expert: int) -> Tensor:
        weight_OI: Tensor = getattr(base, name)[expert].float()
        changed_OI = weight_OI if delta is None or name != parameter else weight_OI + delta[expert - first].float()
        return changed_OI @ x_H

    answers = [
        torch.stack([linear(base._apply_gate(linear(x_H, "gate_up_proj", e)), "down_proj", e) for e in of_token]).mean(
            0
        )
        for x_H, of_token in zip(hidden_TH.float(), expert_Tk.tolist(), strict=True)
    ]
    return torch.stack(answers)
