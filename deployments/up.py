"""`python -m deployments up`: a Prefect server if none answers, the limit on boxes, then both serve processes.

Without a market account in the environment the embedded rehearsal stands in for one, and says so.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from dotenv import dotenv_values

from deployments import rehearsal, seed
from deployments.catalogue import served
from deployments.processes import Child, free_port
from tasks.domain import BOX_LIMIT
from tasks.settings import read_notify

STATE = Path(".livery")
_SERVER_START_S, _SERVE_START_S = 300, 180  # half a minute on an idle machine; these are for a very busy one
# Longer than a destroy in a hurry (15 s) and the hooks after it: a serve process that is stopped gives its boxes back first.
_SERVE_STOP_S = 90


class UpError(RuntimeError):
    """Something that `up` needs did not start; the message holds the end of its log."""


class Stopped(BaseException):
    """A signal asked us to stop. Not an Exception: nothing on the way may take it for a failure to get over."""


@contextlib.contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """SIGINT and SIGTERM unwind the stack once, in the order that gives boxes back; while that happens further ones do nothing."""

    def unwind(number: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signal.Signals(number).name)

    old = {number: signal.signal(number, unwind) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@dataclass
class Up:
    """What is running, and how to reach it."""

    environ: dict[str, str]
    api_url: str
    rehearsal: rehearsal.Rehearsal | None = None
    children: list[Child] = field(default_factory=list)
    alarms_go_to: str | None = None
    """Whom Prefect tells of alarms; None if nobody is configured."""

    @property
    def ui_url(self) -> str:
        return self.api_url.removesuffix("/api")

    def dead(self) -> list[Child]:
        return [child for child in self.children if not child.alive()]


@contextlib.contextmanager
def running(
    *,
    force_rehearsal: bool = False,
    faults: Sequence[str] = (),
    private_server: bool = False,
    serve: bool = True,
    with_market: bool = True,
    seed_with: Callable[[Mapping[str, str]], None] = seed.seed,
    extra_env: Mapping[str, str] | None = None,
) -> Iterator[Up]:
    """Start everything, yield, and stop everything in the order that gives boxes back: serve, server, rehearsal.

    Without a market account in the environment the rehearsal is started too; `with_market` false leaves the market to the caller.
    `seed_with` fills the rehearsal's bucket.
    `private_server` takes a free port and a Prefect home of its own, so that nobody's profile is touched.
    """
    with contextlib.ExitStack() as stack:
        _require_known(faults)
        environ = {**os.environ, **_prefect_environment(private_server), **(extra_env or {})}
        up = Up(environ, environ["PREFECT_API_URL"])
        server = None if _answers(up.api_url) else _start_server(up, stack)
        if with_market and (force_rehearsal or not has_account()):
            up.rehearsal = stack.enter_context(_rehearsal(faults))
            environ.update(up.rehearsal.env, LIVERY_STATE_DIR=str((STATE / "state").resolve()), **_REHEARSAL_PACE)
            seed_with(up.rehearsal.env)
        elif faults:
            raise UpError("faults are for the rehearsal; a real market has its own")
        _await_server(up, server)
        _create_limit(up)
        if serve:
            for process in ("runs", "reaper"):
                child = Child(
                    process,
                    [sys.executable, "-m", "deployments", "serve", process, *(["--rehearsal"] if up.rehearsal else [])],
                    environ,
                    STATE / "logs" / f"serve-{process}.log",
                )
                stack.callback(child.stop, _SERVE_STOP_S)
                up.children.append(child)
            _await_deployments(up)
            up.alarms_go_to = None if private_server else _install_alarms(up)
        yield up


# A rehearsal's minutes are seconds: leases, polls and grace periods shrink together.
_REHEARSAL_PACE = {"LIVERY_LEASE_S": "20", "LIVERY_LEASE_RENEW_S": "3", "LIVERY_POLL_S": "1"}


def has_account() -> bool:
    """Is a market account configured, by the environment or `.env`?"""
    return bool(_configured("LIVERY_MARKET_API_KEY"))


def _configured(name: str) -> str | None:
    """What the environment says, or else `.env`, as Prefect and our settings read it; an empty value is none."""
    return os.environ.get(name) or dotenv_values(".env").get(name) or None


def _require_known(faults: Sequence[str]) -> None:
    """Before anything is started: a fault that nobody knows would be found by the rehearsal half a minute later."""
    try:
        for fault in faults:
            rehearsal.parse_fault(fault)
    except ValueError as error:
        raise UpError(f"{error}\n(the list: python -m deployments.rehearsal --faults)") from None


@contextlib.contextmanager
def _rehearsal(faults: Sequence[str]) -> Iterator[rehearsal.Rehearsal]:
    with contextlib.ExitStack() as stack:
        try:
            started = stack.enter_context(rehearsal.start((STATE / "rehearsal").resolve(), faults=faults))
        except RuntimeError as error:
            raise UpError(str(error)) from None
        yield started


def _prefect_environment(private: bool) -> dict[str, str]:
    home = (STATE / "prefect").resolve() if private else Path(_configured("PREFECT_HOME") or Path.home() / ".prefect")
    url = (
        f"http://127.0.0.1:{free_port()}/api"
        if private
        else _configured("PREFECT_API_URL") or "http://127.0.0.1:4200/api"
    )
    return {
        "PREFECT_HOME": str(home),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ENCRYPTION_KEY": os.environ.get("PREFECT_SERVER_ENCRYPTION_KEY") or _encryption_key(),
        # With leases in memory a server restart cancels a training run that holds a limit.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule",
        "PREFECT_LOGGING_EXTRA_LOGGERS": "tasks,flows",
        # Hooks and the reaper's own process log without a flow run; that is no reason for a warning.
        "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
        "DO_NOT_TRACK": "1",
    }


def _encryption_key() -> str:
    """Blocks in Prefect's database are sealed with this key, which otherwise lies in the same database."""
    path = STATE / "state" / "encryption.key"
    if not path.exists():
        import base64

        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(base64.urlsafe_b64encode(secrets.token_bytes(32)).decode())
    return path.read_text().strip()


def _start_server(up: Up, stack: contextlib.ExitStack) -> Child:
    url = httpx.URL(up.api_url)
    if url.host not in {"127.0.0.1", "localhost", "::1"}:
        raise UpError(
            f"PREFECT_API_URL is {up.api_url} and nothing answers there; start that server, or unset it to have one started here"
        )
    argv = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(url.port or 4200)]
    server = Child("server", argv, up.environ, STATE / "logs" / "server.log")
    stack.callback(server.stop, 10)
    return server


def _answers(api_url: str) -> bool:
    try:
        return httpx.get(f"{api_url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _await_server(up: Up, server: Child | None) -> None:
    end = time.monotonic() + _SERVER_START_S
    while not _answers(up.api_url):
        if server is not None and not server.alive():
            raise UpError(f"the Prefect server stopped while starting:\n{server.tail()}")
        if time.monotonic() > end:
            raise UpError(
                f"the Prefect server at {up.api_url} did not answer within {_SERVER_START_S} s"
                + (f":\n{server.tail()}" if server else "")
            )
        time.sleep(0.25)


def _create_limit(up: Up, limit: int = 4) -> None:
    """At most so many runs hold a box at once; a person may change the number in the UI, so an existing limit is left alone."""
    answer = httpx.post(
        f"{up.api_url}/v2/concurrency_limits/", json={"name": BOX_LIMIT, "limit": limit, "active": True}, timeout=30
    )
    if answer.status_code not in {201, 200, 409}:
        raise UpError(f"creating the limit '{BOX_LIMIT}' failed with HTTP {answer.status_code}: {answer.text[:200]}")


def _install_alarms(up: Up) -> str | None:
    """After the deployments, since one automation starts one of them. A wrong address or block is said before anything is rented."""
    try:
        notify = read_notify()
        if notify.notify_url is None and notify.notify_block is None:
            return None
        from deployments import automations  # half a second and Prefect, for those who are to be told

        return automations.install(up.api_url, notify)
    except ValueError as error:
        raise UpError(str(error)) from None


def _await_deployments(up: Up) -> None:
    wanted = {
        entry.full_name
        for process in ("runs", "reaper")
        for entry in served(process, rehearsal=up.rehearsal is not None)
    }  # type: ignore[arg-type]
    end = time.monotonic() + _SERVE_START_S
    while wanted:
        for child in up.dead():
            raise UpError(f"serving '{child.name}' stopped while starting:\n{child.tail()}")
        if time.monotonic() > end:
            raise UpError(f"not served within {_SERVE_START_S} s: {', '.join(sorted(wanted))}; see {STATE / 'logs'}")
        wanted = {
            name for name in wanted if httpx.get(f"{up.api_url}/deployments/name/{name}", timeout=30).status_code != 200
        }
        time.sleep(0.5)


def _as_sigterm(number: int, frame: object) -> None:
    """On Ctrl-C Prefect kills its flows at once, without `finally` and without hooks; on SIGTERM they give their boxes back first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)


def serve(process: Any, *, rehearsal: bool) -> None:
    """Serve one process's deployments until a signal; graceful on SIGTERM: the flow destroys its box before it ends."""
    import prefect
    from prefect.deployments.runner import EntrypointType
    from prefect.schedules import Cron

    deployments = []
    for entry in served(process, rehearsal=rehearsal):
        schedules = [Cron(entry.cron, timezone="UTC")] if entry.cron else None
        deployments.append(
            entry.load_flow().to_deployment(
                name=entry.name,
                description=entry.description,
                parameters=dict(entry.parameters),
                tags=list(entry.tags),
                schedules=schedules,
                # By module, so that it works from any folder and from an installed wheel.
                entrypoint_type=EntrypointType.MODULE_PATH,
            )
        )
    signal.signal(signal.SIGINT, _as_sigterm)
    # Unpaused on shutdown: a reaper that a restart paused would reap nothing and say nothing.
    prefect.serve(*deployments, pause_on_shutdown=False, limit=5)
