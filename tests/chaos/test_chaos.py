"""The program's own parts: what it draws, what it counts, and that it would see a box that is left and a manifest that is lost."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from pathlib import Path

import pytest

from deployments.rehearsal.faults import FAULTS, parse
from tasks.domain import Lease
from tasks.lease import write_lease
from tasks.market.vast import VastMarket
from tasks.reap import sweep
from tests.chaos import bookkeeping
from tests.chaos.draw import MARKET_DEAF, MOMENTS, PROCESS, TRAINING, draw, draw_deadman
from tests.chaos.outcome import Outcome, exit_code, give_back, new, report
from tests.tasks.pretend import FLOW_RUN, Clock, Pretend
from training.box.store import Store
from training.contract import layout
from training.contract.events import CheckpointDurable, EventLog, PhaseStart, RunnerStart, Step
from training.contract.manifest import FileEntry, Manifest

CASES = [draw(7, number) for number in range(200)]


def test_a_seed_and_a_number_draw_the_same_run_again_and_another_seed_draws_others() -> None:
    assert [draw(7, number) for number in range(200)] == CASES
    assert [draw(8, number) for number in range(200)] != CASES
    assert len({case.name for case in CASES}) == 200


def test_two_hundred_runs_meet_every_fault_and_every_moment_and_ten_train_for_real() -> None:
    assert {(case.fault, case.how) for case in CASES if not case.is_market} == set(PROCESS)
    assert {case.kind for case in CASES if case.is_market} == set(FAULTS)
    assert {case.at for case in CASES} == set(MOMENTS)
    trained = [case for case in CASES if case.trains]
    assert len(trained) == 10 and {case.at for case in trained} <= set(TRAINING)
    assert min(Counter((case.fault, case.how) for case in CASES if not case.is_market).values()) >= 4


def test_every_market_fault_is_drawn_as_the_rehearsal_reads_it() -> None:
    for case in CASES:
        if case.is_market:
            parse(case.fault)
    for fault in MARKET_DEAF:
        parse(fault)


def test_the_dead_mans_runs_are_repeatable_too_and_meet_each_of_their_faults() -> None:
    drawn = [draw_deadman(3, number) for number in range(30)]
    assert drawn == [draw_deadman(3, number) for number in range(30)]
    assert set(MARKET_DEAF) < {case.fault for case in drawn}
    assert all(case.how == "bare" and case.at != "start" for case in drawn)


class World:
    """One box of a run whose lease has run out, on the pretend market."""

    def __init__(self, market: VastMarket, store: Store, pretend: Pretend, clock: Clock, folder: Path) -> None:
        self.market, self.store, self.pretend, self.clock, self.folder = market, store, pretend, clock, folder
        pretend.rented()
        write_lease(store, Lease(flow_run_id=FLOW_RUN, run="r", renewed_at=clock.now, expires_at=clock.now + 900))
        clock.now += 1000

    def reaper(self) -> object:
        settings = self.pretend.settings(self.folder)
        return sweep(
            self.market, self.store, settings, clock=self.clock, sleep=self.clock.sleep, settle=lambda *_: None
        )

    def left(self) -> set[int]:
        return {box.id for box in self.pretend.market.alive()}

    def wait(self) -> None:
        self.clock.now += 300


@pytest.mark.parametrize(("reaper_runs", "last_line", "code"), [(True, "left: 0 of 1", 0), (False, "left: 1 of 1", 1)])
def test_a_world_without_destroyers_is_seen_as_left_and_one_with_a_reaper_is_not(
    market: VastMarket,
    store: Store,
    pretend: Pretend,
    clock: Clock,
    tmp_path: Path,
    reaper_runs: bool,
    last_line: str,
    code: int,
) -> None:
    world, outcome = World(market, store, pretend, clock, tmp_path), new(CASES[0])
    tick = world.reaper if reaper_runs else lambda: None
    outcome.reaped, outcome.left = give_back(tick, world.left, world.wait)
    outcome.boxes = 1
    said = report([outcome], "python -m tests.chaos")
    assert (outcome.reaped, said.splitlines()[-1], exit_code([outcome], 1)) == (1, last_line, code)
    assert (f"again: python -m tests.chaos --only {CASES[0].name}" in said) is not reaper_runs


def test_the_table_adds_up_by_fault_and_says_where() -> None:
    outcomes = [
        Outcome("7-0", "flow.sigkill (bare)", "boot", boxes=1, reaped=1, wasted_usd=0.25, lost_steps=3),
        Outcome("7-1", "flow.sigkill (bare)", "boot", boxes=2, wasted_usd=0.5, lost_steps=9, beyond_interval=4),
        Outcome("7-2", "boot.offline_after=3.5", "start", struck=False, remarks=["no receipt"]),
    ]
    said = report(outcomes, "again").splitlines()
    assert said[1].split() == ["boot.offline_after", "1", "0", "0", "0", "0", "0.0000", "0", "0", "start"]
    assert said[2].split() == ["flow.sigkill", "(bare)", "2", "2", "3", "1", "0", "0.7500", "12", "4", "boot", "2"]
    assert "7-2: no receipt" in said[3]
    assert exit_code(outcomes, 3) == 0


@pytest.mark.parametrize(
    "fault", [{"left": 1}, {"lost_manifests": ["sft/10"]}, {"error": "TimeoutError: never came to boot"}]
)
def test_a_box_that_is_left_a_lost_manifest_and_a_run_that_cannot_be_judged_each_end_with_1(
    fault: dict[str, object],
) -> None:
    assert exit_code([Outcome("7-0", "x", "boot", **fault)], 1) == 1  # type: ignore[arg-type]


def test_fewer_runs_than_were_asked_for_end_with_1() -> None:
    assert exit_code([Outcome("7-0", "x", "boot")], 2) == 1


def durable(store: Store, phase: str, step: int, data: bytes = b"weights") -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    manifest = Manifest(
        run="r",
        phase=phase,
        step=step,
        max_steps=20,
        created_at=time.time(),
        phase_digest="d",
        data_sha256="d",
        parent=None,
        versions={},
        files={"weights.bin": FileEntry(sha256=sha256, bytes=len(data))},
    )
    store.put_bytes(layout.blob("r", sha256), data)
    store.put_bytes(layout.manifest("r", phase, step), manifest.model_dump_json().encode())
    return layout.blob("r", sha256)


def test_a_manifest_whose_file_is_missing_or_has_other_bytes_is_damaged(store: Store) -> None:
    blob = durable(store, "sft", 5)
    assert bookkeeping.damaged(store, "r") == []
    store.put_bytes(blob, b"other")
    assert bookkeeping.damaged(store, "r") == ["runs/r/manifests/sft/00000005.json: weights.bin"]
    store.delete(blob)
    assert bookkeeping.damaged(store, "r") == ["runs/r/manifests/sft/00000005.json: weights.bin"]


def test_the_newest_step_of_a_phase_counts_since_older_manifests_are_dropped(store: Store) -> None:
    for step in (5, 10):
        durable(store, "sft", step)
    assert bookkeeping.newest_steps(store, "r") == {"sft": 10}


def test_work_is_lost_that_no_manifest_holds_and_what_the_next_box_resumed_from_is_not(
    store: Store, tmp_path: Path
) -> None:
    durable(store, "sft", 15)
    first, second = EventLog(tmp_path / "1.jsonl"), EventLog(tmp_path / "2.jsonl")
    first.emit(RunnerStart(phases=("cpt", "sft")))
    for phase, trained in (("cpt", 20), ("sft", 12)):
        first.emit(PhaseStart(phase=phase, step=0, max_steps=20))
        first.emit(Step(phase=phase, step=trained, max_steps=20, loss=1.0, seconds=0.1))
    second.emit(RunnerStart(phases=("cpt", "sft"), done=("cpt",)))
    second.emit(PhaseStart(phase="sft", step=5, max_steps=20))
    second.emit(Step(phase="sft", step=18, max_steps=20, loss=1.0, seconds=0.1))
    second.emit(CheckpointDurable(phase="sft", step=15, manifest="m", bytes=1, seconds=1, complete=False))
    # The first box had trained sft to 12 when only 5 was durable; the second ended at 18 with 15 durable.
    work = bookkeeping.work({1: first.path, 2: second.path}, store, "r")
    assert [(each.phase, each.trained, each.durable) for each in work] == [
        ("cpt", 20, 20),
        ("sft", 12, 5),
        ("sft", 18, 15),
    ]
    assert bookkeeping.lost(work, {"cpt": 5, "sft": 5}) == (7 + 3, 2)
