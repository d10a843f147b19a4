"""One way to run a phase on TRL, for all five: base and phase-start adapter first, then the checkpoint, with every check on the way.

The order matters. A phase's reference policy is what the model is when TRL's trainer is built, so it is built from the phase-start adapter
even when training goes on from a checkpoint; built from the checkpoint, the reference would silently be the half-trained policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

from training import liveness, packing
from training.checkpoint import ADAPTER_FILES
from training.contract.layout import PROBE
from training.contract.recipe import GrpoPhase, Phase
from training.contract.rows import Row, read_rows
from training.data import Prepared
from training.errors import Stage
from training.model import ADAPTER, attach, expected_counts, load_base, load_tokenizer, release, require_groups
from training.phases import fast_paths
from training.phases.desk import Desk
from training.phases.reporter import Reporter, TokenCount, summary

_CANARY_TOKENS = 48
OPTIMIZERS = {"adamw_8bit": "adamw_torch_8bit", "adamw": "adamw_torch_fused"}


@dataclass(frozen=True)
class Setting:
    """What a phase builds its trainer from."""

    desk: Desk
    model: Any
    tokenizer: Any
    rows: Sequence[Row]
    packed: bool
    checkpointing: bool = True
    """On a card, whether transformers recomputes the layers: those that are ours recompute themselves."""
    split: Phase | None = None
    """The phase with the micro-batches that are taken here, if they are not its own; see `training.contract.micro_batches`."""

    def arguments(self) -> dict[str, Any]:
        """Trainer arguments that all phases share."""
        desk, phase = self.desk, self.split or self.desk.phase
        cuda = desk.assignment.recipe.box.device == "cuda"
        return {
            "output_dir": str(desk.output),
            "per_device_train_batch_size": phase.batch_size,
            "gradient_accumulation_steps": phase.accumulation // desk.crew.size,
            "max_steps": phase.steps,
            "learning_rate": phase.learning_rate,
            "lr_scheduler_type": "constant_with_warmup" if phase.schedule == "constant" else phase.schedule,
            "warmup_steps": phase.warmup_steps,
            "router_aux_loss_coef": phase.router_aux_loss,
            "seed": desk.assignment.recipe.seed,
            "optim": OPTIMIZERS[desk.assignment.recipe.optimizer],
            "bf16": cuda,
            "use_cpu": not cuda,
            "gradient_checkpointing": cuda and self.checkpointing,
            "gradient_checkpointing_kwargs": {"use_reentrant": False} if cuda and self.checkpointing else None,
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
    recipe = desk.assignment.recipe
    liveness.require_versions()
    desk.guard("versions", 0, {})
    tokenizer = load_tokenizer(desk.home.model)
    rows = read_rows(desk.home.data(desk.name), desk.phase.kind)
    prepared = prepare(rows, tokenizer)
    if prepared.dropped:
        desk.notice(
            "rows dropped", f"{prepared.dropped} of {len(rows)} rows are longer than {desk.phase.max_length} tokens"
        )
    packing.install()
    model = attach(load_base(desk.home.model, recipe), recipe, desk.start)
    held = getattr(model, "livery_held", None)
    if held:
        desk.notice("base in 4 bits", "; ".join(held.lines()), routine=True)
    sample = _sample(tokenizer, rows, model)
    groups = _require_alive(model, desk, sample)
    fast_paths.require(desk, model)
    split = fast_paths.split(desk, model)
    fast_paths.set_recompute(desk, model, split)
    start = desk.start or _save_fresh(model, desk)
    before, base = liveness.group_states(model), liveness.base_sums(model)
    packed = packed and _packing_holds(model, desk)

    desk.clear(desk.output)
    setting = Setting(desk, model, tokenizer, rows, packed, not fast_paths.is_whole(model), split)
    trainer = build(setting, prepared)
    if held:
        from training.sharded.trainer import adapt

        adapt(trainer, recipe)
    count = TokenCount()
    if getattr(model, "livery_lean", None) is not None:
        from training.phases import lean_trainer  # it needs triton, as the layers do

        if not lean_trainer.adapt(trainer, fast_paths.graphs(desk, model, count)):
            fast_paths.split_for_launches(desk, model, trainer)
        trainer.add_callback(
            lean_trainer.HandoverWatch(
                lambda reason: fast_paths.take_slowly(desk, reason), lambda reason: desk.notice("slow path", reason)
            )
        )
    fast_paths.set_optimizer(desk, trainer)
    trainer.remove_callback(PrinterCallback)  # the events say it
    liveness.require_arguments(trainer.args, desk.phase)
    guard = _guard(desk, trainer, groups)
    trainer.add_callback(guard)
    merges: Stage = "rollout" if isinstance(desk.phase, GrpoPhase) else "end"
    trainer.add_callback(liveness.SaveGuard(recipe, base, desk.guard, merges=merges))
    last = desk.name == recipe.phase_names[-1]
    write_probe = (lambda directory: _write_probe(trainer, sample, directory)) if last else None
    trainer.add_callback(
        Reporter(
            desk,
            start,
            before,
            prepared.rows,
            grad_norms=lambda: guard.last_norms,
            write_probe=write_probe,
            count=count,
        )
    )
    trainer.train(resume_from_checkpoint=str(desk.resume_dir) if desk.resume_dir else None)
    return _finish(desk, trainer, start)


def _require_alive(model: Any, desk: Desk, sample: torch.Tensor) -> tuple[str, ...]:
    """Before a trainer is built: every group that the recipe names is there and in the forward. Returns their names."""
    recipe = desk.assignment.recipe
    desk.guard("load", 0, {})
    desk.guard("attach", 0, require_groups(model, recipe))
    liveness.require_static(model)
    desk.guard("static", 0, {})
    groups = tuple(expected_counts(model.config, recipe))
    desk.guard("canary", 0, liveness.canary(model, sample, groups))
    return groups


def _guard(desk: Desk, trainer: Any, groups: tuple[str, ...]) -> liveness.Guard:
    phase = desk.phase
    if not isinstance(phase, GrpoPhase):
        return liveness.Guard(groups, desk.guard, notice=desk.notice)
    return liveness.Guard(
        groups,
        desk.guard,
        notice=desk.notice,
        advantages=lambda: _advantages(trainer),
        silent_steps=phase.silent_steps,
        rollouts=liveness.Rollouts(trainer.model),
    )


def _write_probe(trainer: Any, sample: torch.Tensor, directory: Path) -> None:
    # Whoever serves the adapter computes without the trainer's autocast.
    plain = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    probe = liveness.probe_of(plain, sample)
    if trainer.args.should_save:
        liveness.write_probe(directory, probe)


def _finish(desk: Desk, trainer: Any, start: Path) -> Path:
    step, model = trainer.state.global_step, trainer.model
    losses, metrics = summary(trainer.state.log_history)
    groups = liveness.group_states(model, start)
    liveness.require_static(model, "end")
    directory = desk.output / f"checkpoint-{step}"
    names = (*ADAPTER_FILES, *([PROBE] if (directory / PROBE).exists() else []))
    result = desk.keep_result(directory, names) if directory.exists() else desk.output
    desk.ended(step, groups=groups, losses=losses, metrics=metrics)
    return result


def _save_fresh(model: Any, desk: Desk) -> Path:
    """The first phase begins from fresh adapters; they are written down so that the change can be measured."""
    directory = desk.home.work / "fresh" / desk.name
    desk.clear(directory)
    if hasattr(model, "livery_held"):
        from training.sharded.trainer import save_adapter

        save_adapter(model, directory, desk.assignment.recipe)
    else:
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
    fast_paths.say_attention(desk, model)
    return True


def _sample(tokenizer: Any, rows: Sequence[Row], model: Any) -> torch.Tensor:
    """A few real tokens [1, T] for the forward check."""
    row = rows[0]
    text = row.get("text") or " ".join(m.get("content") or "" for m in row.get("messages") or row["prompt"])
    ids = tokenizer(text)["input_ids"][:_CANARY_TOKENS]
    return torch.tensor([ids], device=next(model.parameters()).device)


def _advantages(trainer: Any) -> list[torch.Tensor]:
    """GRPO keeps the micro-batches of the coming step here; other trainers have no such thing."""
    # A completion that was cut off is masked out of the loss, so its advantage counts for nothing.
    batches = getattr(trainer, "_buffered_inputs", None) or ()
    return [batch["advantages"] * batch["completion_mask"].any(1) for batch in batches]
