"""The bucket configured by a prefect-aws block: read from a real Prefect server, used on the real bucket."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from deployments.rehearsal.bucket import REGION, Bucket
from tasks import s3_block
from tasks.box_keys import issue
from tasks.errors import UserError
from tasks.s3_block import with_block
from tasks.stores import checked_store, open_store, private_env
from tests.tasks.pretend import Pretend, recipe
from training.box.store import Store

ROOT = Path(__file__).parents[2]
NOTHING = {"bucket": "", "s3_access_key_id": "", "s3_secret_access_key": "", "s3_region": ""}


@pytest.fixture
def prefect(prefect_api: str) -> Iterator[str]:
    with temporary_settings({PREFECT_API_URL: prefect_api}):
        yield prefect_api


@pytest.fixture(autouse=True)
def read_afresh() -> Iterator[None]:
    s3_block._read.cache_clear()
    yield
    s3_block._read.cache_clear()


def aws(bucket: Bucket, **changes: Any) -> Any:
    from prefect_aws import AwsCredentials
    from prefect_aws.client_parameters import AwsClientParameters

    given = {
        "aws_access_key_id": bucket.control.access_key_id,
        "aws_secret_access_key": bucket.control.secret_access_key,
        "region_name": REGION,
        "aws_client_parameters": AwsClientParameters(endpoint_url=bucket.endpoint_url),
    }
    return AwsCredentials(**{**given, **changes})


def minio(bucket: Bucket) -> Any:
    from prefect_aws import MinIOCredentials
    from prefect_aws.client_parameters import AwsClientParameters

    return MinIOCredentials(
        minio_root_user=bucket.control.access_key_id,
        minio_root_password=bucket.control.secret_access_key,
        aws_client_parameters=AwsClientParameters(endpoint_url=bucket.endpoint_url),
    )


def saved(name: str, bucket_name: str, credentials: Any, **more: Any) -> str:
    from prefect_aws import S3Bucket

    S3Bucket(bucket_name=bucket_name, credentials=credentials, **more).save(name, overwrite=True, _sync=True)
    return f"s3-bucket/{name}"


@pytest.mark.parametrize("kind", ["aws", "minio"])
def test_a_block_gives_the_bucket_its_endpoint_and_its_key(
    kind: str, prefect: str, store: Store, bucket_server: Bucket, pretend: Pretend, tmp_path: Path
) -> None:
    block = saved(kind, store.bucket, aws(bucket_server) if kind == "aws" else minio(bucket_server))
    settings = pretend.settings(tmp_path, s3_block=block, **NOTHING)
    store.put_bytes("word", b"through a block")
    assert checked_store(settings).get_bytes("word") == b"through a block"
    found = with_block(settings)
    assert (found.bucket, found.s3_endpoint_url) == (store.bucket, bucket_server.endpoint_url)
    secret = bucket_server.control.secret_access_key
    assert secret not in repr(found)
    assert secret not in str(private_env(found, issue(found, recipe(), lambda: 0.0))), "it stays on this side"


def test_what_is_wrong_with_a_block_is_told_by_its_name(
    prefect: str, bucket_server: Bucket, pretend: Pretend, tmp_path: Path
) -> None:
    wrong = {
        "no-key": (aws(bucket_server, aws_access_key_id=None), {}, "seen AwsCredentials with no access key"),
        "no-secret": (aws(bucket_server, aws_secret_access_key=None), {}, "with no secret"),
        "a-folder": (aws(bucket_server), {"bucket_folder": "team"}, "seen bucket_folder 'team', want none"),
        "no-region": (
            aws(bucket_server, region_name=None, aws_client_parameters={}),
            {},
            "want the bucket's region",
        ),
    }
    for name, (credentials, more, said) in wrong.items():
        block = saved(name, "b", credentials, **more)
        with pytest.raises(UserError, match=f"LIVERY_S3_BLOCK={block}: .*{said}"):
            open_store(pretend.settings(tmp_path, s3_block=block, **NOTHING))
    with pytest.raises(
        UserError, match=r"LIVERY_S3_BLOCK=s3-bucket/nobodys: the block cannot be read \(ValueError: .*nobodys"
    ):
        open_store(pretend.settings(tmp_path, s3_block="s3-bucket/nobodys", **NOTHING))


def test_a_block_and_settings_that_name_two_buckets_are_refused(
    prefect: str, bucket_server: Bucket, pretend: Pretend, tmp_path: Path
) -> None:
    block = saved("one", "one", aws(bucket_server))
    with pytest.raises(UserError, match=r"has bucket 'one' and LIVERY_BUCKET is 'another'; want the same"):
        open_store(pretend.settings(tmp_path, "another", s3_block=block))


def test_a_block_that_was_read_stands_when_prefect_goes(
    prefect: str, store: Store, bucket_server: Bucket, pretend: Pretend, tmp_path: Path
) -> None:
    settings = pretend.settings(tmp_path, s3_block=saved("early", store.bucket, aws(bucket_server)), **NOTHING)
    with_block(settings)
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        checked_store(settings)


def test_while_prefect_is_down_the_settings_beside_the_block_are_used_and_that_is_said(
    store: Store, bucket_server: Bucket, pretend: Pretend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = {
        "s3_endpoint_url": bucket_server.endpoint_url,
        "s3_access_key_id": bucket_server.control.access_key_id,
        "s3_secret_access_key": bucket_server.control.secret_access_key,
    }
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        checked_store(pretend.settings(tmp_path, store.bucket, s3_block="s3-bucket/x", **own))
        assert "the block cannot be read (ConnectError" in caplog.text
        assert "LIVERY_BUCKET and LIVERY_S3_* are used instead" in caplog.text
        with pytest.raises(
            UserError, match=r"want a block that can be read, or LIVERY_BUCKET and LIVERY_S3_\* beside it"
        ):
            open_store(pretend.settings(tmp_path, s3_block="s3-bucket/x", **NOTHING))


def test_the_reaper_needs_no_prefect_for_plain_settings(environment: dict[str, str], tmp_path: Path) -> None:
    """Neither its server nor its import: the modules that open the bucket are there without it."""
    program = "import sys; from tasks.settings import read_settings; from tasks.stores import checked_store; "
    program += "checked_store(read_settings()); import tasks.reap; sys.exit('prefect' in sys.modules)"
    environ = {**environment, "PATH": "/usr/bin:/bin", "PREFECT_API_URL": "http://127.0.0.1:9/api"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
