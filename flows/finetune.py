"""One fine-tuning run. Read this page first: each line of the body is a step, and each step is a task on the run's page."""

from __future__ import annotations

from prefect import flow, runtime

from tasks import steps
from tasks.guard import destroy_hook
from training.contract.recipe import Tier


def run_title() -> str:
    """The run's name in the UI: what is trained, and on which tier."""
    given = runtime.flow_run.parameters
    return "-".join(
        str(part)
        for part in (
            given.get("run_name") or given.get("recipe", "run").rpartition("/")[2].removesuffix(".yaml"),
            given.get("tier"),
        )
        if part
    )


@flow(
    name="finetune",
    flow_run_name=run_title,
    # The recipe's budget.max_hours ends a run long before; this is the wall behind it.
    timeout_seconds=72 * 3600,
    on_failure=[destroy_hook],
    on_cancellation=[destroy_hook],
    on_crashed=[destroy_hook],
)
def finetune(
    recipe: str = "qwen3.6-35b-a3b",
    run_name: str | None = None,
    phases: list[str] | None = None,
    max_steps: int | None = None,
    max_usd: float | None = None,
    max_hours: float | None = None,
    attempts: int | None = None,
    tier: Tier | None = None,
    max_dph_usd: float | None = None,
    countries: list[str] | None = None,
    interruptible: bool | None = None,
    fresh: bool = False,
    keep_box: bool = False,
) -> str:
    """Rent a box that passes every check, train the phases, upload, evaluate, export, destroy the box, write the receipt.

    Args:
        recipe: A shipped recipe's name or the path of a YAML file on the machine that runs the flow.
        run_name: Name of the run; the same name goes on from what is in the bucket. Default: the recipe's name.
        phases: Names of the phases to run, of those that the recipe has.
        max_steps: At most so many steps in each phase.
        max_usd: Dollars for the whole run, failed boxes included; just before they are spent it saves, uploads, verifies and ends.
        max_hours: Hours to the end of the box, counted from when the run may rent one; ended in the same way.
        attempts: Boxes that may be tried.
        tier: The kind of card.
        max_dph_usd: Dollars an hour that a box may cost.
        countries: Two-letter codes of countries to rent in.
        interruptible: Bid for a box that may be reclaimed; for short runs.
        fresh: Begin at the beginning, under a name of its own (the run's name and the flow run's id).
        keep_box: Keep the box of a failed run for debugging; it is destroyed after LIVERY_KEEP_HOURS.
    """
    overrides = {name: value for name, value in locals().items() if name not in {"recipe", "fresh", "keep_box"}}
    run = steps.prepare(recipe, overrides, fresh)
    with steps.always_destroyed_and_billed(run, keep=keep_box):
        while run.unfinished():
            steps.plan(run)
            box = steps.rent_fit_box(run)
            with steps.replaced_if_lost(run, box):
                for phase in run.phases_left():
                    steps.train(run, box, phase)
                    steps.upload(run, box, phase)
                steps.evaluate(run, box)
                steps.export(run, box)
    return run.adapter_uri
