"""What a run needs of its card, in GB (10^9 bytes), by arithmetic on the recipe and the model's shape; and what to change if it is too much.

Where the numbers that are not counts come from: 8-bit AdamW state of 2.03 bytes a parameter was measured with torchao on LoRA-shaped tensors.
What a layer keeps and what it works with were fitted to full-depth steps of Qwen3.6-35B-A3B on an H200 with lean modules, in GB above the static parts
at 4,096 / 8,192 / 16,384 tokens a micro-batch: full 1.7 / - / 5.5, experts_kept 5.3 / - / 18.8, mixer - / - / 27.2, none 18.3 / 35.6 / -. As CUDA
graphs they took as much of the card, 19.4 / 36.1 / 21.1, with the allocator of `training.allocator`; without it up to 10 more.
Grouped products, where a card takes no kernels of ours, work with more and make no copies of the adapters: 3.2 and 9.8 GB with whole layers recomputed.
The prefill of a generation is counted from `kernels.moe_lora`, and on the CPU from `training.experts`, not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal, get_args

from training.contract.model import Frozen
from training.contract.recipe import GrpoPhase, KtoPhase, Phase, Recipe, Recompute
from training.contract.shapes import ModelShape

# The adapters are fp32 whatever the base: in bf16 most updates vanish at learning rates of 1e-5 and below.
WEIGHT_B, GRADIENT_B = 4.0, 4.0
OPTIMIZER_B = {"adamw_8bit": 2.03, "adamw": 8.0}
CONTEXT_GB = 1.5
USABLE = 0.97
"""Of a card's memory; the rest is the allocator's fragmentation and the driver's part."""
POLICIES: tuple[Recompute, ...] = get_args(Recompute)
"""From the fastest, which keeps everything, to the one that keeps least."""
# Numbers that a layer holds while it is recomputed and differentiated, in units of the widths of its products.
_WORK = 1.28
# Numbers that a token mixer keeps for its backward pass, in units of its widths.
_MIXER_KEPT = 1.865
# What a layer keeps on the CPU, in plain torch, in units of the widths of its products.
_PLAIN_WORK = 2.8
# What `auto` takes instead of `full`, or of the recipe's micro-batch, must leave so much of its activations free: the fit is good to 5 %, and a card that runs full loses the step.
_MARGIN = 0.1
# The kernels compute with copies of the adapters in bf16.
_COPY_B = 2.0
# A forward without gradients: what stands at once of a layer, in the same units; on the CPU the sorted rows, both products and their sum.
_FORWARD_WORK, _PLAIN_FORWARD_WORK = 0.6, 1.5
# The head makes the logits of so many tokens at a time, in the model's dtype, and turns them into their gradient in place.
_HEAD_TOKENS = 2048
_GB = 1e9


class MemoryPlan(Frozen):
    """The hungriest moment of the run on its card."""

    phase: str
    needed_gb: float
    available_gb: float
    fits: bool
    parts: dict[str, float]
    """GB by what takes it: base, adapters, optimizer, and what training or generating adds."""
    exact: bool = True
    """False if the model's shape was estimated from its size."""
    gpus: int = 1
    """Cards of the box, each of which needs that much."""
    execution: Literal["host", "all_gather", "expert_parallel"] | None = None
    """How a 4-bit base is held; see `training.contract.quantised`. None: the base is not quantised."""
    host_gb: float | None = None
    """Host memory that a 4-bit base takes of the whole box."""
    recompute: dict[str, Recompute] = {}
    """By phase, what of each layer its backward pass computes again. Empty for a base in 4 bits, whose layers are always recomputed."""
    micro_batches: dict[str, tuple[int, int]] = {}
    """By phase whose steps are split otherwise than the recipe says: (rows at once, micro-batches a step)."""


def plan_memory(recipe: Recipe, shape: ModelShape, available_gb: float) -> MemoryPlan:
    """The hungriest phase of `recipe` against the `available_gb` of its card, with the recompute policies that it has room for."""
    policies = {each.name: recompute_for(recipe, each, shape, available_gb) for each in recipe.phases}
    hungriest = {
        each.name: max(moments(recipe, each, shape, policies[each.name]), key=_total) for each in recipe.phases
    }
    phase, parts = max(hungriest.items(), key=lambda found: _total(found[1]))
    needed = _total(parts)
    return MemoryPlan(
        phase=phase,
        needed_gb=round(needed, 2),
        available_gb=round(available_gb, 2),
        fits=needed <= available_gb,
        parts={part: round(gb, 2) for part, gb in parts.items()},
        exact=shape.exact,
        recompute=policies,
    )


def recompute_for(recipe: Recipe, phase: Phase, shape: ModelShape, available_gb: float) -> Recompute:
    """The recipe's word; where that is `auto`, the fastest policy whose training fits `available_gb` with a margin, at worst `full`. On the CPU `none`, and
    `full` for what is not `is_measured`."""
    if recipe.recompute != "auto":
        return recipe.recompute
    if recipe.box.device != "cuda":
        return "none"
    if not is_measured(recipe):
        return "full"
    for policy in POLICIES[:-1]:
        parts = next(moments(recipe, phase, shape, policy))
        if has_room(parts, available_gb):
            return policy
    return "full"


def is_measured(recipe: Recipe) -> bool:
    """Whether what a card keeps of a layer was measured: of our kernels alone, which compute routed experts with adapters, in bf16."""
    return recipe.model.dtype == "bfloat16" and "routed_experts" in recipe.adapters.groups


def has_room(parts: Mapping[str, float], available_gb: float) -> bool:
    """Whether a backward pass of these parts fits with the margin that anything faster than need be must leave."""
    return _total(parts) + _MARGIN * parts["activations"] <= available_gb


def moments(
    recipe: Recipe, phase: Phase, shape: ModelShape, recompute: Recompute | None = None
) -> Iterator[dict[str, float]]:
    """GB by part at each moment of a phase that may be its hungriest: the backward pass first and, for GRPO, the prefill of a generation. Without
    `recompute` by the recipe's word, where that is `auto` by the policy that takes least."""
    adapters = adapter_parameters(recipe, shape)
    parts = {
        "base": shape.parameters * shape.bytes_per_weight(recipe.model.dtype) / _GB,
        "adapters": adapters * WEIGHT_B / _GB,
        "optimizer": adapters * OPTIMIZER_B[recipe.optimizer] / _GB,
    }
    if recipe.box.device == "cuda":
        parts["context"] = CONTEXT_GB
        if recipe.model.dtype == "bfloat16":
            parts["copies"] = adapters * _COPY_B / _GB
    if isinstance(phase, GrpoPhase) and phase.beta > 0:
        parts["reference adapter"] = parts["adapters"]
    policy = recompute or ("full" if recipe.recompute == "auto" else recipe.recompute)
    yield {**parts, "gradients": adapters * GRADIENT_B / _GB, **_backward(recipe, phase, shape, policy)}
    if isinstance(phase, GrpoPhase):
        # Gradients are freed before the next step's completions are generated.
        yield {**parts, **_generation(recipe, phase, shape)}


def adapter_parameters(recipe: Recipe, shape: ModelShape) -> int:
    """Trainable parameters of the recipe's groups at its rank."""
    return sum(shape.lora_parameters(recipe.adapters).values())


Plan = Callable[[Recipe, ModelShape, float], MemoryPlan]


def suggest(recipe: Recipe, shape: ModelShape, tiers: Mapping[str, float], plan: Plan) -> str | None:
    """The first change that makes the recipe fit by `plan` and what it would then take, or None: nothing that is tried does.

    `tiers` are the GB for use of the recipe's own tier and of those that may be taken instead, by name.
    """
    here = tiers[recipe.box.tier]
    tight = {
        each.name for each in recipe.phases if not plan(recipe.model_copy(update={"phases": (each,)}), shape, here).fits
    }
    for what, changed in _changes(recipe, tight):
        planned = plan(changed, shape, here)
        if planned.fits:
            return f"{what}: {planned.needed_gb:.1f} GB"
    for gb, tier in sorted((gb, tier) for tier, gb in tiers.items()):
        planned = plan(recipe, shape, gb)
        if planned.fits:
            return f"box.tier {tier}: {planned.needed_gb:.1f} of its {gb:.1f} GB"
    return None


def _backward(recipe: Recipe, phase: Phase, shape: ModelShape, policy: Recompute) -> dict[str, float]:
    """Activations of one micro-batch, and what the head needs above them."""
    # DPO runs chosen and rejected in one batch of twice the rows.
    rows = phase.batch_size * (2 if phase.kind == "dpo" else 1)
    tokens = rows * (phase.max_length + (phase.max_completion_length if isinstance(phase, GrpoPhase) else 0))
    width_b = shape.bytes_per_weight(recipe.model.dtype)
    work = tokens * _WORK * layer_widths(shape) * width_b
    kept = shape.layers * tokens * _kept(recipe, shape, policy) * width_b
    head = (min(tokens, _HEAD_TOKENS) * shape.vocabulary + tokens * shape.hidden) * width_b
    # Either the head is at work or a layer.
    return {"activations": (kept + work) / _GB, "logits": max(0.0, head - work) / _GB}


def _kept(recipe: Recipe, shape: ModelShape, policy: Recompute) -> float:
    """Numbers a token that one layer keeps from its forward to its backward pass."""
    if recipe.box.device != "cuda" and policy == "none":
        return shape.hidden + _PLAIN_WORK * layer_widths(shape)
    if policy == "full":
        return shape.hidden
    # Gate and up of every routed row, and what goes in.
    experts = shape.hidden + 2 * shape.experts_per_token * shape.intermediate
    if policy == "experts_kept":
        return shape.hidden + experts
    # Norms, router and shared expert keep about three widths more.
    rest = 4 * shape.hidden + experts
    return rest if policy == "mixer" else rest + _MIXER_KEPT * _mixer_widths(shape)


def _generation(recipe: Recipe, phase: GrpoPhase, shape: ModelShape) -> dict[str, float]:
    """Caches of all completions of one optimizer step, which are generated together, and the forward over their prompts."""
    rows = phase.batch_size * phase.accumulation
    width_b = shape.bytes_per_weight(recipe.model.dtype)
    keys_values = shape.attention_layers * 2 * shape.kv_heads * shape.head_dim * width_b
    states = shape.linear_layers * shape.value_heads * shape.key_head_dim * shape.value_head_dim * 4
    work = (_FORWARD_WORK if recipe.box.device == "cuda" else _PLAIN_FORWARD_WORK) * layer_widths(shape)
    prompts = rows * phase.max_length * (shape.hidden + work) * width_b
    return {
        "generation caches": rows * ((phase.max_length + phase.max_completion_length) * keys_values + states) / _GB,
        "prompts": prompts / _GB,
    }


def layer_widths(shape: ModelShape) -> int:
    """Numbers a token that the products of one layer take and make: its routed experts, the shared one, the wider mixer."""
    routed = shape.experts_per_token * (2 * shape.hidden + 3 * shape.intermediate)
    shared = 3 * shape.shared_intermediate + shape.hidden if shape.shared_intermediate else 0
    return routed + shared + _mixer_widths(shape)


def _mixer_widths(shape: ModelShape) -> int:
    attention = (shape.heads * (3 if shape.gated_query else 2) + 2 * shape.kv_heads) * shape.head_dim
    linear = 2 * shape.key_width + 3 * shape.value_width if shape.linear_layers else 0
    return max(attention, linear) + shape.hidden


def _total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


def _changes(recipe: Recipe, tight: set[str]) -> Iterator[tuple[str, Recipe]]:
    """One change at a time, the least harmful first: the first two change no step. Phases that are not `tight` are left as they are."""
    for field in ("recompute", "micro_batches"):
        if getattr(recipe, field) != "auto":
            yield f"{field}: auto", recipe.model_copy(update={field: "auto"})
    if recipe.optimizer != "adamw_8bit":
        yield "optimizer: adamw_8bit", recipe.model_copy(update={"optimizer": "adamw_8bit"})
    for change in (_half_batch, _half_generation, _half_length):
        phases, words = _changed(recipe, tight, change)
        if words:
            yield words, recipe.model_copy(update={"phases": phases})
    rank = recipe.adapters.rank
    while rank > 8:
        rank //= 2
        yield (
            f"adapters.rank {rank}",
            recipe.model_copy(update={"adapters": recipe.adapters.model_copy(update={"rank": rank})}),
        )


Change = Callable[[Phase], tuple[str, dict[str, int]]]


def _changed(recipe: Recipe, tight: set[str], change: Change) -> tuple[tuple[Phase, ...], str]:
    """The phases with the tight ones changed, and the change in words; no words if it leaves everything as it is."""
    names: dict[str, list[str]] = {}
    phases = []
    for phase in recipe.phases:
        said, update = change(phase) if phase.name in tight else ("", {})
        if said:
            names.setdefault(said, []).append(phase.name)
        phases.append(phase.model_copy(update=update) if said else phase)
    return tuple(phases), "; ".join(f"{said} in {', '.join(sorted(those))}" for said, those in names.items())


def _half_batch(phase: Phase) -> tuple[str, dict[str, int]]:
    least = 4 if isinstance(phase, KtoPhase) else 2
    if phase.batch_size < least:
        return "", {}
    # Twice the accumulation keeps the rows of an optimizer step.
    update = {"batch_size": phase.batch_size // 2, "accumulation": phase.accumulation * 2}
    return f"batch_size {update['batch_size']} with accumulation {update['accumulation']}", update


def _half_generation(phase: Phase) -> tuple[str, dict[str, int]]:
    accumulation = phase.accumulation // 2
    if not isinstance(phase, GrpoPhase) or not accumulation or phase.batch_size * accumulation % phase.generations:
        return "", {}
    return f"accumulation {accumulation} (completions generated together)", {"accumulation": accumulation}


def _half_length(phase: Phase) -> tuple[str, dict[str, int]]:
    length = max(16, phase.max_length // 2)
    return (f"max_length {length}", {"max_length": length}) if length < phase.max_length else ("", {})
