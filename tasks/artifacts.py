"""What a person sees on the run's page: offers, progress, phases, receipt. Stable keys, so that runs line up in one collection."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from tasks.domain import Plan, Receipt
from tasks.phase import PHASES_CAPTION, Pace, RunView
from tasks.plan_table import CAPTION, facts, filter_rows, offer_rows
from tasks.receipt import markdown
from training.contract.manifest import Manifest
from training.contract.recipe import Recipe

log = logging.getLogger(__name__)


class Progress:
    """One progress bar for the whole run; each update is a request and an event, so at most one every ten seconds."""

    def __init__(self, recipe: Recipe, every_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps = {phase.name: phase.steps for phase in recipe.phases}
        self._every_s, self._clock = every_s, clock
        self._at: float | None = None
        self._id: UUID | None = None

    def __call__(self, view: RunView, *, now: bool = False) -> None:
        moment = self._clock()
        if not now and self._at is not None and moment - self._at < self._every_s:
            return
        self._at = moment
        percent, sentence = self.state(view)
        log.info("progress %.0f %%: %s", percent, sentence)
        shown(lambda: self._show(percent, sentence))

    def state(self, view: RunView) -> tuple[float, str]:
        steps = {
            kind: (
                self._steps[kind] if kind in view.done_before else view.phases[kind].step if kind in view.phases else 0
            )
            for kind in self._steps
        }
        running = [phase for phase in view.phases.values() if phase.step < phase.max_steps]
        current = (running or list(view.phases.values()))[-1:] if view.phases else []
        sentence = current[0].sentence if current else "starting"
        return 100.0 * sum(steps.values()) / sum(self._steps.values()), f"{sentence}{_gpu(view)}"

    def _show(self, percent: float, sentence: str) -> None:
        if self._id is None:
            created = create_progress_artifact(progress=percent, key="progress", description=sentence)
            self._id = created if isinstance(created, UUID) else None
        else:
            update_progress_artifact(artifact_id=self._id, progress=percent, description=sentence)


def _gpu(view: RunView) -> str:
    if view.gpu_util_percent is None:
        return ""
    power = f", {view.gpu_power_w:.0f} W" if view.gpu_power_w is not None else ""
    return f"; GPU {view.gpu_util_percent:.0f} % busy{power}"


def phase_rows(recipe: Recipe, view: RunView, manifests: dict[str, Manifest]) -> list[dict[str, Any]]:
    """One row a phase: loss first → last and each group's norm, from this run's events or an earlier run's manifest."""
    rows: list[dict[str, Any]] = []
    for phase in recipe.phases:
        seen, manifest = view.phases.get(phase.name), manifests.get(phase.name)
        if seen and seen.end:
            groups = {name: (group.norm, group.delta_norm) for name, group in seen.end.groups.items()}
            facts = (seen.loss_first, seen.loss_last, groups, seen.metrics, seen.pace)
            rows.append(_row(phase.name, f"{seen.step}/{phase.steps}", *facts, source="trained"))
        elif manifest:
            groups = {name: (group.norm, group.delta_norm) for name, group in manifest.groups.items()}
            facts = (manifest.loss_first, manifest.loss_last, groups, manifest.metrics, Pace())
            rows.append(_row(phase.name, f"{manifest.step}/{phase.steps}", *facts, source="from the bucket"))
    return rows


def _row(
    name: str,
    steps: str,
    first: float | None,
    last: float | None,
    groups: dict[str, tuple[float, float | None]],
    metrics: dict[str, float],
    pace: Pace,
    *,
    source: str,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "phase": name,
        "steps": steps,
        "loss first": _number(first),
        "loss last": _number(last),
        "reward": _spread(metrics.get("reward"), metrics.get("reward_std")),
    }
    # The routed experts first: they are nearly all of the adapter, and what once stood still for 33 hours.
    for group, (norm, delta) in sorted(groups.items(), key=lambda item: (not item[0].startswith("routed"), item[0])):
        row[group] = f"{norm:.2f} ({delta:.2f})" if delta is not None else f"{norm:.2f}"
    row["s a step"] = "" if pace.step_s is None else f"{pace.step_s:.2f}"
    row["tok/s"] = "" if pace.tokens_per_s is None else f"{pace.tokens_per_s:,.0f}"
    row["MFU"] = "" if pace.mfu is None else f"{100 * pace.mfu:.1f} %"
    row["$ of steps"] = "" if not pace.usd else f"{pace.usd:.4f}"
    return {**row, "source": source}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _spread(mean: float | None, deviation: float | None) -> str:
    return "" if mean is None else f"{mean:.3f} ± {deviation:.3f}" if deviation is not None else f"{mean:.3f}"


def show_plan(plan: Plan) -> None:
    """Two tables: the offers that fit, cheapest run first, and the funnel of the filters."""
    shown(
        lambda: create_table_artifact(
            table=offer_rows(plan), key="offers", description="  \n".join([f"Plan of run **{plan.run}**", *facts(plan)])
        )
    )
    shown(
        lambda: create_table_artifact(
            table=filter_rows(plan),
            key="filters",
            description=f"{plan.found} offers found, {len(plan.offers)} pass; {CAPTION}",
        )
    )


def show_phases(rows: list[dict[str, Any]]) -> None:
    shown(lambda: create_table_artifact(table=rows, key="phases", description=PHASES_CAPTION))


def show_receipt(receipt: Receipt) -> None:
    shown(
        lambda: create_markdown_artifact(
            markdown=markdown(receipt), key="receipt", description=f"Receipt of {receipt.run}"
        )
    )


def show_audit(rows: list[dict[str, object]], headline: str) -> None:
    shown(lambda: create_table_artifact(table=rows, key="audit", description=headline))


def show_adapter(uri: str) -> None:
    shown(
        lambda: create_link_artifact(
            link=uri, link_text=uri, key="adapter", description="The trained adapter, as stock PEFT loads it"
        )
    )


class Page:
    """The run's page. It is a view: a server that does not answer must not end a run that trains, nor hold it up while its box bills.

    Prefect's client tries for a minute before it gives up, so each showing has `patience_s`; after one that failed nothing is shown for
    `quiet_s`.
    """

    def __init__(
        self, patience_s: float = 10.0, quiet_s: float = 120.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._patience_s, self._quiet_s, self._clock = patience_s, quiet_s, clock
        self._quiet_until = float("-inf")

    def show(self, what: Callable[[], object]) -> None:
        if self._clock() < self._quiet_until:
            return
        problem: list[str] = []

        def attempt() -> None:
            try:
                what()
            except Exception as error:  # noqa: BLE001 - whatever it raises, httpx's errors among it: protects the run from its own view
                problem.append(f"{type(error).__name__}: {error}")

        # With the run's own context, by which Prefect knows whose page it is.
        thread = threading.Thread(target=contextvars.copy_context().run, args=(attempt,), daemon=True)
        thread.start()
        thread.join(self._patience_s)
        if thread.is_alive():
            problem.append(f"no answer within {self._patience_s:.0f} s")
        if problem:
            self._quiet_until = self._clock() + self._quiet_s
            log.warning("not shown on the run's page, and nothing is for %.0f s: %s", self._quiet_s, problem[0])


shown = Page().show
