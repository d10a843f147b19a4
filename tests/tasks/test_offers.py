from __future__ import annotations

import json

import pytest

from tasks.errors import NoOffers, UserError
from tasks.hosts import remember
from tasks.market.vast import VastMarket
from tasks.offers import best_offer, done_phases, plan_run, plan_table
from tests.tasks.pretend import NOW, Pretend, recipe, rehearsal_recipe
from training.box.store import Store
from training.contract import layout
from training.contract.manifest import Manifest
from training.contract.recipe import Recipe


def test_the_plan_ranks_by_dollars_for_the_run_and_not_by_the_hour(market: VastMarket, store: Store) -> None:
    plan = plan_run(recipe(step_seconds=30.0), market, store, now=NOW)
    ids = [ranked.offer.id for ranked in plan.offers]
    assert set(ids) == {24001001, 24001002, 24001003, 24001004, 24001005}
    assert ids.index(24001001) < ids.index(24001002), "dear bandwidth"
    assert plan.run_usd == plan.offers[0].run_usd == min(ranked.run_usd for ranked in plan.offers)
    assert plan.found == 13 and plan.memory and plan.memory.fits and plan.hours_from == "measured"


def test_the_funnel_counts_every_planted_fault(market: VastMarket, store: Store) -> None:
    plan = plan_run(recipe(step_seconds=30.0), market, store, now=NOW)
    removed = {count.rule: count.removed for count in plan.funnel if count.removed}
    assert removed == {
        "compute capability": 2,
        "architecture": 1,
        "CUDA": 1,
        "driver": 1,
        "price": 1,
        "uplink": 1,
        "reliability": 1,
        "verified": 1,
        "duration": 1,
    }


def test_countries_narrow_the_offers(market: VastMarket, store: Store) -> None:
    plan = plan_run(recipe(step_seconds=30.0, box={"countries": ["DE", "FR", "FI"]}), market, store, now=NOW)
    assert {ranked.offer.country for ranked in plan.offers} == {"DE", "FR", "FI"}


def test_tried_and_remembered_machines_are_left_out(market: VastMarket, store: Store) -> None:
    remember(store, 36001, "slow", now=NOW)
    plan = plan_run(rehearsal_recipe(), market, store, now=NOW, tried={36002})
    assert [ranked.offer.machine_id for ranked in plan.offers] == [36003, 36004]
    assert {count.rule: count.removed for count in plan.funnel}["remembered"] == 2


def test_no_offer_says_what_each_filter_removed_and_what_to_write(market: VastMarket, store: Store) -> None:
    plan = plan_run(rehearsal_recipe(box={"max_dph_usd": 0.01}), market, store, now=NOW)
    assert plan.run_usd is None and plan.hours > 0
    with pytest.raises(
        NoOffers, match=r"none of 4 .*\n  price: 4 \(raise box.max_dph_usd; would give \$0\.30"
    ) as caught:
        best_offer(plan)
    assert caught.value.exit_code == 3


def test_a_recipe_that_does_not_fit_is_refused_before_the_market_is_asked(
    pretend: Pretend, market: VastMarket, store: Store
) -> None:
    with pytest.raises(UserError, match=r"adapters\.rank"):
        plan_run(recipe(adapters={"rank": 128, "alpha": 128}), market, store, now=NOW)
    assert pretend.calls == []


def test_a_model_is_measured_by_the_configuration_of_its_mirror(market: VastMarket, store: Store) -> None:
    """Another model than the two that are known by their size: with its config.json the plan counts, without it it says that it guesses."""
    wanted = recipe(model={"size_gb": 40}, step_seconds=30.0)
    guessed = plan_run(wanted, market, store, now=NOW)
    assert guessed.memory and not guessed.memory.exact and "estimated from model.size_gb" in plan_table(guessed)
    config = {"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "vocab_size": 248320, "num_hidden_layers": 24}
    config |= {"full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
    config |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
    config |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_tok": 8}
    config |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    store.put_bytes("models/qwen/config.json", json.dumps(config).encode())
    counted = plan_run(wanted, market, store, now=NOW)
    assert counted.memory and counted.memory.exact and "estimated" not in plan_table(counted)
    assert counted.memory.parts["base"] == pytest.approx(42.4, abs=0.1)
    assert "base 42.4" in plan_table(counted)


def test_a_mirror_of_another_family_is_refused(market: VastMarket, store: Store) -> None:
    store.put_bytes("models/qwen/config.json", b'{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"model\.source: models/qwen/config\.json: model_type: seen 'llama'"):
        plan_run(recipe(), market, store, now=NOW)


def test_planning_spends_nothing_and_writes_nothing(pretend: Pretend, market: VastMarket, store: Store) -> None:
    plan_run(rehearsal_recipe(), market, store, now=NOW)
    assert {method for method, _ in pretend.calls} == {"POST"}
    assert store.list("") == []


def test_the_table_shows_offers_and_filters(market: VastMarket, store: Store) -> None:
    text = plan_table(plan_run(recipe(step_seconds=30.0), market, store, now=NOW))
    assert "24001001" in text and "Bavaria, DE" in text and "uplink: lower box.min_inet_up_mbps" in text


def _manifest(wanted: Recipe, kind: str, *, step: int = 100, digest: str = "") -> Manifest:
    return Manifest(
        run=wanted.name,
        phase=kind,
        step=step,
        max_steps=100,
        created_at=NOW,
        phase_digest=digest or wanted.phase_digest(kind),
        data_sha256="0" * 64,
        parent=None,
        versions={},
        files={
            name: {"sha256": "0" * 64, "bytes": 1}  # type: ignore[misc]
            for name in (
                "adapter_config.json",
                "adapter_model.safetensors",
                "optimizer.pt",
                "scheduler.pt",
                "rng_state.pth",
                "trainer_state.json",
                "training_args.bin",
            )
        },
    )


@pytest.mark.parametrize(("step", "digest", "done"), [(100, "", ("sft",)), (50, "", ()), (100, "f" * 64, ())])
def test_a_phase_is_done_by_a_complete_manifest_of_this_recipe(
    store: Store, step: int, digest: str, done: tuple[str, ...]
) -> None:
    wanted = recipe()
    manifest = _manifest(wanted, "sft", step=step, digest=digest)
    store.put_bytes(layout.manifest(wanted.name, "sft", step), manifest.model_dump_json().encode())
    assert done_phases(wanted, store) == done
