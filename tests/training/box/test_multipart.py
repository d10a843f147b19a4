"""Large files on their way up to a real S3 server, over links that break, and what a kill costs."""

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
from training.box.multipart import MIN_PIECE_BYTES, PART_BYTES, pieces_of
from training.box.store import Store, StoreError, StoreUnreachable

MB = 1 << 20
Blob = Callable[[int], tuple[Path, str]]


def test_an_upload_is_counted_acknowledged_and_not_sent_twice(store: Store, blob: Blob) -> None:
    path, sha256 = blob(17 * MB)
    seen: list[int] = []
    assert store.upload_file(path, "up/whole", sha256=sha256, progress=lambda done, total: seen.append(done)) == 17 * MB
    assert seen == sorted(seen) and seen[-1] == 17 * MB and len(seen) == 4
    assert hashlib.sha256(store.get_bytes("up/whole") or b"").hexdigest() == sha256
    assert store.upload_file(path, "up/whole", sha256=sha256) == 0


@pytest.mark.parametrize("size", [0, 1, 5 * MB])
def test_small_files_go_whole(store: Store, blob: Blob, size: int, tmp_path: Path) -> None:
    path, sha256 = blob(size)
    store.upload_file(path, f"up/{size}", sha256=sha256)
    store.download_file(f"up/{size}", tmp_path / "back", expect_bytes=size, expect_sha256=sha256)
    assert (tmp_path / "back").read_bytes() == path.read_bytes()


SEND = "import sys, pathlib; from training.box.store import Store\nStore.from_environment({bucket!r}).upload_file(pathlib.Path({path!r}), {key!r}, sha256={sha256!r}, progress=lambda d, t: print(d, flush=True), **{options!r})"


def sigkilled(weed: Weed, link: Link, path: Path, key: str, sha256: str, after: int, **options: int) -> int:
    """An upload in a process of its own that is ended by SIGKILL a moment after `after` bytes were acknowledged; what was acknowledged."""
    code = SEND.format(bucket=BUCKET, path=str(path), key=key, sha256=sha256, options=options)
    environ = {**os.environ, **weed.environ(link.port)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        acknowledged = 0
        while acknowledged < after:
            acknowledged = int(child.stdout.readline())
        time.sleep(0.3)  # into the next pieces
        child.kill()
        return max([acknowledged, *(int(line) for line in child.stdout)])


def test_a_killed_upload_goes_on_and_sends_one_part_again(weed: Weed, link: Link, store: Store, blob: Blob) -> None:
    path, sha256 = blob(24 * MB)
    link.up_bps = 6e6
    acknowledged = sigkilled(weed, link, path, "up/killed", sha256, 10 * MB, part_bytes=5 * MB, workers=1)
    link.up_bps = None
    sent = weed.store(link.port).upload_file(path, "up/killed", sha256=sha256, part_bytes=5 * MB, workers=1)
    assert sent <= 24 * MB - acknowledged
    assert link.bytes_up <= 24 * MB + 5 * MB + MB
    assert store.size("up/killed") == 24 * MB
    assert store.abort_uploads("up/killed") == 0


def test_whatever_the_number_of_connections_a_kill_costs_one_part_at_most(
    weed: Weed, link: Link, store: Store, blob: Blob
) -> None:
    """Counted on the line. Each connection is slow and four are allowed, so four are used; then the process is killed."""
    path, sha256 = blob(70 * MB)
    link.up_bps_each = 6e6
    acknowledged = sigkilled(weed, link, path, "up/wide", sha256, 40 * MB)
    assert link.connections >= 4, "else there is nothing to see"
    link.up_bps_each = None
    sent = weed.store(link.port).upload_file(path, "up/wide", sha256=sha256)
    assert 0 < sent <= 70 * MB - acknowledged
    twice = link.bytes_up - 70 * MB
    assert twice <= PART_BYTES + MB, f"{twice} bytes were sent twice"
    assert store.size("up/wide") == 70 * MB


@pytest.mark.parametrize("size", [1, 6 * MB, 7 * 10**9, 70 * 10**9, 4 * 10**12])
@pytest.mark.parametrize("part_bytes", [5 * MB, 8 * MB, PART_BYTES, 64 * MB])
@pytest.mark.parametrize("workers", [1, 2, 4, 16])
def test_pieces_under_way_are_together_no_more_than_a_part(size: int, part_bytes: int, workers: int) -> None:
    piece_bytes, abreast = pieces_of(size, part_bytes, workers)
    assert 1 <= abreast <= workers and piece_bytes >= MIN_PIECE_BYTES and -(-size // piece_bytes) <= 10_000
    assert abreast * piece_bytes <= max(part_bytes, piece_bytes)
    assert piece_bytes <= part_bytes or abreast == 1


def killed_upload(weed: Weed, link: Link, path: Path, key: str, sha256: str, after: int, part_bytes: int) -> int:
    """An upload over four connections whose link is cut for good once `after` bytes are acknowledged; what was acknowledged."""
    acknowledged = [0]

    def progress(done: int, total: int) -> None:
        acknowledged[0] = done
        if done >= after:
            link.refuse()
            link.reset()

    with pytest.raises(StoreUnreachable):
        weed.store(link.port).upload_file(path, key, sha256=sha256, part_bytes=part_bytes, progress=progress)
    return acknowledged[0]


def test_on_a_line_that_one_connection_fills_a_kill_costs_a_piece_or_two_of_a_part(
    weed: Weed, link: Link, blob: Blob
) -> None:
    """Four connections are allowed; what is in flight on them would all be lost."""
    path, sha256 = blob(40 * MB)
    link.up_bps = 8e6
    before = killed_upload(weed, link, path, "width/a", sha256, 20 * MB, 20 * MB)
    link.accept()
    link.up_bps = None
    sent = weed.store(link.port).upload_file(path, "width/a", sha256=sha256)
    assert sent <= 40 * MB - before
    assert link.bytes_up <= 40 * MB + 2 * 5 * MB, (
        "one piece more than the file, and one for a second look at more connections"
    )
    assert weed.store().abort_uploads("width/a") == 0


def test_an_upload_goes_on_in_pieces_of_the_size_that_arrived(weed: Weed, link: Link, blob: Blob) -> None:
    path, sha256 = blob(30 * MB)
    before = killed_upload(weed, link, path, "parts/a", sha256, 12 * MB, 24 * MB)
    link.accept()
    assert before >= 12 * MB
    assert weed.store().upload_file(path, "parts/a", sha256=sha256, part_bytes=5 * MB, workers=1) <= 30 * MB - before
    assert weed.store().size("parts/a") == 30 * MB


def test_a_reset_in_the_middle_of_a_part_costs_that_part_alone(weed: Weed, link: Link, blob: Blob) -> None:
    path, sha256 = blob(20 * MB)
    link.up_bps = 6e6
    threading.Timer(1.3, link.reset).start()
    sent = weed.store(link.port).upload_file(path, "reset/a", sha256=sha256, part_bytes=5 * MB, workers=1)
    assert sent == 20 * MB and link.bytes_up < 25.5 * MB


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
    monkeypatch.setattr(store_module, "pause_s", lambda attempt: 0.0)
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
