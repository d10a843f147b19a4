from __future__ import annotations

from pathlib import Path

import pytest

from tasks.errors import UserError
from tasks.offers import plan_today
from tasks.recipes import load_recipe, shipped
from tasks.settings import Settings
from tests.tasks.pretend import Pretend


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_recipe_is_read(name: str) -> None:
    assert load_recipe(name).phases


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_recipe_ends_before_the_reaper_takes_its_box(name: str) -> None:
    assert load_recipe(name).budget.max_hours <= Settings.model_fields["max_age_hours"].default


def test_a_run_that_may_outlive_its_box_has_no_plan(pretend: Pretend, tmp_path: Path) -> None:
    """As it would not be run: what the plan takes, the run takes."""
    long = load_recipe("qwen3.6-35b-a3b", {"max_hours": 24})
    with pytest.raises(UserError, match=r"budget\.max_hours: 24 is more than .*\(LIVERY_MAX_AGE_HOURS=12\)"):
        plan_today(long, pretend.settings(tmp_path))


def test_off_is_a_word(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(shipped()["qwen3.6-35b-a3b"].read_text() + "cuda_graphs: off\n")
    assert load_recipe(str(path)).cuda_graphs == "off"
    path.write_text(path.read_text().replace("cuda_graphs: off", "cuda_graphs: on"))
    with pytest.raises(UserError, match=r"cuda_graphs: .*'auto' or 'off' .*on"):
        load_recipe(str(path))


def test_a_recipe_that_is_not_there_is_told_with_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"there is no file {tmp_path}/mine.yaml; want .*, or one of .*tiny-moe"):
        load_recipe(str(tmp_path / "mine.yaml"))


def test_the_recipes_are_shipped() -> None:
    wanted = {
        "qwen3.6-35b-a3b",
        "qwen3.6-35b-a3b-nf4",
        "qwen3-235b-a22b-qlora",
        "qwen3-235b-a22b-qlora-1gpu",
        "tiny-moe",
    }
    assert wanted <= set(shipped())


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'tiny-moe'"):
        load_recipe("tiny-mo")


def test_a_yaml_mistake_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: x\nmodel: [1,\n")
    with pytest.raises(UserError, match=r"mine.yaml line \d+: not YAML"):
        load_recipe(str(path))


def test_what_people_override_is_flat_and_leaves_the_rest_alone() -> None:
    plain = load_recipe("tiny-moe")
    recipe = load_recipe(
        "tiny-moe", {"run_name": "other", "max_usd": 0.5, "max_steps": 3, "phases": ["sft", "grpo"], "tier": None}
    )
    assert (recipe.name, recipe.budget.max_usd, recipe.phase_names) == ("other", 0.5, ("sft", "grpo"))
    assert all(phase.steps <= 3 for phase in recipe.phases)
    assert recipe.phase("sft").learning_rate == plain.phase("sft").learning_rate
    assert recipe.budget.attempts == plain.budget.attempts


def test_an_override_of_a_phase_the_recipe_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="no phase 'rlhf'"):
        load_recipe("tiny-moe", {"phases": ["rlhf"]})


def test_a_phase_is_chosen_by_its_own_name(tmp_path: Path) -> None:
    text = shipped()["tiny-moe"].read_text().replace("  - kind: dpo\n", "  - kind: dpo\n    name: dpo-safety\n")
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    assert load_recipe(str(path), {"phases": ["dpo-safety"]}).phase_names == ("dpo-safety",)
    with pytest.raises(UserError, match="no phase 'dpo'; it has cpt, sft, dpo-safety"):
        load_recipe(str(path), {"phases": ["dpo"]})
