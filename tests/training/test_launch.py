"""Several processes that are one to whoever watches: whose exit code it is, what a lost one leaves to say, who hears of a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from training import launch

ROOT = Path(__file__).parents[2]
_LEADS = "import os, sys, time; leads = os.environ['RANK'] == '0'\n"


def run(script: str, work: Path, count: int = 3) -> tuple[int, str]:
    return launch.run([sys.executable, "-c", _LEADS + script], count, work)


@pytest.mark.parametrize("code", [0, 3, 5, 143])
def test_the_exit_code_is_the_leaders(code: int, tmp_path: Path) -> None:
    assert run(f"sys.exit({code} if leads else 0)", tmp_path) == (code, "")


def test_followers_do_not_outlive_the_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_FOLLOWERS_S", 0.1)
    began = time.monotonic()
    assert run("leads or time.sleep(600); sys.exit(4)", tmp_path) == (4, "")
    assert time.monotonic() - began < 30


def test_a_follower_that_fails_ends_all_and_its_own_words_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_LEADER_S", 0.1)
    word = json.dumps({"reason": "process 2 of 3: the card fell off", "blame": "host"})
    fails = f"""
if os.environ['RANK'] == '2':
    open({str(tmp_path)!r} + '/rank-2.aborted.json', 'w').write({word!r}); sys.exit(1)
time.sleep(600)
"""
    assert run(fails, tmp_path) == (1, word)


def test_a_follower_that_was_killed_is_named_with_the_likely_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_LEADER_S", 0.1)
    code, said = run("leads and time.sleep(600) or os.kill(os.getpid(), 9)", tmp_path, count=2)
    told = json.loads(said)
    assert code == 1 and told["blame"] == "host"
    assert told["reason"].startswith("process 1 of 2 ended by signal 9 (SIGKILL); SIGKILL mostly means")


def test_a_leader_that_lost_somebody_first_leaves_the_telling_to_us(tmp_path: Path) -> None:
    _, said = run(f"sys.exit({launch.LOST}) if leads else (time.sleep(1), os.abort())", tmp_path, count=2)
    assert "process 1 of 2 ended by signal 6 (SIGABRT)" in json.loads(said)["reason"]


def test_a_fault_that_all_see_is_told_by_the_leader_alone(tmp_path: Path) -> None:
    assert run("time.sleep(1 if leads else 0); sys.exit(3 if leads else 1)", tmp_path) == (3, "")


def test_what_an_earlier_run_left_to_say_is_not_said_again(tmp_path: Path) -> None:
    (tmp_path / launch.ERROR_FILE.format(1)).write_text("old")
    assert run("pass", tmp_path) == (0, "")
    assert not (tmp_path / launch.ERROR_FILE.format(1)).exists()


def test_a_signal_goes_to_the_leader_alone(tmp_path: Path) -> None:
    told = """
import signal
def heard(*_):
    open(sys.argv[1] + '/' + os.environ['RANK'], 'w').close(); sys.exit(143)
signal.signal(signal.SIGTERM, heard if leads else signal.SIG_IGN)
open(sys.argv[1] + '/ready-' + os.environ['RANK'], 'w').close()
time.sleep(2 if not leads else 600)
"""
    program = (
        "import sys; from pathlib import Path; from training import launch;"
        f"sys.exit(launch.run([sys.executable, '-c', {_LEADS + told!r}, {str(tmp_path)!r}], 2, Path({str(tmp_path)!r}))[0])"
    )
    watched = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    watched.send_signal(signal.SIGTERM)
    assert watched.wait(timeout=60) == 143
    assert (tmp_path / "0").exists() and not (tmp_path / "1").exists()
