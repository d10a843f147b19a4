"""Which kernel packed attention gets: what is checked before ours is taken, and what is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.training.lean.conftest import adapted
from training import lean
from training.contract.families import Family
from training.lean import attention, cudnn_attention, packed_attention
from training.lean.packed_attention import Shapes

CPU = torch.device("cpu")
SHAPES = Shapes(heads=4, key_heads=2, head_size=16, dtype=torch.bfloat16)


def right(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    return packed_attention.plain(q.float(), k.float(), v.float(), ends, longest, scale).to(q.dtype)


def over_the_borders(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    return right(q, k, v, ends[[0, -1]], longest, scale)


def with_another_gradient(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    return right(q, k.detach() + 0.9 * (k - k.detach()), v, ends, longest, scale)


def not_a_number(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    return right(q, k, v, ends, longest, scale) * torch.tensor(float("nan"))


@pytest.mark.parametrize(
    ("kernel", "named"),
    [
        (right, []),
        (over_the_borders, ["out", "dq", "dk", "dv"]),
        (with_another_gradient, ["dk"]),
        (not_a_number, ["out", "dq", "dk", "dv"]),
    ],
)
def test_every_wrong_result_is_named(
    kernel: Callable[..., Tensor], named: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_attention, "attend", kernel)
    fault = packed_attention._fault(SHAPES, CPU)
    assert [name for name in ("out", "dq", "dk", "dv") if f"{name} by" in fault] == named


@pytest.mark.parametrize(
    ("fault", "mine", "other", "cudnn", "slow"),
    [
        ("off in dk by 3e-1", 0.0, 0.0, False, True),
        ("", 1.0, 2.0, True, False),
        ("", 2.05, 2.0, True, False),
        ("", 2.2, 2.0, False, False),
    ],
)
def test_cudnn_is_taken_if_it_is_right_and_not_clearly_slower(
    fault: str, mine: float, other: float, cudnn: bool, slow: bool
) -> None:
    choice = packed_attention._decide(fault, mine, other)
    assert (choice.cudnn, choice.slow) == (cudnn, slow)
    assert fault in choice.reason and (fault or f"{other:.2f} ms by torch's" in choice.reason)


def test_without_a_hopper_card_it_is_torchs(gated: Family) -> None:
    assert not packed_attention.choose(SHAPES, CPU, attention.torchs).cudnn
    model = adapted(gated)
    lean.install(model)
    assert attention.packed_choice(model) is None


def test_what_the_check_saves_is_no_part_of_a_checkpoint_around_it() -> None:
    looked: list[Any] = []

    def part(x: Tensor) -> Tensor:
        if not looked:  # as with a cached answer, the second time there is none
            looked.append(None)
            with packed_attention._alone():
                y = torch.ones(3, requires_grad=True)
                (y * y).exp().sum().backward()
        return x.exp().sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint(part, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, torch.ones(3).exp().cos() * torch.ones(3).exp())
