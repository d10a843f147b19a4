from __future__ import annotations

from typing import Any

import pytest

from tests.tasks.pretend import recipe
from training.contract.memory import POLICIES, MemoryPlan, moments, plan_memory, recompute_for, suggest
from training.contract.micro_batches import plan_regrouped
from training.contract.recipe import Recipe, RecipeError, Recompute, parse_recipe
from training.contract.shapes import QWEN3_235B, QWEN36_35B

CARD_96, H200 = 102.6 * 0.97, 150.7 * 0.97
TIERS = {"rtxpro6000": CARD_96, "h200": H200, "b200": 192.3 * 0.97}


def phase(**changes: Any) -> dict[str, Any]:
    return {"kind": "sft", "data": "bucket:x", "steps": 10, "learning_rate": 1e-5, **changes}


def plan(wanted: Recipe, gb: float = CARD_96) -> MemoryPlan:
    return plan_memory(wanted, QWEN36_35B, gb)


def test_the_35b_at_rank_32_fits_96_gb_with_8_bit_state_and_not_with_fp32_state() -> None:
    eight, full = plan(recipe()), plan(recipe(optimizer="adamw"))
    assert eight.fits and not full.fits
    assert eight.parts["base"] == pytest.approx(69.32, abs=0.01)
    assert eight.parts["adapters"] == eight.parts["gradients"] == pytest.approx(7.54, abs=0.01)
    assert (eight.parts["optimizer"], full.parts["optimizer"]) == pytest.approx((3.82, 15.07), abs=0.01)
    assert eight.needed_gb == pytest.approx(sum(eight.parts.values()), abs=0.05)


def test_an_h200_holds_the_fp32_state_too() -> None:
    assert plan(recipe(optimizer="adamw"), H200).fits


def test_fp32_state_is_answered_with_8_bit_state() -> None:
    assert suggest(recipe(optimizer="adamw"), QWEN36_35B, TIERS, plan_memory) == "optimizer: adamw_8bit: 98.5 GB"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (phase(batch_size=16), "batch_size 8 with accumulation 16 in sft: 99.0 GB"),
        (phase(batch_size=1, max_length=24_576), "max_length 12288 in sft: 97.6 GB"),
        (
            phase(kind="grpo", batch_size=4, accumulation=16),
            "accumulation 8 (completions generated together) in grpo: 98.5 GB",
        ),
    ],
)
def test_the_least_harmful_change_that_fits_is_named(changes: dict[str, Any], wanted: str) -> None:
    tight = recipe(phases=[phase(), {**changes, "name": changes["kind"]}] if changes["kind"] != "sft" else [changes])
    assert not plan(tight).fits
    assert suggest(tight, QWEN36_35B, TIERS, plan_memory) == wanted


def test_what_a_suggestion_says_is_true() -> None:
    tight = recipe(phases=[phase(batch_size=16)])
    eased = recipe(phases=[phase(batch_size=8, accumulation=16)])
    said = suggest(tight, QWEN36_35B, TIERS, plan_memory)
    assert said and said.endswith(f"{plan(eased).needed_gb:.1f} GB") and plan(eased).fits


def test_what_changes_no_step_is_suggested_first() -> None:
    """Rows at once and what is recomputed are nobody's loss to leave to the card."""
    named = recipe(optimizer="adamw", recompute="none", phases=[phase(batch_size=4)])
    assert suggest(named, QWEN36_35B, {**TIERS, "rtxpro6000": 112.0}, plan_memory) == "recompute: auto: 107.5 GB"
    kept = recipe(micro_batches="recipe", phases=[phase(batch_size=16)])
    assert suggest(kept, QWEN36_35B, TIERS, plan_regrouped) == "micro_batches: auto: 98.5 GB"


def test_a_batch_that_is_split_anyway_is_not_halved_and_hides_no_change_that_fits() -> None:
    """Sixteen rows at once do not fit in 8 bits either; one or two of them do."""
    wanted = recipe(optimizer="adamw", phases=[phase(batch_size=16, accumulation=1)])
    assert suggest(wanted, QWEN36_35B, TIERS, plan_regrouped) == "optimizer: adamw_8bit: 98.5 GB"
    larger = recipe(adapters={"rank": 64, "alpha": 128}, phases=[phase(batch_size=16, accumulation=1)])
    assert suggest(larger, QWEN36_35B, TIERS, plan_regrouped) == "adapters.rank 32: 98.5 GB"
    preferences = recipe(phases=[phase(batch_size=16), phase(kind="dpo", batch_size=8)])
    assert suggest(preferences, QWEN36_35B, TIERS, plan_regrouped) == (
        "batch_size 4 with accumulation 16 in dpo: 99.0 GB"
    )


def test_each_phase_is_told_its_own_change() -> None:
    tight = recipe(phases=[phase(kind="dpo", batch_size=8, accumulation=2), phase(kind="kto", batch_size=16)])
    said = "batch_size 4 with accumulation 4 in dpo; batch_size 8 with accumulation 16 in kto: 99.0 GB"
    assert suggest(tight, QWEN36_35B, TIERS, plan_memory) == said
    least = recipe(phases=[phase(batch_size=1, max_length=16)])
    assert suggest(least, QWEN36_35B, {"rtxpro6000": 90.0}, plan_memory) == "adapters.rank 16: 82.2 GB"


def test_a_lower_rank_and_then_a_larger_tier_are_the_last_words() -> None:
    rank_64 = recipe(adapters={"rank": 64, "alpha": 128}, phases=[phase(batch_size=1, max_length=16)])
    assert suggest(rank_64, QWEN36_35B, TIERS, plan_memory) == "adapters.rank 32: 93.6 GB"
    whole = recipe(
        model={"source": "bucket:m", "family": "qwen3_moe", "size_gb": 470, "dtype": "bfloat16"},
        adapters={"groups": ["attention", "routed_experts"]},
        phases=[phase(batch_size=1)],
    )
    assert suggest(whole, QWEN3_235B, TIERS, plan_memory) is None
    assert suggest(whole, QWEN3_235B, {**TIERS, "eight": 1200.0}, plan_memory) is not None


@pytest.mark.parametrize(
    ("policy", "rows", "seen_gb"),
    [
        ("full", 2, 1.7),
        ("full", 8, 5.5),
        ("experts_kept", 2, 5.3),
        ("experts_kept", 8, 18.8),
        ("mixer", 8, 27.2),
        ("none", 2, 18.3),
        ("none", 4, 35.6),
    ],
)
def test_what_a_policy_takes_is_what_full_depth_steps_on_an_h200_took(
    policy: Recompute, rows: int, seen_gb: float
) -> None:
    """GB above the static parts, in micro-batches of `rows` x 2,048 tokens."""
    parts = plan(recipe(recompute=policy, phases=[phase(batch_size=rows)]), 1000.0).parts
    assert parts["activations"] + parts["logits"] == pytest.approx(seen_gb, rel=0.05, abs=0.05)


def test_the_fastest_policy_that_fits_is_taken() -> None:
    wanted = recipe(optimizer="adamw", phases=[phase(batch_size=8)])
    found = [recompute_for(wanted, wanted.phases[0], QWEN36_35B, gb) for gb in (1000.0, 146.0, 126.5, 112.0, 1.0)]
    assert found == ["none", "mixer", "experts_kept", "full", "full"]
    assert plan(wanted, H200).recompute == {"sft": "mixer"} and plan(wanted, H200).fits
    assert not plan(wanted, 1.0).fits


def test_a_policy_is_taken_only_with_room_to_spare() -> None:
    wanted = recipe(recompute="experts_kept", phases=[phase(batch_size=8)])
    needed = plan(wanted).needed_gb
    auto = recipe(phases=[phase(batch_size=8)])
    assert recompute_for(auto, auto.phases[0], QWEN36_35B, needed + 0.5) == "full"
    assert recompute_for(auto, auto.phases[0], QWEN36_35B, needed + 4.0) == "experts_kept"


def test_each_policy_takes_less_than_the_one_before() -> None:
    needed = [plan(recipe(recompute=policy)).needed_gb for policy in POLICIES]
    assert needed == sorted(needed, reverse=True) and len(set(needed)) == len(POLICIES) == 4


def test_the_recipes_word_is_kept_even_if_it_does_not_fit() -> None:
    tight = plan(recipe(recompute="none", phases=[phase(batch_size=8)]))
    assert (tight.recompute, tight.fits) == ({"sft": "none"}, False)


def test_a_4_bit_base_has_no_say_in_what_is_recomputed() -> None:
    given = recipe().model_dump(mode="json")
    given["model"]["quantisation"] = "nf4"
    assert parse_recipe(given)
    with pytest.raises(RecipeError, match=r"recompute: mixer, but layers of a 4-bit base are always recomputed whole"):
        parse_recipe(given | {"recompute": "mixer"})


def test_dpo_runs_twice_the_rows() -> None:
    sft, dpo = (plan(recipe(recompute="full", phases=[phase(kind=kind)])) for kind in ("sft", "dpo"))
    assert dpo.parts["activations"] == pytest.approx(2 * sft.parts["activations"], abs=0.01)


def test_a_reference_adapter_is_priced_only_where_there_is_one() -> None:
    """DPO and KTO read their reference from columns; GRPO needs one only with a KL term."""
    for kind, beta, there in (("dpo", 0.1, False), ("kto", 0.1, False), ("grpo", 0.0, False), ("grpo", 0.1, True)):
        wanted = recipe(phases=[phase(kind=kind, beta=beta)])
        for parts in moments(wanted, wanted.phases[0], QWEN36_35B):
            assert parts.get("reference adapter", 0.0) == (parts["adapters"] if there else 0.0)


def test_generation_holds_caches_and_no_gradients() -> None:
    wanted = recipe(phases=[phase(kind="grpo", batch_size=4, accumulation=4)])
    training, generating = moments(wanted, wanted.phases[0], QWEN36_35B)
    assert "gradients" in training and "gradients" not in generating
    # 16 completions: keys and values of 10 layers, and 30 states of 32 x 128 x 128 in fp32.
    assert generating["generation caches"] == pytest.approx(16 * (2304 * 20_480 + 30 * 2**21) / 1e9, rel=1e-3)


def test_the_hungriest_phase_decides_and_is_named() -> None:
    both = [phase(), phase(kind="dpo")]
    assert plan(recipe(recompute="full", phases=both)).phase == "dpo"
    auto = plan(recipe(phases=both))
    # Twice the rows recompute everything, and then take less than those that have room to keep the experts'.
    assert auto.recompute == {"sft": "experts_kept", "dpo": "full"} and auto.phase == "sft"
    assert auto.needed_gb == plan(recipe(phases=[phase()])).needed_gb > plan(recipe(phases=both[1:])).needed_gb


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"source": "bucket:m", "family": "qwen3_5_moe", "size_gb": 144, "dtype": "float32"}},
        {"adapters": {"groups": ["attention", "shared_expert"]}},
    ],
)
def test_what_our_kernels_do_not_take_recomputes_whole_layers(changes: dict[str, Any]) -> None:
    """Float32, and routed experts without adapters: what such layers keep was not measured."""
    assert plan(recipe(**changes), 1000.0).recompute == {"sft": "full"}
    assert plan(recipe(recompute="mixer", **changes), 1000.0).recompute == {"sft": "mixer"}


def test_fewer_groups_take_less() -> None:
    assert plan(recipe(adapters={"groups": ["attention"]})).parts["adapters"] < 0.1
