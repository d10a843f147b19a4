"""What a token of LoRA training costs in arithmetic, and how much of a card that uses. Recomputed layers are not counted: nobody asked for them.

The base is frozen, so its backward pass makes the gradient of its input (2N) and never of its weights: 4N a token, not 6N. On Qwen3.6-35B-A3B,
2.95 billion weights are active: 11.8 GFLOP a token for the base.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.contract.recipe import Adapters, Tier
from training.contract.shapes import ModelShape

PEAK_TFLOPS: dict[Tier, float] = {"rtxpro6000": 503.8, "h200": 989.0, "b200": 2250.0}
"""Dense bf16 with fp32 sums, as the data sheets have it: NVIDIA's RTX Blackwell PRO paper, the H200 and DGX B200 data sheets (half of what they
give with sparsity). What a card really reaches is less: 790 was measured on an H200, which then is the better peak."""


@dataclass(frozen=True)
class TokenFlops:
    """Useful floating point operations of one token's forward and backward."""

    base: float
    lora: float
    attention: float
    """Scores, their use, and the gated delta net's state: what no weight is multiplied in."""

    @property
    def total(self) -> float:
        return self.base + self.lora + self.attention


def token_flops(shape: ModelShape, adapters: Adapters, length: float) -> TokenFlops:
    """Of a token in rows of `length` tokens, each of which sees half of them on average. Rows packed of several documents cost less attention."""
    scores = shape.attention_layers * 4 * shape.heads * shape.head_dim * length / 2
    # Per head the state [K, V] decays, is read, corrected and read again.
    states = shape.linear_layers * 8 * shape.value_heads * shape.key_head_dim * shape.value_head_dim
    return TokenFlops(
        base=4.0 * shape.active_parameters,
        # The adapters' weights do get a gradient.
        lora=6.0 * shape.active_lora_parameters(adapters),
        attention=3.0 * (scores + states),
    )


def utilisation(flops_per_token: float, tokens_per_s: float, peak_tflops: float) -> float:
    """MFU: the share of the card's peak that went into useful arithmetic."""
    return flops_per_token * tokens_per_s / (peak_tflops * 1e12)
