"""A layer small enough for the interpreter, with an empty expert, a crowded one, and tiles of every height."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import reference
from kernels.adapter import Adapter
from kernels.grouped_gemm import Thin
from kernels.moe_lora import Plan, Tile

SCALE = 2.0
PLAN = Plan(
    "tiny",
    tma=False,
    rows=32,
    up=Tile(64, 64, 4, 2),
    down=Tile(64, 64, 4, 2, tall=True),
    down_backward=Tile(64, 64, 4, 2),
    up_backward=Tile(64, 64, 4, 2, tall=True),
    thin=Thin(64, 4, 2),
    gradients=Tile(64, 32, 4, 2),
)


@dataclass
class Tiny:
    x: Tensor
    expert: Tensor
    weight: Tensor
    w1: Tensor
    w2: Tensor
    factors: tuple[Tensor, Tensor, Tensor, Tensor]
    dout: Tensor
    masters: list[Tensor]
    up: Adapter
    down: Adapter

    @property
    def wanted(self) -> dict[str, Tensor]:
        return reference.all_results(
            self.x, self.expert, self.weight, self.w1, self.w2, self.factors, SCALE, self.dout, torch.float64
        )

    def grouped(self, gradients: list[Tensor]) -> dict[str, Tensor]:
        """Gradients of the flat masters, by the reference's names and in its layout."""
        E = self.w1.shape[0]
        layouts = (reference.grouped_a, reference.grouped_b) * 2
        return {
            name: layout(gradient, E)
            for name, layout, gradient in zip(reference.RESULTS[3:], layouts, gradients, strict=True)
        }


def make(T: int = 44, k: int = 2, rank: int = 8, H: int = 64, I: int = 64, dtype: torch.dtype = torch.float32) -> Tiny:
    """Five experts: the last gets nothing, the first about half of all rows."""
    E, generator = 5, torch.Generator().manual_seed(7)

    def random(*size: int, std: float = 1.0) -> Tensor:
        return torch.randn(*size, generator=generator).mul_(std).to(dtype)

    scores = torch.rand(T, E - 1, generator=generator)
    scores[:, 0] += 1
    factors = (
        random(E, rank, H, std=H**-0.5),
        random(E, 2 * I, rank, std=0.3 * rank**-0.5),
        random(E, rank, I, std=I**-0.5),
        random(E, H, rank, std=0.3 * rank**-0.5),
    )
    flat = [(reference.flat_a, reference.flat_b)[i % 2](factor).requires_grad_() for i, factor in enumerate(factors)]
    return Tiny(
        x=random(T, H),
        expert=scores.topk(k, -1).indices.contiguous(),
        weight=torch.rand(T, k, generator=generator).to(dtype),
        w1=random(E, 2 * I, H, std=H**-0.5),
        w2=random(E, H, I, std=I**-0.5),
        factors=factors,
        dout=random(T, H),
        masters=flat,
        up=Adapter(flat[0], flat[1], E, SCALE),
        down=Adapter(flat[2], flat[3], E, SCALE),
    )
