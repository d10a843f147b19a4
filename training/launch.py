"""Start the runner once a card and be one process to whoever watches: the leader's exit code is ours, and the first of them to fail ends all.

Each gets the environment that torchrun gives, so torchrun itself may start the runner as well; but it answers every failure with the exit code 1 and cuts
the leader's last upload short.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LEADER = 0
LAUNCHED = "LIVERY_LAUNCHED"
"""Set in what is started here: the launcher holds the runner's lock."""
LOST = 6
"""The leader's exit code when another process was gone: what became of that one is told here."""
_POLL_S = 0.2
# When the leader is gone, so is what the followers compute for.
_FOLLOWERS_S = 20.0
# A follower that failed leaves the leader in a collective that may never end; it first gets the time to see that for itself, and to say so.
_LEADER_S = 20.0
ERROR_FILE = "rank-{}.aborted.json"


def run(command: Sequence[str], count: int, work: Path) -> tuple[int, str]:
    """Run `command` in `count` processes until all have ended: the exit code, and what a follower that failed left to say (JSON), or words about how it
    ended; empty if the leader spoke for itself. SIGTERM and SIGINT go to the leader, who takes the others along."""
    for rank in range(count):
        (work / ERROR_FILE.format(rank)).unlink(missing_ok=True)
    environ = {
        **os.environ,
        LAUNCHED: "1",
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    processes = [
        subprocess.Popen(command, env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)
    ]
    handlers = {number: signal.signal(number, _hand_on(processes)) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _watch(processes, work)
    finally:
        _end(processes, 0.0)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _watch(processes: list[subprocess.Popen[bytes]], work: Path) -> tuple[int, str]:
    leader = processes[LEADER]
    while leader.poll() is None and not _failed(processes):
        time.sleep(_POLL_S)
    if leader.returncode is None:
        _end([leader], _LEADER_S, ask=False)
        # One that saw the same fault has told of it; one that we killed has not.
        spoke = leader.returncode >= 0 and leader.returncode != LOST
    else:
        _end(processes, _FOLLOWERS_S, ask=False)
        spoke = leader.returncode != LOST
    if spoke:
        return leader.returncode, ""
    rank = (_failed(processes) or [LEADER])[0]
    return 1, _said(rank, processes[rank], len(processes), work)


def _failed(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [rank for rank, process in enumerate(processes) if rank != LEADER and process.poll()]


def _said(rank: int, process: subprocess.Popen[bytes], count: int, work: Path) -> str:
    path = work / ERROR_FILE.format(rank)
    if path.exists():
        return path.read_text(encoding="utf-8")
    code = process.returncode
    how = f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
    hint = "; SIGKILL mostly means that the machine ran out of memory" if code == -signal.SIGKILL else ""
    reason = f"process {rank} of {count} ended {how}{hint}; what the manifests name is safe"
    return json.dumps({"reason": reason, "blame": "host"})


def _end(processes: Sequence[subprocess.Popen[bytes]], patience_s: float, *, ask: bool = True) -> None:
    """Wait so long for them to end by themselves (with `ask`, after a SIGTERM), then kill."""
    for process in processes:
        if ask and process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + patience_s
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL_S / 4)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def _hand_on(processes: Sequence[subprocess.Popen[bytes]]) -> Callable[[int, object], None]:
    def hand_on(number: int, _: object) -> None:
        if processes[LEADER].poll() is None:
            processes[LEADER].send_signal(number)

    return hand_on


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command_of(arguments: Sequence[str]) -> list[str]:
    """This very program again."""
    return [sys.executable, "-m", "training.runner", *arguments]
