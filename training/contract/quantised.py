"""What a 4-bit base takes of a box, how it would run there and how long that is: by arithmetic on the recipe and the model's shape. No card is asked.

Measured, on H200s with the real shapes of Qwen3-235B-A22B at full depth (random weights, rank 16, fp32 AdamW, rows of 4,096 tokens). Of this program
(`training/RESULTS.md`): peak GB 63.0 at 16k tokens on one card with the experts in host memory, 106.0 at 8k on each of two that gather; 34.0 ms a layer
there. Of a prototype: peak GB 52.8, 58.1 and 68.1 for 4k, 8k and 16k on each of four cards with tokens sent to the experts, 98.5 at 8k on each of two,
57.2 and 62.7 at 8k and 16k on one; thirteen layer times. The memory below is within 3 % of all eight, the time within 15 % of all. What was not measured
is arithmetic: other cards by their peak rate, other models by their shape.

GB are 10^9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from training.contract.cards import CARDS, MEASURED, THROUGH_HOST_GBS
from training.contract.families import FAMILIES
from training.contract.flops import token_flops
from training.contract.memory import CONTEXT_GB, GRADIENT_B, OPTIMIZER_B, USABLE, WEIGHT_B, layer_widths
from training.contract.recipe import Phase, Recipe, Tier
from training.contract.shapes import ModelShape

Strategy = Literal["host", "all_gather", "expert_parallel"]
STRATEGIES: tuple[Strategy, ...] = ("host", "all_gather", "expert_parallel")
BUILT: tuple[Strategy, ...] = ("all_gather", "host")
"""Those that a run can take now; the others are shown, and chosen by nobody."""

GIB = 2**30 / 1e9
NF4_B = 0.5625
"""Bytes a weight: 4 bits and a float32 scale for 64."""
# A layer at work in its backward pass holds this much of the widths of its products, in the model's dtype: fitted to the peaks above.
_WORK = 1.7
_HEAD_TOKENS = 1024
"""Tokens whose logits exist at a time, in fp32 with their gradient: 2.5 copies."""
_PREFETCHED_LAYERS = 2
_GATHERED_SHARE = 2 / 3
"""Of an unpacked layer, as if gate and up of one more were there: 3.1 GB of the 235B measured over the counts on each of two H200s, with either optimizer."""
_UNKNOWN = 0.1
"""Share by which a card's memory may turn out more than planned."""
_RANK_HOST_GB = 2.4
"""Of a process: 2.2 measured, and the reader's pinned buffers."""
_SYSTEM_GB = 2.0
_FETCHES = 2
"""A layer's weights are wanted in the forward pass and, recomputed, in the backward pass."""
# Useful arithmetic (recomputing not counted) on an H200 outside of waiting: between 34.0 ms a layer of 8k tokens of the 235B on each of two that gather,
# 65.7 of 16k on one, and the slower ones that other code took on four. That of the gated delta net is of transformers' own layers, 3.65 s for 32,768
# tokens of the 35B in two micro-batches.
_COMPUTE_TFLOPS = {"attention": 275.0, "gated_delta_net": 122.0}
_LAYER_S = 0.021
"""No layer is faster: its kernels are launched one by one. 22 ms at 2k tokens of the 235B, 21.6 at 4k of the 35B."""
# Of the shorter of computing and moving, what is not hidden behind the longer: 55.6 ms where the copies take 49.5 and the arithmetic 38.
_SERIAL = 0.15
_SHARED_BUS = 52.0 / 54.9
"""Of the rate of a card alone, what each gets while several copy from one host memory: fitted to 59.4 ms a layer of 8k tokens on each of four."""
_MOVED_TOKENS = 6
"""Passes of a token's hidden state over the links in expert parallelism: gathered and reduced in forward, recomputation and backward."""
_DISK_GBS = 1.5
"""A cold disk, as measured on one rented machine."""


@dataclass(frozen=True)
class Hardware:
    """A box as it is offered, or as a recipe's floors describe it."""

    gpus: int
    gpu_gb: float
    """Of one card."""
    host_gb: float
    dph_usd: float = 0.0
    tier: Tier | None = None
    """Whose card it is; None: a card that is not any tier's."""
    peak_tflops: float = CARDS[MEASURED].peak_tflops
    host_gbs: float = CARDS[MEASURED].host_gbs
    """GB/s that each card takes from pinned host memory while the others do so too."""
    link_gbs: float = CARDS[MEASURED].link_gbs
    """GB/s that a card takes in while all gather."""
    disk_gbs: float = _DISK_GBS

    @property
    def usable_gb(self) -> float:
        return self.gpu_gb * USABLE


@dataclass(frozen=True)
class Option:
    """One strategy on one box: GB by part of the hungriest card and of the host, and the seconds of an optimizer step, phase by phase."""

    strategy: Strategy
    card_gb: dict[str, float]
    host_gb: float
    step_s: dict[str, float]
    refusals: tuple[str, ...]
    staying_layers: int = 0
    """Of the layers in host memory, those that also lie on each card, as far as it has room: they need not be sent."""
    inputs_in_host: bool = False
    """What the recomputed layers start from waits in host memory, because the card has no room for it."""

    @property
    def needed_gb(self) -> float:
        return sum(self.card_gb.values())

    @property
    def fits(self) -> bool:
        return not self.refusals


@dataclass(frozen=True)
class QuantisedPlan:
    """The choice for a box, or why there is none."""

    hardware: Hardware
    options: tuple[Option, ...]
    chosen: Option | None
    refusals: tuple[str, ...]
    """Empty if something is chosen."""
    would_fit: tuple[str, ...]
    """Changes of recipe or box with which it could run; only looked for if nothing is chosen."""
    train_hours: float
    load_hours: float
    """To read the base, once."""
    usd: float

    @property
    def measured_card(self) -> bool:
        """The times are of the card they were measured on; otherwise they are scaled by peak rates."""
        return self.hardware.tier == MEASURED


def hardware_of(
    tier: Tier, gpus: int, host_gb: float, *, dph_usd: float = 0.0, name: str = "", pcie_gbs: float | None = None
) -> Hardware:
    """A box with a tier's cards. `name` is the listing's for the card, which tells kinds without links; `pcie_gbs` what was measured on its bus."""
    card = CARDS[tier]
    slower = card.pcie_tflops if card.pcie_tflops and "PCIE" in name.upper() else card.peak_tflops
    linked = not any(word in name.upper() for word in card.without_links)
    alone_gbs = min(card.host_gbs, pcie_gbs) if pcie_gbs else card.host_gbs
    return Hardware(
        gpus=gpus,
        gpu_gb=card.memory_gb,
        host_gb=host_gb,
        dph_usd=dph_usd,
        tier=tier,
        peak_tflops=slower,
        host_gbs=alone_gbs * (1 if gpus == 1 else _SHARED_BUS),
        link_gbs=card.link_gbs if linked else THROUGH_HOST_GBS,
    )


def plan_quantised(
    recipe: Recipe, shape: ModelShape, hardware: Hardware, *, read_gb: float | None = None
) -> QuantisedPlan:
    """The fastest of the recipe's strategies that fits, or a refusal with its reasons. `read_gb` is what lies on the disk, by default the recipe's size."""
    wrong = _impossible(recipe, shape, hardware)
    options = () if wrong else tuple(_option(way, recipe, shape, hardware) for way in STRATEGIES)
    ways = allowed(recipe)
    chosen = min(
        (each for each in options if each.fits and each.strategy in ways),
        key=lambda each: (_train_s(each, recipe), each.host_gb),
        default=None,
    )
    refusals = wrong
    if chosen is None and not wrong:
        refusals = tuple(
            f"{each.strategy}: {reason}" for each in options if each.strategy in ways for reason in each.refusals
        )
    train_h = _train_s(chosen, recipe) / 3600 if chosen else 0.0
    load_h = load_s(recipe, hardware, read_gb) / 3600 if chosen else 0.0
    return QuantisedPlan(
        hardware=hardware,
        options=options,
        chosen=chosen,
        refusals=refusals,
        would_fit=() if chosen or wrong else tuple(_would_fit(recipe, shape, hardware)),
        train_hours=train_h,
        load_hours=load_h,
        usd=(train_h + load_h) * hardware.dph_usd,
    )


def allowed(recipe: Recipe) -> tuple[Strategy, ...]:
    """The strategies that the recipe's `model.execution` leaves open."""
    return BUILT if recipe.model.execution == "auto" else (recipe.model.execution,)


def load_s(recipe: Recipe, hardware: Hardware, read_gb: float | None = None) -> float:
    """Seconds to read the base, which the disk alone limits: once on a box, since a runner keeps it from phase to phase. A cache helps a runner that is
    started again."""
    return (recipe.model.size_gb if read_gb is None else read_gb) / hardware.disk_gbs


def packed_gb(recipe: Recipe, shape: ModelShape) -> float:
    """What is kept in 4 bits: the routed experts, and the linear layers with `model.linears: nf4`. The cache has this size."""
    linears = shape.linear_parameters if recipe.model.linears == "nf4" else 0
    return (shape.expert_parameters + linears) * NF4_B / 1e9


def micro_batch_tokens(phase: Phase) -> int:
    """Of one card at a time, with full rows; a DPO row holds two answers."""
    return phase.batch_size * phase.max_length * (2 if phase.kind == "dpo" else 1)


def hungriest(recipe: Recipe) -> Phase:
    """The phase whose micro-batches are the largest, which decides the memory."""
    return max(recipe.phases, key=micro_batch_tokens)


def lines(plan: QuantisedPlan) -> list[str]:
    """The plan as a table."""
    box = plan.hardware
    said = [
        f"{box.gpus} x {box.gpu_gb:.1f} GB cards ({box.usable_gb:.1f} for use), {box.host_gb:.1f} GB host memory, ${box.dph_usd:.2f}/h",
    ]
    for option in plan.options:
        parts = "  ".join(f"{part} {gb:.1f}" for part, gb in option.card_gb.items())
        steps = ", ".join(f"{phase} {seconds:.1f} s a step" for phase, seconds in option.step_s.items())
        verdict = "fits" if option.fits else "no"
        if option.strategy not in BUILT:
            verdict += ", and cannot be chosen yet"
        said.append(f"{option.strategy}: {option.needed_gb:.1f} GB a card, {option.host_gb:.1f} GB host: {verdict}")
        said += [f"  {where(option.strategy, box.gpus)}", f"  card: {parts}", f"  {steps}"]
        if option.staying_layers:
            said.append(f"  {option.staying_layers} layers stay on the card besides")
        if option.inputs_in_host:
            said.append("  what the layers are recomputed from waits in host memory")
    if plan.chosen is None:
        said += [f"refused: {reason}" for reason in plan.refusals]
        return said + [f"would fit: {change}" for change in plan.would_fit]
    said.append(
        f"chosen: {plan.chosen.strategy}; {plan.train_hours:.2f} h of training and {plan.load_hours:.2f} h to load, ${plan.usd:.2f} ({rates(plan)})"
    )
    return said


def where(way: Strategy, gpus: int) -> str:
    """A strategy in words."""
    if way == "host":
        return "experts once in host memory, the next layer copied ahead to the card" + ("s" if gpus > 1 else "")
    if gpus == 1:
        return "experts on the card"
    spread = "experts spread over the cards, "
    return spread + ("the next packed layer gathered ahead" if way == "all_gather" else "tokens sent to them")


def rates(plan: QuantisedPlan) -> str:
    """Where the plan's times come from."""
    return "rates measured on this card" if plan.measured_card else "rates scaled from an H200's, not measured"


def _impossible(recipe: Recipe, shape: ModelShape, hardware: Hardware) -> tuple[str, ...]:
    """What no amount of memory changes. Phases that cannot run are refused by the recipe itself."""
    gpus, found = hardware.gpus, []
    if recipe.model.quantisation != "nf4":
        found.append(f"model.quantisation: {recipe.model.quantisation}; want nf4")
    if shape.family != recipe.model.family:
        found.append(
            f"model.family: the recipe says {recipe.model.family}, config.json {shape.family}; correct the recipe or the model"
        )
    if shape.exact and shape.experts % gpus:
        found.append(
            f"box.gpus: {shape.experts} experts cannot be dealt out evenly to {gpus} cards; want a number of cards that divides them"
        )
    for phase in recipe.phases:
        if phase.accumulation % gpus:
            found.append(
                f"phases.{phase.name}.accumulation: {phase.accumulation} micro-batches a step over {gpus} cards; want a multiple of {gpus}"
            )
    return tuple(found)


def _option(way: Strategy, recipe: Recipe, shape: ModelShape, hardware: Hardware) -> Option:
    tokens = micro_batch_tokens(hungriest(recipe))
    card, away = _card_gb(way, recipe, shape, hardware.gpus, tokens), False
    if sum(card.values()) > hardware.usable_gb and way in BUILT and recipe.box.device == "cuda":
        card, away = _card_gb(way, recipe, shape, hardware.gpus, tokens, inputs_away=True), True
    base = shape.expert_parameters * NF4_B / 1e9 if way == "host" else 0.0
    # Without a card there is one memory, which the parts above are held against.
    host = base + (hardware.gpus * _RANK_HOST_GB + _SYSTEM_GB if recipe.box.device == "cuda" else 0.0)
    if away:
        host += hardware.gpus * shape.layers * _input_b(recipe, shape, tokens) / 1e9
    refusals = []
    if (needed := sum(card.values())) > hardware.usable_gb:
        refusals.append(f"{needed:.1f} GB a card, {hardware.usable_gb:.1f} of {hardware.gpu_gb:.1f} are for use")
    if host > hardware.host_gb:
        refusals.append(f"{host:.1f} GB of host memory, the box has {hardware.host_gb:.1f}")
    if way == "expert_parallel" and hardware.gpus == 1:
        refusals.append("one card has nobody to send tokens to")
    stay = _staying(sum(card.values()), shape, hardware) if way == "host" and recipe.box.device == "cuda" else 0
    steps = {
        phase.name: phase.accumulation / hardware.gpus * _micro_batch_s(way, recipe, shape, phase, hardware, stay)
        for phase in recipe.phases
    }
    return Option(way, card, host, steps, tuple(refusals), stay, inputs_in_host=away)


def _staying(needed_gb: float, shape: ModelShape, hardware: Hardware) -> int:
    """Whole layers that fit beside everything else, with a margin for what the arithmetic does not know."""
    spare_gb = hardware.usable_gb - (1 + _UNKNOWN) * needed_gb
    return max(0, min(shape.layers, int(spare_gb * 1e9 / (shape.expert_parameters * NF4_B / shape.layers))))


def _input_b(recipe: Recipe, shape: ModelShape, tokens: int) -> float:
    """Of one layer."""
    return tokens * shape.hidden * shape.bytes_per_weight(recipe.model.dtype)


def _card_gb(
    way: Strategy, recipe: Recipe, shape: ModelShape, gpus: int, tokens: int, inputs_away: bool = False
) -> dict[str, float]:
    """GB by part at the hungriest moment of the backward pass. Layer inputs are freed while gradients come, so the larger of both counts; and either
    a layer is at work or the head."""
    width_b = shape.bytes_per_weight(recipe.model.dtype)
    experts = shape.expert_parameters * NF4_B
    counts = shape.lora_parameters(recipe.adapters)
    routed = counts.pop("routed_experts", 0)
    adapters = routed / gpus + sum(counts.values())
    # Away, there are the one at work, the one coming back and the one before it, which goes when its successor has come.
    inputs = (3 if inputs_away else shape.layers) * _input_b(recipe, shape, tokens)
    layer = experts / shape.layers
    # Gathered or copied, a whole layer is unpacked; sent tokens, or alone, the card's own part.
    whole = 1 if way != "expert_parallel" else gpus
    work = tokens * _WORK * layer_widths(shape) * width_b + layer / NF4_B * width_b / whole
    head = min(tokens, _HEAD_TOKENS) * shape.vocabulary * 4 * 2.5
    gathers = way == "all_gather" and gpus > 1
    moves = way == "host" or gathers
    parts = {
        "base": 0.0 if way == "host" else experts / gpus,
        "attention": shape.linear_parameters * (NF4_B if recipe.model.linears == "nf4" else width_b),
        "dense": (shape.parameters - shape.expert_parameters - shape.linear_parameters) * width_b,
        "adapters": adapters * (WEIGHT_B + OPTIMIZER_B[recipe.optimizer]),
        "activations": max(adapters * GRADIENT_B, inputs) + max(work, head),
        "buffers": (_PREFETCHED_LAYERS * layer if moves else 0.0)
        + (gathers * _GATHERED_SHARE * layer / NF4_B * width_b),
        "context": CONTEXT_GB * 1e9 if recipe.box.device == "cuda" else 0.0,
    }
    return {part: size / 1e9 for part, size in parts.items()}


def _micro_batch_s(
    way: Strategy, recipe: Recipe, shape: ModelShape, phase: Phase, hardware: Hardware, stay: int
) -> float:
    """Seconds of one micro-batch on every card at once."""
    tokens, gpus = micro_batch_tokens(phase), hardware.gpus
    flops = token_flops(shape, recipe.adapters, phase.max_length).total
    rate = _COMPUTE_TFLOPS[FAMILIES[shape.family].packing] * hardware.peak_tflops / CARDS[MEASURED].peak_tflops
    computing = max(tokens * flops / (rate * 1e12), shape.layers * _LAYER_S)
    layers_b = _FETCHES * shape.expert_parameters * NF4_B
    if way == "expert_parallel":
        # Nothing hides this: the layer waits for its tokens.
        width_b = shape.bytes_per_weight(recipe.model.dtype)
        moved = _MOVED_TOKENS * tokens * (gpus - 1) * shape.layers * shape.hidden * width_b
        return computing + moved / (hardware.link_gbs * 1e9)
    if way == "host":
        moving = layers_b * (1 - stay / shape.layers) / (hardware.host_gbs * 1e9)
    else:
        moving = layers_b * (gpus - 1) / gpus / (hardware.link_gbs * 1e9)
    return max(computing, moving) + _SERIAL * min(computing, moving)


def _train_s(option: Option, recipe: Recipe) -> float:
    return sum(phase.steps * option.step_s[phase.name] for phase in recipe.phases)


def _would_fit(recipe: Recipe, shape: ModelShape, hardware: Hardware) -> Iterator[str]:
    """More host memory, if that alone is missing; the first change of the recipe that helps; the smallest box of each kind that takes it as it is."""
    if best := _best(recipe, shape, replace(hardware, host_gb=2048.0)):
        yield f"box.min_host_memory_gb {math.ceil(best.host_gb)}: {best.needed_gb:.1f} GB a card ({best.strategy})"
    for what, changed in _changes(recipe):
        best = _best(changed, shape, hardware)
        if best:
            yield f"{what} on this box: {best.needed_gb:.1f} GB a card, {best.host_gb:.1f} GB host ({best.strategy})"
            break
    for gpus in (1, 2, 4, 8):
        for gib in (24, 32, 40, 48, 80, 96, 141, 180):
            other = replace(hardware, gpus=gpus, gpu_gb=gib * GIB, host_gb=max(hardware.host_gb, 2048.0))
            best = None if _impossible(recipe, shape, other) else _best(recipe, shape, other)
            if best:
                yield f"{gpus} x {gib} GB with {best.host_gb:.0f} GB of host memory: {best.needed_gb:.1f} GB a card ({best.strategy})"
                break


def _best(recipe: Recipe, shape: ModelShape, hardware: Hardware) -> Option | None:
    fitting = [each for way in allowed(recipe) if (each := _option(way, recipe, shape, hardware)).fits]
    return min(fitting, key=lambda each: (each.host_gb, each.needed_gb), default=None)


def _changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Each with all before it, the least harmful first."""
    said: list[str] = []
    if recipe.optimizer != "adamw_8bit":
        recipe = recipe.model_copy(update={"optimizer": "adamw_8bit"})
        said.append("optimizer: adamw_8bit")
        yield ", ".join(said), recipe
    if any(phase.batch_size > 1 for phase in recipe.phases):
        recipe = recipe.model_copy(update={"phases": _one_row(recipe.phases)})
        said.append("batch_size 1 with as much more accumulation")
        yield ", ".join(said), recipe
    rank = recipe.adapters.rank
    while rank > 8:
        rank //= 2
        recipe = recipe.model_copy(update={"adapters": recipe.adapters.model_copy(update={"rank": rank})})
        yield ", ".join([*said, f"adapters.rank {rank}"]), recipe


def _one_row(phases: Sequence[Phase]) -> tuple[Phase, ...]:
    """KTO estimates its KL from pairs, so it keeps two."""
    changed = []
    for phase in phases:
        rows = min(phase.batch_size, 2 if phase.kind == "kto" else 1)
        more = phase.accumulation * phase.batch_size // rows
        changed.append(phase.model_copy(update={"batch_size": rows, "accumulation": more}))
    return tuple(changed)
