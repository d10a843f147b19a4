"""One run as the flow holds it: what was wanted, what is done, what was tried. Plain state; the steps act on it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from tasks.artifacts import Progress
from tasks.domain import Box, Destruction, Endpoint, Flight, Plan, RankedOffer
from tasks.errors import AttemptsExhausted, BudgetReached, NoOffers
from tasks.flight import FlightRecorder
from tasks.market.protocol import Market
from tasks.phase import RunView, Watcher
from tasks.progress import newest_manifests
from tasks.remote.ssh import Remote
from tasks.settings import Settings
from training.box.store import Store
from training.contract.manifest import Manifest
from training.contract.recipe import Recipe

log = logging.getLogger(__name__)
# The hard end in the label lies this much behind the planned end, so that a destroy in time never races the reaper.
HARD_END_MARGIN_S = 900


class Run:
    """Everything the steps share. Not a pydantic model: Prefect would copy it at each task call."""

    def __init__(
        self,
        recipe: Recipe,
        digests: dict[str, str],
        flow_run_id: str,
        market: Market,
        store: Store,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.recipe, self.digests, self.flow_run_id = recipe, digests, flow_run_id
        self.market, self.store, self.settings, self.clock = market, store, settings, clock
        self.started_at = clock()
        self.manifests: dict[str, Manifest] = newest_manifests(recipe, store, digests)
        self.plan: Plan | None = None
        self.recorder: FlightRecorder | None = None
        self.progress = Progress(recipe)
        self.view = RunView()
        self.box: Box | None = None
        self.remote: Remote | None = None
        self.watcher: Watcher | None = None
        self.exported = False
        self.attempts = 0
        self.tried: set[int] = set()
        self.destruction: Destruction | None = None

    @property
    def key_path(self) -> Path:
        """The run's own key pair; the account's keys never go to a box."""
        return self.settings.state_dir.expanduser().resolve() / "keys" / self.flow_run_id

    @property
    def deadline(self) -> float:
        return self.started_at + self.recipe.budget.max_hours * 3600

    @property
    def hard_end(self) -> int:
        return int(min(self.deadline, self.started_at + self.settings.max_age_hours * 3600) + HARD_END_MARGIN_S)

    def phases_left(self) -> tuple[str, ...]:
        """Phases whose final manifest is not yet in the bucket, in order."""
        return tuple(phase.kind for phase in self.recipe.phases if not self._complete(phase.kind))

    def unfinished(self) -> bool:
        return not self.exported

    def refresh(self) -> None:
        """Ask the bucket again what is done."""
        self.manifests = newest_manifests(self.recipe, self.store, self.digests)

    def take_off(self, planned: Plan) -> None:
        """The plan is made: from here on what happens is on record."""
        self.plan = planned
        flight = Flight(
            flow_run_id=self.flow_run_id,
            run=self.recipe.name,
            started_at=self.started_at,
            planned_usd=planned.run_usd,
            max_usd=self.recipe.budget.max_usd,
            market=self.market.name,
        )
        self.recorder = FlightRecorder(self.store, flight, self.clock)

    @property
    def flight(self) -> FlightRecorder:
        assert self.recorder is not None, "take_off comes before the first step"
        return self.recorder

    def next_offer(self) -> RankedOffer:
        """The cheapest offer not tried yet. NoOffers, AttemptsExhausted or BudgetReached when there is none to try."""
        assert self.plan is not None, "plan before renting"
        budget = self.recipe.budget
        if self.attempts >= budget.attempts:
            raise AttemptsExhausted(
                f"{self.attempts} boxes tried, budget.attempts = {budget.attempts}: {self._reasons()}"
            )
        spent = self.flight.spent_usd()
        left = [ranked for ranked in self.plan.offers if ranked.offer.machine_id not in self.tried]
        if not left:
            raise (
                AttemptsExhausted(f"all {len(self.tried)} machines that fit were tried: {self._reasons()}")
                if self.tried
                else NoOffers(self._no_offers())
            )
        if spent + left[0].run_usd > budget.max_usd:
            raise BudgetReached(
                f"about ${spent:.4f} spent, the next box would take ${left[0].run_usd:.4f} more, budget.max_usd = ${budget.max_usd:.2f}"
            )
        self.attempts += 1
        self.tried.add(left[0].offer.machine_id)
        return left[0]

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where the present box answers now; asked again before each reconnect, since ports move."""
        assert self.box is not None
        instance = self.market.show(self.box.instance_id)
        return instance.endpoints if instance else ()

    def _complete(self, kind: str) -> bool:
        manifest = self.manifests.get(kind)
        return manifest is not None and manifest.complete

    def _reasons(self) -> str:
        return (
            "; ".join(
                f"machine {attempt.machine_id}: {attempt.ended}"
                for attempt in self.flight.flight.attempts
                if attempt.ended
            )
            or "none was rented"
        )

    def _no_offers(self) -> str:
        assert self.plan is not None
        removers = sorted((count for count in self.plan.funnel if count.removed), key=lambda count: -count.removed)
        why = "; ".join(
            f"{count.rule} removes {count.removed}" + (f" ({count.loosen})" if count.loosen else "")
            for count in removers[:5]
        )
        return f"no offer fits: {self.plan.found} found; {why or 'the market has none of this tier'}"
