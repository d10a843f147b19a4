from __future__ import annotations

from typing import Any

import pytest

from tasks.domain import Offer
from tasks.errors import UserError
from tasks.recipes import load_recipe, shipped
from tasks.rules.filters import require_consistent
from tasks.rules.memory import hardware, memory_plan, no_room, parts_sentence, require_fit
from tests.tasks.pretend import recipe, rehearsal_recipe
from training.contract.recipe import Recipe, parse_recipe

BASE_235B: dict[str, Any] = {
    "model": {"source": "bucket:m", "family": "qwen3_moe", "size_gb": 470},
    "adapters": {"rank": 16, "groups": ["attention", "routed_experts"]},
}


def test_what_does_not_fit_is_an_error_before_anything_is_rented_and_says_what_would() -> None:
    with pytest.raises(
        UserError,
        match=r"rtxpro6000 has 98\.9 GB .* needs 106\.\d GB: base 69\.3, optimizer 15\.1.*would fit: optimizer: adamw_8bit: 96\.2 GB",
    ):
        require_fit(recipe(optimizer="adamw"))


def test_the_next_tier_is_named_when_nothing_smaller_is_wanted() -> None:
    phase = {
        "kind": "sft",
        "data": "bucket:x",
        "steps": 1,
        "learning_rate": 1e-5,
        "batch_size": 1,
        "max_length": 196_608,
    }
    with pytest.raises(UserError, match=r"would fit: box\.tier h200: 142\.\d of its 145\.6 GB"):
        require_fit(recipe(phases=[phase], adapters={"rank": 8, "alpha": 8}))


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_recipe_fits_its_own_box(name: str) -> None:
    wanted = load_recipe(name)
    assert require_fit(wanted).fits
    require_consistent(wanted)


def test_a_base_of_470_gb_fits_no_tier_and_is_refused() -> None:
    with pytest.raises(UserError, match=r"base 470\.2.*no tier holds it"):
        require_fit(recipe(**BASE_235B))


def test_a_base_that_would_fit_in_4_bits_says_so() -> None:
    on_h100 = recipe(**BASE_235B | {"box": {"tier": "h100", "min_host_memory_gb": 160}})
    with pytest.raises(UserError, match=r"; or model\.quantisation nf4: \d\d\.\d GB"):
        require_fit(on_h100)
    generating = on_h100.phases[0].model_dump() | {"kind": "grpo", "name": "grpo", "generations": 8}
    with pytest.raises(UserError) as caught:
        require_fit(recipe(**BASE_235B | {"box": {"tier": "h100", "min_host_memory_gb": 160}, "phases": [generating]}))
    assert "nf4" not in str(caught.value), "that phase cannot run on one"


def test_an_estimate_says_that_it_is_one() -> None:
    model = {"source": "bucket:m", "family": "qwen3_5_moe", "size_gb": 244}
    with pytest.raises(UserError, match=r"GB \(estimated from model\.size_gb: no config\.json was found\)"):
        require_fit(recipe(model=model))


@pytest.mark.parametrize(
    ("name", "execution", "gpus"),
    [
        ("qwen3-235b-a22b-qlora", "all_gather", 4),
        ("qwen3-235b-a22b-qlora-1gpu", "host", 1),
        ("qwen3.6-35b-a3b-nf4", "all_gather", 1),
    ],
)
def test_a_4_bit_base_lies_where_its_recipe_says(name: str, execution: str, gpus: int) -> None:
    plan = memory_plan(load_recipe(name))
    assert (plan.execution, plan.gpus) == (execution, gpus)
    assert plan.needed_gb == pytest.approx(sum(plan.parts.values()), abs=0.05)
    assert ("base" in plan.parts) == (execution == "all_gather") and plan.host_gb is not None


@pytest.mark.parametrize("tier", ["rtx4090", "rtx5090", "l40s"])
def test_the_4_bit_35b_fits_one_card_of_24_to_48_gb(tier: str) -> None:
    assert require_fit(load_recipe("qwen3.6-35b-a3b-nf4", {"tier": tier})).fits


def test_cards_that_cannot_share_the_experts_evenly_are_refused_where_their_number_is_known() -> None:
    three = load_recipe("qwen3-235b-a22b-qlora").model_dump()
    three["box"]["gpus"] = 3
    for phase in three["phases"]:
        phase["accumulation"] = 6
    with pytest.raises(UserError, match=r"box\.gpus: 128 experts cannot be dealt out evenly to 3 cards"):
        require_fit(parse_recipe(three))
    three["model"]["size_gb"] = 900
    assert require_fit_or_refusal(parse_recipe(three)).count("dealt out evenly") == 0, "a model that nobody knows"


def require_fit_or_refusal(wanted: Recipe) -> str:
    try:
        return require_fit(wanted).phase
    except UserError as error:
        return str(error)


def test_a_box_that_states_too_little_host_memory_has_no_room_and_one_that_states_none_is_asked_later() -> None:
    wanted = load_recipe("qwen3-235b-a22b-qlora-1gpu")
    for stated, room in ((129.0, False), (140.0, True), (258.0, True), (None, True)):
        assert (no_room(wanted, None, offer(host_memory_gb=stated)) is None) == room
    said = no_room(wanted, None, offer(host_memory_gb=129.0))
    assert said == "no room for the 4-bit base: host: 132.1 GB of host memory, the box has 129.0"
    assert no_room(recipe(), None, offer(host_memory_gb=1.0)) is None, "an unquantised base asks for its floor alone"


def test_what_an_offer_states_of_its_bus_and_links_decides_its_seconds() -> None:
    box = load_recipe("qwen3-235b-a22b-qlora").box
    linked, plain = hardware(box, offer(gpu_name="H100 SXM")), hardware(box, offer(gpu_name="H100 PCIE"))
    assert linked.link_gbs > 10 * plain.link_gbs and linked.host_gb == 258.0
    assert hardware(box, offer(pcie_gbs=12.3)).host_gbs == pytest.approx(12.3, rel=0.06), "several cards share it"
    assert hardware(box, offer(host_memory_gb=None)).host_gb == box.min_host_memory_gb


def offer(**changes: Any) -> Offer:
    given: dict[str, Any] = {
        "id": 1,
        "machine_id": 1,
        "gpu_name": "H100 SXM",
        "num_gpus": 4,
        "gpu_ram_mb": 81_559,
        "disk_space_gb": 7000,
        "dph_total_usd": 9.0,
        "host_memory_gb": 258.0,
    }
    return Offer(**given | changes)


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_rehearsal_takes_a_4_bit_base_on_one_process_and_on_two(gpus: int) -> None:
    tiny = load_recipe("tiny-moe", {"phases": ["cpt", "sft", "dpo", "kto"]}).model_dump()
    tiny["model"] |= {"quantisation": "nf4"}
    tiny["box"] |= {"gpus": gpus}
    tiny["phases"] = [phase | {"accumulation": 2} for phase in tiny["phases"]]
    plan = require_fit(parse_recipe(tiny))
    assert (plan.gpus, plan.fits) == (gpus, True) and plan.needed_gb < 1


def test_a_tiny_model_fits_trivially() -> None:
    plan = memory_plan(rehearsal_recipe())
    assert plan.fits and plan.needed_gb < 1 and parts_sentence(plan)
