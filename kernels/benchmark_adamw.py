"""What a step of AdamW takes over the 1.88 G adapter numbers of Qwen3.6-35B-A3B at rank 32: `python -m kernels.benchmark_adamw [--sweep 32|8]`.

torch's clipping, fused AdamW and zeroing, beside ours, and ours with moments in 8 bits. The bytes are those that must move: of 4-byte numbers a gradient is
read once for the norm; then parameter and moments are read and written, the gradient read and zeroed.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kernels import adamw, adamw_8bit
from kernels.adamw import AdamWPass, GradientNorm, Rates, Update
from kernels.adamw_8bit import BLOCK, AdamW8bitPass, Moment, Update8bit, dynamic_map
from kernels.benchmark import machine

_REPEATS, _CALLS = 5, 4
_LAYERS, _RANK, _EXPERTS, _HIDDEN, _INTERMEDIATE = 40, 32, 256, 2048, 512
_EVERY_LAYER = ((_HIDDEN, _INTERMEDIATE), (_HIDDEN, _INTERMEDIATE), (_INTERMEDIATE, _HIDDEN))
_ATTENTION = ((_HIDDEN, 8192), (_HIDDEN, 512), (_HIDDEN, 512), (4096, _HIDDEN))
_DELTA_NET = ((_HIDDEN, 8192), (_HIDDEN, 4096), (4096, _HIDDEN))
_RATES = Rates(1e-4)
_MAX_NORM = 1.0


def shapes(layers: int = _LAYERS) -> Iterator[tuple[tuple[int, int], bool]]:
    """Of each lora_A and lora_B, and whether it lies in memory as its transpose."""
    for layer in range(layers):
        for width, out in ((_HIDDEN, 2 * _INTERMEDIATE), (_INTERMEDIATE, _HIDDEN)):
            yield (_EXPERTS * _RANK, width), False
            yield (out, _RANK * _EXPERTS), True
        for width, out in (*_EVERY_LAYER, *(_ATTENTION if layer % 4 == 3 else _DELTA_NET)):
            yield (_RANK, width), False
            yield (out, _RANK), False


def measure(layers: int, device: torch.device) -> Iterator[tuple[str, float, float, float]]:
    """(what, ms, ms that the host takes to ask for it, GB that must move)."""
    masters = [torch.nn.Parameter(each) for each in _tensors(layers, device)]
    for each in masters:
        each.grad = torch.full_like(each, 1e-4)
    stock = torch.optim.AdamW(masters, lr=_RATES.lr, weight_decay=0.0, fused=True)
    stock.step()
    states = [stock.state[each] for each in masters]
    kept = ([each[kind] for each in states] for kind in ("exp_avg", "exp_avg_sq", "step"))
    update = Update(
        [each.detach() for each in masters], [each.grad for each in masters if each.grad is not None], *kept
    )
    norm, one_pass = GradientNorm(), AdamWPass()
    gb = sum(each.numel() for each in masters) * 4 / 1e9

    def clip() -> Tensor:
        return torch.nn.utils.clip_grad_norm_(masters, _MAX_NORM, foreach=True)

    def all_of_torchs() -> None:
        clip()
        stock.step()
        torch._foreach_zero_(update.gradients)

    calls: list[tuple[str, Callable[[], object], float]] = [
        ("torch: clip", clip, 3),
        ("torch: fused AdamW", stock.step, 7),
        ("torch: zero", lambda: torch._foreach_zero_(update.gradients), 1),
        ("torch: all three", all_of_torchs, 9),
        ("ours: norm", lambda: norm(update.gradients, _MAX_NORM), 1),
        ("ours: update", lambda: one_pass(update, _RATES), 7),
        (
            "ours: norm, then clip, update, zero",
            lambda: one_pass(update, _RATES, norm(update.gradients, _MAX_NORM), True),
            9,
        ),
    ]
    for name, call, times in calls:
        yield name, *_time(call, device), times * gb
    packed, packed_pass = _packed(masters), AdamW8bitPass()
    for name, call, times in (
        ("ours, 8 bits: update", lambda: packed_pass(packed, _RATES), 4),
        (
            "ours, 8 bits: norm, then clip, update, zero",
            lambda: packed_pass(packed, _RATES, norm(packed.gradients, _MAX_NORM), True),
            6,
        ),
    ):
        yield name, *_time(call, device), times * gb


def sweep(layers: int, device: torch.device) -> Iterator[tuple[str, float, float, float]]:
    tensors = [_tensors(layers, device) for _ in range(4)]
    steps = [torch.zeros((), device=device) for _ in tensors[0]]
    update = Update(*tensors, steps)
    gb = sum(each.numel() for each in tensors[0]) * 4 / 1e9
    as_shipped = adamw._CHUNK, adamw._BLOCK, adamw._WARPS
    try:
        for chunk, block, warps in itertools.product((8192, 16_384, 65_536), (1024, 2048), (4, 8)):
            adamw._CHUNK, adamw._BLOCK, adamw._WARPS = chunk, block, warps
            run, norm = AdamWPass(), GradientNorm()
            name = f"chunk {chunk:6}, block {block}, warps {warps}"
            yield f"update: {name}", *_time(lambda run=run: run(update, _RATES, None, True), device), 8 * gb  # type: ignore[misc]
            yield f"norm:   {name}", *_time(lambda norm=norm: norm(update.gradients, 1.0), device), gb  # type: ignore[misc]
    finally:
        adamw._CHUNK, adamw._BLOCK, adamw._WARPS = as_shipped


def sweep_8bit(layers: int, device: torch.device) -> Iterator[tuple[str, float, float, float]]:
    masters = [torch.nn.Parameter(each) for each in _tensors(layers, device)]
    for each in masters:
        each.grad = torch.full_like(each, 1e-4)
    packed = _packed(masters)
    names = ("_ROWS", "_WARPS", "_TALL", "_TALL_WARPS")
    as_shipped = [getattr(adamw_8bit, name) for name in names]
    tall = [number for number, each in enumerate(masters) if not each.is_contiguous()]
    flat = [number for number in range(len(masters)) if number not in set(tall)]
    try:
        for what, chosen in (("flat", flat), ("transposed", tall)):
            part = Update8bit(*([each[number] for number in chosen] for each in packed))  # type: ignore[arg-type]
            gb = sum(each.numel() for each in part.parameters) * 4 / 1e9
            for rows, warps in ((4, 4), (4, 8), (8, 8), (8, 16), (16, 8), (16, 16), (32, 16), (32, 32)):
                for name, value in zip(names, (rows, warps) * 2, strict=True):
                    setattr(adamw_8bit, name, value)
                run = AdamW8bitPass()
                took = _time(lambda part=part, run=run: run(part, _RATES, None, True), device)  # type: ignore[misc]
                yield f"8 bits, {what}: rows {rows}, warps {warps}", *took, 5 * gb
    finally:
        for name, value in zip(names, as_shipped, strict=True):
            setattr(adamw_8bit, name, value)


def _packed(masters: list[torch.nn.Parameter]) -> Update8bit:
    """Moments of zeros."""
    maps = [dynamic_map(signed).to(masters[0].device) for signed in (True, False)]
    moments = [[_zeros(each, qmap) for each in masters] for qmap in maps]
    gradients = [each.grad for each in masters if each.grad is not None]
    return Update8bit([each.detach() for each in masters], gradients, *moments, [1.0] * len(masters))


def _zeros(like: Tensor, qmap: Tensor) -> Moment:
    codes = torch.zeros(like.shape, dtype=torch.uint8, device=like.device)
    return Moment(codes, torch.zeros(like.numel() // BLOCK, device=like.device), qmap)


def _tensors(layers: int, device: torch.device) -> list[Tensor]:
    made = []
    for shape, transposed in shapes(layers):
        tensor = torch.full(shape[::-1] if transposed else shape, 1e-2, device=device)
        made.append(tensor.t() if transposed else tensor)
    return made


def _time(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Medians of a call's ms: from one end to the next, and until the host is free again."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    call()
    whole, asked = [], []
    for _ in range(_REPEATS):
        wait()
        start = time.perf_counter()
        call()
        asked.append(time.perf_counter() - start)
        for _ in range(_CALLS - 1):
            call()
        wait()
        whole.append((time.perf_counter() - start) / _CALLS)
    return statistics.median(whole) * 1e3, statistics.median(asked) * 1e3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.benchmark_adamw", description="A step of AdamW.")
    parser.add_argument("--layers", type=int, default=_LAYERS, help="of the 40; fewer take less memory than 34 GB")
    parser.add_argument("--sweep", choices=["32", "8"], help="the updates alone, at other chunks, blocks and warps")
    options = parser.parse_args(argv)
    if options.layers < 1:
        parser.error(f"--layers: seen {options.layers}, want at least 1")
    if not torch.cuda.is_available():
        print("no CUDA card here; run it on a machine with one", file=sys.stderr)
        return 2
    all_shapes = list(shapes(options.layers))
    numbers = sum(height * width for (height, width), _ in all_shapes)
    print(
        f"{machine()}; {numbers:,} numbers in {len(all_shapes)} tensors\n\n| call | ms | host ms | GB | TB/s |\n|---|---|---|---|---|"
    )
    ways = {None: measure, "32": sweep, "8": sweep_8bit}
    for name, ms, host_ms, gb in ways[options.sweep](options.layers, torch.device("cuda", 0)):
        print(f"| {name} | {ms:.2f} | {host_ms:.2f} | {gb:.1f} | {gb / ms:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
