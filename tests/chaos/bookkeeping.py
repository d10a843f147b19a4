"""What is in the bucket and what was trained: read after a run, to see what was lost."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.domain import Receipt
from training.box.store import Store
from training.contract import layout
from training.contract.events import CheckpointDurable, PhaseStart, RunnerStart, Step, read_events
from training.contract.manifest import ManifestError, parse_manifest


@dataclass
class Work:
    """One phase on one box."""

    phase: str
    begun_at: int = 0
    trained: int = 0
    durable: int = 0


def manifest_keys(store: Store, run: str) -> list[str]:
    return [item.key for item in store.list(f"{layout.run(run)}/manifests/")]


def newest_steps(store: Store, run: str) -> dict[str, int]:
    """The newest durable step of each phase. Older manifests are dropped once a newer one is there, so only this may never fall."""
    steps: dict[str, int] = {}
    for key in manifest_keys(store, run):
        phase, _, step = key.removesuffix(".json").split("/manifests/")[1].partition("/")
        steps[phase] = max(steps.get(phase, 0), int(step))
    return steps


def damaged(store: Store, run: str) -> list[str]:
    """Manifests that cannot be read, or name a file that is missing or has other bytes."""
    wrong = []
    for key in manifest_keys(store, run):
        try:
            manifest = parse_manifest(store.get_bytes(key) or b"", key)
        except ManifestError as error:
            wrong.append(f"{key}: {error}")
            continue
        wrong += [f"{key}: {name}" for name, entry in manifest.files.items() if not _whole(store, run, entry.sha256)]
    return wrong


def _whole(store: Store, run: str, sha256: str) -> bool:
    data = store.get_bytes(layout.blob(run, sha256))
    return data is not None and hashlib.sha256(data).hexdigest() == sha256


def receipt(store: Store, run: str) -> Receipt | None:
    """The receipt of the run; it has flown once, so there is one at most."""
    for item in store.list(f"{layout.run(run)}/receipts/"):
        return Receipt.model_validate_json(store.get_bytes(item.key) or b"")
    return None


def work(events: Mapping[int, Path], store: Store, run: str) -> list[Work]:
    """What each box trained in each phase and how much of that is durable, from the boxes' events and the bucket."""
    found: list[Work] = []
    for path in sorted(events.values()):
        here: dict[str, Work] = {}
        for event in read_events(path):
            if isinstance(event, RunnerStart):
                # A later box found these whole, or at this step: then they were durable before.
                for earlier in found:
                    if earlier.phase in event.done:
                        earlier.durable = earlier.trained
            elif isinstance(event, PhaseStart):
                here[event.phase] = Work(event.phase, event.step, event.step, event.step)
                for earlier in found:
                    if earlier.phase == event.phase:
                        earlier.durable = max(earlier.durable, min(event.step, earlier.trained))
            elif isinstance(event, Step):
                here[event.phase].trained = max(here[event.phase].trained, event.step)
            elif isinstance(event, CheckpointDurable) and event.phase in here:
                here[event.phase].durable = max(here[event.phase].durable, event.step)
        found += here.values()
    # What the bucket holds now speaks for the last box of each phase: it may have ended before it could tell.
    newest = newest_steps(store, run)
    for last in {each.phase: each for each in found}.values():
        last.durable = max(last.durable, min(newest.get(last.phase, 0), last.trained))
    return found


def lost(work: list[Work], saves: Mapping[str, int]) -> tuple[int, int]:
    """Steps trained that no manifest holds, and those of them beyond one save interval a phase and box."""
    missing = [(each, max(0, each.trained - each.durable)) for each in work]
    return sum(steps for _, steps in missing), sum(max(0, steps - saves[each.phase]) for each, steps in missing)
