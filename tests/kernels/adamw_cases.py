"""Steps of AdamW on tensors of odd sizes and layouts, beside torch's own in float64 on the same float32 numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels import adamw
from kernels.adamw import AdamWPass, Clip, GradientNorm, Rates, Update
from kernels.adamw_8bit import AdamW8bitPass, Moment, Update8bit, dynamic_map, plain_adamw_8bit

SHAPES = ((37,), (128, 129), (1,), (16_384,), (3, 10_923), (1, 1, 5))
"""A whole chunk, 128 numbers more than one and one more than two, and pieces of one."""
SHORT = ((37,), (8, 144), (1,), (1024,), (3, 345), (1, 1, 5))
"""The same within a chunk: a whole block, 128 numbers and eleven more than one, and pieces."""
RATES = Rates(1e-2, 0.9, 0.999, 1e-8, 0.1)
UNIT = 2.0**-24
"""Half the distance of float32 numbers next to 1."""


@dataclass
class Case:
    """`transposed` parameters lie in memory as their own transposes, with all that belongs to them."""

    device: str = "cpu"
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    seed: int = 0
    scale: float = 1.0
    """Of the parameters. With 0 the update is all that there is, and its every digit counts."""
    transposed: bool = True
    parameters: list[Tensor] = field(init=False)
    update: Update = field(init=False)

    def __post_init__(self) -> None:
        make = torch.Generator().manual_seed(self.seed)
        self.parameters = [self._lay(torch.randn(shape, generator=make) * self.scale) for shape in self.shapes]
        none = [torch.zeros_like(each) for each in self.parameters]
        steps = [torch.zeros((), device=self.device) for _ in none]
        self.update = Update(self.parameters, none, [torch.zeros_like(each) for each in none], list(none), steps)
        self.update = self.update._replace(exp_avg_sqs=[torch.zeros_like(each) for each in none])
        self.renew(0)

    def renew(self, number: int) -> list[Tensor]:
        """Other gradients, in other memory."""
        make = torch.Generator().manual_seed(1000 * self.seed + number + 1)
        gradients = [self._lay(3 * torch.randn(shape, generator=make)) for shape in self.shapes]
        self.update = self.update._replace(gradients=gradients)
        return gradients

    def _lay(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device)
        return tensor.t().contiguous().t() if self.transposed and tensor.dim() == 2 else tensor


def as_torch(case: Case, steps: int, rates: Rates, max_norm: float | None) -> list[list[Tensor]]:
    """Parameters and both moments after torch's clipping and AdamW, in float64."""
    mine = [each.double().requires_grad_() for each in case.parameters]
    optimizer = torch.optim.AdamW(
        mine, float(rates.lr), (rates.beta1, rates.beta2), rates.eps, rates.weight_decay, foreach=False
    )
    for number in range(steps):
        for each, gradient in zip(mine, case.renew(number), strict=True):
            each.grad = gradient.double()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(mine, max_norm)
        optimizer.step()
    states = [optimizer.state[each] for each in mine]
    return [[each.detach() for each in mine], *([each[kind] for each in states] for kind in ("exp_avg", "exp_avg_sq"))]


def run(case: Case, steps: int, rates: Rates, max_norm: float | None, *, zero: bool = False) -> AdamWPass:
    norm, one_pass = GradientNorm(), AdamWPass()
    for number in range(steps):
        gradients = case.renew(number)
        before = [each.clone() for each in gradients]
        clip = None if max_norm is None else norm(gradients, max_norm)
        one_pass(case.update, rates, clip, zero)
        for seen, old in zip(gradients, before, strict=True):
            assert torch.equal(seen, torch.zeros_like(old) if zero else old)
    return one_pass


def faults(case: Case, wanted: list[list[Tensor]], steps: int, rates: Rates) -> list[str]:
    """What is further from float64 than rounding explains: a dozen roundings a step of what is summed, that is of the numbers themselves or, of an
    update, of its largest size."""
    moments = case.update.exp_avgs, case.update.exp_avg_sqs
    found = []
    for name, seen, want in zip(
        ("parameters", "exp_avg", "exp_avg_sq"), (case.parameters, *moments), wanted, strict=True
    ):
        for number, (one, other) in enumerate(zip(seen, want, strict=True)):
            # An update is at most a few times the rate, a moment at most the largest gradient or its square.
            largest = 5.0 * float(rates.lr) if name == "parameters" else float(other.abs().max())
            limit = 12 * steps * UNIT * (largest + other.abs() * (name == "parameters"))
            off = (one.double() - other).abs()
            if not bool((off <= limit).all()):
                found.append(f"{name} {number} is off by {float(off.max()):.1e}, at most {float(limit.max()):.1e}")
    if not all(float(each) == steps for each in case.update.steps):
        found.append(f"steps {[float(each) for each in case.update.steps]}, want {steps}")
    return found


def norm_faults(gradients: list[Tensor], clip: Clip, max_norm: float) -> list[str]:
    """Sums of squares in float32 by blocks are off by less than their logarithm in units."""
    norms = torch.stack([each.double().norm() for each in gradients])
    norm = norms.norm()
    wanted = {"norms_n": norms, "norm": norm, "factor": (max_norm / (norm + 1e-6)).clamp(max=1.0)}
    seen = {"norms_n": clip.norms_n, "norm": clip.norm, "factor": clip.factor}
    return [
        f"{name} {seen[name]} is off, want {each}"
        for name, each in wanted.items()
        if not bool(((seen[name].double() - each).abs() <= 24 * UNIT * each).all())
    ]


def check(device: str = "cpu") -> None:
    """Every variant of the step beside float64; AssertionError says what is off."""
    for case_options, rates, max_norm, zero in (
        ({}, RATES, None, False),
        ({"scale": 0.0}, RATES, 1.0, True),
        ({"scale": 0.0, "transposed": False}, Rates(1e-3, 0.8, 0.95, 1e-6, 0.0), 1e9, False),
    ):
        case = Case(device, **case_options)
        bad = faults_of(case, 3, rates, max_norm, zero)
        assert not bad, bad
    gradients = Case(device).renew(0)
    for max_norm in (1.0, 1e9, float("inf")):
        bad = norm_faults(gradients, adamw.GradientNorm()(gradients, max_norm), max_norm)
        assert not bad, bad


def faults_of(case: Case, steps: int, rates: Rates, max_norm: float | None, zero: bool = False) -> list[str]:
    wanted = as_torch(case, steps, rates, max_norm)
    run(case, steps, rates, max_norm, zero=zero)
    return faults(case, wanted, steps, rates)


PACKED = ((16, 256), (40, 512), (3, 5, 256), (8_448,), (22, 512))
"""Whole blocks, a vector of one more than a chunk; matrices may lie transposed, of heights that tiles do not divide."""
PACKED_SHORT = ((16, 256), (3, 256), (3, 5, 256))


def packed(device: str = "cpu", seed: int = 0, shapes: tuple[tuple[int, ...], ...] = PACKED) -> Update8bit:
    """Before its first step."""
    case = Case(device, shapes, seed, scale=0.01)
    maps = [dynamic_map(signed).to(device) for signed in (True, False)]
    moments = [
        [
            Moment(
                torch.zeros(shape, dtype=torch.uint8, device=device),
                torch.zeros(math.prod(shape) // 256, device=device),
                qmap,
            )
            for shape in shapes
        ]
        for qmap in maps
    ]
    return Update8bit(case.parameters, case.renew(0), *moments, [1.0] * len(shapes))


def packed_faults(seen: Update8bit, wanted: Update8bit) -> list[str]:
    """Where two ways of one step differ by more than rounding: a code by one where two are as near, of every thousand at most one."""
    found = []
    for number, (one, other) in enumerate(zip(seen.parameters, wanted.parameters, strict=True)):
        if not torch.allclose(one, other, rtol=1e-6, atol=1e-7):
            found.append(f"parameter {number} is off by {float((one - other).abs().max()):.1e}")
    for name in ("exp_avgs", "exp_avg_sqs"):
        for number, (one8, other8) in enumerate(zip(getattr(seen, name), getattr(wanted, name), strict=True)):
            apart = (one8.codes.int() - other8.codes.int()).abs()
            if int(apart.max()) > 1 or float(apart.float().mean()) > 1e-3:
                found.append(
                    f"{name} {number}: codes are off by up to {int(apart.max())}, {int(apart.count_nonzero())} of them"
                )
            if not torch.allclose(one8.scale, other8.scale, rtol=1e-6, atol=0):
                found.append(f"{name} {number}: scales are off")
    return found


def check_packed(device: str = "cpu", *, shapes: tuple[tuple[int, ...], ...] = PACKED) -> list[str]:
    """Faults of three clipped steps, zeroed, each from where the plain twin stands: one code that differs makes other steps of one number."""
    mine, twin = packed(device, shapes=shapes), packed(device, shapes=shapes)
    one_pass, found = AdamW8bitPass(), []
    for number in range(1, 4):
        gradients = Case(device, shapes).renew(number)
        again = [each.clone() for each in gradients]
        clip = adamw.plain_norm(gradients, 1.0)
        counts = [float(number)] * len(gradients)
        one_pass(mine._replace(gradients=gradients, counts=counts), RATES, clip, True)
        plain_adamw_8bit(twin._replace(gradients=again, counts=counts), RATES, clip)
        found += [f"gradient {i} is not zero" for i, each in enumerate(gradients) if bool(each.any())]
        found += [f"step {number}, {fault}" for fault in packed_faults(mine, twin)]
        stand_at(mine, twin)
    return found


def stand_at(mine: Update8bit, other: Update8bit) -> None:
    for seen, wanted in zip(mine.parameters, other.parameters, strict=True):
        seen.copy_(wanted)
    for one, two in zip((*mine.exp_avgs, *mine.exp_avg_sqs), (*other.exp_avgs, *other.exp_avg_sqs), strict=True):
        one.codes.copy_(two.codes)
        one.scale.copy_(two.scale)
