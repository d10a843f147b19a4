"""Where boxes may stand so that the bucket is near. Advertised bandwidth is to a server next door: 167 Mbps in America were 30 to a bucket in Europe."""

from __future__ import annotations

from tasks.errors import UserError
from training.contract.recipe import Recipe

# Written out, since the market knows no continents: its own clients expand "Europe" on their side, Russia and Belarus included.
EUROPE = (
    "AT", "BE", "BG", "CH", "CZ", "DE", "DK", "EE", "ES", "FI", "FR", "GB", "GR", "HR", "HU",
    "IE", "IS", "IT", "LT", "LU", "LV", "NL", "NO", "PL", "PT", "RO", "SE", "SI", "SK",
)  # fmt: skip
_ANYWHERE: tuple[str, ...] = ()
# By how a region's name begins, the longest first. Beside AWS's the names of common S3 services: Cloudflare, Scaleway, Hetzner, OVH, DigitalOcean.
_NEAR: dict[str, tuple[str, ...]] = {
    "us": _ANYWHERE,  # a bucket in America was reached well enough from everywhere: the filter is off
    "ca-": ("CA", "US"),
    "mx-": ("MX", "US"),
    "wnam": _ANYWHERE,
    "enam": _ANYWHERE,
    **dict.fromkeys(("eu", "weur", "eeur", "fr-", "nl-", "pl-", "fsn1", "nbg1", "hel1", "gra", "sbg", "waw", "ams", "fra", "lon"), EUROPE),
    "ap-northeast": ("JP", "KR", "TW", "HK"),
    "ap-east": ("HK", "TW", "JP"),
    "ap-southeast-2": ("AU", "NZ"),
    "ap-southeast-4": ("AU", "NZ"),
    "ap-southeast": ("SG", "MY", "TH", "VN", "ID"),
    "ap-south": ("IN",),
    "sa-": ("BR", "AR", "CL"),
}  # fmt: skip
# What servers outside AWS answer to when nobody gave them a region: says nothing about the place.
_NO_PLACE = {"", "us-east-1", "auto", "default", "garage"}


def countries_near(region: str) -> tuple[str, ...] | None:
    """Two-letter codes of countries near a bucket's region; empty = anywhere will do, None = not in the table."""
    for start in sorted(_NEAR, key=len, reverse=True):
        if region.lower().startswith(start):
            return _NEAR[start]
    return None


def near_bucket(recipe: Recipe, region: str, endpoint_url: str | None) -> tuple[Recipe, str]:
    """The recipe with box.countries settled, and the sentence that says by what.

    What the recipe names stands. UserError for a region on AWS that is not in the table; a bucket elsewhere whose region says
    nothing about its place leaves the filter off, and the sentence says that it is unknown.
    """
    named = recipe.box.countries
    if named is not None:
        return recipe, f"location: {', '.join(named) or 'anywhere'}, as box.countries says"
    if endpoint_url and region in _NO_PLACE:
        where, near = f"unknown where the bucket at {endpoint_url} is, so offers of all countries are taken", _ANYWHERE
        return _settled(recipe, near), f"location: {where}; name those near it in box.countries"
    found = countries_near(region)
    if found is None:
        raise UserError(
            f"LIVERY_S3_REGION: no countries are known near '{region}'; name them in the recipe, such as box.countries: [DE, NL], or [] for anywhere"
        )
    return _settled(recipe, found), f"location: {', '.join(found) or 'anywhere'}, for a bucket in {region}"


def _settled(recipe: Recipe, countries: tuple[str, ...]) -> Recipe:
    return recipe.model_copy(update={"box": recipe.box.model_copy(update={"countries": countries})})
