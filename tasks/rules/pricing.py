"""What a run costs on an offer: GPU hours, disk, every GB both ways, boot, and the boxes that will turn out unfit on the way.

A "$1.00" box with dear bandwidth is often dearer than a "$1.25" one, so offers are ranked by the run and never by the hour.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tasks.domain import Offer
from tasks.rules.memory import quantised_plan
from tasks.rules.tiers import TIERS
from training.contract.durable import BID_LOSSES_PER_H, LOSSES_PER_H, Interval, durable_interval
from training.contract.flops import step_tokens
from training.contract.memory import OPTIMIZER_B, WEIGHT_B, adapter_parameters
from training.contract.quantised import Option, QuantisedPlan, load_s, rates, where
from training.contract.recipe import GrpoPhase, Recipe
from training.contract.shapes import QWEN36_35B, ModelShape, shape_of

HOURS_A_MONTH = 720  # the market's own divisor for storage
MAX_DOWN_MBPS = 2_000.0  # what the hub or a bucket gives one box, whatever the host advertises
# Predicted seconds of a generated token, all completions of a batch in step.
GENERATED_TOKEN_S = 0.06
BID_MARGIN = 1.15  # over the least bid, so that the next bidder does not take the box at once
CREDIT_MARGIN = 1.2  # of the account's money against the plan: prices and hours are estimates


@dataclass(frozen=True)
class Overheads:
    """Seconds and GB that every run pays besides training. Seen on cached images; the rehearsal's are loopback's."""

    boot_s: float
    install_s: float
    phase_start_s: float
    wheels_and_image_gb: float
    unfit_boxes: float
    """Boxes that fail their checks for each that passes, until a bucket has seen enough of them."""


_OVERHEADS = {
    "cuda": Overheads(boot_s=240, install_s=240, phase_start_s=120, wheels_and_image_gb=15, unfit_boxes=0.25),
    "cpu": Overheads(boot_s=5, install_s=20, phase_start_s=4, wheels_and_image_gb=0.5, unfit_boxes=0.0),
    "none": Overheads(boot_s=5, install_s=10, phase_start_s=1, wheels_and_image_gb=0.05, unfit_boxes=0.0),
}


@dataclass(frozen=True)
class Pace:
    """Seconds a step as an earlier run measured them with the same model, adapters, batch and tier."""

    step_s: float
    source: str
    """Where and when: `2026-11-29, 200 steps of run tools-35b on machine 35101`."""


@dataclass(frozen=True)
class Experience:
    """What earlier runs have left in the bucket; empty = nothing yet."""

    paces: Mapping[str, Pace] = field(default_factory=dict)
    """By phase."""
    fit_boxes: int = 0
    unfit_boxes: int = 0
    """Boxes that were given back before they trained."""


@dataclass(frozen=True)
class Work:
    """What a run still has to do, whatever box does it."""

    phases: tuple[tuple[float, int], ...]
    """Of each phase left: seconds of training, and checkpoints that are saved in it."""
    train_s: float
    load_s: float
    """To read a 4-bit base, once for all phases; an unquantised one is read within the start of each."""
    checkpoint_gb: float
    adapter_gb: float
    model_gb: float
    disk_gb: int
    overheads: Overheads
    gpu_factor: float
    """Of the listed GPU price: a bid goes over the least one."""
    unfit_boxes: float
    hours_from: Literal["measured", "predicted"]
    notes: tuple[str, ...]
    """Where the hours of each phase, and the share of unfit boxes, come from."""


@dataclass(frozen=True)
class Cost:
    """One run on one offer."""

    usd: float
    hours: float
    """From the first rented second to the destroy."""
    train_s: float
    hours_from: Literal["measured", "predicted"]
    down_gb: float
    up_gb: float
    parts: dict[str, float]
    """Dollars by `gpu`, `disk`, `down`, `up`, and `unfit`: boxes expected to fail before one passes."""

    @property
    def bytes_usd(self) -> float:
        return self.parts["down"] + self.parts["up"]

    @property
    def sentence(self) -> str:
        usd = {part: money(usd) for part, usd in self.parts.items()}
        return (
            f"{self.hours:.2f} h: gpu {usd['gpu']}, disk {usd['disk']}, "
            f"{self.down_gb:.1f} GB down {usd['down']}, {self.up_gb:.1f} GB up {usd['up']}"
            + (f", unfit boxes {usd['unfit']}" if self.parts["unfit"] else "")
        )


def money(usd: float) -> str:
    """Dollars for people: a rehearsal's fractions of a cent are to be seen too."""
    return f"${usd:.2f}" if usd >= 0.01 or usd == 0 else f"${usd:.4f}"


def work_left(
    recipe: Recipe,
    done: Collection[str] = (),
    shape: ModelShape | None = None,
    experience: Experience | None = None,
    offer: Offer | None = None,
) -> Work:
    """The phases still to do in seconds and GB. `shape` is the model's, where its config.json was read; otherwise that of its family and size.

    A 4-bit base waits for the links of its box, so its seconds are those of `offer`'s box, or of one that keeps the recipe's floors.
    """
    shape, experience = shape or shape_of(recipe.model), experience or Experience()
    left = [name for name in recipe.phase_names if name not in done]
    streamed = _streamed(recipe, shape, offer)
    paces = {name: _pace(recipe, name, shape, experience, streamed) for name in left}
    overheads = _OVERHEADS[recipe.box.device]
    unfit_boxes, unfit_source = _unfit(experience, overheads)
    phases = tuple(_seconds_and_saves(recipe, name, pace) for name, (pace, _) in paces.items())
    return Work(
        phases=phases,
        train_s=sum(seconds for seconds, _ in phases),
        load_s=load_s(recipe, streamed.hardware) if streamed and left else 0.0,
        checkpoint_gb=checkpoint_gb(recipe, shape),
        adapter_gb=adapter_gb(recipe, shape),
        model_gb=recipe.model.size_gb,
        disk_gb=recipe.box.disk_gb,
        overheads=overheads,
        gpu_factor=BID_MARGIN if recipe.box.interruptible else 1.0,
        unfit_boxes=unfit_boxes,
        hours_from="measured" if all(measured for _, measured in paces.values()) else "predicted",
        notes=(
            *_sources({name: pace for name, (pace, _) in paces.items()}),
            *(_how_streamed(streamed) if streamed else ()),
            *unfit_source,
        ),
    )


def cost_of(work: Work, offer: Offer) -> Cost:
    """The GPU is not billed while the box boots; its disk is."""
    extra, up_mbps = work.overheads, offer.inet_up_mbps or 0.0
    down_gb = work.model_gb + extra.wheels_and_image_gb
    prefetch_s = transfer_s(work.model_gb, min(offer.inet_down_mbps or 0.0, MAX_DOWN_MBPS))
    # The last checkpoint and the exported adapter keep the box after training.
    last_upload_s = transfer_s(work.checkpoint_gb + work.adapter_gb, up_mbps)
    up_gb = _uploads_gb(work, offer)
    starts_s = extra.phase_start_s * len(work.phases) + work.load_s
    billed_h = (extra.install_s + prefetch_s + starts_s + work.train_s + last_upload_s) / 3600
    hours = billed_h + extra.boot_s / 3600
    disk_usd_h = storage_usd_h(offer, work.disk_gb)
    gpu_usd_h = work.gpu_factor * max(0.0, dph_at_disk(offer, work.disk_gb) - disk_usd_h)
    parts = {
        "gpu": billed_h * gpu_usd_h,
        "disk": hours * disk_usd_h,
        "down": down_gb * offer.inet_down_usd_gb,
        "up": up_gb * offer.inet_up_usd_gb,
        "unfit": work.unfit_boxes * _unfit_usd(extra, gpu_usd_h, disk_usd_h, offer.inet_down_usd_gb),
    }
    return Cost(
        usd=sum(parts.values()),
        hours=hours,
        train_s=work.train_s,
        hours_from=work.hours_from,
        down_gb=down_gb,
        up_gb=up_gb,
        parts=parts,
    )


def dph_at_disk(offer: Offer, disk_gb: int) -> float:
    """$/h with the disk that will be asked for. The dearer of what the market totals and what its parts add up to."""
    if offer.dph_base_usd is None or offer.storage_usd_gb_month is None:
        return offer.dph_total_usd
    return max(offer.dph_total_usd, offer.dph_base_usd + storage_usd_h(offer, disk_gb))


def storage_usd_h(offer: Offer, disk_gb: int) -> float:
    return (offer.storage_usd_gb_month or 0.0) * disk_gb / HOURS_A_MONTH


def phase_s(recipe: Recipe, name: str, shape: ModelShape | None = None, offer: Offer | None = None) -> float:
    """Seconds of training of one phase: steps times what the recipe says that one takes, or is predicted to on the box of `offer`."""
    shape = shape or shape_of(recipe.model)
    pace, _ = _pace(recipe, name, shape, Experience(), _streamed(recipe, shape, offer))
    return recipe.phase(name).steps * pace.step_s


def checkpoint_gb(recipe: Recipe, shape: ModelShape) -> float:
    """One checkpoint: fp32 adapter and optimizer state; with 8-bit state 11.4 GB for the 35B at rank 32, with fp32 state 22.6."""
    return adapter_parameters(recipe, shape) * (WEIGHT_B + OPTIMIZER_B[recipe.optimizer]) / 1e9


def adapter_gb(recipe: Recipe, shape: ModelShape) -> float:
    return adapter_parameters(recipe, shape) * WEIGHT_B / 1e9


def transfer_s(gb: float, mbps: float) -> float:
    """Seconds for so many GB; a rate that is not known or zero never ends."""
    return 0.0 if gb == 0 else gb * 8_000 / mbps if mbps > 0 else math.inf


def mbps_for(gb: float, seconds: float) -> float:
    """The rate that moves so many GB in this time."""
    return gb * 8_000 / seconds


def _seconds_and_saves(recipe: Recipe, name: str, pace: Pace) -> tuple[float, int]:
    phase = recipe.phase(name)
    return phase.steps * pace.step_s, math.ceil(phase.steps / phase.save_every_steps)


def uploads_of(work: Work, offer: Offer) -> Interval:
    """How often the box will send a checkpoint; it weighs bytes against training at risk, by the uplink that it measures."""
    return durable_interval(
        size_bytes=int(work.checkpoint_gb * 1e9),
        uplink_mbps=offer.inet_up_mbps,
        dph_usd=dph_at_disk(offer, work.disk_gb),
        up_usd_gb=offer.inet_up_usd_gb,
        losses_per_h=LOSSES_PER_H if work.gpu_factor == 1.0 else BID_LOSSES_PER_H,
    )


def _uploads_gb(work: Work, offer: Offer) -> float:
    """GB sent up: the last checkpoint of each phase, those between that are due, and the adapter."""
    every_s = uploads_of(work, offer).seconds
    sent = sum(saves if every_s == 0 else min(saves, 1 + int(seconds / every_s)) for seconds, saves in work.phases)
    return work.checkpoint_gb * sent + work.adapter_gb


def _unfit_usd(extra: Overheads, gpu_usd_h: float, disk_usd_h: float, down_usd_gb: float) -> float:
    """A box that fails its checks has booted, installed and pulled image and wheels; the model was not fetched yet."""
    return (
        extra.boot_s / 3600 * disk_usd_h
        + extra.install_s / 3600 * (gpu_usd_h + disk_usd_h)
        + extra.wheels_and_image_gb * down_usd_gb
    )


# Weighs what is expected against what was seen: so many boxes count as much as the expectation does.
_EXPECTATION_BOXES = 4


def _unfit(experience: Experience, overheads: Overheads) -> tuple[float, tuple[str, ...]]:
    """Unfit boxes for each fit one, and where the number comes from; nothing is said of none."""
    expected, seen = overheads.unfit_boxes, experience.fit_boxes + experience.unfit_boxes
    if not seen:
        return expected, (f"{expected:g} unfit boxes for each fit one, predicted",) if expected else ()
    rate = (experience.unfit_boxes + expected * _EXPECTATION_BOXES) / (experience.fit_boxes + _EXPECTATION_BOXES)
    said = (
        f"{rate:.2g} unfit boxes for each fit one: {expected:g} expected, {experience.unfit_boxes} of {seen} seen here"
    )
    return rate, (said,) if rate else ()


def _pace(
    recipe: Recipe, name: str, shape: ModelShape, experience: Experience, streamed: QuantisedPlan | None
) -> tuple[Pace, bool]:
    """Seconds a step of this phase, and whether anybody measured them."""
    if recipe.step_seconds:
        return Pace(recipe.step_seconds, "measured before, by step_seconds of the recipe"), True
    if name in experience.paces:
        pace = experience.paces[name]
        return Pace(pace.step_s, f"measured here: {pace.source}"), True
    if streamed:
        return Pace(_way(streamed).step_s[name], f"predicted ({rates(streamed)})"), False
    return Pace(_predicted_step_s(recipe, name, shape), "predicted"), False


def _streamed(recipe: Recipe, shape: ModelShape, offer: Offer | None = None) -> QuantisedPlan | None:
    """How the 4-bit base would run there; None without one, and where no card computes."""
    if recipe.model.quantisation == "none" or recipe.box.device != "cuda":
        return None
    return quantised_plan(recipe, shape, offer)


def _way(streamed: QuantisedPlan) -> Option:
    """What does not fit is refused elsewhere; its seconds are those of the way that comes nearest."""
    return streamed.chosen or min(streamed.options, key=lambda option: option.needed_gb)


def _how_streamed(streamed: QuantisedPlan) -> tuple[str, ...]:
    way = _way(streamed)
    return (f"4-bit base: {way.strategy}, {where(way.strategy, streamed.hardware.gpus)}",)


def _sources(paces: Mapping[str, Pace]) -> list[str]:
    """Phases of one pace and source in one sentence."""
    named: dict[str, list[str]] = {}
    for name, pace in paces.items():
        named.setdefault(f"{pace.step_s:.3g} s a step, {pace.source}", []).append(name)
    return [f"{', '.join(names)}: {said}" for said, names in named.items()]


def _predicted_step_s(recipe: Recipe, name: str, shape: ModelShape) -> float:
    if recipe.box.device != "cuda":
        return 0.1 if recipe.trainer == "counting" else 0.8
    phase = recipe.phase(name)
    tier = TIERS[recipe.box.tier]
    # The other phases go row by row, in micro-batches whose losses wait for the host.
    tokens_s = tier.packed_tokens_s if phase.kind in ("cpt", "sft") else tier.tokens_s
    step_s = step_tokens(phase) / (tokens_s * _relative_speed(shape))
    if isinstance(phase, GrpoPhase):
        step_s += phase.max_completion_length * GENERATED_TOKEN_S
    return step_s


def _relative_speed(shape: ModelShape) -> float:
    """Against the 35B-A3B, by the weights that a token meets. A smaller model is not faster: its steps are bound by launches."""
    return min(1.0, QWEN36_35B.active_parameters / shape.active_parameters)
