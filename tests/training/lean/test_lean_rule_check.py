"""A rule whose gradients are wrong is found before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from tests.training.lean.conftest import adapted
from training import lean, packing
from training.contract.families import FAMILIES
from training.errors import ModelError
from training.lean import delta_net


@pytest.fixture
def model() -> Any:
    packing.install()
    model = adapted(FAMILIES["qwen3_5_moe"]).float()
    lean.install(model)
    return model


class HalfTheGradient(torch.autograd.Function):
    """Right forward, wrong backward: what a miscompiled product looks like."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 0.5


def test_the_right_rule_passes_and_says_how_near_it_is(model: Any) -> None:
    apart = lean.check_rule(model)
    assert set(apart) == {"output", "query", "key", "value", "decay", "beta"}
    assert max(apart.values()) < 1e-4


@pytest.mark.parametrize("part", ["query", "key", "decay"])
def test_one_wrong_gradient_is_named(model: Any, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    right = delta_net.delta_rule

    def wrong(modeling: Any, **row: Any) -> Tensor:
        row[part] = HalfTheGradient.apply(row[part])  # type: ignore[no-untyped-call]
        return right(modeling, **row)

    monkeypatch.setattr(delta_net, "delta_rule", wrong)
    with pytest.raises(ModelError, match=rf"wrong on this card: off in {part} by 5\.0e-01 of the norm"):
        lean.check_rule(model)


def test_a_state_that_crosses_a_border_is_found(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = delta_net.delta_rule
    monkeypatch.setattr(delta_net, "delta_rule", lambda modeling, options, **row: right(modeling, **row, options={}))
    with pytest.raises(ModelError, match="off in output"):
        lean.check_rule(model)


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (lambda: RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper gives incorrect results"), r"Triton >= 3\.4\.0"),
        (lambda: OutOfResources(361228, 232448, "shared memory"), "out of resource: shared memory, Required: 361228"),
    ],
)
def test_a_kernel_that_refuses_the_card_is_told_as_such(
    model: Any, monkeypatch: pytest.MonkeyPatch, refusal: Callable[[], Exception], said: str
) -> None:
    """flash-linear-attention does so on Hopper with Triton 3.4 to 3.7.0."""

    def refuse(*_: Any, **__: Any) -> Tensor:
        raise refusal()

    monkeypatch.setattr(delta_net, "delta_rule", refuse)
    with pytest.raises(ModelError, match=f"refuses this card: {said}"):
        lean.check_rule(model)


def test_a_model_without_gated_delta_nets_has_nothing_to_check() -> None:
    model = adapted(FAMILIES["qwen3_moe"]).float()
    lean.install(model)
    assert lean.check_rule(model) == {}
