"""Kernels that go over a tensor row by row: who takes them, how rows are addressed, how they are launched.

The rule of who takes a call is one of dtype and sizes, never of trial and error: a card's tensor (or, under Triton's interpreter, a CPU's float32
tensor) of bfloat16, float16 or float32 that is not empty goes to the kernel if each of its rows fits one program; all else goes to the plain twin.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from kernels.launch import Launcher, power_of_2

WIDEST_ROW = 16_384
"""Numbers of a row that one program holds in registers: 32 a thread of 512."""
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LAUNCH = Launcher()
_P = ParamSpec("_P")
_R = TypeVar("_R")


def takes_kernel(x: Tensor, width: int = 1) -> bool:
    """Whether a call on `x`, whose rows are `width` numbers wide, is the kernel's; else it is the plain twin's."""
    if not (x.is_cuda or _INTERPRETED) or x.numel() == 0 or width > WIDEST_ROW:
        return False
    return x.dtype in _DTYPES


def own_dtype(call: Callable[_P, _R]) -> Callable[_P, _R]:
    """Autocast off inside: each op says itself in which dtype it computes. The first tensor's device decides whose autocast."""

    @wraps(call)
    def outside(*args: _P.args, **options: _P.kwargs) -> _R:
        kind = next(each.device.type for each in (*args, *options.values()) if isinstance(each, Tensor))
        if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)):
            return call(*args, **options)
        with torch.autocast(kind, enabled=False):
            return call(*args, **options)

    return outside


def wide(x: Tensor) -> Tensor:
    """In the dtype that sums are made in: float32, or float64 of a float64 tensor."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def frozen(name: str, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The weight if it is `shape`, side by side, and asks for no gradient, which these ops do not make; else ValueError."""
    if tuple(weight.shape) != shape:
        raise ValueError(f"{name}: shape {tuple(weight.shape)}; want {shape}")
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: it asks for a gradient, which is not made here; freeze it or use the stock module")
    return weight.detach().contiguous()


def same_shape(**tensors: Tensor) -> None:
    """ValueError unless all have the first one's shape, dtype and device."""
    (first_name, first), *others = tensors.items()
    for name, tensor in others:
        seen, wanted = ((t.shape, t.dtype, t.device) for t in (tensor, first))
        if seen != wanted:
            raise ValueError(f"{name}: {tuple(seen[0])}, {seen[1]} on {seen[2]}; want {first_name}'s {wanted}")


def blank(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised, side by side, on `like`'s device and in its dtype unless another is named."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


class Rows(NamedTuple):
    """A tensor [.., groups, N] seen as rows of N numbers: row r starts at (r // groups)·outer + (r % groups)·inner numbers."""

    tensor: Tensor
    groups: int
    outer: int
    inner: int

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.groups, self.outer, self.inner


def rows_of(x: Tensor) -> Rows:
    """Of any tensor. It is copied where its rows are not evenly laid out, their numbers not side by side, or its groups not in token order:
    strides are compiled in, so none may depend on the number of tokens."""
    if x.is_contiguous() or x.ndim < 2:
        x = x.contiguous()
        return Rows(x, 1, x.shape[-1], 0)
    *outer_shape, groups, _ = x.shape
    strides = x.stride()
    even = all(strides[i] == strides[i + 1] * outer_shape[i + 1] for i in range(len(outer_shape) - 1))
    if not even or strides[-1] != 1:
        return rows_of(x.contiguous())
    if x.ndim == 2:
        return Rows(x, 1, strides[0], 0)
    if strides[-3] < groups * strides[-2]:
        return rows_of(x.contiguous())
    return Rows(x, groups, strides[-3], strides[-2])


def launch(
    fn: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    sizes: tuple[Any, ...],
    constants: tuple[Any, ...],
    warps: int,
) -> None:
    """`fn(*tensors, *sizes, *constants)`; `sizes` are marked do_not_specialize in the kernel, `constants` are constexprs.

    Where all tensors are 16-byte aligned the compiled kernel is called again without Triton's per-call work; others go Triton's own way.
    ValueError where a tensor lies elsewhere than the first, or that card is not the current one.
    """
    device = tensors[0].device
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1 or (device.type == "cuda" and device.index != torch.cuda.current_device()):
        raise ValueError(
            f"tensors on {', '.join(sorted(map(str, devices)))}; want all on one device, and a card made current by"
            " torch.cuda.set_device"
        )
    options = {"num_warps": warps}
    if any(tensor.data_ptr() % 16 for tensor in tensors):
        fn[grid](*tensors, *sizes, *constants, **options)
        return
    key = (constants, warps, device, *[tensor.dtype for tensor in tensors])
    _LAUNCH(fn, grid, (*tensors, *sizes, *constants), options, key)


def tile(row_width: int, numbers: int = 4096, a_thread: int = 32) -> tuple[int, int, int]:
    """(rows of a tile, its width in a power of 2, warps) for about `numbers` numbers a program and `a_thread` a thread."""
    width = power_of_2(row_width)
    height = max(1, numbers // width)
    return height, width, max(1, min(16, height * width // (32 * a_thread)))
