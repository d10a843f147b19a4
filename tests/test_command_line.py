"""The command line before it does anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_help_comes_at_once_and_loads_neither_prefect_nor_torch() -> None:
    program = "import sys; from flows.__main__ import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    print('prefect' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False False"
