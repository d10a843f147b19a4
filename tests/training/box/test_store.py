"""The store against a real S3 server, over links that break."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.box.conftest import BUCKET, Weed
from tests.training.box.netfault import Link
from training.box import store as store_module
from training.box.store import Store, StoreConflict, StoreDenied, StoreError, StoreUnreachable

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


def test_an_upload_is_counted_acknowledged_and_not_sent_twice(store: Store, blob: Blob) -> None:
    path, sha256 = blob(17 * MB)
    seen: list[int] = []
    assert store.upload_file(path, "up/whole", sha256=sha256, progress=lambda done, total: seen.append(done)) == 17 * MB
    assert seen == sorted(seen) and seen[-1] == 17 * MB and len(seen) == 3
    assert hashlib.sha256(store.get_bytes("up/whole") or b"").hexdigest() == sha256
    assert store.upload_file(path, "up/whole", sha256=sha256) == 0


@pytest.mark.parametrize("size", [0, 1, 5 * MB])
def test_small_files_go_whole(store: Store, blob: Blob, size: int, tmp_path: Path) -> None:
    path, sha256 = blob(size)
    store.upload_file(path, f"up/{size}", sha256=sha256)
    store.download_file(f"up/{size}", tmp_path / "back", expect_bytes=size, expect_sha256=sha256)
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


def test_a_killed_upload_goes_on_and_sends_at_most_the_parts_in_flight_again(
    weed: Weed, link: Link, store: Store, blob: Blob
) -> None:
    path, sha256 = blob(24 * MB)
    link.up_bps = 6e6
    code = (
        "import sys, pathlib; from training.box.store import Store\n"
        f"Store.from_environment('{BUCKET}').upload_file(pathlib.Path({str(path)!r}), 'up/killed', sha256={sha256!r},"
        f" part_bytes={5 * MB}, workers=1, progress=lambda d, t: print(d, flush=True))"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, **weed.environ(link.port)}, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    acknowledged = [int(child.stdout.readline()) for _ in range(2)][-1]
    time.sleep(0.3)  # into the next part
    child.kill()
    child.wait()
    link.up_bps, before = None, link.bytes_up
    sent = weed.store(link.port).upload_file(path, "up/killed", sha256=sha256, part_bytes=5 * MB, workers=1)
    assert sent == 24 * MB - acknowledged == 14 * MB
    assert link.bytes_up - before <= sent + 5 * MB
    assert store.size("up/killed") == 24 * MB
    assert store.abort_uploads("up/killed") == 0


def test_a_part_that_differs_from_the_file_is_sent_again(store: Store, blob: Blob) -> None:
    path, sha256 = blob(11 * MB)
    upload = store._client.create_multipart_upload(Bucket=store.bucket, Key="up/stale")["UploadId"]
    store._client.upload_part(
        Bucket=store.bucket, Key="up/stale", UploadId=upload, PartNumber=1, Body=os.urandom(5 * MB)
    )
    with pytest.raises(StoreError, match="does not hold what was sent"):
        # The half-done upload of a stranger carries no sha256: what it makes is not believed.
        store.upload_file(path, "up/stale", sha256=sha256, part_bytes=5 * MB)
    assert store.upload_file(path, "up/stale", sha256=sha256, part_bytes=5 * MB) == 11 * MB


def test_an_upload_survives_resets_and_refusals(weed: Weed, link: Link, blob: Blob) -> None:
    path, sha256 = blob(12 * MB)
    link.up_bps = 6e6

    def trouble() -> None:
        time.sleep(0.4)
        link.reset()
        time.sleep(0.4)
        link.refuse()
        link.reset()
        time.sleep(0.5)
        link.accept()

    thread = threading.Thread(target=trouble)
    thread.start()
    weed.store(link.port).upload_file(path, "up/trouble", sha256=sha256, part_bytes=5 * MB, workers=2)
    thread.join()
    assert weed.store().size("up/trouble") == 12 * MB


def test_a_frozen_uplink_is_noticed_within_the_stall_time(
    weed: Weed, link: Link, blob: Blob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_pause", lambda attempt: 0.0)
    path, sha256 = blob(12 * MB)
    link.up_bps = 4e6
    threading.Timer(0.5, link.freeze).start()
    began = time.monotonic()
    with pytest.raises(StoreUnreachable, match="does not answer"):
        weed.store(link.port, stall_s=0.5).upload_file(path, "up/frozen", sha256=sha256, part_bytes=5 * MB, workers=1)
    assert time.monotonic() - began < 15


def test_bytes_that_the_socket_took_tell_a_slow_link_from_a_dead_one(weed: Weed, link: Link, blob: Blob) -> None:
    path, sha256 = blob(2 * MB)
    link.up_bps = 1e6
    moved: list[tuple[float, int]] = []
    weed.store(link.port).upload_file(
        path, "up/slow", sha256=sha256, moved=lambda n: moved.append((time.monotonic(), n))
    )
    assert sum(count for _, count in moved) == 2 * MB
    gaps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(moved)]
    assert max(gaps) < 1.5


def test_an_interrupted_download_continues_where_it_was(weed: Weed, link: Link, blob: Blob, tmp_path: Path) -> None:
    path, sha256 = blob(20 * MB)
    weed.store().upload_file(path, "down/big", sha256=sha256)
    threading.Timer(0.05, link.reset).start()
    cut: list[int] = []

    def progress(done: int, total: int) -> None:
        if done > 8 * MB and not cut:
            cut.append(done)
            link.reset()

    weed.store(link.port).download_file("down/big", tmp_path / "big", progress=progress, expect_sha256=sha256)
    assert cut and hashlib.sha256((tmp_path / "big").read_bytes()).hexdigest() == sha256
    assert link.bytes_down < 32 * MB
    assert not list(tmp_path.glob("*.part"))


def test_a_corrupted_download_is_refused_and_not_kept(weed: Weed, link: Link, blob: Blob, tmp_path: Path) -> None:
    path, sha256 = blob(1 * MB)
    weed.store().upload_file(path, "down/damaged", sha256=sha256)
    link.flip_down_byte_at = 500_000
    with pytest.raises(StoreError, match="sha256 of what arrived is"):
        weed.store(link.port).download_file("down/damaged", tmp_path / "d")
    assert not list(tmp_path.glob("d*"))
    weed.store(link.port).download_file("down/damaged", tmp_path / "d")
    assert (tmp_path / "d").read_bytes() == path.read_bytes()


def test_an_object_of_another_size_or_content_is_refused(store: Store, tmp_path: Path) -> None:
    store.put_bytes("down/small", b"12345")
    with pytest.raises(StoreError, match="has 5 bytes, want 6"):
        store.download_file("down/small", tmp_path / "s", expect_bytes=6)
    with pytest.raises(StoreError, match="want 000000000000"):
        store.download_file("down/small", tmp_path / "s", expect_sha256="0" * 64)
    with pytest.raises(StoreError, match="down/none does not exist"):
        store.download_file("down/none", tmp_path / "s")


def test_a_full_disk_is_not_called_a_bucket_that_does_not_answer(store: Store, tmp_path: Path) -> None:
    store.put_bytes("down/full", b"12345")
    etag = hashlib.md5(b"12345").hexdigest()
    (tmp_path / f"f.{etag[:16]}.part").symlink_to("/dev/full")
    with pytest.raises(StoreError, match="this machine's disk failed: No space left") as caught:
        store.download_file("down/full", tmp_path / "f")
    assert not isinstance(caught.value, StoreUnreachable)
