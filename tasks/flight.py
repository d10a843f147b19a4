"""The flow's own record of what it did on which box and when, kept in the bucket after each change.

Whoever finds it, the flow itself, a hook, the reaper, can write the receipt from it and the market's charges.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tasks.domain import Attempt, Flight, Instance, Intent, Offer, Plan, Span
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
                    after_loss=loss_before(self.flight),
                ),
            )
        )

    def rented(self, instance: Instance) -> None:
        self._last(instance_id=instance.id, dph_usd=instance.dph_total_usd or self.flight.attempts[-1].dph_usd)

    def repriced(self, dph_usd: float) -> None:
        """The market asks another price for the present box from now on."""
        self._last(repriced=(*self.flight.attempts[-1].repriced, (self._clock(), dph_usd)))

    def decided(self, sentence: str) -> None:
        """Something that costs money was decided about the present box."""
        self._last(decisions=(*self.flight.attempts[-1].decisions, sentence))

    def know_boxes(self, intents: Iterable[Intent]) -> None:
        """Ids of boxes that failed before they ran are known by their intents only."""
        self._attempts(with_boxes_of(self.flight, intents).attempts)

    def attempt_done(self) -> None:
        """The box has done all that was left."""
        self._last(ended="done")

    def attempt_failed(self, reason: str, durable_at: float | None, kept_at: float | None = None) -> None:
        """The box is given back; what it did after its last durable manifest, or all without one, is wasted. Once an attempt.

        `kept_at`: up to when that manifest holds the training, if that is known; steps after it are done again, though they ran
        while it was uploaded.
        """
        if self.flight.attempts and not self.flight.attempts[-1].ended:
            failed = _failed(self.flight.attempts[-1], reason, durable_at, self._clock(), kept_at)
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


UNTIL_GONE = "until gone"
# A box is asked to go, and two listings must not show it any more.
_GOING_S = 60.0


def with_time_until_gone(flight: Flight, intents: Iterable[Intent]) -> Flight:
    """The flight with the time that a box was there, and billed, after its last step: held for debugging, or not proved gone at once."""
    gone_at = {intent.attempt: intent.closed_at for intent in intents if intent.state == "destroyed"}
    attempts = []
    for attempt in flight.attempts:
        left_at = attempt.spans[-1].ended_at if attempt.ended and attempt.spans else None
        until = gone_at.get(attempt.attempt)
        if left_at is not None and until is not None and until > left_at + _GOING_S:
            why = f"its box was still there after: {attempt.ended}"
            after = Span(step=UNTIL_GONE, started_at=left_at, ended_at=until, outcome="ok", reason=why)
            attempt = attempt.model_copy(update={"spans": (*attempt.spans, after)})
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


def _failed(
    attempt: Attempt, reason: str, durable_at: float | None, now: float, kept_at: float | None = None
) -> Attempt:
    spans = []
    for span in attempt.spans:
        end = span.ended_at if span.ended_at is not None else now
        good_until = kept_at if kept_at is not None and span.step.startswith("phase ") else durable_at
        lost = 0.0 if durable_at is None or good_until is None else max(0.0, end - max(good_until, span.started_at))
        outcome = "interrupted" if span.outcome == "running" else span.outcome
        spans.append(span.model_copy(update={"ended_at": end, "outcome": outcome, "wasted_s": round(lost, 3)}))
    return attempt.model_copy(update={"ended": reason, "wasted": durable_at is None, "spans": tuple(spans)})


def planned_by_step(plan: Plan) -> dict[str, float]:
    """The plan's dollars: each phase's hours at the best offer's price, and the rest."""
    if not plan.offers or plan.run_usd is None:
        return {}
    dph_usd = plan.offers[0].offer.dph_total_usd
    phases = {f"phase {name}": round(hours * dph_usd, 6) for name, hours in plan.phase_hours.items()}
    return {**phases, "set-up and bytes": round(plan.run_usd - sum(phases.values()), 6)}


def loss_before(flight: Flight) -> str:
    """Why the last box that made something durable ended without being done; empty if none did. A box that made nothing is wasted as a whole,
    so the next one's way to its first step is the one that had to be paid."""
    lost = [attempt for attempt in flight.attempts if attempt.ended not in ("", "done") and not attempt.wasted]
    return lost[-1].ended if lost else ""


def price_now(attempt: Attempt) -> float:
    """$/h of an attempt's box at its latest known price."""
    return attempt.repriced[-1][1] if attempt.repriced else attempt.dph_usd


def spent_usd(flight: Flight, now: float) -> float:
    total = 0.0
    for attempt in flight.attempts:
        if attempt.spans and attempt.instance_id is not None:
            last = attempt.spans[-1].ended_at if attempt.ended else now
            total += _at_its_prices(attempt, attempt.spans[0].started_at, last or now)
    return total


def _at_its_prices(attempt: Attempt, began: float, ended: float) -> float:
    prices = ((began, attempt.dph_usd), *attempt.repriced)
    ends = (*(since for since, _ in prices[1:]), ended)
    return sum(
        dph_usd * max(0.0, min(end, ended) - max(since, began)) / 3600
        for (since, dph_usd), end in zip(prices, ends, strict=True)
    )
