"""What a bucket's refusals mean: by a real S3 server, and by S3's own answers where no server on loopback gives them."""

from __future__ import annotations

import datetime
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import botocore.auth
import pytest
from botocore.exceptions import ClientError

from training.box.store import (
    MachineFault,
    Store,
    StoreDenied,
)
from training.box.store_errors import NoBucket, told

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
    with pytest.raises(MachineFault, match="clock is more than 15 minutes wrong"):
        store.size("clock/a")  # a HEAD, whose refusal does not say why


@pytest.mark.parametrize("code", ["ExpiredToken", "TokenRefreshRequired"])
def test_an_expired_key_is_named_as_what_it_is(code: str) -> None:
    """No server on loopback hands out temporary keys; the answer is S3's own."""
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    found = told("bucket 'b'", "write", "k", ClientError(answer, "PutObject"))
    assert isinstance(found, StoreDenied) and "temporary key has expired" in str(found)


class Refusing(http.server.BaseHTTPRequestHandler):
    """Refuses as S3 does: with an XML that says why, which the reply to a HEAD has not."""

    def do_GET(self) -> None:
        # botocore asks the bucket itself for its region when a HEAD is answered 400.
        code, status = self.path.split("/")[2].split("-") if self.path.count("/") > 1 else ("AccessDenied", "403")
        body = f"<Error><Code>{code}</Code><Message>AKIAEXAMPLE</Message></Error>".encode()
        self.send_response(int(status))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def refusing() -> Iterator[Store]:
    """Its objects are called CODE-STATUS, and are refused so."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Store(
            "bucket",
            endpoint_url=f"http://127.0.0.1:{server.server_port}",
            region="us-east-1",
            access_key_id="a",
            secret_access_key="b",
        )
        server.shutdown()


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        ("ExpiredToken-400", StoreDenied, "the temporary key has expired"),
        ("RequestTimeTooSkewed-403", MachineFault, "clock is more than 15 minutes wrong"),
        ("AccessDenied-403", StoreDenied, "check the access key"),
        ("NoSuchBucket-404", NoBucket, "does not exist; create it"),
    ],
)
def test_an_upload_that_begins_with_a_head_still_says_why_it_is_refused(
    refusing: Store, tmp_path: Path, answer: str, error: type[Exception], words: str
) -> None:
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(error, match=words) as caught:
        refusing.upload_file(tmp_path / "a", answer, sha256="0" * 64)
    assert "AKIAEXAMPLE" not in str(caught.value)
    with pytest.raises(error, match=words):
        refusing.download_file(answer, tmp_path / "b")
