"""torchao's AdamW with moments in 8 bits, in one pass of ours over all tensors.

torchao compiles a function for each shape and calls it tensor by tensor, 660 times a step for the adapters of a 35B model, through torch.compile's
guards each time. The state is torchao's own, so checkpoints of either load into the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torchao.optim import AdamW8bit as TorchaoAdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from kernels.adamw import Clip, Rates, Update, plain_adamw
from kernels.adamw_8bit import BLOCK, AdamW8bitPass, Moment, Update8bit, dynamic_map, fits
from training import optimizer
from training.optimizer import ClipsInStep

_LEAST = 4096
"""Numbers of a tensor whose moments torchao packs; smaller ones it keeps in float32."""


class AdamW8bit(ClipsInStep, TorchaoAdamW8bit):  # type: ignore[misc]
    """torchao.optim.AdamW8bit with blocks of 256, its maths and its state_dict. No amsgrad. See `training.optimizer.AdamW` for `zero_grads`.

    ValueError for parameters that are not plain float32 tensors of one device, contiguous or transposed with whole blocks.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        zero_grads: bool = False,
    ) -> None:
        self._begin()
        self.zero_grads = zero_grads
        super().__init__(params, lr, betas, eps, weight_decay)  # type: ignore[call-arg, arg-type]
        for signed in (True, False):
            _require_map("torchao", OptimState8bit.zeros((BLOCK,), signed, BLOCK, "cpu"))
        reason = unfit(parameter for group in self.param_groups for parameter in group["params"])
        if reason:
            raise ValueError(f"{reason}; use torchao.optim.AdamW8bit")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what loading a state_dict ends with."""
        super().__setstate__(state)
        self._begin()
        if any(group["amsgrad"] for group in self.param_groups):
            raise ValueError("the state is of an AdamW with amsgrad; want one without")
        for each in self.state.values():
            for kind in ("exp_avg", "exp_avg_sq"):
                if isinstance(each.get(kind), OptimState8bit):
                    _require_map("the state", each[kind])
            if each:  # read on the host in each step
                each["step"] = torch.as_tensor(each["step"], dtype=torch.float32, device="cpu")

    def _begin(self) -> None:
        super()._begin()
        self._passes = defaultdict[int, AdamW8bitPass](AdamW8bitPass)

    def _step(self, number: int, group: dict[str, Any], rates: Rates, clip: Clip | None) -> None:
        there = [each for each in group["params"] if each.grad is not None]
        for each in there:
            if not self.state[each]:
                self._fresh(each)
        packed = [each for each in there if isinstance(self.state[each]["exp_avg"], OptimState8bit)]
        held = {id(each) for each in packed}
        small = [each for each in there if id(each) not in held]
        if packed:
            self._passes[number](self._update(packed), rates, clip, self.zero_grads)
        if small:
            exp_avgs, exp_avg_sqs, steps = (
                [self.state[each][kind] for each in small] for kind in ("exp_avg", "exp_avg_sq", "step")
            )
            gradients = [each.grad for each in small if each.grad is not None]
            plain_adamw(Update(small, gradients, exp_avgs, exp_avg_sqs, steps), rates, clip, self.zero_grads)

    def _update(self, packed: list[Tensor]) -> Update8bit:
        states = [self.state[each] for each in packed]
        steps = [each["step"] for each in states]
        torch._foreach_add_(steps, 1)
        exp_avgs, exp_avg_sqs = ([_moment(each[kind]) for each in states] for kind in ("exp_avg", "exp_avg_sq"))
        gradients = [each.grad for each in packed if each.grad is not None]
        return Update8bit(packed, gradients, exp_avgs, exp_avg_sqs, torch.stack(steps).tolist())

    def _fresh(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        state["step"] = torch.zeros(())
        state["exp_avg"] = self._new_buffer(parameter.detach(), True)
        state["exp_avg_sq"] = self._new_buffer(parameter.detach(), False)


def cannot_be(stock: type, options: dict[str, Any]) -> str:
    """Why a trainer's optimizer, of these options, has no form of ours, or ""."""
    if stock is not TorchaoAdamW8bit:
        return f"the trainer's optimizer is {stock.__name__}"
    blocks = options["block_size"]
    return "" if blocks == BLOCK else f"its blocks are of {blocks} numbers, want {BLOCK}"


def unfit(parameters: Iterable[Tensor]) -> str:
    """Why these cannot be updated here, or ""."""
    given = list(parameters)
    reason = optimizer.unfit(given)
    odd = [each for each in given if each.numel() >= _LEAST and each.numel() % BLOCK == 0 and not fits(each)]
    if odd and not reason:
        return (
            f"a parameter of shape {list(odd[0].shape)} has strides {odd[0].stride()}, want it contiguous, or transposed with"
            f" whole blocks of {BLOCK} in each row"
        )
    return reason


def _require_map(whose: str, packed: Any) -> None:
    """ValueError where codes mean other numbers than the kernel takes them for."""
    if packed.block_size != BLOCK or not torch.equal(packed.qmap.cpu(), dynamic_map(packed.signed)):
        raise ValueError(
            f"{whose} keeps moments in blocks of {packed.block_size} by a map from {float(packed.qmap[0]):.4g} to {float(packed.qmap[-1]):.4g}; want"
            f" blocks of {BLOCK} by the dynamic map of kernels.adamw_8bit; use torchao.optim.AdamW8bit"
        )


def _moment(packed: Any) -> Moment:
    return Moment(packed.codes, packed.scale, packed.qmap)
