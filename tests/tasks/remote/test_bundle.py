"""The zip that goes to the box first: it needs a Python and nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

from tasks.remote.bundle import box_zip


@pytest.fixture
def zip_path(tmp_path: Path) -> Path:
    path = tmp_path / "box.zip"
    path.write_bytes(box_zip())
    return path


def call(zip_path: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    """Isolated and without site-packages: an import beyond the standard library would fail."""
    command = [sys.executable, "-I", "-S", str(zip_path), *words]
    return subprocess.run(command, capture_output=True, timeout=60, check=False)


def test_the_zip_is_the_same_bytes_each_time() -> None:
    assert box_zip() == box_zip()


def test_supervisor_runs_a_job_from_the_zip_with_the_standard_library_alone(zip_path: Path, tmp_path: Path) -> None:
    job = str(tmp_path / "job")
    started = json.loads(call(zip_path, "supervisor", "start", job, "t", "--", "bash", "-c", "echo hi; exit 5").stdout)
    assert started["started"] is True
    for _ in range(100):
        head, _, log = call(zip_path, "supervisor", "poll", job, "0").stdout.partition(b"\n")
        if json.loads(head)["state"] == "exited":
            break
    assert (json.loads(head)["exit_code"], log) == (5, b"hi\n")


def test_preflight_reports_from_the_zip_with_the_standard_library_alone(zip_path: Path) -> None:
    wanted = {
        "device": "none",
        "min_driver": "0",
        "min_cuda": 0,
        "disk_free_gb": 0.001,
        "min_pids": 1,
        "host_memory_gb": 0.001,
        "max_clock_skew_s": 60,
    }
    done = call(zip_path, "preflight", "--wanted", json.dumps(wanted), "--nonce", "abc")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["nonce"] == "abc"


def test_the_dead_man_starts_from_the_zip_with_the_standard_library_alone(zip_path: Path) -> None:
    done = call(zip_path, "deadman")
    assert b"ValueError" in done.stderr and b"ModuleNotFoundError" not in done.stderr


def test_an_unknown_verb_is_named(zip_path: Path) -> None:
    done = call(zip_path, "supervise")
    assert done.returncode == 2 and b"known: supervisor, preflight, deadman" in done.stderr


@pytest.mark.parametrize("module", ["supervisor", "preflight", "deadman", "__main__"])
def test_what_goes_into_the_zip_is_understood_by_an_older_python(module: str) -> None:
    """A box's own python3 may be older than the one that trains there."""
    source = files("training.box").joinpath(f"{module}.py").read_text()
    ast.parse(source, feature_version=(3, 9))
    tree = ast.parse(source)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    outside = {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names) - {"__future__"}
    assert outside <= {"training"}
