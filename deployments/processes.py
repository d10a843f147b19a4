"""Child processes that end when they should: by name, gracefully first, and never outliving the parent that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


class Child:
    """One process in a session of its own, so that Ctrl-C reaches the parent alone and the parent decides the order of stopping."""

    def __init__(self, name: str, argv: Sequence[str], environ: Mapping[str, str], log_path: Path) -> None:
        self.name, self.log_path = name, log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                list(argv),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent if sys.platform == "linux" else None,
            )

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self, grace_s: float) -> None:
        """SIGTERM and wait; SIGKILL to the whole session after the grace."""
        if self.alive():
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def tail(self, lines: int = 15) -> str:
        """The end of its log, for an error that a person has to act on."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])


def die_with_parent() -> None:
    """Linux: get SIGTERM when the parent is gone, however it went."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def free_port() -> int:
    """A loopback port free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
