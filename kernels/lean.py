"""All that a lean decoder layer is made of beside its products, attention and experts; each op a Triton kernel beside its plain twin.

Common to all: results in the dtype of the first tensor, sums in float32 (float64 of float64 tensors), no gradient for weights, no wait for the
host, grids made of shapes alone (a CUDA graph can hold them), autocast left outside. The plain twins round as transformers' modules do, after
each step; the kernels round once, at the end.
"""

from kernels.conv import conv_silu_split
from kernels.gates import shared_add, sigmoid_mul, silu_mul
from kernels.norms import add_rms_norm, gated_rms_norm, rms_norm
from kernels.rope import norm_rope, query_gate_norm_rope
from kernels.router import top_k_router

__all__ = [
    "add_rms_norm",
    "conv_silu_split",
    "gated_rms_norm",
    "norm_rope",
    "query_gate_norm_rope",
    "rms_norm",
    "shared_add",
    "sigmoid_mul",
    "silu_mul",
    "top_k_router",
]
