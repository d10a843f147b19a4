"""What of a run is already in the bucket: the manifests decide, nobody's memory."""

from __future__ import annotations

from tasks.errors import UserError
from training.box.store import Store
from training.contract.claims import ClaimError, newest_manifest
from training.contract.manifest import Manifest, ManifestError, parse_manifest
from training.contract.recipe import Recipe


def newest_manifests(recipe: Recipe, store: Store, digests: dict[str, str]) -> dict[str, Manifest]:
    """The newest manifest of each phase that has one, in the recipe's order.

    UserError if one belongs to another recipe or other data: a run's name stands for one recipe.
    """
    found: dict[str, Manifest] = {}
    for phase in recipe.phases:
        try:
            newest = newest_manifest(store, recipe.name, phase.name)
        except ClaimError as error:
            raise UserError(str(error)) from None
        if newest is None:
            break
        found[phase.name] = _read(recipe, *newest, digests)
    return found


def _read(recipe: Recipe, key: str, data: bytes, digests: dict[str, str]) -> Manifest:
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
