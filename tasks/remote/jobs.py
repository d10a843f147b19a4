"""Detached jobs on the box and its events, watched in short polls: a dropped connection costs one poll, never the job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tasks.errors import BoxError, BoxLost
from tasks.remote.bundle import box_command
from tasks.remote.ssh import Answer, Remote
from training.contract import layout
from training.contract.events import Event, EventError, Notice, parse_event

State = Literal["running", "exited", "lost", "absent", "unknown"]
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class JobState:
    """`lost`: it was running and is no more, without an exit code (the box was restarted). `unknown`: the box did not answer."""

    state: State
    exit_code: int | None = None
    log: bytes = b""
    offset: int = 0
    """Where the next poll begins; the log is whole once the job has exited and `more` is false."""
    more: bool = False
    token: str | None = None


class Jobs:
    """The detached jobs of one box."""

    def __init__(self, remote: Remote, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._remote = remote
        self._sleep = sleep

    def start(
        self, name: str, token: str, argv: Sequence[str], env_file: str | None = None, *, timeout_s: float = 60
    ) -> bool:
        """Start a job, or find the one of this token that runs or has ended; whether this call started it.

        Asked again until the box answers, which is safe: a token starts once. Words of argv may begin with `~/`. The secrets in
        `env_file` (a path on the box) reach the job's environment without being in any command line.
        BoxLost if the box does not answer in time; BoxError if another job of that name is running.
        """
        options = ("--env-file", env_file) if env_file else ()
        words = ("supervisor", "start", _folder(name), token, *options, "--", *argv)
        status = self._insist(box_command(*words), timeout_s, f"start of job {name}")
        if not status["started"] and status.get("token") != token:
            raise BoxError(
                f"job {name} runs already with token {status.get('token')}, not {token}: stop it first", blame="other"
            )
        return bool(status["started"])

    def poll(self, name: str, offset: int = 0, *, timeout_s: float = 10) -> JobState:
        """State and new log of a job. Never raises for a lost connection."""
        answer = self._remote.run(
            box_command("supervisor", "poll", _folder(name), str(offset), str(_READ_BYTES)), timeout_s=timeout_s
        )
        split = _split(answer, offset)
        if split is None:
            return JobState("unknown", offset=offset)
        status, log = split
        return JobState(
            state=status["state"],
            exit_code=status.get("exit_code"),
            log=log,
            offset=int(status["offset"]),
            more=int(status["size"]) > int(status["offset"]),
            token=status.get("token"),
        )

    def stop(self, name: str, grace_s: float = 10, *, timeout_s: float | None = None) -> JobState:
        """SIGTERM to the job and its children, SIGKILL after the grace; its last state, `unknown` if the box did not answer."""
        command = box_command("supervisor", "stop", _folder(name), f"{grace_s:g}")
        answer = self._remote.run(command, timeout_s=timeout_s or grace_s + 30)
        if answer.code != 0:
            return JobState("unknown")
        status = json.loads(answer.out)
        return JobState(status["state"], status.get("exit_code"), token=status.get("token"))

    def tell_to_stop(self, name: str, *, grace_s: float) -> None:
        """`stop`, by a job of its own: it returns at once, and a connection that drops in the grace cuts nothing short. BoxLost if the box does
        not answer; poll the job to learn when it has ended."""
        command = box_command("supervisor", "stop", _folder(name), f"{grace_s:g}")
        self.start(f"stop-{name}", "stop", ["/bin/sh", "-c", command])

    def _insist(self, command: str, timeout_s: float, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            answer = self._remote.run(command, timeout_s=min(left, 20))
            if answer.code == 0:
                status: dict[str, Any] = json.loads(answer.out)
                return status
            if answer.code is not None:
                said = answer.err.decode(errors="replace").strip()[-400:]
                raise BoxError(f"{what}: the box said {answer.code}: {said}")
            self._sleep(min(0.5, max(0.0, left)))
        raise BoxLost(f"{what}: no answer from the box in {timeout_s:.0f} s")


class EventTail:
    """Reads the box's events file onward from where it was. Lost or unreadable lines become a Notice, never silence."""

    def __init__(
        self, remote: Remote, path: str = f"~/{layout.BOX_EVENTS}", *, clock: Callable[[], float] = time.time
    ) -> None:
        self._remote = remote
        self._path = path
        self._clock = clock
        self._offset = 0
        self._seq = 0
        self._heard_at = clock()

    def read(self, *, timeout_s: float = 10) -> list[Event]:
        """The whole events written since the last call; [] if there are none or if the box did not answer."""
        command = box_command("supervisor", "tail", self._path, str(self._offset), str(_READ_BYTES))
        split = _split(self._remote.run(command, timeout_s=timeout_s), self._offset)
        if split is None:
            return []
        status, data = split
        events: list[Event] = []
        if int(status["size"]) < self._offset:
            events.append(
                self._notice(f"the events file shrank from {self._offset} to {status['size']} bytes: read anew")
            )
            self._offset = self._seq = 0
            return events
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            events.extend(self._parsed(line))
        if events:
            self._heard_at = self._clock()
        return events

    def silent_s(self, now: float) -> float:
        """Seconds since an event was last received (or since this tail was made), on the clock given to it."""
        return now - self._heard_at

    def _parsed(self, line: bytes) -> list[Event]:
        try:
            event = parse_event(line)
        except EventError as error:
            return [self._notice(str(error))]
        gap = event.seq != self._seq + 1
        lost = [self._notice(f"events {self._seq} to {event.seq} do not follow each other")] if gap else []
        self._seq = event.seq
        return [*lost, event]

    def _notice(self, reason: str) -> Notice:
        return Notice(what="events", reason=reason, t=self._clock())


def _folder(name: str) -> str:
    return f"~/{layout.BOX_JOBS}/{name}"


def _split(answer: Answer, offset: int) -> tuple[dict[str, Any], bytes] | None:
    """The JSON line and the bytes after it; None if the answer is not whole."""
    if answer.code != 0:
        return None
    head, _, data = answer.out.partition(b"\n")
    status: dict[str, Any] = json.loads(head)
    return (status, data) if int(status["offset"]) - offset == len(data) else None
