"""The bucket's configuration from a prefect-aws block. Read on the control side only: what reaches a box is never taken from it."""

from __future__ import annotations

import contextvars
import functools
import logging
import threading
from typing import Any

from pydantic import SecretStr

from tasks.errors import UserError
from tasks.settings import Settings

log = logging.getLogger(__name__)
PATIENCE_S = 30.0
WANTED = "want an S3 Bucket block with AWS credentials (access key and secret) or MinIO credentials"


class BlockUnreadable(UserError):
    """Prefect does not answer, or has no such block."""


def with_block(settings: Settings) -> Settings:
    """The settings with bucket, endpoint, region and key as the block says; as they are where none is named.

    A block that cannot be read is said; then the LIVERY_BUCKET and LIVERY_S3_* beside it are used, if they are whole. UserError if there
    are none, if the block is not of the kind wanted, or if it names another bucket than they do.
    """
    if settings.s3_block is None:
        return settings
    try:
        found = _read(settings.s3_block)
    except BlockUnreadable as error:
        if not (settings.bucket and settings.s3_access_key_id and settings.s3_secret_access_key.get_secret_value()):
            raise UserError(
                f"{error}; want a block that can be read, or LIVERY_BUCKET and LIVERY_S3_* beside it for when it cannot"
            ) from None
        log.warning("%s; LIVERY_BUCKET and LIVERY_S3_* are used instead", error)
        return settings
    for name in ("bucket", "s3_endpoint_url"):
        here, there = getattr(settings, name), found.get(name)
        if here and here != there:
            raise UserError(
                f"LIVERY_S3_BLOCK={settings.s3_block} has {name} {there!r} and LIVERY_{name.upper()} is {here!r}; want the same, or one of them left out"
            )
    return settings.model_copy(update=found)


@functools.cache
def _read(block: str) -> dict[str, Any]:
    """Fields of Settings by name. Once a process: what was read stands when Prefect goes."""
    try:
        loaded = _load(block.removeprefix("s3-bucket/"))
    except Exception as error:  # noqa: BLE001 - ValueError for no such block, httpx's errors, RuntimeError: all mean that it cannot be read, and each is told
        raise BlockUnreadable(
            f"LIVERY_S3_BLOCK={block}: the block cannot be read ({type(error).__name__}: {_first_line(error)})"
        ) from None
    return _fields(block, loaded)


def _load(name: str) -> Any:
    # Seconds, and Prefect with it: only for those that name a block.
    from prefect.settings import PREFECT_API_URL
    from prefect_aws import S3Bucket

    if not PREFECT_API_URL.value():
        raise LookupError(
            "PREFECT_API_URL is not set"
        )  # Prefect would start an empty server of its own and find nothing there
    found: list[Any] = []

    def load() -> None:
        try:
            found.append(S3Bucket.load(name, _sync=True))  # type: ignore[call-arg]
        except Exception as error:  # noqa: BLE001 - handed over to the thread that waits
            found.append(error)

    # Prefect's client has no deadline that it keeps, and a sweep of the reaper has minutes. The context holds Prefect's settings.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(load,), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    if not found:
        raise TimeoutError(f"Prefect has not answered within {PATIENCE_S:.0f} s")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _fields(block: str, loaded: Any) -> dict[str, Any]:
    if loaded.bucket_folder:
        raise UserError(
            f"LIVERY_S3_BLOCK={block}: seen bucket_folder '{loaded.bucket_folder}', want none: leases and runs lie at the bucket's top"
        )
    credentials = loaded.credentials
    minio = hasattr(credentials, "minio_root_user")
    key = credentials.minio_root_user if minio else credentials.aws_access_key_id
    secret = credentials.minio_root_password if minio else credentials.aws_secret_access_key
    if not key or secret is None or not secret.get_secret_value():
        seen = "no access key" if not key else "no secret"
        raise UserError(f"LIVERY_S3_BLOCK={block}: seen {type(credentials).__name__} with {seen}; {WANTED}")
    token = None if minio else credentials.aws_session_token
    # Only what the block states: the rest, such as the region of a bucket outside AWS, stays as the settings say.
    found = {
        "bucket": loaded.bucket_name,
        "s3_endpoint_url": credentials.aws_client_parameters.endpoint_url,
        "s3_access_key_id": key,
        "s3_secret_access_key": secret,
        "s3_session_token": SecretStr(token) if token else None,
    }
    region = credentials.region_name
    if not region and not found["s3_endpoint_url"]:
        raise UserError(f"LIVERY_S3_BLOCK={block}: seen no region_name and no endpoint_url, want the bucket's region")
    return {**found, "s3_region": region} if region else found


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no reason given"])[0][:200]
