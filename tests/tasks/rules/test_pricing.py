from __future__ import annotations

import math
from typing import Any

import pytest

from tasks.domain import Offer
from tasks.rules.pricing import (
    Cost,
    Experience,
    Pace,
    checkpoint_gb,
    cost_of,
    dph_at_disk,
    phase_s,
    transfer_s,
    work_left,
)
from tasks.rules.tiers import TIERS
from tests.tasks.pretend import recipe, rehearsal_recipe
from training.contract.recipe import Recipe
from training.contract.shapes import QWEN3_235B, QWEN36_35B


def run_cost(recipe: Recipe, offer: Offer, *work: Any, **more: Any) -> Cost:
    return cost_of(work_left(recipe, *work, **more), offer)


def _offer(**changes: Any) -> Offer:
    given: dict[str, Any] = {
        "id": 1,
        "machine_id": 1,
        "gpu_name": "x",
        "num_gpus": 1,
        "gpu_ram_mb": 97_887,
        "disk_space_gb": 1000,
        "dph_total_usd": 1.05,
        "dph_base_usd": 1.0,
        "storage_usd_gb_month": 0.144,
        "inet_down_mbps": 800,
        "inet_up_mbps": 800,
        "inet_down_usd_gb": 0.01,
        "inet_up_usd_gb": 0.02,
    }
    return Offer(**{**given, **changes})


def test_the_parts_of_a_run_add_up() -> None:
    wanted = recipe(step_seconds=36.0)
    cost = run_cost(wanted, _offer())
    assert cost.train_s == 3600 and cost.hours_from == "measured"
    assert cost.parts["disk"] == pytest.approx(cost.hours * 0.05)
    assert cost.parts["down"] == pytest.approx((70.2 + 15) * 0.01)
    assert cost.parts["up"] == pytest.approx(cost.up_gb * 0.02)
    assert cost.usd == pytest.approx(sum(cost.parts.values()))
    boot_s, other_s = 240, 240 + 120 + 70.2 * 8000 / 800 + 3600
    last_s = (cost.up_gb - checkpoint_gb(wanted, QWEN36_35B)) * 8000 / 800
    assert cost.hours * 3600 == pytest.approx(boot_s + other_s + last_s, rel=1e-6)


def test_the_gpu_is_not_billed_while_the_box_boots() -> None:
    cost = run_cost(recipe(step_seconds=36.0), _offer())
    assert cost.parts["gpu"] == pytest.approx((cost.hours - 240 / 3600) * 1.0)


PHASES = [{"kind": kind, "data": "bucket:x", "steps": 100, "learning_rate": 1e-4} for kind in ("cpt", "sft")]


def test_a_pace_measured_here_beats_a_prediction_and_the_plan_says_where_it_is_from() -> None:
    half = Experience(paces={"cpt": Pace(50.0, "2026-11-29, 200 steps")})
    whole = Experience(paces={**half.paces, "sft": Pace(60.0, "2026-11-30, 400 steps")})
    wanted = recipe(phases=PHASES)
    assert work_left(wanted, experience=whole).train_s == 100 * 50 + 100 * 60
    assert [work_left(wanted, experience=seen).hours_from for seen in (Experience(), half, whole)] == [
        "predicted",
        "predicted",
        "measured",
    ]
    assert "cpt: 50 s a step, measured here: 2026-11-29, 200 steps" in work_left(wanted, experience=half).notes
    assert any(
        said.startswith("sft: ") and said.endswith("predicted") for said in work_left(wanted, experience=half).notes
    )


def test_the_recipes_own_word_beats_both() -> None:
    seen = Experience(paces={"sft": Pace(50.0, "x")})
    assert run_cost(recipe(step_seconds=36.0), _offer(), experience=seen).train_s == 3600


def test_boxes_that_fail_on_the_way_are_in_the_price() -> None:
    """A quarter of a box for each good one until the bucket knows better: boot, install, image and wheels."""
    cost = run_cost(recipe(step_seconds=36.0), _offer())
    one = 240 / 3600 * 0.05 + 240 / 3600 * 1.05 + 15 * 0.01
    assert cost.parts["unfit"] == pytest.approx(0.25 * one)
    worse = run_cost(recipe(step_seconds=36.0), _offer(), experience=Experience(fit_boxes=4, unfit_boxes=15))
    assert worse.parts["unfit"] == pytest.approx(2.0 * one)
    better = work_left(recipe(), experience=Experience(fit_boxes=96, unfit_boxes=0))
    assert better.unfit_boxes == pytest.approx(0.01)
    assert better.notes[-1] == "0.01 unfit boxes for each fit one: 0.25 expected, 0 of 96 seen here"


def test_a_bid_is_paid_as_bid_and_not_as_the_least_that_was_asked() -> None:
    listed = run_cost(recipe(step_seconds=36.0), _offer()).parts
    bid = run_cost(recipe(step_seconds=36.0, box={"interruptible": True}), _offer()).parts
    assert bid["gpu"] == pytest.approx(1.15 * listed["gpu"]) and bid["disk"] == listed["disk"]


def test_dear_bandwidth_makes_the_cheaper_hour_the_dearer_run() -> None:
    cheap_hour = run_cost(
        recipe(step_seconds=10.0), _offer(dph_base_usd=1.0, inet_down_usd_gb=0.03, inet_up_usd_gb=0.03)
    )
    dear_hour = run_cost(recipe(step_seconds=10.0), _offer(dph_base_usd=1.25, inet_down_usd_gb=0.0, inet_up_usd_gb=0.0))
    assert cheap_hour.usd > dear_hour.usd


def test_phases_that_are_done_cost_nothing_again() -> None:
    wanted = recipe(phases=PHASES, step_seconds=36.0)
    assert run_cost(wanted, _offer()).train_s == 7200
    assert run_cost(wanted, _offer(), done=("cpt",)).train_s == 3600


SAVED_AT_EACH_STEP = {"kind": "sft", "data": "bucket:x", "steps": 100, "learning_rate": 1e-4, "save_every_steps": 1}


def test_a_slow_uplink_sends_fewer_checkpoints_and_keeps_the_box_longer() -> None:
    wanted, free = recipe(phases=[SAVED_AT_EACH_STEP], step_seconds=36.0), {"inet_up_usd_gb": 0.0}
    fast, slow = run_cost(wanted, _offer(inet_up_mbps=2000, **free)), run_cost(wanted, _offer(inet_up_mbps=61, **free))
    assert slow.up_gb < fast.up_gb and slow.hours > fast.hours


def test_dear_bytes_are_sent_seldom() -> None:
    """Of a hundred saves those are sent that are worth their bytes; the last one always."""
    wanted = recipe(phases=[SAVED_AT_EACH_STEP], step_seconds=360.0)
    free, dear = run_cost(wanted, _offer(inet_up_usd_gb=0.0)), run_cost(wanted, _offer(inet_up_usd_gb=0.04))
    assert dear.up_gb < free.up_gb / 2
    assert dear.parts["up"] == pytest.approx(dear.up_gb * 0.04)


def test_an_uplink_that_is_not_stated_makes_a_run_that_never_ends() -> None:
    assert run_cost(recipe(), _offer(inet_up_mbps=None)).hours == math.inf


def test_one_checkpoint_of_the_35b_at_rank_32_is_about_11_gb() -> None:
    assert checkpoint_gb(recipe(), QWEN36_35B) == pytest.approx(11.4, abs=0.2)
    assert checkpoint_gb(recipe(optimizer="adamw"), QWEN36_35B) == pytest.approx(22.6, abs=0.2)


def test_the_price_counts_the_disk_that_is_asked_for_even_if_the_market_forgot_it() -> None:
    assert dph_at_disk(_offer(dph_total_usd=1.0016), 250) == pytest.approx(1.05)
    assert dph_at_disk(_offer(dph_base_usd=None), 250) == 1.05


def test_a_faster_tier_trains_in_fewer_seconds() -> None:
    small, large = recipe(), recipe(box={"tier": "h200", "max_dph_usd": 3.0})
    assert phase_s(large, "sft") < phase_s(small, "sft") / 5


def test_a_model_of_more_active_weights_trains_more_slowly() -> None:
    assert phase_s(recipe(), "sft", QWEN3_235B) == pytest.approx(phase_s(recipe(), "sft") * 21.57 / 2.946, rel=1e-3)


def test_the_rehearsal_costs_cents() -> None:
    assert run_cost(rehearsal_recipe(), _offer(inet_up_mbps=2000, inet_down_mbps=3000)).usd < 0.2


@pytest.mark.parametrize(("gb", "mbps", "seconds"), [(1, 8000, 1), (67, 360, 1489), (0, 0, 0), (1, 0, math.inf)])
def test_seconds_of_a_transfer(gb: float, mbps: float, seconds: float) -> None:
    assert transfer_s(gb, mbps) == pytest.approx(seconds, abs=1)


def test_on_an_h200_packed_phases_are_planned_at_what_ours_was_measured_at_and_the_others_as_before() -> None:
    """21,418 tokens a second in training/RESULTS.md; a plan counts on four fifths of it."""
    facts = TIERS["h200"]
    assert 0.75 * 21_418 < facts.packed_tokens_s < 0.85 * 21_418
    assert facts.tokens_s < facts.packed_tokens_s / 3
    for tier in ("rtxpro6000", "a100", "l40s"):
        assert TIERS[tier].packed_tokens_s == TIERS[tier].tokens_s
