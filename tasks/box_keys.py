"""The key that a box is given for the bucket: its own static one, or a temporary one that reaches the run's prefix only.

The control plane's key never goes to a box. AWS gives temporary keys two ways: GetFederationToken in the name of the control plane's own
user (up to 36 hours), AssumeRole on a role made for it (up to 12, an hour unless the role allows more). Either is narrowed by the same
session policy. SeaweedFS, R2 and B2 have neither; there a static key that was made for the purpose is what can be had.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from pydantic import SecretStr

from tasks.errors import LiveryError, UserError
from tasks.log import hide
from tasks.settings import Settings
from training.contract import layout
from training.contract.recipe import Recipe

log = logging.getLogger(__name__)
_POLICY_CHARACTERS = 2048  # AWS: GetFederationToken and AssumeRole, inline
_NAME_CHARACTERS = 32
_ROLE_S = 43_200
_PASSING = {"Throttling", "ThrottlingException", "InternalFailure", "ServiceUnavailable", "RequestTimeout"}


class KeyNotIssued(LiveryError):
    """STS did not answer; it may later."""


@dataclass(frozen=True)
class BoxKey:
    access_key_id: str
    secret_access_key: SecretStr
    session_token: SecretStr | None = None
    issued_at: float = 0.0
    expires_at: float | None = None
    """None: it does not."""

    def due(self, now: float) -> bool:
        """Half of its life is over: a control plane that goes away then leaves the box as long again to upload what it has."""
        return self.expires_at is not None and now >= (self.issued_at + self.expires_at) / 2

    def environ(self) -> dict[str, str]:
        values = {
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key.get_secret_value(),
        }
        if self.session_token is not None:
            values["AWS_SESSION_TOKEN"] = self.session_token.get_secret_value()
        if self.expires_at is not None:
            values["AWS_CREDENTIAL_EXPIRATION"] = datetime.fromtimestamp(self.expires_at, UTC).strftime(
                "%Y-%m-%dT%H:%M:%SZ"
            )
        return values


def issue(settings: Settings, recipe: Recipe, clock: Callable[[], float]) -> BoxKey:
    """A key for a box of this run. UserError if the settings or STS refuse, KeyNotIssued if STS does not answer."""
    if settings.box_s3_credentials == "static":
        if settings.box_s3_access_key_id == settings.s3_access_key_id:
            raise UserError(
                "LIVERY_BOX_S3_ACCESS_KEY_ID: seen the control plane's own key, which may do everything in the bucket; "
                "want one that may only write under runs/, or LIVERY_BOX_S3_CREDENTIALS=federation or role"
            )
        return BoxKey(settings.box_s3_access_key_id, settings.box_s3_secret_access_key)
    now, document = clock(), _text_of(policy(settings.bucket, recipe))
    try:
        reply = _ask(settings, recipe, document)["Credentials"]
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", "unknown"))
        said = f"LIVERY_BOX_S3_CREDENTIALS={settings.box_s3_credentials}: STS answered {code}"
        if code in _PASSING:
            raise KeyNotIssued(f"{said}; it is asked again") from None
        raise UserError(f"{said}; {_remedy(settings, code)}") from None
    except BotoCoreError as error:
        raise KeyNotIssued(f"STS does not answer ({type(error).__name__}); no temporary key for the box") from None
    hide(reply["SecretAccessKey"], reply["SessionToken"])
    return BoxKey(
        access_key_id=reply["AccessKeyId"],
        secret_access_key=SecretStr(reply["SecretAccessKey"]),
        session_token=SecretStr(reply["SessionToken"]),
        issued_at=now,
        expires_at=reply["Expiration"].timestamp(),
    )


def policy(bucket: str, recipe: Recipe) -> dict[str, Any]:
    """What a box of this run may do in the bucket: read its model and data, read and write under its run, and no more.

    Receipts and the copies of events are the control plane's; a box may not change its own bill.
    """
    run, where = layout.run(recipe.name), f"arn:aws:s3:::{bucket}"
    source = recipe.model.source
    mirror = layout.mirror(source) if source.startswith("hub:") else source.removeprefix("bucket:").rstrip("/") + "/"
    places = [phase.data for phase in recipe.phases] + ([recipe.evaluation.data] if recipe.evaluation.data else [])
    data = sorted({place.removeprefix("bucket:") for place in places if place.startswith("bucket:")})
    read = ["s3:GetObject"]
    write = [*read, "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"]
    own = [f"{where}/{run}/*"] + ([f"{where}/{mirror}*"] if recipe.model.mirror else [])
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": "s3:ListBucket",
                "Resource": where,
                # IfExists: a HEAD carries no prefix, and without this permission a missing key would be answered 403 instead of 404.
                "Condition": {"StringLikeIfExists": {"s3:prefix": [f"{run}/*", f"{mirror}*"]}},
            },
            {"Effect": "Allow", "Action": "s3:ListBucketMultipartUploads", "Resource": where},
            {
                "Effect": "Allow",
                "Action": read,
                "Resource": [f"{where}/{mirror}*", *(f"{where}/{key}" for key in data)],
            },
            {"Effect": "Allow", "Action": write, "Resource": own},
            {
                "Effect": "Deny",
                "Action": ["s3:PutObject", "s3:DeleteObject"],
                "Resource": [f"{where}/{run}/receipts/*", f"{where}/{run}/events/*"],
            },
        ],
    }


def _text_of(document: dict[str, Any]) -> str:
    text = json.dumps(document, separators=(",", ":"))
    if len(text) > _POLICY_CHARACTERS:
        raise UserError(
            f"LIVERY_BOX_S3_CREDENTIALS: the policy for this recipe has {len(text)} characters, AWS takes {_POLICY_CHARACTERS}; "
            "give the datasets shorter keys, or use a static key"
        )
    return text


def _ask(settings: Settings, recipe: Recipe, document: str) -> Any:
    import boto3

    client = boto3.client(
        "sts",
        endpoint_url=settings.sts_endpoint_url,
        region_name=settings.signing_region,
        aws_access_key_id=settings.s3_access_key_id,
        aws_secret_access_key=settings.s3_secret_access_key.get_secret_value(),
        aws_session_token=settings.s3_session_token.get_secret_value() if settings.s3_session_token else None,
        config=Config(connect_timeout=10, read_timeout=20, retries={"mode": "standard", "total_max_attempts": 3}),
    )
    name, seconds = f"livery-{recipe.name}"[:_NAME_CHARACTERS], settings.box_s3_session_s
    if settings.box_s3_credentials == "federation":
        return client.get_federation_token(Name=name, Policy=document, DurationSeconds=seconds)
    return client.assume_role(
        RoleArn=settings.box_s3_role_arn or "",
        RoleSessionName=name,
        Policy=document,
        DurationSeconds=min(seconds, _ROLE_S),
    )


def _remedy(settings: Settings, code: str) -> str:
    if code == "ValidationError":
        return f"want LIVERY_BOX_S3_SESSION_S (now {settings.box_s3_session_s}) within what the role allows"
    if code in {"ExpiredToken", "ExpiredTokenException"}:
        return "the control plane's own key has expired: renew LIVERY_S3_*"
    action = "sts:GetFederationToken" if settings.box_s3_credentials == "federation" else "sts:AssumeRole"
    return f"allow the control plane's key {action}, or use LIVERY_BOX_S3_CREDENTIALS=static with a key that may only write under runs/"
