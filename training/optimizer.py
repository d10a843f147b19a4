"""AdamW as a card takes it best: one pass over parameter, gradient and both moments, clipping in it.

transformers clips by multiplying every gradient before the step, a pass of its own over 15 GB for the adapters of a 35B model. Here clipping measures
the gradients alone and leaves the factor with the optimizer, whose next step multiplies by it: what stands in .grad is never clipped.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.adamw import AdamWPass, Clip, GradientNorm, Rates, Update, is_dense, layout

_MOMENTS = ("exp_avg", "exp_avg_sq")
_CHECKED = (
    (512, 300),
    (3, 4096),
    (33, 65),
)  # whole chunks and a piece, whole blocks, and what is kept in float32 in any case
# Norm of a difference over the norm of two steps. float32 rounds to 1e-5 of a step, one code in 100,000 falls the other way; a wrong map, block or
# factor is off by a tenth and more.
_CHECKED_TO = 1e-2


class Pending(NamedTuple):
    """A clipping that the next step makes."""

    parameters: list[Tensor]
    """Those whose gradients were measured, in the order of `clip.norms_n`."""
    clip: Clip


class ClipsInStep(torch.optim.Optimizer):
    """What `AdamW` and `training.optimizer_8bit.AdamW8bit` have in common: a clipping that waits for the step, and what the step leaves behind."""

    pending: Pending | None
    """Set by `clip`, gone with the next step or `zero_grad`."""
    zero_grads: bool

    def clip(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients, float32 [] where they lie; the next step clips by it. As torch.nn.utils.clip_grad_norm_, but .grad stays as it is."""
        if norm_type != 2.0:
            raise ValueError(f"norm_type {norm_type}; want 2.0")
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        there = [each for each in given if each.grad is not None]
        if not there:
            self.pending = None
            return torch.zeros(())
        self.pending = Pending(there, self._norm([each.grad for each in there if each.grad is not None], max_norm))
        return self.pending.clip.norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter with a gradient; nothing is read back from the card."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        pending, self.pending = self.pending, None
        for number, group in enumerate(self.param_groups):
            beta1, beta2 = group["betas"]
            rates = Rates(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
            self._step(number, group, rates, None if pending is None else pending.clip)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.pending = None
        super().zero_grad(set_to_none)

    def _step(self, number: int, group: dict[str, Any], rates: Rates, clip: Clip | None) -> None:
        raise NotImplementedError

    def _begin(self) -> None:
        self.pending = None
        self._norm = GradientNorm()
        self.__dict__.setdefault("zero_grads", False)


class AdamW(ClipsInStep, torch.optim.AdamW):
    """torch.optim.AdamW, its maths and its state_dict: checkpoints of either load into the other. No amsgrad, no maximize.

    `zero_grads`: each step leaves zeros in every .grad, in the same memory, as a captured graph needs it. On a card this runs `kernels.adamw`, elsewhere
    its plain twin. ValueError for parameters that are not plain, dense float32 tensors of one device.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        zero_grads: bool = False,
    ) -> None:
        self._begin()
        self.zero_grads = zero_grads
        # As the fused one keeps its state: step counts lie beside the moments.
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)
        self._step_supports_amp_scaling = False
        reason = unfit(parameter for group in self.param_groups for parameter in group["params"])
        if reason:
            raise ValueError(f"{reason}; use torch.optim.AdamW")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what loading a state_dict ends with: whoever wrote it may have kept its counts on the host, and its moments in another layout."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._begin()
        for group in self.param_groups:
            if odd := [name for name in ("amsgrad", "maximize", "differentiable") if group.get(name)]:
                raise ValueError(f"the state is of an AdamW with {', '.join(odd)}; want one without")
            group["fused"], group["foreach"] = True, None
            for parameter in group["params"]:
                _settle(parameter, self.state.get(parameter, {}))

    def _begin(self) -> None:
        super()._begin()
        self._passes = defaultdict[int, AdamWPass](AdamWPass)

    def _step(self, number: int, group: dict[str, Any], rates: Rates, clip: Clip | None) -> None:
        there = [each for each in group["params"] if each.grad is not None]
        states = [self.state[each] or self._fresh(each) for each in there]
        exp_avgs, exp_avg_sqs = ([each[kind] for each in states] for kind in _MOMENTS)
        steps, gradients = [each["step"] for each in states], [each.grad for each in there]
        update = Update(there, gradients, exp_avgs, exp_avg_sqs, steps)
        self._passes[number](update, rates, clip, self.zero_grads)

    def _fresh(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for kind in _MOMENTS:
            state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def unfit(parameters: Iterable[Tensor]) -> str:
    """Why these cannot be updated here, or ""."""
    return next(_unfit(list(parameters)), "")


def adapt(trainer: Any, *, clips: bool = True) -> str:
    """Give this trainer, newly built, our form of its AdamW, with its numbers, and our clipping. Returns why not, or "".

    Without `clips` its clipping stays as it is: several processes clip together, before the step. On a card ours must first do there what it does on a
    host.
    """
    stock, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
    trainable = [each for each in trainer.model.parameters() if each.requires_grad]
    ours: type[ClipsInStep] = AdamW
    if stock is torch.optim.AdamW:
        reason = unfit(trainable)
    else:
        from training import optimizer_8bit  # torchao takes seconds to import

        ours, reason = (
            optimizer_8bit.AdamW8bit,
            optimizer_8bit.cannot_be(stock, options) or optimizer_8bit.unfit(trainable),
        )
    device = trainable[0].device
    if not reason and device.type == "cuda":
        reason = differs(ours, ours, device)
    if reason:
        return reason
    trainer.optimizer_cls_and_kwargs = ours, {name: options[name] for name in ("lr", "betas", "eps")}
    if clips:
        trainer.accelerator.clip_grad_norm_ = functools.partial(_clip, trainer)
    return ""


def differs(ours: type[ClipsInStep], wanted: type[ClipsInStep], device: torch.device) -> str:
    """What two steps of `ours` on this device do otherwise than two of `wanted` on the host, on small random tensors; "" if nothing."""
    try:
        seen, right, before = (
            _stepped(ours, device),
            _stepped(wanted, torch.device("cpu")),
            _stepped(None, torch.device("cpu")),
        )
    except Exception as error:  # noqa: BLE001 - a card that refuses the kernel must not end the run: the library's is there, and this is told
        return f"a first step on this card: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    for mine, theirs, old in zip(seen, right, before, strict=True):
        apart = float((mine - theirs).norm() / (theirs - old).norm())
        if not apart <= _CHECKED_TO:  # a NaN is not below anything
            return f"on this card its step of a tensor {list(old.shape)} is off by {apart:.1e} of the step, want at most {_CHECKED_TO:.0e}"
    return ""


def _stepped(kind: type[ClipsInStep] | None, device: torch.device) -> list[Tensor]:
    """The random tensors, clipped and stepped by an optimizer of this kind if there is one, on the host."""
    generator = torch.Generator().manual_seed(0)  # of its own: training's random numbers stay as they are
    drawn = [[torch.randn(shape, generator=generator) for _ in range(3)] for shape in _CHECKED]
    parameters = [torch.nn.Parameter(first.to(device)) for first, *_ in drawn]
    if kind is not None:
        optimizer: Any = kind(parameters, lr=1e-2, weight_decay=0.1)  # type: ignore[call-arg]
        for turn in (1, 2):
            for parameter, each in zip(parameters, drawn, strict=True):
                # Of other sizes: Adam divides a size that stays away, and with it a clipping that is missing.
                parameter.grad = (each[turn] * turn**3).to(device)
            optimizer.clip(parameters, 1.0)
            optimizer.step()
    return [each.detach().cpu() for each in parameters]


def _clip(trainer: Any, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    # accelerate has wrapped it by now.
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer).clip(parameters, max_norm, norm_type)  # type: ignore[no-any-return]


def _settle(parameter: Tensor, state: dict[str, Any]) -> None:
    if not state:
        return
    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)
    for kind in _MOMENTS:
        if layout(state[kind]) != layout(parameter):
            state[kind] = torch.empty_like(parameter).copy_(state[kind])


def _unfit(parameters: list[Tensor]) -> Iterator[str]:
    for each in parameters:
        if type(each) not in (Tensor, torch.nn.Parameter):
            yield f"a parameter is a {type(each).__name__}, want a plain tensor"
        if each.dtype is not torch.float32:
            yield f"a parameter is {each.dtype}, want torch.float32"
        if each.numel() == 0 or not is_dense(each):
            yield f"a parameter of shape {list(each.shape)} has strides {each.stride()}, want numbers and no gap between them"
        if each.device != parameters[0].device:
            yield f"parameters lie on {parameters[0].device} and {each.device}, want one device"
