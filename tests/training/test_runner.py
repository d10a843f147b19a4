"""The runner's contract, on the counting trainer: real processes, and a real bucket with the real transfer where these are the point."""

from __future__ import annotations

import errno
import hashlib
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.training.box.netfault import Link
from tests.training.conftest import Box, kill, place_box, recipe_of
from training.box.store import Store
from training.contract import layout
from training.contract.claims import Claim
from training.contract.manifest import Manifest, Parent
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
def finished(tmp_path_factory: pytest.TempPathFactory) -> Box:
    """A box on which a run of two phases went through."""
    root = tmp_path_factory.mktemp("finished")
    box = place_box(root / "box", {}, counting("cpt", "sft"), "finished", bucket=f"folder:{root / 'bucket'}")
    assert box.run_here() == 0
    return box


def test_all_phases_run_in_order_and_the_result_is_exported(make_local: MakeBox) -> None:
    box = make_local(counting(*KINDS, steps=2), "all-phases")
    store = box.store
    assert box.run_here() == 0
    assert box.of("runner_end")[-1].complete
    assert [event.phase for event in box.of("phase_end") if event.complete] == list(KINDS)
    assert {info.key for info in store.list(layout.adapter("all-phases"))} >= {
        f"runs/all-phases/adapter/{name}" for name in ("state.json", "weights.bin")
    }
    parents = [final(store, "all-phases", kind).parent for kind in KINDS]
    keys = [layout.manifest("all-phases", kind, 2) for kind in KINDS]
    digests = [hashlib.sha256(store.get_bytes(key) or b"").hexdigest() for key in keys]
    assert parents == [None, *(Parent(key=key, sha256=sha256) for key, sha256 in zip(keys, digests, strict=True))][:5]


def test_events_are_whole_and_numbered_without_a_gap(finished: Box) -> None:
    events = finished.events
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    steps = [event for event in events if event.kind == "step"]
    assert [(event.phase, event.step) for event in steps] == [(kind, n) for kind in ("cpt", "sft") for n in range(1, 7)]
    assert steps[0].loss > steps[-1].loss


def test_a_finished_phase_keeps_its_last_checkpoint_only_and_no_blob_without_a_manifest(
    finished: Box,
) -> None:
    run, store = "finished", finished.store
    kept = {kind: manifests(store, run, kind) for kind in ("cpt", "sft")}
    assert {kind: set(steps) for kind, steps in kept.items()} == {"cpt": {6}, "sft": {6}}
    wanted = {entry.sha256 for steps in kept.values() for each in steps.values() for entry in each.files.values()}
    assert {info.key.rsplit("/", 1)[1] for info in store.list(f"runs/{run}/blobs/")} == wanted


def test_a_second_run_of_the_same_name_trains_nothing_again(finished: Box, tmp_path: Path) -> None:
    box = place_box(tmp_path / "box", {}, counting("cpt", "sft"), "finished", bucket=finished.store.bucket)
    assert box.run_here() == 0
    assert box.of("runner_start")[0].done == ("cpt", "sft")
    assert box.of("step") == []
    assert box.of("exported")


def test_a_box_killed_in_mid_upload_costs_only_the_steps_since_its_last_checkpoint(
    make_box: MakeBox, make_local: MakeBox, store: Store
) -> None:
    """SIGKILL, another box, and the same bytes at the end as without the loss. One run name, since the counting trainer's noise
    comes from it: once whole, once killed."""
    whole = counting("cpt", "sft", steps=100, save_every=10)
    alone = make_local(whole, "lost")
    assert alone.run_here() == 0
    wanted = files_of(final(alone.store, "lost", "sft"))

    lost = make_box(whole.model_copy(update={"step_seconds": 0.1}), "lost")
    runner = lost.start()
    staging = lost.root / "work" / "staging"
    lost.wait_for(
        lambda: bool(manifests(store, "lost", "cpt")) and any(path.suffix == "" for path in staging.glob("cpt_*"))
    )
    kill(runner)  # while the next checkpoint is on its way
    safe = max(manifests(store, "lost", "cpt"))
    assert safe < 100

    box = make_box(whole, "lost")
    assert box.run() == 0
    start = box.of("phase_start")[0]
    assert (start.phase, start.step, start.resumed_from) == ("cpt", safe, layout.manifest("lost", "cpt", safe))
    assert files_of(final(store, "lost", "sft")) == wanted


def test_told_to_stop_it_saves_and_is_not_done(make_local: MakeBox) -> None:
    box = make_local(counting("cpt", steps=50, save_every=50, seconds=0.1), "stopped")
    runner = box.start()
    box.wait_for(lambda: len(box.of("step")) >= 3)
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(timeout=20) == 143
    assert not box.of("runner_end")[-1].complete
    assert not any(event.complete for event in box.of("phase_end"))
    saved = box.of("checkpoint_saved")[-1].step
    assert list(manifests(box.store, "stopped", "cpt")) == [saved], "there was time to make it durable"

    again = box.start()
    box.wait_for(lambda: len(box.of("phase_start")) == 2)
    assert box.of("phase_start")[-1].step == saved >= 3
    kill(again)


def test_told_to_stop_with_no_uplink_it_leaves_within_its_time_and_goes_on_from_what_is_staged(
    make_box: MakeBox, store: Store
) -> None:
    recipe = counting("cpt", steps=50, save_every=50, seconds=0.1)
    brief = recipe.model_copy(update={"budget": recipe.budget.model_copy(update={"upload_s": 1})})
    box = make_box(brief, "stopped-offline")
    box.environment["LIVERY_TRANSFER_PYTHON"] = "/nowhere/python"
    runner = box.start()
    box.wait_for(lambda: len(box.of("step")) >= 3)
    runner.send_signal(signal.SIGTERM)
    assert runner.wait(timeout=20) == 143
    saved = box.of("checkpoint_saved")[-1].step
    assert not manifests(store, "stopped-offline", "cpt")

    again = box.start()
    box.wait_for(lambda: len(box.of("phase_start")) == 2)
    assert box.of("phase_start")[-1].step == saved >= 3
    kill(again)


def test_a_second_runner_on_one_box_refuses_and_says_nothing_in_the_events(make_local: MakeBox) -> None:
    box = make_local(counting("cpt", steps=100, seconds=0.1), "alone")
    first = box.start()
    box.wait_for(lambda: bool(box.of("runner_start")))
    assert box.run_here() == 4
    assert len(box.of("runner_start")) == 1
    kill(first)


def test_credentials_come_from_the_private_file_but_the_boxs_own_environment_wins(make_box: MakeBox) -> None:
    box = make_box(counting("cpt", steps=2), "environment")
    box.environment["AWS_SECRET_ACCESS_KEY"] = "wrong"
    assert box.run() == 3
    abort = box.of("abort")[0]
    assert abort.blame == "user"
    assert "wrong" not in abort.reason
    word = json.loads((box.root / "aborted.json").read_text())
    assert (word["reason"], word["blame"]) == (abort.reason, "user")
    del box.environment["AWS_SECRET_ACCESS_KEY"]
    assert box.run() == 0
    assert not (box.root / "aborted.json").exists(), "gone when a runner starts"


def test_a_damaged_checkpoint_is_never_gone_on_from(make_local: MakeBox) -> None:
    """The newest manifest's file was corrupted in the bucket: the one before it is used, and it is said."""
    recipe = counting("cpt", steps=30, seconds=0.1, save_every=3)
    box = make_local(recipe, "damaged")
    store = box.store
    runner = box.start()
    box.wait_for(lambda: len(manifests(store, "damaged", "cpt")) >= 2)
    kill(runner)
    newest, older = sorted(manifests(store, "damaged", "cpt"), reverse=True)[:2]
    entry = manifests(store, "damaged", "cpt")[newest].files["state.json"]
    store.put_bytes(layout.blob("damaged", entry.sha256), b"x" * entry.bytes)

    box = make_local(recipe, "damaged")
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
        (
            "orphan",
            {"parent": {"key": "runs/orphan/manifests/x/00000001.json", "sha256": "0" * 64}},
            "was begun from runs/orphan/manifests/x/00000001.json (sha256 000000000000), the phase now begins from None",
        ),
    ],
)
def test_a_checkpoint_that_is_not_whole_or_not_ours_is_left_out(
    make_local: MakeBox, run: str, changes: dict[str, Any], said: str
) -> None:
    recipe = counting("cpt")
    box = make_local(recipe, run)
    put_manifest(box.store, run, recipe, changes)
    assert box.run_here() == 0
    assert box.of("phase_start")[0].step == 0
    assert any(said in event.reason for event in box.of("notice"))


def test_a_manifest_that_cannot_be_read_is_left_out(make_local: MakeBox) -> None:
    box = make_local(counting("cpt"), "torn")
    box.store.put_bytes(layout.manifest("torn", "cpt", 4), b'{"version": 1, "run": "torn"')
    assert box.run_here() == 0
    assert box.of("phase_start")[0].step == 0


def test_a_checkpoint_of_another_recipe_stops_the_run_and_is_the_users_to_decide(
    make_local: MakeBox,
) -> None:
    assert make_local(counting("cpt"), "changed").run_here() == 0
    box = make_local(counting("cpt", rate=2e-3), "changed")
    assert box.run_here() == 3
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


def test_a_restore_over_a_link_that_dies_gives_the_box_up_and_not_the_checkpoint(
    make_box: MakeBox, store: Store, s3: dict[str, str]
) -> None:
    recipe = counting("cpt", steps=40, save_every=10, seconds=0.2).model_copy(update={"checkpoint_mb": 4.0})
    first = make_box(recipe, "restored")
    runner = first.start()
    first.wait_for(lambda: bool(manifests(store, "restored", "cpt")))
    kill(runner)
    safe = max(manifests(store, "restored", "cpt"))

    impatient = recipe.model_copy(update={"budget": recipe.budget.model_copy(update={"stall_s": 2})})
    box, link = make_box(impatient, "restored"), Link(int(s3["AWS_ENDPOINT_URL_S3"].rpartition(":")[2]))
    secrets = (box.root / "private.env").read_text().replace(s3["AWS_ENDPOINT_URL_S3"], link.url)
    (box.root / "private.env").write_text(secrets)
    link.down_bps = 1e6
    runner = box.start()
    box.wait_for(lambda: any(event.what == f"restore cpt/{safe}" for event in box.of("transfer")))
    link.freeze()
    assert runner.wait(timeout=60) == 3
    link.close()
    (abort,) = box.of("abort")
    assert abort.blame == "host" and f"restore cpt/{safe}, try 3: no byte moved" in abort.reason
    assert not any("not used" in event.what for event in box.of("notice")), "the checkpoint is as good as it was"

    box = make_box(recipe, "restored")
    assert box.run() == 0
    assert box.of("phase_start")[0].resumed_from == layout.manifest("restored", "cpt", safe)
    (restored,) = {event.what for event in box.of("transfer") if event.direction == "down"}
    assert restored == f"restore cpt/{safe}"


def test_an_older_box_that_comes_back_is_fenced_and_its_late_checkpoint_never_counts(
    make_box: MakeBox, store: Store
) -> None:
    """Two runners on one run, over S3: the newer claim wins, whoever is faster."""
    slow = counting("cpt", steps=20, save_every=4, seconds=0.5)
    old = make_box(slow, "fenced")
    runner = old.start()
    old.wait_for(lambda: bool(old.of("step")))
    new = make_box(slow.model_copy(update={"step_seconds": 0.01}), "fenced")
    assert new.run() == 0
    assert runner.wait(timeout=30) == 5
    abort, end = old.of("abort")[0], old.of("runner_end")[-1]
    assert abort.reason.startswith("fenced: run fenced: claim 2 of flow run") and abort.blame == "us"
    assert end.reason == abort.reason and not end.complete
    kept = manifests(store, "fenced", "cpt")
    assert {step: manifest.claim for step, manifest in kept.items() if manifest.claim == 2} == {20: 2}
    again = make_box(slow, "fenced")
    assert again.run() == 0
    assert again.of("step") == [], "the new box's result stands"


def test_a_superseded_box_does_not_put_its_adapter_where_the_new_ones_belongs(make_local: MakeBox) -> None:
    box = make_local(counting("cpt", steps=6, save_every=6, seconds=0.2), "late")
    runner = box.start()
    box.wait_for(lambda: bool(box.of("step")))
    newer = Claim(number=2, runner="x", at=0.0)
    box.store.put_bytes(layout.claim("late", 2), newer.model_dump_json().encode(), create_only=True)
    assert runner.wait(timeout=30) == 5
    assert box.of("phase_end")[-1].complete, "it had trained to the end"
    assert not manifests(box.store, "late", "cpt")
    assert box.store.list(layout.adapter("late")) == []


@pytest.mark.parametrize(
    ("error", "blame", "code"),
    [
        ("LivenessError", "user", 3),
        ("NotFinite", "user", 3),
        ("full disk", "host", 3),
        ("a bug", "unknown", 1),
    ],
)
def test_an_abort_is_an_event_a_sentinel_and_an_exit_code(
    make_local: MakeBox, monkeypatch: pytest.MonkeyPatch, error: str, blame: str, code: int
) -> None:
    from training.errors import LivenessError
    from training.phases import counting as trainer
    from training.phases.desk import NotFinite

    errors = {
        "LivenessError": LivenessError(
            "no gradient", stage="step1", group="routed_experts.down_proj", tensor="layers.0.lora_B", cause="module x"
        ),
        "NotFinite": NotFinite("step 3: the loss is nan"),
        "full disk": OSError(errno.ENOSPC, "No space left on device"),
        "a bug": ZeroDivisionError("division by zero"),
    }

    def fail(value: float, desk: Any, step: int) -> tuple[float, float]:
        raise errors[error]

    monkeypatch.setattr(trainer, "_step", fail)
    box = make_local(counting("cpt"), "abort")
    assert box.run_here() == code
    (abort,) = box.of("abort")
    word = json.loads((box.root / "aborted.json").read_text())
    assert abort.blame == word["blame"] == blame and abort.reason == word["reason"]
    if error == "LivenessError":
        told = {name: word[name] for name in ("phase", "stage", "group", "tensor", "likely_cause")}
        assert told == {
            "phase": "cpt",
            "stage": "step1",
            "group": "routed_experts.down_proj",
            "tensor": "layers.0.lora_B",
            "likely_cause": "module x",
        }
    assert box.store.list(layout.phase_manifests("abort", "cpt")) == []
