from __future__ import annotations

from typing import Any

import pytest

from deployments.rehearsal.catalogue import OFFERS, driver_number
from tests.deployments.rehearsal.conftest import MarketCaller

GOOD: dict[str, Any] = {
    "verified": {"eq": True},
    "external": {"eq": False},
    "rentable": {"eq": True},
    "num_gpus": {"eq": 1},
    "cpu_arch": {"eq": "amd64"},
    "gpu_ram": {"gte": 90_000, "lte": 100_000},
    "compute_cap": {"eq": 1200},
    "cuda_max_good": {"gte": 13.0},
    "driver_version": {"gte": 580_065_006},
    "disk_space": {"gte": 250},
    "inet_up": {"gte": 200},
    "reliability": {"gte": 0.95},
    "dph_total": {"lte": 1.30},
    "duration": {"gte": 172_800},
    "allocated_storage": 250,
    "order": [["dph_total", "asc"]],
}


def notes(call: MarketCaller, body: dict[str, Any]) -> list[str]:
    by_id = {offer.id: offer.note for offer in OFFERS}
    return [by_id[row["id"]] for row in call("POST", "/api/v0/bundles/", body).body["offers"]]


def test_the_full_filter_leaves_only_the_good_offers(call: MarketCaller) -> None:
    left = notes(call, GOOD)
    assert len(left) == 5
    assert all(note.startswith("good") or note == "place unknown" for note in left)


@pytest.mark.parametrize(
    ("dropped", "let_in"),
    [
        ("verified", "unverified"),
        ("cpu_arch", None),
        ("compute_cap", "same VRAM band, other architecture"),
        ("disk_space", None),
        ("inet_up", "slow uplink"),
        ("reliability", "unreliable"),
        ("dph_total", "overpriced"),
        ("duration", "offer ends in three hours"),
    ],
)
def test_each_filter_removes_somebody(call: MarketCaller, dropped: str, let_in: str | None) -> None:
    left = notes(call, {name: value for name, value in GOOD.items() if name != dropped})
    assert (let_in in left) if let_in else (left == notes(call, GOOD))


def test_an_arm64_card_in_the_same_memory_band_needs_the_architecture_filter(call: MarketCaller) -> None:
    without = {name: value for name, value in GOOD.items() if name not in ("compute_cap", "cpu_arch")}
    assert "same VRAM band, arm64" in notes(call, without)


def test_an_old_driver_is_removed_by_cuda_and_by_driver_number(call: MarketCaller) -> None:
    neither = {name: value for name, value in GOOD.items() if name not in ("cuda_max_good", "driver_version")}
    assert "driver too old" in notes(call, neither)
    for name in ("cuda_max_good", "driver_version"):
        assert "driver too old" not in notes(call, {**neither, name: GOOD[name]})


def test_the_price_depends_on_the_storage_asked_for(call: MarketCaller) -> None:
    def dph(body: dict[str, Any]) -> float:
        row = call("POST", "/api/v0/bundles/", {"id": {"eq": 24001001}, **body}).body["offers"][0]
        return float(row["dph_total"])

    assert dph({"allocated_storage": 250}) == pytest.approx(1.0753 + 0.15 * 250 / 720)
    assert dph({}) == pytest.approx(1.0753 + 0.15 * 8 / 720)


def test_storage_asked_for_hides_offers_with_less_disk(call: MarketCaller) -> None:
    small = {"id": {"eq": 24001009}}
    assert notes(call, {**small, "allocated_storage": 100}) and not notes(call, {**small, "allocated_storage": 130})


def test_gpu_names_match_exactly(call: MarketCaller) -> None:
    assert len(notes(call, {"gpu_name": {"eq": "H200"}, "num_gpus": {"eq": 1}})) == 1
    assert len(notes(call, {"gpu_name": {"in": ["H200", "H200 NVL"]}, "num_gpus": {"eq": 1}})) == 2


def test_countries_are_the_last_part_of_the_place_and_unknown_is_nowhere(call: MarketCaller) -> None:
    assert notes(call, {"geolocation": {"in": ["SE"]}}) == ["tier b200"]
    assert "place unknown" not in notes(call, {"geolocation": {"notin": ["US"]}})
    assert not notes(call, {"geolocation": {"eq": "EU"}})


def test_rented_is_no_filter_and_a_rented_offer_is_not_rentable(call: MarketCaller) -> None:
    call.rent()
    assert len(notes(call, {"compute_cap": {"eq": 0}, "num_gpus": {"eq": 1}, "rented": {"eq": False}})) == 4
    assert len(notes(call, {"compute_cap": {"eq": 0}, "num_gpus": {"eq": 1}, "rentable": {"eq": True}})) == 3


def test_numbers_may_come_as_text(call: MarketCaller) -> None:
    assert len(notes(call, {"compute_cap": {"eq": "1000"}, "verified": {"eq": "true"}})) == 1


def test_order_and_limit(call: MarketCaller) -> None:
    cheap = notes(call, {"compute_cap": {"eq": 0}, "order": [["dph_total", "asc"]], "limit": 2})
    assert cheap == ["cheapest: the box that faults hit by default", "second"]


def test_a_bid_search_shows_the_bid_price(call: MarketCaller) -> None:
    row = call("POST", "/api/v0/bundles/", {"id": {"eq": 24001001}, "type": "bid"}).body["offers"][0]
    assert row["is_bid"] is True and row["dph_base"] == row["min_bid"]


@pytest.mark.parametrize(
    "body", [{"nonsense": {"eq": 1}}, {"gpu_ram": {"about": 1}}, {"gpu_ram": 5}, {"gpu_ram": {"gte": "much"}}]
)
def test_a_filter_that_cannot_be_evaluated_is_refused(call: MarketCaller, body: dict[str, Any]) -> None:
    reply = call("POST", "/api/v0/bundles/", body)
    assert reply.status == 400 and reply.body["error"] == "invalid_args"


def test_driver_numbers_are_three_digits_a_part() -> None:
    assert driver_number("580.95.05") == 580_095_005
    assert driver_number("550.54") == 550_054_000


def test_a_box_of_several_cards_is_priced_whole_and_its_memory_is_told_per_card(call: MarketCaller) -> None:
    body = {"gpu_ram": {"gte": 79_000, "lte": 83_000}, "num_gpus": {"eq": 4}, "compute_cap": {"eq": 900}}
    rows = call("POST", "/api/v0/bundles/", body).body["offers"]
    assert {row["gpu_name"] for row in rows} == {"H100 SXM", "H100 PCIE"}
    assert all(row["gpu_total_ram"] == 4 * row["gpu_ram"] == 4 * 81_559 and row["dph_base"] > 8 for row in rows)
