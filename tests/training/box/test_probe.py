"""The import probe and stage B, run in this very environment as on a box."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from training.box import probe
from training.contract.checks import CheckReport
from training.contract.recipe import Assignment, Recipe

ROOT = Path(__file__).parents[3]


def recipe(trainer: str) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "unit",
            "model": {"source": "bucket:m", "family": "qwen3_5_moe", "size_gb": 0.01},
            "phases": [{"kind": "sft", "data": "bucket:d", "steps": 1, "learning_rate": 0.001}],
            "box": {"tier": "rehearsal", "device": "cpu" if trainer == "trl" else "none"},
            "budget": {"max_usd": 1},
            "trainer": trainer,
        }
    )


def run(tmp_path: Path, trainer: str, pythonpath: Path | None = None, constraints: str = "") -> list[CheckReport]:
    assignment = Assignment(
        recipe=recipe(trainer), run="unit", flow_run_id="f", attempt=1, bucket="b", hard_end=int(time.time()) + 99
    )
    (tmp_path / "recipe.json").write_text(assignment.model_dump_json())
    pins = tmp_path / "constraints.txt"
    pins.write_text(constraints or (ROOT / "constraints.txt").read_text())
    words = ["--assignment", str(tmp_path / "recipe.json"), "--nonce", "n0nce", "--constraints", str(pins)]
    environ: dict[str, Any] = {**os.environ, **({"PYTHONPATH": str(pythonpath)} if pythonpath else {})}
    command = [sys.executable, "-m", "training.box.probe", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return [CheckReport.model_validate_json(line) for line in done.stdout.splitlines()]


def distribution(folder: Path, name: str, version: str = "1.0") -> None:
    """A package as an installer leaves it."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise AssertionError('the probe must not import this')")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.train  # imports the whole training stack in a fresh process
def test_the_training_environment_passes_both_stages_on_the_cpu(tmp_path: Path) -> None:
    imports, device = run(tmp_path, "trl")
    assert imports.ok, [check.sentence for check in imports.failed]
    assert {"import torch", "version peft", "absent unsloth", "kernels"} <= {check.id for check in imports.checks}
    assert device.ok and [check.id for check in device.checks] == ["grouped_mm"]
    assert imports.nonce == device.nonce == "n0nce" and float(device.facts["seconds"]) < 60
    assert json.loads((tmp_path / "device.json").read_text()) == device.facts, (
        "the trainer reads the measured peak here"
    )


@pytest.mark.parametrize("name", ["unsloth", "axolotl", "liger_kernel"])
def test_a_package_that_patches_the_others_is_found_without_importing_it(tmp_path: Path, name: str) -> None:
    distribution(tmp_path / "extra", name)
    (imports,) = run(tmp_path, "counting", tmp_path / "extra")
    assert [check.id for check in imports.failed] == [f"absent {name}"]
    assert imports.failed[0].blame == "image"


def test_the_other_distribution_named_kernels_is_refused(tmp_path: Path) -> None:
    distribution(tmp_path / "extra", "kernels", "0.19.0")
    (imports,) = run(tmp_path, "counting", tmp_path / "extra")
    assert "kernels" in [check.id for check in imports.failed]


def test_an_import_that_breaks_is_the_boxs_fault_and_stops_before_the_device(tmp_path: Path) -> None:
    (tmp_path / "extra/boto3").mkdir(parents=True)
    (tmp_path / "extra/boto3/__init__.py").write_text("raise OSError('libssl.so.3: cannot open shared object file')")
    (imports,) = run(tmp_path, "counting", tmp_path / "extra")
    (failed,) = [check for check in imports.failed if check.id == "import boto3"]
    assert failed.blame == "host" and "libssl" in failed.actual


def test_another_version_than_the_pinned_one_is_ours_to_mend(tmp_path: Path) -> None:
    (imports,) = run(tmp_path, "counting", constraints="boto3==0.0.1\npydantic==2.0.0 ; python_version < '4'\n")
    assert {check.id for check in imports.failed} == {"version boto3", "version pydantic"}
    assert {check.blame for check in imports.failed} == {"us"}
    assert [check.id for check in imports.checks if check.verdict == "unknown"] == ["version huggingface_hub"]


def test_a_build_tag_is_not_another_version() -> None:
    assert next(probe._pinned("torch", "2.13.0+cpu", "2.13.0")).verdict == "pass"
    assert next(probe._pinned("torch", "2.12.0+cpu", "2.13.0")).verdict == "fail"


def test_a_device_that_computes_wrongly_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    right = torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda x, w, offs: right(x, w, offs=offs) * 1.01)
    report = probe.probe_device(recipe("trl"), "n")
    assert [check.id for check in report.failed] == ["grouped_mm"]
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda x, w, offs: right(x, w, offs=offs) * float("nan"))
    assert not probe.probe_device(recipe("trl"), "n").ok


def test_a_device_that_throws_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", broken)
    report = probe.probe_device(recipe("trl"), "n")
    assert "no kernel image" in report.failed[0].actual
