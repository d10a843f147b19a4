"""What of a run is already in the bucket: the manifests decide, nobody's memory."""

from __future__ import annotations

from tasks.errors import UserError
from training.box.store import Store
from training.contract import layout
from training.contract.manifest import Manifest, ManifestError, parse_manifest
from training.contract.recipe import Recipe


def newest_manifests(recipe: Recipe, store: Store, digests: dict[str, str]) -> dict[str, Manifest]:
    """The newest manifest of each phase that has one, in the recipe's order.

    UserError if one belongs to another recipe or other data: a run's name stands for one recipe.
    """
    found: dict[str, Manifest] = {}
    for phase in recipe.phases:
        keys = sorted(info.key for info in store.list(layout.phase_manifests(recipe.name, phase.name)))
        if not keys:
            break
        found[phase.name] = _read(recipe, store, keys[-1], digests)
    return found


def _read(recipe: Recipe, store: Store, key: str, digests: dict[str, str]) -> Manifest:
    data = store.get_bytes(key)
    if data is None:
        raise UserError(f"{key}: was listed and is gone; is another process deleting in runs/{recipe.name}/?")
    try:
        manifest = parse_manifest(data, key)
    except ManifestError as error:
        raise UserError(str(error)) from None
    if manifest.phase_digest != recipe.phase_digest(manifest.phase):
        raise UserError(
            f"run '{recipe.name}': {key} was trained by another recipe; give this run another name (run_name), or the recipe its old values"
        )
    if manifest.data_sha256 != digests[manifest.phase]:
        raise UserError(
            f"run '{recipe.name}': {key} was trained on other data; give this run another name (run_name), or the phase its old file"
        )
    return manifest
