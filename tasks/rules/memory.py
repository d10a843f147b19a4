"""Does the run fit the card? Parts in GB (10^9 bytes), known before a cent is spent.

Numbers: parameter counts from the models' configurations on the meta device; 8-bit AdamW state of 2.03 bytes a parameter measured with
torchao; activations and buffers from full-depth steps with per-layer recompute (routed experts by grouped products, the rest stock:
3.2 GB above the static parts at 4,096 tokens a micro-batch, 9.8 GB at 16,384).
"""

from __future__ import annotations

from dataclasses import dataclass

from tasks.domain import MemoryFit
from tasks.errors import UserError
from tasks.rules.tiers import TIERS
from training.contract.recipe import Recipe

# fp32 weight, fp32 gradient, 8-bit AdamW state. bf16 adapters lose most updates at learning rates of 1e-5 and below.
WEIGHT_B, GRADIENT_B, OPTIMIZER_B = 4.0, 4.0, 2.03
CONTEXT_GB = 1.5
# Allocator fragmentation and the driver's own part.
USABLE = 0.97


@dataclass(frozen=True)
class Shape:
    """What of a model decides its memory. `lora_per_rank` is parameters per unit of rank, A and B together."""

    base_gb: float
    lora_per_rank: dict[str, float]
    activations_b: float
    """Bytes a token of the micro-batch: the layers' inputs, and the work of the one layer that is recomputed."""
    buffers_gb: float
    """Transient and independent of the tokens: logits in chunks, experts in flight, prefetched layers."""


QWEN36_35B = Shape(
    base_gb=69.32,  # the text model in bf16; vision tower and MTP layer are not loaded
    lora_per_rank={
        "routed_experts": 57_671_680,
        "attention": 215_040,
        "linear_attention": 675_840,
        "shared_expert": 307_200,
    },
    activations_b=540e3,
    buffers_gb=1.0,
)
# Experts stay in pinned host memory in 4 bit (128 GB) and stream through the card; attention in 4 bit and the rest are resident.
QWEN3_235B = Shape(
    base_gb=6.4,
    lora_per_rank={"routed_experts": 154_009_600, "attention": 3_174_400},
    activations_b=1.2e6,
    buffers_gb=4.3,
)


def memory_fit(recipe: Recipe) -> MemoryFit:
    """The parts of the hungriest phase against the tier's card."""
    parts = max((_parts(recipe, name) for name in recipe.phase_names), key=lambda found: sum(found.values()))
    needed = sum(parts.values())
    available = TIERS[recipe.box.tier].memory_gb * TIERS[recipe.box.tier].num_gpus * USABLE
    return MemoryFit(
        needed_gb=round(needed, 2),
        available_gb=round(available, 2),
        fits=needed <= available,
        parts={name: round(gb, 2) for name, gb in parts.items()},
    )


def require_fit(recipe: Recipe) -> MemoryFit:
    """The fit; UserError with the parts and what to change if there is none."""
    fit = memory_fit(recipe)
    if fit.fits:
        return fit
    parts = ", ".join(f"{name} {gb:.1f}" for name, gb in sorted(fit.parts.items(), key=lambda part: -part[1]))
    raise UserError(
        f"box.tier: {recipe.box.tier} has {fit.available_gb:.1f} GB for use, this recipe needs {fit.needed_gb:.1f} GB "
        f"({parts}); lower adapters.rank (now {recipe.adapters.rank}), batch_size or max_length, or take a larger tier"
    )


def adapter_parameters(recipe: Recipe) -> float:
    """Trainable parameters of the recipe's groups at its rank."""
    per_rank = shape_of(recipe).lora_per_rank
    return recipe.adapters.rank * sum(per_rank.get(group, 0.0) for group in recipe.adapters.groups)


def shape_of(recipe: Recipe) -> Shape:
    """The model's shape: exact for the two that Livery is made for, estimated from the size for any other."""
    model = recipe.model
    if model.family == "qwen3_5_moe" and 60 <= model.size_gb <= 80:
        return QWEN36_35B
    if model.family == "qwen3_moe" and model.size_gb >= 400:
        return QWEN3_235B
    parameters = model.size_gb * 1e9 / (2 if model.dtype == "bfloat16" else 4)
    # The 35B has 0.17 % of its parameters per unit of rank; smaller models have more, and theirs is little anyway.
    share = 0.0017 if model.size_gb > 1 else 0.02
    return Shape(
        base_gb=model.size_gb,
        lora_per_rank={"routed_experts": parameters * share, "attention": parameters * share * 0.02},
        activations_b=540e3 if model.size_gb > 1 else 50e3,
        buffers_gb=min(3.0, model.size_gb),
    )


def _parts(recipe: Recipe, name: str) -> dict[str, float]:
    phase, shape = recipe.phase(name), shape_of(recipe)
    adapters = adapter_parameters(recipe) / 1e9
    # DPO runs chosen and rejected in one batch of twice the rows.
    rows = phase.batch_size * (2 if phase.kind == "dpo" else 1)
    length = phase.max_length + (phase.max_completion_length if phase.kind == "grpo" else 0)
    parts = {
        "base": shape.base_gb,
        "adapters": adapters * WEIGHT_B,
        "gradients": adapters * GRADIENT_B,
        "optimizer": adapters * OPTIMIZER_B,
        "activations": rows * length * shape.activations_b / 1e9,
        "buffers": shape.buffers_gb,
    }
    if recipe.box.device == "cuda":
        parts["context"] = CONTEXT_GB
    if phase.kind == "grpo" and phase.beta > 0:
        parts["reference adapter"] = adapters * WEIGHT_B
    return parts
