"""Calling a Triton kernel without Triton's per-call work.

`fn[grid](...)` binds the signature, specialises each argument and hashes a key in every call: 40 to 100 µs of host time, more than a small
layer's kernels take on the card. A `Launcher` keeps the compiled kernel of the first call and from then on hands it its arguments as they are.
That is right only while nothing that Triton specialises on can change, so: every size is a constexpr or marked `do_not_specialize`, every
pointer is 16-byte aligned (checked where tensors enter), and a launcher belongs to one device, one set of dtypes and one set of constants.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from triton import knobs
from triton.runtime.jit import JITFunction


class Launcher:
    """The compiled kernels of one layer shape on one device."""

    def __init__(self) -> None:
        self._compiled: dict[Hashable, tuple[Any, Any, Any, int]] = {}

    def __call__(
        self, fn: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any], key: Hashable = ()
    ) -> None:
        """Launch `fn` on the current stream with positional `args`, constants included. `key` tells apart calls with other constants."""
        name = (id(fn), key)  # a JITFunction's own hash is made of its source anew each time
        bound = self._compiled.get(name)
        if bound is None:
            kernel = fn[grid](*args, **options)
            if isinstance(fn, JITFunction):  # under the interpreter there is nothing compiled to keep
                device = torch.cuda.current_device()
                self._compiled[name] = (kernel.run, kernel.function, kernel.packed_metadata, device)
            return
        run, function, metadata, device = bound
        if knobs.runtime.launch_enter_hook.calls:  # a profiler wants to be told: go Triton's own way
            fn[grid](*args, **options)
            return
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, torch._C._cuda_getCurrentRawStream(device), function, metadata, None, None, None, *args)


def ceil_div(size: int, by: int) -> int:
    """As triton.cdiv, which costs 10 µs of host time a call."""
    return -(-size // by)


def power_of_2(at_least: int) -> int:
    """As triton.next_power_of_2."""
    return 1 << max(at_least - 1, 0).bit_length()
