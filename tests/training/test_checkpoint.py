from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.training.checkpoints import NAMES, checkpoint, manifest, steps, wait
from tests.training.conftest import place_box, recipe_of
from training.box.child import Fenced
from training.box.light import TRAINERS_OWN
from training.box.store import Store
from training.checkpoint import Checkpoints, Identity
from training.contract import layout
from training.contract.claims import ClaimError
from training.contract.manifest import REQUIRED_FILES, Manifest, ManifestError, Parent
from training.uploader import Uploader

# Going on from a checkpoint, or not.

FILES = {name: f"content of {name}".encode() for name in REQUIRED_FILES}
PARENT = Parent(key="runs/r/manifests/cpt/00000010.json", sha256="a" * 64)
IDENTITY = Identity(
    "digest", "data", {"peft": "0.21.2", "transformers": "5.23.0", "trl": "1.16.0"}, PARENT, REQUIRED_FILES
)


@dataclass
class Shelf:
    """One stored checkpoint of a run in a folder, and what was said about it."""

    root: Path

    def __post_init__(self) -> None:
        self.store = Store.from_environment(f"folder:{self.root / 'bucket'}")
        self.said: list[str] = []
        self.checkpoints = Checkpoints(
            self.store, "r", self.root / "staging", lambda what, reason: self.said.append(f"{what}: {reason}")
        )

    def put(self, step: int = 4, *, without: str = "", **changes: Any) -> str:
        files = {}
        for name, content in FILES.items():
            if name != without:
                sha256 = hashlib.sha256(content).hexdigest()
                self.store.put_bytes(layout.blob("r", sha256), content)
                files[name] = {"sha256": sha256, "bytes": len(content)}
        fields = manifest("r", "sft", step).model_dump(mode="json") | {
            "phase_digest": IDENTITY.phase_digest,
            "data_sha256": IDENTITY.data_sha256,
            "versions": IDENTITY.versions,
            "parent": PARENT.model_dump(),
            "files": files,
        }
        text = Manifest.model_validate(fields | changes).model_dump_json().encode()
        key = layout.manifest("r", "sft", step)
        self.store.put_bytes(key, text)
        return key

    def usable(self) -> list[int]:
        """Steps that can be gone on from, the newest first, each really fetched."""
        found = self.checkpoints.newest_first("sft", IDENTITY)
        return [each.manifest.step for each in found if self.checkpoints.fetch(each, self.root / "into") is not None]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_a_whole_checkpoint_comes_back_as_it_was(shelf: Shelf) -> None:
    shelf.put()
    assert shelf.usable() == [4] and shelf.said == []
    assert {path.name: path.read_bytes() for path in (shelf.root / "into").iterdir()} == FILES


@pytest.mark.parametrize("name", REQUIRED_FILES)
def test_a_checkpoint_that_lacks_a_file_is_left_out_by_name_and_the_one_before_is_used(shelf: Shelf, name: str) -> None:
    """transformers would go on without it: with a fresh optimizer and schedule, other samples, or the weights the phase began with."""
    shelf.put(2)
    shelf.put(4, without=name)
    assert shelf.usable() == [2]
    assert len(shelf.said) == 1 and f"lacks {name}" in shelf.said[0] and "00000004.json" in shelf.said[0]


@pytest.mark.parametrize("name", REQUIRED_FILES)
@pytest.mark.parametrize("damage", ["torn", "changed", "gone"])
def test_a_blob_that_is_not_whole_is_never_loaded(shelf: Shelf, name: str, damage: str) -> None:
    shelf.put(2)
    content = b"its own " + FILES[name]
    entry = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    files = {other: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for other, data in FILES.items()}
    shelf.put(4, files=files | {name: entry})
    if damage != "gone":
        stored = content[:-3] if damage == "torn" else bytes([content[0] ^ 1]) + content[1:]
        shelf.store.put_bytes(layout.blob("r", str(entry["sha256"])), stored)
    assert shelf.usable() == [2]
    assert any(f"{name}: " in each and "00000004.json not used" in each for each in shelf.said)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"phase_digest": "other"}, "trained by another recipe"),
        ({"data_sha256": "other"}, "trained on other data"),
        ({"versions": IDENTITY.versions | {"peft": "0.19.0"}}, "written with peft 0.19.0, this environment has 0.21.2"),
        ({"versions": IDENTITY.versions | {"trl": "1.15.0"}}, "written with trl 1.15.0"),
        ({"versions": {}}, "written with peft None"),
    ],
)
def test_a_changed_recipe_other_data_or_other_versions_are_the_users_to_decide(
    shelf: Shelf, changes: dict[str, Any], words: str
) -> None:
    shelf.put(2)
    key = shelf.put(4, **changes)
    with pytest.raises(ManifestError, match=words) as caught:
        shelf.checkpoints.newest_first("sft", IDENTITY)
    assert key in str(caught.value) and "give the run another name" in str(caught.value)


@pytest.mark.parametrize("field", ["accumulation", "batch_size", "max_length", "learning_rate", "steps"])
def test_whatever_decides_a_phases_data_or_steps_is_in_the_digest_that_a_checkpoint_must_match(field: str) -> None:
    """With other accumulation transformers would go on from another place in the data and say nothing."""
    recipe = recipe_of("tiny-moe")
    phases = recipe.model_dump(mode="json")["phases"]
    changed = [phases[0], phases[1] | {field: phases[1][field] * 2}, *phases[2:]]
    other = recipe_of("tiny-moe", phases=changed)
    assert other.phase_digest("cpt") == recipe.phase_digest("cpt")
    for name in ("sft", "dpo"):
        assert other.phase_digest(name) != recipe.phase_digest(name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"run": "another"}, "belongs to run another, this is r"),
        ({"parent": None}, "was begun from None"),
        ({"parent": {"key": "runs/r/manifests/cpt/00000008.json", "sha256": "a" * 64}}, "the phase now begins from"),
        ({"parent": {"key": PARENT.key, "sha256": "b" * 64}}, "that manifest was overwritten"),
    ],
)
def test_a_checkpoint_begun_from_elsewhere_is_left_out(shelf: Shelf, changes: dict[str, Any], words: str) -> None:
    shelf.put(4, **changes)
    assert shelf.usable() == []
    assert len(shelf.said) == 1 and words in shelf.said[0]


@pytest.mark.parametrize("text", [b"", b"{", b"null", b'{"version": 1}'])
def test_a_manifest_that_cannot_be_read_is_left_out_by_name(shelf: Shelf, text: bytes) -> None:
    shelf.put(2)
    shelf.store.put_bytes(layout.manifest("r", "sft", 4), text)
    assert shelf.usable() == [2]
    assert len(shelf.said) == 1 and layout.manifest("r", "sft", 4) in shelf.said[0]


# Two boxes, one run.


def test_a_claims_number_grows_and_one_of_eight_gets_each(shelf: Shelf) -> None:
    boxes = [Checkpoints(shelf.store, "r", shelf.root / f"staging-{n}", lambda *_: None) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        numbers = sorted(pool.map(lambda box: box.take_claim("f", 1).number, boxes))
    assert numbers == list(range(1, 9))


def test_a_superseded_box_writes_nothing_and_is_told_who_took_over(shelf: Shelf) -> None:
    old, new = (Checkpoints(shelf.store, "r", shelf.root / name, lambda *_: None) for name in ("old", "new"))
    box = place_box(shelf.root / "box", {}, recipe_of("counting"), "r", bucket=f"folder:{shelf.root / 'bucket'}")
    old.take_claim("first", 1)
    uploader = Uploader(box.assignment, shelf.root / "old", old, lambda *_: None)
    uploader.stage(checkpoint(shelf.root / "cpt", 2), NAMES, manifest("r", "cpt", 2).model_copy(update={"claim": 1}))
    wait(uploader)
    new.take_claim("second", 3)
    uploader.stage(checkpoint(shelf.root / "cpt", 4), NAMES, manifest("r", "cpt", 4).model_copy(update={"claim": 1}))
    with pytest.raises(Fenced, match=r"claim 2 of flow run second, attempt 3, has superseded ours \(1\)"):
        wait(uploader)
    uploader.close()
    assert steps(shelf.store, "r", "cpt") == [2]


def test_a_manifest_written_in_the_last_moment_never_counts(shelf: Shelf) -> None:
    """The old box looked for a claim, found none, and wrote when the new one had already looked for checkpoints."""
    shelf.put(2)
    first = shelf.checkpoints.take_claim("first", 1)
    assert list(first.found) == [layout.manifest("r", "sft", 2)]
    shelf.put(3, claim=1)
    assert shelf.usable() == [3, 2], "its own, and what was there before"
    second = Checkpoints(shelf.store, "r", shelf.root / "other", shelf.checkpoints._notice)
    second.take_claim("second", 1)
    shelf.put(4, claim=1)
    shelf.put(2, claim=1, created_at=9.0)
    found = [each.manifest.step for each in second.newest_first("sft", IDENTITY)]
    assert found == [3], "neither the late checkpoint nor the overwritten one"
    assert sum("by a superseded box" in each for each in shelf.said) == 2
    third = Checkpoints(shelf.store, "r", shelf.root / "other", lambda *_: None)
    assert list(third.take_claim("third", 1).found) == [layout.manifest("r", "sft", 3)]


def test_what_this_box_staged_before_it_was_started_again_still_counts(shelf: Shelf) -> None:
    shelf.checkpoints.take_claim("f", 1)
    directory = shelf.root / "staging" / "sft_00000004"
    directory.mkdir(parents=True)
    key = shelf.put(4, claim=1)
    (directory / "manifest.json").write_bytes(shelf.store.get_bytes(key) or b"")
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    shelf.store.delete(key)
    again = Checkpoints(shelf.store, "r", shelf.root / "staging", lambda *_: None)
    again.take_claim("f", 1)
    assert [each.manifest.step for each in again.newest_first("sft", IDENTITY)] == [4]


def test_a_claim_that_cannot_be_read_stops_everybody(shelf: Shelf) -> None:
    shelf.store.put_bytes(layout.claim("r", 1), b"{")
    with pytest.raises(ClaimError, match=r"00000001\.json"):
        shelf.checkpoints.take_claim("f", 1)


# The light form: an adapter to use, and what the next phase can begin from.


def put_light(shelf: Shelf, step: int, **changes: Any) -> Parent:
    """A light checkpoint without the full one that it stands for."""
    full = Parent(key=layout.manifest("r", "sft", step), sha256="f" * 64)
    key = shelf.put(step, stands_for=full.model_dump(), **changes)
    text = shelf.store.get_bytes(key) or b""
    light = Manifest.model_validate_json(text)
    kept = {name: entry for name, entry in light.files.items() if name not in TRAINERS_OWN}
    shelf.store.delete(key)
    text = light.model_copy(update={"files": kept}).model_dump_json().encode()
    shelf.store.put_bytes(layout.light_manifest("r", "sft", step), text)
    return full


def test_a_phase_whose_end_is_only_there_in_its_light_form_is_done_and_the_next_one_begins_from_what_it_stands_for(
    shelf: Shelf,
) -> None:
    full = put_light(shelf, 10)
    (found,) = shelf.checkpoints.newest_first("sft", IDENTITY)
    assert found.manifest.complete and found.as_parent == full
    assert shelf.checkpoints.fetch(found, shelf.root / "into") is not None
    assert not (shelf.root / "into" / "optimizer.pt").exists()


def test_training_never_goes_on_from_a_light_checkpoint(shelf: Shelf) -> None:
    """Without the optimizer's state it would go on with a fresh one and say nothing."""
    shelf.put(2)
    put_light(shelf, 4)
    assert shelf.usable() == [2]
    assert len(shelf.said) == 1 and "is light" in shelf.said[0]


def test_the_full_form_is_taken_where_both_are(shelf: Shelf) -> None:
    put_light(shelf, 10)
    shelf.put(10)
    assert [each.manifest.light for each in shelf.checkpoints.newest_first("sft", IDENTITY)] == [False, True]


def test_retention_keeps_what_a_light_checkpoint_names(shelf: Shelf) -> None:
    shelf.checkpoints.take_claim("f", 1)
    shelf.put(2, claim=1)
    put_light(shelf, 10, claim=1)
    shelf.checkpoints.retain("sft", PARENT)
    assert [each.manifest.step for each in shelf.checkpoints.newest_first("sft", IDENTITY)] == [10]
    assert shelf.usable() == [10]


@pytest.mark.parametrize("name", REQUIRED_FILES)
def test_a_checkpoint_with_an_empty_file_is_left_out(shelf: Shelf, name: str) -> None:
    entry = {"sha256": hashlib.sha256(b"").hexdigest(), "bytes": 0}
    files = {other: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for other, data in FILES.items()}
    shelf.put(4, files=files | {name: entry})
    assert shelf.usable() == [] and f"{name} has 0 bytes" in shelf.said[0]
