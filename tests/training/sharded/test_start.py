"""How a packed base is had: read once a process, taken to the card as the recipe says, switched without reading again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import recipe_of
from training.contract.recipe import Recipe
from training.model import attach, load_base, lora_tensors
from training.sharded import start
from training.sharded.inventory import read_inventory


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    start.forget()
    yield
    start.forget()


def recipe(family: str, **model: Any) -> Recipe:
    plain = recipe_of("tiny-moe")
    groups = ["attention", "routed_experts"] if family == "qwen3_moe" else list(plain.adapters.groups)
    return recipe_of(
        "tiny-moe",
        model=plain.model.model_dump(mode="json") | {"family": family, "quantisation": "nf4"} | model,
        adapters=plain.adapters.model_dump(mode="json") | {"groups": groups},
        phases=[plain.phase("sft").model_dump(mode="json")],
    )


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.arange(20)[None]).logits
    return result


def test_two_models_of_one_process_read_the_base_once(model: Path, family: str) -> None:
    wanted = recipe(family)
    first, second = load_base(model, wanted), load_base(model, wanted)
    assert first is not second and first.livery_held is second.livery_held
    other = load_base(model, recipe(family, linears="bf16"))
    assert other.livery_held is not first.livery_held
    assert torch.equal(logits(first), logits(second)) and not torch.equal(logits(first), logits(other))


def test_the_layers_take_the_way_that_the_recipe_names(model: Path, family: str) -> None:
    host = load_base(model, recipe(family, execution="host"))
    auto = load_base(model, recipe(family))
    assert host.livery_held.layers.way == "host" and auto.livery_held.layers.way == "resident"
    assert torch.equal(logits(host), logits(auto))
    assert "experts: host, as the recipe says" in host.livery_held.lines()


def test_the_way_is_switched_without_reading_and_computes_the_same(
    model: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = recipe(family)
    ours = attach(load_base(model, wanted), wanted, None)
    with torch.no_grad():
        for _, _, tensor in lora_tensors(ours, "lora_B"):
            tensor.normal_(generator=torch.Generator().manual_seed(1))
    before = logits(ours)
    monkeypatch.setattr(start, "load", lambda *_, **__: pytest.fail("the base was read again"))
    for way in ("host", "resident", "host"):
        ours.livery_held.switch(way)
        start.install(ours, wanted)
        assert ours.livery_held.layers.way == way
        assert torch.equal(logits(ours), before)


def test_fresh_adapters_differ_from_expert_to_expert_and_by_the_seed_alone(model: Path, family: str) -> None:
    wanted = recipe(family)
    models = [attach(load_base(model, wanted), wanted, None) for _ in range(2)]
    other = attach(load_base(model, wanted), wanted.model_copy(update={"seed": wanted.seed + 1}), None)
    for (_, name, one), (_, _, two), (_, _, three) in zip(
        *(lora_tensors(m, "lora_A") for m in (*models, other)), strict=True
    ):
        assert torch.equal(one, two) and not torch.equal(one, three), name
        if ".experts" in name:
            experts_ERX = one.view(read_inventory(model).shape.experts, wanted.adapters.rank, -1)
            assert not torch.equal(experts_ERX[0], experts_ERX[1])


def test_without_a_card_nothing_has_to_be_measured(model: Path, family: str) -> None:
    way, reason = start.choose(recipe(family), 1, None)
    assert (way, reason) == ("resident", "the only memory there is")
