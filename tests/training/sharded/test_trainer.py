"""Gradients of several processes become one step: averaged where all have the whole, and clipped by the norm of the whole gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.training.sharded.threads import Thread, on_ranks
from training import parts
from training.sharded.ranks import Alone
from training.sharded.trainer import clip

E = 4
START = torch.Generator().manual_seed(3)
EXPERTS, SHARED = torch.randn(E, 6, generator=START), torch.randn(2, 5, generator=START)


@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=["clipped", "left"])
def test_two_processes_clip_as_one_does(max_norm: float) -> None:
    whole = [nn.Parameter(torch.zeros(E, 6)), nn.Parameter(torch.zeros(5))]
    whole[0].grad, whole[1].grad = EXPERTS.clone(), SHARED.mean(0)
    wanted = torch.nn.utils.clip_grad_norm_(whole, max_norm)

    def work(rank: Thread) -> tuple[float, torch.Tensor, torch.Tensor]:
        count = E // rank.size
        first = rank.rank * count
        experts, lora_B = nn.Parameter(torch.zeros(count, 6)), nn.Parameter(torch.zeros(6, count))
        shared, idle = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))
        parts.mark(experts, lora_B, first, count, E, rank)
        experts.grad, shared.grad = EXPERTS[first : first + count].clone(), SHARED[rank.rank].clone()
        norm = clip(rank, [experts, lora_B, shared, idle], max_norm)
        assert lora_B.grad is None and idle.grad is None
        return float(norm), experts.grad, shared.grad

    found = on_ranks(2, work)
    assert all(norm == pytest.approx(float(wanted), rel=1e-5) for norm, _, _ in found)
    torch.testing.assert_close(torch.cat([experts for _, experts, _ in found]), whole[0].grad)
    for _, _, shared in found:
        torch.testing.assert_close(shared, whole[1].grad)


def test_a_gradient_that_is_not_finite_is_not_hidden() -> None:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([1.0, float("nan"), 2.0])
    assert not bool(clip(Alone(), [weight], 1.0).isfinite())
