"""What the trainer does, told to the desk: steps, checkpoints, the end; and the checks that belong to those moments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from training import liveness
from training.contract.events import GroupState
from training.model import ModelError
from training.phases.desk import Desk

# |reward| of the very first step of DPO and KTO: policy and reference are the same model, so exactly 0 in float32.
_REFERENCE_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


class Reporter(TrainerCallback):
    """Tells the desk what the trainer does: steps, checkpoints, the end; and stops it when the runner is told to stop."""

    def __init__(self, desk: Desk, start: Path, before: Mapping[str, GroupState], rows: int) -> None:
        self._desk, self._start, self._before, self._rows = desk, start, before, rows
        self._seconds, self._tokens = 0.0, 0.0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        if self._desk.resume is not None:
            require_restored(self._desk.resume.manifest, state.global_step, model, optimizer)
        self._desk.started(state.global_step, self._rows)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._desk.pulse.begin_step(self._desk.name, state.global_step + 1)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stop_if_told(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._seconds = self._desk.pulse.end_step()
        self._stop_if_told(state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        metrics = {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}
        loss = metrics.pop("loss")
        if "num_tokens" in metrics:  # counts from the process's start, not from the phase's
            metrics["tokens"], self._tokens = metrics["num_tokens"] - self._tokens, metrics.pop("num_tokens")
        self._desk.stepped(state.global_step, loss, self._seconds, metrics)
        if state.global_step == 1 and self._desk.phase.kind in ("dpo", "kto"):
            require_reference(metrics, _REFERENCE_TOLERANCE[self._desk.assignment.recipe.model.dtype])

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Before a final checkpoint is let out, every group must have changed."""
        final = state.global_step >= state.max_steps
        groups = liveness.group_states(model, self._start if final else None)
        if final:
            moved = liveness.require_changed(dict(self._before), groups, model)
            self._desk.guard("end", state.global_step, moved)
        directory = self._desk.output / f"checkpoint-{state.global_step}"
        losses, metrics = summary(state.log_history)
        self._desk.save(directory, state.global_step, groups=groups, losses=losses, metrics=metrics)

    def _stop_if_told(self, state: Any, control: Any) -> None:
        if self._desk.stop.is_set():
            control.should_training_stop = True
            control.should_save = state.global_step not in (0, self._desk.saved_step)


def require_restored(manifest: Any, step: int, model: Any, optimizer: Any) -> None:
    """What the trainer loaded must be what the manifest says: transformers restores whatever files are there and says nothing."""
    if step != manifest.step:
        raise ModelError(f"resumed at step {step}, the manifest says {manifest.step}")
    for group, now in liveness.group_states(model).items():
        if now.digest != manifest.groups[group].digest:
            raise ModelError(f"resumed adapter: group {group} has other weights than the manifest says", group)
    trainable = sum(len(group["params"]) for group in optimizer.param_groups)
    if len(optimizer.state) != trainable:
        raise ModelError(f"resumed optimizer: state for {len(optimizer.state)} of {trainable} tensors")


def require_reference(metrics: Mapping[str, float], tolerance: float) -> None:
    """At the first step policy and reference are one model, so the rewards are zero; anything else is a wrong reference."""
    for side in ("chosen", "rejected"):
        reward = metrics.get(f"rewards/{side}")
        if reward is not None and not abs(reward) <= tolerance:
            raise liveness.LivenessError(
                f"step 1: rewards/{side} is {reward:.4g}, want 0: the reference is not the policy that the phase began with",
                cause="the reference is the base model or a later policy",
            )


def summary(history: Sequence[Mapping[str, Any]]) -> tuple[tuple[float | None, float | None], dict[str, float]]:
    """First and last loss of the phase, and its last metrics; of GRPO's reward and silence the mean over the phase. The history is part of a
    checkpoint, so this is right after a resume, too."""
    steps = [entry for entry in history if "loss" in entry]
    if not steps:
        return (None, None), {}
    skipped = ("loss", "epoch", "step", "learning_rate", "num_tokens")
    last = {
        name: float(value)
        for name, value in steps[-1].items()
        if name not in skipped and isinstance(value, (int, float)) and math.isfinite(value)
    }
    for name in ("reward", "frac_reward_zero_std"):
        values = [float(entry[name]) for entry in steps if name in entry]
        if values:
            last[f"mean_{name}"] = sum(values) / len(values)
    return (float(steps[0]["loss"]), float(steps[-1]["loss"])), last
