"""The store against a real S3 server, over links that break."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.box.conftest import Weed
from tests.training.box.netfault import Link
from training.box import store as store_module
from training.box.store import (
    Store,
    StoreConflict,
    StoreDenied,
    StoreError,
    StoreUnreachable,
    sha256_of,
)

MB = 1 << 20
Blob = Callable[[int], tuple[Path, str]]


def test_small_objects_are_written_read_listed_and_deleted(store: Store) -> None:
    store.put_bytes("small/a.json", b"{}")
    store.put_bytes("small/b.json", b"[1]")
    assert store.get_bytes("small/b.json") == b"[1]"
    assert store.size("small/b.json") == 3
    assert [(item.key, item.size) for item in store.list("small/")] == [("small/a.json", 2), ("small/b.json", 3)]
    store.delete("small/a.json")
    assert store.get_bytes("small/a.json") is None and store.size("small/a.json") is None


def test_a_list_returns_all_pages(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(7):
        store.put_bytes(f"pages/{number}", b"x")
    page = store._client.list_objects_v2
    monkeypatch.setattr(store._client, "list_objects_v2", lambda **kw: page(MaxKeys=3, **kw))
    assert len(store.list("pages/")) == 7


def test_create_only_has_one_winner_of_eight(store: Store) -> None:
    outcomes: list[str] = []

    def race(number: int) -> None:
        try:
            store.put_bytes("race/one", f"writer {number}".encode(), create_only=True)
            outcomes.append("won")
        except StoreConflict:
            outcomes.append("lost")

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(outcomes) == ["lost"] * 7 + ["won"]


def test_create_only_of_the_same_content_is_no_conflict_because_a_reply_may_have_been_lost(store: Store) -> None:
    store.put_bytes("again/one", b"same", create_only=True)
    store.put_bytes("again/one", b"same", create_only=True)


def test_a_missing_bucket_is_never_read_as_a_missing_key(weed: Weed) -> None:
    elsewhere = weed.store(bucket="no-such-bucket")
    for question in (elsewhere.check, lambda: elsewhere.get_bytes("k"), lambda: elsewhere.size("k")):
        with pytest.raises(StoreError, match=r"'no-such-bucket' at .* does not exist"):
            question()


def test_a_bad_key_is_denied_in_a_sentence_without_the_key(weed: Weed) -> None:
    wrong = "wrong-" + "s" * 34
    bad = weed.store(secret=wrong)
    for question in (bad.check, lambda: bad.get_bytes("k"), lambda: bad.size("k"), lambda: bad.put_bytes("k", b"")):
        with pytest.raises(StoreDenied) as caught:
            question()
        text = str(caught.value)
        assert "check the access key" in text and wrong not in text and weed.access_key_id not in text


def test_nobody_at_the_address_is_unreachable_within_seconds(weed: Weed) -> None:
    began = time.monotonic()
    with pytest.raises(StoreUnreachable, match="does not answer"):
        weed.store(port=1).check()
    assert time.monotonic() - began < 5


def test_missing_variables_are_named() -> None:
    with pytest.raises(StoreError, match="AWS_SECRET_ACCESS_KEY not set"):
        Store.from_environment("b", {"AWS_ACCESS_KEY_ID": "x"})


def test_server_time_is_the_servers_even_when_it_refuses(weed: Weed) -> None:
    assert abs(weed.store().server_time() - time.time()) < 3
    assert abs(weed.store(secret="x" * 40).server_time() - time.time()) < 3


def test_an_object_that_changed_meanwhile_is_not_replaced(store: Store) -> None:
    store.put_bytes("swap/a", b"1")
    seen = store.version("swap/a")
    assert seen is not None and store.version("swap/none") is None
    store.put_bytes("swap/a", b"2", replaces=seen)
    store.put_bytes("swap/a", b"2", replaces=seen)  # the same once more: its reply may have been lost
    with pytest.raises(StoreConflict):
        store.put_bytes("swap/a", b"3", replaces=seen)
    assert store.get_bytes("swap/a") == b"2"


def test_hashing_tells_that_it_goes_on(tmp_path: Path) -> None:

    (tmp_path / "a").write_bytes(os.urandom(3 * MB))
    blocks: list[int] = []
    assert sha256_of(tmp_path / "a", blocks.append) == hashlib.sha256((tmp_path / "a").read_bytes()).hexdigest()
    assert sum(blocks) == 3 * MB and len(blocks) == 3


@pytest.mark.parametrize("piece", [1 << 30, 5 * MB])
def test_a_copy_inside_the_bucket_moves_nothing_over_the_line(
    weed: Weed, link: Link, blob: Blob, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(store_module, "COPY_BYTES", piece)
    path, sha256 = blob(12 * MB)
    weed.store().upload_file(path, f"copy/{piece}", sha256=sha256)
    assert weed.store(link.port).copy(f"copy/{piece}", f"copied/{piece}", sha256=sha256) == 12 * MB
    assert link.bytes_up + link.bytes_down < MB
    copied = weed.store().get_bytes(f"copied/{piece}") or b""
    assert hashlib.sha256(copied).hexdigest() == sha256
    assert weed.store().upload_file(path, f"copied/{piece}", sha256=sha256) == 0, "its digest went along"
    with pytest.raises(StoreError, match="copy/none does not exist"):
        weed.store().copy("copy/none", "copied/none", sha256=sha256)
