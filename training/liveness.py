"""Is every LoRA group alive? One set of checks for every phase, from the first forward to the last byte.

A routed expert whose adapter never trains looks healthy in every number of a run: losses fall, gradients have a norm, checkpoints have
their size. So each check looks at lora_B tensor by tensor, in groups that come from the recipe and never from what happens to be trainable:

    attach    the groups are there, in number and rank                       (training.model)
    canary    noise in one group's lora_B moves the loss, before step 1
    step1     every lora_B has a gradient: None and zero both fail; each is in the optimizer
    step2     every lora_A has one too, once its lora_B is not zero any more
    end       every group changed, no lora_B is zero, nothing is NaN
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from training import experts
from training.contract.events import GroupState
from training.model import lora_tensors, stored_adapter

_FOREIGN_MODULES = ("unsloth", "unsloth_zoo", "liger_kernel", "axolotl")
_FOREIGN_DISTRIBUTIONS = ("kernels", *_FOREIGN_MODULES)
_NOISE = 0.05


class LivenessError(RuntimeError):
    """The delta is not alive. Names the group, the tensor, and who probably took it out of the forward."""

    def __init__(self, reason: str, *, group: str | None = None, tensor: str | None = None, cause: str | None = None):
        super().__init__(reason)
        self.group, self.tensor, self.cause = group, tensor, cause


def refuse_foreign() -> None:
    """LivenessError if a library is about that replaces forwards of experts, or that our own folder `kernels` would hide."""
    loaded = [name for name in _FOREIGN_MODULES if name in sys.modules]
    present = [name for name in _FOREIGN_DISTRIBUTIONS if _installed(name)]
    if loaded or present:
        names = ", ".join(sorted({*loaded, *present}))
        raise LivenessError(
            f"this environment holds {names}, which replace model code on import; uninstall them", cause=names
        )


def canary(model: Any, input_ids: Tensor, groups: Sequence[str]) -> dict[str, float]:
    """How far the loss moves when one group's lora_B is replaced by noise; the weights are put back bit for bit.

    `input_ids` is [1, T] on the model's device. LivenessError for a group that moves nothing, and for experts that did not run
    through our forward.
    """
    was_training, before = model.training, experts.calls(model)
    model.eval()
    moved = {}
    with torch.no_grad():
        quiet = _loss(model, input_ids)
        jitter = abs(_loss(model, input_ids) - quiet)
        for group in groups:
            kept = [
                (tensor, tensor.detach().clone()) for name, _, tensor in lora_tensors(model, "lora_B") if name == group
            ]
            for index, (tensor, _) in enumerate(kept):
                tensor.copy_(_noise(tensor, index))
            moved[group] = abs(_loss(model, input_ids) - quiet)
            for tensor, original in kept:
                tensor.copy_(original)
    model.train(was_training)
    if not math.isfinite(quiet):
        raise LivenessError(f"forward check: the loss is {quiet} before the first step; base or adapter is damaged")
    for group, distance in moved.items():
        # Noise may well throw the loss out of range: that, too, shows that the adapter is in the forward.
        if math.isfinite(distance) and not distance > 10 * jitter:
            raise LivenessError(
                f"forward check: noise in every lora_B of {group} moves the loss by {distance:.1e} (jitter {jitter:.1e}); its adapters are not in the forward",
                group=group,
                cause=likely_cause(model, group),
            )
    idle = [name for name, count in experts.calls(model).items() if count == before[name]]
    if idle:
        raise LivenessError(
            f"{len(idle)} layers' experts did not run through our forward, the first is {idle[0]}",
            group="routed_experts.gate_up_proj",
            tensor=idle[0],
            cause=likely_cause(model, "routed_experts"),
        )
    return {group: distance if math.isfinite(distance) else sys.float_info.max for group, distance in moved.items()}


class Guard(TrainerCallback):
    """Watches the gradients of the first steps of a phase, and again after each resume. `on_pre_optimizer_step` is the only moment when the
    accumulated gradients can be seen: they are cleared before `on_step_end`.

    `passed(stage, step, values)` is told of every check that passed. `advantages` gives GRPO's advantages of the coming step, or nothing.
    """

    def __init__(
        self,
        groups: Sequence[str],
        passed: Callable[[str, int, dict[str, float]], None],
        *,
        advantages: Callable[[], Sequence[Tensor]] = lambda: (),
        silent_steps: int = 20,
    ) -> None:
        self._groups, self._passed = tuple(groups), passed
        self._advantages, self._silent_steps = advantages, silent_steps
        self._silent = 0
        self._waiting = ["step1", "step2"]

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        if self._no_signal():
            self._count_silence(state.global_step + 1)
            return
        self._silent = 0
        if "step1" in self._waiting:
            _require_in_optimizer(model, optimizer)
            norms = gradient_norms(model, "lora_B", self._groups, state.global_step + 1)
            self._waiting.remove("step1")
            self._passed("step1", state.global_step + 1, norms)
        elif "step2" in self._waiting and not any(bool((b == 0).all()) for _, _, b in lora_tensors(model, "lora_B")):
            # Before its lora_B has moved, a lora_A's gradient is exactly zero and says nothing.
            norms = gradient_norms(model, "lora_A", self._groups, state.global_step + 1)
            self._waiting.remove("step2")
            self._passed("step2", state.global_step + 1, norms)

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
                cause="the reward is the same for every completion of a prompt",
            )


def gradient_norms(model: Any, which: str, groups: Sequence[str], step: int) -> dict[str, float]:
    """Norm of the gradient a group. LivenessError names the first tensor whose gradient is None, all zero or not finite: an expert without
    tokens leaves rows of zeros, never a whole tensor, so no tolerance is needed."""
    squares: dict[str, float] = defaultdict(float)
    dead: dict[str, list[str]] = defaultdict(list)
    for group, name, tensor in lora_tensors(model, which):
        norm = 0.0 if tensor.grad is None else float(tensor.grad.detach().float().norm())
        if not math.isfinite(norm):
            raise LivenessError(f"step {step}: the gradient of {name} is not finite", group=group, tensor=name)
        squares[group] += norm**2
        if norm == 0.0:
            dead[group].append(name)
    missing = [group for group in groups if group not in squares]
    if missing:
        raise LivenessError(f"step {step}: no {which} at all in group {missing[0]}", group=missing[0])
    if dead:
        group = next(iter(dead))
        alive = sorted(set(squares) - set(dead))
        total = Counter(name for name, _, _ in lora_tensors(model, which))[group]
        raise LivenessError(
            f"step {step}: {len(dead[group])} of {total} {which} of {group} have no gradient"
            + (f" (also dead: {', '.join(sorted(set(dead) - {group}))})" if len(dead) > 1 else "")
            + (f", while {', '.join(alive)} train" if alive else ""),
            group=group,
            tensor=dead[group][0],
            cause=likely_cause(model, group)
            if alive
            else "the loss does not depend on the adapters at all, or its gradient overflowed and was clipped to zero",
        )
    return {group: math.sqrt(value) for group, value in squares.items()}


def group_states(model: Any, start: Path | None = None) -> dict[str, GroupState]:
    """What each LoRA group is now; `start` is the directory of the phase-start adapter, for the distance from it."""
    tensors: dict[str, int] = Counter()
    zero: dict[str, int] = Counter()
    squares: dict[str, float] = defaultdict(float)
    moved: dict[str, float] = defaultdict(float)
    digests: dict[str, Any] = defaultdict(hashlib.sha256)
    for which in ("lora_A", "lora_B"):
        for group, name, tensor in lora_tensors(model, which):
            values = tensor.detach().float().cpu().contiguous()
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
            raise LivenessError(f"group {group} holds numbers that are not finite", group=group)
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


def require_changed(before: dict[str, GroupState], after: dict[str, GroupState], model: Any) -> dict[str, float]:
    """At a phase's end every group must have changed, and no lora_B may be zero everywhere. Returns the change a group."""
    for group, now in after.items():
        if now.digest == before[group].digest:
            raise LivenessError(
                f"the phase ends and group {group} is bit for bit what it was",
                group=group,
                cause=likely_cause(model, group),
            )
        if now.zero_b:
            raise LivenessError(
                f"the phase ends and {now.zero_b} of {now.tensors} lora_B of {group} are zero everywhere",
                group=group,
                cause=likely_cause(model, group),
            )
    return {group: now.delta_norm or 0.0 for group, now in after.items()}


def likely_cause(model: Any, group: str) -> str:
    """Who stands where our or PEFT's forward should: the first replaced forward found, or what is loaded that does such things."""
    if group.startswith("routed_experts"):
        for name, who in experts.replaced(model).items():
            return f"{name}.forward is {who}, not training.experts"
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if forward is not None and getattr(forward, "__module__", "") != experts.__name__:
            return f"{name}.forward was replaced by {experts._who(forward)}"
    loaded = [name for name in _FOREIGN_MODULES if name in sys.modules]
    if loaded:
        return f"{', '.join(loaded)} is loaded"
    return "unknown: no replaced forward was found; see whether the block above calls this module at all"


def _require_in_optimizer(model: Any, optimizer: Any) -> None:
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for which in ("lora_A", "lora_B"):
        for group, name, tensor in lora_tensors(model, which):
            if id(tensor) not in held:
                raise LivenessError(
                    f"{name} is not in the optimizer: it was replaced after the optimizer was built",
                    group=group,
                    tensor=name,
                )


def _loss(model: Any, input_ids: Tensor) -> float:
    return float(model(input_ids=input_ids, labels=input_ids, use_cache=False).loss)


def _noise(tensor: Tensor, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(index)
    return (torch.randn(tensor.shape, generator=generator) * _NOISE).to(tensor)


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
