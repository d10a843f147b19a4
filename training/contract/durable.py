"""How often a checkpoint is sent to the bucket. Saving one on the box costs nothing; sending one costs bytes and a little of each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

LOSSES_PER_H = 0.02
"""Boxes lost per hour that they run, hosts that vanish and failures together: one in two days."""
BID_LOSSES_PER_H = 0.2
"""The same for a box that others can outbid."""
STEP_HURT = 0.03
"""Share by which a step is longer while a checkpoint is sent: the bound that training.box.benchmark holds the transfers to."""
MAX_S = 3600.0
"""However cheap the work of an hour is, people mind losing more."""


@dataclass(frozen=True)
class Interval:
    """Seconds from the beginning of one upload to the beginning of the next."""

    seconds: float
    at_risk_usd: float
    """What a box lost at the worst moment takes along: the training of one interval and of the upload under way."""
    sentence: str


def durable_interval(
    *,
    size_bytes: int,
    uplink_mbps: float | None,
    dph_usd: float,
    up_usd_gb: float = 0.0,
    losses_per_h: float = LOSSES_PER_H,
    save_s: float = 0.0,
) -> Interval:
    """The interval T that costs least.

    A box lost takes half an interval of training with it on average, which is losses_per_h x dph_usd x T/2 dollars an hour. An upload costs
    C = the steps it slows (STEP_HURT x its hours x dph_usd) + its GB x up_usd_gb, which is C/T dollars an hour. The sum is least at
    T = sqrt(2 C / (losses_per_h x dph_usd)), in hours.
    T is never below the time of one upload, since they follow each other, nor below `save_s` (seconds between two saves), and never above
    MAX_S unless one of these two is. While `uplink_mbps` is not known every save is sent: the first one measures it.
    """
    if uplink_mbps is None or uplink_mbps <= 0:
        return Interval(save_s, save_s / 3600 * dph_usd, "every save, until the uplink has been measured")
    upload_s = size_bytes * 8 / 1e6 / uplink_mbps
    cost_usd = STEP_HURT * upload_s / 3600 * dph_usd + size_bytes / 1e9 * up_usd_gb
    loss_usd_h2 = losses_per_h * dph_usd / 2
    best_s = 3600 * math.sqrt(cost_usd / loss_usd_h2) if loss_usd_h2 > 0 else 0.0
    seconds = max(upload_s, save_s, min(best_s, MAX_S))
    at_risk_usd = (seconds + upload_s) / 3600 * dph_usd
    limit = {upload_s: "as fast as the uplink lets them follow", save_s: "every save"}.get(seconds, "")
    limit = limit or (f"at most {MAX_S:.0f} s" if seconds == MAX_S else "the cheapest")
    return Interval(
        seconds,
        at_risk_usd,
        f"a checkpoint of {size_bytes / 1e9:.3g} GB every {seconds:.0f} s ({limit}): {upload_s:.0f} s to send at {_rate(uplink_mbps)} Mbps"
        f" and ${cost_usd:.3f}; at most ${at_risk_usd:.2f} of training at risk",
    )


def _rate(mbps: float) -> str:
    return f"{mbps:,.0f}" if mbps >= 100 else f"{mbps:.3g}"
