from __future__ import annotations

import pytest

from tasks.rules.stalls import TRIES_S, Headway, Sample, judge_transfer, patience_s, runner_silent, step_hangs
from training.contract.events import (
    CheckpointDurable,
    CheckpointSaved,
    Event,
    Heartbeat,
    Notice,
    PhaseStart,
    Step,
    Transfer,
)

GB = 1_000_000_000


def _judge(samples: list[tuple[float, int]], now: float, *, total: int = 67 * GB, budget_s: float = 1500) -> str:
    seen = [Sample(at, done) for at, done in samples]
    return judge_transfer("prefetch", seen, total, started_at=0, now=now, budget_s=budget_s, stall_s=90).state


def _steady(mbps: float, until: float, every: float = 10) -> list[tuple[float, int]]:
    return [(t * every, int(t * every * mbps * 1e6 / 8)) for t in range(int(until / every) + 1)]


def test_a_rate_that_will_do_is_ok() -> None:
    assert _judge(_steady(400, 300), 300) == "ok"


def test_a_rate_that_will_not_do_is_too_slow_long_before_the_budget_ends() -> None:
    assert _judge(_steady(30, 130), 130) == "too slow"


def test_the_first_seconds_condemn_nobody() -> None:
    assert _judge(_steady(30, 60), 60) == "ok"


def test_a_short_dip_condemns_nobody() -> None:
    assert _judge([*_steady(600, 600), (610, 45 * GB), (640, 45 * GB)], 650) == "ok"


def test_no_byte_for_too_long_is_a_stall() -> None:
    assert _judge([*_steady(600, 300)], 391) == "stalled"
    assert _judge([], 91) == "stalled"


def test_the_budget_ends_it_whatever_the_rate() -> None:
    assert _judge(_steady(350, 1500), 1501) == "over budget"


def test_what_is_done_is_ok_at_any_time() -> None:
    assert _judge([(1600, 67 * GB)], 1700) == "ok"


def test_the_sentence_says_rate_and_need() -> None:
    seen = [Sample(at, done) for at, done in _steady(30, 200)]
    said = judge_transfer("upload sft/40", seen, 67 * GB, started_at=0, now=200, budget_s=1500, stall_s=90)
    assert said.mbps == pytest.approx(30, rel=0.1)
    assert "upload sft/40: 0.75 GB of 67.00 GB after 200 s at 30.0 Mbps; 407.7 Mbps are needed" in said.sentence


@pytest.mark.parametrize(("budget", "patience"), [(1500, 120), (20, 4)])
def test_patience_shrinks_with_the_budget(budget: float, patience: float) -> None:
    assert patience_s(budget) == patience


def test_silence_is_judged_against_its_limit() -> None:
    assert runner_silent(900, 900) == ""
    assert runner_silent(901, 900) == "no event for 901 s (budget.silent_s = 900)"


def test_a_step_is_judged_by_its_own_length_and_not_by_the_heart_beating_beside_it() -> None:
    assert step_hangs(900, 900) == ""
    assert step_hangs(901, 900) == "a step has not ended for 901 s (budget.silent_s = 900)"


def _step(number: int) -> Step:
    return Step(phase="sft", step=number, max_steps=9, loss=1.0, seconds=1.0)


def _moved(done: int) -> Transfer:
    return Transfer(what="prefetch model", direction="down", done_bytes=done, total_bytes=9, mbps=1.0)


_GOT_FURTHER = [
    [PhaseStart(phase="sft", step=0, max_steps=9)],
    [_step(1)],
    [_step(1), _step(2)],
    [_moved(1)],
    [_moved(1), _moved(2)],
    [CheckpointSaved(phase="sft", step=1, bytes=1)],
    [Heartbeat(gpu_util_percent=64.0)],  # an evaluation says nothing else for as long as it takes
    [CheckpointDurable(phase="sft", step=1, manifest="m", bytes=1, seconds=1, complete=False)],
]
_NO_FURTHER: list[list[Event]] = [
    [],
    [Heartbeat(in_step_s=1.0)],
    [Heartbeat(in_step_s=1.0, gpu_util_percent=100.0)],
    [Heartbeat(gpu_util_percent=1.0)],
    [Heartbeat()],
    [Notice(what="w", reason="r")],
    [_step(1)],
    [_moved(1)],
    [_moved(0)],
]


@pytest.mark.parametrize("events", _GOT_FURTHER)
def test_a_step_more_bytes_more_and_a_checkpoint_are_progress(events: list[Event]) -> None:
    headway = Headway(1.0)
    headway.absorb(events, 7.0)
    assert headway.at == 7.0


@pytest.mark.parametrize("events", _NO_FURTHER)
def test_heartbeats_notices_and_the_same_again_are_no_progress(events: list[Event]) -> None:
    headway = Headway(1.0)
    headway.absorb([_step(1), _moved(1)], 2.0)
    headway.absorb(events, 7.0)
    assert headway.at == 2.0


def test_what_a_new_box_does_again_is_progress() -> None:
    headway = Headway(1.0)
    headway.absorb([_step(5), _moved(5)], 2.0)
    headway.begin_box(3.0)
    for now, event in ((4.0, _moved(1)), (5.0, PhaseStart(phase="sft", step=2, max_steps=9)), (6.0, _step(3))):
        headway.absorb([event], now)
        assert headway.at == now


def test_a_link_that_moves_nothing_is_left_to_the_stall_rule_so_that_the_box_can_try_another_way() -> None:
    seen = [Sample(at, done) for at, done in _steady(600, 60)]
    for now in (200, 300, 60 + int(TRIES_S * 90)):
        said = judge_transfer("prefetch", seen, 67 * GB, started_at=0, now=now, budget_s=1500, stall_s=TRIES_S * 90)
        assert said.state == "ok", f"after {now} s"
    said = judge_transfer("prefetch", seen, 67 * GB, started_at=0, now=380, budget_s=1500, stall_s=TRIES_S * 90)
    assert said.state == "stalled"
