"""Transfers as a table on the run's page, brought up to date in place while they run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from uuid import UUID

from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.context import FlowRunContext, TaskRunContext

from tasks.artifacts import shown
from tasks.phase import duration
from training.contract.events import Transfer
from training.contract.recipe import Budget

KEY = "transfers"
CAPTION = "Bytes that the other side has acknowledged. Projected: seconds in all at this rate; past the budget for a while, it is decided what to do"


@dataclass
class _Row:
    began: float
    seen_at: float
    event: Transfer
    box: int


class TransferTable:
    """One row a transfer. Each update is a request, so at most one in `every_s`, and one when something is done.

    In place: artifacts made anew would be a hundred versions of one table, and a page that is open would stay at the first.
    """

    def __init__(self, budget: Budget, every_s: float = 5.0, clock: Callable[[], float] = time.time) -> None:
        self._budget, self._every_s, self._clock = budget, every_s, clock
        self._rows: dict[tuple[int, str], _Row] = {}
        self._decisions: list[str] = []
        self._shown_at: float | None = None
        self._id: UUID | None = None

    def saw(self, box: int, events: Iterable[Transfer]) -> None:
        """The newest word of each transfer of a box."""
        now, due = self._clock(), False
        for event in events:
            row = self._rows.get((box, event.what))
            if row is None:
                row = self._rows[box, event.what] = _Row(now, now, event, box)
                due = True
            elif event.seq > row.event.seq:
                due = due or (event.finished and not row.event.finished)
                row.event, row.seen_at = event, now
            else:
                continue
            due = due or self._shown_at is None or now - self._shown_at >= self._every_s
        if due:
            self._show(now)

    def decided(self, sentence: str) -> None:
        self._decisions.append(sentence)
        self._show(self._clock())

    def rows(self) -> list[dict[str, object]]:
        return [self._cells(row) for row in self._rows.values()]

    def _cells(self, row: _Row) -> dict[str, object]:
        event, taken_s = row.event, row.seen_at - row.began
        left_s = 0.0 if event.finished else event.eta_s
        budget_s = self._budget.prefetch_s if event.direction == "down" else self._budget.upload_s
        return {
            "box": row.box,
            "what": event.what,
            "way": event.direction,
            "done": f"{_size(event.done_bytes)} of {_size(event.total_bytes)}",
            "%": f"{100 * event.done_bytes / max(1, event.total_bytes):.0f}",
            # What was over at once has no rate.
            "Mbps": f"{event.mbps:.2f}" if event.mbps else "",
            "left": "done" if event.finished else "not known" if left_s is None else duration(left_s),
            "projected s": "" if left_s is None else f"{taken_s + left_s:.0f}",
            "budget s": budget_s,
        }

    def _show(self, now: float) -> None:
        self._shown_at = now
        said = "  \n".join([CAPTION, *self._decisions])
        rows = self.rows()
        # Without a run there is no page, and asking for one would start a server.
        if rows and (TaskRunContext.get() or FlowRunContext.get()):
            shown(lambda: self._send(rows, said))

    def _send(self, rows: list[dict[str, object]], said: str) -> None:
        if self._id is None:
            created = create_table_artifact(table=rows, key=KEY, description=said)
            self._id = created if isinstance(created, UUID) else None
        else:
            with get_client(sync_client=True) as client:
                client.update_artifact(self._id, ArtifactUpdate(data=json.dumps(rows), description=said))


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count / 1e3:.1f} kB"
