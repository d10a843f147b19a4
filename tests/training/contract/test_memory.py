from __future__ import annotations

from typing import Any

import pytest

from tests.tasks.pretend import recipe
from training.contract.memory import MemoryPlan, moments, plan_memory, suggest
from training.contract.recipe import Recipe
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
    assert suggest(recipe(optimizer="adamw"), QWEN36_35B, TIERS) == "optimizer: adamw_8bit: 93.0 GB"


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (phase(batch_size=8), "batch_size 4 with accumulation 16 in sft: 95.2 GB"),
        (phase(batch_size=1, max_length=24_576), "max_length 12288 in sft: 97.4 GB"),
        (
            phase(kind="grpo", batch_size=4, accumulation=16),
            "accumulation 8 (completions generated together) in grpo: 99.2 GB",
        ),
    ],
)
def test_the_least_harmful_change_that_fits_is_named(changes: dict[str, Any], wanted: str) -> None:
    tight = recipe(phases=[phase(), {**changes, "name": changes["kind"]}] if changes["kind"] != "sft" else [changes])
    assert not plan(tight).fits
    assert suggest(tight, QWEN36_35B, TIERS) == wanted


def test_what_a_suggestion_says_is_true() -> None:
    tight = recipe(phases=[phase(batch_size=8)])
    eased = recipe(phases=[phase(batch_size=4, accumulation=16)])
    said = suggest(tight, QWEN36_35B, TIERS)
    assert said and said.endswith(f"{plan(eased).needed_gb:.1f} GB") and plan(eased).fits


def test_a_lower_rank_and_then_a_larger_tier_are_the_last_words() -> None:
    rank_64 = recipe(adapters={"rank": 64, "alpha": 128}, phases=[phase(batch_size=1, max_length=16)])
    assert suggest(rank_64, QWEN36_35B, TIERS) == "adapters.rank 32: 89.7 GB"
    whole = recipe(
        model={"source": "bucket:m", "family": "qwen3_moe", "size_gb": 470, "dtype": "bfloat16"},
        adapters={"groups": ["attention", "routed_experts"]},
        phases=[phase(batch_size=1)],
    )
    assert suggest(whole, QWEN3_235B, TIERS) is None
    assert suggest(whole, QWEN3_235B, {**TIERS, "eight": 1200.0}) is not None


def test_the_micro_batch_is_measured_by_its_tokens() -> None:
    """Full-depth steps on an H200: 3.2 GB above the static parts at 4,096 tokens, 9.8 GB at 16,384."""
    for rows, seen_gb in ((2, 3.2), (8, 9.8)):
        parts = plan(recipe(phases=[phase(batch_size=rows)])).parts
        assert parts["activations"] + parts["logits"] == pytest.approx(seen_gb, abs=0.15)


def test_dpo_runs_twice_the_rows() -> None:
    sft, dpo = (plan(recipe(phases=[phase(kind=kind)])) for kind in ("sft", "dpo"))
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
    assert plan(recipe(phases=[phase(), phase(kind="dpo")])).phase == "dpo"


def test_fewer_groups_take_less() -> None:
    assert plan(recipe(adapters={"groups": ["attention"]})).parts["adapters"] < 0.1
