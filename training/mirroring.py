"""Uploads the base model to the bucket's mirror while the uplink has nothing better to do."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from training.checkpoint import Notice

_OK = 0
_LOOK_S = 2.0


class Mirroring:
    """A thread and at most one child, which is ended as soon as a checkpoint wants the uplink; what it sent is gone on from.

    It never fails a run: a mirror is for the boxes to come.
    """

    def __init__(self, assignment_path: Path, python: str, is_idle: Callable[[], bool], notice: Notice) -> None:
        self._command = [python, "-m", "training.box.transfer", "mirror", "--assignment", str(assignment_path)]
        self._is_idle, self._notice = is_idle, notice
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirroring", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=30)

    def _work(self) -> None:
        while not self._over.wait(_LOOK_S):
            if not self._is_idle():
                continue
            child = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
            )
            while child.poll() is None and self._is_idle() and not self._over.wait(_LOOK_S):
                pass
            if child.poll() is None:
                child.kill()
                child.communicate()
                continue
            self._tell(child)
            return

    def _tell(self, child: subprocess.Popen[bytes]) -> None:
        _, said = child.communicate()
        last = (said.decode(errors="replace").strip().splitlines() or [""])[-1]
        if child.returncode == _OK:
            self._notice(
                "mirror", "the bucket has its own copy of the base model now; the next box takes it from there"
            )
        else:
            self._notice(
                "mirror not written",
                f"{last or f'exit code {child.returncode}'}; the next box takes the model from the hub",
            )
