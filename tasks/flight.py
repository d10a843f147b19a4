"""The flow's own record of what it did on which box and when, kept in the bucket after each change.

Whoever finds it, the flow itself, a hook, the reaper, can write the receipt from it and the market's charges.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.domain import Attempt, Flight, Instance, Offer, Span
from training.box.store import Store, StoreError
from training.contract import layout

log = logging.getLogger(__name__)


class FlightRecorder:
    """Keeps one `Flight` and writes it after each change. A bucket that cannot be written is said, and does not stop a run that works."""

    def __init__(self, store: Store, flight: Flight, clock: Callable[[], float] = time.time) -> None:
        self.flight = flight
        self._store = store
        self._clock = clock
        self._save()

    def begin_attempt(self, attempt: int, label: str, offer: Offer) -> None:
        self._attempts(
            (
                *self.flight.attempts,
                Attempt(
                    attempt=attempt,
                    label=label,
                    machine_id=offer.machine_id,
                    offer_id=offer.id,
                    dph_usd=offer.dph_total_usd,
                ),
            )
        )

    def rented(self, instance: Instance) -> None:
        self._last(instance_id=instance.id, dph_usd=instance.dph_total_usd or self.flight.attempts[-1].dph_usd)

    def known(self, instance_id: int) -> None:
        """The box's id became known after the attempt failed."""
        self._last(instance_id=instance_id)

    def end_attempt(self, reason: str, *, wasted: bool) -> None:
        if self.flight.attempts and not self.flight.attempts[-1].ended:
            self._last(ended=reason, wasted=wasted)

    def end(self, outcome: str) -> None:
        self.flight = self.flight.model_copy(update={"ended_at": self._clock(), "outcome": outcome})
        self._save()

    @contextmanager
    def span(self, step: str) -> Iterator[None]:
        """Time one step of the present attempt; a failure keeps its sentence."""
        self._last(spans=(*self.flight.attempts[-1].spans, Span(step=step, started_at=self._clock())))
        try:
            yield
        except Exception as error:
            self._close_span("failed", str(error).splitlines()[0] if str(error) else type(error).__name__)
            raise
        except BaseException as error:  # a signal or Prefect's Pause: not the step's fault
            self._close_span("interrupted", type(error).__name__)
            raise
        else:
            self._close_span("ok", "")

    def wasted_since(self, moment: float | None) -> None:
        """Note on the last span how much of it has to be done again on another box."""
        spans = self.flight.attempts[-1].spans if self.flight.attempts else ()
        if spans:
            last = spans[-1]
            end = last.ended_at or self._clock()
            lost = max(0.0, end - max(moment or last.started_at, last.started_at))
            self._last(spans=(*spans[:-1], last.model_copy(update={"wasted_s": round(lost, 3)})))

    def spent_usd(self) -> float:
        """An estimate from time and $/h, for budgets; the bill itself comes from the market."""
        return spent_usd(self.flight, self._clock())

    def _close_span(self, outcome: str, reason: str) -> None:
        spans = self.flight.attempts[-1].spans
        closed = spans[-1].model_copy(update={"ended_at": self._clock(), "outcome": outcome, "reason": reason[:300]})
        self._last(spans=(*spans[:-1], closed))

    def _last(self, **changes: object) -> None:
        self._attempts((*self.flight.attempts[:-1], self.flight.attempts[-1].model_copy(update=changes)))

    def _attempts(self, attempts: tuple[Attempt, ...]) -> None:
        self.flight = self.flight.model_copy(update={"attempts": attempts})
        self._save()

    def _save(self) -> None:
        try:
            self._store.put_bytes(
                layout.flight(self.flight.flow_run_id), self.flight.model_dump_json(indent=1).encode()
            )
        except StoreError as error:
            log.warning("flight record not written to the bucket: %s", error)


def read_flight(store: Store, flow_run_id: str) -> Flight | None:
    """The flight record, None if that run never wrote one."""
    data = store.get_bytes(layout.flight(flow_run_id))
    return Flight.model_validate_json(data) if data is not None else None


def spent_usd(flight: Flight, now: float) -> float:
    total = 0.0
    for attempt in flight.attempts:
        if attempt.spans and attempt.instance_id is not None:
            last = attempt.spans[-1].ended_at if attempt.ended else now
            total += attempt.dph_usd * max(0.0, (last or now) - attempt.spans[0].started_at) / 3600
    return total
