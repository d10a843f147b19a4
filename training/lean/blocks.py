"""Norms, dense MLPs, the router, and the sparse block around its routed experts.

Shape letters: T tokens, H hidden, E experts, k chosen of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from kernels.lean import rms_norm, shared_add, silu_mul, top_k_router
from training.lean.attention import epsilon
from training.lean.handover import frozen, hooked, stock, untouched
from training.lean.linears import Inputs


def norm_problem(norm: Any) -> str:
    return frozen(norm.weight)


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, epsilon(self), zero_centered=self.livery_zero_centered)


def mlp_inputs() -> dict[str, Inputs]:
    return {"in": Inputs("gate_proj", "up_proj"), "out": Inputs("down_proj")}


def mlp_problem(mlp: Any) -> str:
    return "" if isinstance(mlp.act_fn, SiLUActivation | nn.SiLU) else f"its activation is {mlp.act_fn}, want SiLU"


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    gate, up = self.livery_inputs["in"](self, x)
    out: Tensor
    (out,) = self.livery_inputs["out"](self, silu_mul(gate, up))
    return out


def router_forward(self: Any, hidden_states: Tensor, logits_TE: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [T, E], weights [T, k], experts [T, k]). The block that has the logits already hands them in: who listens at the router for an
    auxiliary loss then still hears them."""
    if logits_TE is None:
        logits_TE = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    normalise = getattr(self, "norm_topk_prob", True)
    return logits_TE, *top_k_router(logits_TE, self.top_k, normalise=normalise)


def block_inputs(shared: bool) -> dict[str, Inputs]:
    if not shared:
        return {"in": Inputs("gate.weight")}
    names = ("gate.weight", "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert_gate")
    return {"in": Inputs(*names), "out": Inputs("shared_expert.down_proj")}


def block_problem(block: Any) -> str:
    shared = getattr(block, "shared_expert", None)
    if shared is not None and hooked(shared):
        return "shared_expert has a hook"
    return mlp_problem(shared) if shared is not None else ""


class Routed(NamedTuple):
    """What the routed experts need, and the shared expert's part."""

    expert_Tk: Tensor
    weight_Tk: Tensor
    shared: tuple[Tensor, Tensor] | None
    """(shared [T, H], its gate before the sigmoid [T, 1])"""


def route(block: Any, x_TH: Tensor) -> Routed | None:
    """None where only the stock forward will do."""
    if not _ours_inside(block):
        return None
    logits_TE, *rest = block.livery_inputs["in"](block, x_TH)
    _, weight_Tk, expert_Tk = block.gate(x_TH, logits_TE=logits_TE)
    if not rest:
        return Routed(expert_Tk, weight_Tk, None)
    gate, up, gate_T1 = rest
    (shared,) = block.livery_inputs["out"](block, silu_mul(gate, up))
    return Routed(expert_Tk, weight_Tk, (shared, gate_T1))


def join(experts_TH: Tensor, routed: Routed, residual_TH: Tensor | None) -> Tensor:
    if routed.shared is None:
        return experts_TH if residual_TH is None else experts_TH + residual_TH
    return shared_add(experts_TH, *routed.shared, residual_TH)


def block_forward(self: Any, hidden_states: Tensor, residual: Tensor | None = None) -> Tensor:
    """[B, S, H]; with the residual added, if it is given."""
    H = hidden_states.shape[-1]
    x_TH = hidden_states.reshape(-1, H)
    routed = route(self, x_TH)
    if routed is None:
        out = stock(self, hidden_states)
        return out if residual is None else residual + out  # type: ignore[no-any-return]
    experts_TH = self.experts(x_TH, routed.expert_Tk, routed.weight_Tk)
    flat = None if residual is None else residual.reshape(-1, H)
    return join(experts_TH, routed, flat).view(hidden_states.shape)


def _ours_inside(block: Any) -> bool:
    """Router and shared expert are as they were when this was installed."""
    gate_is_ours = getattr(block.gate.__dict__.get("forward"), "__func__", None) is router_forward
    shared = getattr(block, "shared_expert", None)
    if not gate_is_ours or shared is None:
        return gate_is_ours
    forward = getattr(shared.__dict__.get("forward"), "__func__", None)
    return forward is mlp_forward and not hooked(shared) and untouched(shared.act_fn)
