"""The base model's mirror: who writes it, and when it is believed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.box.test_hub import COMMIT, FILES, Hub
from training.box.child import WAYS, Refused, Voice
from training.box.mirror import find_mirror, send_mirror
from training.box.prefetch import prefetch_here
from training.box.store import Store, StoreError
from training.contract import layout
from training.contract.recipe import Assignment, Recipe

SOURCE = f"hub:me/tiny@{COMMIT}"
LIST = layout.mirror_list(SOURCE)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub()
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", served.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield served
    served.server.shutdown()
    served.server.server_close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.from_environment(f"folder:{tmp_path / 'bucket'}")
    store.put_bytes("d.jsonl", b"{}\n")
    return store


def prefetched(home: Path, files: dict[str, bytes]) -> Path:
    known = {}
    for name, data in files.items():
        (home / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (home / "model" / name).write_bytes(data)
        known[f"model/{name}"] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (home / "prefetched.json").write_text(
        json.dumps({"files": known | {"data/sft.jsonl": {"sha256": "x", "bytes": 3}}})
    )
    return home


GOOD = {name: data for name, data in FILES.items() if not name.endswith(".bin")}


def mirrored(store: Store, home: Path, files: dict[str, bytes] = GOOD) -> int:
    return send_mirror(store, SOURCE, prefetched(home, files), Voice(mute=True), WAYS[0])


def assignment(store: Store) -> Assignment:
    recipe = Recipe.model_validate(
        {
            "name": "unit",
            "model": {"source": SOURCE, "family": "qwen3_5_moe", "size_gb": 0.01, "mirror": True},
            "phases": [{"kind": "sft", "data": "bucket:d.jsonl", "steps": 1, "learning_rate": 0.001}],
            "box": {"tier": "rehearsal", "device": "cpu"},
            "budget": {"max_usd": 1},
        }
    )
    return Assignment(recipe=recipe, run="unit", flow_run_id="f", attempt=1, bucket=store.bucket, hard_end=0)


def test_the_first_box_writes_it_once_and_the_next_one_takes_the_model_from_it(
    store: Store, hub: Hub, tmp_path: Path
) -> None:
    assert find_mirror(store, SOURCE) is None
    assert mirrored(store, tmp_path / "one") == sum(map(len, GOOD.values()))
    assert mirrored(store, tmp_path / "two") == 0
    home = tmp_path / "three"
    prefetch_here(assignment(store), store, home, Voice(mute=True), WAYS[0], 0)
    assert {path.name: path.read_bytes() for path in (home / "model").iterdir()} == GOOD
    marker = json.loads((home / "prefetched.json").read_text())
    assert marker["model_from"] == "mirror" and set(marker["files"]) == {
        "data/sft.jsonl",
        *(f"model/{n}" for n in GOOD),
    }


def test_a_mirror_without_its_list_is_no_mirror(store: Store, hub: Hub, tmp_path: Path) -> None:
    mirrored(store, tmp_path / "one")
    store.delete(LIST)
    assert find_mirror(store, SOURCE) is None


@pytest.mark.parametrize("harm", ["other weights", "one missing", "one too many"])
def test_a_mirror_that_is_not_what_the_hub_has_is_refused(store: Store, hub: Hub, tmp_path: Path, harm: str) -> None:
    """A box is a stranger's machine: what it wrote may hold other weights, or code."""
    files = dict(GOOD)
    if harm == "other weights":
        files["model.safetensors"] = b"x" * len(files["model.safetensors"])
    elif harm == "one missing":
        del files["config.json"]
    else:
        files["modeling_evil.py"] = b"import os"
    mirrored(store, tmp_path / "bad", files)
    with pytest.raises(Refused, match=r"delete models/me/tiny@a+/ and ask who wrote it"):
        find_mirror(store, SOURCE)


def test_a_file_that_is_not_what_the_list_says_is_never_taken(store: Store, hub: Hub, tmp_path: Path) -> None:
    mirrored(store, tmp_path / "one")
    store.put_bytes(layout.mirror(SOURCE) + "model.safetensors", b"y" * len(GOOD["model.safetensors"]))
    with pytest.raises(StoreError, match=r"model\.safetensors: sha256 of what is there is"):
        prefetch_here(assignment(store), store, tmp_path / "home", Voice(mute=True), WAYS[0], 0)
    assert not (tmp_path / "home/prefetched.json").exists()


@pytest.mark.parametrize("text", [b"", b"{", b'{"source": 1}'])
def test_a_list_that_cannot_be_read_is_refused_by_name(store: Store, hub: Hub, text: bytes) -> None:
    store.put_bytes(LIST, text)
    with pytest.raises(Refused, match=r"mirror\.json.*delete it"):
        find_mirror(store, SOURCE)


def test_the_mirrors_choice_changes_no_checkpoint(store: Store) -> None:
    with_mirror = assignment(store).recipe
    without = with_mirror.model_copy(update={"model": with_mirror.model.model_copy(update={"mirror": False})})
    assert with_mirror.phase_digest("sft") == without.phase_digest("sft")
