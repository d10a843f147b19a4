"""What a token of LoRA training costs in arithmetic, and how much of a card that uses. Recomputed layers are not counted: nobody asked for them.

The base is frozen, so its backward pass makes the gradient of its input (2N) and never of its weights: 4N a token, not 6N. On Qwen3.6-35B-A3B,
2.95 billion weights are active: 11.8 GFLOP a token for the base.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.contract.cards import CARDS
from training.contract.recipe import Adapters, CptPhase, DpoPhase, GrpoPhase, KtoPhase, SftPhase, Tier
from training.contract.shapes import ModelShape

PEAK_TFLOPS: dict[Tier, float] = {tier: card.peak_tflops for tier, card in CARDS.items() if tier != "rehearsal"}
"""By data sheet; see `training.contract.cards`. The rehearsal has no card, so nothing to hold its arithmetic against."""


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


# Everything outside the routed experts: norms, gates, convolutions and casts are bound by memory, so it takes several times what its arithmetic would at
# the card's matrix rate. On an H200 of 742 TFLOP/s lean layers that compute all but the experts again took 0.582 s of 16,384 tokens. By training/RESULTS.md,
# 767 and 0.593, it is 0.32, and 0.42 with nothing computed again.
LEAN_SHARE = 0.336
# As transformers and PEFT have it, with whole layers computed again: 1.57 s, and their forward once more is a third of forward and backward together.
STOCK_SHARE, RECOMPUTED = 0.156, 4 / 3


def predicted_tokens_s(
    shape: ModelShape,
    adapters: Adapters,
    length: float,
    *,
    layer_s: float,
    layer_tokens: int,
    matmul_tflops: float,
    lean: bool = True,
) -> float:
    """Training tokens a second that a card can reach by what was measured on it: `layer_s`, forward and backward of one layer of routed experts
    over `layer_tokens`, and the rate of a large matrix product. It is the card's side alone: small micro-batches wait for the host.

    `lean`: on the layers of `training.lean`, as every known family trains on a card that has room to keep all but its token mixers (one that
    recomputes whole layers is about a seventh slower). False: as transformers and PEFT have it, with whole layers recomputed.
    """
    again, share = (1.0, LEAN_SHARE) if lean else (RECOMPUTED, STOCK_SHARE)
    flops = token_flops(shape, adapters, length).total - expert_flops(shape, adapters)
    experts_s = shape.layers * layer_s / layer_tokens
    rest_s = flops / (matmul_tflops * 1e12 * share)
    return 1 / (again * (experts_s + rest_s))


def expert_flops(shape: ModelShape, adapters: Adapters) -> float:
    """Of one token in its routed experts, forward and backward, adapters included."""
    met = shape.experts_per_token / shape.experts
    routed = shape.lora_parameters(adapters).get("routed_experts", 0)
    return 4.0 * shape.expert_parameters * met + 6.0 * routed * met


def step_tokens(phase: CptPhase | SftPhase | DpoPhase | KtoPhase | GrpoPhase) -> int:
    """Tokens of one optimizer step with full rows; a DPO row holds two answers."""
    return phase.batch_size * phase.accumulation * phase.max_length * (2 if isinstance(phase, DpoPhase) else 1)


def utilisation(flops_per_token: float, tokens_per_s: float, peak_tflops: float) -> float:
    """MFU: the share of the card's peak that went into useful arithmetic."""
    return flops_per_token * tokens_per_s / (peak_tflops * 1e12)
