"""What of a run is already in the bucket: the manifests decide, nobody's memory."""

from __future__ import annotations

from collections.abc import Mapping

from tasks.errors import UserError
from tasks.phase import RunView
from training.box.store import Store, StoreError
from training.contract import claims, layout
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


def safe_sentence(store: Store, run: str, manifests: Mapping[str, Manifest], view: RunView) -> str:
    """What of the run is safe: its furthest manifest, after a look at every file that it names. Says what is missing, or that nobody could look."""
    if not manifests:
        return "nothing is in the bucket yet"
    manifest = list(manifests.values())[-1]
    where = layout.manifest(run, manifest.phase, manifest.step)
    try:
        missing = [
            name
            for name, entry in sorted(manifest.files.items())
            if store.size(layout.blob(run, entry.sha256)) != entry.bytes
        ]
    except StoreError as error:
        return f"the newest manifest known is {where}, and whether its files are there cannot be asked for now: {error}"
    if missing:
        return f"{where} names {', '.join(missing)}, which the bucket does not hold in full: an earlier checkpoint will be gone on from"
    saved = f"saved and verified: {manifest.phase} step {manifest.step} of {manifest.max_steps} ({len(manifest.files)} files, {manifest.total_bytes / 1e6:.1f} MB, {where})"
    trained = view.phases[manifest.phase].step if manifest.phase in view.phases else 0
    lost = f", {trained - manifest.step} later steps are not" if trained > manifest.step else ""
    return saved + lost


def _require_fit(recipe: Recipe, key: str, manifest: Manifest, digests: dict[str, str]) -> None:
    if manifest.phase_digest != recipe.phase_digest(manifest.phase):
        raise UserError(
            f"run '{recipe.name}': {key} was trained by another recipe; give this run another name (run_name), or the recipe its old values"
        )
    if manifest.data_sha256 != digests[manifest.phase]:
        raise UserError(
            f"run '{recipe.name}': {key} was trained on other data; give this run another name (run_name), or the phase its old file"
        )
