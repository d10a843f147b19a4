"""The flow's own record of what it did on which box and when, kept in the bucket after each change.

Whoever finds it, the flow itself, a hook, the reaper, can write the receipt from it and the market's charges.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tasks.domain import Attempt, Flight, Instance, Intent, Offer, Span
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

    def know_boxes(self, intents: Iterable[Intent]) -> None:
        """Ids of boxes that failed before they ran are known by their intents only."""
        self._attempts(with_boxes_of(self.flight, intents).attempts)

    def attempt_done(self) -> None:
        """The box has done all that was left."""
        self._last(ended="done")

    def attempt_failed(self, reason: str, durable_at: float | None) -> None:
        """The box is given back; what it did after its last durable manifest, or all without one, is wasted. Once an attempt."""
        if self.flight.attempts and not self.flight.attempts[-1].ended:
            failed = _failed(self.flight.attempts[-1], reason, durable_at, self._clock())
            self._attempts((*self.flight.attempts[:-1], failed))

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


def with_boxes_of(flight: Flight, intents: Iterable[Intent]) -> Flight:
    """The flight with every box that its intents know of: a process that dies while a box boots has not put it on record yet."""
    known = {intent.attempt: intent for intent in intents}
    attempts = []
    for attempt in flight.attempts:
        intent = known.get(attempt.attempt)
        if intent is not None and intent.label == attempt.label:
            instance_id = attempt.instance_id if attempt.instance_id is not None else intent.instance_id
            attempt = attempt.model_copy(update={"instance_id": instance_id, "also_ids": intent.also_ids})
        attempts.append(attempt)
    return flight.model_copy(update={"attempts": tuple(attempts)})


def last_sign(flight: Flight) -> float:
    """When the flow last wrote that a step began or ended."""
    spans = flight.attempts[-1].spans if flight.attempts else ()
    return max(
        (moment for span in spans for moment in (span.started_at, span.ended_at) if moment), default=flight.started_at
    )


def closed_for_the_dead(flight: Flight, store: Store, reason: str, now: float) -> Flight:
    """The flight of a process that ended without a word. Its last attempt is judged by the bucket: what no manifest holds is wasted."""
    last = flight.attempts[-1] if flight.attempts else None
    if last is None or last.ended:
        return flight
    began = last.spans[0].started_at if last.spans else now
    written = [item.modified for item in store.list(f"{layout.run(flight.run)}/manifests/")]
    durable_at = max((moment for moment in written if began <= moment <= now), default=None)
    return flight.model_copy(update={"attempts": (*flight.attempts[:-1], _failed(last, reason, durable_at, now))})


def _failed(attempt: Attempt, reason: str, durable_at: float | None, now: float) -> Attempt:
    spans = []
    for span in attempt.spans:
        end = span.ended_at if span.ended_at is not None else now
        lost = 0.0 if durable_at is None else max(0.0, end - max(durable_at, span.started_at))
        outcome = "interrupted" if span.outcome == "running" else span.outcome
        spans.append(span.model_copy(update={"ended_at": end, "outcome": outcome, "wasted_s": round(lost, 3)}))
    return attempt.model_copy(update={"ended": reason, "wasted": durable_at is None, "spans": tuple(spans)})


def spent_usd(flight: Flight, now: float) -> float:
    total = 0.0
    for attempt in flight.attempts:
        if attempt.spans and attempt.instance_id is not None:
            last = attempt.spans[-1].ended_at if attempt.ended else now
            total += attempt.dph_usd * max(0.0, (last or now) - attempt.spans[0].started_at) / 3600
    return total
