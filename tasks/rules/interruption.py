"""Whether a run may stay on its box: by the market's row, the price, the end of the contract, and the run's own budget. No clock, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tasks.domain import Instance
from tasks.rules.pricing import money
from training.contract.recipe import Budget

# A host that the market cannot see may be back in a moment, with a runner that has gone on training; meanwhile nothing is billed.
OUT_OF_SIGHT_S = 120.0
# More than a tenth of a budget is not kept back for the last save, however slow the uplink.
_RESERVE_SHARE = 0.1
_OUT_OF_SIGHT = {"offline", "unknown"}
_OVER = {"exited", "stopped", "frozen"}


@dataclass(frozen=True)
class Loss:
    """Why the box is lost; `blame` and `fault` as of a BoxError."""

    sentence: str
    blame: Literal["host", "other"]
    fault: str = ""


def lost_by_row(
    row: Instance | None, *, now: float, silent_s: float, out_of_sight_s: float = OUT_OF_SIGHT_S
) -> Loss | None:
    """What the market's row says of a box that has not answered for `silent_s`; None while it may come back. `row` None: the market has no such box."""
    if row is None:
        return Loss("the market no longer has it", "host")
    if row.taken_back or row.actual_status in _OVER:
        return _taken_back(row, now)
    if row.actual_status in _OUT_OF_SIGHT and silent_s >= out_of_sight_s:
        return Loss(f"has not answered for {silent_s:.0f} s and the market says '{row.actual_status}'", "host")
    return None


def _taken_back(row: Instance, now: float) -> Loss:
    if row.end_date is not None and row.end_date <= now:
        return Loss("its contract has ended", "other", "contract")
    if row.taken_back and row.is_bid:
        return Loss("outbid", "other", "outbid")
    return Loss(f"does not answer and the market says '{row.actual_status}'", "host")


def contract_ending(end_date: float | None, *, now: float, save_s: float, rest_s: float) -> str:
    """Why to save and leave now: the host takes the box back before there is time to do it later. Empty to stay, if nothing is left to train
    (what is left to upload is being uploaded), or if the market does not say."""
    if end_date is None or rest_s <= 0 or end_date - now > save_s:
        return ""
    return f"its contract ends in {max(0.0, end_date - now):.0f} s, and saving takes up to {save_s:.0f} s"


def price_rise(
    agreed_usd: float,
    seen_usd: float,
    *,
    cap_usd: float,
    rest_s: float,
    spent_usd: float,
    max_usd: float,
    elsewhere_usd: float | None,
) -> str:
    """Why a box whose $/h has risen is not worth it any more; empty to stay.

    `cap_usd` is box.max_dph_usd, `rest_s` what is left to train at this box's pace, `elsewhere_usd` what another box would take for the rest
    (None: there is no other). A rise that the budget bears is borne: moving pays for boot, install and prefetch once more.
    """
    if seen_usd <= agreed_usd * 1.001:
        return ""
    rose = f"its price rose from ${agreed_usd:.3f}/h to ${seen_usd:.3f}/h"
    if seen_usd > cap_usd + 1e-6:
        return f"{rose}, box.max_dph_usd = ${cap_usd:.2f}"
    here_usd = seen_usd * rest_s / 3600
    if elsewhere_usd is not None and spent_usd + here_usd > max_usd >= spent_usd + elsewhere_usd:
        return (
            f"{rose}: {money(spent_usd)} spent, the rest takes {money(here_usd)} here and {money(elsewhere_usd)} on another box, "
            f"budget.max_usd = ${max_usd:.2f}"
        )
    return ""


def money_over(budget: Budget, *, spent_usd: float, dph_usd: float, save_s: float) -> str:
    """Why the run must save and end now: what is spent and what saving takes come to budget.max_usd. Empty if it may go on."""
    reserve_usd = min(dph_usd * save_s / 3600, _RESERVE_SHARE * budget.max_usd)
    if spent_usd + reserve_usd < budget.max_usd:
        return ""
    saving = f", and saving takes about {money(reserve_usd)}" if reserve_usd else ""
    return f"spent about ${spent_usd:.4f} of budget.max_usd = {money(budget.max_usd)}{saving}"


def time_over(budget: Budget, *, now: float, deadline: float, save_s: float) -> str:
    """The same for budget.max_hours, which end at `deadline`."""
    reserve_s = min(save_s, _RESERVE_SHARE * budget.max_hours * 3600)
    if now + reserve_s < deadline:
        return ""
    left = max(0.0, deadline - now)
    return f"budget.max_hours = {budget.max_hours:g} is over" + (
        f" in {left:.0f} s, which saving takes" if left else ""
    )
