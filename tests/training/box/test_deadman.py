"""The dead-man switch: when it acts, and that the onstart script really arms it. The market is a real HTTP server."""

from __future__ import annotations

import contextlib
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

import psutil
import pytest

from tasks.remote.bundle import ONSTART_CHARACTERS, onstart
from training.box import deadman
from training.contract.events import EventLog, Heartbeat, Notice, Step

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
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


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


def reason(*, now: float = 1000, hard_end: float = 9999, alive_at: float = 900, still_s: float | None = None) -> str:
    return deadman.reason(now, hard_end, alive_at, 60, still_s, 300)


def test_the_hard_end_destroys_even_while_a_job_gets_on() -> None:
    assert reason(now=1001, hard_end=1000, alive_at=1001, still_s=0) == "the hard end has passed"


def test_silence_destroys_when_no_job_runs_and_not_before() -> None:
    assert "no job runs" in reason()
    assert reason(alive_at=950) == ""


def test_a_job_that_gets_on_keeps_a_silent_box_and_one_that_hangs_does_not() -> None:
    assert reason(still_s=300) == ""
    assert reason(still_s=301) == "nobody has asked for this box for 100 s and its job has got nowhere for 301 s"


def test_a_job_that_hangs_is_the_flows_to_judge_while_the_flow_is_heard_of() -> None:
    assert reason(alive_at=990, still_s=9000) == ""


def test_a_held_lock_and_a_beating_heart_are_no_progress_and_a_step_or_a_line_of_a_log_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(deadman, "HOME", str(tmp_path))
    events, log, read = tmp_path / "events.jsonl", tmp_path / "jobs/install/log", dict[str, int]()
    log.parent.mkdir(parents=True)
    assert not deadman.moved(read), "nothing is there yet"

    def told(kind: str) -> bool:
        with events.open("a") as file:
            file.write(json.dumps({"v": 1, "kind": kind, "reason": "x"}, separators=(",", ":")) + "\n")
        return deadman.moved(read)

    assert [told(kind) for kind in ("step", "heartbeat", "notice", "transfer", "heartbeat")] == [
        True,
        False,
        False,
        True,
        False,
    ]
    log.write_text("resolved 90 packages\n")
    assert deadman.moved(read) and not deadman.moved(read)
    log.write_text("begun anew\n")
    assert deadman.moved(read), "the next job of this name has a log of its own"


def test_a_real_events_file_is_read_as_it_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The words that the dead-man looks for are the contract's own."""
    monkeypatch.setattr(deadman, "HOME", str(tmp_path))
    log, read = EventLog(tmp_path / "events.jsonl"), dict[str, int]()
    log.emit(Step(phase="sft", step=1, max_steps=2, loss=1.0, seconds=1.0))
    assert deadman.moved(read)
    log.emit(Heartbeat(phase="sft", step=2, in_step_s=900.0))
    log.emit(Notice(what="upload", reason="tried again"))
    assert not deadman.moved(read)


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
    "answer", [GONE, (200, {"success": True}), (429, "API requests too frequent"), (500, "<html>"), (200, ["success"])]
)
def test_whatever_the_market_answers_a_box_that_lives_to_read_it_asks_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, market: Callable[..., Market], answer: tuple[int, object]
) -> None:
    served = market(answer)
    monkeypatch.setattr(deadman, "HOME", str(tmp_path))
    monkeypatch.setattr(deadman, "time", Clock(jump_s=0, turns=3))
    (tmp_path / "instance.env").write_text(f"CONTAINER_ID=77\nCONTAINER_API_KEY=k3y\nVAST_URL={served.url}\n")
    with pytest.raises(SystemExit):
        deadman.main(["1", "2700", "30"])
    assert served.requests == [("/api/v0/instances/77/", "Bearer k3y")] * 3


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


Boot = Callable[[str, str], Path]


@pytest.fixture
def boot(tmp_path: Path) -> Iterator[Boot]:
    """Run onstart as the market would, with the container's environment; the home that it fills. Whom it started is ended at last."""
    home = tmp_path / "home"

    def run(url: str, script: str) -> Path:
        home.mkdir(exist_ok=True)
        environ = {
            "HOME": str(home),
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "CONTAINER_ID": "42",
            "CONTAINER_API_KEY": "instance-key",
            "VAST_URL": url,
        }
        command = ["bash", "-c", script]
        subprocess.run(command, env=environ, capture_output=True, timeout=20, stdin=subprocess.DEVNULL, check=True)
        return home

    yield run
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                process.kill()


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_onstart_arms_a_dead_man_that_destroys_after_the_hard_end_and_tries_again(
    boot: Boot, market: Callable[..., Market]
) -> None:
    stays = (200, {"success": True})  # and the box is still there to ask again
    served = market((500, "oops"), (429, "slow down"), stays, GONE)
    home = boot(served.url, onstart(hard_end=int(time.time()) - 1, poll_s=0.1))
    assert wait_for(lambda: len(served.requests) >= 5)
    assert set(served.requests) == {("/api/v0/instances/42/", "Bearer instance-key")}
    kept = home / "livery/instance.env"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert (home / ".no_auto_tmux").exists()
    assert "instance-key" not in (home / "livery/deadman.log").read_text()


def test_a_silent_box_is_destroyed_and_a_touched_one_is_not(boot: Boot, market: Callable[..., Market]) -> None:
    served = market(GONE)
    alive = boot(served.url, onstart(hard_end=int(time.time()) + 999, silent_s=1.5, poll_s=0.1)) / "livery/alive"
    for _ in range(10):
        alive.touch()
        time.sleep(0.3)
    assert served.requests == []
    assert wait_for(lambda: len(served.requests) >= 1)


def test_a_box_whose_job_hangs_with_its_heart_beating_is_destroyed_and_one_whose_job_gets_on_is_not(
    tmp_path: Path, boot: Boot, market: Callable[..., Market]
) -> None:
    served = market(GONE)
    home = tmp_path / "home/livery"
    (home / "jobs/runner").mkdir(parents=True)
    log = EventLog(home / "events.jsonl")
    with (home / "jobs/runner/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        script = onstart(hard_end=int(time.time()) + 999, silent_s=0.4, stalled_s=1.2, poll_s=0.1)
        boot(served.url, script)
        for step in range(7):
            log.emit(Step(phase="sft", step=step, max_steps=9, loss=1.0, seconds=0.3))
            time.sleep(0.3)
        assert served.requests == []
        beat = threading.Event()

        def heart() -> None:
            while not beat.wait(0.1):
                log.emit(Heartbeat(phase="sft", step=8, in_step_s=1.0))

        threading.Thread(target=heart, daemon=True).start()
        assert wait_for(lambda: len(served.requests) >= 1)
        beat.set()
    assert "got nowhere" in (home / "deadman.log").read_text()


def test_after_a_second_boot_the_first_dead_man_goes_on_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, market: Callable[..., Market]
) -> None:
    served = market(GONE)
    monkeypatch.setattr(deadman, "HOME", str(tmp_path))
    (tmp_path / "instance.env").write_text(f"CONTAINER_ID=77\nCONTAINER_API_KEY=k3y\nVAST_URL={served.url}\n")
    with (tmp_path / "deadman.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert deadman.main(["1", "60"]) == 0
    assert served.requests == []


def test_onstart_fits_the_markets_limit_and_holds_no_secret() -> None:
    script = onstart(hard_end=1_800_000_000)
    assert len(script) <= ONSTART_CHARACTERS
    assert "$CONTAINER_API_KEY" in script and "console.vast.ai" not in script
