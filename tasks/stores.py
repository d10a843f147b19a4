"""The run's bucket as this machine sees it, and the credentials that a box is given."""

from __future__ import annotations

from tasks.box_keys import BoxKey
from tasks.errors import UserError
from tasks.s3_block import with_block
from tasks.settings import Settings
from training.box.store import Store, StoreError


def open_store(settings: Settings, *, stall_s: float = 15) -> Store:
    """The bucket with the control plane's own key. `stall_s`: give up a silent connection so soon, for who has little time. UserError if
    it is configured by a block that is not what is wanted, or by nothing else and cannot be read."""
    settings = with_block(settings)
    return Store(
        settings.bucket,
        endpoint_url=settings.s3_endpoint_url,
        region=settings.signing_region,
        access_key_id=settings.s3_access_key_id,
        secret_access_key=settings.s3_secret_access_key.get_secret_value(),
        session_token=settings.s3_session_token.get_secret_value() if settings.s3_session_token else None,
        stall_s=stall_s,
    )


def checked_store(settings: Settings) -> Store:
    """The bucket, proved to be there and readable with this key; UserError with one sentence otherwise."""
    store = open_store(settings)
    try:
        store.check()
    except StoreError as error:
        raise UserError(f"bucket: {error}; see LIVERY_BUCKET and LIVERY_S3_* in .env.example") from None
    return store


def private_env(settings: Settings, key: BoxKey) -> dict[str, str]:
    """What the box's private env file holds: the box's own limited key, never the account's. `settings` as `with_block` made them."""
    endpoint = settings.box_s3_endpoint_url or settings.s3_endpoint_url
    values = {**key.environ(), "AWS_DEFAULT_REGION": settings.signing_region}
    if endpoint:
        values["AWS_ENDPOINT_URL_S3"] = endpoint
    if settings.hf_token:
        values["HF_TOKEN"] = settings.hf_token.get_secret_value()
    if settings.wandb_api_key:
        values["WANDB_API_KEY"] = settings.wandb_api_key.get_secret_value()
    return values
