"""Faults, crashes and clock jumps in any order: whatever happens, no box is left without an owner for long, and none is rented twice.

The seed is printed; LIVERY_SEED=N runs the same sequences again.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, Verbosity, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deployments.rehearsal.faults import FAULTS
from tasks import rent as renting
from tasks.domain import Listing
from tasks.errors import Ambiguous, MarketError
from tasks.market.protocol import CreateRequest
from tasks.market.vast import VastMarket
from tasks.rules.reaping import Verdict
from tests.market.world import OWNERLESS_S, REAPER_S, World

# Not drawn: a box without any label, which nobody may touch and the flow alone gives back (test_rent.py), the SSH and box faults that
# only a login sees, and an account without credit, which nothing but the owner can end.
_NOT_DRAWN = {"create.label_lost", "create.returns_on_demand_for_bid", "bid.outbid_after", "credit.zero"}
DRAWN = sorted(
    name
    for name in FAULTS
    if name.partition(".")[0] in {"create", "show", "list", "auth", "destroy", "boot", "host", "price"}
    and name not in _NOT_DRAWN
)
_KINDS = sorted({name.partition(".")[0] for name in DRAWN})
# By kind first, or the few that strike a create call would hardly ever be there when one is made.
A_FAULT = st.sampled_from(_KINDS).flatmap(
    lambda kind: st.sampled_from([name for name in DRAWN if name.startswith(f"{kind}.")])
)
FAULTS_NOW = st.lists(A_FAULT, max_size=2, unique=True)
# The number of the call, to the market or the bucket, at which the flow's process dies; more often it does not.
CRASH = st.none() | st.none() | st.integers(0, 45)


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(dir=_quick_folder())
        self.world = World(Path(self.folder.name))

    @initialize(faults=FAULTS_NOW, crash_in=CRASH)
    def start_the_first_run(self, faults: list[str], crash_in: int | None) -> None:
        self._start(faults, crash_in)

    @precondition(lambda self: len(self.world.flows) < 4)
    @rule(faults=FAULTS_NOW, crash_in=CRASH)
    def start_a_run(self, faults: list[str], crash_in: int | None) -> None:
        self._start(faults, crash_in)

    @precondition(lambda self: self.world.living)
    @rule(number=st.integers(0, 3), faults=FAULTS_NOW, crash_in=CRASH)
    def end_a_run(self, number: int, faults: list[str], crash_in: int | None) -> None:
        self._arm(faults)
        flow = self.world.living[number % len(self.world.living)]
        with self.world.acting(flow, crash_in):
            self.world.end(flow)

    @precondition(lambda self: self.world.living)
    @rule(number=st.integers(0, 3))
    def kill_a_run(self, number: int) -> None:
        self.world.living[number % len(self.world.living)].at_work = False

    @rule(seconds=st.integers(1, 7200), asleep=st.booleans(), faults=FAULTS_NOW)
    def let_time_pass(self, seconds: int, asleep: bool, faults: list[str]) -> None:
        """Asleep, the laptop with the flows stands still and the world does not; awake again they go on as if nothing had been."""
        self._arm(faults)
        sleepers = self.world.living if asleep else []
        for flow in sleepers:
            flow.awake = False
        self.world.pass_time(seconds)
        for flow in sleepers:
            flow.awake = True
            self.world.renew(flow)

    @rule(skew_s=st.integers(-600, 600), bucket_away_s=st.integers(0, 600))
    def set_the_reapers_clock_wrong_and_take_the_bucket_away(self, skew_s: int, bucket_away_s: int) -> None:
        self.world.skew_s = float(skew_s)
        self.world.bucket.away_until = self.world.clock.now + bucket_away_s

    def _start(self, faults: list[str], crash_in: int | None) -> None:
        self._arm(faults)
        flow = self.world.begin()
        with self.world.acting(flow, crash_in):
            self.world.rent(flow)

    def _arm(self, faults: list[str]) -> None:
        for name in faults:
            self.world.pretend.arm(name)

    @invariant()
    def keeps_its_promises(self) -> None:
        self.world.look()
        self.world.check()

    def teardown(self) -> None:
        self.world.come_to_rest()
        self.folder.cleanup()
        self.world.check()


def test_no_box_is_left_alone_and_none_is_rented_twice(chosen: int) -> None:
    _run(chosen, examples=25, steps=14)


def _skip_the_intent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(renting._Renting, "_write_intent", lambda self, account_id: None)


def _take_trouble_for_an_empty_list(patch: pytest.MonkeyPatch) -> None:
    whole = VastMarket.list_all

    def careless(self: VastMarket) -> Listing:
        try:
            return whole(self).model_copy(update={"complete": True})
        except MarketError:
            return Listing(instances=(), account_id="71500", complete=True)

    patch.setattr(VastMarket, "list_all", careless)
    patch.setattr(VastMarket, "show", lambda self, instance_id: None)


def _create_again(patch: pytest.MonkeyPatch) -> None:
    once = VastMarket.create

    def again(self: VastMarket, request: CreateRequest) -> int:
        try:
            return once(self, request)
        except Ambiguous:
            return once(self, request)

    patch.setattr(VastMarket, "create", again)


def _keep_whatever_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tasks.judge.verdict", lambda *given: Verdict("keep", "somebody will see to it"))


def _take_whatever_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tasks.judge.verdict", lambda *given: Verdict("destroy", "it looks idle"))


@pytest.mark.parametrize(
    ("careless", "seen"),
    [
        (_skip_the_intent, "before its intent was written"),
        (_take_trouble_for_an_empty_list, "said to be gone, and there"),
        (_create_again, "asked for twice"),
        (_keep_whatever_is_there, "no owner for|billed when all is over"),
        (_take_whatever_is_there, "whose flow is at work"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_guard_that_is_taken_out_is_missed(
    careless: Callable[[pytest.MonkeyPatch], None], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    careless(monkeypatch)
    with pytest.raises(AssertionError, match=seen):
        _run(11, examples=200, steps=14)


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "overlooked"])
def test_a_box_hidden_for_longer_than_its_run_looked_for_it_does_not_bill_beside_the_next(
    seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not seen:
        monkeypatch.setattr("tasks.judge._intent", lambda store, label: None)
    world = World(tmp_path)
    for fault in ("create.drop_after_commit", "list.lag=300"):
        world.pretend.arm(fault)
    flow = world.begin()
    world.rent(flow)
    assert flow.box is not None and len(world.pretend.market.alive()) == 2
    world.pass_time(OWNERLESS_S + REAPER_S)
    assert (len(world.pretend.market.alive()) == 1) == seen == (not world.broken)


@pytest.fixture
def chosen(capsys: pytest.CaptureFixture[str]) -> int:
    number = int(os.environ.get("LIVERY_SEED") or random.SystemRandom().randrange(1 << 32))
    with capsys.disabled():
        print(f"\nany order: LIVERY_SEED={number}")
    return number


def _run(number: int, *, examples: int, steps: int) -> None:
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        # A failure is told by its first finding: making it smaller costs minutes here, and the seed brings it back.
        phases=[Phase.generate],
        verbosity=Verbosity.quiet if examples > 100 else Verbosity.normal,
        suppress_health_check=list(HealthCheck),
    )
    machine: Any = seed(number)(type("AnyOrder", (AnyOrder,), {}))
    run_state_machine_as_test(machine, settings=how)


def _quick_folder() -> str | None:
    """Every small file is synced to the disk; in memory that costs nothing."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
