from __future__ import annotations

import pytest

from tasks.errors import UserError
from tasks.recipes import load_recipe, shipped
from tasks.rules.memory import memory_plan, parts_sentence, require_fit
from tests.tasks.pretend import recipe, rehearsal_recipe

NEEDS_4_BIT = "qwen3-235b-a22b-qlora"


def test_what_does_not_fit_is_an_error_before_anything_is_rented_and_says_what_would() -> None:
    with pytest.raises(
        UserError,
        match=r"rtxpro6000 has 99\.5 GB .* needs 104\.\d GB: base 69\.3, optimizer 15\.1.*would fit: optimizer: adamw_8bit: 93\.0 GB",
    ):
        require_fit(recipe(optimizer="adamw"))


def test_the_next_tier_is_named_when_nothing_smaller_is_wanted() -> None:
    phase = {
        "kind": "sft",
        "data": "bucket:x",
        "steps": 1,
        "learning_rate": 1e-5,
        "batch_size": 1,
        "max_length": 98_304,
    }
    with pytest.raises(UserError, match=r"would fit: box\.tier h200: 129\.\d of its 146\.2 GB"):
        require_fit(recipe(phases=[phase], adapters={"rank": 8, "alpha": 8}))


@pytest.mark.parametrize("name", [name for name in shipped() if name != NEEDS_4_BIT])
def test_every_shipped_recipe_fits_the_card_of_its_tier(name: str) -> None:
    require_fit(load_recipe(name))


def test_a_base_of_470_gb_fits_no_tier_and_is_refused() -> None:
    with pytest.raises(UserError, match=r"base 470\.2.*no tier holds it"):
        require_fit(load_recipe(NEEDS_4_BIT))


def test_an_estimate_says_that_it_is_one() -> None:
    model = {"source": "bucket:m", "family": "qwen3_5_moe", "size_gb": 244}
    with pytest.raises(UserError, match=r"GB \(estimated from model\.size_gb: no config\.json was found\)"):
        require_fit(recipe(model=model))


def test_a_tiny_model_fits_trivially() -> None:
    plan = memory_plan(rehearsal_recipe())
    assert plan.fits and plan.needed_gb < 1 and parts_sentence(plan)
