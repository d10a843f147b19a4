"""Every fault of the market, and what renting, destroying and reaping make of it, on a clock that nobody waits for.

However it goes, nothing bills in the end, or an alarm names a box whose owner is known; and nothing is rented twice.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from deployments.rehearsal.api import Request, query_of
from deployments.rehearsal.faults import FAULTS
from deployments.rehearsal.market import Rental
from deployments.rehearsal.world import facts_of
from tasks import preflight
from tasks.destroy import destroy_run, read_intents
from tasks.domain import Attempt, Box, Destruction, Flight, Instance, Label
from tasks.errors import (
    AuthError,
    BootFailed,
    BoxLost,
    DestroyUnverified,
    InvalidRequest,
    LiveryError,
    OfferGone,
    PreflightFailed,
    QuotaExhausted,
    Rejected,
    ShapeError,
    UserError,
)
from tasks.market.vast import VastMarket
from tasks.phase import Watcher
from tasks.reap import CannotSee, Sweep, sweep
from tasks.receipt import write_receipt
from tasks.remote.jobs import EventTail, Jobs
from tasks.remote.ssh import Remote
from tasks.rent import rent
from tasks.settings import Settings
from tests.tasks.pretend import FLOW_RUN, Clock, Pretend, rehearsal_recipe, rent_request
from training.box import preflight as box_preflight
from training.box.folder import FolderStore
from training.box.store import Store
from training.contract import layout
from training.contract.checks import CheckReport
from training.contract.recipe import Budget, Recipe

HOUR, POLL_S = 3600.0, 10.0
Refused = tuple[type[LiveryError], str]


@dataclass(frozen=True)
class Row:
    """One fault and what must come of it."""

    fault: str
    rents: Refused | None = None
    """None: a box runs in the end. Else how renting ends, and a word of its sentence."""
    ends: Literal["gone", "alarm"] = "gone"
    """What the destroy that always comes says while the fault lasts."""
    reaps: Literal["destroyed", "unverified", "unknown", "cannot see"] = "destroyed"
    """What a sweep after the launcher's death says while the fault lasts."""
    late: bool = False
    """The fault begins when the box runs already."""
    bid: bool = False
    beside: str = ""
    """A second fault that makes the first one felt."""
    crowd: int = 0
    """So many foreign boxes are in the account."""
    mute: str = ""
    """What the watcher says of a box that no longer answers, by the market's word or by its silence."""
    unfit: str = ""
    """The check of the first preflight that fails such a box."""

    @property
    def name(self) -> str:
        return self.fault.partition("@")[0].partition("=")[0]


BLIND: Any = {"ends": "alarm", "reaps": "cannot see"}
SILENT = "no event for"

ROWS = (
    Row("search.quota@always", (QuotaExhausted, r"search_quota_exceeded.*until \d{4}-\d\d-\d\dT00:00:00Z")),
    Row("search.object_not_list", (ShapeError, "want an object with a list 'offers'")),
    Row("create.drop_after_commit"),
    Row("create.504_after_commit"),
    Row("create.200_without_id"),
    Row("create.504_before_commit", (BootFailed, "no box with the label")),
    Row("create.429", (BootFailed, "no box with the label")),
    Row("create.success_false_with_contract", (BootFailed, "made all the same.*verified gone")),
    Row("create.double_accept", (BootFailed, "accepted twice.*verified gone")),
    Row("create.double_accept", (BootFailed, "accepted 2 times.*verified gone"), beside="create.drop_after_commit"),
    Row("create.double_accept", (BootFailed, "accepted twice.*verified gone"), beside="list.lag=60@2"),
    Row("create.offer_gone_404", (OfferGone, "no_such_ask")),
    Row("create.offer_gone_410", (OfferGone, "no_such_ask")),
    Row("create.spend_limit", (Rejected, "spend_rate_limit")),
    Row("create.returns_on_demand_for_bid", (BootFailed, "bid: seen False.*verified gone"), bid=True),
    Row("create.label_lost", (BootFailed, "label: seen None.*verified gone")),
    Row("create.disk_short", (BootFailed, "disk: seen 10 GB.*verified gone")),
    Row("create.other_gpu", (BootFailed, "GPU memory: seen.*verified gone")),
    Row("create.dearer", (BootFailed, "price: seen.*verified gone")),
    Row("show.null=3"),
    Row("show.empty_list=3"),
    Row("show.404_lag=3"),
    Row("list.410"),
    Row("list.410@always", (DestroyUnverified, "no other is rented"), **BLIND),
    Row("list.missing_row"),
    Row("list.missing_row@always", (ShapeError, "nothing is rented"), reaps="cannot see"),
    Row("list.missing_row@always", late=True, reaps="cannot see"),
    Row("list.null_fields@always", (ShapeError, "nothing is rented"), reaps="cannot see"),
    Row("list.one_malformed_row@always", reaps="unknown"),
    Row("list.page2_429=3", crowd=26),
    Row("list.page2_429@always", (DestroyUnverified, "no other is rented"), crowd=26, **BLIND),
    Row("list.bad_total"),
    Row("list.bad_total@always", (DestroyUnverified, "no other is rented"), **BLIND),
    Row("list.empty_but_success"),
    Row("list.wrong_account", late=True),
    Row("list.lag=120"),
    Row("list.lag=120", beside="create.drop_after_commit"),
    Row("list.lag=400", (BootFailed, "the reaper watches for it"), beside="create.drop_after_commit"),
    Row("list.stale_after_destroy=80"),
    Row("read.429=4"),
    Row("read.502=4"),
    Row("auth.revoked_midway=1", (DestroyUnverified, "auth_error"), ends="alarm"),
    Row("auth.read_only", (AuthError, "instance_write")),
    Row("auth.read_only", late=True, ends="alarm"),
    Row("auth.session_expired_404", (AuthError, "Session expired")),
    Row("auth.session_expired_404=6", late=True, reaps="cannot see"),
    Row("credit.zero", (UserError, r"credit: \$0\.00 left")),
    Row("credit.zero", late=True, mute="the market says 'stopped'"),
    Row("charges.lag"),
    Row("charges.behind"),
    Row("destroy.429=4"),
    Row("destroy.200_but_stays=5"),
    Row("destroy.200_but_stays=1000@always", ends="alarm", reaps="unverified"),
    Row("destroy.success_false"),
    Row("destroy.success_false@always", ends="alarm", reaps="unverified"),
    Row("destroy.404_but_alive"),
    Row("destroy.404_but_alive@always", ends="alarm", reaps="unverified"),
    Row("destroy.500_but_done"),
    Row("destroy.hang=0"),
    Row("boot.loading_forever", (BootFailed, "not running after 300 s; last seen: loading.*verified gone")),
    Row("boot.status_msg", (BootFailed, "will not boot: .*manifest unknown.*verified gone")),
    Row("boot.exited", (BootFailed, "is exited.*verified gone")),
    Row("boot.no_address", (BootFailed, "not running after 300 s; last seen: running.*verified gone")),
    Row("boot.offline_after=60", mute="the market says 'offline'"),
    Row("boot.unknown_then_back=60", (BootFailed, "is unknown.*verified gone")),
    Row("bid.outbid_after=60", bid=True, mute="outbid"),
    Row("host.reclaim_stop=60", mute="the market says 'stopped'"),
    Row("host.reboots_after=60", mute=SILENT),
    Row("contract.ends_after=60", mute="its contract has ended"),
    Row("price.increase_after=60"),
    Row("ssh.attach_refused", (InvalidRequest, "team_ssh_keys_not_supported")),
    Row("ssh.refused_for=7200", mute=SILENT),
    Row("ssh.blackhole", mute=SILENT),
    Row("ssh.key_missing_for=7200", mute=SILENT),
    Row("ssh.key_dropped_after", mute=SILENT),
    Row("ssh.port_changes_after"),
    Row("ssh.direct_blocked"),
    Row("ssh.proxy_blocked"),
    Row("ssh.drop_mid_command"),
    Row("ssh.tmux_banner_on_stdout"),
    Row("ssh.path_minimal"),
    Row("net.uplink"),
    Row("net.downlink"),
    Row("net.stall_after"),
    Row("box.driver_old", unfit="driver: seen 550.127.05"),
    Row("box.pids_max", unfit="pids_max: seen 1024"),
    Row("box.disk_full", unfit="disk_free: seen 0.5"),
    Row("box.clock_skew", unfit="clock: seen"),
    Row("box.gpu_lost", unfit="gpu_count: seen 0"),
    Row("box.lost_at=sft:5"),
    Row("box.import_broken"),
)


def test_every_fault_has_a_row() -> None:
    assert {row.name for row in ROWS} == set(FAULTS)


def _id(row: Row) -> str:
    return "+".join(filter(None, (row.fault, row.beside, "late" if row.late else "")))


class Direct(httpx.BaseTransport):
    """The market in this very process: hundreds of runs in seconds. Over a socket it is tested elsewhere."""

    def __init__(self, pretend: Pretend) -> None:
        self._pretend = pretend

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._pretend.calls.append((request.method, request.url.path))
        bearer = request.headers["authorization"].removeprefix("Bearer ")
        asked = Request(request.method, request.url.path, query_of(request.url.query), request.read(), bearer)
        reply = self._pretend.api.handle(asked)
        if reply.drop:
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.", request=request)
        text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
        return httpx.Response(reply.status, headers=dict(reply.headers), text=text)


class Killed(BaseException):
    """What SIGKILL does: nothing after it runs."""


@dataclass
class World:
    """One run's account, bucket and clock."""

    pretend: Pretend
    store: Store
    clock: Clock
    state_dir: Path

    @cached_property
    def market(self) -> VastMarket:
        return self.pretend.client(self.state_dir, transport=Direct(self.pretend))

    @cached_property
    def reapers_market(self) -> VastMarket:
        key = self.pretend.market.reaper_key
        return self.pretend.client(self.state_dir, key=key, transport=Direct(self.pretend))

    @cached_property
    def settings(self) -> Settings:
        return self.pretend.settings(self.state_dir, max_dph_usd=1000.0, poll_s=POLL_S)

    def begin(self, row: Row) -> None:
        base = next(iter(self.pretend.market.offers.values()))
        for n in range(row.crowd):
            offer = replace(base, id=100 + n, machine_id=100 + n)
            self.pretend.market.offers[offer.id] = offer
            self.pretend.market.rent(offer, Rental(disk_gb=10, label="somebody else's"))
        self.clock.now += 60
        if not row.late:
            self.arm(row)

    def arm(self, row: Row) -> None:
        self.pretend.arm(*filter(None, (row.fault, row.beside)))

    def rent(self, row: Row, sleep: Any = None) -> Instance:
        request = rent_request(self.market, _recipe(row))
        return rent(
            self.market,
            self.store,
            request,
            self.settings,
            clock=self.clock,
            sleep=sleep or self.clock.sleep,
            destroy_s=300,
        )

    def destroy(self) -> Destruction:
        """What the flow, its guard or its hook does last, whatever has happened."""
        waits: Any = {"clock": self.clock, "sleep": self.clock.sleep, "poll_s": POLL_S}
        return destroy_run(self.market, FLOW_RUN, deadline_s=300, store=self.store, **waits)

    def reap(self) -> Sweep:
        return sweep(
            self.reapers_market,
            self.store,
            self.settings,
            clock=self.clock,
            sleep=self.clock.sleep,
            settle=lambda flow_run_id, by: None,
        )

    def struck(self, fault: str) -> bool:
        return any(armed["fired"] for armed in self.pretend.market.faults.rows() if armed["name"] == fault)

    def calm(self) -> None:
        """The trouble is over."""
        for fault in self.pretend.market.faults.rows():
            self.pretend.market.disarm(str(fault["name"]))

    @property
    def ours(self) -> list[Any]:
        """Every box that was ever made for this run, the market's own view."""
        self.pretend.market.settle()
        return [made for made in self.pretend.market.contracts.values() if made.label != "somebody else's"]

    @property
    def billed_usd_h(self) -> float:
        return float(sum(made.billed_now_usd_h for made in self.ours))

    @property
    def alarmed(self) -> bool:
        return self.store.get_bytes(layout.alarm(FLOW_RUN)) is not None

    @property
    def known_to_the_bucket(self) -> set[int]:
        intents = read_intents(self.store, FLOW_RUN)
        return {each for intent in intents for each in (intent.instance_id, *intent.also_ids) if each is not None}


@pytest.fixture
def world(tmp_path: Path) -> World:
    clock = Clock()
    pretend = Pretend(clock)
    pretend.url = "http://127.0.0.1"
    return World(pretend, FolderStore(tmp_path / "bucket"), clock, tmp_path)


def _recipe(row: Row) -> Recipe:
    return rehearsal_recipe(box={"boot_s": 300, "interruptible": row.bid})


@pytest.mark.parametrize("row", ROWS, ids=_id)
def test_a_run_ends_with_nothing_billed_or_with_an_alarm_and_never_rents_twice(world: World, row: Row) -> None:
    world.begin(row)
    error: LiveryError | None = None
    try:
        world.rent(row)
    except LiveryError as caught:
        error = caught
    _is_as_told(row, error)
    if row.late:
        world.arm(row)
    at_once = [made for made in world.ours if not made.gone]
    assert len(at_once) <= 1 and world.pretend.count("PUT", "/api/v0/asks/") <= 1
    world.clock.now += HOUR
    result = world.destroy()
    assert result.clean == (row.ends == "gone"), result.reason
    assert world.alarmed == (row.ends == "alarm")
    assert world.struck(row.name) or row.name.startswith("charges."), "what never struck proves nothing"
    if row.ends == "gone":
        assert world.billed_usd_h == 0
    for made in world.ours:
        label = Label.parse(made.label)
        assert (label and label.flow_run_id == FLOW_RUN) or made.id in world.known_to_the_bucket, "it has an owner"
    if row.ends == "alarm":
        world.calm()
        assert world.destroy().clean and world.billed_usd_h == 0 and not world.alarmed


def _is_as_told(row: Row, error: LiveryError | None) -> None:
    if row.rents is None or row.late:
        assert error is None
        return
    kind, said = row.rents
    with pytest.raises(kind, match=said):
        raise error or AssertionError("a box was rented")


# What troubles only those who log in is nothing to the reaper.
@pytest.mark.parametrize("row", [row for row in ROWS if not row.name.startswith(("ssh.", "net.", "box."))], ids=_id)
def test_a_launcher_that_is_killed_while_it_waits_leaves_nothing_that_the_reaper_does_not_end(
    world: World, row: Row
) -> None:
    def killed(seconds: float) -> None:
        if world.pretend.count("PUT", "/api/v0/asks/"):
            raise Killed
        world.clock.sleep(seconds)

    world.begin(row)
    with contextlib.suppress(Killed, LiveryError):
        world.rent(row, killed)
    if row.late:
        world.arm(row)
    world.clock.now += HOUR
    left = [made.id for made in world.ours if not made.gone]
    if row.reaps == "cannot see":
        with pytest.raises(CannotSee):
            world.reap()
        assert [made.id for made in world.ours if not made.gone] == left, "nothing is destroyed blindly"
    else:
        _swept(world.reap(), row, left)
    world.calm()
    world.reap().raise_if_bad()
    assert world.billed_usd_h == 0


@dataclass
class Killer:
    """SIGKILL at the n-th call to market or bucket, before it is made or after it was answered."""

    at: int
    after: bool
    calls: int = 0

    def around(self, call: Any) -> Any:
        self.calls += 1
        mine = self.calls == self.at
        if mine and not self.after:
            raise Killed
        try:
            return call()
        finally:
            if mine:
                raise Killed


class Lethal(Direct):
    def __init__(self, pretend: Pretend, killer: Killer) -> None:
        super().__init__(pretend)
        self._killer = killer

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer: httpx.Response = self._killer.around(lambda: super(Lethal, self).handle_request(request))
        return answer


class LethalStore(FolderStore):
    def __init__(self, root: Path, killer: Killer) -> None:
        super().__init__(root)
        self._killer = killer

    def put_bytes(self, *args: Any, **options: Any) -> None:
        self._killer.around(lambda: super(LethalStore, self).put_bytes(*args, **options))


def _killed_at(tmp_path: Path, killer: Killer, *faults: str) -> tuple[World, bool]:
    """A world whose launcher was killed there, and whether it lived long enough to rent a box."""
    clock = Clock()
    pretend = Pretend(clock)
    pretend.url = "http://127.0.0.1"
    pretend.arm(*faults)
    world = World(pretend, FolderStore(tmp_path / "bucket"), clock, tmp_path)
    request = rent_request(world.market, rehearsal_recipe(box={"boot_s": 300}))
    market = pretend.client(tmp_path, transport=Lethal(pretend, killer))
    waits: Any = {"clock": clock, "sleep": clock.sleep, "destroy_s": 300}
    try:
        rent(market, LethalStore(tmp_path / "bucket", killer), request, world.settings, **waits)
    except Killed:
        return world, False
    return world, True


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("fault", ["", "create.drop_after_commit"])
def test_a_launcher_that_is_killed_at_any_call_leaves_nothing_that_the_reaper_does_not_end(
    tmp_path: Path, fault: str, after: bool
) -> None:
    """Every point at which a lost process leaves market and bucket in another state; two sweeps later nothing bills."""
    made = 0
    for at in itertools.count(1):
        world, rented = _killed_at(tmp_path / str(at), Killer(at, after), *filter(None, [fault]))
        made += bool(world.ours)
        for _ in range(2):
            world.clock.now += HOUR
            world.reap().raise_if_bad()
        assert world.billed_usd_h == 0, f"killed {'after' if after else 'before'} call {at}"
        if rented:
            break
    assert 1 < made < at, "some were killed before the create call and some after it"


def _swept(result: Sweep, row: Row, left: list[int]) -> None:
    """A sweep that leaves a box must fail, so that somebody hears of it."""
    judged = [made for made in result.rows if made.instance_id in left]
    assert {made.outcome or made.action for made in judged} <= {row.reaps}
    loud = {"unverified": DestroyUnverified, "unknown": CannotSee}.get(row.reaps if left else "")
    with pytest.raises(loud) if loud else contextlib.nullcontext():
        result.raise_if_bad()


@pytest.mark.parametrize("row", [row for row in ROWS if row.mute], ids=_id)
def test_a_box_that_no_longer_answers_is_given_up_by_the_markets_word_or_by_its_silence(
    world: World, row: Row, tmp_path: Path
) -> None:
    world.begin(row)
    instance = world.rent(row)
    if row.late:
        world.arm(row)
    world.clock.now += 30
    # No address: what a box looks like whose every address is dead, without waiting for each.
    remote = Remote("nobody", tmp_path / "key", tmp_path / "known", tuple)
    offer = rent_request(world.market, _recipe(row)).offer
    watcher = Watcher(
        Box(
            instance_id=instance.id,
            machine_id=offer.machine_id,
            label=instance.label or "",
            run="r",
            flow_run_id=FLOW_RUN,
            attempt=1,
            ssh_user="nobody",
            key_path="key",
            known_hosts_path="known",
            dph_usd=1.0,
            offer=offer,
            rented_at=world.clock.now,
        ),
        Jobs(remote),
        EventTail(remote, clock=world.clock),
        world.market.show,
        Budget(max_usd=100, max_hours=12, silent_s=600),
        spent_usd=lambda: 0.0,
        deadline=world.clock.now + 12 * HOUR,
        poll_s=5.0,
        clock=world.clock,
        sleep=world.clock.sleep,
    )
    with pytest.raises(BoxLost, match=row.mute):
        watcher.until(lambda view: False)
    assert world.destroy().clean and world.billed_usd_h == 0


@pytest.mark.parametrize("row", [row for row in ROWS if row.unfit], ids=_id)
def test_a_box_with_a_fault_of_its_own_fails_the_first_preflight_and_the_machine_is_blamed(
    world: World, row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.begin(row)
    world.rent(row)
    (made,) = world.ours
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps(facts_of(made).as_json()))
    monkeypatch.setenv(box_preflight.FACTS_VARIABLE, str(facts))
    now = time.time()
    wanted = preflight.wanted_of(_recipe(row).box, None, now=now, round_trip_s=0.0)
    report = CheckReport.model_validate(box_preflight.report(wanted, "nonce"))
    with pytest.raises(PreflightFailed, match=row.unfit) as caught:
        preflight._judged(report, PreflightFailed)
    assert caught.value.blame == "host"
    assert world.destroy().clean and world.billed_usd_h == 0


def test_a_bill_that_is_late_is_unknown_and_not_zero(world: World) -> None:
    row = next(row for row in ROWS if row.name == "charges.lag")
    world.begin(row)
    instance, began = world.rent(row), world.clock.now
    world.destroy()
    attempt = Attempt(
        attempt=1, label="l", machine_id=1, offer_id=1, dph_usd=1.0, instance_id=instance.id, ended="done"
    )
    flight = Flight(
        flow_run_id=FLOW_RUN,
        run="r",
        started_at=began,
        planned_usd=1.0,
        max_usd=2.0,
        market="vast",
        attempts=(attempt,),
    )

    def paid() -> float | None:
        receipt = write_receipt(world.store, world.market, FLOW_RUN, "flow", now=world.clock.now, flight=flight)
        assert receipt is not None and receipt.instances_left == 0
        return receipt.paid_usd

    assert paid() is None
    world.clock.now += HOUR
    assert paid() == pytest.approx(world.pretend.market.total_usd(), abs=1e-5) != 0


def test_a_deleted_box_of_a_contract_that_ended_is_known_to_be_gone(world: World) -> None:
    row = next(row for row in ROWS if row.name == "contract.ends_after")
    world.begin(row)
    world.rent(row)
    world.clock.now += 47 * HOUR
    assert world.billed_usd_h > 0, "its disk is billed until then"
    world.clock.now += 2 * HOUR
    assert world.billed_usd_h == 0 and world.destroy().clean
