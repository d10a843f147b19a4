"""A reaper over the pretend market and a bucket, on the tests' clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.domain import Alarm, Intent, Label, Lease
from tasks.lease import write_lease
from tasks.market.vast import VastMarket
from tasks.reap import Sweep, sweep
from tests.tasks.pretend import FLOW_RUN, OTHER_RUN, Clock, Pretend
from training.box.store import Store
from training.contract import layout

HOUR = 3600


class Reaper:
    def __init__(self, market: VastMarket, store: Store, pretend: Pretend, clock: Clock, tmp_path: Path) -> None:
        self.market, self.store, self.pretend, self.clock, self.tmp_path = market, store, pretend, clock, tmp_path
        self.settled: list[str] = []

    def sweep(
        self, *, dry_run: bool = False, only_run: str | None = None, store: Store | None = None, **changes: Any
    ) -> Sweep:
        return sweep(
            self.market,
            store or self.store,
            self.pretend.settings(self.tmp_path, **changes),
            dry_run=dry_run,
            only_run=only_run,
            clock=self.clock,
            sleep=self.clock.sleep,
            settle=lambda flow_run_id, by: self.settled.append(flow_run_id),
        )

    def lease(self, flow_run_id: str = FLOW_RUN, *, expires_in: float = 900, **changes: Any) -> None:
        now = self.clock.now
        lease = Lease(flow_run_id=flow_run_id, run="r", renewed_at=now, expires_at=now + expires_in, **changes)
        write_lease(self.store, lease)

    def rented(
        self, flow_run_id: str = FLOW_RUN, *, attempt: int = 1, hours: float = 8, offer: int = 0, **changes: Any
    ) -> int:
        """A box with its intent, as every box of ours has one; keyword arguments replace fields of the intent."""
        box = self.pretend.rented(flow_run_id, attempt=attempt, hours=hours, offer=offer)
        made = self.pretend.market.contracts[box]
        self.intent(
            flow_run_id, attempt, label=made.label, machine_id=made.offer.machine_id, **{"instance_id": box, **changes}
        )
        return box

    def intent(self, flow_run_id: str = FLOW_RUN, attempt: int = 1, **changes: Any) -> Intent:
        label = Label(flow_run_id=flow_run_id, attempt=attempt, hard_end=int(self.clock.now + 8 * HOUR)).text
        values: dict[str, Any] = {
            "flow_run_id": flow_run_id,
            "run": "r",
            "attempt": attempt,
            "label": label,
            "account_id": str(self.pretend.market.user_id),
            "offer_id": 1,
            "machine_id": 1,
            "dph_usd": 1.0,
            "disk_gb": 100,
            "written_at": self.clock.now,
            "state": "created",
        }
        intent = Intent(**{**values, **changes})
        self.store.put_bytes(layout.intent(flow_run_id, attempt), intent.model_dump_json().encode())
        return intent

    def up_then(self, status: str) -> int:
        """A box that has booted, and is in this state now."""
        box = self.rented()
        self.clock.now += 60
        self.pretend.market.settle()
        self.pretend.market.contracts[box].status = status
        return box

    def nameless(self) -> int:
        """A box that nobody labelled."""
        box = self.pretend.rented(OTHER_RUN)
        self.pretend.market.contracts[box].label = None
        return box

    def alarm(self, subject: str) -> Alarm | None:
        data = self.store.get_bytes(layout.alarm(subject))
        return Alarm.model_validate_json(data) if data else None

    @property
    def alive(self) -> set[int]:
        return {box.id for box in self.pretend.market.alive()}
