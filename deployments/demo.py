"""`make demo`: the whole product on this machine. A deployment run is triggered, watched, and its end is checked, not assumed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from deployments.seed import store_of
from deployments.up import STATE, Stopped, Up, UpError, running, unwinding_on_signals
from tasks.domain import Receipt
from tasks.phase import PHASES_CAPTION
from tasks.receipt import dollars, table
from training.box.store import Store
from training.contract import layout

FLOW_SIGKILL = "flow.sigkill"
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "CRASHED"}
_RUN_LIMIT_S = 900
_DEPLOYMENT = "finetune/rehearsal"


def demo(faults: list[str], *, keep_up: bool, recipe: str | None = None) -> int:
    """Run it; 0 only if the run ended as this fault allows, no instance is left and the receipt is there."""
    began = time.monotonic()
    market_faults = [fault for fault in faults if fault != FLOW_SIGKILL]
    say("starting a Prefect server, a pretend market, a bucket and the deployments (all on loopback) …")
    with unwinding_on_signals(), running(force_rehearsal=True, faults=market_faults, private_server=True) as up:
        say(f"up after {time.monotonic() - began:.0f} s; Prefect's page: {up.ui_url}")
        run = trigger(up, {"recipe": recipe} if recipe else {})
        say(f"triggered {_DEPLOYMENT}: {run['name']}  {ui_link(up, run['id'])}")
        state = watch(up, run["id"], kill_at="phase sft:" if FLOW_SIGKILL in faults else None)
        if FLOW_SIGKILL in faults:
            reap_twice(up)
        code = conclude(up, run["id"], state, time.monotonic() - began)
        if keep_up:
            say(f"its page: {ui_link(up, run['id'])}")
            with contextlib.suppress(Stopped):
                hold(up)
    return code


def trigger(up: Up, parameters: dict[str, Any]) -> dict[str, Any]:
    """Create a run of the deployment, as the UI's button does."""
    deployment = _get(up, f"deployments/name/{_DEPLOYMENT}")
    answer = httpx.post(
        f"{up.api_url}/deployments/{deployment['id']}/create_flow_run",
        json={"parameters": {**deployment["parameters"], **parameters}, "state": {"type": "SCHEDULED"}},
        timeout=30,
    )
    answer.raise_for_status()
    return dict(answer.json())


def watch(up: Up, run_id: str, kill_at: str | None = None) -> str:
    """Print the run's log as it grows until it ends; the final state's name."""
    offset, end = 0, time.monotonic() + _RUN_LIMIT_S
    while time.monotonic() < end:
        run = _get(up, f"flow_runs/{run_id}")
        records = _log_records(up, run_id, offset)
        offset += len(records)
        for record in records:
            # Prefect's "Finished in state Completed" names no task; what the task said itself is above it.
            # The receipt comes again at the end, from the bucket.
            if record["message"] != "Finished in state Completed()" and not record["message"].startswith(
                "receipt of run"
            ):
                print(_line(record), flush=True)
            if kill_at and kill_at in record["message"]:
                kill_at = None
                _sigkill_flow(run_id)
        if run["state_type"] in _ENDED:
            return str(run["state"]["name"])
        for child in up.dead():
            raise UpError(f"'{child.name}' has stopped:\n{child.tail()}")
        time.sleep(1)
    raise UpError(f"the run did not end within {_RUN_LIMIT_S} s; see {ui_link(up, run_id)} and {STATE / 'logs'}")


def reap_twice(up: Up) -> None:
    """Two ticks of the reaper without Prefect, the second after the lease has run out."""
    for tick in (1, 2):
        say(f"reaper, tick {tick}:")
        done = subprocess.run(
            [sys.executable, "-m", "flows.reaper", "--once"],
            env=up.environ,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        print(done.stdout + done.stderr, flush=True)
        if tick == 1:
            time.sleep(float(up.environ["LIVERY_LEASE_S"]) + 2)


def conclude(up: Up, run_id: str, state: str, seconds: float) -> int:
    """The table, the receipt, the adapter and the instances left, each read from where the truth is."""
    assert up.rehearsal is not None, "the demo always rehearses"
    store = store_of(up.environ)
    receipt = _receipt(store, run_id)
    phases = _artifact(up, run_id, "phases")
    print()
    if phases:
        _print_phases(phases)
    print(table(receipt) if receipt else "receipt: none was written")
    if receipt and store.size(layout.exported(receipt.run)):
        where = f"s3://{up.environ['LIVERY_BUCKET']}/{layout.adapter(receipt.run)}"
        copy = _copy_adapter(store, receipt.run)
        print(f"adapter: {where}   (copied to {copy}, since the rehearsal's bucket goes with it)")
    world = up.rehearsal.control.state()
    left, rate = world["instances_left"], world["billed_now_usd_per_h"]
    print(f"instances left: {left}   (billed now: {dollars(rate)} an hour, ever rented: {len(world['instances'])})")
    print(f"the run ended {state} after {seconds:.0f} s")
    ended_well = state == "Completed" or (state == "Crashed" and run_id in _killed)
    return 0 if ended_well and left == 0 and receipt is not None else 1


def _copy_adapter(store: Store, run: str) -> Path:
    folder = STATE / "adapters" / run
    for info in store.list(layout.adapter(run)):
        path = folder / info.key.removeprefix(layout.adapter(run))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        store.download_file(info.key, path)
    return folder


def _print_phases(rows: list[dict[str, Any]]) -> None:
    print(f"phases: {PHASES_CAPTION[0].lower()}{PHASES_CAPTION[1:]}")
    named = dict.fromkeys(key for row in rows for key in row)
    columns = [column for column in named if any(str(row.get(column, "")) for row in rows)]
    widths = {column: max(len(column), *(len(str(row.get(column, ""))) for row in rows)) for column in columns}
    print("  " + "  ".join(column.ljust(widths[column]) for column in columns))
    for row in rows:
        print("  " + "  ".join(str(row.get(column, "")).ljust(widths[column]) for column in columns))
    print()


def hold(up: Up) -> None:
    say(
        f"kept up (KEEP_UP=1): {up.ui_url}; another run: PREFECT_API_URL={up.api_url} prefect deployment run {_DEPLOYMENT} --watch; Ctrl-C stops everything"
    )
    while not up.dead():
        time.sleep(0.5)


def ui_link(up: Up, run_id: str) -> str:
    return f"{up.ui_url}/runs/flow-run/{run_id}"


def say(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} | {text}", flush=True)


_killed: set[str] = set()


def _sigkill_flow(run_id: str) -> None:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and f"PREFECT__FLOW_RUN_ID={run_id}".encode() in (entry / "environ").read_bytes()
                and b"prefect" in (entry / "cmdline").read_bytes()
            ):
                say(f"SIGKILL to the flow's process {entry.name}")
                os.kill(int(entry.name), signal.SIGKILL)
                _killed.add(run_id)


def _get(up: Up, path: str) -> dict[str, Any]:
    answer = httpx.get(f"{up.api_url}/{path}", timeout=30)
    answer.raise_for_status()
    return dict(answer.json())


def _log_records(up: Up, run_id: str, offset: int) -> list[dict[str, Any]]:
    body = {"logs": {"flow_run_id": {"any_": [run_id]}}, "sort": "TIMESTAMP_ASC", "offset": offset, "limit": 200}
    answer = httpx.post(f"{up.api_url}/logs/filter", json=body, timeout=30)
    answer.raise_for_status()
    return list(answer.json())


def _line(record: dict[str, Any]) -> str:
    level = "" if record["level"] <= 20 else "WARNING " if record["level"] <= 30 else "ERROR "
    return f"{datetime.fromisoformat(record['timestamp']):%H:%M:%S} | {level}{record['message']}"


def _artifact(up: Up, run_id: str, key: str) -> list[dict[str, Any]] | None:
    import json

    body = {
        "artifacts": {"flow_run_id": {"any_": [run_id]}, "key": {"any_": [key]}},
        "sort": "UPDATED_DESC",
        "limit": 1,
    }
    answer = httpx.post(f"{up.api_url}/artifacts/filter", json=body, timeout=30)
    answer.raise_for_status()
    found = answer.json()
    return list(json.loads(found[0]["data"])) if found else None


def _receipt(store: Store, run_id: str) -> Receipt | None:
    keys = [info.key for info in store.list("runs/") if info.key.endswith(f"/receipts/{run_id}.json")]
    data = store.get_bytes(keys[0]) if keys else None
    return Receipt.model_validate_json(data) if data is not None else None
