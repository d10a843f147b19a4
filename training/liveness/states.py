"""What the adapters are at a moment, and whether what was stored, restored or reached is what it should be."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import TrainerCallback

from training import parts
from training.contract.events import GroupState
from training.contract.recipe import Recipe
from training.errors import LivenessError, Stage
from training.liveness.rollouts import require_base_unchanged
from training.liveness.static import likely_cause, require_static
from training.liveness.steps import Passed
from training.model import (
    ADAPTER,
    WEIGHTS,
    all_lora_tensors,
    lora_tensors,
    require_same_keys,
    require_same_settings,
    stored_adapter,
)


def group_states(model: Any, start: Path | None = None) -> dict[str, GroupState]:
    """What each LoRA group is now, of all processes together (collective); `start` is the directory of the phase-start adapter, for the distance from it."""
    tensors: dict[str, int] = Counter()
    zero: dict[str, int] = Counter()
    squares: dict[str, float] = defaultdict(float)
    moved: dict[str, float] = defaultdict(float)
    digests: dict[str, Any] = defaultdict(hashlib.sha256)
    for which in ("lora_A", "lora_B"):
        for group, name, tensor in lora_tensors(model, which):
            values = parts.whole(tensor).float().cpu().contiguous()
            squares[group] += float(values.norm()) ** 2
            digests[group].update(name.encode())
            digests[group].update(values.numpy())
            if which == "lora_B":
                tensors[group] += 1
                zero[group] += int(not values.any())
    if start is not None:
        for group, now, then in stored_adapter(model, start):
            moved[group] += float((now.detach().float().cpu() - then.float()).norm()) ** 2
    for group, square in squares.items():
        if not math.isfinite(square):
            raise LivenessError(f"group {group} holds numbers that are not finite", stage="end", group=group)
    return {
        group: GroupState(
            tensors=tensors[group],
            zero_b=zero[group],
            norm=math.sqrt(squares[group]),
            delta_norm=math.sqrt(moved[group]) if start is not None else None,
            digest=digests[group].hexdigest(),
        )
        for group in tensors
    }


def require_changed(before: Mapping[str, GroupState], after: Mapping[str, GroupState], model: Any) -> dict[str, float]:
    """At a phase's end every group must have changed, and no lora_B may be zero everywhere. Returns the change a group."""
    for group, now in after.items():
        if now.digest == before[group].digest:
            raise LivenessError(
                f"the phase ends and group {group} is bit for bit what it was",
                stage="end",
                group=group,
                cause=likely_cause(model, group),
            )
        if now.zero_b:
            raise LivenessError(
                f"the phase ends and {now.zero_b} of {now.tensors} lora_B of {group} are zero everywhere",
                stage="end",
                group=group,
                tensor=next(name for g, name, b in lora_tensors(model, "lora_B") if g == group and not b.any()),
                cause=likely_cause(model, group),
            )
    return {group: now.delta_norm or 0.0 for group, now in after.items()}


def require_saved(model: Any, directory: Path, recipe: Recipe, stage: Stage = "checkpoint") -> dict[str, float]:
    """Before a checkpoint may leave the box: what lies on the disk is the training adapter as it is in memory, bit for bit, with the recipe's settings.
    Returns the number of tensors compared a group."""
    require_same_settings(directory, recipe, stage)
    wanted = {f"{name}.weight": (group, tensor) for group, name, tensor in all_lora_tensors(model)}
    compared: dict[str, float] = defaultdict(float)
    with safe_open(directory / WEIGHTS, "pt") as file:
        keys = set(file.keys())
        require_same_keys(wanted, {key: tuple(file.get_slice(key).get_shape()) for key in keys}, stage)
        for key, (group, tensor) in wanted.items():
            now = tensor.detach()
            stored = parts.mine(tensor, file.get_tensor(key)).to(now.device) if key in keys else None
            if stored is None or stored.dtype is not now.dtype or not stored.equal(now):
                raise LivenessError(
                    f"{WEIGHTS}: {key} is not what is in memory",
                    stage=stage,
                    group=group,
                    tensor=key,
                    cause=f"another adapter than '{ADAPTER}' was saved, or it was saved at another step",
                )
            compared[group] += 1
    return dict(compared)


def require_restored(manifest: Any, step: int, model: Any, optimizer: Any) -> None:
    """What the trainer loaded must be what the manifest says: transformers restores whatever files are there and says nothing."""
    if step != manifest.step:
        raise LivenessError(f"resumed at step {step}, the manifest says {manifest.step}", stage="restore")
    for group, now in group_states(model).items():
        if now.digest != manifest.groups[group].digest:
            raise LivenessError(
                f"resumed adapter: group {group} has other weights than the manifest says",
                stage="restore",
                group=group,
                cause="the checkpoint's adapter was not loaded, or another one was",
            )
    trainable = sum(len(group["params"]) for group in optimizer.param_groups)
    if len(optimizer.state) != trainable:
        raise LivenessError(
            f"resumed optimizer: state for {len(optimizer.state)} of {trainable} tensors", stage="restore"
        )


def require_reference(metrics: Mapping[str, float], tolerance: float) -> None:
    """At the first step policy and reference are one model, so the rewards are zero; anything else is a wrong reference."""
    for side in ("chosen", "rejected"):
        reward = metrics.get(f"rewards/{side}")
        if reward is not None and not abs(reward) <= tolerance:
            raise LivenessError(
                f"step 1: rewards/{side} is {reward:.4g}, want 0: the reference is not the policy that the phase began with",
                stage="reference",
                cause="the reference is the base model or a later policy",
            )


class SaveGuard(TrainerCallback):
    """Looks at each checkpoint before anybody else is told of it, so it must be the first callback that hears of saving; and at a phase's last one
    also at the frozen base and at who stands where which forward should."""

    def __init__(self, recipe: Recipe, base: Mapping[str, int], passed: Passed, *, merges: Stage = "end") -> None:
        self._recipe, self._base, self._passed, self._merges = recipe, dict(base), passed, merges

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._passed("checkpoint", state.global_step, require_saved(model, directory, self._recipe))
        if state.global_step >= state.max_steps:
            require_static(model, "end")
            require_base_unchanged(model, self._base, self._merges)
