"""The frozen values that flow one way: Recipe → Plan → Offer → Lease → Box → … → Receipt. No I/O here.

Times are epoch seconds UTC, money is US dollars, rates are Mbit/s, disks are GB (10^9), GPU memory is MB as the market reports it.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from pydantic import Field

from training.contract.memory import MemoryPlan
from training.contract.model import Frozen

LABEL_PREFIX = "livery"
# A global limit of Prefect's on runs that hold a box, made by `up`; where there is none, the account's cap on $/h alone decides.
BOX_LIMIT = "rented-boxes"
# An intent of which no box was ever seen. A box has been seen to come to light hours after its create call was given up.
INTENT_OWNED_S = 86_400.0
_LABEL = re.compile(r"^livery:([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}):(\d{1,3}):(\d{10})$")


class Label(Frozen):
    """What the box carries from the create call on, enough for a stranger to reap it; at most 60 characters."""

    flow_run_id: str
    attempt: int = Field(ge=1, le=999)
    hard_end: int

    @property
    def text(self) -> str:
        return f"{LABEL_PREFIX}:{self.flow_run_id}:{self.attempt}:{self.hard_end}"

    @staticmethod
    def parse(text: str | None) -> Label | None:
        """None for a label that is not ours: such a box is never touched."""
        return _parsed(text) if text else None


@lru_cache(4096)  # a sweep asks several times for each of a thousand
def _parsed(text: str) -> Label | None:
    match = _LABEL.match(text)
    return Label(flow_run_id=match[1], attempt=int(match[2]), hard_end=int(match[3])) if match else None


class Offer(Frozen):
    """One row of a search, in our units. None means that the market did not say."""

    id: int
    """The ask to accept; changes when the offer is listed again."""
    machine_id: int
    """The stable identity, used to remember a bad machine."""
    host_id: int | None = None
    gpu_name: str
    num_gpus: int
    gpu_ram_mb: float
    compute_cap: int | None = None
    cpu_arch: str | None = None
    cuda_max_good: float | None = None
    driver_version: str | None = None
    disk_space_gb: float
    """The most that may be asked for, not what one gets."""
    dph_total_usd: float
    """GPU and the asked disk, per hour. Bandwidth is not in it."""
    dph_base_usd: float | None = None
    storage_usd_gb_month: float | None = None
    min_bid_usd: float | None = None
    inet_down_mbps: float | None = None
    inet_up_mbps: float | None = None
    inet_down_usd_gb: float = 0.0
    inet_up_usd_gb: float = 0.0
    reliability: float | None = None
    verified: bool = False
    rentable: bool = True
    country: str | None = None
    geolocation: str | None = None
    duration_s: float | None = None
    """How long the host will still rent it."""
    host_memory_gb: float | None = None
    """Our share of the machine's memory."""
    pcie_gbs: float | None = None
    """GB/s between host memory and one card, as the market measured it."""
    direct_port_count: int = 0


class FilterCount(Frozen):
    """What one filter did to the offers found."""

    rule: str
    removed: int
    """By this rule applied alone, so the counts of several rules overlap."""
    cheapest_removed_usd: float | None = None
    """$/h of the cheapest offer among them."""
    alone: int = 0
    """Of them, those that no other rule is against: what loosening this one rule would give."""
    cheapest_lost_usd: float | None = None
    """$/h of the best of these."""
    gain_run_usd: float | None = None
    """The whole run on it."""
    gain: str = ""
    """What stands against it: seen and wanted."""
    loosen: str = ""
    """What to write in the recipe to get it back."""


class RankedOffer(Frozen):
    offer: Offer
    run_usd: float
    """GPU hours, disk, boot, every GB both ways and the boxes expected to fail, for the whole run."""
    bytes_usd: float = 0.0
    """Of it, for bytes down and up."""
    sentence: str = ""


class Plan(Frozen):
    """What a run will take, computed before a cent is spent."""

    run: str
    phases: tuple[str, ...]
    done: tuple[str, ...] = ()
    """Phases already complete in the bucket."""
    steps_left: int
    memory: MemoryPlan | None = None
    hours: float
    hours_from: Literal["measured", "predicted"]
    """`measured` only if every phase's pace was."""
    phase_hours: dict[str, float] = {}
    """Hours of training of each phase that is left; `hours` has the box's way to it and its uploads as well."""
    notes: tuple[str, ...] = ()
    """Where pace, unfit boxes and places come from, and what does not fit the budget; a sentence each."""
    run_usd: float | None
    """Of the best offer; None if there is none."""
    max_usd: float
    offers: tuple[RankedOffer, ...]
    funnel: tuple[FilterCount, ...]
    found: int
    """Offers that the market returned."""
    advice: str = ""
    """Which single filter to loosen, when no offer passed."""
    credit_usd: float | None = None
    """The account's money; None if the market does not say."""


class Intent(Frozen):
    """Written before the create call, so that a box whose creation nobody heard of has an owner."""

    flow_run_id: str
    run: str
    attempt: int
    label: str
    account_id: str
    offer_id: int
    machine_id: int
    dph_usd: float
    disk_gb: int
    written_at: float
    state: Literal["written", "created", "refused", "unresolved", "destroyed"] = "written"
    instance_id: int | None = None
    also_ids: tuple[int, ...] = ()
    """Further boxes of the same call: an offer can be accepted twice."""
    reason: str = ""
    closed_at: float | None = None
    """When it was last known how it stood: its boxes seen gone, or nothing of it seen."""

    @property
    def owned_until(self) -> float:
        """Until then a box may still come to light from it, and the reaper looks out for it and counts its price."""
        return self.written_at + INTENT_OWNED_S


class Endpoint(Frozen):
    host: str
    port: int
    kind: Literal["direct", "proxy"]


class Instance(Frozen):
    """A rented box as the market lists it. Everything but the id may be missing in practice."""

    id: int
    label: str | None = None
    machine_id: int | None = None
    actual_status: str | None = None
    intended_status: str | None = None
    cur_state: str | None = None
    next_state: str | None = None
    status_msg: str | None = None
    is_bid: bool | None = None
    dph_total_usd: float | None = None
    storage_usd_hour: float | None = None
    gpu_name: str | None = None
    num_gpus: int | None = None
    gpu_ram_mb: float | None = None
    gpu_util: float | None = None
    disk_space_gb: float | None = None
    start_date: float | None = None
    end_date: float | None = None
    endpoints: tuple[Endpoint, ...] = ()
    """Direct first, proxy second; they change after a reboot, so ask again before each reconnect."""

    @property
    def taken_back(self) -> bool:
        """Outbid, out of credit, or reclaimed by its host: contract, wish and schedule all say stopped."""
        return self.cur_state == self.intended_status == self.next_state == "stopped"


class UnparsedInstance(Frozen):
    """A row that could not be read in full. It still bills, so it is counted and alarmed, never dropped."""

    id: int | None
    label: str | None
    problem: str


class Listing(Frozen):
    """All boxes of the account. Absence from it means gone only if it is complete."""

    instances: tuple[Instance, ...]
    unparsed: tuple[UnparsedInstance, ...] = ()
    account_id: str
    complete: bool
    problem: str = ""

    def of_run(self, flow_run_id: str) -> tuple[Instance, ...]:
        return tuple(
            box for box in self.instances if (label := Label.parse(box.label)) and label.flow_run_id == flow_run_id
        )


class Charge(Frozen):
    """What the market charged for one box and one kind of thing."""

    instance_id: int
    kind: Literal["gpu", "disk", "down", "up", "other"]
    usd: float
    since: float | None = None
    until: float | None = None
    """The time that it is for; None if the market does not say. Markets that book by the day date it at midnights."""
    label: str | None = None
    """The box's label, as the market remembers it."""


class Lease(Frozen):
    """The live lease, an object in the bucket: while it is live the reaper keeps the box whatever Prefect says."""

    flow_run_id: str
    run: str
    renewed_at: float
    expires_at: float
    progress_at: float | None = None
    """When the run last got anywhere: a step more, bytes more, a checkpoint, an installer's line, a step of the flow begun or ended. A flow that
    hangs goes on renewing its lease, and this stands still. None: not told."""
    hold_until: float | None = None
    """Set when a box is kept for debugging; the reaper destroys it afterwards."""
    max_age_s: float | None = None
    """How old a box of this run may become; None: as the reaper's settings say. The hard end in the label wins over both."""
    patience_s: float | None = None
    """The longest that the run itself may wait for progress; the reaper waits no shorter."""


class Box(Frozen):
    """A rented box that answers at a login: all that a task needs to reach it."""

    instance_id: int
    machine_id: int
    label: str
    run: str
    flow_run_id: str
    attempt: int
    ssh_user: str
    key_path: str
    known_hosts_path: str
    dph_usd: float
    offer: Offer
    rented_at: float


class Span(Frozen):
    """One step on one box, as the flow saw it."""

    step: str
    """`boot`, `preflight`, `install`, `prefetch`, `phase sft`, `upload sft`, `evaluate` …"""
    started_at: float
    ended_at: float | None = None
    outcome: Literal["running", "ok", "failed", "interrupted"] = "running"
    reason: str = ""
    wasted_s: float = 0.0
    """Seconds at its end that were not yet in the bucket and had to be done again."""


class Attempt(Frozen):
    """One box of a run."""

    attempt: int
    label: str
    machine_id: int
    offer_id: int
    dph_usd: float
    instance_id: int | None = None
    also_ids: tuple[int, ...] = ()
    """Further boxes of the same create call; they are given back at once, and billed."""
    spans: tuple[Span, ...] = ()
    ended: str = ""
    """Why the box was given back: `done`, or the failure's sentence."""
    wasted: bool = False
    """Nothing of what it did is in the bucket."""
    after_loss: str = ""
    """Why an earlier box that had made something durable was lost: without that, this one's boot, install and prefetch would not have been paid."""
    repriced: tuple[tuple[float, float], ...] = ()
    """Prices that differ from `dph_usd`: since when, and $/h."""
    decisions: tuple[str, ...] = ()
    """What was decided about it for the sake of money, such as a slow uplink, with the costs of each way."""


class Flight(Frozen):
    """The flow's own record, kept in the bucket: whoever finds it can write the receipt."""

    flow_run_id: str
    run: str
    started_at: float
    planned_usd: float | None
    max_usd: float
    market: str
    attempts: tuple[Attempt, ...] = ()
    ended_at: float | None = None
    outcome: str = "running"
    planned: dict[str, float] = {}
    """`planned_usd` by step: `phase sft` …, and `set-up and bytes`."""


class ReceiptLine(Frozen):
    what: str
    """A phase or a step, such as `phase sft` or `boot`; for wasted lines the reason stands in `reason`."""
    attempt: int
    instance_id: int | None
    hours: float
    usd: float | None
    """None when the market's charges could not be read."""
    wasted: bool = False
    reason: str = ""


class Receipt(Frozen):
    """Planned, paid and wasted dollars of a run, from the market's own charges."""

    run: str
    flow_run_id: str
    outcome: str
    planned_usd: float | None
    paid_usd: float | None
    """None when the market's charges could not be read: unknown is not zero."""
    wasted_usd: float | None
    charges: dict[str, float]
    """Dollars by kind: gpu, disk, down, up."""
    lines: tuple[ReceiptLine, ...]
    boxes: int
    instances_left: int | None
    """Of this run, after a complete listing; None if it could not be proved."""
    written_by: Literal["flow", "hook", "reaper", "command", "audit"]
    written_at: float
    notes: tuple[str, ...] = ()
    so_far: bool = False
    """More may be charged for the time that the boxes were there: `paid_usd` and `wasted_usd` are what is booked yet."""
    booked_until: float | None = None
    """With `so_far`: the moment up to which everything is booked, None if the market does not say."""
    planned: dict[str, float] = {}
    """Dollars of the plan by phase, and `set-up and bytes` for the rest; empty where none was made."""

    @property
    def final(self) -> bool:
        """Nothing about it will change any more."""
        return self.paid_usd is not None and not self.so_far and self.instances_left == 0 and self.outcome != "running"


class Destruction(Frozen):
    """What a destroy achieved. `gone` holds only boxes that a complete listing no longer shows."""

    flow_run_id: str
    gone: tuple[int, ...] = ()
    unverified: tuple[int, ...] = ()
    kept_until: float | None = None
    reason: str = ""
    dph_usd: float | None = None
    """$/h of the unverified boxes as the market last listed them; None if it did not."""
    labels: dict[int, str] = {}
    """What the boxes carried, as far as a listing showed them."""

    @property
    def clean(self) -> bool:
        return not self.unverified and not self.reason


Trouble = Literal[
    "billed_after_destroy",
    "billed_without_owner",
    "destroy_unverified",
    "reaper_blind",
    "reaper_silent",
    "box_unknown",
    "cap_reached",
    "credit_low",
    "box_kept",
]


class Alarm(Frozen):
    """Something that costs money and needs a person, or soon will; kept in the bucket until it is over."""

    what: Trouble
    subject: str
    """A flow run's id, `box-<id>` for a box of nobody's, `account` or `reaper`."""
    run: str | None = None
    """The run's name."""
    instances: tuple[int, ...] = ()
    dph_usd: float | None = None
    """$/h of these boxes; None if unknown."""
    spent_usd: float | None = None
    """Dollars so far of the run, or of the boxes where it is nobody's; None if unknown."""
    reason: str
    do: str
    """What a person can do, and who else is at it."""
    at: float
    told_at: float | None = None
    """When Prefect last took it in; None if it has not."""

    @property
    def sentence(self) -> str:
        boxes = f"box {', '.join(map(str, self.instances))}" if self.instances else "no box known"
        rate = "$/h unknown" if self.dph_usd is None else f"${self.dph_usd:.3f}/h"
        spent = "spent unknown" if self.spent_usd is None else f"${self.spent_usd:.4f} spent so far"
        whose = f"run '{self.run}' ({self.subject})" if self.run else self.subject
        return f"{self.what.replace('_', ' ')}: {whose}, {boxes}, {rate}, {spent}: {self.reason}; {self.do}"
