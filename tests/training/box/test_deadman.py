"""The dead-man switch: when it acts, and that the onstart script really arms it. The market is a real HTTP server."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tasks.remote.bundle import ONSTART_CHARACTERS, onstart
from training.box import deadman

GONE = (404, {"error": "no_such_instance"})


class Market:
    """Answers DELETE with the given replies in turn, the last one for ever."""

    def __init__(self, *replies: tuple[int, object]) -> None:
        self.requests: list[tuple[str, str]] = []
        market = self

        class Handler(BaseHTTPRequestHandler):
            def do_DELETE(self) -> None:
                market.requests.append((self.path, self.headers["Authorization"]))
                status, body = replies[min(len(market.requests), len(replies)) - 1]
                data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def market() -> Iterator[Callable[..., Market]]:
    made: list[Market] = []

    def make(*replies: tuple[int, object]) -> Market:
        made.append(Market(*replies))
        return made[-1]

    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def test_the_hard_end_destroys_even_while_a_job_runs() -> None:
    assert deadman.reason(1001, 1000, 1001, 60, True) == "the hard end has passed"


def test_silence_destroys_only_when_no_job_runs() -> None:
    assert "no job runs" in deadman.reason(1000, 9999, 900, 60, False)
    assert deadman.reason(1000, 9999, 900, 60, True) == ""
    assert deadman.reason(1000, 9999, 950, 60, False) == ""


def test_a_box_just_booted_is_given_its_time_although_the_file_is_old(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deadman, "HOME", str(tmp_path))
    assert deadman.last_alive(500.0) == 500.0
    (tmp_path / "alive").touch()
    os.utime(tmp_path / "alive", (100, 100))
    assert deadman.last_alive(500.0) == 500.0
    os.utime(tmp_path / "alive", (900, 900))
    assert deadman.last_alive(500.0) == 900.0


def test_a_held_job_lock_is_a_running_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deadman, "HOME", str(tmp_path))
    (tmp_path / "jobs/runner").mkdir(parents=True)
    with (tmp_path / "jobs/runner/lock").open("w") as lock:
        assert not deadman.any_job()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert deadman.any_job()


@pytest.mark.parametrize(
    ("status", "body", "gone"),
    [
        (200, {"success": True}, False),
        (404, {"error": "no_such_instance"}, True),
        (200, {"success": False, "error": "x"}, False),
        (404, {"error": "auth_error", "msg": "Invalid user key"}, False),
        (429, "API requests too frequent", False),
        (500, "<html>", False),
        (200, ["success"], False),
    ],
)
def test_only_the_markets_own_word_counts_as_destroyed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    market: Callable[..., Market],
    status: int,
    body: object,
    gone: bool,
) -> None:
    served = market((status, body))
    monkeypatch.setattr(deadman, "HOME", str(tmp_path))
    (tmp_path / "instance.env").write_text(f"CONTAINER_ID=77\nCONTAINER_API_KEY=k3y\nVAST_URL={served.url}\n")
    assert deadman.destroy("test") is gone
    assert served.requests == [("/api/v0/instances/77/", "Bearer k3y")]


class Clock:
    """A wall clock that is set forward in the middle of a run; ends the dead-man's loop after so many turns."""

    def __init__(self, jump_s: float, turns: int) -> None:
        self._ticks, self._jump_s, self._turns = 0.0, jump_s, turns

    def time(self) -> float:
        return 1000.0 + self._ticks + (self._jump_s if self._ticks > 100 else 0.0)

    def monotonic(self) -> float:
        return self._ticks

    def sleep(self, seconds: float) -> None:
        self._ticks, self._turns = self._ticks + seconds, self._turns - 1
        if not self._turns:
            raise SystemExit


@pytest.mark.parametrize(("turns", "asked"), [(80, False), (100, True)])
def test_a_clock_that_is_set_forward_is_no_silence_and_real_silence_still_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, market: Callable[..., Market], turns: int, asked: bool
) -> None:
    served = market((500, "oops"))
    monkeypatch.setattr(deadman, "HOME", str(tmp_path))
    monkeypatch.setattr(deadman, "time", Clock(jump_s=7200, turns=turns))
    (tmp_path / "instance.env").write_text(f"CONTAINER_ID=77\nCONTAINER_API_KEY=k3y\nVAST_URL={served.url}\n")
    with pytest.raises(SystemExit):
        deadman.main(["99999999", "2700", "30"])
    assert bool(served.requests) is asked


def test_the_dead_man_outlives_a_missing_key_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, market: Callable[..., Market], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(deadman, "HOME", str(tmp_path))
    monkeypatch.setattr(deadman, "time", Clock(jump_s=0, turns=3))
    with pytest.raises(SystemExit):
        deadman.main(["1", "2700", "30"])
    assert capsys.readouterr().out.count("FileNotFoundError") == 3


def boot(home: Path, url: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run onstart as the market would, with the container's environment."""
    home.mkdir(exist_ok=True)
    environ = {
        "HOME": str(home),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "CONTAINER_ID": "42",
        "CONTAINER_API_KEY": "instance-key",
        "VAST_URL": url,
    }
    return subprocess.run(
        ["bash", "-c", script], env=environ, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
    )


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_onstart_arms_a_dead_man_that_destroys_after_the_hard_end_and_tries_again(
    tmp_path: Path, market: Callable[..., Market]
) -> None:
    stays = (200, {"success": True})  # and the box is still there to ask again
    served = market((500, "oops"), (429, "slow down"), stays, GONE)
    boot(tmp_path / "home", served.url, onstart(hard_end=int(time.time()) - 1, poll_s=0.1))
    assert wait_for(lambda: len(served.requests) == 4)
    time.sleep(0.5)
    assert served.requests == [("/api/v0/instances/42/", "Bearer instance-key")] * 4
    kept = tmp_path / "home/livery/instance.env"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert (tmp_path / "home/.no_auto_tmux").exists()
    assert "instance-key" not in (tmp_path / "home/livery/deadman.log").read_text()


def test_a_silent_box_is_destroyed_and_a_touched_one_is_not(tmp_path: Path, market: Callable[..., Market]) -> None:
    served = market(GONE)
    boot(tmp_path / "home", served.url, onstart(hard_end=int(time.time()) + 999, silent_s=1.5, poll_s=0.1))
    alive = tmp_path / "home/livery/alive"
    for _ in range(10):
        alive.touch()
        time.sleep(0.3)
    assert served.requests == []
    assert wait_for(lambda: len(served.requests) == 1)


def test_a_second_boot_does_not_start_a_second_dead_man(tmp_path: Path, market: Callable[..., Market]) -> None:
    served = market(GONE)
    script = onstart(hard_end=int(time.time()) + 3, poll_s=0.1)
    boot(tmp_path / "home", served.url, script)
    time.sleep(0.5)
    boot(tmp_path / "home", served.url, script)
    assert wait_for(lambda: len(served.requests) >= 1)
    time.sleep(1)
    assert len(served.requests) == 1


def test_onstart_fits_the_markets_limit_and_holds_no_secret() -> None:
    script = onstart(hard_end=1_800_000_000)
    assert len(script) <= ONSTART_CHARACTERS
    assert "$CONTAINER_API_KEY" in script and "console.vast.ai" not in script
