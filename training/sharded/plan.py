"""What a 4-bit base takes of a box, how it would run there and what that costs: from the checkpoint's headers and the recipe, before anything is
rented. No torch, no card.

Measured, on H200s with the real shapes of Qwen3-235B-A22B at full depth (random weights, rank 16, fp32 AdamW, rows of 4,096 tokens):
peak GB 52.8, 58.1 and 68.1 for 4k, 8k and 16k tokens on each of four cards with the experts spread over them, 98.5 at 8k on each of two, 57.2 and 62.7
at 8k and 16k on one with the experts in host memory. Seconds a layer: see `_COMPUTE_TFLOPS` and `_SERIAL`. The memory below is within 3 % of all six and
the time within 15 % of fourteen layer times. What was not measured is arithmetic: other cards by their peak rate, other models by their shape.

GB are 10^9 bytes. Shape letters: V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from training.contract.flops import PEAK_TFLOPS, token_flops
from training.contract.memory import CONTEXT_GB, GRADIENT_B, OPTIMIZER_B, USABLE, WEIGHT_B, layer_widths
from training.contract.recipe import Phase, Recipe
from training.sharded.inventory import Inventory, quantisable

Strategy = Literal["host", "all_gather", "expert_parallel"]
WHERE: dict[Strategy, str] = {
    "host": "experts once in host memory, the next layer copied ahead to each card",
    "all_gather": "experts spread over the cards, the next packed layer gathered ahead",
    "expert_parallel": "experts spread over the cards, tokens sent to them",
}
BUILT: tuple[Strategy, ...] = ("all_gather", "host")
"""Those that a run can take now; the others are shown, and chosen by nobody."""
PHASES = ("cpt", "sft", "dpo", "kto")
"""GRPO generates, which asks every layer for a few tokens at a time: over a streamed base that would take days."""

GIB = 2**30 / 1e9
NF4_B, DENSE_B = 0.5625, 2.0
"""Bytes a weight: 4 bits and a float32 scale for 64; bfloat16."""
# A layer at work in its backward pass holds this much of the widths of its products, in bfloat16: fitted to the peaks above.
_WORK = 1.7
_HEAD_TOKENS = 1024
"""Tokens whose logits exist at a time, in fp32 with their gradient: 2.5 copies."""
_PREFETCHED_LAYERS = 2
_RANK_HOST_GB = 2.4
"""Of a process: 2.2 measured, and the reader's pinned buffers."""
_SYSTEM_GB = 2.0
_FETCHES = 2
"""A layer's weights are wanted in the forward pass and, recomputed, in the backward pass."""
# Useful arithmetic (4N a token, recomputing not counted) on an H200 outside of waiting: 37.8 and 82.0 ms a layer of 8k and 16k tokens.
_COMPUTE_TFLOPS = 235.0
# Of the shorter of computing and moving, what is not hidden behind the longer: 55.6 ms where the copies take 49.5 and the arithmetic 38.
_SERIAL = 0.15
_MOVED_TOKENS = 6
"""Passes of a token's hidden state over the links in expert parallelism: gathered and reduced in forward, recomputation and backward."""


@dataclass(frozen=True)
class Box:
    """A box as it is offered."""

    gpus: int
    gpu_gb: float
    """Of one card."""
    host_gb: float
    dph_usd: float = 0.0
    peak_tflops: float = PEAK_TFLOPS["h200"]
    host_gbs: float = 0.0
    """GB/s from pinned host memory to one card; 0: 54.9 to one alone and 52 to each of several, measured on PCIe 5 x16."""
    link_gbs: float = 313.0
    """GB/s that a card takes in while all gather: 313 measured over NVLink, 24 where the cards only reach each other through the host."""
    disk_gbs: float = 1.5

    @property
    def to_card_gbs(self) -> float:
        return self.host_gbs or (54.9 if self.gpus == 1 else 52.0)

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

    @property
    def needed_gb(self) -> float:
        return sum(self.card_gb.values())

    @property
    def fits(self) -> bool:
        return not self.refusals


@dataclass(frozen=True)
class Plan:
    """The choice for a box, or why there is none."""

    box: Box
    options: tuple[Option, ...]
    chosen: Option | None
    refusals: tuple[str, ...]
    """Empty if something is chosen."""
    would_fit: tuple[str, ...]
    """Changes of recipe or box with which it could run; only looked for if nothing is chosen."""
    train_hours: float
    load_hours: float
    usd: float
    measured_card: bool
    """The times are of the card they were measured on; otherwise they are scaled by peak rates."""


def plan(inventory: Inventory, recipe: Recipe, box: Box, *, linears: str = "nf4") -> Plan:
    """The fastest way that fits, or a refusal with its reasons."""
    wrong = _impossible(inventory, recipe, box)
    options = () if wrong else tuple(_option(way, inventory, recipe, box, linears) for way in WHERE)
    fitting = [each for each in options if each.fits and each.strategy in BUILT]
    chosen = min(fitting, key=lambda each: _train_s(each, recipe), default=None)
    refusals = wrong if chosen is None else ()
    if chosen is None and not wrong:
        refusals = tuple(f"{each.strategy}: {reason}" for each in options for reason in each.refusals)
    train_h = _train_s(chosen, recipe) / 3600 if chosen else 0.0
    load_h = inventory.bytes / 1e9 / box.disk_gbs / 3600 if chosen else 0.0
    return Plan(
        box=box,
        options=options,
        chosen=chosen,
        refusals=refusals,
        would_fit=() if chosen or wrong else tuple(_would_fit(inventory, recipe, box, linears)),
        train_hours=train_h,
        load_hours=load_h,
        usd=(train_h + load_h) * box.dph_usd,
        measured_card=box.peak_tflops == PEAK_TFLOPS["h200"],
    )


def lines(plan: Plan) -> list[str]:
    """The plan as a table."""
    box = plan.box
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
        said += [f"  {WHERE[option.strategy]}", f"  card: {parts}", f"  {steps}"]
    if plan.chosen is None:
        said += [f"refused: {reason}" for reason in plan.refusals]
        return said + [f"would fit: {change}" for change in plan.would_fit]
    origin = "rates measured on this card" if plan.measured_card else "rates scaled from an H200's, not measured"
    said.append(
        f"chosen: {plan.chosen.strategy}; {plan.train_hours:.2f} h of training and {plan.load_hours:.2f} h to load, ${plan.usd:.2f} ({origin})"
    )
    return said


def _impossible(inventory: Inventory, recipe: Recipe, box: Box) -> tuple[str, ...]:
    """What no amount of memory changes."""
    found = []
    shape = inventory.shape
    if shape.family != recipe.model.family:
        found.append(
            f"model.family: the recipe says {recipe.model.family}, config.json {shape.family}; correct the recipe or the model"
        )
    if other := [phase.name for phase in recipe.phases if phase.kind not in PHASES]:
        found.append(f"phases: {', '.join(other)} cannot run on a streamed 4-bit base; want {', '.join(PHASES)}")
    if shape.experts % box.gpus:
        found.append(
            f"{box.gpus} cards: {shape.experts} experts cannot be dealt out evenly; want a number of cards that divides them"
        )
    for phase in recipe.phases:
        if phase.accumulation % box.gpus:
            found.append(
                f"phases.{phase.name}.accumulation: {phase.accumulation} micro-batches a step over {box.gpus} cards; want a multiple of {box.gpus}"
            )
    return tuple(found)


def _option(way: Strategy, inventory: Inventory, recipe: Recipe, box: Box, linears: str) -> Option:
    tokens = max(micro_batch_tokens(phase) for phase in recipe.phases)
    card = _card_gb(way, inventory, recipe, box.gpus, tokens, linears)
    base = inventory.shape.expert_parameters * NF4_B / 1e9 if way == "host" else 0.0
    host = base + box.gpus * _RANK_HOST_GB + _SYSTEM_GB
    refusals = []
    if (needed := sum(card.values())) > box.usable_gb:
        refusals.append(f"{needed:.1f} GB a card, {box.usable_gb:.1f} of {box.gpu_gb:.1f} are for use")
    if host > box.host_gb:
        refusals.append(f"{host:.1f} GB of host memory, the box has {box.host_gb:.1f}")
    if way == "expert_parallel" and box.gpus == 1:
        refusals.append("one card has nobody to send tokens to")
    steps = {
        phase.name: phase.accumulation / box.gpus * _micro_batch_s(way, inventory, recipe, phase, box)
        for phase in recipe.phases
    }
    return Option(way, card, host, steps, tuple(refusals))


def micro_batch_tokens(phase: Phase) -> int:
    """Of one card at a time, with full rows; a DPO row holds two answers."""
    return phase.batch_size * phase.max_length * (2 if phase.kind == "dpo" else 1)


def _card_gb(
    way: Strategy, inventory: Inventory, recipe: Recipe, gpus: int, tokens: int, linears: str
) -> dict[str, float]:
    """GB by part at the hungriest moment of the backward pass. Layer inputs are freed while gradients come, so the larger of both counts; and either
    a layer is at work or the head."""
    shape = inventory.shape
    experts = shape.expert_parameters * NF4_B
    counts = shape.lora_parameters(recipe.adapters)
    routed = counts.pop("routed_experts", 0)
    adapters = routed / gpus + sum(counts.values())
    inputs = shape.layers * tokens * shape.hidden * DENSE_B
    layer = experts / shape.layers
    # Gathered or copied, a whole layer is unpacked; sent tokens, or alone, the card's own part.
    whole = 1 if way != "expert_parallel" else gpus
    work = tokens * _WORK * layer_widths(shape) * DENSE_B + layer / NF4_B * DENSE_B / whole
    head = min(tokens, _HEAD_TOKENS) * shape.vocabulary * 4 * 2.5
    moves = way == "host" or (way == "all_gather" and gpus > 1)
    attention, dense = _outside_bytes(inventory, linears)
    parts = {
        "base": 0.0 if way == "host" else experts / gpus,
        "attention": attention,
        "dense": dense,
        "adapters": adapters * (WEIGHT_B + OPTIMIZER_B[recipe.optimizer]),
        "activations": max(adapters * GRADIENT_B, inputs) + max(work, head),
        "buffers": _PREFETCHED_LAYERS * layer if moves else 0.0,
        "context": CONTEXT_GB * 1e9,
    }
    return {part: size / 1e9 for part, size in parts.items()}


def _outside_bytes(inventory: Inventory, linears: str) -> tuple[float, float]:
    """Of everything but the routed experts, whole on each card: the linear layers, and the rest."""
    kept, rest = 0.0, 0.0
    for name, (group, at) in inventory.matrices.items():
        if quantisable(inventory.shape, group, name):
            kept += at.numbers * (NF4_B if linears == "nf4" else DENSE_B)
        else:
            rest += at.numbers * DENSE_B
    return kept, rest


def _micro_batch_s(way: Strategy, inventory: Inventory, recipe: Recipe, phase: Phase, box: Box) -> float:
    """Seconds of one micro-batch on every card at once."""
    shape, tokens = inventory.shape, micro_batch_tokens(phase)
    flops = token_flops(shape, recipe.adapters, phase.max_length).total
    rate = _COMPUTE_TFLOPS * 1e12 * box.peak_tflops / PEAK_TFLOPS["h200"]
    computing = tokens * flops / rate
    layers_b = _FETCHES * shape.expert_parameters * NF4_B
    others = (box.gpus - 1) / box.gpus
    if way == "expert_parallel":
        # Nothing hides this: the layer waits for its tokens.
        moved = _MOVED_TOKENS * tokens * (box.gpus - 1) * shape.layers * shape.hidden * DENSE_B
        return computing + moved / (box.link_gbs * 1e9)
    if way == "host":
        moving = layers_b / (box.to_card_gbs * 1e9)
    else:
        moving = layers_b * others / (box.link_gbs * 1e9)
    return max(computing, moving) + _SERIAL * min(computing, moving)


def _train_s(option: Option, recipe: Recipe) -> float:
    return sum(phase.steps * option.step_s[phase.name] for phase in recipe.phases)


def _would_fit(inventory: Inventory, recipe: Recipe, box: Box, linears: str) -> Iterator[str]:
    """The first change of the recipe that helps, and the smallest box of each kind that takes it as it is."""
    for what, changed in _changes(recipe):
        best = _best(inventory, changed, box, linears)
        if best:
            yield f"{what} on this box: {best.needed_gb:.1f} GB a card, {best.host_gb:.1f} GB host ({best.strategy})"
            break
    for gpus in (1, 2, 4, 8):
        for gib in (24, 32, 40, 48, 80, 96, 141, 180):
            other = replace(box, gpus=gpus, gpu_gb=gib * GIB, host_gb=max(box.host_gb, 2048.0))
            best = None if _impossible(inventory, recipe, other) else _best(inventory, recipe, other, linears)
            if best:
                yield f"{gpus} x {gib} GB with {best.host_gb:.0f} GB of host memory: {best.needed_gb:.1f} GB a card ({best.strategy})"
                break


def _best(inventory: Inventory, recipe: Recipe, box: Box, linears: str) -> Option | None:
    fitting = [each for way in BUILT if (each := _option(way, inventory, recipe, box, linears)).fits]
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
