"""The gated delta net: projections as one product, convolution and split in one kernel, flash-linear-attention's rule without repeated heads.

Shape letters: B rows, S tokens a row, T = B·S tokens, C channels of the convolution, D numbers of a head.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels.conv import TAPS
from kernels.lean import conv_silu_split, gated_rms_norm
from training.lean.handover import frozen, stock, untouched
from training.lean.linears import Inputs
from training.lean.segments import chunk_indices, document_numbers
from training.packing import has_fast_rule


def inputs() -> dict[str, Inputs]:
    return {"in": Inputs("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "out": Inputs("out_proj")}


def problem(net: Any) -> str:
    conv = net.conv1d
    if type(conv) is not nn.Conv1d or conv.bias is not None or conv.kernel_size != (TAPS,):
        return f"conv1d is {conv}, want {TAPS} taps and no bias"
    if net.activation not in ("silu", "swish"):
        return f"its activation is {net.activation}, want silu"
    if not (untouched(conv) and untouched(net.norm)):
        return "conv1d or norm has a hook or another forward"
    return next((found for each in (conv, net.norm) if (found := frozen(each.weight))), "") or next(
        (found for each in (net.A_log, net.dt_bias) if (found := frozen(each))), ""
    )


def forward(
    self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Tensor | None = None, **options: Any
) -> Tensor:
    ends, numbers = options.get("cu_seq_lens_q"), options.get("seq_idx")
    if ends is None and numbers is not None:
        raise ValueError(
            f"layer {self.layer_idx}: packed documents by seq_idx alone, and the rule's state would go from one to the next; want cu_seq_lens_q, too"
        )
    if cache_params is not None or not untouched(self.norm):
        return stock(  # type: ignore[no-any-return]
            self, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **options
        )
    if attention_mask is not None:
        hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
    B, S, _ = hidden_states.shape
    qkv, gate, beta, decay = self.livery_inputs["in"](self, hidden_states)
    documents_T = document_numbers(B, S, qkv.device, options)
    mixed = conv_silu_split(qkv.view(B * S, -1), self.conv1d.weight.squeeze(1), documents_T, self.key_dim)
    query, key, value = (
        each.view(B, S, -1, D)
        for each, D in zip(mixed, (self.head_k_dim, self.head_k_dim, self.head_v_dim), strict=True)
    )
    y = delta_rule(
        sys.modules[type(self).__module__], self.A_log, self.dt_bias, query, key, value, decay, beta, options
    )
    D = self.head_v_dim
    y_TD = gated_rms_norm(y.reshape(-1, D), gate.view(-1, D), self.norm.weight, self.norm.variance_epsilon)
    out: Tensor
    (out,) = self.livery_inputs["out"](self, y_TD.view(B, S, -1))
    return out


def delta_rule(
    modeling: Any,
    A_log: Tensor,
    dt_bias: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """[B, S, value heads, D]. `decay` and `beta` are what the projections gave, before their activations."""
    ends, fast = options.get("cu_seq_lens_q"), fast_rule(query.device)
    if fast is not None:
        return fast(  # type: ignore[no-any-return]
            query,
            key,
            value,
            g=decay,
            beta=beta,
            A_log=A_log,
            dt_bias=dt_bias,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens=ends,
            chunk_indices=chunk_indices(options, query.device),
        )[0]
    # The model's own, as `training.packing` has taught it packed rows.
    return modeling.torch_chunk_gated_delta_rule(  # type: ignore[no-any-return]
        query,
        key,
        value,
        g=-A_log.float().exp() * nn.functional.softplus(decay.float() + dt_bias),
        beta=torch.sigmoid(beta),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=ends,
    )[0]


def fast_rule(device: torch.device) -> Callable[..., Any] | None:
    """What computes the rule on a card; None elsewhere."""
    return _fla() if device.type == "cuda" else None


@functools.cache
def _fla() -> Callable[..., Any] | None:
    """flash-linear-attention's kernel."""
    if not has_fast_rule():
        return None
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule  # type: ignore[no-any-return]
