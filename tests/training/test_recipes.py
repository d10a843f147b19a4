from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from training.contract.recipe import parse_recipe

RECIPES = sorted((Path(__file__).parents[2] / "training" / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_parses(path: Path) -> None:
    parse_recipe(yaml.safe_load(path.read_text()), path.name)


def test_the_shipped_recipes_are_these() -> None:
    assert {path.stem for path in RECIPES} == {
        "counting",
        "qwen3-235b-a22b-qlora",
        "qwen3-235b-a22b-qlora-1gpu",
        "qwen3.6-35b-a3b",
        "qwen3.6-35b-a3b-nf4",
        "tiny-moe",
    }


@pytest.mark.parametrize("name", ["tiny-moe", "counting", "qwen3.6-35b-a3b"])
def test_a_main_recipe_runs_all_five_phases_in_order(name: str) -> None:
    path = next(path for path in RECIPES if path.stem == name)
    assert parse_recipe(yaml.safe_load(path.read_text())).phase_names == ("cpt", "sft", "dpo", "kto", "grpo")
