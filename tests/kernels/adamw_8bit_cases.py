"""Steps of AdamW with moments in 8 bits beside torchao's own step, which is called as it is written, uncompiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit

from kernels.adamw import Rates
from kernels.adamw_8bit import BLOCK, Moment, Update8bit

SHAPES = ((16, 256), (22, 512), (4096,), (33, 64, 4), (1, 5120))
TRANSPOSED = 1
RATES = Rates(1e-2, 0.9, 0.999, 1e-4, 0.1)
"""With an eps that keeps updates in bounds where a moment's code is 0: else parameters are large, and small ones among them are differences of such."""
Run = Callable[[Update8bit, Rates], None]


def check(run: Run, device: str = "cpu", *, steps: int = 4, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[str]:
    """What of these steps is not torchao's, each from where torchao stands. Codes off by one where two are as near, a thousandth of all, are rounding."""
    make = torch.Generator().manual_seed(0)
    mine, theirs = ([lay(i, each) for i, each in enumerate(parameters(device, shapes))] for _ in range(2))
    ours, wanted = ([moments(each) for each in mine] for _ in range(2))
    lr, found = torch.tensor(float(RATES.lr)), []
    for number in range(1, steps + 1):
        gradients = [lay(i, gradient(shape, make).to(device)) for i, shape in enumerate(shapes)]
        kept = ([Moment(each[kind].codes, each[kind].scale, each[kind].qmap) for each in ours] for kind in (0, 1))
        run(Update8bit(mine, gradients, *kept, [float(number)] * len(shapes)), RATES)
        for p, g, (m, v) in zip(theirs, gradients, wanted, strict=True):
            count = torch.tensor(float(number))
            beta1, beta2, decay, eps = RATES.beta1, RATES.beta2, RATES.weight_decay, RATES.eps
            single_param_adam(p, g, count, m, v, None, lr, beta1, beta2, decay, eps, True, False)
        for i in range(len(shapes)):
            found += [f"step {number}, {fault}" for fault in faults(i, mine[i], theirs[i], ours[i], wanted[i])]
            mine[i].copy_(theirs[i])
            for one, other in zip(ours[i], wanted[i], strict=True):
                one.copy_(other)
    return found


def faults(
    number: int, mine: Tensor, theirs: Tensor, ours: list[OptimState8bit], wanted: list[OptimState8bit]
) -> list[str]:
    found = []
    # torchao's bias correction is 1 - beta2^t in float32, of which a unit is 6e-5 of 1 - 0.999; an update is here at most a tenth.
    if not torch.allclose(mine, theirs, rtol=1e-6, atol=3e-6):
        found.append(f"parameter {number} is off by {float((mine - theirs).abs().max()):.1e}")
    for kind, seen, want in zip(("exp_avg", "exp_avg_sq"), ours, wanted, strict=True):
        apart = (seen.codes.int() - want.codes.int()).abs()
        if int(apart.max()) > 1 or float(apart.float().mean()) > 1e-3:
            found.append(f"{kind} {number}: {int(apart.count_nonzero())} codes are off, by up to {int(apart.max())}")
        if not torch.allclose(seen.scale, want.scale, rtol=1e-6, atol=0):
            found.append(f"{kind} {number}: scales are off")
    return found


def parameters(device: str, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    make = torch.Generator().manual_seed(1)
    return [(torch.randn(shape, generator=make) * 0.02).to(device) for shape in shapes]


def gradient(shape: tuple[int, ...], make: torch.Generator) -> Tensor:
    """Of every size that the maps tell apart, and one block of zeros."""
    made = torch.randn(shape, generator=make) * 10.0 ** torch.randint(-6, 1, shape, generator=make)
    made.view(-1)[:BLOCK] = 0
    return made


def lay(number: int, tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t() if number == TRANSPOSED else tensor


def moments(of: Tensor) -> list[OptimState8bit]:
    return [OptimState8bit.zeros(of.shape, signed, BLOCK, of.device, dtype=torch.float32) for signed in (True, False)]
