# ruff: noqa: F811 - the fixtures of the box are imported by name, and asked for by it
"""Installing: the wheel that is sent, what an installer's words mean, and the real thing on a real box from the local cache."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from tasks import install
from tasks.errors import InstallFailed
from tasks.remote.jobs import Jobs, JobState
from tasks.remote.ssh import Remote
from tests.tasks.remote.conftest import (  # noqa: F401
    SshBox,
    box,
    counting_recipe,
    key_path,
    link,
    login,
    remote,
)
from training.contract import layout


def test_the_wheel_is_built_once_from_what_runs_here(tmp_path: Path) -> None:
    wheel = install.build_wheel(tmp_path)
    assert install.build_wheel(tmp_path) == wheel and wheel.name.startswith("livery-")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        source = Path(install.__file__).parents[1] / "training/box/store.py"
        assert archive.read("training/box/store.py") == source.read_bytes()
    assert "training/contract/recipe.py" in names and "kernels/__init__.py" in names
    assert not [name for name in names if name.startswith(("tasks", "flows", "deployments")) or "__pycache__" in name]


def test_the_wheel_is_byte_identical_for_the_same_sources(tmp_path: Path) -> None:
    first, second = install.build_wheel(tmp_path / "a"), install.build_wheel(tmp_path / "b")
    assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()


def test_pip_accepts_the_wheel_and_its_extra(tmp_path: Path) -> None:
    wheel = install.build_wheel(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
        record = archive.read(next(name for name in archive.namelist() if name.endswith("RECORD"))).decode()
    assert "Provides-Extra: train" in metadata and "Requires-Dist: boto3" in metadata
    assert len(record.splitlines()) == len(zipfile.ZipFile(wheel).namelist())


def test_the_constraints_are_the_pinned_versions() -> None:
    assert "torch==" in install.find_constraints() and "boto3==" in install.find_constraints()


@pytest.mark.parametrize(
    ("output", "line", "host"),
    [
        (
            "Resolved\n  x No solution found when resolving dependencies:\n  because torch==9 is absent",
            "torch==9",
            False,
        ),
        ("ERROR: Could not find a version that satisfies the requirement torch==9", "torch==9", False),
        ("error: Failed to fetch: `https://…`\n  Caused by: operation timed out", "Failed to fetch", True),
        ("OSError: [Errno 28] No space left on device", "No space left", True),
        ("something nobody has seen", "nobody has seen", True),
        ("", "no output", True),
    ],
)
def test_an_unresolvable_pin_is_ours_and_trouble_of_net_or_disk_is_the_hosts(
    output: str, line: str, host: bool
) -> None:
    said, blamed = install.blame_for(output)
    assert line in said and blamed is host


def test_a_network_that_is_down_is_not_mistaken_for_a_bad_pin() -> None:
    output = "WARNING: Connection broken\nERROR: Could not find a version that satisfies the requirement boto3"
    assert install.blame_for(output)[1] is True


class StuckJobs(Jobs):
    def __init__(self) -> None:
        self.stopped: list[str] = []

    def poll(self, name: str, offset: int = 0, *, timeout_s: float = 10) -> JobState:
        return JobState("running", log=b"downloading torch\n" if offset == 0 else b"", offset=18)

    def stop(self, name: str, grace_s: float = 10, *, timeout_s: float | None = None) -> JobState:
        self.stopped.append(name)
        return JobState("exited")


def test_an_install_over_its_budget_is_stopped_and_says_where_it_was() -> None:
    now, jobs = [0.0], StuckJobs()

    def sleep(seconds: float) -> None:
        now[0] += 60

    with pytest.raises(InstallFailed, match="budget 900 s; its last line: downloading torch"):
        install.follow(jobs, "install", budget_s=900, clock=lambda: now[0], sleep=sleep)
    assert jobs.stopped == ["install"]


def test_both_environments_are_made_on_a_real_box(remote: Remote, tmp_path: Path) -> None:
    recipe = counting_recipe()
    install.install_transfer(remote, recipe, tmp_path)
    install.install_training(remote, recipe, tmp_path)
    python = f"{layout.BOX_TRAIN_VENV}/bin/python"
    told = remote.run(f"{python} -c 'import training.box.store, sys; print(sys.prefix)'", timeout_s=30)
    assert told.code == 0 and "livery/venv-t" in told.text
    assert remote.run(f"{python} -c 'import prefect'", timeout_s=30).code == 1
    install.install_transfer(remote, recipe, tmp_path)  # a retry of the task finds it done


def test_an_installer_that_fails_is_quoted(remote: Remote, box: SshBox, tmp_path: Path) -> None:
    box.script("bin/uv", "echo 'error: No solution found when resolving: no boto3==0'; exit 1")
    with pytest.raises(InstallFailed, match="exit code 1: error: No solution found") as caught:
        install.install_transfer(remote, counting_recipe(), tmp_path)
    assert caught.value.blame == "other"
