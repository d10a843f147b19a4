"""Stage A: each check fails for its own reason, and what cannot be seen is unknown."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from training.box import preflight
from training.contract.checks import CheckReport

GOOD: dict[str, Any] = {
    "gpus": [{"name": "Rehearsal", "memory_mb": 8000}],
    "driver_version": "580.95.05",
    "cuda_driver": 13000,
    "pids_max": 8192,
    "memory_max_gb": 128,
    "disk_free_gb": 300,
    "clock_skew_s": 0,
}


def wanted(**changes: Any) -> dict[str, Any]:
    return {
        "device": "cpu",
        "num_gpus": 1,
        "gpu_memory_mb": 7600,
        "min_driver": "580.65.06",
        "min_cuda": 13.0,
        "disk_free_gb": 200,
        "min_pids": 4096,
        "host_memory_gb": 96,
        "max_clock_skew_s": 60,
        "now": time.time(),
        "round_trip_s": 0.2,
        **changes,
    }


def report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, facts: dict[str, Any], asked: dict[str, Any]
) -> CheckReport:
    path = tmp_path / "facts.json"
    path.write_text(json.dumps(facts))
    monkeypatch.setenv(preflight.FACTS_VARIABLE, str(path))
    return CheckReport.model_validate(preflight.report(asked, "nonce"))


def test_a_good_box_passes_every_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = report(monkeypatch, tmp_path, GOOD, wanted())
    assert told.ok and told.nonce == "nonce" and told.stage == "a"
    assert {check.id for check in told.checks if check.verdict == "pass"} >= {
        "gpu_count",
        "gpu_memory",
        "driver",
        "cuda",
        "disk_free",
        "pids_max",
        "host_memory",
        "clock",
        "python",
    }


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({"gpus": []}, "gpu_count"),
        ({"gpus": [{"name": "x", "memory_mb": 4000}]}, "gpu_memory"),
        ({"driver_version": "550.54.15"}, "driver"),
        ({"cuda_driver": 12040}, "cuda"),
        ({"disk_free_gb": 12}, "disk_free"),
        ({"pids_max": 1024}, "pids_max"),
        ({"memory_max_gb": 32}, "host_memory"),
        ({"clock_skew_s": 600}, "clock"),
        ({"clock_skew_s": -90}, "clock"),
    ],
)
def test_each_shortcoming_fails_its_own_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: dict[str, Any], failing: str
) -> None:
    told = report(monkeypatch, tmp_path, {**GOOD, **change}, wanted())
    assert [check.id for check in told.failed] == [failing]
    assert told.failed[0].blame == "host" and "want" in told.failed[0].sentence


def test_what_cannot_be_seen_is_unknown_and_fails_no_box(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hidden = {**GOOD, "driver_version": None, "cuda_driver": None, "pids_max": None, "memory_max_gb": None}
    told = report(monkeypatch, tmp_path, hidden, wanted())
    assert told.ok
    unknown = {check.id for check in told.checks if check.verdict == "unknown"}
    assert unknown >= {"driver", "cuda", "pids_max", "host_memory"}


def test_a_facts_file_is_refused_on_a_box_that_computes_on_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = report(monkeypatch, tmp_path, GOOD, wanted(device="cuda"))
    (failed,) = [check for check in told.failed if check.id == "facts_file"]
    assert failed.blame == "user" and "real hardware" in failed.sentence
    assert "580.95.05" not in told.facts.values()


def test_a_slow_question_does_not_look_like_a_wrong_clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    late = wanted(now=time.time() - 65, round_trip_s=10)
    assert report(monkeypatch, tmp_path, GOOD, late).ok
    assert not report(monkeypatch, tmp_path, GOOD, {**late, "round_trip_s": 1}).ok


def test_limits_are_read_from_the_own_control_group_and_the_smaller_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal:       200000000 kB\n")
    own = tmp_path / "sys/fs/cgroup/box"
    own.mkdir(parents=True)
    (own / "pids.max").write_text("1024\n")
    (own / "memory.max").write_text(f"{64 * 10**9}\n")
    facts = preflight.read_host_facts(tmp_path)
    assert (facts["pids_max"], facts["memory_max_gb"]) == (1024, 64.0)
    (own / "pids.max").write_text("max\n")
    assert preflight.read_host_facts(tmp_path)["pids_max"] == float("inf")


def test_limits_of_the_old_control_groups_are_read_too(tmp_path: Path) -> None:
    for name, value in (("pids/pids.max", "2048"), ("memory/memory.limit_in_bytes", str(1 << 62))):
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True)
        path.write_text(value)
    facts = preflight.read_host_facts(tmp_path)
    assert (facts["pids_max"], facts["memory_max_gb"]) == (2048, None)


def test_error_803_from_an_old_driver_is_the_hosts() -> None:
    check = preflight.cuda_init_check(803, "/usr/lib/libcuda.so.550", "550.54.15", "580.65.06")
    assert (check["verdict"], check["blame"]) == ("fail", "host")


@pytest.mark.parametrize("library", ["/usr/local/cuda/compat/libcuda.so.1", "/usr/lib/libcuda.so.1"])
def test_error_803_with_a_new_driver_is_the_images(library: str) -> None:
    check = preflight.cuda_init_check(803, library, "610.10.01", "580.65.06")
    assert (check["verdict"], check["blame"]) == ("fail", "image")
    assert "hides the host's driver" in check["remedy"]


def test_a_driver_is_compared_by_numbers_not_by_letters() -> None:
    assert preflight.version_tuple("580.100.01") > preflight.version_tuple("580.65.06")


def test_nvidia_smis_rows_are_read_and_no_devices_is_zero_not_unknown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(preflight.FACTS_VARIABLE, raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA RTX PRO 6000, 97887, 4, 580.95.05'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    facts = preflight.read_driver_facts("cuda")
    assert facts["gpus"] == [{"name": "NVIDIA RTX PRO 6000", "memory_mb": 97887.0, "used_mb": 4.0}]
    assert facts["driver_version"] == "580.95.05"
    program.write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert preflight.read_driver_facts("cuda")["gpus"] == []
    program.unlink()
    assert "gpus" not in preflight.read_driver_facts("cuda")


def test_a_card_in_use_by_somebody_else_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(preflight.FACTS_VARIABLE, raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'RTX, 97887, 40000, 580.95.05'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    asked = wanted(device="cuda", disk_free_gb=0.1, host_memory_gb=0.1, min_pids=1, gpu_memory_mb=90000)
    told = CheckReport.model_validate(preflight.report(asked, "n"))
    assert "gpu_idle" in [check.id for check in told.failed]
