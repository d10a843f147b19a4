"""Detached jobs and events on a real box, over links that break."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.errors import BoxError, BoxLost
from tasks.remote.jobs import EventTail, Jobs, JobState
from tasks.remote.ssh import Remote
from tests.tasks.remote.conftest import SshBox
from tests.training.box.netfault import Link
from training.contract.events import EventLog, Heartbeat, Notice


def finish(jobs: Jobs, name: str, offset: int = 0, seconds: float = 30) -> JobState:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = jobs.poll(name, offset)
        if state.state not in ("running", "unknown"):
            return state
        time.sleep(0.1)
    raise AssertionError("the job did not end")


def test_a_job_gives_its_log_and_exit_code(remote: Remote) -> None:
    jobs = Jobs(remote)
    assert jobs.poll("work").state == "absent"
    assert jobs.start("work", "t1", ["bash", "-c", "echo hello; exit 3"])
    state = finish(jobs, "work")
    assert (state.state, state.exit_code, state.log) == ("exited", 3, b"hello\n")


def test_the_same_token_never_starts_twice_not_even_after_the_end(remote: Remote, box: SshBox) -> None:
    jobs = Jobs(remote)
    argv = ["bash", "-c", "echo ran >> ~/ran"]
    assert jobs.start("once", "t1", argv)
    finish(jobs, "once")
    assert not jobs.start("once", "t1", argv)
    assert (box.home / "ran").read_text() == "ran\n"
    assert jobs.start("once", "t2", argv)


def test_eight_racing_starts_are_one_run(login: Callable[..., Remote], remote: Remote, box: SshBox) -> None:
    started: list[bool] = []

    def race() -> None:
        argv = ["bash", "-c", "echo ran >> ~/ran; sleep 1"]
        started.append(Jobs(login(box.port)).start("race", "t", argv))

    threads = [threading.Thread(target=race) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(started) == [False] * 7 + [True]
    assert (box.home / "ran").read_text() == "ran\n"


def test_another_job_under_a_running_name_is_refused(remote: Remote) -> None:
    jobs = Jobs(remote)
    jobs.start("busy", "t1", ["sleep", "30"])
    with pytest.raises(BoxError, match="runs already with token t1, not t2"):
        jobs.start("busy", "t2", ["sleep", "30"])
    jobs.stop("busy", 1)


def test_the_log_is_byte_exact_over_resets_freezes_and_refusals(remote: Remote, link: Link) -> None:
    jobs = Jobs(remote)
    jobs.start("lines", "t", ["bash", "-c", "for i in $(seq 1 200); do echo line $i; sleep 0.03; done; exit 4"])
    stop = threading.Event()

    def trouble() -> None:
        chance = random.Random(1)
        for _ in range(6):
            if stop.wait(1.2):
                return
            kind = chance.choice(["reset", "freeze", "refuse"])
            if kind == "reset":
                link.reset()
            elif kind == "freeze":
                link.freeze()
                time.sleep(1.0)
                link.thaw()
            else:
                link.refuse()
                link.reset()
                time.sleep(0.4)
                link.accept()

    thread = threading.Thread(target=trouble)
    thread.start()
    log, offset, lost = b"", 0, 0
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        # Short enough for a freeze to be noticed; once the trouble is over a busy machine gets its time.
        state = jobs.poll("lines", offset, timeout_s=1 if thread.is_alive() else 20)
        log, offset, lost = log + state.log, state.offset, lost + (state.state == "unknown")
        if state.state == "exited" and not state.more:
            break
        time.sleep(0.1)
    stop.set()
    thread.join()
    assert log == b"".join(b"line %d\n" % number for number in range(1, 201))
    assert state.exit_code == 4 and lost > 0


def test_a_rebooted_box_says_lost_and_the_same_token_may_start_again(remote: Remote, box: SshBox) -> None:
    jobs = Jobs(remote)
    jobs.start("long", "t", ["bash", "-c", "echo begin; sleep 60"])
    time.sleep(0.3)
    box.reboot()
    assert finish(jobs, "long").state == "lost"
    assert jobs.start("long", "t", ["bash", "-c", "echo again"])
    assert finish(jobs, "long").log == b"begin\nagain\n"


def test_a_stubborn_job_is_killed_after_its_grace(remote: Remote) -> None:
    jobs = Jobs(remote)
    jobs.start("stubborn", "t", ["bash", "-c", "trap '' TERM; while :; do sleep 0.1; done"])
    state = jobs.stop("stubborn", 0.5)
    assert (state.state, state.exit_code) == ("exited", -9)


def test_secrets_come_from_the_env_file_and_the_boxs_own_environment_wins(remote: Remote, box: SshBox) -> None:
    box.environ["NEARER"] = "box"
    box.reboot()
    remote.put(b"SECRET=s3cr3t=x\nNEARER=ours\n", "livery/private.env", mode=0o600, timeout_s=10)
    jobs = Jobs(remote)
    jobs.start("env", "t", ["bash", "-c", 'echo "$SECRET $NEARER"; cat /proc/$$/cmdline'], "~/livery/private.env")
    log = finish(jobs, "env").log
    assert log.startswith(b"s3cr3t=x box\n") and log.count(b"s3cr3t") == 1
    assert b"s3cr3t" not in (box.home / "livery/jobs/env/status.json").read_bytes()


def test_a_job_that_cannot_start_says_why(remote: Remote) -> None:
    jobs = Jobs(remote)
    jobs.start("none", "t", ["/no/such/program"])
    assert finish(jobs, "none").exit_code == 127


def test_a_start_that_nobody_answers_is_a_lost_box(remote: Remote, link: Link) -> None:
    link.refuse()
    link.reset()
    with pytest.raises(BoxLost, match="start of job x: no answer"):
        Jobs(remote).start("x", "t", ["true"], timeout_s=2)


def test_a_killed_supervisor_does_not_let_a_second_run_begin(remote: Remote, box: SshBox) -> None:
    jobs = Jobs(remote)
    jobs.start("orphan", "t", ["bash", "-c", "echo ran >> ~/ran; until [ -e ~/end ]; do sleep 0.1; done"])
    job = json.loads((box.home / "livery/jobs/orphan/status.json").read_text())["pid"]
    assert remote.run(f"kill -9 $(ps -o ppid= -p {job})", timeout_s=10).code == 0
    assert jobs.poll("orphan").state == "running"
    assert not jobs.start("orphan", "t", ["bash", "-c", "echo ran >> ~/ran"])
    (box.home / "end").touch()
    assert finish(jobs, "orphan").state == "lost"
    assert (box.home / "ran").read_text() == "ran\n"


def events_file(box: SshBox) -> Path:
    return box.home / "livery/events.jsonl"


def test_events_are_read_once_each_and_a_half_written_line_waits(remote: Remote, box: SshBox) -> None:
    tail = EventTail(remote)
    assert tail.read() == []
    log = EventLog(events_file(box))
    log.emit(Heartbeat(step=1))
    log.emit(Heartbeat(step=2))
    assert [event.step for event in tail.read()] == [1, 2]  # type: ignore[union-attr]
    whole = events_file(box).read_bytes()
    log.emit(Heartbeat(step=3))
    line = events_file(box).read_bytes()[len(whole) :]
    events_file(box).write_bytes(whole + line[:20])
    assert tail.read() == []
    events_file(box).write_bytes(whole + line)
    assert [event.seq for event in tail.read()] == [3]


def test_lost_lines_of_events_are_noticed(remote: Remote, box: SshBox) -> None:
    tail = EventTail(remote)
    log = EventLog(events_file(box))
    for step in range(3):
        log.emit(Heartbeat(step=step))
    lines = events_file(box).read_bytes().splitlines(keepends=True)
    events_file(box).write_bytes(lines[0] + lines[2])
    kinds = [event.kind for event in tail.read()]
    assert kinds == ["heartbeat", "notice", "heartbeat"]


def test_a_line_that_is_no_event_is_shown_and_the_rest_is_read(remote: Remote, box: SshBox) -> None:
    EventLog(events_file(box)).emit(Heartbeat(step=1))
    with events_file(box).open("ab") as file:
        file.write(b"garbage\n")
    seen = EventTail(remote).read()
    assert isinstance(seen[1], Notice) and "garbage" in seen[1].reason


def test_silence_grows_over_a_lost_connection_and_ends_with_the_next_event(
    remote: Remote, box: SshBox, link: Link
) -> None:
    now = [100.0]
    tail = EventTail(remote, clock=lambda: now[0])
    log = EventLog(events_file(box))
    log.emit(Heartbeat(step=1))
    assert len(tail.read()) == 1
    link.refuse()
    link.reset()
    now[0] = 160.0
    log.emit(Heartbeat(step=2))
    assert tail.read(timeout_s=2) == [] and tail.silent_s(now[0]) == 60
    link.accept()
    assert len(tail.read()) == 1 and tail.silent_s(now[0]) == 0
