"""The dead-man switch: on the box, with the one key that can only end this very box, for when everybody else has gone.

It destroys the instance once the hard end has passed, or when nobody has touched ~/livery/alive for so long and nothing gets anywhere:
no job runs, or one runs and has not moved for the longer time that even a slow install or evaluation is given. Packed into the create
call's onstart, so it must stay small, and it runs before anything else is on the box.
"""

from __future__ import annotations

import fcntl
import glob
import os
import sys
import time
import urllib.error
import urllib.request

HOME = os.path.expanduser("~/livery")


def main(argv: list[str]) -> int:
    """HARD_END (epoch seconds) SILENT_S [POLL_S [STALLED_S]]; returns only when another dead-man already watches."""
    hard_end, silent_s, poll_s, stalled_s = (float(word) for word in [*argv, *("30", "7200")[len(argv) - 2 :]])
    lock = open(HOME + "/deadman.lock", "w")  # noqa: SIM115 - held for as long as this process lives
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return 0
    started, seen, since, moved_at, read = time.time(), 0.0, 0.0, time.monotonic(), dict[str, int]()
    while True:
        try:
            alive, ticks = last_alive(started), time.monotonic()
            if alive != seen:
                seen, since = alive, ticks
            if moved(read):
                moved_at = ticks
            # A clock that is set forward is no silence: no more of it is believed than this process has lived through.
            alive = max(alive, time.time() - (ticks - since))
            still_s = ticks - moved_at if any_job() else None
            why = reason(time.time(), hard_end, alive, silent_s, still_s, stalled_s)
            if why:
                destroy(why)
        except Exception as error:  # noqa: BLE001 - nobody watches the last of the destroyers, so it must outlive any answer
            print(int(time.time()), type(error).__name__, error, flush=True)
        time.sleep(poll_s)


def reason(
    now: float, hard_end: float, alive_at: float, silent_s: float, still_s: float | None, stalled_s: float
) -> str:
    """Why the box must end now; empty if it need not. `still_s`: for how long the running job has got nowhere, None if none runs."""
    if now > hard_end:
        return "the hard end has passed"
    if now - alive_at <= silent_s:
        return ""
    asked = f"nobody has asked for this box for {now - alive_at:.0f} s and "
    if still_s is None:
        return asked + "no job runs"
    return asked + f"its job has got nowhere for {still_s:.0f} s" if still_s > stalled_s else ""


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


def moved(read: dict[str, int]) -> bool:
    """Whether a job's log has grown since the last look, or an event has come that is more than a sign of life: a heart beats beside a
    step that never ends, and a retry that fails is told as well. `read` holds how far each file has been read."""
    found = False
    for path in [*glob.glob(HOME + "/jobs/*/log"), HOME + "/events.jsonl"]:
        try:
            with open(path, "rb") as file:
                size = file.seek(0, 2)
                file.seek(read[path] if read.get(path, size + 1) <= size else 0)
                new = file.read()
                read[path] = file.tell()
        except OSError:
            continue
        idle = (b'"heartbeat"', b'"notice"')
        found |= any(
            line and not (path.endswith("events.jsonl") and any(word in line for word in idle))
            for line in new.split(b"\n")
        )
    return found


def destroy(why: str) -> None:
    """Ask the market to destroy this instance. No answer is believed, not even that there is no such instance: a box that is really
    destroyed does not live to read it, so who reads it asks again at the next look."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
