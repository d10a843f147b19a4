from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from training.contract.memory import plan_memory, recompute_for
from training.contract.micro_batches import ENOUGH_TOKENS, cost, plan_regrouped, regrouped
from training.contract.recipe import Recipe, Recompute, parse_recipe
from training.contract.shapes import QWEN36_35B

RECIPES = Path(__file__).parents[3] / "training" / "recipes"
H200_GB = 150.1 * 0.97


def recipe(name: str = "qwen3.6-35b-a3b.yaml", kind: str = "sft", **phase: Any) -> Recipe:
    data = yaml.safe_load((RECIPES / name).read_text())
    data["phases"] = [each | phase for each in data["phases"] if each["kind"] == kind]
    return parse_recipe(data)


def rows(found: Any) -> tuple[int, int]:
    return found.batch_size, found.accumulation


def test_the_shipped_recipes_rows_go_together_as_far_as_nothing_is_recomputed() -> None:
    """On an H200 8,192 tokens with nothing recomputed are faster than 16,384 that recompute, where launching costs nothing."""
    wanted = recipe(batch_size=2, accumulation=8, max_length=2048)
    phase = regrouped(wanted, wanted.phases[0], QWEN36_35B, H200_GB)
    assert rows(phase) == (4, 4) and recompute_for(wanted, phase, QWEN36_35B, H200_GB) == "none"


def test_what_is_launched_kernel_by_kernel_goes_together_as_far_as_it_fits() -> None:
    wanted = recipe(batch_size=2, accumulation=8, max_length=2048)
    off = wanted.model_copy(update={"cuda_graphs": "off"})
    assert rows(regrouped(off, off.phases[0], QWEN36_35B, H200_GB)) == (8, 2)
    assert rows(regrouped(wanted, wanted.phases[0], QWEN36_35B, H200_GB, graphs=False)) == (8, 2)
    assert rows(regrouped(wanted, wanted.phases[0], QWEN36_35B, H200_GB, gpus=2)) == (8, 2)
    assert ENOUGH_TOKENS == 8 * 2048


def test_a_recipes_rows_are_taken_apart_where_that_is_faster_or_fits() -> None:
    wanted = recipe(batch_size=16, accumulation=1, max_length=2048)
    assert rows(regrouped(wanted, wanted.phases[0], QWEN36_35B, H200_GB)) == (4, 4)
    card_gb = 99.5
    assert not plan_memory(wanted, QWEN36_35B, card_gb).fits
    plan = plan_regrouped(wanted, QWEN36_35B, card_gb)
    assert plan.fits and plan.micro_batches["sft"][0] * plan.micro_batches["sft"][1] == 16


@pytest.mark.parametrize(
    ("tokens", "policy", "micro_ms"),
    [
        (2048, "none", 119.4),
        (4096, "none", 185.8),
        (8192, "none", 343.1),
        (12_288, "mixer", 598.8),
        (16_384, "experts_kept", 791.0),
    ],
)
def test_the_cost_is_what_an_h200_took(tokens: int, policy: Recompute, micro_ms: float) -> None:
    """The unit is what a token of the fastest micro-batch took for itself."""
    unit_ms = 343.1 / (8192 * cost(8192, "none", graph=True))
    assert tokens * cost(tokens, policy, graph=True) * unit_ms == pytest.approx(micro_ms, rel=0.08)


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 16), (2, 6), (3, 5), (1, 1), (8, 2)])
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_step_keeps_its_rows(batch: int, accumulation: int, gpus: int) -> None:
    wanted = recipe(batch_size=batch, accumulation=accumulation * gpus, max_length=2048)
    found = regrouped(wanted, wanted.phases[0], QWEN36_35B, H200_GB, gpus)
    assert found.batch_size * found.accumulation == batch * accumulation * gpus
    assert found.accumulation % gpus == 0
    assert found.batch_size * 2048 <= ENOUGH_TOKENS


def test_no_more_rows_than_the_card_has_memory_for() -> None:
    wanted = recipe(batch_size=1, accumulation=8, max_length=2048).model_copy(update={"cuda_graphs": "off"})
    base_gb = QWEN36_35B.parameters * 2e-9
    tight = [rows(regrouped(wanted, wanted.phases[0], QWEN36_35B, base_gb + gb)) for gb in (5.0, 20.0, 27.0, 60.0)]
    assert tight[0] == (1, 8) and tight[-1] == (8, 1)
    assert [batch for batch, _ in tight] == sorted(batch for batch, _ in tight)


def test_rows_longer_than_a_graph_are_taken_apart_too() -> None:
    """What more than 16,384 tokens at once never does is grow; the recipe's own rows are among those that are compared."""
    wanted = recipe(batch_size=4, accumulation=1, max_length=40_000)
    assert not plan_memory(wanted, QWEN36_35B, H200_GB).fits
    plan = plan_regrouped(wanted, QWEN36_35B, H200_GB)
    assert plan.fits and plan.micro_batches == {"sft": (1, 4)}
    alone = recipe(batch_size=1, accumulation=8, max_length=20_000)
    assert rows(regrouped(alone, alone.phases[0], QWEN36_35B, H200_GB)) == (1, 8)


def test_a_prime_number_of_rows_stays_together_where_one_row_at_a_time_is_slower() -> None:
    wanted = recipe(batch_size=17, accumulation=1, max_length=1024)
    assert ENOUGH_TOKENS < 17 * 1024
    assert regrouped(wanted, wanted.phases[0], QWEN36_35B, H200_GB) == wanted.phases[0]


def test_where_none_leaves_a_margin_the_recipes_rows_go_if_they_fit_and_else_one_at_a_time() -> None:
    wanted = recipe(batch_size=8, accumulation=2, max_length=2048)
    one, four, eight = (
        plan_memory(recipe(batch_size=rows, max_length=2048), QWEN36_35B, 1.0).needed_gb for rows in (1, 4, 8)
    )
    assert one < four < eight
    assert plan_regrouped(wanted, QWEN36_35B, one + 0.03).micro_batches == {"sft": (1, 16)}
    assert plan_regrouped(wanted, QWEN36_35B, one + 0.03).fits
    assert plan_regrouped(wanted, QWEN36_35B, one - 1).needed_gb == one, "an error tells the least that would do"
    least = recipe(batch_size=1, accumulation=16, max_length=2048)
    assert regrouped(least, least.phases[0], QWEN36_35B, one + 0.03) is least.phases[0]


def test_what_our_kernels_do_not_take_keeps_the_recipes() -> None:
    wanted = recipe(batch_size=2, accumulation=8, max_length=2048)
    adapters = wanted.adapters.model_copy(update={"groups": ("attention",)})
    model = wanted.model.model_copy(update={"dtype": "float32"})
    for odd in (wanted.model_copy(update={"adapters": adapters}), wanted.model_copy(update={"model": model})):
        assert regrouped(odd, odd.phases[0], QWEN36_35B, 1000.0) is odd.phases[0]


@pytest.mark.parametrize("kind", ["dpo", "kto", "grpo"])
def test_a_loss_that_is_a_mean_over_the_micro_batch_keeps_the_recipes(kind: str) -> None:
    wanted = recipe(kind=kind)
    assert regrouped(wanted, wanted.phases[0], QWEN36_35B, H200_GB) is wanted.phases[0]


def test_a_cpu_and_a_base_in_4_bits_keep_the_recipes() -> None:
    for name in ("tiny-moe.yaml", "qwen3.6-35b-a3b-nf4.yaml"):
        wanted = recipe(name)
        assert regrouped(wanted, wanted.phases[0], QWEN36_35B, H200_GB) is wanted.phases[0]


def test_the_recipes_word_keeps_its_micro_batches_and_so_does_an_auxiliary_loss() -> None:
    """The router's auxiliary loss is a mean over a micro-batch, so another split would be another step."""
    wanted = recipe(batch_size=2, accumulation=8, max_length=2048)
    kept = wanted.model_copy(update={"micro_batches": "recipe"})
    assert regrouped(kept, kept.phases[0], QWEN36_35B, H200_GB) is kept.phases[0]
    leaking = recipe(batch_size=2, accumulation=8, max_length=2048, router_aux_loss=0.001)
    assert regrouped(leaking, leaking.phases[0], QWEN36_35B, H200_GB) is leaking.phases[0]


def test_a_named_policy_is_what_more_rows_must_fit_with() -> None:
    """Nothing recomputed, four rows of 2,048 tokens fit this card and eight do not."""
    wanted = recipe(batch_size=2, accumulation=8, max_length=2048).model_copy(update={"cuda_graphs": "off"})
    assert rows(regrouped(wanted, wanted.phases[0], QWEN36_35B, H200_GB)) == (8, 2)
    named = wanted.model_copy(update={"recompute": "none"})
    assert rows(regrouped(named, named.phases[0], QWEN36_35B, H200_GB)) == (4, 4)


def test_the_plan_is_of_the_steps_as_they_are_split() -> None:
    wanted = recipe(batch_size=2, accumulation=8, max_length=2048)
    plan = plan_regrouped(wanted, QWEN36_35B, H200_GB)
    phase = regrouped(wanted, wanted.phases[0], QWEN36_35B, H200_GB)
    as_split = wanted.model_copy(update={"phases": (phase,)})
    assert plan.micro_batches == {"sft": (4, 4)}
    assert plan == plan_memory(as_split, QWEN36_35B, H200_GB).model_copy(update={"micro_batches": {"sft": (4, 4)}})
    kept = wanted.model_copy(update={"micro_batches": "recipe"})
    assert plan_regrouped(kept, QWEN36_35B, H200_GB) == plan_memory(kept, QWEN36_35B, H200_GB)


def test_how_steps_are_split_decides_no_weight() -> None:
    """A run goes on from its checkpoints on a card of another size."""
    wanted = recipe()
    kept = wanted.model_copy(update={"micro_batches": "recipe"})
    assert wanted.phase_digest("sft") == kept.phase_digest("sft")
