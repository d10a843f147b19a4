"""The kernels on a machine without a card: Triton's interpreter runs them on float32 numbers of the CPU.

Whether Triton interprets or compiles is decided when it is imported, so what needs the one or the other runs in a process of its own.
bfloat16 is out of the interpreter's reach: it multiplies the bit patterns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def run_alone() -> Callable[..., str]:
    """Run one of this folder's scripts with Triton interpreted or compiled; returns what it printed, AssertionError with its tail if it failed."""

    def run(script: str, *arguments: str, interpret: bool) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        environment.pop("TRITON_INTERPRET", None)
        if interpret:
            environment["TRITON_INTERPRET"] = "1"
        done = subprocess.run(
            [sys.executable, str(Path(__file__).parent / script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return run


@pytest.fixture(scope="session")
def interpreted(run_alone: Callable[..., str]) -> Callable[..., str]:
    """`interpreted(script, *checks)`: what these checks of it printed, AssertionError with the traceback of one that failed. A script runs once, with all
    that it has."""
    told: dict[str, dict[str, dict[str, str]]] = {}

    def judge(script: str, *checks: str) -> str:
        if script not in told:
            rows = map(json.loads, run_alone(script, interpret=True).splitlines())
            told[script] = {row["check"]: row for row in rows}
        found = [told[script][check] for check in checks]
        assert not any(row["failed"] for row in found), "\n".join(row["failed"] for row in found)
        return "".join(row["said"] for row in found)

    return judge
