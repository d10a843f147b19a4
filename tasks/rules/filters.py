"""Which offers will do. Every rule has a name, a lesson behind it and a way to loosen it, so that an empty result can be explained.

The market's own filters are best effort, so each rule is applied to the reply. A fact that an offer does not state counts against
it, except where the first login measures it before anything big is downloaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tasks.domain import FilterCount, Offer
from tasks.errors import UserError
from tasks.rules.pricing import MAX_DOWN_MBPS, dph_at_disk, mbps_for
from tasks.rules.tiers import TIERS
from training.contract.recipe import Box, Recipe

DURATION_MARGIN_S = 6 * 3600


@dataclass(frozen=True)
class Want:
    """What an offer is held against."""

    box: Box
    needed_s: float = 0.0
    """How long the box is needed by plan."""
    prefetch_mbps: float = 0.0
    """What the base model needs to be there within budget.prefetch_s."""
    upload_mbps: float = 0.0
    """What a checkpoint needs to be durable within budget.upload_s."""
    bad_machines: Mapping[int, str] = field(default_factory=dict)
    """Machine ids and why they are left out."""
    no_room: Mapping[int, str] = field(default_factory=dict)
    """Offer ids and why a 4-bit base does not fit there."""
    max_usd: float | None = None
    run_usd: Mapping[int, float] = field(default_factory=dict)
    """Dollars of the whole run by offer id."""

    @property
    def down_floor_mbps(self) -> float:
        return max(self.box.min_inet_down_mbps, self.prefetch_mbps)

    @property
    def up_floor_mbps(self) -> float:
        return max(self.box.min_inet_up_mbps, self.upload_mbps)


@dataclass(frozen=True)
class Rule:
    name: str
    refuses: Callable[[Offer, Want], str | None]
    """The sentence against an offer: what was seen and what is wanted; None if it passes."""
    loosen: str
    fixed: bool = False
    """No setting loosens it, so it is never advised."""


@dataclass(frozen=True)
class Refusal:
    rule: str
    sentence: str


@dataclass(frozen=True)
class Sifted:
    passed: tuple[Offer, ...]
    counts: tuple[FilterCount, ...]
    """One a rule, in the rules' order."""
    advice: str
    """Which single rule to loosen, when nothing passed."""


def refusals(offer: Offer, want: Want) -> tuple[Refusal, ...]:
    """Every rule that is against this offer; empty = it will do."""
    return tuple(
        Refusal(rule.name, f"offer {offer.id}: {sentence}") for rule in RULES if (sentence := rule.refuses(offer, want))
    )


def sift(offers: Sequence[Offer], want: Want) -> Sifted:
    """The offers that will do, and of each rule what it removes and what leaving it out would give.

    `removed` counts a rule applied alone, so the counts overlap: one floor of 0.99 for reliability once removed nearly every cheap
    offer, and only a count per rule shows it. `alone` counts the offers that nothing else stands against: those that come back when
    this one rule is loosened.
    """
    against = [(offer, refusals(offer, want)) for offer in offers]
    removed: dict[str, list[Offer]] = {rule.name: [] for rule in RULES}
    alone: dict[str, list[tuple[Offer, Refusal]]] = {rule.name: [] for rule in RULES}
    for offer, found in against:
        for refusal in found:
            removed[refusal.rule].append(offer)
        if len(found) == 1:
            alone[found[0].rule].append((offer, found[0]))
    counts = tuple(_count(rule, removed[rule.name], alone[rule.name], want) for rule in RULES)
    passed = tuple(offer for offer, found in against if not found)
    return Sifted(passed, counts, "" if passed or not offers else _advice(counts, against, want))


def require_consistent(recipe: Recipe) -> None:
    """UserError for wishes that no offer can meet together, or that a box would fail after it was rented."""
    box, budget = recipe.box, recipe.budget
    driver = driver_number(box.min_driver)
    if driver is None:
        raise UserError(f"box.min_driver: seen '{box.min_driver}', want a driver's version such as 580.65.06")
    image_cuda = re.search(r"cuda(\d+\.\d+)", box.image)
    if box.device == "cuda" and image_cuda and _cuda_number(float(image_cuda[1])) > _cuda_number(box.min_cuda):
        raise UserError(
            f"box.min_cuda: {box.min_cuda:g}, but box.image has CUDA {image_cuda[1]}: a box that passes would end in error 803; "
            f"want min_cuda: {image_cuda[1]} or an image with an older CUDA"
        )
    for cuda, needed in _DRIVER_OF_CUDA:
        if _cuda_number(box.min_cuda) >= _cuda_number(cuda) and driver < (driver_number(needed) or 0):
            raise UserError(
                f"box.min_driver: {box.min_driver} is older than {needed}, the first driver for CUDA {cuda:g} (box.min_cuda: {box.min_cuda:g}); raise it or lower min_cuda"
            )
    if recipe.model.size_gb > box.disk_gb:
        raise UserError(
            f"box.disk_gb: {box.disk_gb}, but the model alone has {recipe.model.size_gb:g} GB (model.size_gb)"
        )
    if box.min_disk_free_gb is not None and box.min_disk_free_gb > box.disk_gb:
        raise UserError(
            f"box.min_disk_free_gb: {box.min_disk_free_gb:g} can never be free on a disk of box.disk_gb = {box.disk_gb}"
        )
    needed_mbps = mbps_for(recipe.model.size_gb, budget.prefetch_s)
    if needed_mbps > MAX_DOWN_MBPS:
        raise UserError(
            f"budget.prefetch_s: {recipe.model.size_gb:g} GB in {budget.prefetch_s} s are {needed_mbps:.0f} Mbps, and one box gets at most "
            f"{MAX_DOWN_MBPS:.0f}; want at least {math.ceil(recipe.model.size_gb * 8_000 / MAX_DOWN_MBPS)} s"
        )


# The first driver branch of each CUDA: table 3 of NVIDIA's CUDA toolkit release notes.
_DRIVER_OF_CUDA = ((13.0, "580.65.06"), (12.0, "525.60.13"))


def _count(rule: Rule, removed: list[Offer], alone: list[tuple[Offer, Refusal]], want: Want) -> FilterCount:
    gained = min(alone, key=lambda pair: _rank_usd(pair[0], want), default=None)
    return FilterCount(
        rule=rule.name,
        removed=len(removed),
        cheapest_removed_usd=min((dph_at_disk(offer, want.box.disk_gb) for offer in removed), default=None),
        alone=len(alone),
        cheapest_lost_usd=dph_at_disk(gained[0], want.box.disk_gb) if gained else None,
        gain_run_usd=_finite(want.run_usd.get(gained[0].id)) if gained else None,
        gain=gained[1].sentence if gained else "",
        loosen=rule.loosen,
    )


def _advice(counts: Sequence[FilterCount], against: Sequence[tuple[Offer, tuple[Refusal, ...]]], want: Want) -> str:
    """The one rule whose loosening gives the cheapest run; or how near the nearest offer is when one alone is not enough."""
    single = [count for count, rule in zip(counts, RULES, strict=True) if count.alone and not rule.fixed]
    if single:
        best = min(single, key=lambda count: math.inf if count.gain_run_usd is None else count.gain_run_usd)
        run = "" if best.gain_run_usd is None else f"${best.gain_run_usd:.2f} for the run, "
        offers = "1 offer" if best.alone == 1 else f"{best.alone} offers"
        return f"loosen {best.rule} ({best.loosen}): gives {offers}, the best at {run}${best.cheapest_lost_usd or 0:.3f}/h; {best.gain}"
    _, found = min(against, key=lambda pair: (len(pair[1]), _rank_usd(pair[0], want)))
    stand = "1 stands" if len(found) == 1 else f"{len(found)} stand"
    return f"no single filter gives an offer; {stand} against the nearest: {'; '.join(one.sentence for one in found)}"


def _rank_usd(offer: Offer, want: Want) -> tuple[float, float]:
    return want.run_usd.get(offer.id, math.inf), dph_at_disk(offer, want.box.disk_gb)


def _finite(usd: float | None) -> float | None:
    return usd if usd is not None and math.isfinite(usd) else None


@lru_cache(maxsize=1024)
def driver_number(version: str | None) -> int | None:
    """`580.95.05` as the integer 580095005; None if it is no version. As text `580.9` would beat `580.65`."""
    parts = (version or "").split(".")
    if not 1 <= len(parts) <= 3 or not all(part.isdigit() for part in parts):
        return None
    major, minor, patch = (int(part) for part in [*parts, "0", "0"][:3])
    return major * 1_000_000 + minor * 1_000 + patch


def _memory(offer: Offer, want: Want) -> str | None:
    """A card is known by its memory band: the same card has half a dozen names."""
    tier = TIERS[want.box.tier]
    if tier.min_memory_mb <= offer.gpu_ram_mb <= tier.max_memory_mb:
        return None
    return f"{offer.gpu_name} has {offer.gpu_ram_mb:.0f} MB, {want.box.tier} has {tier.min_memory_mb} to {tier.max_memory_mb}"


def _compute_capability(offer: Offer, want: Want) -> str | None:
    """The band of the RTX PRO 6000 also holds the H100 NVL, the H20 and the GH200, which need other kernels."""
    wanted = TIERS[want.box.tier].compute_cap
    return None if offer.compute_cap == wanted else f"compute capability {offer.compute_cap}, want {wanted}"


def _architecture(offer: Offer, want: Want) -> str | None:
    """A GH200 is arm64: no wheel of ours runs there."""
    wanted = TIERS[want.box.tier].cpu_arch
    return None if offer.cpu_arch == wanted else f"processor {offer.cpu_arch}, want {wanted}"


def _gpu_count(offer: Offer, want: Want) -> str | None:
    """A card too many is paid for and stands idle; with one too few the base has no room."""
    wanted = want.box.gpus
    return None if offer.num_gpus == wanted else f"{offer.num_gpus} GPUs, want {wanted}"


def _price(offer: Offer, want: Want) -> str | None:
    """Boxes at $2.50/h were rented while others at $1.00 were listed. At the disk that will really be asked for: the search's default of 8 GB flatters."""
    dph = dph_at_disk(offer, want.box.disk_gb)
    if dph <= want.box.max_dph_usd:
        return None
    return f"${dph:.3f}/h with {want.box.disk_gb} GB, cap ${want.box.max_dph_usd:.2f}"


def _run_cost(offer: Offer, want: Want) -> str | None:
    """Bandwidth is charged per GB both ways and is in no hourly price."""
    usd = want.run_usd.get(offer.id)
    if usd is None or want.max_usd is None or usd <= want.max_usd:
        return None
    return f"${usd:.2f} for the run, budget ${want.max_usd:.2f}"


def _cuda(offer: Offer, want: Want) -> str | None:
    """Compared as integers, as the driver itself reports it: 13000 for 13.0."""
    if offer.cuda_max_good is not None and _cuda_number(offer.cuda_max_good) >= _cuda_number(want.box.min_cuda):
        return None
    return f"CUDA up to {offer.cuda_max_good}, want {want.box.min_cuda}"


def _driver(offer: Offer, want: Want) -> str | None:
    """An older driver ends in error 803 after the download. The newer one is no proof, so the box is probed as well."""
    seen, wanted = driver_number(offer.driver_version), driver_number(want.box.min_driver)
    if wanted is None or (seen is not None and seen >= wanted):
        return None
    return f"driver {offer.driver_version}, want {want.box.min_driver}"


def _disk(offer: Offer, want: Want) -> str | None:
    """The offer's disk is the most that may be asked for, and it cannot be enlarged later."""
    if offer.disk_space_gb >= want.box.disk_gb:
        return None
    return f"disk of at most {offer.disk_space_gb:.0f} GB, want {want.box.disk_gb}"


def _download(offer: Offer, want: Want) -> str | None:
    """A card at $1.30/h that waits for 67 GB earns nothing: 1,500 s for them are 360 Mbps. What is advertised is the best case."""
    floor = want.down_floor_mbps
    if (offer.inet_down_mbps or 0.0) >= floor:
        return None
    why = " (the model within budget.prefetch_s)" if want.prefetch_mbps > want.box.min_inet_down_mbps else ""
    return f"downlink {_rate(offer.inet_down_mbps)}, want {floor:.0f} Mbps{why}"


def _upload(offer: Offer, want: Want) -> str | None:
    """A host with 0.38 MB/s up held a finished checkpoint of 7 GB for five hours; what is not uploaded is lost with the box."""
    floor = want.up_floor_mbps
    if (offer.inet_up_mbps or 0.0) >= floor:
        return None
    why = " (a checkpoint within budget.upload_s)" if want.upload_mbps > want.box.min_inet_up_mbps else ""
    return f"uplink {_rate(offer.inet_up_mbps)}, want {floor:.0f} Mbps{why}"


def _country(offer: Offer, want: Want) -> str | None:
    """Advertised bandwidth is to a server nearby; across an ocean a fifth of it was left. A place that is not stated is not near."""
    if not want.box.countries or offer.country in want.box.countries:
        return None
    return f"country {offer.country or 'not stated'} ({offer.geolocation}), want {', '.join(want.box.countries)}"


def _reliability(offer: Offer, want: Want) -> str | None:
    """0.95 keeps out the hosts that vanish; 0.99 keeps out nearly everybody else too."""
    if offer.reliability is not None and offer.reliability >= want.box.min_reliability:
        return None
    return f"reliability {offer.reliability}, want {want.box.min_reliability}"


def _duration(offer: Offer, want: Want) -> str | None:
    """A host may withdraw the box when its offer ends, trained or not."""
    wanted_s = want.needed_s + DURATION_MARGIN_S
    if offer.duration_s is not None and offer.duration_s >= wanted_s:
        return None
    seen = "not stated" if offer.duration_s is None else f"{offer.duration_s / 3600:.1f} h"
    return f"offered for {seen}, want {wanted_s / 3600:.1f} h"


def _verified(offer: Offer, want: Want) -> str | None:
    """The market's verification promises little, but its absence means that nobody looked."""
    return None if offer.verified else "the market has not verified this machine"


def _rentable(offer: Offer, want: Want) -> str | None:
    """The market's filter for boxes in use has been seen to do nothing."""
    return None if offer.rentable else "not for rent at the moment"


def _host_memory(offer: Offer, want: Want) -> str | None:
    """Weights pass through the page cache. Many hosts do not state their cores, hence our share: the first login measures it."""
    if offer.host_memory_gb is None or offer.host_memory_gb >= want.box.min_host_memory_gb:
        return None
    return f"{offer.host_memory_gb:.0f} GB of host memory for us, want {want.box.min_host_memory_gb:.0f}"


def _room(offer: Offer, want: Want) -> str | None:
    """A base that finds no room is told after half an hour of download, and no floor that is lowered makes any."""
    return want.no_room.get(offer.id)


def _remembered(offer: Offer, want: Want) -> str | None:
    """The cheapest box stays the cheapest after it has failed: without a memory it is rented again and again."""
    reason = want.bad_machines.get(offer.machine_id)
    return None if reason is None else f"machine {offer.machine_id} is left out: {reason}"


RULES: tuple[Rule, ...] = (
    Rule("memory", _memory, "take another box.tier", fixed=True),
    Rule("compute capability", _compute_capability, "take another box.tier", fixed=True),
    Rule("architecture", _architecture, "no setting: packages are for one", fixed=True),
    Rule("GPU count", _gpu_count, "change box.gpus (a 4-bit base alone takes several)", fixed=True),
    Rule("rentable", _rentable, "wait for the box to become free"),
    Rule("verified", _verified, "no setting: never rented", fixed=True),
    Rule("CUDA", _cuda, "lower box.min_cuda (the image must agree)"),
    Rule("driver", _driver, "lower box.min_driver (the image must agree)"),
    Rule("disk", _disk, "lower box.disk_gb"),
    Rule("host memory", _host_memory, "lower box.min_host_memory_gb"),
    Rule("4-bit base", _room, "change box.gpus or box.tier, or take smaller micro-batches", fixed=True),
    Rule("price", _price, "raise box.max_dph_usd"),
    Rule("run cost", _run_cost, "raise budget.max_usd, or train fewer steps"),
    Rule("downlink", _download, "lower box.min_inet_down_mbps or raise budget.prefetch_s"),
    Rule("uplink", _upload, "lower box.min_inet_up_mbps or raise budget.upload_s"),
    Rule("country", _country, "widen box.countries, or write [] for anywhere"),
    Rule("reliability", _reliability, "lower box.min_reliability"),
    Rule("duration", _duration, "train fewer steps in one run"),
    Rule("remembered", _remembered, "delete hosts/<machine id>.json in the bucket"),
)


def _cuda_number(version: float) -> int:
    return round(version * 1000)


def _rate(mbps: float | None) -> str:
    return "not stated" if mbps is None else f"{mbps:.0f} Mbps"
