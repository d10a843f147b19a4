"""What the interpreter shows of the kernel for moments in 8 bits, beside torchao's own arithmetic; run by test_adamw_8bit.py by the names of its checks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torchao.optim.quant_utils import quantize_8bit_with_qmap

from kernels import adamw_8bit
from kernels.adamw_8bit import AdamW8bitPass, dynamic_map, thresholds
from tests.kernels import adamw_8bit_cases, checks
from tests.kernels.interpreted import poison

_MANY = 1024


@triton.jit
def search(values, thresholds_256, codes, MANY: tl.constexpr, SIGNED: tl.constexpr):
    at = tl.program_id(0) * MANY + tl.arange(0, MANY)
    tl.store(codes + at, adamw_8bit.nearest(tl.load(values + at), thresholds_256, SIGNED))


def every_number_has_torchaos_code() -> None:
    for signed in (True, False):
        qmap = dynamic_map(signed)
        values = numbers(qmap)
        assert torch.equal(found(values, thresholds(qmap), signed), quantize_8bit_with_qmap(values, qmap).int())


def what_is_not_a_number_reads_nowhere_else() -> None:
    for signed in (True, False):
        odd = torch.full((_MANY,), torch.nan)
        codes = found(odd, thresholds(dynamic_map(signed)), signed)
        assert bool(((codes >= 0) & (codes <= 255)).all())


def thresholds_a_unit_off_are_caught() -> None:
    for signed in (True, False):
        qmap = dynamic_map(signed)
        values, exact = numbers(qmap), thresholds(qmap)
        for off in (-2.0, 2.0):
            moved = torch.nextafter(exact, torch.tensor(off))
            apart = found(values, moved, signed) != quantize_8bit_with_qmap(values, qmap).int()
            assert int(apart.count_nonzero()) >= 255, "each threshold counts"


def steps_are_torchaos() -> None:
    poison()
    bad = adamw_8bit_cases.check(AdamW8bitPass(), steps=3)
    assert not bad, bad


def numbers(qmap: Tensor) -> Tensor:
    """All borders that there are, the numbers next to them, those between, and powers of ten, of [-1, 1] or [0, 1]."""
    powers = 10.0 ** -torch.arange(9.0)
    made = [torch.tensor([0.0, -0.0, 1e-30, 1e-44, 1.0, -1.0]), torch.linspace(-1, 1, 4001)]
    for low in (thresholds(qmap)[1:], qmap, powers, -powers):
        made.append(low)
        high = low
        for _ in range(3):
            low, high = torch.nextafter(low, torch.tensor(-2.0)), torch.nextafter(high, torch.tensor(2.0))
            made += [low, high]
    values = torch.cat(made).clamp(-1, 1)
    return values if qmap[0] < 0 else values.abs()


def found(values: Tensor, thresholds_256: Tensor, signed: bool) -> Tensor:
    blocks = -(-len(values) // _MANY)
    padded, codes = torch.zeros(blocks * _MANY), torch.zeros(blocks * _MANY, dtype=torch.int32)
    padded[: len(values)] = values
    search[(blocks,)](padded, thresholds_256, codes, _MANY, signed)
    return codes[: len(values)]


if __name__ == "__main__":
    checks.run(
        every_number_has_torchaos_code,
        what_is_not_a_number_reads_nowhere_else,
        thresholds_a_unit_off_are_caught,
        steps_are_torchaos,
    )
