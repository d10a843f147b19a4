"""Stage A of preflight: what a bare box can tell, before anything is installed. Standard library only, prints one JSON line.

    preflight --wanted JSON --nonce N

`wanted` holds device, num_gpus, gpu_memory_mb, min_driver, min_cuda, disk_free_gb, min_pids, host_memory_gb, max_clock_skew_s, `now` with
`round_trip_s` (the caller's clock when it asked, and how long a question takes), `disk_probe_mb` and `min_disk_mb_s`, and `seconds`, within which
all must be done. What could not be looked at is `unknown`, which is shown and does not fail a box.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FACTS_VARIABLE = "LIVERY_BOX_FACTS"
GB = 10**9
# Another tenant's process holds at least a CUDA context; an idle card shows a few MB.
IDLE_GPU_MB = 1500
_TOLD = (
    "driver_version",
    "cuda_driver",
    "libcuda",
    "host_cuda",
    "disk_free_gb",
    "pids_max",
    "memory_max_gb",
    "python",
    "uv",
)
_SYSTEM_DRIVER_MISMATCH, _COMPAT_NOT_SUPPORTED = 803, 804
# Where container runtimes mount the host's own driver; an image's compatibility library lies in a folder named so.
_HOST_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib64", "usr/lib", "usr/local/nvidia/lib64")
_ASK_LIBRARY = """\
import ctypes, json, sys
cuda, version = ctypes.CDLL(sys.argv[1]), ctypes.c_int(0)
known = cuda.cuDriverGetVersion(ctypes.byref(version)) == 0
print(json.dumps([version.value if known else None, cuda.cuInit(0)]))
"""
_NETWORK_DISKS = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "ceph",
    "glusterfs",
    "lustre",
    "fuse.s3fs",
    "fuse.rclone",
    "fuse.sshfs",
}
_DISK_BLOCK, _DISK_FLUSH_MB = 16 << 20, 128
# Each way; a disk that has not moved its sample by then is told by what it did move.
_DISK_S = 12.0
_DEFAULT_S = 60.0


def main(argv: list[str]) -> int:
    wanted = json.loads(argv[argv.index("--wanted") + 1])
    print(json.dumps(report(wanted, argv[argv.index("--nonce") + 1])), flush=True)
    return 0


def report(wanted: dict[str, Any], nonce: str) -> dict[str, Any]:
    """All checks of stage A in the form of training.contract.checks.CheckReport."""
    deadline = time.monotonic() + float(wanted.get("seconds", _DEFAULT_S))
    facts = {**read_host_facts(), **read_driver_facts(wanted["device"])}
    checks = [_facts_file(wanted["device"], facts), *_gpu_checks(wanted, facts), *_host_checks(wanted, facts)]
    checks += disk_speed_checks(Path.home(), wanted, deadline)
    told: dict[str, str] = {key: str(facts[key]) for key in _TOLD if facts.get(key) is not None}
    told["gpu"] = "; ".join(f"{gpu['name']} {gpu['memory_mb']} MB" for gpu in facts.get("gpus") or [])
    return {"stage": "a", "nonce": nonce, "checks": [check for check in checks if check], "facts": told}


def read_driver_facts(device: str, environ: Any = os.environ) -> dict[str, Any]:
    """GPUs, driver and CUDA version: from the hardware or, on a rehearsal box, from its facts file.

    A box that is to compute on CUDA never gets to hear the file: pretended hardware would pass every check.
    """
    path = environ.get(FACTS_VARIABLE)
    if path and device != "cuda":
        told: dict[str, Any] = json.loads(Path(path).read_text())
        return {**told, "facts_file": path}
    facts: dict[str, Any] = {"facts_file": path} if path else {}
    gpus, facts["gpu_trouble"] = _query("--query-gpu=name,memory.total,memory.used,driver_version")
    if gpus is not None:
        facts["gpus"] = [{"name": g[0], "memory_mb": _number(g[1]), "used_mb": _number(g[2])} for g in gpus]
        facts["driver_version"] = gpus[0][3] if gpus else None
    if device == "cuda":
        facts["cuda_driver"], facts["cuda_init"], facts["libcuda"] = ask_cuda()
        if facts["cuda_init"] in (_SYSTEM_DRIVER_MISMATCH, _COMPAT_NOT_SUPPORTED):
            facts["host_cuda"] = ask_host_cuda(facts["libcuda"])
    return facts


def read_host_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Disk, limits of the control group, interpreters. A key whose value could not be found is None."""
    home = os.path.expanduser("~")
    disk = os.statvfs(home)
    return {
        "disk_free_gb": round(disk.f_bavail * disk.f_frsize / GB, 1),
        "pids_max": _limit(root, "pids.max", "pids/pids.max"),
        "memory_max_gb": _memory_gb(root),
        "disk_type": _filesystem(root, home),
        "clock_skew_s": 0.0,
        "python": _python(),
        "uv": shutil.which("uv") or "",
        "deadman": _deadman(Path(home) / "livery" / "deadman.lock"),
    }


def ask_cuda() -> tuple[int | None, int | None, str]:
    """The driver's CUDA version (13000 for 13.0), the result of cuInit, and the library that answered; None if there is no libcuda."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, None, ""
    version = ctypes.c_int(0)
    code = cuda.cuDriverGetVersion(ctypes.byref(version))
    maps = Path("/proc/self/maps").read_text()
    loaded = re.search(r"\S*libcuda\.so\S*", maps)
    return (version.value if code == 0 else None), int(cuda.cuInit(0)), loaded.group() if loaded else ""


def ask_host_cuda(loaded: str, root: Path = Path("/")) -> dict[str, Any] | None:
    """The same of the host's own driver library, where it is another file than the `loaded` one: library, version, code. None if there is none.

    In a process of its own, since one process holds one libcuda: this is the second try without the image's compatibility library.
    """
    for library in host_libraries(root):
        if os.path.realpath(library) == os.path.realpath(loaded):
            continue
        command = [sys.executable, "-S", "-c", _ASK_LIBRARY, str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            version, code = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            continue
        return {"library": str(library), "version": version, "code": code}
    return None


def host_libraries(root: Path = Path("/")) -> Iterator[Path]:
    """libcuda as the container runtime mounts it from the host: libcuda.so.<driver version>, outside any folder of an image's `compat`."""
    for folder in _HOST_LIBRARIES:
        for path in sorted((root / folder).glob("libcuda.so.*.*")):
            if "compat" not in os.path.realpath(path):
                yield path


def cuda_init_check(
    code: int | None, libcuda: str, driver: str | None, min_driver: str, host: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What the result of cuInit means. Error 803 has two opposite causes: a host driver that is too old for the image, or an image
    whose compatibility library hides a newer host driver; the second is no fault of the machine.

    `host` is what the host's own library answered (see ask_host_cuda); it decides. Without it the driver's version does, and only without
    that the place of the loaded library.
    """
    purpose = "without it nothing computes on the GPU"
    if code is None:
        return _check("cuda_init", "unknown", "no libcuda.so.1", "cuInit 0", purpose)
    if code == 0:
        return _check("cuda_init", "pass", "cuInit 0", "cuInit 0", purpose)
    seen = f"cuInit {code} with driver {driver or 'unknown'}"
    if code in (_SYSTEM_DRIVER_MISMATCH, _COMPAT_NOT_SUPPORTED) and _hidden(libcuda, driver, min_driver, host):
        shown = f"{host['library']}, which answers cuInit 0" if host else f"driver {driver or 'of unknown version'}"
        remedy = (
            f"the image's {libcuda or 'CUDA compatibility library'} hides the host's {shown}: use an image without it"
        )
        return _check("cuda_init", "fail", seen, "cuInit 0", purpose, remedy=remedy, blame="image")
    remedy = "next offer"
    if driver is not None and version_tuple(driver) < version_tuple(min_driver):
        remedy = f"the host's driver is too old for the image, want {min_driver}; next offer"
    return _check("cuda_init", "fail", seen, "cuInit 0", purpose, remedy=remedy)


def _hidden(libcuda: str, driver: str | None, min_driver: str, host: dict[str, Any] | None) -> bool:
    """Whether the image stands in the way of a driver that would do."""
    if host is not None:
        return bool(host["code"] == 0)
    if driver is not None:
        return version_tuple(driver) >= version_tuple(min_driver)
    return "compat" in libcuda


def disk_speed_checks(folder: Path, wanted: dict[str, Any], deadline: float) -> list[dict[str, Any]]:
    """Writing and reading back `disk_probe_mb` where the model will lie, incompressible and past the page cache."""
    purpose = "model, checkpoints and packages go through it"
    floor = float(wanted.get("min_disk_mb_s") or 0.0)
    least = f"≥ {floor:g}"
    size_mb = int(wanted.get("disk_probe_mb") or 0)
    if not size_mb:
        return []
    try:
        write, read = measure_disk(folder, size_mb, deadline)
    except OSError as error:
        seen = error.strerror or str(error)
        return [_check("disk_write", "fail", seen, least, purpose, unit="MB/s", remedy="next offer")]
    found = []
    for name, speed in {"disk_write": write, "disk_read": read}.items():
        if speed is None:
            found.append(_check(name, "unknown", "no time left to look", least, purpose, unit="MB/s"))
            continue
        verdict, remedy = ("pass", "") if speed >= floor else ("fail", "next offer")
        found.append(_check(name, verdict, f"{speed:.0f}", least, purpose, unit="MB/s", remedy=remedy))
    return found


def measure_disk(folder: Path, size_mb: int, deadline: float) -> tuple[float | None, float | None]:
    """MB/s written and read of a file that is deleted again; None for what the time did not allow. OSError if the disk says no."""
    block = os.urandom(_DISK_BLOCK)
    path = folder / f".livery-disk-{os.getpid()}"
    try:
        with path.open("wb", buffering=0) as file:
            write = _paced(size_mb, deadline, lambda: file.write(block), lambda: os.fdatasync(file.fileno()))
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            read = _paced(path.stat().st_size // 10**6, deadline, lambda: len(file.read(_DISK_BLOCK)), lambda: None)
    finally:
        path.unlink(missing_ok=True)
    return write, read


def _paced(size_mb: int, deadline: float, move: Any, flush: Any) -> float | None:
    """MB/s of moving `size_mb` in blocks with a flush now and then, so that a slow disk is left after some seconds with its number."""
    began = time.monotonic()
    stop = min(deadline, began + _DISK_S)
    moved = unflushed = 0
    while moved < size_mb * 10**6 and time.monotonic() < stop:
        count = move()
        if not count:
            break
        moved, unflushed = moved + count, unflushed + count
        if unflushed >= _DISK_FLUSH_MB * 10**6:
            flush()
            unflushed = 0
    flush()
    return moved / 1e6 / max(time.monotonic() - began, 1e-6) if moved else None


def version_tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _facts_file(device: str, facts: dict[str, Any]) -> dict[str, Any] | None:
    if device != "cuda" or not facts.get("facts_file"):
        return None
    return _check(
        "facts_file",
        "fail",
        f"{FACTS_VARIABLE}={facts['facts_file']}",
        "not set",
        "a box that computes on CUDA must show its real hardware",
        remedy=f"unset {FACTS_VARIABLE} on this box, or set box.device to cpu or none",
        blame="user",
    )


def _gpu_checks(wanted: dict[str, Any], facts: dict[str, Any]) -> list[dict[str, Any] | None]:
    gpus = facts.get("gpus")
    checks: list[dict[str, Any] | None] = []
    if wanted["device"] == "cuda" or facts.get("facts_file"):
        count = None if gpus is None else len(gpus)
        purpose = "the offer was paid for with this many"
        if facts.get("gpu_trouble"):
            told = str(facts["gpu_trouble"])
            why = "a card that does not answer its driver computes nothing"
            checks.append(_check("gpu_answers", "fail", told, "an answer", why, remedy="next offer"))
        checks.append(_equal("gpu_count", count, wanted.get("num_gpus"), purpose))
        least = min((gpu["memory_mb"] for gpu in gpus), default=None) if gpus else None
        checks.append(_least("gpu_memory", least, wanted.get("gpu_memory_mb"), "MB", "base model and states must fit"))
    if version_tuple(str(wanted["min_driver"])) > (0,):
        checks.append(_driver(facts.get("driver_version"), wanted["min_driver"]))
    if wanted["min_cuda"] > 0:
        seen = facts.get("cuda_driver")
        version = None if seen is None else seen // 1000 + seen % 1000 // 10 / 10
        checks.append(_least("cuda", version, wanted["min_cuda"], "", "the training packages are built for it"))
    if wanted["device"] == "cuda":
        driver = facts.get("driver_version")
        code, library, host = facts.get("cuda_init"), facts.get("libcuda", ""), facts.get("host_cuda")
        checks.append(cuda_init_check(code, library, driver, wanted["min_driver"], host))
        checks.append(_idle(gpus))
    return checks


def _host_checks(wanted: dict[str, Any], facts: dict[str, Any]) -> list[dict[str, Any] | None]:
    return [
        _least(
            "disk_free", facts["disk_free_gb"], wanted["disk_free_gb"], "GB", "model, packages and checkpoints must fit"
        ),
        _own_disk(facts.get("disk_type")) if wanted["device"] == "cuda" else None,
        _least("pids_max", facts["pids_max"], wanted["min_pids"], "", "downloader and OpenMP start many threads"),
        _least("host_memory", facts["memory_max_gb"], wanted["host_memory_gb"], "GB", "weights pass through it"),
        _clock(float(facts["clock_skew_s"]), wanted),
        _interpreter(facts),
        _watched(facts["deadman"]),
    ]


def _driver(seen: str | None, least: str) -> dict[str, Any]:
    purpose = "an older driver cannot run this CUDA (error 803)"
    if seen is None:
        return _check("driver", "unknown", "unknown", f"≥ {least}", purpose)
    good = version_tuple(seen) >= version_tuple(least)
    return _check(
        "driver", "pass" if good else "fail", seen, f"≥ {least}", purpose, remedy="" if good else "next offer"
    )


def _idle(gpus: list[dict[str, Any]] | None) -> dict[str, Any]:
    purpose = "a card that somebody else uses is neither fast nor free"
    used = [gpu["used_mb"] for gpu in gpus or [] if gpu.get("used_mb") is not None]
    if not used:
        return _check("gpu_idle", "unknown", "unknown", f"≤ {IDLE_GPU_MB}", purpose, unit="MB used")
    good = max(used) <= IDLE_GPU_MB
    verdict, remedy = ("pass", "") if good else ("fail", "next offer")
    return _check("gpu_idle", verdict, str(max(used)), f"≤ {IDLE_GPU_MB}", purpose, unit="MB used", remedy=remedy)


def _own_disk(kind: str | None) -> dict[str, Any]:
    purpose = "a network mount is slow when others are busy, and its contents may be somebody else's"
    if kind is None:
        return _check("own_disk", "unknown", "unknown", "a disk of the box", purpose)
    good = kind not in _NETWORK_DISKS
    return _check(
        "own_disk", "pass" if good else "fail", kind, "a disk of the box", purpose, remedy="" if good else "next offer"
    )


def _clock(shift_s: float, wanted: dict[str, Any]) -> dict[str, Any]:
    purpose = "the bucket refuses requests signed with a wrong time"
    limit, trip = float(wanted["max_clock_skew_s"]), float(wanted.get("round_trip_s", 0))
    if wanted.get("now") is None:
        return _check("clock", "unknown", "unknown", f"± {limit:g}", purpose, unit="s")
    skew = (
        time.time() + shift_s - float(wanted["now"])
    )  # the way here takes up to a round trip and looks like a fast clock
    good = -limit <= skew <= limit + trip
    verdict, remedy = ("pass", "") if good else ("fail", "next offer, unless it is this computer's clock that is wrong")
    return _check("clock", verdict, f"{skew:+.1f}", f"± {limit:g}", purpose, unit="s", remedy=remedy)


def _interpreter(facts: dict[str, Any]) -> dict[str, Any]:
    seen = facts["python"] or ("uv, which brings one" if facts["uv"] else "")
    purpose = "the training packages need it"
    if seen:
        return _check("python", "pass", seen, "≥ 3.11", purpose)
    here = sys.version.split()[0]
    return _check("python", "fail", f"{here}, no uv", "≥ 3.11", purpose, remedy="use an image with it", blame="image")


def _watched(running: bool | None) -> dict[str, Any]:
    purpose = "the box ends itself when everybody else has gone"
    if running:
        return _check("deadman", "pass", "running", "running", purpose)
    return _check(
        "deadman", "unknown", "not seen", "running", purpose, remedy="see ~/livery/deadman.log", blame="image"
    )


def _least(name: str, seen: float | None, least: float | None, unit: str, purpose: str) -> dict[str, Any] | None:
    if least is None or least <= 0:
        return None
    if seen is None:
        return _check(name, "unknown", "unknown", f"≥ {least:g}", purpose, unit=unit)
    good = seen >= least
    shown = "unlimited" if seen == float("inf") else f"{seen:g}"
    return _check(
        name, "pass" if good else "fail", shown, f"≥ {least:g}", purpose, unit=unit, remedy="" if good else "next offer"
    )


def _equal(name: str, seen: int | None, wanted: int | None, purpose: str) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if seen is None:
        return _check(name, "unknown", "unknown", str(wanted), purpose)
    return _check(
        name,
        "pass" if seen == wanted else "fail",
        str(seen),
        str(wanted),
        purpose,
        remedy="" if seen == wanted else "next offer",
    )


def _check(
    name: str,
    verdict: str,
    actual: str,
    required: str,
    purpose: str,
    unit: str = "",
    remedy: str = "",
    blame: str = "host",
) -> dict[str, Any]:
    return {
        "id": name,
        "verdict": verdict,
        "actual": actual,
        "required": required,
        "unit": unit,
        "purpose": purpose,
        "remedy": remedy,
        "blame": blame,
    }


def _query(question: str) -> tuple[list[list[str]] | None, str]:
    """Rows of nvidia-smi's CSV, None if it is not there or does not answer; and its complaint. Its human text is never parsed: it was
    renamed before."""
    try:
        command = ["nvidia-smi", question, "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError:
        return None, ""
    except subprocess.TimeoutExpired:
        return None, "nvidia-smi has not answered for 30 s"
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()
        return ([], "") if "No devices" in said else (None, f"nvidia-smi exit code {done.returncode}: {said[:200]}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()], ""


def _number(text: str) -> float | None:
    match = re.search(r"[\d.]+", text)
    return float(match.group()) if match else None


def _limit(root: Path, v2: str, v1: str) -> float | None:
    """A limit of this process's control group (version 2, else 1); infinity for `max`, None if neither file is there."""
    own = ""
    cgroup = root / "proc/self/cgroup"
    if cgroup.exists():
        match = re.search(r"^0::(/.*)$", cgroup.read_text(), re.MULTILINE)
        own = match.group(1).strip("/") if match else ""
    base = root / "sys/fs/cgroup"
    seen = [_limit_file(path) for path in (base / own / v2, base / v2, base / v1) if path.is_file()]
    return min(seen) if seen else None


def _limit_file(path: Path) -> float:
    text = path.read_text().strip()
    return float("inf") if text == "max" or int(text) > 1 << 60 else float(text)


def _memory_gb(root: Path) -> float | None:
    match = (
        re.search(r"MemTotal:\s+(\d+) kB", (root / "proc/meminfo").read_text())
        if (root / "proc/meminfo").exists()
        else None
    )
    total = float(match.group(1)) * 1024 * _cpu_share(root) if match else None
    limit = _limit(root, "memory.max", "memory/memory.limit_in_bytes")
    known = [value for value in (total, limit) if value is not None and value != float("inf")]
    return round(min(known) / GB, 1) if known else None


def _cpu_share(root: Path) -> float:
    """Our part of the machine's processors, 1 without a quota: the market rents memory out in the same parts and rarely limits it."""
    path = root / "sys/fs/cgroup/cpu.max"
    quota, _, period = path.read_text().strip().partition(" ") if path.is_file() else ("max", "", "")
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return 1.0
    return min(1.0, int(quota) / int(period) / (os.cpu_count() or 1))


def _filesystem(root: Path, folder: str) -> str | None:
    """The type of the file system that `folder` lies on, by the longest mount point above it."""
    mounts = root / "proc/mounts"
    if not mounts.exists():
        return None
    found = [line.split()[1:3] for line in mounts.read_text().splitlines() if len(line.split()) > 2]
    above = [(point, kind) for point, kind in found if f"{folder}/".startswith(f"{point.rstrip('/')}/")]
    return max(above, key=lambda mount: len(mount[0]))[1] if above else None


def _python() -> str:
    """An interpreter of at least 3.11, by path or version; empty if there is none."""
    if sys.version_info >= (3, 11):  # noqa: UP036 - the box's own python3 runs this, whatever it is
        return sys.version.split()[0]
    return next((path for name in ("python3.13", "python3.12", "python3.11") if (path := shutil.which(name))), "")


def _deadman(lock: Path) -> bool | None:
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except OSError:
        return True
    return False
