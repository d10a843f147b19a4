from __future__ import annotations

from typing import Any

import pytest

from tasks.domain import Offer
from tasks.errors import UserError
from tasks.recipes import load_recipe, shipped
from tasks.rules.filters import RULES, Want, driver_number, refusals, require_consistent, sift
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
    if gpus := changes.pop("gpus", None):
        box = box.model_copy(update={"gpus": gpus})
    return Want(**{"box": box, "needed_s": 10 * 3600, "max_usd": 30.0, "run_usd": {1: 20.0}, **changes})


def test_a_good_offer_passes_every_rule() -> None:
    assert refusals(_offer(), _want()) == ()


# What was paid for without the rule → (rule, what differs from the good offer, what differs in the wish).
LESSONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a name says little: half the memory under the same name": ("memory", {"gpu_ram_mb": 48_000}, {}),
    "a name says little: an H200 is no RTX PRO 6000": ("memory", {"gpu_ram_mb": 143_771}, {}),
    "an H100 NVL lies in the memory band of another card": (
        "compute capability",
        {"gpu_name": "H100 NVL", "gpu_ram_mb": 95_830, "compute_cap": 900},
        {},
    ),
    "a capability that is not stated is not the right one": ("compute capability", {"compute_cap": None}, {}),
    "a GH200 has the memory and runs no wheel of ours": ("architecture", {"cpu_arch": "arm64"}, {}),
    "an architecture that is not stated is not ours": ("architecture", {"cpu_arch": None}, {}),
    "a second card stands idle and is billed": ("GPU count", {"num_gpus": 2}, {}),
    "a base dealt out to four cards has no room on two": ("GPU count", {"num_gpus": 2}, {"gpus": 4}),
    "an RTX 6000 Ada is no RTX PRO 6000, whatever its memory is said to be": (
        "compute capability",
        {"compute_cap": 890},
        {},
    ),
    "a 4-bit base with no room is told after half an hour of download": (
        "4-bit base",
        {},
        {"no_room": {1: "no room for the 4-bit base: host: 132.1 GB of host memory, the box has 129.0"}},
    ),
    "the market's own filter for rented boxes does nothing": ("rentable", {"rentable": False}, {}),
    "nobody looked at an unverified machine": ("verified", {"verified": False}, {}),
    "a host that tops out below the image's CUDA fails with error 803": ("CUDA", {"cuda_max_good": 12.8}, {}),
    "a CUDA that is not stated is not enough": ("CUDA", {"cuda_max_good": None}, {}),
    "an old driver rents fine and fails CUDA init with error 803": ("driver", {"driver_version": "570.172.08"}, {}),
    "as text 580.9 would beat 580.65": ("driver", {"driver_version": "580.9.01"}, {}),
    "a driver that is not stated is too old": ("driver", {"driver_version": None}, {}),
    "a driver that is no version is too old": ("driver", {"driver_version": "unknown"}, {}),
    "a disk cannot be enlarged later": ("disk", {"disk_space_gb": 249}, {}),
    "weights pass through the page cache": ("host memory", {"host_memory_gb": 64}, {}),
    "a box at $2.50 was rented while others at $1.00 were listed": (
        "price",
        {"dph_total_usd": 2.50, "dph_base_usd": None},
        {},
    ),
    "the disk that will be asked for is in the price": ("price", {"dph_total_usd": 1.29, "dph_base_usd": 1.28}, {}),
    "bandwidth by the GB is in no hourly price": ("run cost", {}, {"run_usd": {1: 31.0}}),
    "a slow downlink lets the card wait for 67 GB": ("downlink", {"inet_down_mbps": 128}, {}),
    "67 GB within 1500 s want 357 Mbps, whatever the floor says": (
        "downlink",
        {"inet_down_mbps": 300},
        {"prefetch_mbps": 357.0},
    ),
    "a downlink that is not stated is none": ("downlink", {"inet_down_mbps": None}, {}),
    "a host with 0.38 MB/s up held a checkpoint for five hours": ("uplink", {"inet_up_mbps": 3}, {}),
    "a checkpoint within its budget wants more than the floor": (
        "uplink",
        {"inet_up_mbps": 250},
        {"upload_mbps": 300.0},
    ),
    "an uplink that is not stated is none": ("uplink", {"inet_up_mbps": None}, {}),
    "a host in America gave a bucket in Europe 30 of its 167 Mbps": (
        "country",
        {"country": "US", "geolocation": "California, US"},
        {"box": {"countries": ["DE", "FI"]}},
    ),
    "a place that is not stated is not near": (
        "country",
        {"country": None, "geolocation": None},
        {"box": {"countries": ["DE"]}},
    ),
    "below 0.95 are the hosts that vanish": ("reliability", {"reliability": 0.949}, {}),
    "a reliability that is not stated is none": ("reliability", {"reliability": None}, {}),
    "a host takes its box back when its offer ends": ("duration", {"duration_s": 15 * 3600}, {}),
    "an end that is not stated may be now": ("duration", {"duration_s": None}, {}),
    "the cheapest box is still the cheapest after it has failed": (
        "remembered",
        {},
        {"bad_machines": {35101: "import probe failed"}},
    ),
}


@pytest.mark.parametrize("lesson", LESSONS)
def test_each_lesson_is_kept_by_its_rule_and_by_no_other(lesson: str) -> None:
    rule, changes, wish = LESSONS[lesson]
    found = refusals(_offer(**changes), _want(**wish))
    assert [refusal.rule for refusal in found] == [rule]
    assert found[0].sentence.startswith("offer 1: ")


def test_every_rule_has_a_lesson() -> None:
    assert {rule for rule, _, _ in LESSONS.values()} == {rule.name for rule in RULES}


def test_without_wanted_countries_any_or_none_will_do() -> None:
    assert refusals(_offer(country=None, geolocation=None), _want()) == ()


def test_host_memory_that_is_not_stated_is_left_to_the_first_login() -> None:
    assert refusals(_offer(host_memory_gb=None), _want()) == ()


def test_a_floor_that_comes_from_a_budget_says_so() -> None:
    found = refusals(_offer(inet_down_mbps=300), _want(prefetch_mbps=357.3))
    assert found[0].sentence == "offer 1: downlink 300 Mbps, want 357 Mbps (the model within budget.prefetch_s)"


def test_a_reliability_of_99_percent_removes_the_cheap_tier_and_the_funnel_says_so() -> None:
    offers = [_offer(id=number, dph_total_usd=1 + number / 100, dph_base_usd=None) for number in range(1, 6)]
    counts = {count.rule: count for count in sift(offers, _want(box={"min_reliability": 0.99}, run_usd={})).counts}
    assert counts["reliability"].removed == counts["reliability"].alone == 5
    assert counts["reliability"].cheapest_lost_usd == pytest.approx(1.01)
    assert "min_reliability" in counts["reliability"].loosen
    assert sum(count.removed for count in counts.values()) == 5


def test_an_offer_with_two_faults_is_lost_to_both_and_comes_back_by_neither() -> None:
    counts = {count.rule: count for count in sift([_offer(inet_up_mbps=1, verified=False)], _want()).counts}
    for rule in ("uplink", "verified"):
        assert (counts[rule].removed, counts[rule].alone) == (1, 0)
        assert counts[rule].cheapest_removed_usd == pytest.approx(1.12) and counts[rule].cheapest_lost_usd is None


def test_offers_that_nothing_refuses_pass_and_need_no_advice() -> None:
    good, bad = _offer(), _offer(id=2, verified=False)
    sifted = sift([good, bad], _want())
    assert sifted.passed == (good,) and sifted.advice == ""


def test_an_empty_market_names_the_single_filter_whose_loosening_gives_the_cheapest_run() -> None:
    offers = [
        _offer(id=1, inet_up_mbps=61, dph_total_usd=0.9, dph_base_usd=None),
        _offer(id=2, reliability=0.93, dph_total_usd=0.8, dph_base_usd=None),
        _offer(id=3, reliability=0.92),
        _offer(id=4, reliability=0.5, verified=False, dph_total_usd=0.1, dph_base_usd=None),
    ]
    # The cheaper hour is the dearer run.
    advice = sift(offers, _want(run_usd={1: 20.0, 2: 25.0, 3: 28.0, 4: 2.0})).advice
    assert advice.startswith("loosen uplink (lower box.min_inet_up_mbps")
    assert advice.endswith(
        "gives 1 offer, the best at $20.00 for the run, $0.900/h; offer 1: uplink 61 Mbps, want 200 Mbps"
    )
    assert "gives 2 offers, the best at $25.00" in sift(offers[1:], _want(run_usd={2: 25.0, 3: 28.0})).advice


def test_what_no_setting_loosens_is_never_advised() -> None:
    offers = [_offer(id=1, verified=False), _offer(id=2, inet_up_mbps=1, reliability=0.1, cuda_max_good=12.0)]
    advice = sift(offers, _want()).advice
    assert advice == (
        "no single filter gives an offer; 1 stands against the nearest: offer 1: the market has not verified this machine"
    )


def test_no_offers_at_all_leave_nothing_to_loosen() -> None:
    assert sift([], _want()).advice == ""


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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"box": {"min_driver": "new"}}, "box.min_driver: seen 'new'"),
        ({"box": {"min_driver": "570.10"}}, "box.min_driver: 570.10 is older than 580.65.06"),
        ({"box": {"min_cuda": 12.8}}, "box.min_cuda: 12.8, but box.image has CUDA 13.0"),
        ({"box": {"disk_gb": 64}}, "box.disk_gb: 64, but the model alone has 70.2 GB"),
        ({"box": {"min_disk_free_gb": 300}}, "box.min_disk_free_gb: 300 can never be free"),
        ({"budget": {"prefetch_s": 60}}, "budget.prefetch_s: 70.2 GB in 60 s are 9360 Mbps, .* want at least 281 s"),
    ],
)
def test_wishes_that_contradict_each_other_are_refused(changes: dict[str, Any], said: str) -> None:
    require_consistent(recipe())
    with pytest.raises(UserError, match=said) as caught:
        require_consistent(recipe(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", shipped())
def test_no_shipped_recipe_contradicts_itself(name: str) -> None:
    require_consistent(load_recipe(name))
