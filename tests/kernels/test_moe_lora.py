"""What cannot be computed is refused with one clear error, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels import launch, moe_lora, nf4
from kernels.adapter import Adapter
from tests.kernels import tiny


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(launch.Launcher, "__call__", refuse)


def call(case: tiny.Tiny, **changes: Any) -> torch.Tensor:
    given = {
        "x": case.x,
        "expert": case.expert,
        "weight": case.weight,
        "w1": case.w1,
        "w2": case.w2,
        "up": case.up,
        "down": case.down,
    }
    x, expert, weight, w1, w2, up, down = (given | changes).values()
    return moe_lora.experts_with_lora(x, expert, weight, w1, w2, up, down, plan=tiny.PLAN)


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.new_zeros(1), tensor.reshape(-1)])[1:].view(tensor.shape)


BAD: dict[str, tuple[str, Callable[[tiny.Tiny], dict[str, Any]]]] = {
    "a dimension too few": (r"x: shape \[4\]; want 2 dimensions", lambda c: {"x": torch.zeros(4)}),
    "another width": (r"w1: shape \[5, 128, 64\]; want \[5, 128, 128\]", lambda c: {"x": torch.zeros(44, 128)}),
    "another number of tokens": (r"expert: shape \[44, 2\]; want \[40, 2\]", lambda c: {"x": c.x[:40]}),
    "weights of other choices": (r"weight: shape \[44, 3\]", lambda c: {"weight": torch.zeros(44, 3)}),
    "a transposed weight": ("w2: strides", lambda c: {"w2": c.w2.transpose(1, 2)}),
    "a misaligned tensor": ("x: begins at an address that 16 does not divide", lambda c: {"x": unaligned(c.x)}),
    "half of the dtypes": ("w1: torch.float16; want x's torch.float32", lambda c: {"w1": c.w1.half()}),
    "bfloat16 off a card": ("x: torch.bfloat16; want", lambda c: {"x": c.x.bfloat16()}),
    "indices as floats": ("expert: torch.float32; want int32 or int64", lambda c: {"expert": c.expert.float()}),
    "an index too high": (r"expert: indices from 0 to 5; want 0 to 4", lambda c: {"expert": c.expert.clone().fill_diagonal_(5)}),
    "a negative index": ("expert: indices from -1 to ", lambda c: {"expert": c.expert.clone().fill_diagonal_(-1)}),
    "one adapter alone": ("LoRA on one projection alone", lambda c: {"down": None}),
    "adapters swapped": (r"up adapter: experts, in, out \[5, 64, 64\]; want \[5, 64, 128\]", lambda c: {"up": c.down, "down": c.up}),
    "a size of odd tiles": (
        "hidden 64, intermediate 16: want multiples of 32",
        lambda c: {"w1": c.w1[:, :32].contiguous(), "w2": c.w2[:, :, :16].contiguous(), "up": None, "down": None},
    ),
    "two devices": ("w1: on meta, x on cpu", lambda c: {"w1": c.w1.to("meta")}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_by_name(name: str) -> None:
    message, change = BAD[name]
    case = tiny.make()
    with pytest.raises(ValueError, match=message):
        call(case, **change(case))


def test_good_input_comes_as_far_as_the_launch() -> None:
    with pytest.raises(AssertionError, match="a kernel was launched"):
        call(tiny.make())


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((7, 8), (8, 7), "as PEFT >= 0.19 stores fused experts"),
        ((8, 8), (8, 12), "as PEFT >= 0.19 stores fused experts"),
        ((4 * 65, 8), (8, 4 * 65), "rank 65: these kernels take 1 to 64"),
    ],
)
def test_factors_that_are_not_pefts_are_refused(a: tuple[int, int], b: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Adapter(torch.zeros(a), torch.zeros(b), 4, 1.0)


def test_nf4_refuses_what_has_no_whole_blocks_or_does_not_belong_together() -> None:
    with pytest.raises(ValueError, match="weights: 100 of them; want a multiple of 64"):
        nf4.quantise(torch.zeros(100))
    with pytest.raises(ValueError, match=r"weights: torch\.int64"):
        nf4.quantise(torch.zeros(64, dtype=torch.int64))
    with pytest.raises(ValueError, match="32 packed bytes, 1 scales, 128 weights"):
        nf4.dequantise(torch.zeros(32, dtype=torch.uint8), torch.zeros(1), torch.zeros(128))
    with pytest.raises(ValueError, match="out: strides"):
        nf4.dequantise(torch.zeros(32, dtype=torch.uint8), torch.zeros(1), torch.zeros(8, 8).t())


def test_no_tokens_make_no_rows() -> None:
    case = tiny.make()
    assert call(case, x=case.x[:0], expert=case.expert[:0], weight=case.weight[:0]).shape == (0, 64)
