"""Finding and ending the processes that a rehearsal started, also those that a killed one left behind.

Every process of a box or of the bucket carries `LIVERY_REHEARSAL_BOX=<a directory under the rehearsal's root>` in its
environment. sshd overwrites its own environment with its process title, so it is found by its command line instead.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MARKER = "LIVERY_REHEARSAL_BOX"


@contextmanager
def hold(root: Path) -> Iterator[None]:
    """Makes this process the only rehearsal on `root`; RuntimeError when another one lives there."""
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise RuntimeError(
                f"a rehearsal already runs on {root} (pid {lock.read().strip()}): stop it, or pass another --root"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def dying_with_us(command: list[str]) -> list[str]:
    """The command wrapped so that the kernel kills it when this process dies, where the kernel can (Linux)."""
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    return [setpriv, "--pdeathsig", "KILL", "--", *command] if setpriv else command


def kill_under(directory: Path, *, timeout_s: float = 5.0) -> int:
    """SIGKILLs every process marked as belonging to `directory` or below; returns how many. RuntimeError if some stay.

    Repeats until none is found, since a process may fork while it is being killed.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_s
    while pids := _belonging(directory):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of {directory} survive SIGKILL: {sorted(pids)}")
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            except ProcessLookupError:
                pass
        time.sleep(0.01)
    return len(killed)


def _belonging(directory: Path) -> set[int]:
    if sys.platform == "linux":
        return {pid for pid in _linux_pids() if pid != os.getpid() and _belongs(pid, str(directory))}
    # (macOS: untested) ps shows the environment of one's own processes after their command line.
    listing = subprocess.run(["ps", "axeww", "-o", "pid=,command="], capture_output=True, text=True, check=True)
    wanted = (f"{MARKER}={directory}/", f"{MARKER}={directory} ", f"-f {directory}/")
    lines = [line.strip() + " " for line in listing.stdout.splitlines() if any(w in line + " " for w in wanted)]
    return {int(line.split()[0]) for line in lines} - {os.getpid()}


def _linux_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _belongs(pid: int, directory: str) -> bool:
    try:
        if Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z":
            return False
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return False
    mark = f"{MARKER}={directory}".encode()
    marked = any(entry == mark or entry.startswith(mark + b"/") for entry in environ.split(b"\0"))
    return marked or (b"sshd" in command and f"-f {directory}/".encode() in command)
