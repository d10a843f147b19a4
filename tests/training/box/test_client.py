"""A key that is renewed while the store is in use; against a real S3 server."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.box.conftest import BUCKET, Weed
from training.box.store import (
    Store,
    StoreDenied,
)

MB = 1 << 20
Blob = Callable[[int], tuple[Path, str]]


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
