from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deployments.rehearsal.api import Api
from deployments.rehearsal.api import Limiter as Judge
from deployments.rehearsal.market import Market
from tasks.errors import RateLimited
from tasks.market.limiter import Limiter
from tests.tasks.pretend import Clock

DELETE = ("DELETE", "/api/v0/instances/{id}/")
LIST = ("GET", "/api/v1/instances/")
SHOW = ("GET", "/api/v0/instances/{id}/")


def _limiter(path: Path, clock: Clock, key: str = "key", pace: float = 1.0) -> Limiter:
    return Limiter(path, key, pace, clock=clock, sleep=clock.sleep)


def test_two_calls_of_one_endpoint_keep_its_interval(tmp_path: Path) -> None:
    clock = Clock()
    limiter = _limiter(tmp_path, clock)
    for _ in range(3):
        limiter.wait(*DELETE)
    assert clock.slept == pytest.approx([3.3, 3.3])


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
    assert clock.slept == pytest.approx([3.3])


def test_the_pace_scales_every_interval(tmp_path: Path) -> None:
    clock = Clock()
    limiter = _limiter(tmp_path, clock, pace=0.1)
    limiter.wait(*DELETE)
    limiter.wait(*DELETE)
    assert clock.slept == [pytest.approx(0.33)]


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
    assert clock.slept == pytest.approx([3.3])
    assert len(caplog.records) == 1 and "other processes" in caplog.text


def test_who_oversleeps_does_not_have_the_next_in_line_on_his_heels(tmp_path: Path) -> None:
    clock = Clock()
    _limiter(tmp_path, clock).wait(*DELETE)

    def oversleep(seconds: float) -> None:
        clock.sleep(seconds + 2.0)

    Limiter(tmp_path, "key", clock=clock, sleep=oversleep).wait(*DELETE)
    sent = clock.now
    _limiter(tmp_path, clock).wait(*DELETE)
    assert clock.now - sent == pytest.approx(3.3)


def test_who_has_no_time_for_the_line_is_told_and_takes_no_place_in_it(tmp_path: Path) -> None:
    clock = Clock()
    for _ in range(2):
        _limiter(tmp_path, clock).wait(*DELETE)
    before = clock.now
    with pytest.raises(RateLimited, match=r"in line for 3\.3 s, 2\.0 s are left"):
        _limiter(tmp_path, clock).wait(*DELETE, at_most_s=2.0)
    assert clock.now == before
    _limiter(tmp_path, clock).wait(*DELETE, at_most_s=4.0)
    assert clock.now - before == pytest.approx(3.3)


@pytest.mark.parametrize(("seconds", "wait_s"), [(None, 13.2), (30.0, 30.0)])
def test_a_refusal_holds_everybody_with_this_key_back(tmp_path: Path, seconds: float | None, wait_s: float) -> None:
    """A create call that came too early costs twelve seconds, if the market asks for no other wait."""
    clock, create = Clock(), ("PUT", "/api/v0/asks/{id}/")
    limiter = Limiter(tmp_path, "key", 1.1, clock=clock, sleep=clock.sleep)
    limiter.hold_back(*create, seconds)
    _limiter(tmp_path, clock, pace=1.1).wait(*create)
    assert clock.slept == pytest.approx([wait_s])


_TWENTY = """
import os, sys, time
from pathlib import Path
from tasks.market.limiter import Limiter
shared, calls, seen = sys.argv[1] == "one", [line.split() for line in sys.argv[3:]], []
def clock():
    seen.append(time.time())
    return seen[-1]
for number in range(20):
    if os.fork() == 0:
        folder = Path(sys.argv[2]) if shared else Path(sys.argv[2]) / str(number)
        limiter = Limiter(folder, "key", 0.02, clock=clock)
        for method, template in calls * 2:
            limiter.wait(method, template)
            os.write(1, f"{seen[-1]!r} {method} {template}\\n".encode())  # the moment under the lock, whenever this process ran on
        os._exit(0)
sys.exit(max(os.wait()[1] for _ in range(20)))
"""


@pytest.mark.parametrize("folders", ["one", "twenty"])
def test_twenty_processes_with_one_key_never_call_too_early(folders: str, tmp_path: Path) -> None:
    """The market's own limiter is the judge of the moments, with no slack. Each for itself they do collide: the shared file is what helps."""
    calls = [f"{method} {template}" for method, template in (SHOW, LIST)]
    told = subprocess.run(
        [sys.executable, "-c", _TWENTY, folders, str(tmp_path), *calls], stdout=subprocess.PIPE, text=True, timeout=120
    )
    moments = sorted((float(line.split()[0]), line.split(" ", 1)[1]) for line in told.stdout.splitlines())
    judge, routes = Judge(0.02), Api(Market(Clock())).routes
    judge.SLACK_S = judge.SLACK_SHARE = 0.0
    route_of = {f"{route.method} {route.template}": route for route in routes}
    refused = [call for at, call in moments if judge.refusal(route_of[call], "key", at)]
    assert told.returncode == 0 and len(moments) == 20 * len(calls) * 2
    assert (not refused) == (folders == "one")
