"""The mirror is uploaded by the way: real child processes, and a command of the same shape that only waits."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from training.mirroring import Mirroring


def wait_for(found: object, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not found():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def program(tmp_path: Path, body: str) -> str:
    """An interpreter that ignores its arguments and does `body`, counting its starts."""
    path = tmp_path / "python"
    path.write_text(
        f"#!{sys.executable}\nimport time, sys\nopen({str(tmp_path / 'starts')!r}, 'a').write('x')\n{body}\n"
    )
    path.chmod(0o755)
    return str(path)


def starts(tmp_path: Path) -> int:
    return len((tmp_path / "starts").read_text()) if (tmp_path / "starts").exists() else 0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.mirroring._LOOK_S", 0.1)


def test_it_begins_when_the_uplink_is_free_and_makes_way_for_a_checkpoint(tmp_path: Path) -> None:
    idle, said = [False], list[str]()
    python = program(tmp_path, "time.sleep(60)")
    mirroring = Mirroring(tmp_path / "recipe.json", python, lambda: idle[0], lambda what, reason: said.append(what))
    time.sleep(0.5)
    assert starts(tmp_path) == 0
    idle[0] = True
    wait_for(lambda: starts(tmp_path) == 1)
    idle[0] = False
    time.sleep(0.5)
    idle[0] = True
    wait_for(lambda: starts(tmp_path) == 2)
    mirroring.close()
    assert said == []


@pytest.mark.parametrize(
    ("body", "told"), [("", "mirror"), ("sys.exit('refused to write models/')", "mirror not written")]
)
def test_its_end_is_told_once_and_a_refusal_fails_no_run(tmp_path: Path, body: str, told: str) -> None:
    said: list[tuple[str, str]] = []
    python = program(tmp_path, body)
    mirroring = Mirroring(
        tmp_path / "recipe.json", python, lambda: True, lambda what, reason: said.append((what, reason))
    )
    wait_for(lambda: said)
    time.sleep(0.5)
    mirroring.close()
    assert starts(tmp_path) == 1 and [what for what, _ in said] == [told]
    assert not body or "refused to write models/" in said[0][1]
