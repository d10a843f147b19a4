"""A small world on one virtual clock: flows that rent and die, a reaper that comes by the clock, a market and a bucket with faults.

Real code rents, destroys and reaps; real are the market's forms and bills (without sockets) and the bucket (a folder). Whoever sleeps
lets the others act, so the reaper looks in while a flow waits for its box.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from deployments.rehearsal.api import Request, query_of
from tasks.destroy import destroy_run
from tasks.domain import Destruction, Label, Lease, Offer
from tasks.errors import BoxError, LiveryError, OfferGone, Rejected
from tasks.lease import write_lease
from tasks.market.vast import VastMarket
from tasks.reap import sweep
from tasks.rent import RentRequest, rent
from tests.tasks.pretend import PUBLIC_KEY, Clock, Pretend, rehearsal_recipe
from training.box.folder import FolderStore
from training.box.store import StoreUnreachable

RENEW_S, REAPER_S = 60.0, 300.0
LEASE_S = 900.0
HOURS = 6.0
# A lease, a sweep that just missed its end, four sweeps that faults spoiled, the destroying, and a bucket that is away for ten minutes.
OWNERLESS_S = LEASE_S + 6 * REAPER_S + 300.0 + 600.0
ATTEMPTS = 3


class Crashed(BaseException):
    """The process of a flow is gone between two of its instructions: nothing of its clean-up runs."""


@dataclasses.dataclass
class Flow:
    id: str
    attempt: int = 0
    at_work: bool = True
    awake: bool = True
    box: int | None = None
    renewed_at: float = float("-inf")

    @property
    def lives(self) -> bool:
        return self.at_work and self.awake


class World:
    def __init__(self, folder: Path) -> None:
        self.clock = _Clock(self)
        self.pretend = Pretend(self.clock)
        self.pretend.url = "http://127.0.0.1:1"
        self.bucket = _Bucket(folder / "bucket", self)
        self.settings = self.pretend.settings(folder, market_pace=0.1, lease_s=int(LEASE_S), max_dph_usd=5, poll_s=5)
        self.market = self._client(folder, self.pretend.market.account_key)
        self.reapers_market = self._client(folder, self.pretend.market.reaper_key)
        self.flows: list[Flow] = []
        self.actor: Flow | None = None
        self.crash_in: int | None = None
        self.skew_s = 0.0
        self.reaper_at = self.clock.now + REAPER_S
        self.reaping = False
        self.creates: Counter[str] = Counter()
        self.alone_since: dict[int, float] = {}
        self.broken: list[str] = []

    @property
    def living(self) -> list[Flow]:
        return [flow for flow in self.flows if flow.lives]

    # What the flows do

    def begin(self) -> Flow:
        flow = Flow(str(uuid.UUID(int=len(self.flows) + 1, version=4)))
        self.flows.append(flow)
        self.renew(flow)
        return flow

    def rent(self, flow: Flow) -> None:
        """Offer after offer, as the flow does it: what fails is given back before the next is tried."""
        while flow.attempt < ATTEMPTS and flow.lives and flow.box is None:
            flow.attempt += 1
            try:
                box = rent(
                    self.market,
                    self.bucket,
                    self._request(flow),
                    self.settings,
                    clock=self.clock,
                    sleep=self.clock.sleep,
                    destroy_s=120,
                )
            except (BoxError, OfferGone, Rejected):
                if not self.give_back(flow).clean:
                    self.end(flow)
            except (LiveryError, StoreUnreachable):
                self.end(flow)
            else:
                flow.box = box.id
                alike = [one.id for one in self.pretend.market.alive() if one.label == self._label(flow)]
                self.must(alike == [box.id] or flow.box not in alike, f"rented, and alive with its label are {alike}")

    def end(self, flow: Flow) -> None:
        """The last act: everything of this flow is destroyed, and the process is over however that went."""
        try:
            self.give_back(flow)
        finally:
            flow.at_work = False

    def give_back(self, flow: Flow) -> Destruction:
        flow.box = None
        result = destroy_run(
            self.market,
            flow.id,
            deadline_s=120,
            clock=self.clock,
            sleep=self.clock.sleep,
            store=self.bucket,
            poll_s=5,
        )
        if result.clean:
            left = [one.id for one in self.pretend.market.alive() if _flow_of(one.label) == flow.id]
            # Whom the market hides from everybody may be overlooked, if nobody knows his number; the reaper takes him when he shows.
            left = [box for box in left if box in result.gone or not self._hidden(box)]
            self.must(not left, f"said to be gone, and there: {left}")
        return result

    @contextlib.contextmanager
    def acting(self, flow: Flow, crash_in: int | None) -> Iterator[None]:
        """In here the calls to market and bucket are the flow's; at the call of that number its process dies."""
        self.actor, self.crash_in = flow, crash_in
        try:
            yield
        except Crashed:
            flow.at_work = False
        finally:
            self.actor = self.crash_in = None

    def count_call(self) -> None:
        """One step of the flow that is acting; what others do meanwhile does not count, nor does a reader thread."""
        if self.actor is None or self.reaping or self.crash_in is None:
            return
        if threading.current_thread() is threading.main_thread():
            self.crash_in -= 1
            if self.crash_in < 0:
                raise Crashed

    # What time does

    def pass_time(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while True:
            due = [flow.renewed_at + RENEW_S for flow in self.living]
            due += [] if self.reaping else [self.reaper_at]
            self.clock.now = max(self.clock.now, min([*due, end]))
            for flow in self.living:
                if self.clock.now >= flow.renewed_at + RENEW_S:
                    self.renew(flow)
            if not self.reaping and self.clock.now >= self.reaper_at:
                self.reap()
            self.look()
            if self.clock.now >= end:
                return

    def renew(self, flow: Flow) -> None:
        flow.renewed_at = self.clock.now
        now = self.clock.now
        with contextlib.suppress(StoreUnreachable), self._somebody_else():
            write_lease(self.bucket, Lease(flow_run_id=flow.id, run="r", renewed_at=now, expires_at=now + LEASE_S))

    def reap(self) -> None:
        """One sweep by a clock that may be wrong. It must never take the box of a flow that lives and could say so."""
        self.reaper_at = self.clock.now + REAPER_S
        owned = {one.id for one in self.pretend.market.alive() if self._answered_for(one.id, one.label)}
        with self._somebody_else(), contextlib.suppress(LiveryError):
            result = sweep(
                self.reapers_market,
                self.bucket,
                self.settings,
                clock=lambda: self.clock.now + self.skew_s,
                sleep=self.clock.sleep,
                settle=lambda flow_run_id, by: None,
            )
            taken = {row.instance_id for row in result.rows if row.outcome == "destroyed"}
            self.must(not taken & owned, f"the reaper took {taken & owned}, whose flow is at work")

    def look(self) -> None:
        """No box without an owner, a live lease or a flow at work, for longer than the policy allows; none made twice."""
        now = self.clock.now
        alone = {one.id for one in self.pretend.market.alive() if not self._owned(one.id, one.label)}
        self.alone_since = {box: self.alone_since.get(box, now) for box in alone}
        for box, since in self.alone_since.items():
            self.must(now - since <= OWNERLESS_S, f"box {box} has had no owner for {now - since:.0f} s")

    def come_to_rest(self) -> None:
        """All processes are gone and all faults over: the reaper alone must bring the bill to zero."""
        for flow in self.flows:
            flow.at_work = False
        self.pretend.market.faults.armed.clear()
        self.bucket.away_until, self.skew_s = float("-inf"), 0.0
        self.pass_time(OWNERLESS_S)
        self.pretend.market.settle()
        rate = sum(one.billed_now_usd_h for one in self.pretend.market.contracts.values())
        self.must(rate == 0 and not self.pretend.market.alive(), f"${rate:.2f}/h are billed when all is over")
        self.must(not self.bucket.list("alarms/"), "an alarm outlived its box")

    def must(self, good: bool, what: str) -> None:
        """Noted here and raised by `check`: an AssertionError inside a task's own error handling would be taken for its trouble."""
        if not good:
            self.broken.append(what)

    def check(self) -> None:
        assert not self.broken, self.broken[0]

    def _request(self, flow: Flow) -> RentRequest:
        wanted = rehearsal_recipe()
        free = [ask for ask in self.pretend.market.offers.values() if ask.gpu_ram_mb == 8000]
        ask = free[(len(self.flows) + flow.attempt) % len(free)]
        row = ask.row(now=self.clock.now, allocated_gb=wanted.box.disk_gb, rented=False, bid=False)
        offer = Offer(
            id=ask.id,
            machine_id=ask.machine_id,
            gpu_name=ask.gpu_name,
            num_gpus=1,
            gpu_ram_mb=8000,
            disk_space_gb=ask.disk_gb,
            dph_total_usd=row["dph_total"],
        )
        return RentRequest(
            recipe=wanted,
            run="r",
            flow_run_id=flow.id,
            attempt=flow.attempt,
            offer=offer,
            public_key=PUBLIC_KEY,
            onstart="true",
            hard_end=int(self.clock.now + HOURS * 3600),
            hours=1,
        )

    def _label(self, flow: Flow) -> str | None:
        made = [one.label for one in self.pretend.market.contracts.values() if _flow_of(one.label) == flow.id]
        return made[-1] if made else None

    def _flow(self, label: str | None) -> Flow | None:
        return next((flow for flow in self.flows if flow.id == _flow_of(label)), None)

    def _owned(self, box: int, label: str | None) -> bool:
        """A flow at work answers for the box that it works on, or for whatever there is while it has none; a dead one's lease for all."""
        flow = self._flow(label)
        if flow is None:
            return False
        return flow.box in (None, box) if flow.lives else self._lease_s(flow) > 0

    def _answered_for(self, box: int, label: str | None) -> bool:
        """The box that a flow works on, under a live lease that a clock wrong by ten minutes must respect, on a box before its hard end."""
        flow, parsed = self._flow(label), Label.parse(label)
        now = self.clock.now + abs(self.skew_s)
        assert parsed is not None
        at_work = flow is not None and flow.lives and flow.box == box and self._lease_s(flow) > abs(self.skew_s)
        # These flows never look at their box again; one that is down for long is the reaper's.
        up = self.pretend.market.contracts[box].status not in {"stopped", "offline", "exited"}
        return at_work and up and now < parsed.hard_end

    def _hidden(self, box: int) -> bool:
        contract = self.pretend.market.contracts[box]
        return self.clock.now < contract.created_at + float(contract.effects.get("list.lag", 0.0))

    def _lease_s(self, flow: Flow) -> float:
        path = self.bucket.root / "leases" / f"{flow.id}.json"
        return json.loads(path.read_text())["expires_at"] - self.clock.now if path.exists() else 0.0

    @contextlib.contextmanager
    def _somebody_else(self) -> Iterator[None]:
        before, self.reaping = self.reaping, True
        try:
            yield
        finally:
            self.reaping = before

    def _client(self, folder: Path, key: str) -> VastMarket:
        given = {"pace": 0.01, "transport": _Wire(self), "clock": self.clock, "sleep": self.clock.sleep}
        return self.pretend.client(folder, key=key, **given)


class _Clock(Clock):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def sleep(self, seconds: float) -> None:
        self._world.pass_time(seconds)


class _Bucket(FolderStore):
    """Away for a while when it is told so."""

    def __init__(self, root: Path, world: World) -> None:
        super().__init__(root)
        self.world, self.away_until = world, float("-inf")

    def get_bytes(self, key: str) -> bytes | None:
        self._answer()
        return super().get_bytes(key)

    def put_bytes(self, key: str, data: bytes, **options: Any) -> None:
        self._answer()
        super().put_bytes(key, data, **options)

    def list(self, prefix: str) -> Any:
        self._answer()
        return super().list(prefix)

    def delete(self, key: str) -> None:
        self._answer()
        super().delete(key)

    def _answer(self) -> None:
        self.world.count_call()
        if self.world.clock.now < self.away_until:
            raise StoreUnreachable("the bucket is away")


class _Wire(httpx.BaseTransport):
    """From the client straight to the pretend market. The process may die before a call is sent or before its reply is read."""

    def __init__(self, world: World) -> None:
        self.world = world

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        world, body = self.world, request.read()
        world.count_call()
        if request.method == "PUT" and "/asks/" in request.url.path:
            self._note_create(json.loads(body))
        bearer = request.headers["authorization"].removeprefix("Bearer ")
        reply = world.pretend.api.handle(
            Request(request.method, request.url.path, query_of(request.url.query), body, bearer)
        )
        world.count_call()
        if reply.hold_s:
            world.pass_time(reply.hold_s)
        if reply.drop:
            raise httpx.RemoteProtocolError("dropped", request=request)
        text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
        return httpx.Response(reply.status, headers=dict(reply.headers), text=text, request=request)

    def _note_create(self, body: dict[str, Any]) -> None:
        label = Label.parse(body["label"])
        assert label is not None
        self.world.creates[label.text] += 1
        self.world.must(self.world.creates[label.text] == 1, f"{label.text} was asked for twice")
        intent = self.world.bucket.root / f"intents/{label.flow_run_id}/{label.attempt:03d}.json"
        self.world.must(intent.exists(), f"{label.text} was asked for before its intent was written")


def _flow_of(label: str | None) -> str | None:
    parsed = Label.parse(label)
    return parsed.flow_run_id if parsed else None
