from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.rehearsal.box import uv_program

REPOSITORY = Path(__file__).parents[2]
CONSTRAINTS = Path(__file__).parent / "constraints-vastai.txt"
INSTALL_TIMEOUT_S = 180


@pytest.fixture(scope="session")
def vastai() -> Path:
    """The bin folder of an environment that holds `vastai`, made once per content of the constraints file."""
    digest = hashlib.sha256(CONSTRAINTS.read_bytes() + sys.version.encode()).hexdigest()[:12]
    home = REPOSITORY / ".livery" / "oracle" / f"vastai-{digest}"
    with _alone(home):
        _make(home)
    return home / "bin"


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """Two workers must not make the same environment at once."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(home: Path) -> None:
    if (home / "complete").exists():
        return
    uv = uv_program()
    if uv is None:
        pytest.skip("uv is needed to install the official client")
    shutil.rmtree(home, ignore_errors=True)
    python = str(home / "bin" / "python")
    for words in (
        [uv, "venv", "-q", "--python", sys.executable, str(home)],
        [uv, "pip", "install", "-q", "--python", python, "-c", str(CONSTRAINTS), "vastai"],
    ):
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"the official client could not be installed within {INSTALL_TIMEOUT_S} s")
        if done.returncode != 0:
            pytest.skip(f"the official client cannot be installed: {done.stderr.strip()[-300:]}")
    (home / "complete").touch()
