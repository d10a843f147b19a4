"""What a phase runs on: whether a card gets what it is fast with, how its steps are split, what is recomputed, graphs and optimizer. Whatever is slower
than it need be is said, and on a card needs the recipe's word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from training import experts, packing
from training.contract.families import FAMILIES
from training.contract.memory import USABLE, has_room, moments, recompute_for
from training.contract.micro_batches import ENOUGH_TOKENS, regrouped
from training.contract.recipe import Phase, Recipe, Recompute
from training.contract.shapes import shape_in
from training.errors import ModelError
from training.phases.desk import Desk
from training.phases.reporter import TokenCount


def require(desk: Desk, model: Any) -> None:
    """On a GPU a slow kernel path multiplies the bill: it needs the recipe's word. A wrong one is not for sale."""
    recipe = desk.assignment.recipe
    if recipe.box.device != "cuda":
        return
    for reason in _slow_paths(recipe, model):
        take_slowly(desk, reason)
    _require_right_rule(desk, model)


def split(desk: Desk, model: Any, *, graphs: bool = True) -> Phase:
    """The phase with the micro-batches that this card takes best; its steps stay the same, since the loss is divided by a whole step's tokens."""
    recipe, phase = desk.assignment.recipe, desk.phase
    if recipe.box.device != "cuda" or recipe.model.quantisation != "none":
        return phase
    shape, available_gb = shape_in(desk.home.model, recipe.model), _card_gb(model) * USABLE
    found = regrouped(recipe, phase, shape, available_gb, desk.crew.size, graphs=graphs)
    # What keeps more than the plan counts takes the recipe's rows; where those cannot fit, as few as the plan has them.
    if not _is_counted(model) and has_room(next(moments(recipe, phase, shape, "full")), available_gb):
        return phase
    if found.batch_size != phase.batch_size or not graphs:
        desk.notice(
            "micro-batch",
            f"{found.batch_size} row{'s' if found.batch_size > 1 else ''} at once, {found.accumulation} a step (the recipe: {phase.batch_size} and {phase.accumulation}); the step is the same",
            routine=True,
        )
    return found


def split_for_launches(desk: Desk, model: Any, trainer: Any) -> None:
    """Have a newly built trainer take the micro-batches that are best launched kernel by kernel: its data has turned out not to be for graphs."""
    found, arguments = split(desk, model, graphs=False), trainer.args
    arguments.per_device_train_batch_size = found.batch_size
    arguments.gradient_accumulation_steps = found.accumulation // desk.crew.size
    trainer._train_batch_size = arguments.train_batch_size
    _recompute(desk, model, found)


def set_recompute(desk: Desk, model: Any, split: Phase) -> None:
    """Have each layer that is ours recompute what the recipe says or, as in the plan, what this card's memory leaves no room for."""
    found = getattr(model, "livery_lean", None)
    if found is None:
        return
    if found.left:
        reasons: dict[str, int] = Counter(found.left.values())
        desk.notice("left stock", "; ".join(f"{count} modules: {reason}" for reason, count in reasons.items()))
    _recompute(desk, model, split)


def graphs(desk: Desk, model: Any, count: TokenCount) -> Any:
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


def set_optimizer(desk: Desk, trainer: Any) -> None:
    """On a card the recipe's AdamW in one pass over memory, and clipping in it; several processes clip together, before it. Checkpoints are the same."""
    # Without triton there is a slow path, which has been said.
    if desk.assignment.recipe.box.device != "cuda" or find_spec("triton") is None:
        return
    from training import optimizer

    reason = optimizer.adapt(trainer, clips=desk.crew.size == 1)
    if reason:
        desk.notice("optimizer", f"the library's own, and clipping in a pass of its own: {reason}")


def say_attention(desk: Desk, model: Any) -> None:
    """Which kernel the attention over packed documents runs on."""
    if getattr(model, "livery_lean", None) is None:
        return
    from training.lean import attention

    choice = attention.packed_choice(model)
    if choice is not None:
        desk.notice("slow path" if choice.slow else "packed attention", choice.reason, routine=not choice.slow)


def take_slowly(desk: Desk, reason: str) -> None:
    """ModelError on a card, unless the recipe takes slower kernels; then, and on a CPU, it is said."""
    recipe = desk.assignment.recipe
    if recipe.box.device == "cuda" and "slow_experts" not in recipe.allow:
        raise ModelError(f"{reason}; write `allow: [slow_experts]` in the recipe to accept slower kernels")
    desk.notice("slow path", reason)


def is_whole(model: Any) -> bool:
    """Whether every layer is ours."""
    found = getattr(model, "livery_lean", None)
    return found is not None and found.whole


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


def _require_right_rule(desk: Desk, model: Any) -> None:
    """Compilers have got this kernel's backward pass wrong on single generations of cards. ModelError says how far off it is."""
    if getattr(model, "livery_lean", None) is None:
        return
    from training import lean

    apart = lean.check_rule(model)
    if apart:
        figures = ", ".join(f"{name} {difference:.1e}" for name, difference in apart.items())
        desk.notice("gated delta rule", f"as far from the rule as written, by norm: {figures}", routine=True)


def _is_counted(model: Any) -> bool:
    """Whether the memory plan's arithmetic is of what runs here: our layers around our experts."""
    chosen = experts.choice(model)
    return is_whole(model) and chosen is not None and chosen.plan is not None


def _recompute(desk: Desk, model: Any, split: Phase) -> None:
    from training import lean

    policy, why = _policy(desk, model, split)
    lean.set_recompute(model, policy)
    desk.notice("recompute", f"{policy}: {why}", routine=True)


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
