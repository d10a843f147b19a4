from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.training.conftest import recipe_of
from training import experts, lean
from training.model import attach, load_base
from training.phases import common

pytestmark = pytest.mark.train


class Told(SimpleNamespace):
    """What `_set_recompute` asks of a desk."""

    def __init__(self, recipe: Any, model: Path) -> None:
        self.notices: dict[str, tuple[str, bool]] = {}
        super().__init__(
            assignment=SimpleNamespace(recipe=recipe), phase=recipe.phases[0], home=SimpleNamespace(model=model)
        )

    def notice(self, what: str, reason: str, *, routine: bool = False) -> None:
        self.notices[what] = (reason, routine)


def attached(tiny: Path, **changes: Any) -> tuple[Any, Told]:
    recipe = recipe_of("tiny-moe", **changes)
    return attach(load_base(tiny / "model", recipe), recipe, None), Told(recipe, tiny / "model")


@pytest.mark.parametrize(
    ("word", "policy", "why"), [("auto", "none", "on a CPU"), ("experts_kept", "experts_kept", "the recipe's word")]
)
def test_every_layer_recomputes_what_the_recipe_says_and_the_phase_says_so(
    tiny: Path, word: str, policy: str, why: str
) -> None:
    model, desk = attached(tiny, recompute=word)
    common._set_recompute(desk, model)
    assert lean.recompute_of(model) == policy
    assert desk.notices == {"recompute": (f"{policy}: {why}", True)}
    assert common._is_whole(model) and not any(lean.handed_over(model))


def test_what_stays_stock_is_said_with_its_reason(tiny: Path) -> None:
    recipe = recipe_of("tiny-moe")
    base = load_base(tiny / "model", recipe)
    mixer = base.model.layers[0].linear_attn
    mixer.conv1d.register_forward_hook(lambda *_: None)
    model, desk = attach(base, recipe, None), Told(recipe, tiny / "model")
    common._set_recompute(desk, model)
    reason, routine = desk.notices["left stock"]
    assert "1 modules: conv1d or norm has a hook" in reason and not routine
    assert not common._is_whole(model)


def on_a_card(recipe: Any) -> Any:
    box = recipe.box.model_copy(update={"device": "cuda", "tier": "h200"})
    return recipe.model_copy(update={"box": box, "model": recipe.model.model_copy(update={"dtype": "bfloat16"})})


def test_on_a_card_the_policy_is_the_plans_by_the_cards_own_memory(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, desk = attached(tiny)
    desk.assignment.recipe = on_a_card(desk.assignment.recipe)
    monkeypatch.setattr(experts, "choice", lambda _: SimpleNamespace(plan="sm90"))
    found = {}
    for gb in (150.0, 1.5):
        memory = SimpleNamespace(total_memory=gb * 1e9)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, memory=memory: memory)
        found[gb] = common._policy(desk, model)
    assert found == {150.0: ("none", "the fastest that fits 150.0 GB"), 1.5: ("full", "the fastest that fits 1.5 GB")}


def test_experts_that_are_not_on_our_kernels_keep_more_than_the_plan_counts(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, desk = attached(tiny)
    desk.assignment.recipe = on_a_card(desk.assignment.recipe)
    for chosen in (None, SimpleNamespace(plan=None)):
        monkeypatch.setattr(experts, "choice", lambda _, chosen=chosen: chosen)
        policy, why = common._policy(desk, model)
        assert policy == "full" and "keeps more than the plan counts" in why
