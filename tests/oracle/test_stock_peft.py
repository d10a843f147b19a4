"""PEFT without any of our code reads what we save and gives the same answers, and we read what it saves; an adapter learns what it is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model

from tests.training.conftest import recipe_of
from training import experts, tiny
from training.contract.families import FAMILIES
from training.contract.recipe import Recipe
from training.model import attach, lora_config, lora_tensors

pytestmark = pytest.mark.oracle

IDS = torch.randint(3, 90, (2, 24), generator=torch.Generator().manual_seed(0))


def recipe_for(family: str) -> Recipe:
    model = {"source": "bucket:models/tiny", "family": family, "size_gb": 0.001, "dtype": "float32"}
    groups = list(FAMILIES[family].groups)
    return recipe_of("tiny-moe", model=model, adapters={"rank": 8, "alpha": 16, "groups": groups})


def base_of(family: str) -> Any:
    return tiny.make_model(96, 2, 0, family=family).requires_grad_(False)


def trained(model: Any) -> Any:
    with torch.no_grad():
        for seed, (_, _, tensor) in enumerate(lora_tensors(model, "lora_B")):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_our_adapter_loads_in_stock_peft_with_equal_answers(family: str, tmp_path: Path) -> None:
    ours = trained(attach(base_of(family), recipe_for(family), None))
    ours.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(base_of(family), tmp_path)
    assert not list(_ours_in(stock)), "no forward of ours is in it"
    torch.testing.assert_close(logits(stock), logits(ours), rtol=1e-4, atol=1e-4)
    assert float((logits(stock) - logits(base_of(family))).abs().max()) > 0.1, "the adapter says something"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_stock_peft_loads_here_with_equal_answers(family: str, tmp_path: Path) -> None:
    recipe = recipe_for(family)
    stock = trained(get_peft_model(base_of(family), lora_config(recipe.adapters, family)))
    stock.save_pretrained(tmp_path)
    ours = attach(base_of(family), recipe, tmp_path)
    assert len(list(_ours_in(ours))) == 4
    torch.testing.assert_close(logits(ours), logits(stock), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_batch_is_learnt_by_heart_while_the_routed_experts_grow(family: str) -> None:
    """The routed experts must take part: their lora_B grows all along, with attention's."""
    model = attach(base_of(family), recipe_for(family), None).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    losses, norms = [], [_routed_norm(model)]
    for step in range(40):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 10 == 9:
            norms.append(_routed_norm(model))
    assert losses[0] > 4.0 and losses[-1] < 0.05, losses[::10]
    assert norms[0] == 0.0 and norms == sorted(norms) and norms[1] > 0.1, norms


def _routed_norm(model: Any) -> float:
    squares = [float(b.detach().square().sum()) for group, _, b in lora_tensors(model, "lora_B") if "routed" in group]
    return sum(squares) ** 0.5


def _ours_in(model: Any) -> Any:
    return (wrapper for _, wrapper in experts.outer_wrappers(model) if "forward" in wrapper.__dict__)
