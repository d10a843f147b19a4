"""Fixtures over `pretend`, shared by the tests of tasks and of flows."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any

import boto3
import pytest

from deployments.rehearsal.bucket import REGION, Bucket
from tasks.market.vast import VastMarket
from tasks.settings import settings
from tests.tasks.pretend import Clock, Pretend, pretend_market
from training.box.store import Store

BUCKET = "test"


@pytest.fixture(scope="session")
def bucket_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    bucket = Bucket(tmp_path_factory.mktemp("weed"))
    bucket.start()
    try:
        bucket.wait_ready()
        yield bucket
    finally:
        bucket.stop(keep=False)


@pytest.fixture(scope="session")
def bucket_admin(bucket_server: Bucket) -> Any:
    keys = {
        "aws_access_key_id": bucket_server.control.access_key_id,
        "aws_secret_access_key": bucket_server.control.secret_access_key,
    }
    return boto3.client("s3", endpoint_url=bucket_server.endpoint_url, region_name=REGION, **keys)


@pytest.fixture(scope="session")
def whole_store(bucket_server: Bucket, bucket_admin: Any) -> Store:
    bucket_admin.create_bucket(Bucket=BUCKET)
    return Store(
        BUCKET,
        endpoint_url=bucket_server.endpoint_url,
        region=REGION,
        access_key_id=bucket_server.control.access_key_id,
        secret_access_key=bucket_server.control.secret_access_key,
    )


@pytest.fixture
def store(whole_store: Store, bucket_admin: Any) -> Iterator[Store]:
    """An empty bucket. The same one, emptied after each test: a new one waits for its first volume, and has room for so many."""
    yield copy(whole_store)  # a test may point its own somewhere else
    for page in bucket_admin.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        if found := page.get("Contents"):
            bucket_admin.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": item["Key"]} for item in found]})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pretend(clock: Clock) -> Iterator[Pretend]:
    """A market on a virtual clock, without rate limits."""
    with pretend_market(clock) as market:
        yield market


@pytest.fixture
def market(pretend: Pretend, tmp_path: Path) -> VastMarket:
    return pretend.client(tmp_path)


@pytest.fixture
def environment(
    pretend: Pretend, store: Store, bucket_server: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """All that a hook in a fresh process has: the environment."""
    values = {
        "LIVERY_MARKET_URL": pretend.url,
        "LIVERY_MARKET_API_KEY": pretend.market.account_key,
        "LIVERY_REAPER_API_KEY": pretend.market.reaper_key,
        "LIVERY_MARKET_PACE": "0.01",
        "LIVERY_BUCKET": store.bucket,
        "LIVERY_S3_ENDPOINT_URL": bucket_server.endpoint_url,
        "LIVERY_S3_REGION": REGION,
        "LIVERY_S3_ACCESS_KEY_ID": bucket_server.control.access_key_id,
        "LIVERY_S3_SECRET_ACCESS_KEY": bucket_server.control.secret_access_key,
        "LIVERY_BOX_S3_ACCESS_KEY_ID": bucket_server.box.access_key_id,
        "LIVERY_BOX_S3_SECRET_ACCESS_KEY": bucket_server.box.secret_access_key,
        "LIVERY_STATE_DIR": str(tmp_path / "state"),
        "LIVERY_POLL_S": "0.1",
    }
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    settings.cache_clear()
    yield values
    settings.cache_clear()
