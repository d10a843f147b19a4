"""Starting a rehearsal from a test or from `make demo`, and steering it while it runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0


class ControlClient:
    """The rehearsal's own levers: what no client of a real market has."""

    def __init__(self, url: str) -> None:
        import httpx  # here, not above: the rehearsal's own process, which steers nothing, need not wait for it

        self._http = httpx.Client(base_url=f"{url}/_rehearsal", timeout=30.0, trust_env=False)

    def state(self) -> dict[str, Any]:
        """Every instance ever rented, dollars, faults and bytes; see `web.state_of` for the keys."""
        return self._json(self._http.get("/state"))

    def arm(self, spec: str) -> None:
        """Arms a fault, `name[=value][@scope]`. ValueError as the rehearsal words it."""
        self._json(self._http.post("/faults", json={"spec": spec}))

    def disarm(self, name: str) -> bool:
        reply = self._http.delete(f"/faults/{name}")
        return reply.status_code != 404 and bool(self._json(reply)["removed"])

    def advance(self, seconds: float) -> float:
        """Moves the market's clock on; returns its new time."""
        return float(self._json(self._http.post("/clock", json={"advance_s": seconds}))["now"])

    def lose(self, instance_id: int) -> None:
        """The instance's host vanishes."""
        self._json(self._http.post(f"/instances/{instance_id}/lose"))

    def close(self) -> None:
        self._http.close()

    def _json(self, reply: httpx.Response) -> dict[str, Any]:
        body: dict[str, Any] = reply.json()
        if reply.status_code >= 400:
            raise ValueError(body.get("error", f"rehearsal answered {reply.status_code}"))
        return body


class Rehearsal:
    """A running rehearsal. `env` is what the product needs to find it; `stop` removes everything it started."""

    def __init__(self, root: Path, process: subprocess.Popen[bytes], env: dict[str, str]) -> None:
        self.root = root
        self.env = env
        self.process = process
        self.control = ControlClient(env["LIVERY_MARKET_URL"])

    def stop(self) -> None:
        """Idempotent. RuntimeError when the rehearsal had to be killed or did not end well."""
        self.control.close()
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"rehearsal on {self.root} had to be killed: {log_tail(self.root)}") from None
        if code != 0:
            raise RuntimeError(f"rehearsal on {self.root} ended with {code}: {log_tail(self.root)}")

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(
    root: Path,
    *,
    faults: Sequence[str] = (),
    boot_s: float = 1.0,
    pace: float = 0.1,
    port: int = 0,
    clock_ahead_s: float = 0.0,
    outlive_parent: bool = False,
    keep_bucket: bool = False,
    env_file: Path | None = None,
) -> Rehearsal:
    """Starts a rehearsal as a process of its own and returns when it is ready (about two seconds).

    It ends with `stop`, or when this process ends, unless `outlive_parent`. `clock_ahead_s` sets the market's clock
    ahead of the real one. RuntimeError with the end of its log when it does not start.
    """
    root = root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    (root / "env").unlink(missing_ok=True)
    command = [sys.executable, "-m", "deployments.rehearsal", "--root", str(root), "--port", str(port)]
    command += ["--boot-s", str(boot_s), "--pace", str(pace), "--clock-ahead-s", str(clock_ahead_s)]
    command += [word for spec in faults for word in ("--fault", spec)]
    # By number, for if we end before it has looked who its parent is.
    command += ["--parent-pid", str(os.getpid())]
    command += ["--outlive-parent"] * outlive_parent + ["--keep-bucket"] * keep_bucket
    command += ["--env-file", str(env_file.absolute())] if env_file is not None else []
    with open(root / "rehearsal.log", "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=Path(__file__).parents[2],
            # A Ctrl-C in the terminal must reach us first: we still need the market to give the boxes back.
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    return Rehearsal(root, process, _wait_for_env(root, process))


def read_env(path: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)


def log_tail(root: Path) -> str:
    path = root / "rehearsal.log"
    return path.read_text(errors="replace")[-1500:].strip() if path.exists() else "no log"


def _wait_for_env(root: Path, process: subprocess.Popen[bytes]) -> dict[str, str]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"rehearsal did not start: {log_tail(root)}")
        if (root / "env").exists():
            return read_env(root / "env")
        time.sleep(0.02)
    process.terminate()
    process.wait()
    raise RuntimeError(f"rehearsal was not ready after {START_TIMEOUT_S:.0f} s: {log_tail(root)}")
