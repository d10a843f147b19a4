"""A transfer in a child process, because some ways of hanging cannot be interrupted from inside: watched, killed, tried another way.

The parent counts what moves. When nothing does for `budget.stall_s`, or when the child cannot end within its budget at the rate of the
last two minutes and that has been so for two minutes, it is killed and tried with other settings; what arrived is kept.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from training.box.store import PART_BYTES, MachineFault
from training.contract.events import Event, EventLog, Notice, Transfer

# Exit codes of a child and of the command; see training.box.transfer.
OK, FAILED, USER, STALLED, MACHINE, FENCED, DAMAGED = 0, 1, 2, 3, 4, 5, 6
EVENT_EVERY_S = 2.0
START_S = 60.0
STALL_VARIABLE = "LIVERY_TRANSFER_STALL_S"
_RATE_S = 30.0
_SLOW_TRIES = 2
_PATIENCE_S = 120.0


class Stalled(Exception):
    """All tries were used up; the message names the rates."""


class Refused(Exception):
    """The user's or the configuration's fault; another try or another box would end alike."""


class Damaged(Refused):
    """An object is missing, or is not what was promised of it."""


class Fenced(Exception):
    """A newer runner has claimed the run: this one must write no manifest any more."""


@dataclass(frozen=True)
class Way:
    """How one try goes about it."""

    workers: int
    """Files or connections at once, at most."""
    part_bytes: int
    """What an upload that is killed may have to send again, at most; see training.box.multipart."""

    def __str__(self) -> str:
        return f"at most {self.workers} at a time, parts of {self.part_bytes / (1 << 20):.0f} MiB"


WAYS = (Way(4, PART_BYTES), Way(2, PART_BYTES // 2), Way(1, PART_BYTES // 4))


@dataclass(frozen=True)
class Limits:
    stall_s: float
    budget_s: float

    @property
    def patience_s(self) -> float:
        """How long a rate is watched before it is believed, and how long it must stay too slow."""
        return min(_PATIENCE_S, self.budget_s / 5)


@dataclass
class Account:
    """What a child did: its progress by `what`, and its last word."""

    done: dict[str, int] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)
    moved: int = 0
    """Bytes that crossed the line, repeated ones among them."""
    worked: int = 0
    sent: int = 0
    error: str = ""

    @property
    def signs(self) -> tuple[int, int, int]:
        """Any of them grows while the child gets anywhere."""
        return self.moved, self.worked, sum(self.done.values())

    def note(self, line: bytes) -> None:
        """Take one line of the child."""
        word = json.loads(line)
        if "what" in word:
            self.done[word["what"]], self.total[word["what"]] = word["done"], word["total"]
        for name in ("moved", "worked", "sent", "error"):
            setattr(self, name, word.get(name, getattr(self, name)))


class Voice:
    """The child's side: says on stdout what moved, at most every half second, and at once when something is whole."""

    def __init__(self, *, mute: bool = False) -> None:
        self._mute = mute
        self._lock = threading.Lock()
        self._said_at = 0.0
        self._counts = {"moved": 0, "worked": 0, "sent": 0}
        self._progress: dict[str, Any] = {}
        self._say(due=True)

    def moved(self, count: int) -> None:
        """Bytes that crossed the line."""
        self._count("moved", count)

    def worked(self, count: int) -> None:
        """Bytes read or hashed on this machine: no transfer, and no stall either."""
        self._count("worked", count)

    def sent(self, count: int) -> None:
        """Bytes that the other side has acknowledged for good."""
        self._count("sent", count, due=True)

    def progress(self, what: str, done: int, total: int) -> None:
        with self._lock:
            begins = what != self._progress.get("what")
            self._progress = {"what": what, "done": done, "total": total}
            self._say(due=begins or done >= total or self._is_time())

    def last_word(self) -> None:
        """What was not due to be said yet: a child that fails has moved bytes, too."""
        with self._lock:
            self._say(due=True)

    def _count(self, name: str, count: int, *, due: bool = False) -> None:
        with self._lock:
            self._counts[name] += count
            self._say(due=due or self._is_time())

    def _is_time(self) -> bool:
        return time.monotonic() - self._said_at > 0.5

    def _say(self, *, due: bool) -> None:
        """Each line has everything: what one caller says must not keep the other's word back."""
        if due and not self._mute:
            self._said_at = time.monotonic()
            print(json.dumps({**self._progress, **self._counts}), flush=True)


def supervise(
    command: list[str],
    events: EventLog,
    direction: Literal["down", "up"],
    limits: Limits,
    environ: Mapping[str, str] = os.environ,
    *,
    light_bytes: int | None = None,
    what: str = "",
) -> Account:
    """Run the child until it is done, in several ways in turn; its last account, with what was sent and moved over all tries.

    `light_bytes` goes into the events. Refused (Damaged among them), Fenced, MachineFault or Stalled; a way given up is a Notice that says how far
    it had come and what is tried now. `what`: the transfer's name there, by default prefetch or upload.
    """
    what = what or ("prefetch" if direction == "down" else "upload")
    supervision = _Supervision(command, _Reporter(events, direction, light_bytes), limits, environ)
    said, slow, sent = "", 0, 0
    for attempt, way in enumerate(WAYS):
        if attempt:
            events.emit(Notice(what=what, reason=f"{said}; trying again with {way}"))
        account, code, how = supervision.try_once(attempt)
        sent += account.sent
        if code == OK:
            account.sent, account.moved = sent, supervision.moved
            return account
        _raise_for(code, account.error)
        said = f"{what}, try {attempt + 1}: {how} ({supervision.reporter.told(account)})"
        if supervision.is_over():
            raise Stalled(f"{said}; the budget of {limits.budget_s:.0f} s is used up")
        slow += how.startswith(_TOO_SLOW)
        if slow == _SLOW_TRIES:
            raise Stalled(f"{said}; it was tried in {slow} ways, and the budget is {limits.budget_s:.0f} s")
    raise Stalled(f"{said}; {len(WAYS)} ways were tried")


def end(error: Exception, code: int, *, child: bool) -> int:
    """A child tells its parent, the parent tells a person."""
    if child:
        print(json.dumps({"error": str(error)}), flush=True)
    else:
        print(f"{error}", file=sys.stderr, flush=True)
    return code


_TOO_SLOW = "too slow"


def _raise_for(code: int | None, error: str) -> None:
    """What no other way would mend."""
    if code == USER:
        raise Refused(error or "the transfer was refused without a reason")
    if code == DAMAGED:
        raise Damaged(error or "an object is missing, or is not what was promised of it")
    if code == FENCED:
        raise Fenced(error or "a newer runner has claimed the run")
    if code == MACHINE:
        raise MachineFault(error or "this machine failed")


class _Supervision:
    """The tries of one transfer: they share its deadline and its reporter."""

    def __init__(self, command: list[str], reporter: _Reporter, limits: Limits, environ: Mapping[str, str]) -> None:
        self._command, self.reporter, self._limits = command, reporter, limits
        self._environ = {**environ, STALL_VARIABLE: f"{limits.stall_s:g}"}
        self._deadline = time.monotonic() + limits.budget_s
        self.moved = 0

    def is_over(self) -> bool:
        return time.monotonic() >= self._deadline

    def try_once(self, attempt: int) -> tuple[Account, int | None, str]:
        """One way, until it is done, refused, too slow, or nothing has moved for `stall_s`. A child that ends sooner (a link that refuses for
        some seconds) is started again, since what it did is kept; but what fails twice with the same words (the same wrong sha256) is no accident
        of the way, and would be moved again and again. Its account, exit code and, in words, how it ended."""
        account, pulse = Account(), _Pulse()
        pace = Pace(self._limits.patience_s)
        sent, failed_with, silent_ends = 0, "", 0
        while True:
            account.sent = account.moved = account.worked = 0
            last_words, account.error = account.error, ""
            code, why = self._watch([*self._command, "--attempt", str(attempt)], account, pulse, pace)
            if code == FAILED and account.error:
                code = DAMAGED if account.error == failed_with else FAILED
                failed_with = account.error
            silent_ends += code not in (None, OK, STALLED) and not account.error
            account.error = account.error or last_words
            self.moved += account.moved
            account.sent = sent = sent + account.sent
            if code in (OK, USER, FENCED, MACHINE, DAMAGED):
                return account, code, ""
            if silent_ends == 2:
                return account, code, "it ended twice without a word; see its log"
            still = pulse.still_s() > self._limits.stall_s
            if code is None or still or self.is_over():
                still_why = f"no byte moved for {pulse.still_s():.0f} s" if still else ""
                return account, code, "; ".join(word for word in (why or still_why, account.error) if word)
            time.sleep(min(1.0, self._limits.stall_s / 10))

    def _watch(self, command: list[str], account: Account, pulse: _Pulse, pace: Pace) -> tuple[int | None, str]:
        """Follow one child to its end. Exit code, or None and the reason if it had to be killed."""
        child = _spawn(command, self._environ)
        assert child.stdout is not None
        buffer, spawned, spoken = b"", time.monotonic(), False
        with selectors.DefaultSelector() as selector, child.stdout:
            selector.register(child.stdout, selectors.EVENT_READ)
            while True:
                if selector.select(timeout=min(1.0, self._limits.stall_s / 4)):
                    data = os.read(child.stdout.fileno(), 1 << 16)
                    if not data:
                        break
                    if not spoken:
                        spoken = True
                        # A busy machine takes seconds to start an interpreter; that is no fault of the link.
                        pulse.forgive(time.monotonic() - spawned)
                        self._deadline += time.monotonic() - spawned
                    *lines, buffer = (buffer + data).split(b"\n")
                    self._note(account, lines, pulse)
                reason = self._reason_to_kill(account, pulse, pace, spawned if not spoken else None)
                if reason:
                    _kill(child)
                    return None, reason
        code = child.wait()
        self.reporter.tell(account, self.moved, finished=code == OK)
        return code, ""

    def _note(self, account: Account, lines: list[bytes], pulse: _Pulse) -> None:
        before = account.signs
        for line in lines:
            account.note(line)
        if account.signs != before:
            pulse.beat()
            self.reporter.tell(account, self.moved)

    def _reason_to_kill(self, account: Account, pulse: _Pulse, pace: Pace, silent_since: float | None) -> str:
        now = time.monotonic()
        if silent_since is not None:
            late = now - silent_since > max(START_S, self._limits.stall_s)
            return f"the child said nothing for {now - silent_since:.0f} s" if late else ""
        if pulse.still_s() > self._limits.stall_s:
            return f"no byte moved for {pulse.still_s():.0f} s"
        if now >= self._deadline:
            return "over its budget"
        return pace.hopeless(now, sum(account.done.values()), sum(account.total.values()), self._deadline)


class Pace:
    """Whether a transfer can still end in time, at the rate of the last `patience_s` seconds.

    One short dip must not lose a good box, so it is given up only when that has been so for another `patience_s`.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: deque[tuple[float, int]] = deque()
        self._late_since: float | None = None

    def hopeless(self, now: float, done: int, total: int, deadline: float) -> str:
        """The reason, or empty. Call it about once a second with the bytes done and those announced."""
        if not total or done >= total:
            self._late_since = None
            return ""
        self._seen.append((now, done))
        while len(self._seen) > 1 and self._seen[1][0] <= now - self._patience_s:
            self._seen.popleft()
        began, before = self._seen[0]
        if now - began < 0.95 * self._patience_s:
            return ""
        rate = max(0, done - before) / (now - began)
        needed_s = (total - done) / rate if rate else float("inf")
        if now + needed_s <= deadline:
            self._late_since = None
            return ""
        self._late_since = now if self._late_since is None else self._late_since
        if now - self._late_since < self._patience_s:
            return ""
        left = max(0.0, deadline - now)
        return f"{_TOO_SLOW}: {needed_s:.0f} s more at {rate * 8 / 1e6:.2f} Mbps, {left:.0f} s are left"


class _Pulse:
    """When something last moved."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def beat(self) -> None:
        self._at = time.monotonic()

    def forgive(self, seconds: float) -> None:
        """Time in which nothing could move."""
        self._at += seconds

    def still_s(self) -> float:
        return time.monotonic() - self._at


class _Reporter:
    """Turns a child's progress into Transfer events, one every two seconds for each thing that is moving."""

    def __init__(self, events: EventLog, direction: Literal["down", "up"], light_bytes: int | None) -> None:
        self._events, self._direction, self._light_bytes = events, direction, light_bytes
        self._seen: dict[str, deque[tuple[float, int, int]]] = {}
        """Of each transfer: when, bytes over the line, bytes done; the first one, and those of the last while."""
        self._last: dict[str, float] = {}
        self._finished: set[str] = set()
        self._rate = 0.0

    def tell(self, account: Account, moved_before: int, *, finished: bool = False) -> None:
        now, line = time.monotonic(), moved_before + account.moved
        for what, done in account.done.items():
            seen, whole = self._seen.setdefault(what, deque()), done >= account.total[what]
            due = now - self._last.get(what, 0.0) >= EVENT_EVERY_S or whole or finished
            if what in self._finished or not due:
                continue
            self._last[what] = now
            seen.append((now, line, done))
            self._rate = _mbps(seen, whole=whole)
            self._events.emit(self._event(what, done, account.total[what], whole, line))
            if whole:
                self._finished.add(what)

    def told(self, account: Account) -> str:
        parts = [
            f"{what} {done / 1e6:.1f} of {account.total[what] / 1e6:.1f} MB" for what, done in account.done.items()
        ]
        return f"{', '.join(parts) or 'nothing begun'}, {self._rate:.2f} Mbps"

    def _event(self, what: str, done: int, total: int, whole: bool, moved: int) -> Event:
        return Transfer(
            what=what,
            direction=self._direction,
            done_bytes=done,
            total_bytes=total,
            mbps=round(self._rate, 3),
            eta_s=round((total - done) * 8 / 1e6 / self._rate, 1) if self._rate > 0 else None,
            finished=whole,
            line_bytes=moved,
            light_bytes=self._light_bytes,
        )


def _mbps(seen: deque[tuple[float, int, int]], *, whole: bool) -> float:
    """Of the last half minute, or of all once it is whole. By what crossed the line: on a slow one the other side acknowledges nothing for as
    long. What is not told of the line is told by what is done."""
    while len(seen) > 2 and not whole and seen[1][0] < seen[-1][0] - _RATE_S:
        del seen[1]
    first = seen[0] if whole or len(seen) == 2 or seen[0][0] >= seen[-1][0] - _RATE_S else seen[1]
    now, line, done = seen[-1]
    moved = (line - first[1]) or (done - first[2])
    return moved * 8 / 1e6 / (now - first[0]) if now - first[0] > 0.05 else 0.0


def _spawn(command: list[str], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environ,
        preexec_fn=_die_with_parent,
        start_new_session=True,
    )


def _die_with_parent() -> None:
    """Linux: a child whose parent is killed must not go on moving bytes beside its successor."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _kill(child: subprocess.Popen[bytes]) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
