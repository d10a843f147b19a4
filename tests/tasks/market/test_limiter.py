from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tasks.market.limiter import Limiter
from tests.tasks.pretend import NOW, Clock

DELETE = ("DELETE", "/api/v0/instances/{id}/")
SHOW = ("GET", "/api/v0/instances/{id}/")


def _limiter(path: Path, clock: Clock, key: str = "key", pace: float = 1.0) -> Limiter:
    return Limiter(path, key, pace, clock=clock, sleep=clock.sleep)


def test_two_calls_of_one_endpoint_keep_its_interval(tmp_path: Path) -> None:
    clock = Clock()
    limiter = _limiter(tmp_path, clock)
    for _ in range(3):
        limiter.wait(*DELETE)
    assert clock.slept == [3.0, 3.0]


def test_endpoints_do_not_wait_for_each_other(tmp_path: Path) -> None:
    clock = Clock()
    limiter = _limiter(tmp_path, clock)
    limiter.wait(*DELETE)
    limiter.wait(*SHOW)
    assert clock.slept == []


def test_keys_do_not_wait_for_each_other_and_stand_in_no_file_name(tmp_path: Path) -> None:
    clock = Clock()
    _limiter(tmp_path, clock, "first-secret").wait(*DELETE)
    _limiter(tmp_path, clock, "second-secret").wait(*DELETE)
    assert clock.slept == []
    assert not [path for path in tmp_path.iterdir() if "secret" in path.name or "secret" in path.read_text()]


def test_two_objects_with_one_key_share_the_interval(tmp_path: Path) -> None:
    clock = Clock()
    _limiter(tmp_path, clock).wait(*DELETE)
    _limiter(tmp_path, clock).wait(*DELETE)
    assert clock.slept == [3.0]


def test_the_pace_scales_every_interval(tmp_path: Path) -> None:
    clock = Clock()
    limiter = _limiter(tmp_path, clock, pace=0.1)
    limiter.wait(*DELETE)
    limiter.wait(*DELETE)
    assert clock.slept == [pytest.approx(0.3)]


def test_a_clock_set_back_does_not_wait_for_the_old_time(tmp_path: Path) -> None:
    clock = Clock()
    limiter = _limiter(tmp_path, clock)
    limiter.wait(*DELETE)
    clock.now -= 86_400
    limiter.wait(*DELETE)
    assert clock.slept == []


def test_a_garbled_file_is_started_anew(tmp_path: Path) -> None:
    clock = Clock()
    _limiter(tmp_path, clock).wait(*DELETE)
    next(tmp_path.iterdir()).write_text('{"DELETE ')
    _limiter(tmp_path, clock).wait(*DELETE)
    assert clock.slept == []


def test_a_disk_that_cannot_be_written_paces_alone_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    clock = Clock()
    limiter = _limiter(blocked / "state", clock)
    limiter.wait(*DELETE)
    limiter.wait(*DELETE)
    assert clock.slept == [3.0]
    assert len(caplog.records) == 1 and "other processes" in caplog.text


def test_processes_that_race_take_turns(tmp_path: Path) -> None:
    """Each child only reserves (its sleep is noted, not slept), and all begin at once: no two may get the same moment."""
    program = (
        "import sys, time; from pathlib import Path; from tasks.market.limiter import Limiter\n"
        "slept = []; start = float(sys.argv[2])\n"
        "limiter = Limiter(Path(sys.argv[1]), 'key', 0.5, clock=lambda: start, sleep=slept.append)\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "for _ in range(30):\n"
        "    slept.clear(); limiter.wait('GET', '/api/v0/instances/{id}/'); print(sum(slept))\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(NOW)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    moments = sorted(float(line) for child in children for line in child.communicate(timeout=60)[0].split())
    assert moments == [float(turn) for turn in range(120)]
