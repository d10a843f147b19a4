"""The decoder layer: its parts joined by fused sums, and what of it the backward pass computes again.

Shape letters: T tokens, H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernels.lean import add_rms_norm
from training.lean import blocks
from training.lean.attention import epsilon
from training.lean.handover import hooked, stock

RECOMPUTE = ("none", "mixer", "experts_kept", "full")
"""Nothing; norm and token mixer; all but the routed experts; the whole layer."""


def forward(self: Any, hidden_states: Tensor, **options: Any) -> Tensor:
    if options.get("past_key_values") is not None:
        return stock(self, hidden_states, **options)  # type: ignore[no-any-return]
    policy = self.livery_recompute if self.training and torch.is_grad_enabled() else "none"
    if policy == "full":
        out: Tensor = _again(self, lambda hidden: _feed(self, *_mix(self, hidden, options)), hidden_states)
        return out
    if policy == "experts_kept" and _is_lean(self.mlp, blocks.block_forward):
        return _all_but_experts_again(self, hidden_states, options)
    if policy in ("mixer", "experts_kept"):
        return _feed(self, *_again(self, lambda hidden: _mix(self, hidden, options), hidden_states))
    return _feed(self, *_mix(self, hidden_states, options))


def _mix(self: Any, hidden: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The sum behind the token mixer, and its norm."""
    x = self.input_layernorm(hidden)
    options = {name: value for name, value in options.items() if name != "past_key_values"}
    if hasattr(self, "linear_attn"):
        unknown = {"position_embeddings", "position_ids"}
        mixed = self.linear_attn(
            hidden_states=x, **{name: value for name, value in options.items() if name not in unknown}
        )
    else:
        mixed, _ = self.self_attn(hidden_states=x, **{"attention_mask": None, **options})
    norm = self.post_attention_layernorm
    if _is_lean(norm, blocks.norm_forward) and not hooked(norm):
        total, normed = add_rms_norm(
            mixed.to(hidden.dtype), hidden, norm.weight, epsilon(norm), zero_centered=norm.livery_zero_centered
        )
        return total, normed
    total = hidden + mixed
    return total, norm(total)


def _feed(self: Any, total: Tensor, normed: Tensor) -> Tensor:
    if _is_lean(self.mlp, blocks.block_forward):
        return self.mlp(normed, residual=total)  # type: ignore[no-any-return]
    out = self.mlp(normed)
    return total + (out[0] if isinstance(out, tuple) else out)  # type: ignore[no-any-return]


def _all_but_experts_again(self: Any, hidden: Tensor, options: dict[str, Any]) -> Tensor:
    """Neither the residual nor the shared expert is kept: what they add is summed inside what is computed again, where its gradient finds
    them, and once more behind the experts, in the one sum of the other policies. Another sum would round elsewhere, and a token whose
    scores are nearly tied would go to other experts in the layers behind."""
    H = hidden.shape[-1]

    def before(hidden: Tensor) -> tuple[Tensor | None, ...]:
        total, normed = _mix(self, hidden, options)
        x_TH = normed.reshape(-1, H)
        routed = blocks.route(self.mlp, x_TH)
        if routed is None:
            return total, normed, None, None
        total = total.reshape(-1, H)
        rest = blocks.join(total, routed, None)
        return rest, x_TH, routed.expert_Tk, routed.weight_Tk, total, *(routed.shared or ())

    rest, x, expert_Tk, weight_Tk, *parts = _again(self, before, hidden)
    if expert_Tk is None:
        return _feed(self, rest, x)
    experts_TH = self.mlp.experts(x, expert_Tk, weight_Tk)
    total, *shared = (part.detach() for part in parts)
    routed = blocks.Routed(expert_Tk, weight_Tk, tuple(shared) or None)
    out: Tensor = _Sum.apply(experts_TH, rest, lambda: blocks.join(experts_TH, routed, total))
    return out.view(hidden.shape)


class _Sum(torch.autograd.Function):
    """What `value` computes, as the sum of two tensors whose gradients it passes on; nothing of it is kept."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor, value: Callable[[], Tensor]) -> Tensor:
        return value()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        return dout, dout, None


def _again(self: Any, part: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    with self.livery_home.keeping() if self.livery_home else contextlib.nullcontext():
        return checkpoint(part, hidden, use_reentrant=False, preserve_rng_state=self.livery_random)


def _is_lean(module: Any, function: Any) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) is function
