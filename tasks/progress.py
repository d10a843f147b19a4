"""What of a run is already in the bucket: the manifests decide, nobody's memory."""

from __future__ import annotations

from tasks.errors import UserError
from training.box.store import Store
from training.contract import claims
from training.contract.claims import ClaimError
from training.contract.manifest import Manifest, ManifestError
from training.contract.recipe import Recipe


def newest_manifests(recipe: Recipe, store: Store, digests: dict[str, str]) -> dict[str, Manifest]:
    """The newest manifest of each phase that has one, in the recipe's order, as far as each begins from the one before it.

    UserError if one belongs to another recipe or other data: a run's name stands for one recipe.
    """
    found: dict[str, Manifest] = {}
    try:
        for key, manifest in claims.newest_manifests(store, recipe.name, recipe.phase_names):
            _require_fit(recipe, key, manifest, digests)
            found[manifest.phase] = manifest
    except (ClaimError, ManifestError) as error:
        raise UserError(str(error)) from None
    return found


def _require_fit(recipe: Recipe, key: str, manifest: Manifest, digests: dict[str, str]) -> None:
    if manifest.phase_digest != recipe.phase_digest(manifest.phase):
        raise UserError(
            f"run '{recipe.name}': {key} was trained by another recipe; give this run another name (run_name), or the recipe its old values"
        )
    if manifest.data_sha256 != digests[manifest.phase]:
        raise UserError(
            f"run '{recipe.name}': {key} was trained on other data; give this run another name (run_name), or the phase its old file"
        )
