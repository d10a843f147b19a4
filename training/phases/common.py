"""One way to run a phase on TRL, for all five: base and phase-start adapter first, then the checkpoint, with every check on the way.

The order matters. A phase's reference policy is what the model is when TRL's trainer is built, so it is built from the phase-start adapter
even when training goes on from a checkpoint; built from the checkpoint, the reference would silently be the half-trained policy.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from training import experts, liveness, packing
from training.checkpoint import ADAPTER_FILES
from training.contract.events import GroupState
from training.contract.recipe import GrpoPhase
from training.contract.rows import Row, read_rows
from training.data import Prepared
from training.model import ADAPTER, ModelError, attach, load_base, load_tokenizer, release, require_groups
from training.phases.desk import Desk

_CANARY_TOKENS = 48
# |reward| of the very first step of DPO and KTO: policy and reference are the same model, so exactly 0 in float32.
_REFERENCE_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Setting:
    """What a phase builds its trainer from."""

    desk: Desk
    model: Any
    tokenizer: Any
    rows: Sequence[Row]
    packed: bool

    def arguments(self) -> dict[str, Any]:
        """Trainer arguments that all phases share."""
        desk, phase = self.desk, self.desk.phase
        cuda = desk.assignment.recipe.box.device == "cuda"
        return {
            "output_dir": str(desk.output),
            "per_device_train_batch_size": phase.batch_size,
            "gradient_accumulation_steps": phase.accumulation,
            "max_steps": phase.steps,
            "learning_rate": phase.learning_rate,
            "lr_scheduler_type": "constant_with_warmup" if phase.schedule == "constant" else phase.schedule,
            "warmup_steps": phase.warmup_steps,
            "router_aux_loss_coef": phase.router_aux_loss,
            "seed": desk.assignment.recipe.seed,
            "optim": "adamw_torch_8bit" if cuda else "adamw_torch",
            "bf16": cuda,
            "use_cpu": not cuda,
            "gradient_checkpointing": cuda,
            "gradient_checkpointing_kwargs": {"use_reentrant": False} if cuda else None,
            "dataloader_pin_memory": cuda,
            "logging_steps": 1,
            "logging_nan_inf_filter": False,  # it would show a NaN as a loss of 0.0
            "save_strategy": "steps",
            "save_steps": phase.save_every_steps,
            "save_total_limit": 1,
            "save_only_model": False,
            "report_to": "none",
            "disable_tqdm": True,
        }


Build = Callable[[Setting, Prepared], Any]
Prepare = Callable[[Sequence[Row], Any], Prepared]


def train(desk: Desk, prepare: Prepare, build: Build, *, packed: bool = False) -> Path:
    """Train a phase to its end; returns the directory of its adapter.

    LivenessError, ModelError, PackingError, RowError, NotFinite stop it for good; Interrupted means that it is saved and not done.
    """
    try:
        return _train(desk, prepare, build, packed)
    finally:
        release()


def _train(desk: Desk, prepare: Prepare, build: Build, packed: bool) -> Path:
    liveness.refuse_foreign()
    recipe = desk.assignment.recipe
    tokenizer = load_tokenizer(desk.home.model)
    rows = read_rows(desk.home.data(desk.kind), desk.kind)
    prepared = prepare(rows, tokenizer)
    if prepared.dropped:
        desk.notice(
            "rows dropped", f"{prepared.dropped} of {len(rows)} rows are longer than {desk.phase.max_length} tokens"
        )
    packing.install()
    model = attach(load_base(desk.home.model, recipe), recipe, desk.start)
    _require_fast_paths(desk)
    start = desk.start or _save_fresh(model, desk)
    before = liveness.group_states(model)
    groups = tuple(before)
    desk.guard("attach", 0, require_groups(model, recipe))
    packed = packed and _packing_holds(model, desk)
    desk.guard("canary", 0, liveness.canary(model, _sample(tokenizer, rows, model), groups))

    shutil.rmtree(desk.output, ignore_errors=True)
    trainer = build(Setting(desk, model, tokenizer, rows, packed), prepared)
    silent = desk.phase.silent_steps if isinstance(desk.phase, GrpoPhase) else 1
    trainer.add_callback(
        liveness.Guard(groups, desk.guard, advantages=lambda: _advantages(trainer), silent_steps=silent)
    )
    trainer.add_callback(Reporter(desk, start, before, prepared.rows))
    trainer.train(resume_from_checkpoint=str(desk.resume_dir) if desk.resume_dir else None)
    return _finish(desk, trainer, start)


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
        self._desk.pulse.begin_step(self._desk.kind, state.global_step + 1)

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
        if state.global_step == 1 and self._desk.kind in ("dpo", "kto"):
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


def without_reference(trainer: Any) -> Any:
    """Drop TRL's copy of the phase-start adapter once its log-probabilities are columns of the data: it would cost a second adapter in
    memory and in every checkpoint."""
    trainer.model.delete_adapter("ref")
    trainer.model.set_adapter(ADAPTER)
    return trainer


def _finish(desk: Desk, trainer: Any, start: Path) -> Path:
    step, model = trainer.state.global_step, trainer.model
    losses, metrics = summary(trainer.state.log_history)
    groups = liveness.group_states(model, start)
    replaced = experts.replaced(model)
    if replaced:
        name, who = next(iter(replaced.items()))
        raise liveness.LivenessError(f"{name}.forward was replaced during the phase", tensor=name, cause=who)
    directory = desk.output / f"checkpoint-{step}"
    result = desk.keep_result(directory, ADAPTER_FILES) if directory.exists() else desk.output
    desk.ended(step, groups=groups, losses=losses, metrics=metrics)
    return result


def _save_fresh(model: Any, desk: Desk) -> Path:
    """The first phase begins from fresh adapters; they are written down so that the change can be measured."""
    directory = desk.home.work / "fresh" / desk.kind
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory, selected_adapters=[ADAPTER])
    return directory


def _packing_holds(model: Any, desk: Desk) -> bool:
    try:
        desk.guard("packing", 0, {"logits": packing.check(model)})
    except packing.PackingError as error:
        if "unpacked" not in desk.assignment.recipe.allow:
            raise
        desk.notice("training unpacked", str(error))
        return False
    return True


def _require_fast_paths(desk: Desk) -> None:
    """On a GPU a slow kernel path multiplies the bill: it needs the recipe's word."""
    recipe = desk.assignment.recipe
    if recipe.box.device != "cuda":
        return
    slow = []
    if "routed_experts" in recipe.adapters.groups and experts.host_sync(torch.device("cuda")):
        slow.append("torch's grouped_mm waits for the host on this card")
    if "linear_attention" in recipe.adapters.groups and not packing.has_fast_rule():
        slow.append("flash-linear-attention is not installed, the gated delta net runs in plain torch")
    for reason in slow:
        if "slow_experts" not in recipe.allow:
            raise ModelError(f"{reason}; write `allow: [slow_experts]` in the recipe to accept slower kernels")
        desk.notice("slow path", reason)


def _sample(tokenizer: Any, rows: Sequence[Row], model: Any) -> torch.Tensor:
    """A few real tokens [1, T] for the forward check."""
    row = rows[0]
    text = row.get("text") or " ".join(m["content"] for m in row.get("messages") or row["prompt"])
    ids = tokenizer(text)["input_ids"][:_CANARY_TOKENS]
    return torch.tensor([ids], device=next(model.parameters()).device)


def _advantages(trainer: Any) -> list[torch.Tensor]:
    """GRPO keeps the micro-batches of the coming step here; other trainers have no such thing."""
    return [batch["advantages"] for batch in getattr(trainer, "_buffered_inputs", None) or ()]
