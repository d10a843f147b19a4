from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.training.conftest import BUCKET, place_box, recipe_of
from training.box.store import Store
from training.checkpoint import Checkpoints, Uploader, UploadFailed
from training.contract import layout
from training.contract.manifest import Manifest

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


def uploader_of(tmp_path: Path, s3: dict[str, str], run: str, **options: object) -> tuple[Uploader, list[str], Store]:
    recipe = recipe_of("counting")
    brief = recipe.budget.model_copy(update={"stall_s": 3, "upload_s": 12})  # how long a dead link is tried
    box = place_box(tmp_path / "box", s3, recipe.model_copy(update={"budget": brief}), run)
    store, said = Store.from_environment(BUCKET, s3), []
    staging = tmp_path / "box" / "work" / "staging"
    checkpoints = Checkpoints(store, run, staging, lambda what, reason: said.append(f"{what}: {reason}"))
    notice = checkpoints._notice
    return Uploader(box.assignment, staging, checkpoints, notice, **options), said, store  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _credentials(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.items():
        monkeypatch.setenv(name, value)


def steps(store: Store, run: str, phase: str) -> list[int]:
    return [int(info.key[-13:-5]) for info in store.list(layout.phase_manifests(run, phase))]


def wait(uploader: Uploader) -> None:
    for _ in range(120):
        if uploader.wait(0.5):
            return
    raise AssertionError("uploads did not end within a minute")


def test_the_newest_waiting_checkpoint_wins_and_a_final_one_is_never_dropped(
    tmp_path: Path, s3: dict[str, str]
) -> None:
    uploader, _, store = uploader_of(tmp_path, s3, "newest")
    for phase, step in (("cpt", 10), ("sft", 2), ("sft", 4), ("sft", 6)):
        uploader.stage(checkpoint(tmp_path / phase, step), NAMES, manifest("newest", phase, step))
    wait(uploader)
    uploader.close()
    assert steps(store, "newest", "cpt") == [10]
    assert steps(store, "newest", "sft") == [6], "the first upload takes a second, in which newer ones replaced 2 and 4"


def test_staged_files_survive_the_trainers_rotation(tmp_path: Path, s3: dict[str, str]) -> None:
    uploader, _, store = uploader_of(tmp_path, s3, "rotation")
    directory = checkpoint(tmp_path / "cpt", 10)
    uploader.stage(directory, NAMES, manifest("rotation", "cpt", 10))
    for name in NAMES:
        os.unlink(directory / name)
    wait(uploader)
    uploader.close()
    assert steps(store, "rotation", "cpt") == [10]


def test_an_unfinished_phase_keeps_its_last_two(tmp_path: Path, s3: dict[str, str]) -> None:
    uploader, _, store = uploader_of(tmp_path, s3, "two")
    for step in (2, 4, 6):
        uploader.stage(checkpoint(tmp_path / "cpt", step), NAMES, manifest("two", "cpt", step))
        wait(uploader)
    uploader.close()
    assert steps(store, "two", "cpt") == [4, 6]


def test_a_last_checkpoint_that_cannot_be_uploaded_is_given_up_and_blamed_on_the_box(
    tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader, said, _ = uploader_of(tmp_path, s3, "dead", attempts=2, pauses_s=(0.1,))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    uploader.stage(checkpoint(tmp_path / "cpt", 10), NAMES, manifest("dead", "cpt", 10))
    with pytest.raises(UploadFailed, match="failed 2 times") as caught:
        wait(uploader)
    uploader.close()
    assert not caught.value.user_fault
    assert len(said) == 2


def test_a_bucket_that_refuses_is_the_users_fault_and_not_tried_again(
    tmp_path: Path, s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader, said, _ = uploader_of(tmp_path, s3, "denied")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    uploader.stage(checkpoint(tmp_path / "cpt", 10), NAMES, manifest("denied", "cpt", 10))
    with pytest.raises(UploadFailed) as caught:
        wait(uploader)
    uploader.close()
    assert caught.value.user_fault
    assert len(said) == 1


def test_what_waits_at_the_end_stays_staged_with_its_manifest(tmp_path: Path, s3: dict[str, str]) -> None:
    uploader, _, store = uploader_of(tmp_path, s3, "staged", python="/nowhere/python", pauses_s=(60.0,))
    uploader.stage(checkpoint(tmp_path / "cpt", 10), NAMES, manifest("staged", "cpt", 10))
    uploader.close()
    staged = tmp_path / "box" / "work" / "staging" / "cpt_00000010"
    assert sorted(path.name for path in staged.iterdir()) == ["manifest.json", *NAMES]
    assert steps(store, "staged", "cpt") == []


@pytest.mark.parametrize("fault", ["not an error that is expected", "a disk too full for a notice"])
def test_a_fault_in_the_uploader_is_an_error_of_the_run_and_never_a_silence(
    tmp_path: Path, s3: dict[str, str], fault: str
) -> None:
    """With its thread dead, an empty queue would look like durable checkpoints, and a full one would be waited for till the hard end."""
    python = "/nowhere\0/python" if fault.startswith("not") else "/nowhere/python"
    uploader, _, _ = uploader_of(tmp_path, s3, "fault", python=python, attempts=2, pauses_s=(0.1,))

    def full(what: str, reason: str) -> None:
        raise OSError(28, "No space left on device")

    if fault.startswith("a disk"):
        uploader.notice = full
    uploader.stage(checkpoint(tmp_path / "cpt", 10), NAMES, manifest("fault", "cpt", 10))
    with pytest.raises(UploadFailed, match="failed 2 times"):
        wait(uploader)
    uploader.close()
