"""Model and data to the box, each file verified, with a marker when all are there."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from training.box.child import Refused, Voice, Way
from training.box.files import Item, download_all
from training.box.mirror import Mirror, find_mirror
from training.box.store import Store
from training.contract import layout
from training.contract.manifest import FileEntry
from training.contract.recipe import Assignment, Recipe

MARKER = "prefetched.json"
MODEL, DATA = "prefetch model", "prefetch data"
Known = dict[str, dict[str, Any]]


def marker_holds(home: Path) -> bool:
    """Whether the marker is there and every file it names has the size it says."""
    path = home / MARKER
    if not path.exists():
        return False
    files = json.loads(path.read_text())["files"]
    return all(
        (home / name).is_file() and (home / name).stat().st_size == entry["bytes"] for name, entry in files.items()
    )


def wanted_data(recipe: Recipe) -> dict[str, str]:
    """Path on the box → key in the bucket, for the phases' data and the held-out set. Refused if one is not in the bucket."""
    places = {f"data/{phase.name}.jsonl": phase.data for phase in recipe.phases}
    if recipe.evaluation.data:
        places["data/evaluation.jsonl"] = recipe.evaluation.data
    for path, place in places.items():
        if not place.startswith("bucket:"):
            raise Refused(
                f"{path}: data '{place}' is not in the bucket; want bucket:KEY (the flow copies local files there)"
            )
    return {path: place.removeprefix("bucket:") for path, place in places.items()}


def prefetch_here(assignment: Assignment, store: Store, home: Path, voice: Voice, way: Way, attempt: int) -> None:
    """Data first, since it is small and a missing file should show before the model is paid for; the marker last.

    The marker, `prefetched.json`: {"files": {path: {"sha256", "bytes"}}, "model_from": "hub" | "mirror" | "bucket"}.
    """
    keys = wanted_data(assignment.recipe)
    wanted = [Item(name=path, key=key, bytes=_size(store, key)) for path, key in keys.items()]
    known = _known(download_all(store, home, wanted, DATA, voice, way))
    source = assignment.recipe.model.source
    if source.startswith("hub:"):
        mirror = find_mirror(store, source) if assignment.recipe.model.mirror else None
        came_from = "mirror" if mirror else "hub"
        known |= (
            _from_mirror(store, home, source, mirror, voice, way) if mirror else _from_hub(source, home, voice, attempt)
        )
    else:
        came_from = "bucket"
        files = list_model(store, source.removeprefix("bucket:"))
        known |= _known(download_all(store, home, files, MODEL, voice, way))
    fresh = home / f"{MARKER}.new"
    fresh.write_text(json.dumps({"files": known, "model_from": came_from, "at": time.time()}, indent=1))
    os.replace(fresh, home / MARKER)


def list_model(store: Store, prefix: str) -> list[Item]:
    """All objects under the model's prefix. Refused if there is none, if weights are empty, or if a name would leave the model's folder."""
    base = prefix.rstrip("/") + "/"
    found = []
    for item in store.list(base):
        name = item.key.removeprefix(base)
        if not name or name.endswith("/"):
            continue
        if ".." in name.split("/") or name.startswith("/"):
            raise Refused(f"{item.key}: a model file may not lie outside its folder")
        if item.size == 0 and name.endswith((".safetensors", ".json")):
            raise Refused(f"{store.where}: {item.key} has 0 bytes; mirror the model again")
        found.append(Item(name=f"model/{name}", key=item.key, bytes=item.size))
    if not found:
        raise Refused(f"{store.where}: no object under {base}; mirror the model there first")
    return found


def _from_hub(source: str, home: Path, voice: Voice, attempt: int) -> Known:
    from training.box.hub import download_model

    furthest: int | None = None

    def progress(done: int, total: int) -> None:
        """The hub's library does not tell what came over the line; what the disk gained since the beginning is as near as can be."""
        nonlocal furthest
        voice.moved(max(0, done - furthest) if furthest is not None else 0)
        furthest = max(done, furthest or 0)
        voice.progress(MODEL, done, total)

    return download_model(source, home / "model", progress, attempt, voice.worked)


def _from_mirror(store: Store, home: Path, source: str, mirror: Mirror, voice: Voice, way: Way) -> Known:
    base = layout.mirror(source)
    files = [
        Item(name=f"model/{name}", key=base + name, bytes=each.bytes, sha256=each.sha256)
        for name, each in mirror.files.items()
    ]
    return _known(download_all(store, home, files, MODEL, voice, way))


def _known(files: dict[str, FileEntry]) -> Known:
    return {name: entry.model_dump() for name, entry in files.items()}


def _size(store: Store, key: str) -> int:
    size = store.size(key)
    if size is None:
        raise Refused(f"{store.where}: {key} does not exist; upload it, or correct the recipe's data")
    if size == 0:
        raise Refused(f"{store.where}: {key} has 0 bytes; upload it again, or correct the recipe's data")
    return size
