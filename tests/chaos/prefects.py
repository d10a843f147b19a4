"""Prefect as one lane sees it: a server, and whoever starts its flows."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from deployments.processes import Child, free_port
from tasks.domain import BOX_LIMIT

ROOT = Path(__file__).parents[2]
_FLOW = "import json, sys; from flows.finetune import finetune; finetune(**json.loads(sys.argv[1]))"
# The product's own serving program, with one deployment under this lane's name: several lanes share a server.
_SERVE = (
    "import sys; from dataclasses import replace; from deployments import catalogue, up; "
    "catalogue.CATALOGUE = tuple(replace(entry, name=sys.argv[1]) for entry in catalogue.CATALOGUE if entry.name == 'rehearsal'); "
    "up.serve('runs', rehearsal=True)"
)
_DEPLOY = (
    "import sys; from prefect import flow; "
    "flow.from_source(sys.argv[1], entrypoint='flows/finetune.py:finetune').deploy(name=sys.argv[2], work_pool_name=sys.argv[2], "
    "job_variables={'env': {'PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR': 'reschedule', 'PREFECT_LOGGING_EXTRA_LOGGERS': 'tasks,flows'}}, "
    "print_next_steps=False)"
)


class Prefect:
    """The server at `environ`'s PREFECT_API_URL, with a serve process, a work pool and a worker of this lane on demand."""

    def __init__(self, name: str, environ: Mapping[str, str], logs: Path) -> None:
        self.name, self.environ, self.logs = name, dict(environ), logs
        self.api = httpx.Client(base_url=self.environ["PREFECT_API_URL"], timeout=30)
        self.serve: Child | None = None
        self.worker: Child | None = None
        self.server: Child | None = None
        """Only of a server of our own."""
        self._has_pool = False

    def stop(self) -> None:
        for child in (self.serve, self.worker):
            if child is not None:
                child.stop(5)
        self.stop_server()
        self.api.close()

    # Starting flows

    def by_hand(self, parameters: str) -> Child:
        return self._child("flow", [sys.executable, "-c", _FLOW, parameters])

    def served(self, parameters: dict[str, Any]) -> str:
        """The id of a run that the serve process is asked to start."""
        if self.serve is None or not self.serve.alive():
            since = time.time()
            self.serve = self._child("serve", [sys.executable, "-c", _SERVE, f"served-{self.name}"])
            _wait(lambda: self._updated_at(f"served-{self.name}") > since, self.serve)
        return self._create_run(f"served-{self.name}", parameters, "SCHEDULED")

    def by_worker(self, parameters: dict[str, Any]) -> str:
        self._require_pool()
        run_id = self._create_run(self.name, parameters, "SCHEDULED")
        argv = ["worker", "start", "--pool", self.name, "--type", "process"]
        self.worker = self._child("worker", [sys.executable, "-m", "prefect", *argv])
        return run_id

    def in_container(self, parameters: dict[str, Any]) -> tuple[str, Child]:
        """As a container's entry point: started with the id of a run that is pending, so that nobody else picks it up."""
        self._require_pool()
        run_id = self._create_run(self.name, parameters, "PENDING")
        return run_id, self._child("container", [sys.executable, "-m", "prefect", "flow-run", "execute", run_id])

    # Runs and the server

    def set_state(self, run_id: str, state: dict[str, Any]) -> None:
        """Asked again while it is refused: a run can be suspended once it runs, and a moment drawn at its start may be before that."""
        end = time.monotonic() + 60
        while True:
            answer = self.ask("POST", f"/flow_runs/{run_id}/set_state", {"state": state, "force": False})
            if answer["status"] == "ACCEPT":
                return
            assert time.monotonic() < end, f"{state['type']} was refused: {answer}"
            time.sleep(0.5)

    def state_of(self, run_id: str) -> str:
        return str(self.ask("GET", f"/flow_runs/{run_id}").get("state", {}).get("name", "deleted"))

    def delete(self, run_id: str) -> None:
        self.ask("DELETE", f"/flow_runs/{run_id}")

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Prefect's answer, asked again while its database is busy; what is no longer there, or there already, is an empty one."""
        end = time.monotonic() + 60
        while True:
            try:
                answer = self.api.request(method, path, json=body)
            except httpx.TransportError:
                if time.monotonic() > end:
                    raise
            else:
                if answer.status_code in (404, 409):
                    return {}
                if answer.status_code < 500 or time.monotonic() > end:
                    answer.raise_for_status()
                    return dict(answer.json()) if answer.content else {}
            time.sleep(0.5)

    def start_server(self) -> None:
        port = httpx.URL(self.environ["PREFECT_API_URL"]).port
        argv = ["server", "start", "--host", "127.0.0.1", "--port", str(port)]
        self.server = self._child("server", [sys.executable, "-m", "prefect", *argv])

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return self.api.get("/health").status_code == 200
            return False

        _wait(answers, self.server)

    def stop_server(self, *, gently: bool = False) -> None:
        if self.server is not None:
            self.server.stop(10 if gently else 0)

    def _create_run(self, deployment: str, parameters: dict[str, Any], state: str) -> str:
        found = self.ask("GET", f"/deployments/name/finetune/{deployment}")
        # With a key of its own: a busy server may answer an error and have made the run all the same.
        body = {"parameters": parameters, "state": {"type": state}, "idempotency_key": parameters["run_name"]}
        return str(self.ask("POST", f"/deployments/{found['id']}/create_flow_run", body)["id"])

    def _updated_at(self, deployment: str) -> float:
        found = self.ask("GET", f"/deployments/name/finetune/{deployment}")
        return datetime.fromisoformat(found["updated"]).timestamp() if found else 0.0

    def _require_pool(self) -> None:
        if self._has_pool:
            return
        self.ask("POST", "/work_pools/", {"name": self.name, "type": "process"})
        argv = [sys.executable, "-c", _DEPLOY, str(ROOT), self.name]
        done = subprocess.run(argv, env=self.environ, capture_output=True, text=True, timeout=180, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"no deployment for the work pool: {done.stderr[-1000:]}")
        self._has_pool = True

    def _child(self, name: str, argv: list[str]) -> Child:
        self.logs.mkdir(parents=True, exist_ok=True)
        return Child(name, argv, self.environ, self.logs / f"{len(list(self.logs.iterdir())):04d}-{name}.log")


@contextlib.contextmanager
def own_server(prefect: Prefect, home: Path) -> Iterator[Prefect]:
    """A server for one run alone, to be restarted or taken away without troubling anybody else's."""
    url = f"http://127.0.0.1:{free_port()}/api"
    own = Prefect(prefect.name, {**prefect.environ, "PREFECT_API_URL": url, "PREFECT_HOME": str(home)}, prefect.logs)
    try:
        own.start_server()
        own.ask("POST", "/v2/concurrency_limits/", {"name": BOX_LIMIT, "limit": 4, "active": True})
        yield own
    finally:
        own.stop()


def processes_of(run_id: str | None) -> list[psutil.Process]:
    """Every process that a serve process, a worker or a container has started for this run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if run_id and process.environ().get("PREFECT__FLOW_RUN_ID") == run_id:
                found.append(process)
    return found


def _wait(what: Callable[[], bool], child: Child, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not what():
        if not child.alive() or time.monotonic() > end:
            raise RuntimeError(f"'{child.name}' did not start:\n{child.tail()}")
        time.sleep(0.3)
