"""Stage A: each check fails for its own reason, and what cannot be seen is unknown."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
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
    assert told.failed[0].purpose and told.failed[0].remedy


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


COMPAT = "/usr/local/cuda/compat/libcuda.so.1"


@pytest.mark.parametrize("library", ["/usr/lib/libcuda.so.550", COMPAT])
def test_error_803_from_an_old_driver_is_the_hosts(library: str) -> None:
    check = preflight.cuda_init_check(803, library, "550.54.15", "580.65.06")
    assert (check["verdict"], check["blame"]) == ("fail", "host")
    assert "too old for the image, want 580.65.06" in check["remedy"]


@pytest.mark.parametrize("library", [COMPAT, "/usr/lib/libcuda.so.1"])
def test_error_803_with_a_new_driver_is_the_images(library: str) -> None:
    check = preflight.cuda_init_check(803, library, "610.10.01", "580.65.06")
    assert (check["verdict"], check["blame"]) == ("fail", "image")
    assert "hides the host's driver" in check["remedy"]


@pytest.mark.parametrize(("code", "blame"), [(0, "image"), (803, "host"), (999, "host")])
def test_the_hosts_own_library_decides_whose_fault_803_is(code: int, blame: str) -> None:
    host = {"library": "/usr/lib/x86_64-linux-gnu/libcuda.so.610.10.01", "version": 13020, "code": code}
    for driver in ("610.10.01", None):
        assert preflight.cuda_init_check(803, COMPAT, driver, "580.65.06", host)["blame"] == blame


def test_804_of_a_card_without_forward_compatibility_is_told_apart_alike() -> None:
    assert preflight.cuda_init_check(804, COMPAT, "610.10.01", "580.65.06")["blame"] == "image"
    assert preflight.cuda_init_check(804, COMPAT, "550.54.15", "580.65.06")["blame"] == "host"
    assert preflight.cuda_init_check(100, COMPAT, "610.10.01", "580.65.06")["blame"] == "host", "no device at all"


def fake_libcuda(path: Path, version: int, code: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    source = (
        f"int cuDriverGetVersion(int *v) {{ *v = {version}; return 0; }} int cuInit(unsigned f) {{ return {code}; }}"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(path)], input=source, text=True, check=True)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_hosts_library_is_found_behind_the_images_and_asked_in_its_own_process(tmp_path: Path) -> None:
    compat = tmp_path / "usr/local/cuda/compat/libcuda.so.580.65.06"
    mounted = tmp_path / "usr/lib/x86_64-linux-gnu/libcuda.so.610.10.01"
    fake_libcuda(compat, 13000, 803)
    (tmp_path / "usr/lib64").mkdir(parents=True)
    (tmp_path / "usr/lib64/libcuda.so.580.65.06").symlink_to(compat)
    assert preflight.ask_host_cuda(str(compat), tmp_path) is None
    fake_libcuda(mounted, 13020, 0)
    assert preflight.ask_host_cuda(str(compat), tmp_path) == {"library": str(mounted), "version": 13020, "code": 0}
    assert preflight.ask_host_cuda(str(mounted), tmp_path) is None, "it is the loaded one already"


def test_the_disk_is_measured_both_ways_and_left_clean(tmp_path: Path) -> None:
    asked = {"disk_probe_mb": 32, "min_disk_mb_s": 1.0}
    checks = preflight.disk_speed_checks(tmp_path, asked, time.monotonic() + 30)
    assert [(check["id"], check["verdict"]) for check in checks] == [("disk_write", "pass"), ("disk_read", "pass")]
    assert not list(tmp_path.iterdir())
    slow = preflight.disk_speed_checks(tmp_path, {**asked, "min_disk_mb_s": 1e6}, time.monotonic() + 30)
    assert {check["verdict"] for check in slow} == {"fail"} and slow[0]["unit"] == "MB/s"


def test_what_the_time_does_not_allow_is_unknown_not_failed(tmp_path: Path) -> None:
    checks = preflight.disk_speed_checks(tmp_path, {"disk_probe_mb": 32, "min_disk_mb_s": 300}, time.monotonic() - 1)
    assert {(check["verdict"], check["actual"]) for check in checks} == {("unknown", "no time left to look")}
    assert not list(tmp_path.iterdir())


def test_a_disk_that_cannot_be_written_fails_with_its_own_word(tmp_path: Path) -> None:
    (check,) = preflight.disk_speed_checks(tmp_path / "none", {"disk_probe_mb": 1}, time.monotonic() + 9)
    assert (check["verdict"], check["actual"]) == ("fail", "No such file or directory")


def test_memory_is_our_share_of_the_machine_where_a_quota_of_processors_says_so(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:       200000000 kB\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    quota = tmp_path / "sys/fs/cgroup/cpu.max"
    quota.write_text("max 100000\n")
    assert preflight.read_host_facts(tmp_path)["memory_max_gb"] == 204.8
    quota.write_text(f"{(os.cpu_count() or 1) * 25_000} 100000\n")
    assert preflight.read_host_facts(tmp_path)["memory_max_gb"] == 51.2


def test_a_network_mount_is_no_disk_of_the_box(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    mounts = tmp_path / "proc/mounts"
    mounts.write_text(f"overlay / overlay rw 0 0\nshare:/a {Path.home()} nfs4 rw 0 0\nx {Path.home()}x ext4 rw 0 0\n")
    kind = preflight.read_host_facts(tmp_path)["disk_type"]
    assert kind == "nfs4" and preflight._own_disk(kind)["verdict"] == "fail"
    assert preflight._own_disk("overlay")["verdict"] == "pass" and preflight._own_disk(None)["verdict"] == "unknown"


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


def test_a_card_that_fell_off_its_bus_fails_with_the_drivers_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(preflight.FACTS_VARIABLE, raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'Unable to determine the device handle for GPU0: Unknown Error'; exit 255\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    told = CheckReport.model_validate(preflight.report(wanted(device="cuda", disk_free_gb=0.1), "n"))
    (failed,) = [check for check in told.failed if check.id == "gpu_answers"]
    assert "exit code 255: Unable to determine" in failed.actual and failed.blame == "host"


def test_a_card_in_use_by_somebody_else_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(preflight.FACTS_VARIABLE, raising=False)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'RTX, 97887, 40000, 580.95.05'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    asked = wanted(device="cuda", disk_free_gb=0.1, host_memory_gb=0.1, min_pids=1, gpu_memory_mb=90000)
    told = CheckReport.model_validate(preflight.report(asked, "n"))
    (busy,) = [check for check in told.failed if check.id == "gpu_idle"]
    assert busy.remedy == "next offer" and busy.unit == "MB used"
