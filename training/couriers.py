"""Who moves files between this box and the bucket for the runner: the transfer command, which is killed when it hangs; or this process, where
the bucket is a folder and cannot hang.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from training.box.child import DAMAGED, MACHINE, OK, STALLED, USER, WAYS, Voice
from training.box.files import Errand, Item, download_all, upload_all
from training.box.store import MachineFault, Store, StoreDenied, StoreError, StoreUnreachable

_LOOK_S = 0.5


class Courier(Protocol):
    """Both ways raise StoreUnreachable (also for a line that stalls or will not make it in time), StoreDenied or MachineFault."""

    def fetch(self, what: str, folder: Path, items: Sequence[Item]) -> str:
        """Bring the files into `folder`, each verified. Empty, or what is wrong with one of them: missing, or not what was promised."""

    def send(self, what: str, folder: Path, items: Sequence[Item]) -> None:
        """Put the files into the bucket. StoreError if it does not keep what was sent."""


class InProcess:
    """In this process, without events."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def fetch(self, what: str, folder: Path, items: Sequence[Item]) -> str:
        try:
            download_all(self._store, folder, items, what, Voice(mute=True), WAYS[-1])
        except (StoreUnreachable, StoreDenied, MachineFault):
            raise
        except StoreError as error:
            return str(error)
        return ""

    def send(self, what: str, folder: Path, items: Sequence[Item]) -> None:
        upload_all(self._store, folder, items, what, Voice(mute=True), WAYS[-1])


class Commanded:
    """By `python -m training.box.transfer` in the transfer environment: events, the stall rule, the budget, other ways."""

    def __init__(self, assignment_path: Path, python: str, work: Path, stopped: Callable[[], None]) -> None:
        """`stopped` is called while a transfer runs, and raises to end it."""
        self._assignment_path, self._python, self._work, self._stopped = assignment_path, python, work, stopped

    def fetch(self, what: str, folder: Path, items: Sequence[Item]) -> str:
        code, said = self._run("fetch", Errand(what=what, folder=folder.absolute(), items=tuple(items)))
        if code == DAMAGED:
            return said
        _raise_for(code, f"{what}: {said}")
        return ""

    def send(self, what: str, folder: Path, items: Sequence[Item]) -> None:
        code, said = self._run("send", Errand(what=what, folder=folder.absolute(), items=tuple(items)))
        if code == DAMAGED:
            raise StoreError(f"{what}: {said}")
        _raise_for(code, f"{what}: {said}")

    def _run(self, verb: str, errand: Errand) -> tuple[int, str]:
        """Exit code and last line of the command."""
        path = self._work / f"{verb}.json"
        path.write_text(errand.model_dump_json(), encoding="utf-8")
        command = [self._python, "-m", "training.box.transfer", verb, "--assignment", str(self._assignment_path)]
        with subprocess.Popen(
            [*command, "--errand", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        ) as child:
            try:
                said = self._ended(child)
            finally:
                # Its own child dies with it.
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
        last = (said.decode(errors="replace").strip().splitlines() or [""])[-1]
        return child.returncode, last or f"the transfer ended with code {child.returncode}"

    def _ended(self, child: subprocess.Popen[bytes]) -> bytes:
        while True:
            try:
                return child.communicate(timeout=_LOOK_S)[1]
            except subprocess.TimeoutExpired:
                self._stopped()


def _raise_for(code: int, said: str) -> None:
    if code == USER:
        raise StoreDenied(said)
    if code == MACHINE:
        raise MachineFault(said)
    if code == STALLED:
        raise StoreUnreachable(said)
    if code != OK:
        raise RuntimeError(said)
