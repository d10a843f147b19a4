"""What tells people: Prefect's automations on our own events, and the block that they write to. Made by `up`, again at each start.

The events come from `tasks/alarms.py` by plain HTTP. Measured on Prefect 3.9: a reactive trigger without `within` fires at each event; a
proactive one with `after` fires once when its event stays away, and only after it was heard once, so `up` says it first.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from flows.reaper import PERIOD_S
from tasks.alarms import ALARM_EVENT, CONSOLE, SAW_ALL_EVENT, tell_prefect
from tasks.settings import Notify

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.events import AutomationCore

BLOCK = "livery-alarms"
UP_EVENT = "livery.up"
SILENT_S = 2 * PERIOD_S


def install(api_url: str, settings: Notify, *, silent_s: float = SILENT_S) -> str | None:
    """Make or renew block and automations on that server; what the alarms go to, None if nothing is configured.

    ValueError if LIVERY_NOTIFY_BLOCK names no block there.
    """
    if settings.notify_url is None and settings.notify_block is None:
        return None
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: api_url}), get_client(sync_client=True) as client:
        block_id, where = _block(client, settings)
        audit = _deployment(client, "audit/now")
        for automation in automations(block_id, audit, silent_s):
            _put(client, automation)
    tell_prefect(UP_EVENT, "livery.reaper", "reaper", {}, url=api_url)
    return where


def automations(block_id: UUID, audit_id: UUID | None, silent_s: float = SILENT_S) -> list[AutomationCore]:
    """One for every alarm, one for a reaper run that fails, one for a reaper that is silent."""
    from prefect.events import AutomationCore
    from prefect.events.actions import RunDeployment, SendNotification
    from prefect.events.schemas.automations import EventTrigger, Posture

    def send(subject: str, body: str) -> SendNotification:
        return SendNotification(block_document_id=block_id, subject=subject, body=body)

    # What still bills is known by the audit, which sounds the alarm with its dollars.
    look = [RunDeployment(source="selected", deployment_id=audit_id)] if audit_id is not None else []
    return [
        AutomationCore(
            name="livery: alarm",
            description="A box kept, unknown or not proved gone; a cap reached; billed after its destroy.",
            trigger=EventTrigger(expect={f"{ALARM_EVENT}*"}, posture=Posture.Reactive, threshold=1),
            actions=[send("Livery: {{ event.payload.what }}", "{{ event.payload.text }}")],
        ),
        AutomationCore(
            name="livery: reaper failed",
            description="A sweep that could not see, or could not prove that a box is gone; told once an hour.",
            trigger=EventTrigger(
                expect={f"prefect.flow-run.{state}" for state in ("Failed", "Crashed", "TimedOut")},
                match_related={"prefect.resource.role": "flow", "prefect.resource.name": "reaper"},
                posture=Posture.Reactive,
                threshold=1,
                within=timedelta(hours=1),
            ),
            actions=[send("Livery: the reaper failed", f"{{{{ flow_run.state.message }}}}; {CONSOLE}")],
        ),
        AutomationCore(
            name="livery: reaper silent",
            description="No sweep has seen everything for two periods.",
            trigger=EventTrigger(
                after={UP_EVENT, SAW_ALL_EVENT},
                expect={SAW_ALL_EVENT},
                posture=Posture.Proactive,
                threshold=1,
                within=timedelta(seconds=silent_s),
            ),
            actions=[
                send(
                    "Livery: the reaper is silent",
                    f"no sweep has seen everything for {silent_s / 60:g} min, so a box may bill for nothing ($/h unknown here; the audit tells); "
                    f"look at deployment reaper/cron, run `python -m flows.reaper --once`, or {CONSOLE}",
                ),
                *look,
            ],
        ),
    ]


def _block(client: SyncPrefectClient, settings: Notify) -> tuple[UUID, str]:
    if settings.notify_block is not None:
        slug, _, name = settings.notify_block.partition("/")
        return _known_block(client, slug, name), settings.notify_block
    from prefect.blocks.notifications import CustomWebhookNotificationBlock
    from prefect.types import SecretDict

    assert settings.notify_url is not None
    # Among the secrets, since who knows the address of a webhook can write to it; the block's own `url` is shown in the UI.
    secret = {"address": settings.notify_url.get_secret_value()}
    block = CustomWebhookNotificationBlock(
        name=BLOCK, url="{{address}}", json_data={"text": "{{subject}}\n{{body}}"}, secrets=SecretDict(secret)
    )
    saved = block.save(BLOCK, overwrite=True)
    return UUID(str(saved)), f"the webhook of LIVERY_NOTIFY_URL (block custom-webhook/{BLOCK})"


def _known_block(client: SyncPrefectClient, slug: str, name: str) -> UUID:
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_block_document_by_name(name, slug, include_secrets=False).id
    except ObjectNotFound:
        raise ValueError(
            f"LIVERY_NOTIFY_BLOCK: Prefect has no block {slug}/{name}; make it in the UI (Blocks), or set LIVERY_NOTIFY_URL"
        ) from None


def _deployment(client: SyncPrefectClient, name: str) -> UUID | None:
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(name).id
    except ObjectNotFound:
        return None


def _put(client: SyncPrefectClient, automation: AutomationCore) -> None:
    """Renewed if it is there, so that a changed text takes effect; whether a person has paused it stays theirs."""
    before = client.read_automations_by_name(automation.name)
    if not before:
        client.create_automation(automation)
        return
    client.update_automation(before[0].id, automation.model_copy(update={"enabled": before[0].enabled}))
