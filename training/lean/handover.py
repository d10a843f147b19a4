"""Calling a module in the form of its authors from inside our forward, and knowing whose forward an instance has."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def stock(module: Any, *args: Any, **options: Any) -> Any:
    """The forward of the module's class."""
    hand_over(module)
    return type(module).forward(module, *args, **options)


def hand_over(module: Any) -> None:
    """Count, where it trains, that something of this module goes the slow way: nobody should pay for that unknowingly."""
    module.livery_handed_over += module.training and torch.is_grad_enabled()


def untouched(module: nn.Module) -> bool:
    """No hook and no foreign forward: to compute what it would have computed, without calling it, is then the same."""
    return "forward" not in vars(module) and not hooked(module)


def hooked(module: nn.Module) -> bool:
    state = vars(module)
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
    )


def frozen(tensor: Any) -> str:
    """Why this weight cannot be computed with here; empty if it can. What is packed in 4 bits is no plain tensor of floats."""
    if type(tensor) not in (nn.Parameter, torch.Tensor):
        return f"its weight is a {type(tensor).__name__}, want a plain tensor"
    if not tensor.is_floating_point():
        return f"its weight is of {tensor.dtype}, want floats"
    return "its weight is trained, want it frozen" if tensor.requires_grad else ""
