"""One world in which chaos runs follow each other: a market, a bucket, boxes. Run by `python -m tests.chaos`.

Market faults strike whoever calls next, so each lane has a rehearsal of its own, and what happens in it has one cause.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from deployments import rehearsal
from deployments.processes import Child
from deployments.rehearsal.processes import MARKER
from deployments.seed import CACHE, seed, store_of
from tasks.domain import Flight, Label
from tasks.flight import read_flight
from tasks.lease import read_lease
from tasks.recipes import shipped
from tests.chaos import bookkeeping, draw
from tests.chaos.draw import Case
from tests.chaos.outcome import Outcome, give_back, new
from tests.chaos.prefects import ROOT, Prefect, own_server, processes_of
from training.box.store import Store, StoreError
from training.contract import layout

LOOK_S = 0.15
# Reading every process's environment is dear.
LOOK_AT_PROCESSES_S = 1.0
LEASE_S, RENEW_S = 8, 1.0
SILENT_S, STALLED_S = 6.0, 14.0
# For a run to come to the drawn moment, and to its end after it. Generous: several lanes share the machine, and a busy one takes its time.
MOMENT_S, END_S = 420.0, 240.0
# No process of the run for so long: nobody is about to start another, or the first one while whoever should start it lives.
QUIET_S, UNSTARTED_S = 8.0, 90.0
# A dead-man's box: the rest of two short phases with their uploads, then a silence.
ALONE_S = 120.0
# A stranger's box stands in each world: nothing may touch it.
_STRANGER = ("somebody-elses-work", 24001015)


@dataclass
class Flown:
    """A run under way."""

    case: Case
    run: str
    prefect: Prefect
    child: Child | None = None
    flow_run_id: str | None = None
    flight: Flight | None = None
    seen_at: float = field(default_factory=time.monotonic)
    """When a process of it was last seen, or it was asked for."""
    looked_at: float = 0.0
    missed: bool = False
    """The signal met no process: none was there yet, or none any more."""
    events: dict[int, Path] = field(default_factory=dict)

    @property
    def host(self) -> Child:
        """The process that started the flow's."""
        host = self.prefect.serve if self.case.how == "served" else self.prefect.worker
        assert host is not None, "launched before"
        return host

    @property
    def log(self) -> Child | None:
        return self.child or self.prefect.worker or self.prefect.serve


class Lane:
    """`environ` names the Prefect server that all lanes share."""

    def __init__(self, root: Path, environ: dict[str, str], *, deadman: bool = False) -> None:
        self.root, self.deadman = root, deadman
        self._environ = environ
        self._stack = contextlib.ExitStack()
        self._old_boxes: set[int] = set()
        self._old_flights: set[str] = set()
        self._runs: list[str] = []

    def __enter__(self) -> Lane:
        self.root.mkdir(parents=True, exist_ok=True)
        os.chdir(self.root)
        with self._stack as stack:
            self.world = stack.enter_context(rehearsal.start(self.root / "rehearsal", boot_s=0.3, pace=0.02))
            self._environ |= {
                **self.world.env,
                "LIVERY_LEASE_S": str(LEASE_S),
                "LIVERY_LEASE_RENEW_S": f"{RENEW_S:g}",
                "LIVERY_POLL_S": "0.3",
                "LIVERY_STATE_DIR": str(self.root / "state"),
                "PREFECT_RUNNER_POLL_FREQUENCY": "1",
                "PREFECT_WORKER_QUERY_SECONDS": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            if self.deadman:
                silent = {"LIVERY_DEADMAN_SILENT_S": f"{SILENT_S:g}", "LIVERY_DEADMAN_STALLED_S": f"{STALLED_S:g}"}
                self._environ |= silent
            # The reaper's ticks run in this process, with nothing but the environment, as everywhere.
            os.environ.update(self._environ)
            # One file for all ticks: the first of them ties the log to it for good.
            self._reaper_log = stack.enter_context(open(self.root / "reaper.log", "a", buffering=1))
            self.prefect = Prefect(f"chaos-{self.root.name}", self._environ, self.root / "logs")
            stack.callback(self.prefect.stop)
            self.store: Store = store_of(self._environ)
            seed(self._environ, ROOT / CACHE)
            self._recipes = {name: self._write_recipe(name) for name in ("counting", "hanging", "tiny-moe")}
            self._stranger = self._rent_stranger()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fly(self, case: Case) -> Outcome:
        """Fly the run, let its fault strike, let two ticks pass, and count."""
        began, outcome = time.monotonic(), new(case)
        self._old_boxes = {int(box["id"]) for box in self._state()["instances"]}
        self._old_flights = self._flights()
        with contextlib.ExitStack() as stack:
            try:
                prefect = self.prefect
                if case.kind.startswith("server."):
                    prefect = stack.enter_context(own_server(prefect, self.root / f"home-{case.name}"))
                flown = Flown(case, f"chaos-{case.name}", prefect)
                self._runs.append(flown.run)
                stack.callback(self._clear, flown)
                self._fly(case, flown, outcome)
            except Exception as error:  # noqa: BLE001 - protects the other runs of this lane; a run that cannot be judged counts against us
                outcome.error = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        outcome.seconds = time.monotonic() - began
        return outcome

    def audit(self) -> list[str]:
        """Manifests of all runs of this lane that are damaged now, and the stranger's box if anybody touched it."""
        wrong = [line for run in self._runs for line in bookkeeping.damaged(self.store, run)]
        stranger = next(box for box in self._state()["instances"] if box["id"] == self._stranger)
        return wrong + (["the stranger's box is gone"] if stranger["gone"] else [])

    # One run

    def _fly(self, case: Case, flown: Flown, outcome: Outcome) -> None:
        if case.is_market and case.at == draw.START:
            self.world.control.arm(case.fault)
        self._launch(flown)
        met = self._await_moment(flown)
        before = bookkeeping.newest_steps(self.store, flown.run)
        if met and not (case.is_market and case.at == draw.START):
            self._strike(flown)
        met = met and (not flown.missed or not case.fault.startswith("flow."))
        if self.deadman:
            outcome.struck = met
            outcome.boxes, outcome.left = self._alone(flown)
        else:
            outcome.state = self._await_end(flown, outcome)
            outcome.struck = met and (not case.is_market or self._fired(case))
            outcome.reaped, outcome.left = give_back(
                lambda: self._tick(outcome), self._left, between=lambda: time.sleep(1.0)
            )
            outcome.boxes = len(self._boxes())
        self._look(flown)
        self._measure(flown, before, outcome)

    def _launch(self, flown: Flown) -> None:
        case = flown.case
        recipe = "tiny-moe" if case.trains else "hanging" if case.fault == draw.HANGS else "counting"
        parameters: dict[str, Any] = {"recipe": self._recipes[recipe], "run_name": flown.run, "phases": ["cpt", "sft"]}
        if case.kind.startswith("bid.") or case.kind == "create.returns_on_demand_for_bid":
            parameters["interruptible"] = True
        match case.how:
            case "bare":
                flown.child = flown.prefect.by_hand(json.dumps(parameters))
            case "served":
                flown.flow_run_id = flown.prefect.served(parameters)
            case "worker":
                flown.flow_run_id = flown.prefect.by_worker(parameters)
            case "container":
                flown.flow_run_id, flown.child = flown.prefect.in_container(parameters)

    def _await_moment(self, flown: Flown) -> bool:
        """Whether the run came to the drawn moment and was still alive then."""
        end = time.monotonic() + MOMENT_S
        while flown.case.at != draw.START and not self._reached(flown):
            if self._over(flown):
                return False
            if time.monotonic() > end:
                raise TimeoutError(f"not at '{flown.case.at}' within {MOMENT_S:.0f} s: {self._said(flown)!r}")
            time.sleep(LOOK_S)
            self._look(flown)
        until = time.monotonic() + flown.case.delay_s
        while (left := until - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_S))
            self._look(flown)
        return not self._over(flown)

    def _reached(self, flown: Flown) -> bool:
        at, flight = flown.case.at, flown.flight
        if flight is None or not flight.attempts:
            return False
        if at == "create":
            return True
        if at == "boot":
            return bool(self._boxes())
        spans = [span for attempt in flight.attempts for span in attempt.spans]
        if at == "destroy":
            return flight.outcome != "running" or any(span.step == "export" and span.outcome == "ok" for span in spans)
        later = draw.MOMENTS[draw.MOMENTS.index(at) :]
        return any(span.step in later for span in spans)

    def _strike(self, flown: Flown) -> None:
        match flown.case.fault:
            case "flow.sigkill" | draw.ORPHANED | draw.HANGS:
                self._signal_flow(flown, signal.SIGKILL)
            case draw.FROZEN:
                self._signal_flow(flown, signal.SIGKILL)
                self._freeze_jobs()
            case "flow.sigterm" | "container.sigterm":
                self._signal_flow(flown, signal.SIGTERM)
            case "flow.sigterm_twice":
                self._signal_flow(flown, signal.SIGTERM)
                time.sleep(flown.case.delay_s % 0.7)
                self._signal_flow(flown, signal.SIGTERM)
            case "flow.sigint":
                self._signal_flow(flown, signal.SIGINT)
            case "api.cancel":
                flown.prefect.set_state(_id(flown), {"type": "CANCELLING"})
            case "api.suspend":
                details = {"pause_reschedule": True, "pause_timeout": "2100-01-01T00:00:00Z"}
                suspended = {"type": "PAUSED", "name": "Suspended", "state_details": details}
                flown.prefect.set_state(_id(flown), suspended)
            case "api.delete":
                flown.prefect.delete(_id(flown))
            case "serve.sigint":
                # A terminal's Ctrl-C reaches everybody in the group.
                os.killpg(flown.host.process.pid, signal.SIGINT)
            case "serve.sigterm" | "serve.sigkill" | "worker.sigterm" | "worker.sigkill":
                flown.host.process.send_signal(getattr(signal, flown.case.fault.partition(".")[2].upper()))
            case "machine.sigkill":
                flown.host.process.kill()
                self._signal_flow(flown, signal.SIGKILL)
            case "server.restart" | "server.gone":
                # A hard stop on odd draws, an orderly one on even ones.
                flown.prefect.stop_server(gently=int(flown.case.delay_s * 100) % 2 == 0)
                if flown.case.fault == "server.restart":
                    time.sleep(1 + flown.case.delay_s)
                    flown.prefect.start_server()
            case fault if flown.case.is_market:
                self.world.control.arm(fault)
                if self.deadman:
                    self._signal_flow(flown, signal.SIGKILL)
            case other:
                raise AssertionError(f"nobody knows how to strike with {other}")

    def _await_end(self, flown: Flown, outcome: Outcome) -> str:
        """Until no process of the run is left, or its lease is up for the reaper; how it ended."""
        end = time.monotonic() + END_S
        while True:
            self._look(flown)
            if self._over(flown):
                break
            if flown.case.fault == "server.gone" and not self._left() and bookkeeping.receipt(self.store, flown.run):
                return "waits for its server"  # Prefect's client does so for minutes; the boxes are gone and the bill is written
            if self._left() and self._lease_left(flown) < -1.0:
                if self._alive(flown):
                    outcome.remarks.append("the flow still lives, its lease has run out")
                break
            if time.monotonic() > end:
                outcome.remarks.append(f"the flow hung for {END_S:.0f} s and was killed: {self._said(flown)!r}")
                self._signal_flow(flown, signal.SIGKILL)
                break
            time.sleep(2 * LOOK_S)
        while self._left() and (left_s := self._lease_left(flown)) > 0:
            time.sleep(min(left_s, 0.5))
        if flown.child is not None and flown.child.process.poll() is not None:
            return f"exit {flown.child.process.returncode}"
        if flown.case.fault != "server.gone" and flown.flow_run_id is not None:
            return flown.prefect.state_of(flown.flow_run_id)
        return "unknown"

    def _alone(self, flown: Flown) -> tuple[int, int]:
        """Nobody but the boxes' own dead-men is left: how many boxes there were, and how many are still there after their time."""
        end = time.monotonic() + ALONE_S
        while self._left() and time.monotonic() < end:
            time.sleep(2 * LOOK_S)
            self._look(flown)
        return len(self._boxes()), len(self._left())

    def _tick(self, outcome: Outcome) -> None:
        """One sweep of the reaper as `python -m flows.reaper --once` makes it, in this process."""
        from tasks.reap import main as reaper

        log = self._reaper_log
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            print(f"{outcome.case}:")
            code = reaper(["--once"])
        if code:
            outcome.remarks.append(f"a tick of the reaper ended with {code}")

    def _measure(self, flown: Flown, before: dict[str, int], outcome: Outcome) -> None:
        boxes = self._boxes()
        outcome.usd = sum(float(box["usd"]["total"]) for box in boxes)
        receipt = bookkeeping.receipt(self.store, flown.run)
        if receipt is not None and receipt.wasted_usd is not None:
            outcome.wasted_usd = receipt.wasted_usd
        else:
            outcome.wasted_usd = outcome.usd
            if boxes and not self.deadman:
                outcome.remarks.append("no receipt" if receipt is None else "the receipt does not know what was wasted")
        recipe = yaml.safe_load(Path(self._recipes["tiny-moe" if flown.case.trains else "counting"]).read_text())
        saves = {str(phase["kind"]): int(phase["save_every_steps"]) for phase in recipe["phases"]}
        work = bookkeeping.work(flown.events, self.store, flown.run)
        outcome.lost_steps, outcome.beyond_interval = bookkeeping.lost(work, saves)
        after = bookkeeping.newest_steps(self.store, flown.run)
        outcome.manifests = len(bookkeeping.manifest_keys(self.store, flown.run))
        outcome.lost_manifests = [
            f"{phase}/{step} (now {after.get(phase)})" for phase, step in before.items() if after.get(phase, -1) < step
        ] + bookkeeping.damaged(self.store, flown.run)
        if not self.deadman and not outcome.left and (alarms := self.store.list("alarms/")):
            outcome.remarks.append(f"an alarm is left: {alarms[0].key}")

    def _clear(self, flown: Flown) -> None:
        """Nothing of this run may reach into the next one."""
        self._signal_flow(flown, signal.SIGKILL)
        for child in (flown.child, flown.prefect.worker):
            if child is not None:
                child.stop(0.1)
        flown.prefect.worker = None
        for row in self._state()["faults"]:
            self.world.control.disarm(row["name"])
        for instance_id in self._left():
            self._market("DELETE", f"instances/{instance_id}/", {})
        if flown.flow_run_id and flown.prefect is self.prefect:
            # Suspended, or to be tried again: it must not come back to life.
            flown.prefect.delete(flown.flow_run_id)
        # Machines that drew a fault are remembered for days; there are four of them.
        for prefix in ("hosts/", "alarms/"):
            for item in self.store.list(prefix):
                self.store.delete(item.key)

    # Looking

    def _look(self, flown: Flown) -> None:
        """Note what can be seen of the run only while it lives: its flight, and its boxes' events, by a link that outlives the box."""
        if self._alive(flown):
            flown.seen_at = time.monotonic()
        for box in self._boxes():
            if box["id"] not in flown.events and box["home"]:
                kept = self.root / "events" / flown.run / f"{_attempt(box):03d}-{box['id']}.jsonl"
                kept.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(OSError):
                    os.link(Path(box["home"]) / layout.BOX_EVENTS, kept)
                    flown.events[int(box["id"])] = kept
        with contextlib.suppress(StoreError):
            if flown.flow_run_id is None and (fresh := self._flights() - self._old_flights):
                flown.flow_run_id = fresh.pop().removeprefix("flights/").removesuffix(".json")
            if flown.flow_run_id is not None:
                flown.flight = read_flight(self.store, flown.flow_run_id) or flown.flight

    def _flights(self) -> set[str]:
        return {item.key for item in self.store.list("flights/")}

    def _alive(self, flown: Flown) -> bool:
        if flown.case.how == "bare":
            return flown.child is not None and flown.child.alive()
        now = time.monotonic()
        if now - flown.looked_at < LOOK_AT_PROCESSES_S:
            return flown.seen_at >= flown.looked_at
        flown.looked_at = now
        return bool(self._processes(flown))

    def _over(self, flown: Flown) -> bool:
        if flown.case.how == "bare":
            return not self._alive(flown)
        unlikely = flown.flight is not None or (flown.log is not None and not flown.log.alive())
        quiet_s = time.monotonic() - flown.seen_at
        return not self._alive(flown) and quiet_s > (QUIET_S if unlikely else UNSTARTED_S)

    def _processes(self, flown: Flown) -> list[psutil.Process]:
        """Every process of the run, whoever started it; a container's first one first."""
        own = [psutil.Process(flown.child.process.pid)] if flown.child is not None and flown.child.alive() else []
        return own if flown.case.how == "bare" else [*own, *processes_of(flown.flow_run_id)]

    def _signal_flow(self, flown: Flown, number: signal.Signals) -> None:
        processes = self._processes(flown)
        if flown.case.how == "container" and number is signal.SIGTERM:
            processes = processes[:1]  # the stop of a container reaches its first process alone
        flown.missed = not processes
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.send_signal(number)

    def _freeze_jobs(self) -> None:
        homes = {str(Path(box["home"]).parent) for box in self._boxes() if box["home"] and not box["gone"]}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARKER) in homes and "training." in " ".join(process.cmdline()):
                    process.suspend()

    def _state(self) -> dict[str, Any]:
        return self.world.control.state()

    def _boxes(self) -> list[dict[str, Any]]:
        """The boxes of the present run, those that are gone too."""
        return [box for box in self._state()["instances"] if box["id"] not in self._old_boxes]

    def _left(self) -> set[int]:
        return {int(box["id"]) for box in self._boxes() if not box["gone"]}

    def _fired(self, case: Case) -> bool:
        return any(row["fired"] for row in self._state()["faults"] if row["name"] == case.kind)

    def _lease_left(self, flown: Flown) -> float:
        """Seconds until nothing speaks for the run's boxes; below zero since when nothing does."""
        lease = read_lease(self.store, flown.flow_run_id) if flown.flow_run_id else None
        newest = max((float(box["created_at"]) for box in self._boxes()), default=0.0)
        return (lease.expires_at if lease else newest + LEASE_S + 0.5) - time.time()

    def _said(self, flown: Flown) -> str:
        return flown.log.tail(3)[-500:] if flown.log is not None else "nothing"

    # Before the first run

    def _write_recipe(self, name: str) -> str:
        recipe = yaml.safe_load(shipped()["tiny-moe" if name == "tiny-moe" else "counting"].read_text())
        recipe["box"] |= {"boot_s": 20}
        recipe["budget"] |= {"silent_s": 40, "stall_s": 15, "max_usd": 100.0}
        recipe["phases"] = recipe["phases"][:2]
        if name == "tiny-moe":
            recipe.pop("evaluation")
            saves = {"steps": 12, "save_every_steps": 4}
        else:
            # An upload takes a second or two on a busy machine: a save interval is longer here, as it is in earnest.
            saves = {"steps": 20, "save_every_steps": 10}
            recipe["step_seconds"] = 3600.0 if name == "hanging" else 0.3
        recipe["phases"] = [phase | saves for phase in recipe["phases"]]
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(recipe))
        return str(path)

    def _rent_stranger(self) -> int:
        label, offer = _STRANGER
        body = {"image": "somebody/else", "disk": 10, "label": label, "runtype": "ssh"}
        return int(self._market("PUT", f"asks/{offer}/", body)["new_contract"])

    def _market(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        key = {"Authorization": f"Bearer {self._environ['LIVERY_MARKET_API_KEY']}"}
        url = f"{self._environ['LIVERY_MARKET_URL']}/api/v0/{path}"
        answer = httpx.request(method, url, json=body, headers=key, timeout=30)
        answer.raise_for_status()
        return dict(answer.json())


def serve_cases(root: Path, *, deadman: bool) -> None:
    """A lane's process: `SEED NUMBER` a line on stdin, an outcome a line on stdout, at the end what is wrong."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever else is printed here is no answer.
    os.dup2(2, 1)
    with Lane(root, dict(os.environ), deadman=deadman) as lane:
        print(json.dumps({"ready": True}), file=answers)
        for line in sys.stdin:
            seed_number, number = (int(word) for word in line.split())
            case = (draw.draw_deadman if deadman else draw.draw)(seed_number, number)
            print(json.dumps(lane.fly(case).as_json()), file=answers)
        print(json.dumps({"wrong": lane.audit()}), file=answers)


def _attempt(box: dict[str, Any]) -> int:
    label = Label.parse(box["label"])
    return label.attempt if label else 0


def _id(flown: Flown) -> str:
    assert flown.flow_run_id is not None, "the run is not known by its id yet"
    return flown.flow_run_id
