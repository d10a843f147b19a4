"""The dead-man switch: on the box, with the one key that can only end this very box, for when everybody else has gone.

It destroys the instance once the hard end has passed, or when nobody has touched ~/livery/alive for the given minutes and no job
runs. Packed into the create call's onstart, so it must stay small, and it runs before anything else is on the box.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import sys
import time
import urllib.error
import urllib.request

HOME = os.path.expanduser("~/livery")


def main(argv: list[str]) -> int:
    """HARD_END (epoch seconds) SILENT_S [POLL_S]; returns only when another dead-man already watches, or the box is gone."""
    hard_end, silent_s = float(argv[0]), float(argv[1])
    poll_s = float(argv[2]) if len(argv) > 2 else 30.0
    lock = open(HOME + "/deadman.lock", "w")  # noqa: SIM115 - held for as long as this process lives
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 0
    started, seen, since = time.time(), 0.0, 0.0
    while True:
        try:
            alive, ticks = last_alive(started), time.monotonic()
            if alive != seen:
                seen, since = alive, ticks
            # A clock that is set forward is no silence: no more of it is believed than this process has lived through.
            alive = max(alive, time.time() - (ticks - since))
            why = reason(time.time(), hard_end, alive, silent_s, any_job())
            if why and destroy(why):
                return 0
        except Exception as error:  # noqa: BLE001 - nobody watches the last of the destroyers, so it must outlive any answer
            print(int(time.time()), type(error).__name__, error, flush=True)
        time.sleep(poll_s)


def reason(now: float, hard_end: float, alive_at: float, silent_s: float, job_runs: bool) -> str:
    """Why the box must end now; empty if it need not."""
    if now > hard_end:
        return "the hard end has passed"
    if now - alive_at > silent_s and not job_runs:
        return f"nobody has asked for this box for {now - alive_at:.0f} s and no job runs"
    return ""


def last_alive(started: float) -> float:
    try:
        return max(started, os.path.getmtime(HOME + "/alive"))
    except OSError:
        return started


def any_job() -> bool:
    for path in glob.glob(HOME + "/jobs/*/lock"):
        try:
            with open(path, "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def destroy(why: str) -> bool:
    """Ask the market to destroy this instance; True once it says that there is no such instance. Its "success" alone is asked again: a box
    that is really destroyed does not live to ask."""
    with open(HOME + "/instance.env") as file:
        env = dict(line.rstrip("\n").split("=", 1) for line in file if "=" in line)
    url = (env.get("VAST_URL") or "https://console.vast.ai") + f"/api/v0/instances/{env['CONTAINER_ID']}/"
    headers = {"Authorization": "Bearer " + env["CONTAINER_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, b"{}", headers, method="DELETE")
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            status, body = reply.status, reply.read(4096)
    except urllib.error.HTTPError as error:
        status, body = error.code, error.read(4096)
    except OSError as error:
        status, body = 0, type(error).__name__.encode()
    print(int(time.time()), why, "->", status, body[:200].decode(errors="replace"), flush=True)
    try:
        answer = json.loads(body)
    except ValueError:
        return False
    # A 404 may also mean a refused key: only its own word says that the box is gone.
    return isinstance(answer, dict) and answer.get("error") in ("no_such_instance", "not_found")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
