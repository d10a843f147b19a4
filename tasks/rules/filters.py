"""Which offers will do. Every rule has a name, a reason to be there and a way to loosen it, so that an empty result can be explained.

The market's own filters are best effort, so each rule is applied to the reply. A fact that an offer does not state counts against
it, except where the first login measures it before anything big is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tasks.domain import FilterCount, Offer
from tasks.rules.pricing import dph_at_disk
from tasks.rules.tiers import TIERS
from training.contract.recipe import Box

DURATION_MARGIN_S = 6 * 3600


@dataclass(frozen=True)
class Want:
    """What an offer is held against."""

    box: Box
    needed_s: float = 0.0
    """How long the box is needed by plan."""
    bad_machines: Mapping[int, str] = field(default_factory=dict)
    """Machine ids and why they are left out."""
    max_usd: float | None = None
    run_usd: Mapping[int, float] = field(default_factory=dict)
    """Dollars of the whole run by offer id."""


@dataclass(frozen=True)
class Rule:
    name: str
    refuses: Callable[[Offer, Want], str | None]
    """The sentence against an offer: what was seen and what is wanted; None if it passes."""
    loosen: str


@dataclass(frozen=True)
class Refusal:
    rule: str
    sentence: str


def refusals(offer: Offer, want: Want) -> tuple[Refusal, ...]:
    """Every rule that is against this offer; empty = it will do."""
    found = ((rule.name, rule.refuses(offer, want)) for rule in RULES)
    return tuple(Refusal(name, f"offer {offer.id}: {sentence}") for name, sentence in found if sentence)


def survivors(offers: Sequence[Offer], want: Want) -> list[Offer]:
    return [offer for offer in offers if not refusals(offer, want)]


def funnel(offers: Sequence[Offer], want: Want) -> tuple[FilterCount, ...]:
    """What each rule removes when it is applied alone, and the cheapest offer that nothing but it stands against.

    The counts overlap: one floor of 0.99 for reliability once removed nearly every cheap offer, and only a count per rule shows it.
    """
    against = {offer.id: {refusal.rule for refusal in refusals(offer, want)} for offer in offers}
    counts = []
    for rule in RULES:
        lost = [dph_at_disk(offer, want.box.disk_gb) for offer in offers if against[offer.id] == {rule.name}]
        counts.append(
            FilterCount(
                rule=rule.name,
                removed=sum(rule.name in names for names in against.values()),
                cheapest_lost_usd=min(lost, default=None),
                loosen=rule.loosen,
            )
        )
    return tuple(counts)


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
    """A second card is paid for and stands idle."""
    wanted = TIERS[want.box.tier].num_gpus
    return None if offer.num_gpus == wanted else f"{offer.num_gpus} GPUs, want {wanted}"


def _price(offer: Offer, want: Want) -> str | None:
    """At the disk that will really be asked for: the search's default of 5 or 8 GB flatters a box with 250."""
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
    wanted = round(want.box.min_cuda * 1000)
    if offer.cuda_max_good is not None and round(offer.cuda_max_good * 1000) >= wanted:
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
    """A card at $1.30/h that waits for 67 GB earns nothing; advertised rates are best cases, so this is a floor."""
    if (offer.inet_down_mbps or 0.0) >= want.box.min_inet_down_mbps:
        return None
    return f"downlink {_rate(offer.inet_down_mbps)}, want {want.box.min_inet_down_mbps:.0f} Mbps"


def _upload(offer: Offer, want: Want) -> str | None:
    """At 61 Mbps a checkpoint of 11 GB takes 24 minutes, and what is not uploaded is lost with the box."""
    if (offer.inet_up_mbps or 0.0) >= want.box.min_inet_up_mbps:
        return None
    return f"uplink {_rate(offer.inet_up_mbps)}, want {want.box.min_inet_up_mbps:.0f} Mbps"


def _country(offer: Offer, want: Want) -> str | None:
    """Advertised bandwidth is to a server nearby; across an ocean a fifth of it was left."""
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


def _remembered(offer: Offer, want: Want) -> str | None:
    """The cheapest box stays the cheapest after it has failed: without a memory it is rented again and again."""
    reason = want.bad_machines.get(offer.machine_id)
    return None if reason is None else f"machine {offer.machine_id} is left out: {reason}"


RULES: tuple[Rule, ...] = (
    Rule("memory", _memory, "box.tier"),
    Rule("compute capability", _compute_capability, "box.tier"),
    Rule("architecture", _architecture, "box.tier"),
    Rule("GPU count", _gpu_count, "box.tier"),
    Rule("rentable", _rentable, "wait for the box to become free"),
    Rule("verified", _verified, "no setting: unverified machines are never rented"),
    Rule("CUDA", _cuda, "lower box.min_cuda (the image must agree)"),
    Rule("driver", _driver, "lower box.min_driver (the image must agree)"),
    Rule("disk", _disk, "lower box.disk_gb"),
    Rule("host memory", _host_memory, "lower box.min_host_memory_gb"),
    Rule("price", _price, "raise box.max_dph_usd"),
    Rule("run cost", _run_cost, "raise budget.max_usd, or train fewer steps"),
    Rule("downlink", _download, "lower box.min_inet_down_mbps"),
    Rule("uplink", _upload, "lower box.min_inet_up_mbps"),
    Rule("country", _country, "widen or empty box.countries"),
    Rule("reliability", _reliability, "lower box.min_reliability"),
    Rule("duration", _duration, "train fewer steps in one run"),
    Rule("remembered", _remembered, "delete hosts/<machine id>.json in the bucket, or wait for its expiry"),
)


def _rate(mbps: float | None) -> str:
    return "not stated" if mbps is None else f"{mbps:.0f} Mbps"
