"""The runner's contract, on the counting trainer: real processes, a real bucket, the real transfer."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import Box, kill, place_box, recipe_of
from training.box.store import Store
from training.contract import layout
from training.contract.manifest import Manifest
from training.contract.recipe import Recipe, parse_recipe

KINDS = ("cpt", "sft", "dpo", "kto", "grpo")
MakeBox = Callable[..., Box]


def counting(*kinds: str, steps: int = 6, save_every: int = 2, seconds: float = 0.01, rate: float = 1e-3) -> Recipe:
    phases = [
        {"kind": kind, "data": "bucket:none", "steps": steps, "learning_rate": rate, "save_every_steps": save_every}
        for kind in kinds
    ]
    return recipe_of("counting", phases=phases, step_seconds=seconds)


def manifests(store: Store, run: str, phase: str) -> dict[int, Manifest]:
    found = {}
    for info in store.list(layout.phase_manifests(run, phase)):
        data = store.get_bytes(info.key)
        assert data is not None
        manifest = Manifest.model_validate_json(data)
        found[manifest.step] = manifest
    return found


def final(store: Store, run: str, phase: str) -> Manifest:
    (manifest,) = (each for each in manifests(store, run, phase).values() if each.complete)
    return manifest


def files_of(manifest: Manifest) -> dict[str, str]:
    return {name: entry.sha256 for name, entry in manifest.files.items()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, s3: dict[str, str]) -> tuple[Box, str]:
    """A box on which a run of two phases went through."""
    box = place_box(tmp_path_factory.mktemp("finished") / "box", s3, counting("cpt", "sft"), "finished")
    assert box.run() == 0
    return box, "finished"


def test_all_phases_run_in_order_and_the_result_is_exported(make_box: MakeBox, store: Store) -> None:
    box = make_box(counting(*KINDS, steps=2), "all-phases")
    assert box.run() == 0
    assert box.of("runner_end")[-1].complete
    assert [event.phase for event in box.of("phase_end") if event.complete] == list(KINDS)
    assert {info.key for info in store.list(layout.adapter("all-phases"))} >= {
        f"runs/all-phases/adapter/{name}" for name in ("state.json", "weights.bin")
    }
    parents = [final(store, "all-phases", kind).parent for kind in KINDS]
    assert parents == [None, *(layout.manifest("all-phases", kind, 2) for kind in KINDS[:-1])]


def test_events_are_whole_and_numbered_without_a_gap(finished: tuple[Box, str]) -> None:
    events = finished[0].events
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    steps = [event for event in events if event.kind == "step"]
    assert [(event.phase, event.step) for event in steps] == [(kind, n) for kind in ("cpt", "sft") for n in range(1, 7)]
    assert steps[0].loss > steps[-1].loss


def test_a_finished_phase_keeps_its_last_checkpoint_only_and_no_blob_without_a_manifest(
    finished: tuple[Box, str], store: Store
) -> None:
    run = finished[1]
    kept = {kind: manifests(store, run, kind) for kind in ("cpt", "sft")}
    assert {kind: set(steps) for kind, steps in kept.items()} == {"cpt": {6}, "sft": {6}}
    wanted = {entry.sha256 for steps in kept.values() for each in steps.values() for entry in each.files.values()}
    assert {info.key.rsplit("/", 1)[1] for info in store.list(f"runs/{run}/blobs/")} == wanted


def test_a_second_run_of_the_same_name_trains_nothing_again(
    finished: tuple[Box, str], make_box: MakeBox, store: Store
) -> None:
    box = make_box(counting("cpt", "sft"), finished[1])
    assert box.run() == 0
    assert box.of("runner_start")[0].done == ("cpt", "sft")
    assert box.of("step") == []
    assert box.of("exported")


def test_a_box_lost_in_mid_phase_costs_only_the_steps_since_its_last_checkpoint(
    make_box: MakeBox, store: Store
) -> None:
    """SIGKILL, another box, and the same bytes at the end as without the loss. One run name, since the counting trainer's noise
    comes from it: once whole, once killed."""
    whole = counting("cpt", "sft", steps=300, save_every=10)
    assert make_box(whole, "lost").run() == 0
    wanted = files_of(final(store, "lost", "sft"))
    for info in store.list("runs/lost/"):
        store.delete(info.key)

    lost = make_box(whole.model_copy(update={"step_seconds": 0.1}), "lost")
    runner = lost.start()
    lost.wait_for(lambda: bool(manifests(store, "lost", "cpt")))
    kill(runner)
    safe = max(manifests(store, "lost", "cpt"))
    assert safe < 300

    box = make_box(whole, "lost")
    assert box.run() == 0
    start = box.of("phase_start")[0]
    assert (start.phase, start.step, start.resumed_from) == ("cpt", safe, layout.manifest("lost", "cpt", safe))
    assert files_of(final(store, "lost", "sft")) == wanted


def test_told_to_stop_it_saves_and_is_not_done(make_box: MakeBox, store: Store) -> None:
    box = make_box(counting("cpt", steps=50, save_every=50, seconds=0.1), "stopped")
    runner = box.start()
    box.wait_for(lambda: len(box.of("step")) >= 3)
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(timeout=20) == 143
    assert not box.of("runner_end")[-1].complete
    assert not any(event.complete for event in box.of("phase_end"))
    saved = box.of("checkpoint_saved")[-1].step

    again = box.start()
    box.wait_for(lambda: len(box.of("phase_start")) == 2)
    assert box.of("phase_start")[-1].step == saved >= 3, "goes on from what was staged on the box"
    kill(again)


def test_a_second_runner_on_one_box_refuses_and_says_nothing_in_the_events(make_box: MakeBox) -> None:
    box = make_box(counting("cpt", steps=100, seconds=0.1), "alone")
    first = box.start()
    box.wait_for(lambda: bool(box.of("runner_start")))
    assert box.run() == 4
    assert len(box.of("runner_start")) == 1
    kill(first)


def test_credentials_come_from_the_private_file_but_the_boxs_own_environment_wins(make_box: MakeBox) -> None:
    box = make_box(counting("cpt"), "environment")
    box.environment["AWS_SECRET_ACCESS_KEY"] = "wrong"
    assert box.run() == 3
    abort = box.of("abort")[0]
    assert abort.blame == "user"
    assert "wrong" not in abort.reason


def test_a_damaged_checkpoint_is_never_gone_on_from(make_box: MakeBox, store: Store) -> None:
    """The newest manifest's file was corrupted in the bucket: the one before it is used, and it is said."""
    recipe = counting("cpt", steps=30, seconds=0.1, save_every=3)
    box = make_box(recipe, "damaged")
    runner = box.start()
    box.wait_for(lambda: len(manifests(store, "damaged", "cpt")) >= 2)
    kill(runner)
    newest, older = sorted(manifests(store, "damaged", "cpt"), reverse=True)[:2]
    entry = manifests(store, "damaged", "cpt")[newest].files["state.json"]
    store.put_bytes(layout.blob("damaged", entry.sha256), b"x" * entry.bytes)

    box = make_box(recipe, "damaged")
    runner = box.start()
    box.wait_for(lambda: bool(box.of("phase_start")))
    kill(runner)
    assert box.of("phase_start")[0].step == older
    assert any(layout.manifest("damaged", "cpt", newest) in event.what for event in box.of("notice"))


def put_manifest(store: Store, run: str, recipe: Recipe, changes: dict[str, Any]) -> None:
    fields = {
        "run": run,
        "phase": "cpt",
        "step": 4,
        "max_steps": 6,
        "created_at": 0.0,
        "phase_digest": recipe.phase_digest("cpt"),
        "data_sha256": "",
        "parent": None,
        "versions": {},
        "files": {name: {"sha256": "0" * 64, "bytes": 1} for name in ("state.json", "weights.bin")},
    }
    manifest = Manifest.model_validate(fields | changes)
    store.put_bytes(layout.manifest(run, "cpt", manifest.step), manifest.model_dump_json().encode())


@pytest.mark.parametrize(
    ("run", "changes", "said"),
    [
        ("no-blobs", {}, "does not exist"),
        ("half", {"files": {"state.json": {"sha256": "0" * 64, "bytes": 1}}}, "lacks weights.bin"),
        ("foreign", {"run": "another"}, "belongs to run another"),
        ("orphan", {"parent": "runs/orphan/manifests/x/00000001.json"}, "was begun from"),
    ],
)
def test_a_checkpoint_that_is_not_whole_or_not_ours_is_left_out(
    make_box: MakeBox, store: Store, run: str, changes: dict[str, Any], said: str
) -> None:
    recipe = counting("cpt")
    put_manifest(store, run, recipe, changes)
    box = make_box(recipe, run)
    assert box.run() == 0
    assert box.of("phase_start")[0].step == 0
    assert any(said in event.reason for event in box.of("notice"))


def test_a_manifest_that_cannot_be_read_is_left_out(make_box: MakeBox, store: Store) -> None:
    store.put_bytes(layout.manifest("torn", "cpt", 4), b'{"version": 1, "run": "torn"')
    box = make_box(counting("cpt"), "torn")
    assert box.run() == 0
    assert box.of("phase_start")[0].step == 0


def test_a_checkpoint_of_another_recipe_stops_the_run_and_is_the_users_to_decide(
    make_box: MakeBox, store: Store
) -> None:
    assert make_box(counting("cpt"), "changed").run() == 0
    box = make_box(counting("cpt", rate=2e-3), "changed")
    assert box.run() == 3
    abort = box.of("abort")[0]
    assert abort.blame == "user" and "another recipe" in abort.reason
    assert box.of("step") == []


def test_an_upload_that_never_works_ends_the_run_and_blames_the_box(make_box: MakeBox, store: Store) -> None:
    """The transfer cannot be started at all: its interpreter is missing."""
    box = make_box(counting("cpt"), "no-uplink")
    box.environment["LIVERY_TRANSFER_PYTHON"] = "/nowhere/python"
    runner = box.start()
    box.wait_for(lambda: any("upload of cpt/6 failed" in event.what for event in box.of("notice")))
    kill(runner)
    assert not manifests(store, "no-uplink", "cpt")
    assert not box.of("runner_end"), "the run is not over while its last checkpoint is not durable"


def test_the_shipped_counting_recipe_is_the_one_tested() -> None:
    assert recipe_of("counting").trainer == "counting"
    assert parse_recipe(recipe_of("counting").model_dump(mode="json")) == recipe_of("counting")


@pytest.mark.parametrize("lost", ["prefetched.json", "data/sft.jsonl", "model/config.json"])
def test_a_box_whose_prefetch_did_not_end_is_not_trained_on(make_box: MakeBox, tmp_path: Path, lost: str) -> None:
    world = tmp_path / "world"
    (world / "model").mkdir(parents=True)
    (world / "datasets").mkdir()
    (world / "model" / "config.json").write_text("{}")
    for kind in (*KINDS, "evaluation"):
        (world / "datasets" / f"{kind}.jsonl").write_text("{}")
    box = make_box(recipe_of("tiny-moe"), "half-prefetched", world)
    (box.root / lost).unlink()
    assert box.run() == 1
    abort = box.of("abort")[0]
    assert abort.blame == "us" and lost in abort.reason
    assert not box.of("phase_start")
