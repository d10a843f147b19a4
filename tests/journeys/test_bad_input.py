"""A mistake through the command line: one sentence, an exit code that is not zero, nothing rented. The mistakes themselves: test_prepare.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.journeys.conftest import ROOT, Journey

pytestmark = pytest.mark.journey


def test_a_wrong_key_is_one_sentence_and_exit_code_2(journey: Callable[..., Journey], tmp_path: Path) -> None:
    here = journey(LIVERY_MARKET_API_KEY="wrong-key-12345")
    done = subprocess.run(
        [sys.executable, "-m", "flows", "finetune", "counting"],
        env=here.environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "LIVERY_MARKET_API_KEY" in error
    assert "wrong-key-12345" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert here.world()["instances"] == []


def test_help_comes_at_once_and_loads_neither_prefect_nor_torch() -> None:
    program = "import sys; from flows.__main__ import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    print('prefect' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False False"
