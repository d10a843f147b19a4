"""Softmax attention with its projections, norms and rotation fused; packed rows by a kernel that goes by their borders on a card.

Shape letters: B rows, S tokens a row, T = B·S tokens, N heads, K key-value heads, D numbers of a head, R of them rotated.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.lean import norm_rope, query_gate_norm_rope, sigmoid_mul
from training.lean import cudnn_attention, packed_attention
from training.lean.handover import frozen, hooked, stock, untouched
from training.lean.linears import Inputs

_MASKED = ("sdpa", "eager")  # implementations that tell documents apart by a mask and by nothing else


def inputs() -> dict[str, Inputs]:
    return {"in": Inputs("q_proj", "k_proj", "v_proj"), "out": Inputs("o_proj")}


def problem(attention: Any) -> str:
    if attention.attention_dropout:
        return f"attention_dropout is {attention.attention_dropout}, want 0"
    if getattr(attention, "sliding_window", None) is not None:
        return f"its window is {attention.sliding_window} tokens, want full attention"
    if not (untouched(attention.q_norm) and untouched(attention.k_norm)):
        return "q_norm or k_norm has a hook or another forward"
    return frozen(attention.q_norm.weight) or frozen(attention.k_norm.weight)


def forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    if past_key_values is not None or hooked(self.q_norm) or hooked(self.k_norm):
        _refuse_leak(self, attention_mask, options)
        return stock(  # type: ignore[no-any-return]
            self,
            hidden_states,
            position_embeddings=position_embeddings,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            **options,
        )
    B, S, _ = hidden_states.shape
    query, key, value = (each.view(B * S, -1) for each in self.livery_inputs["in"](self, hidden_states))
    cos_TR, sin_TR = (each.expand(B, -1, -1).reshape(B * S, -1) for each in position_embeddings)
    rope = {"cos_TR": cos_TR, "sin_TR": sin_TR, "zero_centered": self.livery_zero_centered}
    D = self.head_dim
    gate_TND = None
    if self.livery_gated:
        q_TND, gate_TND = query_gate_norm_rope(
            query.view(B * S, -1, 2 * D), self.q_norm.weight, eps=epsilon(self.q_norm), **rope
        )
    else:
        q_TND = norm_rope(query.view(B * S, -1, D), self.q_norm.weight, eps=epsilon(self.q_norm), **rope)
    k_TKD = norm_rope(key.view(B * S, -1, D), self.k_norm.weight, eps=epsilon(self.k_norm), **rope)
    mixed_TND, weights = _attend(self, (B, S), q_TND, k_TKD, value.view(B * S, -1, D), attention_mask, options)
    if gate_TND is not None:
        mixed_TND = sigmoid_mul(mixed_TND, gate_TND)
    (out,) = self.livery_inputs["out"](self, mixed_TND.reshape(B, S, -1))
    return out, weights


def epsilon(norm: Any) -> float:
    """The families spell it in two ways."""
    return float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)


def _attend(
    self: Any, rows: tuple[int, int], q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, mask: Tensor | None, options: Any
) -> tuple[Tensor, Tensor | None]:
    if options.get("cu_seq_lens_q") is not None and takes_packed(q_TND) and not options.get("output_attentions"):
        return _packed(q_TND, k_TKD, v_TKD, self.scaling, options), None
    _refuse_leak(self, mask, options)
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, sys.modules[type(self).__module__].eager_attention_forward
    )
    query, key, value = (each.view(*rows, -1, self.head_dim).transpose(1, 2) for each in (q_TND, k_TKD, v_TKD))
    mixed, weights = interface(self, query, key, value, mask, dropout=0.0, scaling=self.scaling, **options)
    return mixed.reshape(q_TND.shape), weights


def takes_packed(query: Tensor) -> bool:
    """Whether packed rows go through a kernel that needs no mask."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and _varlen_attn() is not None


def packed_choice(model: nn.Module) -> packed_attention.Choice | None:
    """Which kernel this model's packed rows get; None where they get none, or no attention of the model is ours. The first call on a card checks it."""
    attention: Any = next((each for each in model.modules() if _is_ours(each)), None)
    if attention is None:
        return None
    weight = attention.q_norm.weight
    heads, head_size = attention.config.num_attention_heads, attention.head_dim
    query = weight.new_empty((0, heads, head_size))
    return _choice(query, heads // attention.num_key_value_groups) if takes_packed(query) else None


def _is_ours(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) is forward


def _packed(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, scaling: float, options: dict[str, Any]) -> Tensor:
    attend = cudnn_attention.attend if _choice(q_TND, k_TKD.shape[1]).cudnn else torchs
    ends = options["cu_seq_lens_q"].to(q_TND.device, torch.int32)
    return attend(q_TND, k_TKD, v_TKD, ends, int(options["max_length_q"]), scaling)


def _choice(query: Tensor, key_heads: int) -> packed_attention.Choice:
    *_, heads, head_size = query.shape
    return packed_attention.choose(
        packed_attention.Shapes(heads, key_heads, head_size, query.dtype), query.device, torchs
    )


def torchs(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, ends_E: Tensor, longest: int, scale: float) -> Tensor:
    """torch's variable-length kernel."""
    attend, known = _varlen_attn() or (None, frozenset())
    assert attend is not None
    extra: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "scale" in known:
        extra["scale"] = scale
    elif scale != q_TND.shape[-1] ** -0.5:
        q_TND = q_TND * (scale * q_TND.shape[-1] ** 0.5)
    if "enable_gqa" in known:
        extra["enable_gqa"] = q_TND.shape[1] != k_TKD.shape[1]
    elif q_TND.shape[1] != k_TKD.shape[1]:
        share = q_TND.shape[1] // k_TKD.shape[1]
        k_TKD, v_TKD = (each.repeat_interleave(share, dim=1) for each in (k_TKD, v_TKD))
    return attend(q_TND, k_TKD, v_TKD, ends_E, ends_E, longest, longest, **extra)  # type: ignore[no-any-return]


@functools.cache
def _varlen_attn() -> tuple[Callable[..., Any], frozenset[str]] | None:
    """torch's kernel and the names of its arguments: 2.11 and 2.13 say in other words that it is causal."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)


def _refuse_leak(self: Any, mask: Tensor | None, options: dict[str, Any]) -> None:
    """ValueError where packed documents would read each other, or a token those after it: only the variable-length kernel does without a mask."""
    ends = options.get("cu_seq_lens_q")
    if ends is None or self.config._attn_implementation not in _MASKED:
        return
    documents = len(ends) - 1
    stands_for_none = mask is not None and mask.shape[-1] == 1 and int(options.get("max_length_q", 2)) > 1
    if stands_for_none or (mask is None and documents > 1):
        raise ValueError(
            f"layer {self.layer_idx}: {documents} packed documents without an attention mask; want the model's own mask here (leave attention_mask out)"
        )
