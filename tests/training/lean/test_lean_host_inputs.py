"""Inputs of recomputed layers that wait in host memory: the same gradients, each asked for ahead, no room lost."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.training.lean.conftest import adapted, gradients, inputs, same, twin
from training import lean
from training.contract.families import Family
from training.lean import host_inputs
from training.lean.host_inputs import HostInputs


@pytest.fixture
def both(family: Family) -> tuple[Any, Any]:
    """One model in the form of its authors and, with the same numbers, in ours."""
    stock = adapted(family)
    ours = twin(stock)
    lean.install(ours)
    return stock, ours


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> HostInputs:
    monkeypatch.setattr(host_inputs, "_LEAST_BYTES", 1)
    return HostInputs(torch.device("cpu"))


@pytest.mark.parametrize("policy", ["mixer", "full"])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_layers_recomputed_from_host_memory_give_the_same_gradients(
    both: tuple[Any, Any], policy: str, kind: str, home: HostInputs
) -> None:
    stock, ours = both
    lean.set_recompute(ours, policy)
    lean.keep_inputs(ours, home)
    same(gradients(ours, inputs(kind)), gradients(stock, inputs(kind)))
    assert home.bytes > 0, "something was away"


def test_rooms_are_used_again_by_the_next_micro_batch(both: tuple[Any, Any], home: HostInputs) -> None:
    _, ours = both
    lean.set_recompute(ours, "full")
    lean.keep_inputs(ours, home)
    gradients(ours, inputs("rows"))
    taken = home.bytes
    for _ in range(3):
        gradients(ours, inputs("rows"))
    assert home.bytes == taken


def test_a_forward_pass_that_is_thrown_away_gives_its_rooms_back(both: tuple[Any, Any], home: HostInputs) -> None:
    _, ours = both
    lean.set_recompute(ours, "full")
    lean.keep_inputs(ours, home)
    ours.train()
    for _ in range(2):
        loss = ours(**inputs("rows"), use_cache=False).logits.sum()
        taken = home.bytes
        del loss
        gc.collect()
    assert home.bytes == taken and not [each for each in home._kept if each() is not None]


def test_each_is_asked_for_while_the_layer_above_is_at_work(home: HostInputs) -> None:
    brought: list[float] = []
    bring = home._bring

    def watched(kept: Any) -> torch.Tensor:
        brought.append(float(kept.room.tensor[0]))
        return bring(kept)

    home._bring = watched  # type: ignore[method-assign]
    kept = [home._pack(torch.full((64,), float(number))) for number in range(4)]
    assert float(home._unpack(kept[3])[0]) == 3 and brought == [3, 2], "the one below is on its way"
    assert float(home._unpack(kept[2])[0]) == 2 and brought == [3, 2, 1]
    # Twice, as a retained graph does.
    assert float(home._unpack(kept[2])[0]) == 2


def test_small_tensors_and_parameters_stay_where_they_are() -> None:
    home = HostInputs(torch.device("cpu"))
    for tensor in (torch.ones(8), torch.nn.Parameter(torch.ones(1 << 20))):
        assert home._pack(tensor) is tensor and home._unpack(tensor) is tensor
    assert home.bytes == 0
