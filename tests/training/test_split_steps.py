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
from training.phases.lean_trainer import Graphs

pytestmark = [pytest.mark.train, pytest.mark.timeout(300)]

_ROWS = {"cpt": 5, "sft": 25}
"""So few that the last steps of an epoch have fewer rows than others, and the run goes over its end."""


def split_into(rows: int, launched: int | None = None) -> Callable[..., Any]:
    """In place of `fast_paths.split`, which asks a card; `launched` are the rows of what is no graph."""

    def split(desk: Any, _: Any, *, graphs: bool = True) -> Any:
        phase = desk.phase
        step = phase.batch_size * phase.accumulation
        batch = rows if graphs or launched is None else launched
        return phase.model_copy(update={"batch_size": batch, "accumulation": step // batch})

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


def test_data_that_is_not_for_graphs_takes_the_split_for_launches_before_its_first_step(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    phase = next(each for each in recipe_of("tiny-moe").model_dump(mode="json")["phases"] if each["kind"] == "sft")
    phase |= {"steps": 3, "save_every_steps": 3, "batch_size": 1, "accumulation": 8, "max_length": 512}
    recipe = recipe_of("tiny-moe", phases=[phase], evaluation={"data": None})
    forwards: dict[str, int] = {}

    def run(name: str, split: Callable[..., Any], graphs: bool) -> Box:
        box = place_box(tmp_path / name, {}, recipe, "split", tiny, bucket=f"folder:{tmp_path / name / 'bucket'}")
        monkeypatch.setattr(fast_paths, "split", split)

        def asked(desk: Any, model: Any, count: Any) -> Graphs | None:
            model.register_forward_hook(lambda *_: forwards.update({name: forwards.get(name, 0) + model.training}))
            return Graphs(lambda text: desk.notice("cuda graph", text), count, at_most=1) if graphs else None

        monkeypatch.setattr(fast_paths, "graphs", asked)
        assert box.run_here() == 0, box.of("abort")
        return box

    wanted = run("plain", split_into(2), graphs=False)
    seen = run("declined", split_into(8, launched=2), graphs=True)
    notices = {event.what: event.reason for event in seen.of("notice")}
    assert "none, micro-batches are of" in notices["cuda graph"]
    assert losses(seen) == pytest.approx(losses(wanted), rel=1e-4)
    assert forwards["declined"] == forwards["plain"] >= 3 * 8 // 2
