"""The deployments as `up` serves them: triggered by the command line, cancelled, killed. Hooks run where Prefect runs them, in another process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from deployments.up import Up, running
from tests.journeys.conftest import JOURNEY_S, seed, store_of

pytestmark = [pytest.mark.journey, pytest.mark.timeout(600)]
# Steps slow enough to be met in the middle.
SLOW = {"recipe": "counting", "phases": ["cpt", "sft"]}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, prefect_api: str) -> Iterator[Up]:
    home = tmp_path_factory.mktemp("up")
    # The small world instead of the tiny model: this module is about processes.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        patch.setenv("PREFECT_API_URL", prefect_api)
        patch.setenv("PREFECT_HOME", str(home / "prefect"))
        with running(force_rehearsal=True, seed_with=lambda environ: seed(store_of(environ))) as made:
            yield made


def run_id_of(up: Up, name: str) -> str:
    answer = httpx.post(f"{up.api_url}/flow_runs/filter", json={"flow_runs": {"name": {"any_": [name]}}}, timeout=30)
    return str(answer.json()[0]["id"])


def trigger(up: Up, **parameters: object) -> str:
    deployment = httpx.get(f"{up.api_url}/deployments/name/finetune/rehearsal", timeout=30).json()
    body = {"parameters": {**deployment["parameters"], **parameters}, "state": {"type": "SCHEDULED"}}
    return str(
        httpx.post(f"{up.api_url}/deployments/{deployment['id']}/create_flow_run", json=body, timeout=30).json()["id"]
    )


def state_of(up: Up, run_id: str) -> str:
    return str(httpx.get(f"{up.api_url}/flow_runs/{run_id}", timeout=30).json()["state"]["name"])


def wait_for(what: Callable[[], bool], words: str, seconds: float = JOURNEY_S) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, words
        time.sleep(0.3)


def boxes_of(up: Up, run_id: str) -> list[dict[str, object]]:
    assert up.rehearsal is not None
    return [box for box in up.rehearsal.control.state()["instances"] if run_id in str(box["label"])]


def artifact_keys(up: Up, run_id: str) -> set[str]:
    answer = httpx.post(
        f"{up.api_url}/artifacts/filter", json={"artifacts": {"flow_run_id": {"any_": [run_id]}}}, timeout=30
    )
    return {artifact["key"] for artifact in answer.json()}


def artifact_id(up: Up, run_id: str, key: str) -> str:
    wanted = {
        "artifacts": {"flow_run_id": {"any_": [run_id]}, "key": {"any_": [key]}},
        "sort": "UPDATED_DESC",
        "limit": 1,
    }
    return str(httpx.post(f"{up.api_url}/artifacts/filter", json=wanted, timeout=30).json()[0]["id"])


def receipt_written(up: Up, run_id: str) -> bool:
    return any(info.key.endswith(f"/receipts/{run_id}.json") for info in store_of(up.environ).list("runs/"))


def engines_of(run_id: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"PREFECT__FLOW_RUN_ID={run_id}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def test_a_run_triggered_on_the_command_line_ends_completed_with_its_artifacts(up: Up) -> None:
    command = [
        sys.executable,
        "-m",
        "prefect",
        "deployment",
        "run",
        "finetune/rehearsal",
        "-p",
        "recipe=counting",
        "-p",
        "run_name=by-hand",
        "--watch",
    ]
    done = subprocess.run(command, env=up.environ, capture_output=True, text=True, timeout=JOURNEY_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = run_id_of(up, "by-hand")
    assert state_of(up, run_id) == "Completed"
    assert artifact_keys(up, run_id) >= {"progress", "phases", "receipt", "offers", "filters", "transfers"}
    assert len(list(store_of(up.environ).list("paces/"))) == 5, "the next plan knows what a step took"
    assert all(box["gone"] for box in boxes_of(up, run_id))


def printed(command: list[str]) -> str:
    """What a browser printed; its helpers, which outlive it, are ended with it."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as browser:
        try:
            return browser.communicate(timeout=JOURNEY_S)[0]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(browser.pid, signal.SIGKILL)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_person_sees_the_receipt_and_the_phases_in_the_ui(up: Up, tmp_path: Path) -> None:
    run_id = run_id_of(up, "by-hand")
    for key, words in (
        ("receipt", ["instances left", "phase cpt", "upload grpo"]),
        ("phases", ["loss first", "counter"]),
        ("transfers", ["prefetch model", "upload grpo/20", "budget s"]),
    ):
        page = f"{up.ui_url}/artifacts/artifact/{artifact_id(up, run_id, key)}"
        quiet = [
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
        ]
        command = [
            "chromium",
            "--headless",
            "--no-sandbox",
            *quiet,
            f"--user-data-dir={tmp_path / key}",
            "--virtual-time-budget=15000",
            "--dump-dom",
            page,
        ]
        seen = printed(command)
        assert not [word for word in words if word not in seen], f"{page} shows {len(seen)} characters without them"


def test_a_wrong_parameter_is_refused_before_anything_starts(up: Up) -> None:
    command = [sys.executable, "-m", "prefect", "deployment", "run", "finetune/rehearsal", "-p", "tier=gtx1080"]
    done = subprocess.run(command, env=up.environ, capture_output=True, text=True, timeout=JOURNEY_S, check=False)
    assert done.returncode == 1
    assert "tier" in done.stdout + done.stderr


def test_cancelling_a_run_destroys_its_box(up: Up) -> None:
    run_id = trigger(up, run_name="cancelled", **SLOW)
    wait_for(lambda: bool(boxes_of(up, run_id)), "no box was rented")
    httpx.post(f"{up.api_url}/flow_runs/{run_id}/set_state", json={"state": {"type": "CANCELLING"}}, timeout=30)
    wait_for(lambda: all(box["gone"] for box in boxes_of(up, run_id)), "the box is still there")
    wait_for(lambda: state_of(up, run_id) == "Cancelled", "the run did not become Cancelled")


def test_after_sigkill_of_the_flow_the_hook_destroys_the_box_and_writes_the_receipt(up: Up) -> None:
    """The hook runs in the serve process, with nothing but the environment and the flow run's id."""
    run_id = trigger(up, run_name="killed", **SLOW)
    wait_for(lambda: any(box["status"] == "running" for box in boxes_of(up, run_id)), "no box was rented")
    for pid in engines_of(run_id):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(box["gone"] for box in boxes_of(up, run_id)), "the box is still there")
    wait_for(lambda: receipt_written(up, run_id), "no receipt")


def test_the_reaper_is_scheduled_and_unpaused(up: Up) -> None:
    deployment = httpx.get(f"{up.api_url}/deployments/name/reaper/cron", timeout=30).json()
    assert deployment["paused"] is False
    assert [schedule["schedule"]["cron"] for schedule in deployment["schedules"]] == ["*/5 * * * *"]
