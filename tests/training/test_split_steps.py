"""A step is the same however its rows are split into micro-batches, also for a run that goes on where the card has room for others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import Box, place_box, recipe_of
from training.box.folder import FolderStore
from training.contract import layout
from training.phases import fast_paths

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]

_ROWS = {"cpt": 5, "sft": 25}
"""So few that the last steps of an epoch have fewer rows than others, and the run goes over its end."""


def split_into(rows: int) -> Callable[[Any, Any], Any]:
    """In place of `fast_paths.split`, which asks a card."""

    def split(desk: Any, _: Any) -> Any:
        phase = desk.phase
        step = phase.batch_size * phase.accumulation
        return phase.model_copy(update={"batch_size": rows, "accumulation": step // rows})

    return split


def losses(box: Box) -> dict[int, float]:
    return {event.step: event.loss for event in box.of("step")}


@pytest.mark.parametrize("kind", ["cpt", "sft"])
def test_a_run_that_goes_on_under_another_split_sees_the_same_rows(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The trainer skips steps times micro-batches when it resumes: it must come out at the same row, also after the end of an epoch."""
    phase = next(each for each in recipe_of("tiny-moe").model_dump(mode="json")["phases"] if each["kind"] == kind)
    phase |= {
        "steps": 6,
        "save_every_steps": 4,
        "batch_size": 1,
        "accumulation": 8,
        "max_length": {"cpt": 64, "sft": 512}[kind],
    }
    recipe = recipe_of("tiny-moe", phases=[phase], evaluation={"data": None})
    world = tmp_path / "world"
    shutil.copytree(tiny / "datasets", world / "datasets")
    (world / "model").symlink_to(tiny / "model")
    data = world / "datasets" / f"{kind}.jsonl"
    data.write_text("".join(data.read_text().splitlines(keepends=True)[: _ROWS[kind]]))
    monkeypatch.setattr(FolderStore, "delete", lambda self, key: None)  # what a lost box would leave

    def run(name: str, rows: int, bucket: Path) -> Box:
        box = place_box(tmp_path / name, {}, recipe, "split", world, bucket=f"folder:{bucket}")
        data = box.root / "data" / f"{kind}.jsonl"
        data.write_text("".join(data.read_text().splitlines(keepends=True)[: _ROWS[kind]]))
        monkeypatch.setattr(fast_paths, "split", split_into(rows))
        assert box.run_here() == 0, box.of("abort")
        return box

    whole = run("whole", 1, tmp_path / "bucket")
    lost = run("lost", 4, tmp_path / "other")
    assert losses(lost) == pytest.approx(losses(whole), rel=1e-4)
    shutil.move(tmp_path / "other" / layout.manifest("split", kind, 6), tmp_path / "gone.json")
    resumed = run("resumed", 2, tmp_path / "other")
    (start,) = resumed.of("phase_start")
    assert start.step == 4
    assert losses(resumed) == pytest.approx({step: losses(whole)[step] for step in (5, 6)}, rel=1e-4)
    epochs = [event.metrics["epoch"] for event in whole.of("step")]
    assert epochs[-1] > 1 and any(epoch % 1 for epoch in epochs)
    assert len({round(loss, 5) for loss in losses(whole).values()}) == 6, "steps tell rows apart"
