from __future__ import annotations

import logging

import pytest
from pydantic import SecretStr

from tasks.log import guard_secrets, redact
from tasks.settings import Settings


@pytest.fixture(autouse=True)
def _guarded() -> None:
    guard_secrets(
        Settings(
            market_api_key=SecretStr("vast-key-0123456789"),
            bucket="b",
            s3_region="eu-central-1",
            s3_access_key_id="i",
            s3_secret_access_key=SecretStr("s3-secret/abc"),
            box_s3_access_key_id="i",
            box_s3_secret_access_key=SecretStr("box-secret/def"),
        )
    )


def test_a_known_secret_never_reaches_a_handler(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("anybody").warning("key %s failed: %s", "vast-key-0123456789", {"secret": "s3-secret/abc"})
    assert "vast-key" not in caplog.text and "s3-secret" not in caplog.text
    assert caplog.text.count("[secret]") == 2


@pytest.mark.parametrize("text", ["token hf_" + "a" * 30, "id AKIA" + "A" * 16, "Authorization: Bearer " + "x1" * 12])
def test_what_looks_like_a_secret_is_replaced_too(text: str) -> None:
    assert "[secret]" in redact(text)


def test_an_innocent_text_is_left_alone() -> None:
    assert redact("offer 24001001: uplink 61 Mbps") == "offer 24001001: uplink 61 Mbps"
