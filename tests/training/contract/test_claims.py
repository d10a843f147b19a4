from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from training.box.store import Store
from training.contract import layout
from training.contract.claims import (
    Claim,
    ClaimError,
    counts,
    newest_claim,
    newest_manifest,
    newest_manifests,
    parse_claim,
)
from training.contract.manifest import Manifest, Parent

KEY = layout.manifest("r", "sft", 4)


def claim(number: int, **found: str) -> Claim:
    return Claim(number=number, runner="x", at=0.0, found=found)


def manifest(step: int, number: int) -> bytes:
    fields = {"run": "r", "phase": "sft", "step": step, "max_steps": 9, "created_at": 0.0, "phase_digest": "d"}
    more = {"data_sha256": "", "parent": None, "versions": {}, "files": {}, "claim": number}
    return Manifest.model_validate(fields | more).model_dump_json().encode()


def test_a_manifest_counts_if_the_newest_claims_runner_wrote_it_or_found_it() -> None:
    found = Claim(number=3, runner="x", at=0.0, found={KEY: "a" * 64})
    assert counts(KEY, "b" * 64, 0, None), "a run that was never claimed"
    assert counts(KEY, "b" * 64, 3, found)
    assert counts(KEY, "a" * 64, 2, found)
    assert not counts(KEY, "b" * 64, 2, found), "overwritten after the claim"
    assert not counts(layout.manifest("r", "sft", 5), "a" * 64, 2, found), "written after the claim"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.from_environment(f"folder:{tmp_path}")


def test_the_newest_claim_is_that_of_the_highest_number(store: Store) -> None:
    assert newest_claim(store, "r") is None
    for number in (9, 10, 2):
        store.put_bytes(layout.claim("r", number), claim(number).model_dump_json().encode())
    newest = newest_claim(store, "r")
    assert newest is not None and newest.number == 10


def test_the_newest_manifest_is_the_newest_that_counts(store: Store) -> None:
    assert newest_manifest(store, "r", "sft") is None
    store.put_bytes(KEY, manifest(4, 1))
    sha256 = hashlib.sha256(manifest(4, 1)).hexdigest()
    text = Claim(number=2, runner="x", at=0.0, found={KEY: sha256}).model_dump_json()
    store.put_bytes(layout.claim("r", 2), text.encode())
    store.put_bytes(layout.manifest("r", "sft", 9), manifest(9, 1))
    assert newest_manifest(store, "r", "sft") == (KEY, manifest(4, 1)), "a superseded box cannot finish a phase"
    store.put_bytes(layout.manifest("r", "sft", 6), manifest(6, 2))
    newest = newest_manifest(store, "r", "sft")
    assert newest is not None and newest[0].endswith("00000006.json")


def test_a_phase_counts_only_as_far_as_it_begins_from_the_one_before_it(store: Store) -> None:
    first = Manifest.model_validate_json(manifest(9, 0))
    key, text = layout.manifest("r", "sft", 9), manifest(9, 0)
    parent = Parent(key=key, sha256=hashlib.sha256(text).hexdigest())
    second = first.model_copy(update={"phase": "dpo", "parent": parent})
    store.put_bytes(key, text)
    store.put_bytes(layout.manifest("r", "dpo", 9), second.model_dump_json().encode())
    assert [each.phase for _, each in newest_manifests(store, "r", ["sft", "dpo", "kto"])] == ["sft", "dpo"]
    store.put_bytes(key, manifest(9, 1))
    assert [each.phase for _, each in newest_manifests(store, "r", ["sft", "dpo"])] == ["sft"], "sft was trained again"
    store.delete(key)
    assert not list(newest_manifests(store, "r", ["sft", "dpo"]))


def test_a_manifest_that_cannot_be_read_is_the_callers_to_refuse(store: Store) -> None:
    store.put_bytes(KEY, b"{")
    assert newest_manifest(store, "r", "sft") == (KEY, b"{")


def test_a_claim_that_cannot_be_read_is_named(store: Store) -> None:
    with pytest.raises(ClaimError, match="number"):
        parse_claim(b'{"runner": "x", "at": 0}', "key")
    store.put_bytes(layout.claim("r", 1), b"{")
    with pytest.raises(ClaimError, match="claims/00000001"):
        newest_claim(store, "r")
