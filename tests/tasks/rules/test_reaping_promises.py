"""Over facts, rules and clock: no box is destroyed for what is not known, and none outlives its lease by more than two ticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tasks.domain import Instance, Label, Lease
from tasks.rules import reaping
from tasks.rules.reaping import Facts, LeaseSeen, Limits, Sighting, sighted, verdict
from tests.tasks.pretend import FLOW_RUN, NOW

HOUR, TICK_S = 3600.0, 300.0
LIMITS = Limits(max_age_s=12 * HOUR, lease_s=900, never_running_s=2700, protected={7: NOW + HOUR})
Maybe = st.none

# Moments are drawn around the limits, where rules change their minds.
_AGO_S = st.one_of(
    st.sampled_from([0, 1, 599, 601, 899, 901, 1799, 1801, 2699, 2701, 43_199, 43_201]), st.integers(-600, 90_000)
)
_STATUS = st.sampled_from(
    [None, "running", "loading", "created", "stopped", "exited", "offline", "unknown", "rebooting", "never heard"]
)


@st.composite
def _boxes(draw: st.DrawFn) -> Instance:
    ago = draw(Maybe() | _AGO_S)
    label = Label(flow_run_id=FLOW_RUN, attempt=1, hard_end=int(NOW - draw(_AGO_S))).text
    stopped = draw(st.booleans())
    return Instance(
        id=draw(st.sampled_from([5, 7])),
        label=draw(st.sampled_from([label, label, label, None, "somebody else's"])),
        start_date=None if ago is None else NOW - ago,
        actual_status=draw(_STATUS),
        gpu_util=draw(Maybe() | st.sampled_from([0.0, 0.5, 60.0])),
        **(dict.fromkeys(("cur_state", "intended_status", "next_state"), "stopped") if stopped else {}),
    )


@st.composite
def _leases(draw: st.DrawFn) -> Lease:
    return Lease(
        flow_run_id=FLOW_RUN,
        run="r",
        renewed_at=NOW,
        expires_at=NOW - draw(_AGO_S),
        hold_until=draw(Maybe() | st.builds(lambda ago: NOW - ago, _AGO_S)),
        progress_at=draw(Maybe() | st.builds(lambda ago: NOW - ago, _AGO_S)),
        max_age_s=draw(Maybe() | st.sampled_from([HOUR, 20 * HOUR])),
        patience_s=draw(Maybe() | st.sampled_from([60.0, 2 * HOUR])),
    )


_SEEN = st.one_of(
    st.builds(LeaseSeen, _leases()),
    st.just(LeaseSeen()),
    st.just(LeaseSeen(problem="the bucket does not answer")),
    st.builds(lambda ago: LeaseSeen(renewed_ago_s=ago), st.floats(0, 300)),
)


@st.composite
def _facts(draw: st.DrawFn) -> Facts:
    box = draw(_boxes())
    state: Any = draw(st.sampled_from(["down", "booting"]))
    since = draw(Maybe() | st.builds(lambda ago: Sighting(box.label, state, NOW - ago, NOW), _AGO_S))
    return Facts(
        box,
        draw(_SEEN),
        intended=draw(Maybe() | st.booleans()),
        given_up=draw(st.booleans()),
        since=since,
        bucket_quiet_s=draw(Maybe() | st.sampled_from([0.0, 1799.0, 1801.0, math.inf])),
        failed_probes=draw(Maybe() | st.integers(0, 4)),
    )


def _forget_box(**fields: Any) -> Callable[[Facts], Facts]:
    return lambda facts: replace(facts, box=facts.box.model_copy(update=fields))


FORGETTING: dict[str, Callable[[Facts], Facts]] = {
    "the lease": lambda facts: replace(facts, seen=LeaseSeen(problem="the bucket does not answer")),
    "the intents": lambda facts: replace(facts, intended=None, given_up=False),
    "earlier sightings": lambda facts: replace(facts, since=None),
    "what was written": lambda facts: replace(facts, bucket_quiet_s=None),
    "the probes": lambda facts: replace(facts, failed_probes=None),
    "its start": _forget_box(start_date=None),
    "its state": _forget_box(actual_status=None, cur_state=None, intended_status=None, next_state=None),
    "its label": _forget_box(label=None),
}


def _check_forgetting(facts: Facts, forgotten: list[str]) -> None:
    """What is unknown can save a box, never condemn one."""
    before, after = verdict(facts, NOW, LIMITS), facts
    for what in forgotten:
        after = FORGETTING[what](after)
    if before.action != "destroy":
        assert verdict(after, NOW, LIMITS).action != "destroy", (
            f"without {forgotten}: {verdict(after, NOW, LIMITS).reason}"
        )


@settings(max_examples=250, deadline=None)
@given(_facts(), st.lists(st.sampled_from(sorted(FORGETTING)), min_size=1, max_size=4, unique=True))
def test_to_forget_anything_about_a_box_never_destroys_it(facts: Facts, forgotten: list[str]) -> None:
    _check_forgetting(facts, forgotten)


@settings(max_examples=100, deadline=None)
@given(_boxes(), st.sampled_from([None, 0.0]))
def test_of_whom_nothing_is_known_only_the_hard_end_destroys(box: Instance, gpu_util: float | None) -> None:
    unknown = box.model_copy(update={"start_date": None, "actual_status": None, "gpu_util": gpu_util})
    facts = Facts(unknown, LeaseSeen(problem="the bucket does not answer"))
    label = Label.parse(box.label)
    passed = label is not None and label.hard_end < NOW and box.id not in LIMITS.protected
    assert (verdict(facts, NOW, LIMITS).action == "destroy") == passed


@settings(max_examples=150, deadline=None)
@given(_facts())
def test_a_market_that_reads_no_gpu_condemns_only_beside_two_who_know(facts: Facts) -> None:
    """The one unknown that saves nobody: the flow itself and the bucket must both have said that nothing comes forward."""
    blind = _forget_box(gpu_util=None)(facts)
    if verdict(facts, NOW, LIMITS).action != "destroy" and verdict(blind, NOW, LIMITS).action == "destroy":
        lease = facts.seen.lease
        assert lease is not None and lease.progress_at is not None and NOW - lease.progress_at > 1800
        assert facts.bucket_quiet_s is not None and facts.bucket_quiet_s > 1800


@dataclass(frozen=True)
class Tick:
    market_answers: bool
    bucket_answers: bool
    status: str | None
    quiet: bool
    """The run has written nothing into the bucket for an hour."""


@dataclass(frozen=True)
class Life:
    """A box, until when its flow renews the lease, and what each sweep met."""

    renewed_until_s: float
    hold_s: float
    hard_end_s: float
    progress_until_s: float
    ticks: list[Tick]

    def lease_at(self, t: float) -> Lease:
        renewed = min(t, self.renewed_until_s)
        held = self.renewed_until_s + self.hold_s if self.hold_s and t >= self.renewed_until_s else None
        ends = renewed if held is not None else renewed + LIMITS.lease_s
        progress = min(renewed, self.progress_until_s)
        return Lease(
            flow_run_id=FLOW_RUN,
            run="r",
            renewed_at=NOW + renewed,
            expires_at=NOW + ends,
            hold_until=None if held is None else NOW + held,
            progress_at=NOW + progress,
        )

    def answered_until(self) -> float:
        """The end of lease and hold, as a person would reckon it."""
        return self.renewed_until_s + (self.hold_s or LIMITS.lease_s)

    def ended_at(self) -> int | None:
        """The tick at which the rules destroy it."""
        before: Sighting | None = None
        for number, tick in enumerate(self.ticks):
            if not tick.market_answers:
                continue
            now = NOW + number * TICK_S
            box = Instance(
                id=5,
                label=Label(flow_run_id=FLOW_RUN, attempt=1, hard_end=int(NOW + self.hard_end_s)).text,
                start_date=NOW,
                actual_status=tick.status,
                gpu_util=0.0,
            )
            facts = Facts(box, LeaseSeen(problem="the bucket does not answer"))
            if tick.bucket_answers:
                before = sighted(before, box, now)
                quiet_s = HOUR if tick.quiet else 10.0
                facts = Facts(box, LeaseSeen(self.lease_at(now - NOW)), True, since=before, bucket_quiet_s=quiet_s)
            if verdict(facts, now, LIMITS).action == "destroy":
                return number
        return None


_TICKS = st.lists(
    st.builds(
        Tick,
        market_answers=st.sampled_from([True, True, True, False]),
        bucket_answers=st.sampled_from([True, True, True, False]),
        status=st.sampled_from(["running"] * 6 + ["loading", "offline", "unknown", None]),
        quiet=st.booleans(),
    ),
    min_size=4,
    max_size=40,
)
_LIVES = st.builds(
    Life,
    renewed_until_s=st.integers(0, 9000),
    hold_s=st.sampled_from([0, 0, 0, 1200, 3600]),
    hard_end_s=st.integers(300, 12_000),
    progress_until_s=st.integers(0, 12_000),
    ticks=_TICKS,
)


def _check_life(life: Life) -> None:
    ended = life.ended_at()
    last = len(life.ticks) if ended is None else ended
    # Ends by two good ticks after lease and hold, and by two at which the market answers after the hard end.
    late = [
        n
        for n in range(last)
        if life.ticks[n].market_answers and life.ticks[n].bucket_answers and n * TICK_S > life.answered_until()
    ]
    assert len(late) < 2, f"outlived its lease by {len(late)} ticks"
    over = [n for n in range(last) if life.ticks[n].market_answers and n * TICK_S > life.hard_end_s]
    assert len(over) < 2, f"outlived its hard end by {len(over)} ticks"
    if ended is None or ended * TICK_S >= min(life.answered_until(), life.hard_end_s):
        return
    # It went while somebody answered for it: only for a state or a standstill that was seen for long.
    tick = life.ticks[ended]
    assert tick.bucket_answers, "destroyed on an unknown"
    assert not (life.hold_s and ended * TICK_S >= life.renewed_until_s), "a held box was taken"
    span = range(ended + 1)
    down = [n for n in span if life.ticks[n].status == "offline"]
    booting = [n for n in span if life.ticks[n].status == "loading"]
    still = tick.quiet and ended * TICK_S - life.progress_until_s > LIMITS.no_progress_s
    assert len(down) >= 2 or len(booting) >= 2 or still, "a box was taken whose run is well"


@settings(max_examples=200, deadline=None)
@given(_LIVES)
def test_no_box_outlives_its_lease_or_its_hard_end_by_more_than_two_ticks_and_none_goes_before_without_cause(
    life: Life,
) -> None:
    _check_life(life)


def _take_an_unread_lease_for_none(patch: pytest.MonkeyPatch) -> None:
    real = reaping.verdict

    def careless(facts: Facts, now: float, limits: Limits) -> reaping.Verdict:
        return real(replace(facts, seen=replace(facts.seen, problem=""), intended=True), now, limits)

    patch.setattr(reaping, "verdict", careless)


def _believe_a_lease_for_ever(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reaping, "_on_its_own", lambda *given: reaping.Verdict("keep", "somebody may come back"))


def _forget_the_hard_end(patch: pytest.MonkeyPatch) -> None:
    endless = Label(flow_run_id=FLOW_RUN, attempt=1, hard_end=9_999_999_999)
    patch.setattr(
        reaping, "Label", type("Endless", (), {"parse": staticmethod(lambda text: endless if text else None)})
    )


def _need_no_second_witness(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reaping, "_answered_for", _by_the_flow_alone)


def _by_the_flow_alone(facts: Facts, now: float, limits: Limits) -> reaping.Verdict | None:
    lease = facts.seen.lease
    if lease is None or lease.expires_at <= now:
        return None
    return reaping.Verdict("destroy" if reaping.stuck(lease, now, limits) else "keep", "the flow says so")


def _need_no_earlier_sighting(patch: pytest.MonkeyPatch) -> None:
    real = reaping._dead

    def at_once(facts: Facts, now: float, limits: Limits) -> reaping.Verdict | None:
        down = reaping.state_of(facts.box) == "down"
        return reaping.Verdict("destroy", "it is down") if down else real(facts, now, limits)

    patch.setattr(reaping, "_dead", at_once)


@pytest.mark.parametrize(
    "careless",
    [
        _take_an_unread_lease_for_none,
        _believe_a_lease_for_ever,
        _forget_the_hard_end,
        _need_no_second_witness,
        _need_no_earlier_sighting,
    ],
    ids=lambda part: part.__name__.strip("_"),
)
def test_a_rule_that_is_taken_out_is_missed(
    careless: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    careless(monkeypatch)
    monkeypatch.setitem(globals(), "verdict", reaping.verdict)
    how = settings(max_examples=2000, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        how(given(_LIVES)(_check_life))()
