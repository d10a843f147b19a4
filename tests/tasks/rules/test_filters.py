from __future__ import annotations

from typing import Any

import pytest

from tasks.domain import Offer
from tasks.rules.filters import RULES, Want, driver_number, funnel, refusals, survivors
from tests.tasks.pretend import recipe

GOOD: dict[str, Any] = {
    "id": 1,
    "machine_id": 35101,
    "gpu_name": "RTX PRO 6000 WS",
    "num_gpus": 1,
    "gpu_ram_mb": 97_887,
    "compute_cap": 1200,
    "cpu_arch": "amd64",
    "cuda_max_good": 13.0,
    "driver_version": "580.95.05",
    "disk_space_gb": 1480,
    "dph_total_usd": 1.12,
    "dph_base_usd": 1.0678,
    "storage_usd_gb_month": 0.15,
    "inet_down_mbps": 812,
    "inet_up_mbps": 640,
    "reliability": 0.974,
    "verified": True,
    "rentable": True,
    "country": "DE",
    "geolocation": "Bavaria, DE",
    "duration_s": 1_814_400,
    "host_memory_gb": 128,
}


def _offer(**changes: Any) -> Offer:
    return Offer(**{**GOOD, **changes})


def _want(**changes: Any) -> Want:
    box = recipe(box=changes.pop("box", {})).box
    return Want(**{"box": box, "needed_s": 10 * 3600, "max_usd": 30.0, "run_usd": {1: 20.0}, **changes})


def test_a_good_offer_passes_every_rule() -> None:
    assert refusals(_offer(), _want()) == ()


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("memory", {"gpu_ram_mb": 24_000}),
        ("memory", {"gpu_ram_mb": 143_771}),
        ("compute capability", {"gpu_name": "H100 NVL", "gpu_ram_mb": 95_830, "compute_cap": 900}),
        ("compute capability", {"compute_cap": None}),
        ("architecture", {"cpu_arch": "arm64"}),
        ("architecture", {"cpu_arch": None}),
        ("GPU count", {"num_gpus": 2}),
        ("rentable", {"rentable": False}),
        ("verified", {"verified": False}),
        ("CUDA", {"cuda_max_good": 12.8}),
        ("CUDA", {"cuda_max_good": None}),
        ("driver", {"driver_version": "570.172.08"}),
        ("driver", {"driver_version": "580.9.01"}),
        ("driver", {"driver_version": None}),
        ("driver", {"driver_version": "unknown"}),
        ("disk", {"disk_space_gb": 249}),
        ("host memory", {"host_memory_gb": 64}),
        ("price", {"dph_total_usd": 1.31, "dph_base_usd": None}),
        ("price", {"dph_total_usd": 1.29, "dph_base_usd": 1.28}),
        ("downlink", {"inet_down_mbps": 128}),
        ("downlink", {"inet_down_mbps": None}),
        ("uplink", {"inet_up_mbps": 61}),
        ("uplink", {"inet_up_mbps": None}),
        ("reliability", {"reliability": 0.949}),
        ("reliability", {"reliability": None}),
        ("duration", {"duration_s": 15 * 3600}),
        ("duration", {"duration_s": None}),
    ],
)
def test_each_rule_removes_what_it_is_for_and_nothing_else_does(rule: str, changes: dict[str, Any]) -> None:
    found = refusals(_offer(**changes), _want())
    assert [refusal.rule for refusal in found] == [rule]
    assert found[0].sentence.startswith("offer 1: ")


@pytest.mark.parametrize(("country", "passes"), [("DE", True), ("US", False), (None, False)])
def test_a_wanted_country_must_be_stated(country: str | None, passes: bool) -> None:
    found = refusals(_offer(country=country), _want(box={"countries": ["DE", "FI"]}))
    assert [refusal.rule for refusal in found] == ([] if passes else ["country"])


def test_without_wanted_countries_any_or_none_will_do() -> None:
    assert refusals(_offer(country=None, geolocation=None), _want()) == ()


def test_host_memory_that_is_not_stated_is_left_to_the_first_login() -> None:
    assert refusals(_offer(host_memory_gb=None), _want()) == ()


def test_a_remembered_machine_is_left_out_with_its_reason() -> None:
    found = refusals(_offer(), _want(bad_machines={35101: "import probe failed"}))
    assert [refusal.sentence for refusal in found] == ["offer 1: machine 35101 is left out: import probe failed"]


def test_a_run_dearer_than_the_budget_is_refused_whatever_its_hourly_price() -> None:
    assert [refusal.rule for refusal in refusals(_offer(), _want(run_usd={1: 31.0}))] == ["run cost"]


def test_a_reliability_of_99_percent_removes_the_cheap_tier_and_the_funnel_says_so() -> None:
    offers = [_offer(id=number, dph_total_usd=1 + number / 100, dph_base_usd=None) for number in range(1, 6)]
    counts = {count.rule: count for count in funnel(offers, _want(box={"min_reliability": 0.99}, run_usd={}))}
    assert counts["reliability"].removed == 5
    assert counts["reliability"].cheapest_lost_usd == pytest.approx(1.01)
    assert "min_reliability" in counts["reliability"].loosen
    assert sum(count.removed for count in counts.values()) == 5


def test_an_offer_with_two_faults_counts_for_both_and_is_nobodys_cheapest() -> None:
    counts = {count.rule: count for count in funnel([_offer(inet_up_mbps=1, verified=False)], _want())}
    assert counts["uplink"].removed == counts["verified"].removed == 1
    assert counts["uplink"].cheapest_lost_usd is None and counts["verified"].cheapest_lost_usd is None


def test_survivors_are_the_offers_that_nothing_refuses() -> None:
    good, bad = _offer(), _offer(id=2, verified=False)
    assert survivors([good, bad], _want()) == [good]


def test_every_rule_tells_its_reason_and_how_to_loosen_it() -> None:
    assert all(rule.refuses.__doc__ and rule.loosen for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize(
    ("text", "number"),
    [("580.95.05", 580095005), ("580", 580000000), ("610.1", 610001000), ("", None), (None, None), ("58x.1", None)],
)
def test_driver_versions_compare_as_numbers(text: str | None, number: int | None) -> None:
    assert driver_number(text) == number


def test_as_text_an_older_driver_would_win() -> None:
    assert "580.9.1" > "580.65.06"
    older, newer = driver_number("580.9.1"), driver_number("580.65.06")
    assert older is not None and newer is not None and older < newer
