"""The command line before it does anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows.__main__ import main

ROOT = Path(__file__).parent.parent


def test_help_comes_at_once_and_loads_neither_prefect_nor_torch() -> None:
    program = "import sys; from flows.__main__ import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    print('prefect' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False False"


def test_a_check_refuses_wishes_that_contradict_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "training" / "recipes" / "counting.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace('min_driver: "580.65.06"', 'min_driver: "535.1"'))
    assert main(["check", str(tmp_path / "mine.yaml")]) == 2
    assert capsys.readouterr().err.startswith("error: box.min_driver: 535.1 is older than 580.65.06")
