from __future__ import annotations

import pytest

from tasks.errors import UserError
from tasks.rules.location import EUROPE, countries_near, near_bucket
from tests.tasks.pretend import recipe

ELSEWHERE = "https://bucket.example.com"


@pytest.mark.parametrize(
    "region", ["eu-central-1", "eu-north-1", "EU-WEST-3", "weur", "fr-par", "hel1", "eu-central-003"]
)
def test_a_bucket_in_europe_wants_european_hosts(region: str) -> None:
    near, said = near_bucket(recipe(), region, None)
    assert near.box.countries == EUROPE and region in said and "DE" in said


def test_europe_is_written_out_without_the_countries_that_the_market_counts_in() -> None:
    assert not {"RU", "BY", "UA", "KZ", "GE", "US"} & set(EUROPE) and len(set(EUROPE)) == len(EUROPE)


def test_with_a_bucket_in_america_the_filter_is_off() -> None:
    near, said = near_bucket(recipe(), "us-west-2", None)
    assert near.box.countries == () and said == "location: anywhere, for a bucket in us-west-2"


@pytest.mark.parametrize(
    ("region", "country"),
    [("ap-northeast-2", "KR"), ("ap-southeast-2", "AU"), ("ap-southeast-1", "SG"), ("ap-south-1", "IN")],
)
def test_asia_is_not_one_place(region: str, country: str) -> None:
    found = countries_near(region) or ()
    assert country in found and not {"DE", "US"} & set(found)


@pytest.mark.parametrize("named", [["PL"], []])
def test_what_the_recipe_names_stands_and_an_empty_list_means_anywhere(named: list[str]) -> None:
    wanted = recipe(box={"countries": named})
    near, said = near_bucket(wanted, "eu-central-1", None)
    assert near == wanted and said.endswith("as box.countries says")


def test_a_region_nobody_knows_is_one_clear_error() -> None:
    with pytest.raises(
        UserError, match=r"LIVERY_S3_REGION: no countries are known near 'me-central-1'; .*box\.countries"
    ):
        near_bucket(recipe(), "me-central-1", None)


@pytest.mark.parametrize("region", ["", "us-east-1", "auto"])
def test_a_bucket_elsewhere_that_does_not_say_where_it_is_is_a_said_unknown(region: str) -> None:
    near, said = near_bucket(recipe(), region, ELSEWHERE)
    assert (
        near.box.countries == () and f"unknown where the bucket at {ELSEWHERE} is" in said and "box.countries" in said
    )


def test_a_bucket_elsewhere_may_say_where_it_is() -> None:
    assert near_bucket(recipe(), "eu-central-003", ELSEWHERE)[0].box.countries == EUROPE
