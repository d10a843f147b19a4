"""What only running shows: noise that must move the loss, gradients that must be there, experts that must have run, weights that must move."""

from __future__ import annotations

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from training import experts, parts
from training.errors import LivenessError, Stage
from training.liveness.reading import require_reading
from training.liveness.rollouts import Rollouts
from training.liveness.static import likely_cause, recompute_of, require_static
from training.model import all_lora_tensors, lora_tensors

_NOISE = 0.05
_COVERAGE_STEPS, _COVERAGE = 5, 0.95

Passed = Callable[[str, int, dict[str, float]], None]
"""`passed(stage, step, values a group)`"""


def canary(model: Any, input_ids: Tensor, groups: Sequence[str]) -> dict[str, float]:
    """How far the loss moves when one group's lora_B is replaced by noise; the weights are put back bit for bit.

    `input_ids` is [1, T] on the model's device. LivenessError for a group that moves nothing, and for experts that did not run
    through our forward.
    """
    was_training, before = model.training, experts.calls(model, "adapted")
    model.eval()
    moved = {}
    with torch.no_grad():
        quiet = _loss(model, input_ids)
        jitter = abs(_loss(model, input_ids) - quiet)
        for group in groups:
            moved[group] = abs(_loss_with_noise(model, input_ids, group) - quiet)
    model.train(was_training)
    if not math.isfinite(quiet):
        raise LivenessError(
            f"the loss is {quiet} before the first step; base or adapter is damaged, or the loss is not finite",
            stage="canary",
        )
    for group, distance in moved.items():
        # Noise may well throw the loss out of range: that, too, shows that the adapter is in the forward.
        if math.isfinite(distance) and not distance > 10 * jitter:
            raise LivenessError(
                f"noise in every lora_B of {group} moves the loss by {distance:.1e} (jitter {jitter:.1e}); its adapters are not in the forward",
                stage="canary",
                group=group,
                cause=likely_cause(model, group),
            )
    idle = [name for name, count in experts.calls(model, "adapted").items() if count == before[name]]
    if idle:
        raise LivenessError(
            f"{len(idle)} layers' experts did not run through our forward, the first is {idle[0]}",
            stage="canary",
            group="routed_experts.gate_up_proj",
            tensor=idle[0],
            cause=likely_cause(model, "routed_experts"),
        )
    require_reading(model)
    return {group: distance if math.isfinite(distance) else sys.float_info.max for group, distance in moved.items()}


@dataclass(frozen=True)
class Gradient:
    """The gradient of one LoRA tensor before the update."""

    group: str
    name: str
    which: str
    norm: float
    """0 if there is none: a norm over the gradients that exist would hide the tensor that is not in the graph."""


def gradients(model: Any, optimizer: Any = None) -> list[Gradient]:
    """Of every lora_A and lora_B, over all processes (collective). One transfer from the device, however many tensors there are.

    Of an `optimizer` that has measured them and will clip inside its step (training.optimizer) its norms are taken, as yet unclipped.
    """
    tensors = list(all_lora_tensors(model))
    there = [tensor for _, _, tensor in tensors if tensor.grad is not None]
    found = iter(_norms(there, _pending(optimizer)))
    norms = [next(found) if tensor.grad is not None else 0.0 for _, _, tensor in tensors]
    norms = parts.total_norms([tensor for _, _, tensor in tensors], norms)
    return [
        Gradient(group, name, name.rpartition(".")[2], norm)
        for (group, name, _), norm in zip(tensors, norms, strict=True)
    ]


def clipped(found: Sequence[Gradient], optimizer: Any) -> list[Gradient]:
    """As the update will take them: what an optimizer that clips inside its step has yet to multiply by is multiplied by."""
    pending = _pending(optimizer)
    factor = 1.0 if pending is None else float(pending.clip.factor)
    return [replace(each, norm=each.norm * factor) for each in found]


def group_norms(found: Sequence[Gradient]) -> dict[str, float]:
    squares: dict[str, float] = defaultdict(float)
    for each in found:
        squares[each.group] += each.norm**2
    return {group: math.sqrt(value) for group, value in squares.items()}


def require_finite(found: Sequence[Gradient], step: int, stage: Stage) -> None:
    """LivenessError if a gradient is NaN or infinite. Where nearly all are, none is named: the trainer's clipping spreads one NaN over them."""
    odd = [each for each in found if not math.isfinite(each.norm)]
    if not odd:
        return
    one = odd[0] if 2 * len(odd) < len(found) else None
    raise LivenessError(
        f"step {step}: the gradient of {one.name if one else 'every tensor'} is not finite; the update is not made",
        stage=stage,
        group=one.group if one else None,
        tensor=one.name if one else None,
        cause="an overflow in the loss, a damaged row, or a learning rate that is too high"
        + ("" if one else "; clipping has spread it over all tensors"),
    )


def require_gradients(
    model: Any, found: Sequence[Gradient], which: str, groups: Sequence[str], step: int, stage: Stage
) -> dict[str, float]:
    """Norm a group of the gradients of all `which` (lora_A or lora_B). LivenessError names the first tensor whose gradient is None or all zero: an
    expert without tokens leaves rows of zeros, never a whole tensor, so no tolerance is needed."""
    looked_at = [each for each in found if each.which == which]
    totals = Counter(each.group for each in looked_at)
    for group in groups:
        if group not in totals:
            raise LivenessError(f"step {step}: no {which} at all in group {group}", stage=stage, group=group)
    dead: dict[str, list[str]] = defaultdict(list)
    for each in looked_at:
        if each.norm == 0.0:
            dead[each.group].append(each.name)
    if dead:
        group = next(iter(dead))
        alive = sorted(set(totals) - set(dead))
        raise LivenessError(
            f"step {step}: {len(dead[group])} of {totals[group]} {which} of {group} have no gradient"
            + (f" (also dead: {', '.join(sorted(set(dead) - {group}))})" if len(dead) > 1 else "")
            + (f", while {', '.join(alive)} train" if alive else ""),
            stage=stage,
            group=group,
            tensor=dead[group][0],
            cause=likely_cause(model, group)
            if alive
            else "the loss does not depend on the adapters at all, or its gradient overflowed and was clipped to zero",
        )
    return group_norms(looked_at)


class Guard(TrainerCallback):
    """Watches every step of a phase, and looks closest at the first ones, again after each resume. `on_pre_optimizer_step` is the only moment when
    the accumulated gradients can be seen: they are cleared before `on_step_end`. What is wrong stops the phase before the update.

    `passed` is told of every check that passed, `notice(what, reason)` of what a person should know. `advantages` gives GRPO's advantages of the
    coming step, or nothing; `rollouts` watches its generation. `every`: steps between two looks at who stands where which forward should.
    """

    last_norms: dict[str, float]
    """Norm of each group's newest gradient, over its lora_A and lora_B, as clipped by the trainer; empty before the first step."""

    def __init__(
        self,
        groups: Sequence[str],
        passed: Passed,
        *,
        notice: Callable[[str, str], None] = lambda what, reason: None,
        advantages: Callable[[], Sequence[Tensor]] = lambda: (),
        silent_steps: int = 20,
        rollouts: Rollouts | None = None,
        every: int = 10,
    ) -> None:
        self._groups, self._passed, self._notice = tuple(groups), passed, notice
        self._advantages, self._silent_steps = advantages, silent_steps
        self._rollouts, self._every = rollouts, every
        self.last_norms = {}
        self._silent, self._steps, self._micro_steps = 0, 0, 0
        self._waiting: list[Stage] = ["step1", "step2"]
        self._before_step: dict[str, int] = {}
        self._before_update: list[int] | None = None
        self._has_moved = False
        self._coverage = _Coverage()

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        # Names stay: a layer whose wrapper has been taken out of the model must be missed.
        self._before_step |= experts.calls(model, "trained")
        self._micro_steps = 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._micro_steps += 1

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        step, stage = state.global_step + 1, self._waiting[0] if self._waiting else "running"
        self._steps += 1
        if "step1" in self._waiting:
            _require_in_optimizer(model, optimizer)
        found = gradients(model, optimizer)
        require_finite(found, step, stage)
        found = clipped(found, optimizer)
        self.last_norms = group_norms(found)
        if self._steps <= self._every or step % self._every == 0:
            require_static(model, "running")
        self._require_calls(model, args, step)
        if self._no_signal():
            self._count_silence(step)
            return
        self._silent = 0
        self._look_at_first_steps(model, found, step)
        self._coverage.add(model, self._notice)
        self._remember(model, optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._before_update is None:
            return
        before, self._before_update = self._before_update, None
        self._has_moved = True
        after = checksums(tensor for _, _, tensor in lora_tensors(model, "lora_B"))
        for (group, name, _), old, new in zip(lora_tensors(model, "lora_B"), before, after, strict=True):
            if old == new:
                raise LivenessError(
                    f"step {state.global_step + 1}: the update left {name} bit for bit as it was",
                    stage="step1",
                    group=group,
                    tensor=name,
                    cause="the optimizer does not hold this tensor, or does nothing",
                )

    def _look_at_first_steps(self, model: Any, found: Sequence[Gradient], step: int) -> None:
        if "step1" in self._waiting:
            norms = require_gradients(model, found, "lora_B", self._groups, step, "step1")
            if self._rollouts is not None:
                self._passed("rollout", step, self._rollouts.require_seen(step))
            self._waiting.remove("step1")
            self._passed("step1", step, norms)
        elif "step2" in self._waiting and not any(bool((b == 0).all()) for _, _, b in lora_tensors(model, "lora_B")):
            # Before its lora_B has moved, a lora_A's gradient is exactly zero and says nothing.
            norms = require_gradients(model, found, "lora_A", self._groups, step, "step2")
            self._waiting.remove("step2")
            self._passed("step2", step, norms)
        else:
            # No gradient at all may come from a step without a token to learn from; some without and some with is a bypass, and hooks leave no other trace.
            if any(each.norm for each in found):
                require_gradients(model, found, "lora_B", self._groups, step, "running")
            if step % self._every == 0:
                self._passed("running", step, self.last_norms)

    def _require_calls(self, model: Any, args: Any, step: int) -> None:
        """Every layer's experts ran with the adapter for each micro-step, and once more where the forward is computed again for the backward.
        More is well: GRPO's and KTO's methods run the model on other rows, too."""
        counts, modules = experts.calls(model, "trained"), dict(model.named_modules())
        for name, before in self._before_step.items():
            # A layer of ours recomputes by its own policy, whatever the trainer's arguments say.
            policy = recompute_of(modules.get(name.rpartition(".mlp.")[0], model))
            twice = getattr(args, "gradient_checkpointing", False) if policy is None else policy == "full"
            wanted = (self._micro_steps + 1) * (2 if twice else 1)
            seen = counts.get(name, before) - before
            if seen < wanted:
                raise LivenessError(
                    f"step {step}: {name} ran {seen} times with its adapter, want {wanted}",
                    stage="running",
                    group="routed_experts.gate_up_proj",
                    tensor=name,
                    cause=likely_cause(model, "routed_experts"),
                )

    def _remember(self, model: Any, optimizer: Any) -> None:
        """Before the first update that can move anything: in a warm-up, the learning rate of the first step is zero."""
        if not self._has_moved and any(group["lr"] > 0 for group in optimizer.param_groups):
            self._before_update = checksums(tensor for _, _, tensor in lora_tensors(model, "lora_B"))

    def _no_signal(self) -> bool:
        """GRPO: all completions of every group were worth the same. What little gradient an auxiliary loss then makes is no proof of life."""
        advantages = self._advantages()
        return bool(advantages) and all(float(each.abs().max()) == 0.0 for each in advantages)

    def _count_silence(self, step: int) -> None:
        self._silent += 1
        if self._silent >= self._silent_steps:
            raise LivenessError(
                f"step {step}: {self._silent} steps in a row whose rewards had no variance; nothing is learnt. Make the prompts easier or"
                " harder, raise the temperature, or train the phase before longer",
                stage="running",
                cause="the reward is the same for every completion of a prompt, or each was cut off at max_completion_length",
            )


class _Coverage:
    """Which experts ever had a gradient in the first steps. An adapter may be alive and most experts still idle: too few tokens a step."""

    def __init__(self) -> None:
        self._seen: dict[str, Tensor] = {}
        self._steps = 0

    def add(self, model: Any, notice: Callable[[str, str], None]) -> None:
        if self._steps >= _COVERAGE_STEPS:
            return
        self._steps += 1
        for name, wrapper in experts.outer_wrappers(model):
            gradient = wrapper.lora_B[experts.ADAPTER].weight.grad
            if gradient is not None:
                touched = (gradient.view(-1, wrapper.num_experts) != 0).any(0)
                self._seen[name] = self._seen.get(name, torch.zeros_like(touched)) | touched
        if self._steps == _COVERAGE_STEPS and self._seen:
            every = torch.stack(list(self._seen.values()))
            idle, total = int((~every).sum()), every.numel()
            self._seen = {}
            if idle > (1 - _COVERAGE) * total:
                notice(
                    "experts without a gradient",
                    f"{idle} of {total} routed experts had no gradient in {_COVERAGE_STEPS} steps: too few tokens a step, or a router that"
                    " sends this data to few of them",
                )


def checksums(tensors: Any) -> list[int]:
    """A number a tensor that a change of its bits changes; one transfer from the device."""
    sums = [_bits(tensor.detach()).sum(dtype=torch.int64) for tensor in tensors]
    return [int(each) for each in torch.stack(sums).tolist()] if sums else []


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def _pending(optimizer: Any) -> Any:
    """The clipping that a training.optimizer, perhaps inside accelerate's, has measured and not made yet; or None."""
    return getattr(getattr(optimizer, "optimizer", optimizer), "pending", None)


def _norms(there: Sequence[Tensor], pending: Any) -> list[float]:
    if not there:
        return []
    measured = {} if pending is None else {id(each): number for number, each in enumerate(pending.parameters)}
    if any(id(each) not in measured for each in there):
        return torch.stack(torch._foreach_norm([each.grad for each in there])).tolist()  # type: ignore[no-any-return]
    norms = pending.clip.norms_n.tolist()
    return [norms[measured[id(each)]] for each in there]


def _require_in_optimizer(model: Any, optimizer: Any) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for group, name, tensor in all_lora_tensors(model):
        if id(tensor) not in held:
            raise LivenessError(
                f"{name} is not in the optimizer",
                stage="step1",
                group=group,
                tensor=name,
                cause="it was replaced after the optimizer was built, or was frozen then",
            )


def _loss(model: Any, input_ids: Tensor) -> float:
    return float(model(input_ids=input_ids, labels=input_ids, use_cache=False).loss)


def _loss_with_noise(model: Any, input_ids: Tensor, group: str) -> float:
    kept = [(tensor, tensor.detach().clone()) for name, _, tensor in lora_tensors(model, "lora_B") if name == group]
    try:
        for index, (tensor, _) in enumerate(kept):
            tensor.copy_(_noise(tensor, index))
        return _loss(model, input_ids)
    finally:
        for tensor, original in kept:
            tensor.copy_(original)


def _noise(tensor: Tensor, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return (torch.randn(tensor.shape, generator=generator) * _NOISE).to(tensor)
