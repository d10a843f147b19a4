"""What a store says of an expired key, a wrong clock and a changed object, and how an interrupted upload goes on; against a real S3 server."""

from __future__ import annotations

import datetime
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import botocore.auth
import pytest
from botocore.exceptions import ClientError

from tests.training.box.conftest import BUCKET, Weed
from tests.training.box.netfault import Link
from training.box import store as store_module
from training.box.store import MachineFault, Store, StoreConflict, StoreDenied, StoreError, StoreUnreachable

MB = 1 << 20
Blob = Callable[[int], tuple[Path, str]]


def test_a_clock_an_hour_off_is_this_machines_fault_and_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signer's clock, which botocore reads through this function."""
    now = botocore.auth.get_current_datetime

    def late(remove_tzinfo: bool = True) -> datetime.datetime:
        return now(remove_tzinfo) + datetime.timedelta(hours=1)

    monkeypatch.setattr(botocore.auth, "get_current_datetime", late)
    with pytest.raises(MachineFault, match=r"clock is more than 15 minutes wrong; set it, or take another machine"):
        store.put_bytes("clock/a", b"x")


@pytest.mark.parametrize("code", ["ExpiredToken", "TokenRefreshRequired"])
def test_an_expired_key_is_named_as_what_it_is(store: Store, code: str) -> None:
    """No server on loopback hands out temporary keys; the answer is S3's own."""
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    told = store._told("write", "k", ClientError(answer, "PutObject"))
    assert isinstance(told, StoreDenied) and "temporary key has expired" in str(told)


def in_s(seconds: float) -> str:
    return (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)).isoformat()


def private_env(path: Path, weed: Weed, secret: str, until: str) -> dict[str, str]:
    variables = {**weed.environ(), "AWS_SECRET_ACCESS_KEY": secret, "AWS_CREDENTIAL_EXPIRATION": until}
    path.write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
    return {**variables, "LIVERY_PRIVATE_ENV": str(path)}


def test_a_key_that_expires_is_read_again_from_the_private_file(weed: Weed, tmp_path: Path) -> None:
    path = tmp_path / "private.env"
    environ = private_env(path, weed, "of-yesterday", in_s(60))
    store = Store.from_environment(BUCKET, environ)
    private_env(path, weed, weed.secret_access_key, in_s(7200))
    store.put_bytes("renewed/a", b"x")
    assert store.get_bytes("renewed/a") == b"x"


def test_a_key_that_nobody_renewed_is_named_with_its_hour(weed: Weed, tmp_path: Path) -> None:
    path = tmp_path / "private.env"
    until = in_s(-5)
    store = Store.from_environment(BUCKET, private_env(path, weed, weed.secret_access_key, until))
    with pytest.raises(
        StoreDenied, match=r"temporary key has expired: private\.env holds one that was good until"
    ) as caught:
        store.check()
    assert until in str(caught.value) and weed.secret_access_key not in str(caught.value)


def test_an_object_that_changed_meanwhile_is_not_replaced(store: Store) -> None:
    store.put_bytes("swap/a", b"1")
    seen = store.version("swap/a")
    assert seen is not None and store.version("swap/none") is None
    store.put_bytes("swap/a", b"2", replaces=seen)
    store.put_bytes("swap/a", b"2", replaces=seen)  # the same once more: its reply may have been lost
    with pytest.raises(StoreConflict):
        store.put_bytes("swap/a", b"3", replaces=seen)
    assert store.get_bytes("swap/a") == b"2"


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


def test_on_a_line_that_one_connection_fills_at_most_one_part_is_sent_twice(weed: Weed, link: Link, blob: Blob) -> None:
    """Four connections are allowed; what is in flight on them would all be lost."""
    path, sha256 = blob(40 * MB)
    link.up_bps = 8e6
    before = killed_upload(weed, link, path, "width/a", sha256, 20 * MB, 5 * MB)
    link.accept()
    link.up_bps = None
    sent = weed.store(link.port).upload_file(path, "width/a", sha256=sha256, part_bytes=5 * MB)
    assert sent <= 40 * MB - before
    assert link.bytes_up <= 40 * MB + 2 * 5 * MB, (
        "one part more than the file, and one for a second look at more connections"
    )
    assert weed.store().abort_uploads("width/a") == 0


def test_an_upload_goes_on_in_parts_of_the_size_that_arrived(weed: Weed, link: Link, blob: Blob) -> None:
    path, sha256 = blob(30 * MB)
    before = killed_upload(weed, link, path, "parts/a", sha256, 12 * MB, 6 * MB)
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


def test_the_line_is_counted_by_what_came_over_it(store: Store, blob: Blob, tmp_path: Path) -> None:
    path, sha256 = blob(3 * MB)
    store.upload_file(path, "moved/a", sha256=sha256)
    moved: list[int] = []
    store.download_file("moved/a", tmp_path / "a", moved=moved.append)
    assert sum(moved) == 3 * MB


def test_an_empty_object_where_a_file_was_promised_is_named(store: Store, tmp_path: Path) -> None:
    store.put_bytes("empty/a", b"")
    with pytest.raises(StoreError, match="empty/a has 0 bytes, want 5"):
        store.download_file("empty/a", tmp_path / "a", expect_bytes=5)
    assert not list(tmp_path.glob("a*"))


def test_hashing_tells_that_it_goes_on(tmp_path: Path) -> None:
    from training.box.store import sha256_of

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
