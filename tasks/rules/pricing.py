"""What a run costs on an offer: GPU hours, disk, boot and every GB both ways. A "$1.00" box with dear bandwidth is often dearer than a "$1.25" one."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from tasks.domain import Offer
from tasks.rules.tiers import TIERS
from training.contract.memory import OPTIMIZER_B, WEIGHT_B, adapter_parameters
from training.contract.recipe import GrpoPhase, Recipe
from training.contract.shapes import QWEN36_35B, ModelShape, shape_of

HOURS_A_MONTH = 720  # the market's own divisor for storage
MAX_DOWN_MBPS = 2_000.0  # what the hub or a bucket gives one box, whatever the host advertises
# Predicted seconds of a generated token, all completions of a batch in step.
GENERATED_TOKEN_S = 0.06


@dataclass(frozen=True)
class Overheads:
    """Seconds and GB that every run pays besides training. Seen on cached images; the rehearsal's are loopback's."""

    boot_s: float
    install_s: float
    phase_start_s: float
    wheels_and_image_gb: float


_OVERHEADS = {
    "cuda": Overheads(boot_s=240, install_s=240, phase_start_s=120, wheels_and_image_gb=15),
    "cpu": Overheads(boot_s=5, install_s=20, phase_start_s=4, wheels_and_image_gb=0.5),
    "none": Overheads(boot_s=5, install_s=10, phase_start_s=1, wheels_and_image_gb=0.05),
}


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
    """Dollars by `gpu`, `disk`, `down`, `up`."""

    @property
    def sentence(self) -> str:
        return (
            f"{self.hours:.2f} h: gpu ${self.parts['gpu']:.2f}, disk ${self.parts['disk']:.2f}, "
            f"{self.down_gb:.1f} GB down ${self.parts['down']:.2f}, {self.up_gb:.1f} GB up ${self.parts['up']:.2f}"
        )


def run_cost(recipe: Recipe, offer: Offer, done: Collection[str] = (), shape: ModelShape | None = None) -> Cost:
    """Dollars and hours of the phases that are still to do. The GPU is not billed while the box boots; its disk is.

    `shape` is the model's, where its config.json was read; otherwise that of its family and size.
    """
    shape = shape or shape_of(recipe.model)
    extra = _OVERHEADS[recipe.box.device]
    down_gb = recipe.model.size_gb + extra.wheels_and_image_gb
    prefetch_s = transfer_s(recipe.model.size_gb, min(offer.inet_down_mbps or 0.0, MAX_DOWN_MBPS))
    up_gb, last_upload_s = _uploads(recipe, offer, done, shape)
    train_s = sum(phase_s(recipe, name, shape) for name in _left(recipe, done))
    starts_s = extra.phase_start_s * len(_left(recipe, done))
    billed_h = (extra.install_s + prefetch_s + starts_s + train_s + last_upload_s) / 3600
    hours = billed_h + extra.boot_s / 3600
    disk_usd_h = storage_usd_h(offer, recipe.box.disk_gb)
    parts = {
        "gpu": billed_h * max(0.0, dph_at_disk(offer, recipe.box.disk_gb) - disk_usd_h),
        "disk": hours * disk_usd_h,
        "down": down_gb * offer.inet_down_usd_gb,
        "up": up_gb * offer.inet_up_usd_gb,
    }
    return Cost(
        usd=sum(parts.values()),
        hours=hours,
        train_s=train_s,
        hours_from="measured" if recipe.step_seconds else "predicted",
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


def phase_s(recipe: Recipe, name: str, shape: ModelShape | None = None) -> float:
    """Seconds of training of one phase: steps times what a step took before, or is predicted to take."""
    phase, shape = recipe.phase(name), shape or shape_of(recipe.model)
    if recipe.step_seconds:
        return phase.steps * recipe.step_seconds
    if recipe.box.device != "cuda":
        return phase.steps * (0.1 if recipe.trainer == "counting" else 0.8)
    tokens = phase.batch_size * phase.accumulation * phase.max_length * (2 if phase.kind == "dpo" else 1)
    step_s = tokens / (TIERS[recipe.box.tier].tokens_s * _relative_speed(shape))
    if isinstance(phase, GrpoPhase):
        step_s += phase.max_completion_length * GENERATED_TOKEN_S
    return phase.steps * step_s


def checkpoint_gb(recipe: Recipe, shape: ModelShape) -> float:
    """One checkpoint: fp32 adapter and optimizer state; with 8-bit state 11.4 GB for the 35B at rank 32, with fp32 state 22.6."""
    return adapter_parameters(recipe, shape) * (WEIGHT_B + OPTIMIZER_B[recipe.optimizer]) / 1e9


def adapter_gb(recipe: Recipe, shape: ModelShape) -> float:
    return adapter_parameters(recipe, shape) * WEIGHT_B / 1e9


def transfer_s(gb: float, mbps: float) -> float:
    """Seconds for so many GB; a rate that is not known or zero never ends."""
    return 0.0 if gb == 0 else gb * 8_000 / mbps if mbps > 0 else math.inf


def _uploads(recipe: Recipe, offer: Offer, done: Collection[str], shape: ModelShape) -> tuple[float, float]:
    """GB sent up, and the seconds that the last upload keeps the box after training: checkpoint, then exported adapter.

    An upload takes the newest checkpoint when the one before it is through, so a slow uplink sends fewer of them.
    """
    one_gb = checkpoint_gb(recipe, shape)
    one_s = transfer_s(one_gb, offer.inet_up_mbps or 0.0)
    total = 0.0
    for name in _left(recipe, done):
        phase = recipe.phase(name)
        saves = math.ceil(phase.steps / phase.save_every_steps)
        passable = saves if one_s == 0 else 1 + int(phase_s(recipe, name, shape) / one_s)
        total += one_gb * min(saves, passable)
    final_gb = adapter_gb(recipe, shape)
    return total + final_gb, one_s + transfer_s(final_gb, offer.inet_up_mbps or 0.0)


def _left(recipe: Recipe, done: Collection[str]) -> list[str]:
    return [name for name in recipe.phase_names if name not in done]


def _relative_speed(shape: ModelShape) -> float:
    """Against the 35B-A3B, by the weights that a token meets. A smaller model is not faster: its steps are bound by launches."""
    return min(1.0, QWEN36_35B.active_parameters / shape.active_parameters)
