"""Small checkpoints and an uploader for them."""

from __future__ import annotations

from pathlib import Path

from tests.training.conftest import BUCKET, place_box, recipe_of
from training.box.store import Store
from training.checkpoint import Checkpoints
from training.contract import layout
from training.contract.manifest import Manifest
from training.uploader import Uploader

NAMES = ("state.json", "weights.bin")


def manifest(run: str, phase: str, step: int, max_steps: int = 10) -> Manifest:
    return Manifest(
        run=run,
        phase=phase,
        step=step,
        max_steps=max_steps,
        created_at=0.0,
        phase_digest="d",
        data_sha256="",
        parent=None,
        versions={},
        files={},
    )


def checkpoint(directory: Path, step: int) -> Path:
    directory = directory / f"checkpoint-{step}"
    directory.mkdir(parents=True)
    for name in NAMES:
        (directory / name).write_text(f"{directory.parent.name} {step} {name}")
    return directory


def uploader_of(
    tmp_path: Path,
    s3: dict[str, str],
    run: str,
    *,
    changes: dict[str, object] | None = None,
    budget: dict[str, float] | None = None,
    **options: object,
) -> tuple[Uploader, list[str], Store]:
    recipe = recipe_of("counting")
    brief = recipe.budget.model_copy(update=budget or {"stall_s": 2, "upload_s": 3})  # how long a dead link is tried
    bucket = BUCKET if s3 else f"folder:{tmp_path / 'bucket'}"
    recipe = recipe.model_copy(update={"budget": brief, **(changes or {})})
    box = place_box(tmp_path / "box", s3, recipe, run, bucket=bucket)
    store, said = Store.from_environment(bucket, s3), []
    staging = tmp_path / "box" / "work" / "staging"
    checkpoints = Checkpoints(store, run, staging, lambda what, reason: said.append(f"{what}: {reason}"))
    notice = checkpoints._notice
    return Uploader(box.assignment, staging, checkpoints, notice, **options), said, store  # type: ignore[arg-type]


def steps(store: Store, run: str, phase: str) -> list[int]:
    return [int(info.key[-13:-5]) for info in store.list(layout.phase_manifests(run, phase))]


def wait(uploader: Uploader) -> None:
    for _ in range(120):
        if uploader.wait(0.5):
            return
    raise AssertionError("uploads did not end within a minute")
