"""What earlier runs have left in the bucket for the next plan: how long a step took, and how many boxes turned out unfit."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from pydantic import Field, ValidationError

from tasks.domain import Flight
from tasks.rules.pricing import Experience, Pace
from training.box.store import Store, StoreError
from training.contract import layout
from training.contract.model import Frozen
from training.contract.recipe import Recipe

log = logging.getLogger(__name__)
MIN_STEPS = 5  # fewer are mostly compiling and filling caches
FLIGHTS = 20
_READERS = 8


class PaceNote(Frozen):
    """`paces/<tier>/<digest>.json`."""

    step_s: float = Field(gt=0)
    """Mean over the steps that were seen."""
    steps: int
    at: float
    run: str
    machine_id: int
    gpu_name: str

    @property
    def source(self) -> str:
        day = time.strftime("%Y-%m-%d", time.gmtime(self.at))
        return f"{day}, {self.steps} steps of run {self.run} on machine {self.machine_id} ({self.gpu_name})"


def remember_pace(
    store: Store,
    recipe: Recipe,
    phase: str,
    *,
    steps: int,
    step_s: float | None,
    machine_id: int,
    gpu_name: str,
    now: float,
) -> None:
    """Keep what a step of this phase took, for the plans to come. Too few steps are no measurement; a bucket that fails costs only the note."""
    if step_s is None or step_s <= 0 or steps < MIN_STEPS:
        return
    note = PaceNote(step_s=step_s, steps=steps, at=now, run=recipe.name, machine_id=machine_id, gpu_name=gpu_name)
    try:
        store.put_bytes(layout.pace(recipe.box.tier, pace_digest(recipe, phase)), note.model_dump_json().encode())
    except StoreError as error:
        log.warning("the pace of phase %s is not kept: %s", phase, error)


def read_experience(store: Store, recipe: Recipe, done: Collection[str] = ()) -> Experience:
    """Paces of the phases still to do, and the boxes of the newest flights. StoreError if the bucket cannot be listed."""
    left = [name for name in recipe.phase_names if name not in done]
    flights = sorted(store.list("flights/"), key=lambda item: -item.modified)[:FLIGHTS]
    # Two dozen small objects, one after another, are seconds on a bucket across the country.
    with ThreadPoolExecutor(_READERS) as pool:
        notes = list(pool.map(lambda name: _read_pace(store, recipe, name), left))
        boxes = list(pool.map(lambda item: _boxes(store, item.key), flights))
    return Experience(
        paces={name: Pace(note.step_s, note.source) for name, note in zip(left, notes, strict=True) if note},
        fit_boxes=sum(fit for fit, _ in boxes),
        unfit_boxes=sum(unfit for _, unfit in boxes),
    )


def pace_digest(recipe: Recipe, phase: str) -> str:
    """sha256 of all that decides a step's seconds. The number of steps, learning rates, seeds and the data's place do not.

    Two versions of one recipe, rank 32 with 8 micro-batches and rank 64 with 16, differ by a factor of two on the same card.
    """
    decides = recipe.model_dump(mode="json", include={"model", "adapters", "optimizer", "trainer", "allow"})
    if recipe.model.quantisation == "none":
        for name in ("quantisation", "linears", "execution", "nf4_cache"):
            del decides["model"][name]
    else:
        decides["gpus"] = recipe.box.gpus
    # What the card chooses by itself is the same for the same recipe and tier.
    decides |= {
        name: word
        for name in ("recompute", "micro_batches", "cuda_graphs")
        if (word := getattr(recipe, name)) != "auto"
    }
    of_phase = {"kind", "batch_size", "accumulation", "max_length", "generations", "max_completion_length", "beta"}
    decides["phase"] = recipe.phase(phase).model_dump(mode="json", include=of_phase)
    decides["device"] = recipe.box.device
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


def _read_pace(store: Store, recipe: Recipe, phase: str) -> PaceNote | None:
    key = layout.pace(recipe.box.tier, pace_digest(recipe, phase))
    try:
        data = store.get_bytes(key)
        return PaceNote.model_validate_json(data) if data is not None else None
    except (StoreError, ValidationError) as error:
        log.warning("%s cannot be read, so this phase is predicted: %s", key, str(error).splitlines()[0])
        return None


def _boxes(store: Store, key: str) -> tuple[int, int]:
    """Boxes of one flight that came as far as training, and those given back before; one still at work is neither."""
    try:
        data = store.get_bytes(key)
        attempts = Flight.model_validate_json(data).attempts if data is not None else ()
    except (StoreError, ValidationError) as error:
        log.warning("%s cannot be read and is not counted: %s", key, str(error).splitlines()[0])
        return 0, 0
    ended = [attempt for attempt in attempts if attempt.ended and attempt.instance_id is not None]
    unfit = sum(not any(span.step.startswith("phase ") for span in attempt.spans) for attempt in ended)
    return len(ended) - unfit, unfit
