"""One way to run a phase on TRL, for all five: base and phase-start adapter first, then the checkpoint, with every check on the way.

The order matters. A phase's reference policy is what the model is when TRL's trainer is built, so it is built from the phase-start adapter
even when training goes on from a checkpoint; built from the checkpoint, the reference would silently be the half-trained policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

from training import experts, liveness, packing
from training.checkpoint import ADAPTER_FILES
from training.contract.families import FAMILIES
from training.contract.layout import PROBE
from training.contract.memory import USABLE, recompute_for
from training.contract.micro_batches import ENOUGH_TOKENS, regrouped
from training.contract.recipe import GrpoPhase, Phase, Recipe, Recompute
from training.contract.rows import Row, read_rows
from training.contract.shapes import shape_in
from training.data import Prepared
from training.errors import ModelError, Stage
from training.model import ADAPTER, attach, expected_counts, load_base, load_tokenizer, release, require_groups
from training.phases.desk import Desk
from training.phases.reporter import Reporter, TokenCount, summary

_CANARY_TOKENS = 48
_OPTIMIZERS = {"adamw_8bit": "adamw_torch_8bit", "adamw": "adamw_torch_fused"}


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
            "optim": _OPTIMIZERS[desk.assignment.recipe.optimizer],
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
    _require_fast_paths(desk, model)
    split = _split(desk, model)
    _set_recompute(desk, model, split)
    start = desk.start or _save_fresh(model, desk)
    before, base = liveness.group_states(model), liveness.base_sums(model)
    packed = packed and _packing_holds(model, desk)

    desk.clear(desk.output)
    setting = Setting(desk, model, tokenizer, rows, packed, not _is_whole(model), split)
    trainer = build(setting, prepared)
    if held:
        from training.sharded.trainer import adapt

        adapt(trainer, recipe)
    count = TokenCount()
    if getattr(model, "livery_lean", None) is not None:
        from training.phases import lean_trainer  # it needs triton, as the layers do

        lean_trainer.adapt(trainer, _graphs(desk, model, count))
        trainer.add_callback(
            lean_trainer.HandoverWatch(
                lambda reason: _take_slowly(desk, reason), lambda reason: desk.notice("slow path", reason)
            )
        )
    _set_optimizer(desk, trainer)
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
    _say_attention(desk, model)
    return True


def _say_attention(desk: Desk, model: Any) -> None:
    """Which kernel the attention over packed documents runs on."""
    if getattr(model, "livery_lean", None) is None:
        return
    from training.lean import attention

    choice = attention.packed_choice(model)
    if choice is not None:
        desk.notice("slow path" if choice.slow else "packed attention", choice.reason, routine=not choice.slow)


def _require_fast_paths(desk: Desk, model: Any) -> None:
    """On a GPU a slow kernel path multiplies the bill: it needs the recipe's word. A wrong one is not for sale."""
    recipe = desk.assignment.recipe
    if recipe.box.device != "cuda":
        return
    for reason in _slow_paths(recipe, model):
        _take_slowly(desk, reason)
    _require_right_rule(desk, model)


def _slow_paths(recipe: Recipe, model: Any) -> Iterator[str]:
    """What of this model would run on a card more slowly than we know how."""
    chosen = experts.choice(model)
    if chosen and chosen.slow:
        yield f"the routed experts run on {chosen.path}: {chosen.reason}"
    elif "routed_experts" in recipe.adapters.groups and experts.forward_syncs(model):
        yield "the routed experts' grouped products wait for the host on this card"
    # With or without adapters on it, it is in the forward and in the backward pass.
    if FAMILIES[recipe.model.family].packing == "gated_delta_net" and not packing.has_fast_rule():
        yield "flash-linear-attention is not installed, the gated delta net runs in plain torch"
    found = getattr(model, "livery_lean", None)
    if found is None:
        yield "the layers around the routed experts run in transformers' form: triton is not installed"
    elif not found.whole:
        name, reason = next(iter(found.left.items()))
        yield f"{len(found.left)} modules run in transformers' form, such as {name}: {reason}"


def _take_slowly(desk: Desk, reason: str) -> None:
    """ModelError on a card, unless the recipe takes slower kernels; then, and on a CPU, it is said."""
    recipe = desk.assignment.recipe
    if recipe.box.device == "cuda" and "slow_experts" not in recipe.allow:
        raise ModelError(f"{reason}; write `allow: [slow_experts]` in the recipe to accept slower kernels")
    desk.notice("slow path", reason)


def _require_right_rule(desk: Desk, model: Any) -> None:
    """Compilers have got this kernel's backward pass wrong on single generations of cards. ModelError says how far off it is."""
    if getattr(model, "livery_lean", None) is None:
        return
    from training import lean

    apart = lean.check_rule(model)
    if apart:
        figures = ", ".join(f"{name} {difference:.1e}" for name, difference in apart.items())
        desk.notice("gated delta rule", f"as far from the rule as written, by norm: {figures}", routine=True)


def _is_whole(model: Any) -> bool:
    """Whether every layer is ours."""
    found = getattr(model, "livery_lean", None)
    return found is not None and found.whole


def _is_counted(model: Any) -> bool:
    """Whether the memory plan's arithmetic is of what runs here: our layers around our experts."""
    chosen = experts.choice(model)
    return _is_whole(model) and chosen is not None and chosen.plan is not None


def _split(desk: Desk, model: Any) -> Phase:
    """The phase with the micro-batches that this card takes best; its steps stay the same, since the loss is divided by a whole step's tokens."""
    recipe, phase = desk.assignment.recipe, desk.phase
    if recipe.box.device != "cuda" or not _is_counted(model):
        return phase
    shape = shape_in(desk.home.model, recipe.model)
    split = regrouped(recipe, phase, shape, _card_gb(model) * USABLE, desk.crew.size)
    if split.batch_size != phase.batch_size:
        desk.notice(
            "micro-batch",
            f"{split.batch_size} rows at once, {split.accumulation} a step (the recipe: {phase.batch_size} and {phase.accumulation}); the step is the same",
            routine=True,
        )
    return split


def _set_recompute(desk: Desk, model: Any, split: Phase) -> None:
    """Have each layer that is ours recompute what the recipe says or, as in the plan, what this card's memory leaves no room for."""
    found = getattr(model, "livery_lean", None)
    if found is None:
        return
    if found.left:
        reasons: dict[str, int] = Counter(found.left.values())
        desk.notice("left stock", "; ".join(f"{count} modules: {reason}" for reason, count in reasons.items()))
    from training import lean

    policy, why = _policy(desk, model, split)
    lean.set_recompute(model, policy)
    desk.notice("recompute", f"{policy}: {why}", routine=True)


def _graphs(desk: Desk, model: Any, count: TokenCount) -> Any:
    """What runs packed micro-batches as graphs: on a card, of a base that lies on it whole, with nothing in the layers that waits for the host."""
    recipe = desk.assignment.recipe
    cuda = recipe.box.device == "cuda"
    if not cuda or recipe.cuda_graphs == "off" or recipe.model.quantisation != "none" or not _is_counted(model):
        return None
    if desk.phase.kind not in ("cpt", "sft"):
        return None
    from training.phases.lean_trainer import Graphs  # it needs triton, as the layers do

    return Graphs(
        lambda text: desk.notice("cuda graph", text, routine=True),
        count,
        ENOUGH_TOKENS,
        warn=lambda text: desk.notice("slow path", text),
    )


def _policy(desk: Desk, model: Any, split: Phase) -> tuple[Recompute, str]:
    recipe = desk.assignment.recipe
    if recipe.recompute != "auto":
        return recipe.recompute, "the recipe's word"
    if recipe.box.device != "cuda":
        return "none", "on a CPU"
    if recipe.model.quantisation != "none":
        return "full", "layers of a base in 4 bits are always recomputed whole"
    if not _is_counted(model):
        return "full", "what is not computed by our own kernels keeps more than the plan counts"
    gb, shape = _card_gb(model), shape_in(desk.home.model, recipe.model)
    return recompute_for(recipe, split, shape, gb * USABLE), f"the fastest that fits {gb:.1f} GB"


def _card_gb(model: Any) -> float:
    return float(torch.cuda.get_device_properties(next(model.parameters()).device).total_memory / 1e9)


def _set_optimizer(desk: Desk, trainer: Any) -> None:
    """On a card the recipe's AdamW in one pass over memory, and clipping in it; several processes clip together, before it. Checkpoints are the same."""
    # Without triton there is a slow path, which has been said.
    if desk.assignment.recipe.box.device != "cuda" or find_spec("triton") is None:
        return
    from training import optimizer

    reason = optimizer.adapt(trainer, clips=desk.crew.size == 1)
    if reason:
        desk.notice("optimizer", f"the library's own, and clipping in a pass of its own: {reason}")


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
