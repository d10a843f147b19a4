from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.conftest import recipe_of
from training import experts, lean, packing
from training.contract.cards import CARDS
from training.contract.memory import USABLE, moments
from training.contract.micro_batches import ENOUGH_TOKENS, plan_regrouped
from training.contract.recipe import Recipe, parse_recipe
from training.contract.shapes import shape_of
from training.errors import ModelError
from training.lean import delta_net
from training.model import attach, load_base
from training.phases import common, fast_paths
from training.phases.reporter import TokenCount

pytestmark = pytest.mark.train


class Told(SimpleNamespace):
    """What `set_recompute` asks of a desk."""

    def __init__(self, recipe: Any, model: Path) -> None:
        self.notices: dict[str, tuple[str, bool]] = {}
        super().__init__(
            assignment=SimpleNamespace(recipe=recipe),
            phase=recipe.phases[0],
            home=SimpleNamespace(model=model),
            crew=SimpleNamespace(size=1),
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
    fast_paths.set_recompute(desk, model, desk.phase)
    assert lean.recompute_of(model) == policy
    assert desk.notices == {"recompute": (f"{policy}: {why}", True)}
    assert fast_paths.is_whole(model) and not any(lean.handed_over(model))


def test_what_stays_stock_is_said_with_its_reason(tiny: Path) -> None:
    recipe = recipe_of("tiny-moe")
    base = load_base(tiny / "model", recipe)
    mixer = base.model.layers[0].linear_attn
    mixer.conv1d.register_forward_hook(lambda *_: None)
    model, desk = attach(base, recipe, None), Told(recipe, tiny / "model")
    fast_paths.set_recompute(desk, model, desk.phase)
    reason, routine = desk.notices["left stock"]
    assert "1 modules: conv1d or norm has a hook" in reason and not routine
    assert not fast_paths.is_whole(model)


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
        found[gb] = fast_paths._policy(desk, model, desk.phase)
    assert found == {150.0: ("none", "the fastest that fits 150.0 GB"), 1.5: ("full", "the fastest that fits 1.5 GB")}


def test_on_a_card_the_rows_of_a_step_go_together_as_far_as_they_fit_and_the_policy_is_for_them(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, desk = attached(tiny)
    monkeypatch.setattr(experts, "choice", lambda _: SimpleNamespace(plan="sm90"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=150e9))
    assert fast_paths.split(desk, model) is desk.phase, "on a CPU it is the recipe's"
    desk.assignment.recipe = on_a_card(desk.assignment.recipe)
    desk.phase = desk.phase.model_copy(update={"batch_size": 2, "accumulation": 8, "max_length": 2048})
    split = fast_paths.split(desk, model)
    assert (split.batch_size, split.accumulation) == (8, 2)
    assert desk.notices == {
        "micro-batch": ("8 rows at once, 2 a step (the recipe: 2 and 8); the step is the same", True)
    }
    arguments = common.Setting(desk, model, None, [], False, split=split).arguments
    desk.output = tiny
    assert (arguments()["per_device_train_batch_size"], arguments()["gradient_accumulation_steps"]) == (8, 2)
    monkeypatch.setattr(fast_paths, "recompute_for", lambda recipe, phase, shape, gb: phase.batch_size)
    assert fast_paths._policy(desk, model, split)[0] == 8, "the policy is for what runs"


def test_a_model_that_the_plan_does_not_count_keeps_the_recipes_micro_batches_where_they_can_fit(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps more than is counted. A plan that fits only because a step is split is kept all the same: the recipe's own would end the run."""
    model, desk = attached(tiny)
    desk.assignment.recipe = on_a_card(desk.assignment.recipe)
    monkeypatch.setattr(experts, "choice", lambda _: SimpleNamespace(plan=None))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=150e9))
    desk.phase = desk.phase.model_copy(update={"batch_size": 2, "accumulation": 8, "max_length": 2048})
    assert fast_paths.split(desk, model) is desk.phase and desk.notices == {}, "more rows would fit what is counted"
    desk.phase = desk.phase.model_copy(update={"batch_size": 16, "accumulation": 1})
    assert fast_paths.split(desk, model) is desk.phase
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1.6e9))
    found = fast_paths.split(desk, model)
    assert found.batch_size < 16 and found.batch_size * found.accumulation == 16
    assert fast_paths._policy(desk, model, found)[0] == "full"


def test_experts_that_are_not_on_our_kernels_keep_more_than_the_plan_counts(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, desk = attached(tiny)
    desk.assignment.recipe = on_a_card(desk.assignment.recipe)
    for chosen in (None, SimpleNamespace(plan=None)):
        monkeypatch.setattr(experts, "choice", lambda _, chosen=chosen: chosen)
        policy, why = fast_paths._policy(desk, model, desk.phase)
        assert policy == "full" and "keeps more than the plan counts" in why


def random_recipes(seed: int, count: int) -> Iterator[Recipe]:
    draw = random.Random(seed)
    names = ("rtxpro6000", "h200", "b200", "h100", "a100", "l40s", "rtx4090")
    for number in range(count):
        phases = []
        for kind in draw.sample(("cpt", "sft", "dpo", "kto", "grpo"), draw.randint(1, 3)):
            rows = {"batch_size": draw.choice((2, 4, 5, 13, 16)), "accumulation": draw.choice((1, 2, 3, 8, 16))}
            if kind in ("cpt", "sft"):
                rows["batch_size"] = draw.choice((1, 2, 3, 4, 7, 8, 16, 17))
                rows["router_aux_loss"] = draw.choice((0.0, 0.0, 0.0, 0.001))
            generations = {"generations": rows["batch_size"]} if kind == "grpo" else {}
            length = draw.choice((16, 100, 512, 1000, 2048, 4096, 8192, 16_384, 20_000, 40_000))
            given = {"kind": kind, "data": "bucket:x", "steps": 3, "learning_rate": 1e-5, "max_length": length}
            phases.append(given | rows | generations)
        known, groups = draw.choice(
            (
                ({"family": "qwen3_5_moe", "size_gb": 72}, ["attention", "routed_experts"]),
                ({"family": "qwen3_5_moe", "size_gb": 72}, ["attention", "linear_attention", "shared_expert"]),
                ({"family": "qwen3_moe", "size_gb": 61}, ["attention", "routed_experts"]),
                ({"family": "qwen3_5_moe", "size_gb": 144, "dtype": "float32"}, ["routed_experts"]),
            )
        )
        yield parse_recipe(
            {
                "name": f"random-{number}",
                "model": {"source": "bucket:m", **known},
                "adapters": {"rank": draw.choice((1, 8, 32, 64)), "groups": groups},
                "phases": phases,
                "box": {"tier": draw.choice(names)},
                "budget": {"max_usd": 1},
                "optimizer": draw.choice(("adamw", "adamw_8bit")),
                "recompute": draw.choice(("auto", "auto", "auto", "none", "mixer", "experts_kept", "full")),
                "micro_batches": draw.choice(("auto", "auto", "recipe")),
                "cuda_graphs": draw.choice(("auto", "off")),
            }
        )


@pytest.mark.parametrize("recipes", ["shipped", "random"])
def test_a_phase_does_what_its_plan_says(
    recipes: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows at once, what is recomputed and the hungriest moment's GB, on the tier's own card with our kernels on it."""
    model, desk = attached(tiny)
    desk.home.model = tmp_path  # no config.json: by family and size, as the plan
    names = ("qwen3.6-35b-a3b", "tiny-moe")
    given = list(random_recipes(7, 300)) if recipes == "random" else [recipe_of(name) for name in names]
    split = 0
    for recipe in given:
        gb, shape = CARDS[recipe.box.tier].memory_gb, shape_of(recipe.model)
        plan = plan_regrouped(recipe, shape, gb * USABLE)
        # `experts.install` makes a choice in bf16 alone, and only where there are adapters on the routed experts.
        chosen = recipe.model.dtype == "bfloat16" and "routed_experts" in recipe.adapters.groups
        monkeypatch.setattr(experts, "choice", lambda _, plan=chosen: SimpleNamespace(plan="sm90") if plan else None)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _, gb=gb: SimpleNamespace(total_memory=gb * 1e9)
        )
        needed = []
        for phase in recipe.phases:
            desk.assignment.recipe, desk.phase = recipe, phase
            found = fast_paths.split(desk, model)
            policy, _ = fast_paths._policy(desk, model, found)
            rows = (found.batch_size, found.accumulation)
            assert rows == plan.micro_batches.get(phase.name, (phase.batch_size, phase.accumulation)), recipe
            assert policy == plan.recompute[phase.name], recipe
            needed += [sum(parts.values()) for parts in moments(recipe, found, shape, policy)]
        assert plan.needed_gb == round(max(needed), 2) and plan.fits == (max(needed) <= gb * USABLE), recipe
        split += bool(plan.micro_batches)
    assert split > 30 or recipes == "shipped"


@pytest.fixture
def as_on_a_card(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Told]:
    """A model on the CPU whose recipe says card: what only a card can tell is told for it."""
    packing.install()
    model, desk = attached(tiny)
    desk.assignment.recipe = on_a_card(desk.assignment.recipe)
    monkeypatch.setattr(experts, "forward_syncs", lambda _: False)
    monkeypatch.setattr(packing, "has_fast_rule", lambda: True)
    return model, desk


def test_on_a_card_a_supervised_phase_takes_graphs_and_warns_where_one_fails(
    as_on_a_card: tuple[Any, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, desk = as_on_a_card
    monkeypatch.setattr(experts, "choice", lambda _: SimpleNamespace(plan="sm90"))
    recipe, count = desk.assignment.recipe, TokenCount()
    graphs = fast_paths.graphs(desk, model, count)
    assert graphs.count is count and graphs.at_most == ENOUGH_TOKENS
    graphs.tell("captured")
    graphs.warn("not captured")
    assert desk.notices == {"cuda graph": ("captured", True), "slow path": ("not captured", False)}
    for odd in (
        recipe.model_copy(update={"cuda_graphs": "off"}),
        recipe.model_copy(update={"box": recipe.box.model_copy(update={"device": "cpu"})}),
        recipe.model_copy(update={"model": recipe.model.model_copy(update={"quantisation": "nf4"})}),
    ):
        desk.assignment.recipe = odd
        assert fast_paths.graphs(desk, model, count) is None
    desk.assignment.recipe = recipe
    desk.phase = SimpleNamespace(kind="dpo")
    assert fast_paths.graphs(desk, model, count) is None
    desk.phase = recipe.phases[0]
    monkeypatch.setattr(experts, "choice", lambda _: SimpleNamespace(plan=None))
    assert fast_paths.graphs(desk, model, count) is None, "grouped products wait for the host"


def test_on_a_card_the_gated_delta_rule_is_held_against_the_rule_as_written(as_on_a_card: tuple[Any, Told]) -> None:
    model, desk = as_on_a_card
    fast_paths.require(desk, model)
    assert list(desk.notices) == ["gated delta rule"], "nothing is slow"
    reason, routine = desk.notices["gated delta rule"]
    assert routine and all(f"{name} " in reason for name in ("output", "query", "key", "value", "decay", "beta"))


def test_a_rule_that_is_wrong_on_this_card_trains_nothing_whatever_is_allowed(
    as_on_a_card: tuple[Any, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, desk = as_on_a_card
    desk.assignment.recipe = desk.assignment.recipe.model_copy(update={"allow": ("slow_experts",)})
    right = delta_net.delta_rule

    def wrong(modeling: Any, **row: Any) -> Tensor:
        return right(modeling, **row | {"key": row["key"] * 0.9 + row["key"].roll(1, 1) * 0.1})

    monkeypatch.setattr(delta_net, "delta_rule", wrong)
    with pytest.raises(ModelError, match="the gated delta rule's kernel is wrong on this card: off in output by"):
        fast_paths.require(desk, model)


def test_on_a_cpu_the_rule_is_not_checked(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, desk = attached(tiny)
    monkeypatch.setattr(lean, "check_rule", lambda _: pytest.fail("there is no card"))
    fast_paths.require(desk, model)
    assert desk.notices == {}


def test_on_a_card_layers_that_stay_stock_need_the_recipes_word(as_on_a_card: tuple[Any, Told]) -> None:
    model, desk = as_on_a_card
    lean.remove(model)
    attention = next(each for name, each in model.named_modules() if name.endswith("self_attn"))
    attention.attention_dropout = 0.1
    model.livery_lean = lean.install(model)
    attention.attention_dropout = 0.0
    with pytest.raises(
        ModelError, match=r"1 modules run in transformers' form.*self_attn: attention_dropout is 0.1.*slow_experts"
    ):
        fast_paths.require(desk, model)
    model.livery_lean = None
    with pytest.raises(ModelError, match=r"in transformers' form: triton is not installed; write"):
        fast_paths.require(desk, model)
    desk.assignment.recipe = desk.assignment.recipe.model_copy(update={"allow": ("slow_experts",)})
    fast_paths.require(desk, model)
    assert not desk.notices["slow path"][1], "it is no routine"


def test_on_a_card_the_plain_rule_is_slow_whatever_groups_carry_adapters(
    as_on_a_card: tuple[Any, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, desk = as_on_a_card
    recipe = desk.assignment.recipe
    adapters = recipe.adapters.model_copy(update={"groups": ("routed_experts",)})
    desk.assignment.recipe = recipe.model_copy(update={"adapters": adapters})
    monkeypatch.setattr(packing, "has_fast_rule", lambda: False)
    with pytest.raises(ModelError, match="flash-linear-attention is not installed"):
        fast_paths.require(desk, model)
