"""`make chaos`: runs of the rehearsal, each with one thing that goes wrong at a drawn moment, then two ticks of the reaper; what is left?

    python -m tests.chaos [--runs 200] [--seed N] [--lanes 4] [--only SEED-NUMBER …] [--deadman]

With --deadman the orchestrator is killed and there is no reaper: each box must end itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from deployments.seed import CACHE, make
from deployments.up import Stopped, running, unwinding_on_signals
from tasks.domain import BOX_LIMIT
from tests.chaos.draw import Case, draw, draw_deadman
from tests.chaos.lane import serve_cases
from tests.chaos.outcome import Outcome, exit_code, new, report
from tests.chaos.prefects import ROOT

# A lane says nothing for longer than the longest run and its clearing up: it is lost.
_LANE_S = 1500.0
# Two cores are busy with four: most of a run is waiting.
LANES = 4


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.lane is not None:
        with unwinding_on_signals():
            serve_cases(options.lane, deadman=options.deadman)
        return 0
    seed, numbers = _numbers(options)
    root = Path(tempfile.mkdtemp(prefix="livery-chaos-"))
    lanes = min(options.lanes, len(numbers))
    print(f"SEED={seed}: {len(numbers)} runs in {lanes} lanes; logs in {root}", flush=True)
    chaos = Chaos(root, seed, numbers, deadman=options.deadman)
    # Once, before the lanes would each begin to.
    make(ROOT / CACHE)
    try:
        with (
            unwinding_on_signals(),
            contextlib.chdir(root),
            running(private_server=True, serve=False, with_market=False) as up,
        ):
            # Slots of runs that were killed come back after minutes; here runs follow each other faster.
            httpx.patch(
                f"{up.api_url}/v2/concurrency_limits/{BOX_LIMIT}", json={"limit": 1000}, timeout=30
            ).raise_for_status()
            chaos.run(lanes, up.environ)
    except Stopped as signal:
        print(f"stopped by {signal}; what was flown until then:")
    again = f"python -m tests.chaos{' --deadman' if options.deadman else ''}"
    for wrong in chaos.wrong:
        print(f"WRONG at the end: {wrong}")
    print(f"SEED={seed}: {chaos.pace}")
    print(report(chaos.outcomes, again))
    code = exit_code(chaos.outcomes, len(numbers)) or int(bool(chaos.wrong))
    if code == 0 and not options.keep_logs:
        shutil.rmtree(root, ignore_errors=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, help="what to draw from; printed if it is not given")
    parser.add_argument("--only", nargs="+", metavar="SEED-NUMBER", help="repeat these runs of one seed")
    parser.add_argument("--lanes", type=int, default=LANES, help="worlds side by side")
    parser.add_argument("--deadman", action="store_true", help="no orchestrator, no reaper: only the box's own switch")
    parser.add_argument("--keep-logs", action="store_true")
    parser.add_argument("--lane", type=Path, help=argparse.SUPPRESS)
    return parser


def _numbers(options: argparse.Namespace) -> tuple[int, list[int]]:
    if not options.only:
        seed = random.SystemRandom().randrange(1, 100_000) if options.seed is None else options.seed
        return seed, list(range(options.runs))
    drawn = [tuple(int(part) for part in name.split("-")) for name in options.only]
    if len({seed for seed, _ in drawn}) != 1:
        raise SystemExit(f"--only {' '.join(options.only)}: these are of several seeds; name runs of one")
    return drawn[0][0], [number for _, number in drawn]


class Chaos:
    """Hands the numbers out to the lanes and collects what came of them."""

    def __init__(self, root: Path, seed: int, numbers: Sequence[int], *, deadman: bool) -> None:
        self.root, self.seed, self.deadman = root, seed, deadman
        self.outcomes: list[Outcome] = []
        self.wrong: list[str] = []
        self._environ: dict[str, str] = {}
        self._wanted, self._stopping = len(numbers), False
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in numbers:
            self._numbers.put(number)
        self._processes: list[subprocess.Popen[str]] = []
        self._began = time.monotonic()

    def run(self, lanes: int, environ: Mapping[str, str]) -> None:
        """`environ` names the Prefect server that the lanes share."""
        self._environ = {**environ, "PYTHONPATH": str(ROOT)}
        threads = [threading.Thread(target=self._lane, args=(index,), daemon=True) for index in range(lanes)]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.2)
        finally:
            # Each lane takes its own world down; it is given the time to.
            self._stopping = True
            for process in self._processes:
                if process.poll() is None:
                    process.terminate()
            for process in self._processes:
                try:
                    process.wait(120)
                except subprocess.TimeoutExpired:
                    process.kill()

    @property
    def pace(self) -> str:
        minutes, runs = (time.monotonic() - self._began) / 60, max(1, len(self.outcomes))
        spent = os.times()
        cpu_s = spent.user + spent.system + spent.children_user + spent.children_system
        return (
            f"{minutes:.1f} min, {60 * minutes / runs:.1f} s and {cpu_s / runs:.0f} CPU seconds a run, servers included"
        )

    def _lane(self, index: int) -> None:
        """Flies numbers until none is left. A lane that dies is told as the end of the run that it was flying, and another is opened."""
        opened = 0
        while not self._numbers.empty() and not self._stopping:
            opened += 1
            try:
                self._fly_all(self.root / f"lane-{index}-{opened}")
            except LaneLost as lost:
                if self._stopping:
                    return
                if lost.case is None:
                    self.wrong.append(f"lane {index} did not open: {lost}")
                    return
                self._add(_errored(lost.case, str(lost)))

    def _fly_all(self, root: Path) -> None:
        process = self._open(root)
        assert process.stdin is not None
        self._answer(process, root, None)
        while True:
            try:
                number = self._numbers.get_nowait()
            except queue.Empty:
                break
            case = (draw_deadman if self.deadman else draw)(self.seed, number)
            try:
                process.stdin.write(f"{self.seed} {number}\n")
                process.stdin.flush()
            except OSError:
                raise LaneLost(f"the lane has ended; see {root}/lane.log", case) from None
            self._add(Outcome(**self._answer(process, root, case)))
        process.stdin.close()
        self.wrong += self._answer(process, root, None)["wrong"]
        process.wait(120)

    def _open(self, root: Path) -> subprocess.Popen[str]:
        root.mkdir(parents=True)
        argv = [sys.executable, "-m", "tests.chaos", "--lane", str(root), *(["--deadman"] if self.deadman else [])]
        with open(root / "lane.log", "w") as log:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env=self._environ,
            )
        self._processes.append(process)
        return process

    def _answer(self, process: subprocess.Popen[str], root: Path, case: Case | None) -> dict[str, Any]:
        assert process.stdout is not None
        alarm = threading.Timer(_LANE_S, process.kill)
        alarm.start()
        try:
            line = process.stdout.readline()
        finally:
            alarm.cancel()
        if not line:
            raise LaneLost(f"the lane ended without an answer; see {root}/lane.log", case)
        return dict(json.loads(line))

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        minutes = (time.monotonic() - self._began) / 60
        print(f"[{len(self.outcomes):>3}/{self._wanted} {minutes:5.1f} min] {outcome.line}", flush=True)


class LaneLost(Exception):
    """A lane's process ended in the middle; `case` is what it was flying."""

    def __init__(self, message: str, case: Case | None) -> None:
        super().__init__(message)
        self.case = case


def _errored(case: Case, error: str) -> Outcome:
    outcome = new(case)
    outcome.error = error
    return outcome


if __name__ == "__main__":
    sys.exit(main())
