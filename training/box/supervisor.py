"""Detached jobs on the box. All state lies in files and every verb may be repeated, since any answer may be lost on its way.

    supervisor start DIR TOKEN [--env-file FILE] -- ARGV…   one JSON line; the same TOKEN twice is the same job, never two
    supervisor poll DIR OFFSET [MAX]                        one JSON line, then the log's bytes from OFFSET
    supervisor stop DIR [GRACE_S]                           SIGTERM to the job's process group, SIGKILL after GRACE_S seconds
    supervisor tail FILE OFFSET [MAX]                       one JSON line, then the file's bytes from OFFSET

A job is alive while somebody holds the flock on DIR/lock: its supervisor, and the job itself, which inherits it. So a process id
that was given out again, or a box that was restarted, cannot look like a running job; and the death of the supervisor alone does not
let a second job start beside the first. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BEAT_S = 5.0
LOG_BYTES = 1 << 20


def main(argv: list[str]) -> int:
    verb, where = argv[0], Path(os.path.expanduser(argv[1])).absolute()
    if verb == "start":
        split = argv.index("--")
        options, command = argv[3:split], argv[split + 1 :]
        env_file = options[options.index("--env-file") + 1] if "--env-file" in options else None
        _print(start(where, argv[2], command, env_file))
    elif verb == "poll":
        _print_with_bytes(*poll(where, int(argv[2]), int(argv[3]) if len(argv) > 3 else LOG_BYTES))
    elif verb == "stop":
        _print(stop(where, float(argv[2]) if len(argv) > 2 else 10.0))
    elif verb == "tail":
        _print_with_bytes(*tail(where, int(argv[2]), int(argv[3]) if len(argv) > 3 else LOG_BYTES))
    else:
        print(f"supervisor: unknown verb '{verb}'; known: start, poll, stop, tail", file=sys.stderr)
        return 2
    return 0


def start(job: Path, token: str, command: list[str], env_file: str | None = None) -> dict[str, Any]:
    """Run a command detached from this login; `started` says whether this call did it. A finished job is not run again."""
    job.mkdir(parents=True, exist_ok=True)
    lock = (job / "lock").open("a+")
    if not _taken(lock):
        return {**_settled(job), "started": False}
    before = _status(job)
    if before.get("token") == token and before["state"] == "exited":
        return {**before, "started": False}
    if before.get("token") != token:
        # Another job of this name: its log begins anew. The same job after a loss goes on in the same log.
        (job / "log").unlink(missing_ok=True)
    _write_status(job, state="starting", token=token)
    _detach(job, token, command, env_file, lock.fileno())
    return {**_settled(job), "started": True}


def poll(job: Path, offset: int, limit: int = LOG_BYTES) -> tuple[dict[str, Any], bytes]:
    """State and log. The state is read first, so that after `exited` the log is whole."""
    state = _state(job)
    size, data = _read(job / "log", offset, limit)
    return {**state, "offset": offset + len(data), "size": size, "now": time.time()}, data


def stop(job: Path, grace_s: float) -> dict[str, Any]:
    """End a running job and everything in its process group."""
    state = _state(job)
    if state["state"] == "running" and "pid" in state:
        _signal(state["pid"], signal.SIGTERM)
        if not _wait(job, grace_s):
            _signal(state["pid"], signal.SIGKILL)
            _wait(job, 10.0)
    return _state(job)


def tail(file: Path, offset: int, limit: int = LOG_BYTES) -> tuple[dict[str, Any], bytes]:
    size, data = _read(file, offset, limit)
    return {"offset": offset + len(data), "size": size, "now": time.time()}, data


def read_env_file(path: str) -> dict[str, str]:
    """KEY=VALUE lines; blank lines and those that begin with # are left out."""
    lines = Path(os.path.expanduser(path)).read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.lstrip().startswith("#"))
    return {key.strip(): value for key, value in pairs}


def _detach(job: Path, token: str, command: list[str], env_file: str | None, lock: int) -> None:
    """Fork twice into a session of its own; the grandchild keeps the lock, this process only waits for it to be on its way."""
    ready, signal_ready = os.pipe()
    sys.stdout.flush()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        try:
            os.close(ready)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nothing, descriptor)
            _supervise(job, token, command, env_file, lock, signal_ready)
        except BaseException as error:  # noqa: BLE001 - the last words of a process that nobody watches
            _write_status(job, state="exited", token=token, exit_code=127, error=f"{type(error).__name__}: {error}")
        os._exit(0)
    os.close(signal_ready)
    os.read(ready, 1)
    os.close(ready)
    os.wait()


def _supervise(job: Path, token: str, command: list[str], env_file: str | None, lock: int, signal_ready: int) -> None:
    # The box's own environment wins: a mirror or an endpoint that it names is nearer than ours.
    environ = {**(read_env_file(env_file) if env_file else {}), **os.environ, "LIVERY_JOB": job.name}
    log = os.open(job / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    began = time.time()
    child = subprocess.Popen(
        [os.path.expanduser(word) for word in command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=job,
        env=environ,
        start_new_session=True,
        pass_fds=(lock,),
    )
    known: dict[str, Any] = {"token": token, "pid": child.pid, "started_at": began}
    _write_status(job, state="running", beat_at=time.time(), **known)
    os.close(signal_ready)
    while True:
        try:
            code = child.wait(BEAT_S)
            break
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):  # a full disk must not end the one who will tell the exit code
                _write_status(job, state="running", beat_at=time.time(), **known)
    _write_status(job, state="exited", exit_code=code, ended_at=time.time(), **known)


def _state(job: Path) -> dict[str, Any]:
    alive = _alive(job)  # before the status: a job that ends in between then shows as exited, not as lost
    status = _status(job)
    if status["state"] in ("starting", "running") and not alive:
        return {**status, "state": "lost"}
    if status["state"] == "starting":
        return {**status, "state": "running"}
    return status


def _taken(lock: Any) -> bool:
    """Whether the lock is ours now. Whoever only looks whether a job is alive holds it for an instant, so one refusal proves nothing."""
    for _ in range(10):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            time.sleep(0.02)
        else:
            return True
    return False


def _settled(job: Path) -> dict[str, Any]:
    """The state once a start that is under way has got anywhere."""
    deadline = time.monotonic() + 5
    while _status(job)["state"] in ("absent", "starting") and time.monotonic() < deadline:
        time.sleep(0.01)
    return _state(job)


def _alive(job: Path) -> bool:
    try:
        with (job / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _wait(job: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while _state(job)["state"] == "running":
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself meanwhile
        os.killpg(pid, number)


def _status(job: Path) -> dict[str, Any]:
    try:
        status: dict[str, Any] = json.loads((job / "status.json").read_text())
    except FileNotFoundError:
        return {"state": "absent"}
    return status


def _write_status(job: Path, **status: Any) -> None:
    fresh = job / f"status.json.{os.getpid()}"
    with fresh.open("w") as file:
        json.dump(status, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, job / "status.json")


def _read(file: Path, offset: int, limit: int) -> tuple[int, bytes]:
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(offset)
            return size, stream.read(limit)
    except FileNotFoundError:
        return 0, b""


def _print(value: dict[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _print_with_bytes(value: dict[str, Any], data: bytes) -> None:
    sys.stdout.buffer.write(json.dumps(value).encode() + b"\n" + data)
    sys.stdout.buffer.flush()
