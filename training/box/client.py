"""Making a boto3 client as the store needs it: its time-outs, and a key that is renewed while it is in use.

The time-outs look odd for a reason. urllib3 leaves the *connect* time-out on the socket while a body is sent, so in botocore
`connect_timeout` is what notices a frozen uplink and `read_timeout` only bounds the wait for the reply.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from training.box.supervisor import read_env_file

EXPIRY_VARIABLE = "AWS_CREDENTIAL_EXPIRATION"
KEY_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", EXPIRY_VARIABLE)
PRIVATE_ENV_VARIABLE = "LIVERY_PRIVATE_ENV"
# Using a client is safe in many threads, making one is not.
_making_a_client = threading.Lock()


class StillExpired(Exception):
    """The private file holds no newer key."""


def make_client(
    key: dict[str, str | None],
    *,
    endpoint_url: str | None,
    region: str,
    stall_s: float,
    private_env: Path | None = None,
    expires: str = "",
) -> Any:
    """An S3 client with the `key` (boto3's names). With `private_env` the key is read again from that file before it `expires` (ISO 8601);
    StillExpired out of a call if none was put there in time."""
    with _making_a_client:
        session, given = (_renewing_session(private_env, key, expires), {}) if private_env else (_session(), key)
        return session.client(
            "s3",
            endpoint_url=endpoint_url,
            region_name=region,
            config=_config(stall_s, path_style=endpoint_url is not None),
            **given,
        )


def renewed_in(environ: Mapping[str, str]) -> Path | None:
    """The file where a key that expires is renewed, if the environment names one and the key expires."""
    expires, place = environ.get(EXPIRY_VARIABLE), environ.get(PRIVATE_ENV_VARIABLE)
    return Path(place) if expires and place else None


@functools.cache
def _session() -> Any:
    """One a process: it keeps S3's description, a tenth of a second to read, for the next client."""
    import boto3  # most of a second: a process that only names the store's errors does not pay it

    session = boto3.session.Session()
    session._session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
    return session


def _timestamp(value: Any) -> Any:
    """A listing's times without botocore's guessing of their format, which costs a listing of a thousand objects half of its time."""
    if isinstance(value, str) and value[4:5] == "-":
        return datetime.fromisoformat(value.replace("Z", "+00:00"))
    from botocore.utils import parse_timestamp

    return parse_timestamp(value)


def _renewing_session(private_env: Path, key: dict[str, str | None], expires: str) -> Any:
    """A session whose key is read again from the private file shortly before it expires."""
    import boto3
    import botocore.session
    from botocore.credentials import RefreshableCredentials

    def renew() -> dict[str, Any]:
        fresh = read_env_file(str(private_env)) if private_env.exists() else {}
        until = fresh.get(EXPIRY_VARIABLE, expires)
        if datetime.fromisoformat(until).timestamp() <= time.time():
            raise StillExpired(f"{private_env.name} holds one that was good until {until}; the flow renews it there")
        names = {"access_key": "AWS_ACCESS_KEY_ID", "secret_key": "AWS_SECRET_ACCESS_KEY", "token": "AWS_SESSION_TOKEN"}
        return {name: fresh.get(variable) for name, variable in names.items()} | {"expiry_time": until}

    first = {
        "access_key": key["aws_access_key_id"],
        "secret_key": key["aws_secret_access_key"],
        "token": key["aws_session_token"],
        "expiry_time": expires,
    }
    session: Any = botocore.session.get_session()
    session._credentials = RefreshableCredentials.create_from_metadata(first, renew, "livery-private-env")
    return boto3.session.Session(botocore_session=session)


def _config(stall_s: float, *, path_style: bool) -> Any:
    from botocore.config import Config

    return Config(
        signature_version="s3v4",
        connect_timeout=stall_s,
        read_timeout=4 * stall_s,
        # Retries are ours: botocore's would hide how long nothing has moved.
        retries={"mode": "standard", "total_max_attempts": 1},
        tcp_keepalive=True,
        max_pool_connections=16,
        # Newer botocore adds trailers that some S3-compatibles store inside the object.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "path" if path_style else "auto", "payload_signing_enabled": False},
    )
