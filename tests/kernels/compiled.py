"""Cross-compile the launches of one layer for one card and print what each takes; run by test_compiled.py."""

from __future__ import annotations

import json
import sys

import torch

from kernels import moe_lora, nf4
from tests.kernels import offline

SHAPES = {"35B": (2048, 512, 256, 8), "235B": (4096, 1536, 128, 8)}
BIG = ("up", "down", "down_backward", "up_backward", "factor_gradients")


def main(plan_name: str, shape: str, *capabilities: str) -> None:
    """All kernels for the first card. The others get the products: the small kernels hold nothing that depends on the card. On Hopper the one
    kernel that is near the limit of registers is looked at in the larger shape too, which has the same tiles."""
    plan = {"sm90": moe_lora.SM90, "portable": moe_lora.PORTABLE}[plan_name]
    if plan_name == "sm90":
        larger = offline.record_layer(plan, 4096, *SHAPES["235B"], rank=32)
        show(next(launch for launch in larger if launch.fn.__name__ == "down_backward"), 90)
    launches = offline.record_layer(plan, 4096, *SHAPES[shape], rank=32)
    for i, capability in enumerate(capabilities):
        for launch in launches if i == 0 else [each for each in launches if each.fn.__name__ in BIG]:
            show(launch, int(capability))
        if i == 0 and plan_name == "portable":
            for launch in nf4_launches():
                show(launch, int(capability))


def nf4_launches() -> list[offline.Launch]:
    meta = {"device": "meta"}
    half, one, byte = (torch.empty(64, dtype=dtype, **meta) for dtype in (torch.bfloat16, torch.float32, torch.uint8))
    return [
        offline.Launch(nf4._quantise, (half, byte, one, one, 1, 32, 32, True), {"num_warps": 4}),
        offline.Launch(nf4._dequantise, (byte, one, one, half, 32, 2048, 32), {"num_warps": 4}),
    ]


def show(launch: offline.Launch, capability: int) -> None:
    kernel = offline.compile_for(launch, capability)
    mma = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma.sync": r"\bmma\.sync"}
    print(
        json.dumps(
            {
                "kernel": launch.fn.__name__,
                "capability": capability,
                "shared": kernel.shared,
                "registers": kernel.registers,
                "stack": kernel.stack,
                "tma": kernel.count("cp.async.bulk.tensor"),
                **{name: kernel.count(pattern) for name, pattern in mma.items()},
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
