"""What the parent of a transfer believes and when it gives up, by its own rules and with small children that misbehave."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from pathlib import Path

import pytest

from training.box.child import Damaged, Fenced, Limits, Pace, Refused, Stalled, Voice, _mbps, supervise
from training.box.store import MachineFault
from training.contract.events import EventLog, Notice, Transfer, read_events

MB = 1 << 20


def judged(pace: Pace, rate_bytes_s: float, seconds: range, total: int, done: float = 0) -> tuple[int, str] | None:
    """When, in seconds, a transfer at that rate is given up, and the reason."""
    for second in seconds:
        if reason := pace.hopeless(float(second), int(done + rate_bytes_s * (second - seconds.start)), total, 1500):
            return second, reason
    return None


def test_seven_gb_at_038_mb_a_second_are_given_up_after_two_minutes_of_looking_and_two_of_being_late() -> None:
    pace = Pace(120)
    found = judged(pace, 0.38e6, range(1500), 7 * 10**9)
    assert found is not None and 230 <= found[0] <= 300
    assert "too slow" in found[1] and "3.04 Mbps" in found[1]


def test_a_dip_of_two_minutes_is_no_reason() -> None:
    pace = Pace(120)
    assert judged(pace, 10e6, range(300), 7 * 10**9) is None
    assert judged(pace, 0.1e6, range(300, 410), 7 * 10**9, done=3e9) is None
    assert judged(pace, 10e6, range(410, 800), 7 * 10**9, done=3.011e9) is None


def test_a_transfer_in_time_or_done_or_not_announced_is_left_alone() -> None:
    assert judged(Pace(120), 5e6, range(1400), 7 * 10**9) is None
    assert Pace(1).hopeless(5.0, 10, 10, 2.0) == "" and Pace(1).hopeless(5.0, 0, 0, 2.0) == ""


@pytest.fixture
def events(tmp_path: Path) -> EventLog:
    return EventLog(tmp_path / "events.jsonl")


def call(events: EventLog, code: str, limits: Limits) -> object:
    script = f"import sys, time, json\nattempt = int(sys.argv[sys.argv.index('--attempt') + 1])\n{code}"
    return supervise([sys.executable, "-c", script], events, "up", limits)


SAY = "def say(**word): print(json.dumps(word), flush=True)\n"


def test_a_slow_way_is_left_for_another_and_the_second_slow_one_is_the_end(events: EventLog) -> None:
    code = SAY + "for n in range(1000):\n  say(what='x', done=n * 1000, total=10**9)\n  time.sleep(0.1)"
    began = time.monotonic()
    with pytest.raises(Stalled, match=r"try 2: too slow: .* it was tried in 2 ways, and the budget is 20 s"):
        call(events, code, Limits(stall_s=60, budget_s=20))
    assert time.monotonic() - began < 20, "before the budget is over"
    (notice,) = [event for event in read_events(events.path) if isinstance(event, Notice)]
    assert "too slow" in notice.reason and "at most 2 at a time, parts of 10 MiB" in notice.reason


def test_what_the_line_carried_is_counted_over_all_tries(events: EventLog) -> None:
    code = SAY + (
        "say(what='x', done=0, total=100, moved=70)\nif attempt == 0: time.sleep(60)\n"
        "say(what='x', done=100, total=100, moved=100, sent=100)"
    )
    account = call(events, code, Limits(stall_s=1, budget_s=60))
    assert (account.sent, account.moved) == (100, 170)  # type: ignore[attr-defined]
    last = [event for event in read_events(events.path) if isinstance(event, Transfer)][-1]
    assert last.finished and last.line_bytes == 170


def test_a_slow_line_has_a_rate_before_the_other_side_has_acknowledged_anything(events: EventLog) -> None:
    code = SAY + (
        "for n in range(24):\n  say(what='x', done=0, total=10**7, moved=n * 38_000)\n  time.sleep(0.1)\n"
        "say(what='x', done=10**7, total=10**7, moved=10**7, sent=10**7)"
    )
    call(events, code, Limits(stall_s=5, budget_s=60))
    rates = [event.mbps for event in read_events(events.path) if isinstance(event, Transfer)]
    assert rates[0] == 0 and 1.5 < rates[1] < 3.5 and rates[-1] > 20, rates


def test_the_rate_is_of_the_last_half_minute_and_in_the_end_of_the_whole_transfer() -> None:
    slowed = deque(
        (float(second), min(second, 60) * 1_000_000 + max(0, second - 60) * 1000, 0) for second in range(100)
    )
    assert _mbps(slowed, whole=False) == pytest.approx(0.008, rel=0.1)
    whole = deque((float(second), second * 1_000_000, 0) for second in range(100))
    assert _mbps(whole, whole=True) == pytest.approx(8)
    assert _mbps(deque([(0.0, 0, 0), (10.0, 0, 10_000_000)]), whole=False) == pytest.approx(8), "a hub tells no line"
    assert _mbps(deque([(0.0, 0, 0), (40.0, 40_000_000, 0)]), whole=False) == pytest.approx(8), (
        "nothing was seen between"
    )
    assert _mbps(deque([(0.0, 5, 5)]), whole=False) == 0


def test_how_far_it_is_is_said_however_often_bytes_move(capsys: pytest.CaptureFixture[str]) -> None:
    voice = Voice()
    voice.progress("upload sft/4", 0, 1000)
    for done in range(0, 900, 10):
        voice.moved(10)
        voice.progress("upload sft/4", done, 1000)
        time.sleep(0.02)
    words = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert words[1]["done"] == 0, "at once when something begins"
    assert len({word["done"] for word in words[1:]}) >= 3 and all(word["what"] == "upload sft/4" for word in words[1:])


def test_work_on_the_disk_is_no_stall(events: EventLog) -> None:
    code = SAY + "for n in range(30):\n  say(moved=0, worked=n)\n  time.sleep(0.1)"
    call(events, code, Limits(stall_s=1, budget_s=60))


@pytest.mark.parametrize(("code", "error"), [(2, Refused), (4, MachineFault), (5, Fenced), (6, Damaged)])
def test_what_no_other_way_would_mend_ends_at_once_in_the_childs_words(
    events: EventLog, code: int, error: type[Exception]
) -> None:
    with pytest.raises(error, match="this and that"):
        call(events, SAY + f"say(error='this and that'); sys.exit({code})", Limits(stall_s=30, budget_s=60))
    assert list(read_events(events.path)) == []


def test_the_last_words_of_a_child_that_fails_again_and_again_are_not_lost(events: EventLog) -> None:
    with pytest.raises(Stalled, match=r"no byte moved for \d+ s; the bucket answered 503"):
        call(events, SAY + "say(error='the bucket answered 503'); sys.exit(3)", Limits(stall_s=1, budget_s=60))


def test_what_fails_twice_in_the_same_words_is_not_moved_a_third_time(events: EventLog, tmp_path: Path) -> None:
    """67 GB with a wrong sha256 would be fetched again and again until the budget ends."""
    starts = tmp_path / "starts"
    code = SAY + (
        f"open({str(starts)!r}, 'a').write('x')\nsay(what='x', done=100, total=100, moved=100)\n"
        "say(error='sha256 of what arrived is abc, want def'); sys.exit(1)"
    )
    with pytest.raises(Damaged, match="is abc, want def"):
        call(events, code, Limits(stall_s=30, budget_s=60))
    assert len(starts.read_text()) == 2


@pytest.mark.parametrize("end", ["raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)"])
def test_a_child_that_breaks_down_at_once_is_not_started_again_and_again(
    events: EventLog, tmp_path: Path, end: str
) -> None:
    starts = tmp_path / "starts"
    with pytest.raises(Stalled, match="ended twice without a word; see its log"):
        call(events, f"with open({str(starts)!r}, 'a') as file: file.write('x')\n{end}", Limits(60, 600))
    assert len(starts.read_text()) == 6, "twice in each of three ways"


def test_damage_on_the_way_that_differs_each_time_is_fetched_again(events: EventLog, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    code = SAY + (
        f"open({str(starts)!r}, 'a').write('x'); n = len(open({str(starts)!r}).read())\n"
        "say(what='x', done=100, total=100, moved=100)\n"
        "if n < 4: say(error=f'sha256 of what arrived is {n}, want def'); sys.exit(1)"
    )
    call(events, code, Limits(stall_s=30, budget_s=60))
    assert len(starts.read_text()) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    import signal
    import subprocess

    code = (
        "import pathlib, sys; from training.box.child import Limits, supervise; from training.contract.events import EventLog\n"
        'child = \'import os, sys, time; print("{}", flush=True); open(sys.argv[1], "w").write(str(os.getpid())); time.sleep(60)\'\n'
        f"supervise([sys.executable, '-c', child, {str(tmp_path / 'pid')!r}], EventLog(pathlib.Path({str(tmp_path / 'e')!r})), 'up', Limits(60, 60))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and Path(f"/proc/{pid}/stat").exists():
        if Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not os.path.exists(f"/proc/{pid}")
