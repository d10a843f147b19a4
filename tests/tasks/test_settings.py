from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from tasks.errors import UserError
from tasks.settings import Settings, read_settings

ROOT = Path(__file__).parents[2]
NEEDED = {
    "LIVERY_MARKET_API_KEY": "market-secret-1",
    "LIVERY_BUCKET": "b",
    "LIVERY_S3_REGION": "eu-central-1",
    "LIVERY_S3_ACCESS_KEY_ID": "id",
    "LIVERY_S3_SECRET_ACCESS_KEY": "bucket-secret-2",
    "LIVERY_BOX_S3_ACCESS_KEY_ID": "id2",
    "LIVERY_BOX_S3_SECRET_ACCESS_KEY": "box-secret-3",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.chdir(tmp_path)
    for name in list(__import__("os").environ):
        if name.startswith("LIVERY_"):
            monkeypatch.delenv(name)
    for name, value in NEEDED.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize("value", ["0", "false", "no", "off", "", "False", "NO"])
def test_a_keep_flag_that_says_no_destroys(environment: pytest.MonkeyPatch, value: str) -> None:
    environment.setenv("LIVERY_KEEP_BOX", value)
    assert read_settings().keep_box is False


@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "True"])
def test_only_a_true_value_keeps(environment: pytest.MonkeyPatch, value: str) -> None:
    environment.setenv("LIVERY_KEEP_BOX", value)
    assert read_settings().keep_box is True


def test_a_flag_that_says_neither_is_an_error_and_not_a_yes(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("LIVERY_KEEP_BOX", "maybe")
    with pytest.raises(UserError, match="LIVERY_KEEP_BOX"):
        read_settings()


def test_each_missing_setting_is_named_and_no_secret_is_shown(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("LIVERY_BUCKET")
    environment.setenv("LIVERY_MARKET_URL", "http://example.com")
    with pytest.raises(UserError) as caught:
        read_settings()
    assert "LIVERY_BUCKET: is not set" in str(caught.value)
    assert "LIVERY_MARKET_URL: want https://" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_bucket_on_aws_without_a_region_is_refused_for_boxes_are_rented_near_it(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.delenv("LIVERY_S3_REGION")
    with pytest.raises(UserError, match=r"LIVERY_S3_REGION: is not set; want the region of the bucket"):
        read_settings()


def test_a_bucket_elsewhere_may_have_no_region(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("LIVERY_S3_REGION", "")
    environment.setenv("LIVERY_S3_ENDPOINT_URL", "https://bucket.example.com")
    read = read_settings()
    assert (read.s3_region, read.signing_region) == ("", "us-east-1")


def test_secrets_do_not_show_when_printed(environment: pytest.MonkeyPatch) -> None:
    assert not re.search("market-secret-1|bucket-secret-2|box-secret-3", repr(read_settings()))


def test_every_setting_is_described_in_the_example_with_its_default_and_nothing_else_is() -> None:
    text = (ROOT / ".env.example").read_text()
    described = dict(re.findall(r"^LIVERY_([A-Z0-9_]+)=(.*)$", text, re.M))
    assert {name.lower() for name in described} == set(Settings.model_fields)
    for name, value in described.items():
        default = Settings.model_fields[name.lower()].default
        if value and not isinstance(default, bool):
            same = float(default) == float(value) if isinstance(default, (int, float)) else str(default) == value
            assert same, name


def test_every_setting_in_the_example_has_its_meaning_above_it() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    bare = [
        line
        for above, line in itertools.pairwise(lines)
        if line.startswith("LIVERY_") and not above.startswith(("#", "LIVERY_"))
    ]
    assert not bare


@pytest.mark.parametrize(("name", "value"), [("LIVERY_LEASE_S", "100"), ("LIVERY_LEASE_RENEW_S", "900")])
def test_a_lease_that_one_lost_renewal_ends_is_refused(environment: pytest.MonkeyPatch, name: str, value: str) -> None:
    environment.setenv(name, value)
    with pytest.raises(UserError, match=r"LIVERY_LEASE_RENEW_S: seen .* want at most a third"):
        read_settings()


@pytest.mark.parametrize("url", ["http://127.0.0.1.example.com", "http://localhost.example.com", "http://example.com"])
def test_a_key_never_travels_in_plain_text_to_a_host_that_only_looks_like_loopback(
    environment: pytest.MonkeyPatch, url: str
) -> None:
    environment.setenv("LIVERY_MARKET_URL", url)
    with pytest.raises(UserError, match="LIVERY_MARKET_URL: want https://"):
        read_settings()


@pytest.mark.parametrize("value", ["", None])
def test_a_market_without_its_key_is_refused(environment: pytest.MonkeyPatch, value: str | None) -> None:
    environment.setenv("LIVERY_MARKET_API_KEY", value) if value is not None else environment.delenv(
        "LIVERY_MARKET_API_KEY"
    )
    with pytest.raises(UserError, match="LIVERY_MARKET_API_KEY: is not set"):
        read_settings()


def test_a_box_of_ones_own_needs_an_address_and_a_key_file_and_no_market_key(environment: pytest.MonkeyPatch) -> None:
    environment.delenv("LIVERY_MARKET_API_KEY")
    environment.setenv("LIVERY_MARKET", "ssh_host")
    environment.setenv("LIVERY_SSH_KEY_PATH", "")
    with pytest.raises(UserError) as caught:
        read_settings()
    assert "LIVERY_SSH_HOST: is not set" in str(caught.value)
    assert "LIVERY_SSH_KEY_PATH: is not set" in str(caught.value)
    environment.setenv("LIVERY_SSH_HOST", "gpu.example.com")
    environment.setenv("LIVERY_SSH_KEY_PATH", "~/.ssh/id_ed25519")
    assert read_settings().ssh_port == 22


def test_a_dead_man_that_a_few_lost_renewals_set_off_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("LIVERY_DEADMAN_SILENT_S", "299")
    with pytest.raises(
        UserError, match="LIVERY_DEADMAN_SILENT_S: seen 299 with LIVERY_LEASE_RENEW_S=60; want at least"
    ):
        read_settings()
    environment.setenv("LIVERY_DEADMAN_SILENT_S", "300")
    assert read_settings().deadman_silent_s == 300


def test_a_bucket_by_its_block_needs_no_other_setting_of_it(environment: pytest.MonkeyPatch) -> None:
    for name in ("BUCKET", "S3_REGION", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"):
        environment.delenv(f"LIVERY_{name}")
    environment.setenv("LIVERY_S3_BLOCK", "s3-bucket/mine")
    assert read_settings().bucket == ""
    environment.setenv("LIVERY_S3_BLOCK", "mine")
    with pytest.raises(UserError, match="LIVERY_S3_BLOCK: "):
        read_settings()


def test_a_box_key_that_is_asked_for_needs_no_static_one_but_a_role_needs_its_name(
    environment: pytest.MonkeyPatch,
) -> None:
    environment.delenv("LIVERY_BOX_S3_ACCESS_KEY_ID")
    environment.delenv("LIVERY_BOX_S3_SECRET_ACCESS_KEY")
    with pytest.raises(UserError, match="LIVERY_BOX_S3_ACCESS_KEY_ID: is not set"):
        read_settings()
    environment.setenv("LIVERY_BOX_S3_CREDENTIALS", "federation")
    assert read_settings().box_s3_session_s == 3600
    environment.setenv("LIVERY_BOX_S3_CREDENTIALS", "role")
    with pytest.raises(UserError, match="LIVERY_BOX_S3_ROLE_ARN: is not set"):
        read_settings()
