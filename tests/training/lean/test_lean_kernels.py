"""The lean modules on our Triton kernels, in a child process: whether Triton interprets is decided when it is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
HERE = Path(__file__).parent
# float32 sums of about a hundred numbers, two layers deep, in another order: some 1e-5 of a gradient, where a wrong index gives 1e-1.
TOLERANCE = 2e-4


def test_whole_models_on_the_kernels_equal_stock() -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(HERE.parents[2]),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "kernels_in_a_decoder.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = re.findall(r"(\w+) (\w+) logits (\S+) gradients (\S+) kernels (\d+)", done.stdout)
    assert len(lines) == 4, done.stdout
    for family, kind, *differences, kernels in lines:
        assert max(map(float, differences)) <= TOLERANCE, (family, kind, differences)
        assert int(kernels) >= (12 if family == "qwen3_5_moe" else 6), (family, kind, kernels)
