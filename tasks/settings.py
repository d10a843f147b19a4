"""Settings of the machine that runs the flows: secrets and account-wide limits, from the environment and `.env`.

Never a flow parameter, never on a box. Each field is described in `.env.example`; a test holds the two against each other.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

from tasks.errors import UserError

T = TypeVar("T", bound=BaseSettings)
_PLAIN_HTTP = {("http", host) for host in ("127.0.0.1", "localhost", "::1")}
_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}


class Notify(BaseSettings):
    """Where alarms go; apart from the rest, since `up` asks for it where no account may be configured."""

    model_config = SettingsConfigDict(
        env_prefix="LIVERY_", env_file=".env", env_ignore_empty=True, extra="ignore", frozen=True
    )

    notify_url: SecretStr | None = None
    notify_block: str | None = None

    @field_validator("notify_url")
    @classmethod
    def _a_webhook(cls, value: SecretStr | None) -> SecretStr | None:
        _https_or_loopback(value.get_secret_value() if value else None)
        return value

    @field_validator("notify_block")
    @classmethod
    def _type_and_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", value):
            raise ValueError(
                f"seen {value!r}, want TYPE/NAME of a notification block in Prefect, such as pager-duty-webhook/ops"
            )
        return value


class Settings(Notify):
    market: Literal["vast", "ssh_host"] = "vast"
    market_url: str = "https://console.vast.ai"
    market_api_key: SecretStr = Field(SecretStr(""), validate_default=True)
    reaper_api_key: SecretStr | None = None
    market_pace: float = Field(1.0, gt=0)

    s3_block: str | None = Field(None, pattern=r"^s3-bucket/[a-z0-9-]+$")
    bucket: str = Field("", validate_default=True)
    s3_endpoint_url: str | None = None
    s3_region: str = Field("", validate_default=True)
    s3_access_key_id: str = Field("", validate_default=True)
    s3_secret_access_key: SecretStr = Field(SecretStr(""), validate_default=True)
    s3_session_token: SecretStr | None = None
    box_s3_endpoint_url: str | None = None
    box_s3_credentials: Literal["static", "federation", "role"] = "static"
    box_s3_access_key_id: str = Field("", validate_default=True)
    box_s3_secret_access_key: SecretStr = Field(SecretStr(""), validate_default=True)
    box_s3_role_arn: str | None = Field(None, validate_default=True)
    box_s3_session_s: int = Field(3600, ge=900, le=129_600)
    sts_endpoint_url: str | None = None
    hf_token: SecretStr | None = None
    wandb_api_key: SecretStr | None = None

    ssh_user: str = "root"
    ssh_host: str | None = Field(None, validate_default=True)
    ssh_port: int = Field(22, ge=1, le=65535)
    ssh_key_path: Path | None = Field(None, validate_default=True)
    state_dir: Path = Path(".livery/state")

    keep_box: bool = False
    keep_hours: float = Field(2.0, gt=0, le=24)
    max_age_hours: float = Field(12.0, gt=0)
    never_running_s: int = Field(2700, gt=0)
    down_s: int = Field(600, gt=0)
    no_progress_s: int = Field(1800, gt=0)
    lease_s: int = Field(900, ge=5)
    lease_renew_s: float = Field(60, gt=0)
    deadman_silent_s: float = Field(2700, gt=0)
    deadman_stalled_s: float = Field(7200, gt=0)
    max_dph_usd: float = Field(20.0, gt=0)
    min_credit_usd: float = Field(5.0, ge=0)
    max_reap: int = Field(30, ge=1)
    protected: str = ""
    poll_s: float = Field(3.0, gt=0)

    @field_validator("keep_box", mode="before")
    @classmethod
    def _by_value(cls, value: object) -> object:
        """A flag is what it says, not that it is there: `0`, `no` and an empty value are false, and a typo is an error."""
        if not isinstance(value, str):
            return value
        word = value.strip().lower()
        if word in _TRUE | _FALSE:
            return word in _TRUE
        raise ValueError(f"want one of {', '.join(sorted(_TRUE | _FALSE - {''}))} or empty")

    @field_validator("protected")
    @classmethod
    def _each_with_its_end(cls, value: str) -> str:
        protections(value)
        return value

    @field_validator("market_api_key", "ssh_host", "ssh_key_path", mode="before")
    @classmethod
    def _what_the_market_needs(cls, value: object, info: ValidationInfo) -> object:
        """A market needs its key, a host of one's own its address and the key that opens it; an empty line of `.env` is none."""
        is_key = info.field_name == "market_api_key"
        if (value.get_secret_value() if isinstance(value, SecretStr) else value) not in ("", None):
            return value
        if info.data.get("market") == ("vast" if is_key else "ssh_host"):
            raise PydanticCustomError("missing", "Field required")
        return SecretStr("") if is_key else None

    @field_validator("bucket", "s3_access_key_id", "s3_secret_access_key")
    @classmethod
    def _here_or_in_the_block(cls, value: str | SecretStr, info: ValidationInfo) -> str | SecretStr:
        if not _text(value) and info.data.get("s3_block") is None:
            raise PydanticCustomError("missing", "Field required")
        return value

    @field_validator("box_s3_access_key_id", "box_s3_secret_access_key", "box_s3_role_arn")
    @classmethod
    def _what_the_box_key_needs(cls, value: str | SecretStr | None, info: ValidationInfo) -> str | SecretStr | None:
        """A static key is given here; a temporary one is asked for, of a role or in the control plane's own name."""
        needed = "role" if info.field_name == "box_s3_role_arn" else "static"
        if not _text(value) and info.data.get("box_s3_credentials") == needed:
            raise PydanticCustomError("missing", "Field required")
        return value

    @field_validator("lease_renew_s")
    @classmethod
    def _well_within_the_lease(cls, value: float, info: ValidationInfo) -> float:
        lease_s = info.data.get("lease_s")
        if lease_s is not None and value > lease_s / 3:
            raise ValueError(
                f"seen {value:g} with LIVERY_LEASE_S={lease_s}; want at most a third of it, or one lost renewal has a live box reaped"
            )
        return value

    @field_validator("deadman_silent_s")
    @classmethod
    def _well_over_the_renewals(cls, value: float, info: ValidationInfo) -> float:
        renew_s = info.data.get("lease_renew_s")
        if renew_s is not None and value < 5 * renew_s:
            raise ValueError(
                f"seen {value:g} with LIVERY_LEASE_RENEW_S={renew_s:g}; want at least five times that, or a box ends itself when a few renewals do not reach it"
            )
        return value

    @field_validator("s3_region")
    @classmethod
    def _known_on_aws(cls, value: str, info: ValidationInfo) -> str:
        """A default would sign well enough, and rent boxes on the wrong side of an ocean."""
        if not value.strip() and info.data.get("s3_endpoint_url", "unread") is None and not info.data.get("s3_block"):
            raise ValueError(
                "is not set; want the region of the bucket, such as eu-central-1: boxes are rented near it (it may stay empty with LIVERY_S3_ENDPOINT_URL)"
            )
        return value.strip()

    @property
    def signing_region(self) -> str:
        """The region that requests are signed for; buckets outside AWS that have none take the oldest one."""
        return self.s3_region or "us-east-1"

    @field_validator("market_url", "s3_endpoint_url", "box_s3_endpoint_url", "sts_endpoint_url")
    @classmethod
    def _https_or_loopback(cls, value: str | None) -> str | None:
        return _https_or_loopback(value)


def _text(value: str | SecretStr | None) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else value or ""


def protections(text: str) -> dict[int, float]:
    """Box ids and until when each is protected, epoch seconds, from `7835610@2026-12-24T12:00Z, …`. ValueError for an entry without id or end:
    a protection that nobody ends is how a box bills for ever."""
    found: dict[int, float] = {}
    for entry in (part.strip() for part in text.split(",")):
        if not entry:
            continue
        box, _, until = entry.partition("@")
        try:
            moment = datetime.fromisoformat(until.strip())
            found[int(box)] = moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
        except ValueError:
            raise ValueError(
                f"seen {entry!r}; want <box id>@<date and time>, such as 7835610@2026-12-24T12:00Z"
            ) from None
    return found


def read_settings() -> Settings:
    """Settings from the environment; UserError names each field that is missing or wrong, never its value if it is a secret."""
    return _read(Settings)


def read_notify() -> Notify:
    """Where alarms go, from the environment; UserError as `read_settings`."""
    return _read(Notify)


def _https_or_loopback(value: str | None) -> str | None:
    url = urlsplit(value or "")
    if value and url.scheme != "https" and (url.scheme, url.hostname) not in _PLAIN_HTTP:
        raise ValueError("want https:// (plain http only on loopback: keys travel on this connection)")
    return value.rstrip("/") if value else None


def _read(kind: type[T]) -> T:
    try:
        return kind()
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False, include_input=False):
            name = "LIVERY_" + "_".join(str(part) for part in item["loc"]).upper()
            what = "is not set" if item["type"] == "missing" else item["msg"].removeprefix("Value error, ")
            lines.append(f"{name}: {what}; see .env.example")
        raise UserError("\n".join(lines)) from None


@cache
def settings() -> Settings:
    """The settings, read once a process."""
    return read_settings()
