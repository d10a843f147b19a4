"""Alarms on their way to a person: a real Prefect server, its automations, and a real webhook."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect import flow
from prefect.deployments.runner import EntrypointType
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings
from pydantic import SecretStr

from deployments.automations import BLOCK, install
from deployments.up import Up, UpError, _install_alarms
from flows.audit import audit
from tasks import alarms
from tasks.domain import Alarm
from tasks.settings import Notify
from tests.tasks.pretend import FLOW_RUN, OTHER_RUN
from training.box.folder import FolderStore

# Prefect looks for silent triggers every few seconds; a busy machine is slower.
PATIENCE_S = 60.0
SECRET_PATH = "/hooks/T024-only-we-know-this"


@dataclass
class Webhook:
    url: str
    texts: list[str] = field(default_factory=list)

    def wait_for(self, words: str) -> str:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if found := [text for text in self.texts if words in text]:
                return found[0]
            time.sleep(0.1)
        pytest.fail(f"nobody was told of {words!r}; told was {self.texts}")


@pytest.fixture(scope="module")
def webhook() -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == SECRET_PATH:
                made.texts.append(json.loads(body)["text"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Webhook(f"http://127.0.0.1:{server.server_address[1]}{SECRET_PATH}")
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def told(prefect_api: str, webhook: Webhook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Who is told, once everything is installed; the reaper may be silent for ten seconds, the least that Prefect allows."""
    with temporary_settings({PREFECT_API_URL: prefect_api, PREFECT_HOME: tmp_path_factory.mktemp("home")}):
        deployment = audit.to_deployment(name="now", entrypoint_type=EntrypointType.MODULE_PATH).apply()
    where = install(prefect_api, Notify(_env_file=None, notify_url=SecretStr(webhook.url)), silent_s=10)  # type: ignore[call-arg]
    assert where is not None
    yield where
    httpx.delete(f"{prefect_api}/deployments/{deployment}", timeout=30)
    for each in _ours(prefect_api).values():  # other files use this server
        httpx.delete(f"{prefect_api}/automations/{each['id']}", timeout=30)


@pytest.fixture
def sound(prefect_api: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Alarm]:
    monkeypatch.setenv("PREFECT_API_URL", prefect_api)

    def sounded(what: str, **changes: Any) -> Alarm:
        given: dict[str, Any] = {"what": what, "subject": FLOW_RUN, "run": "tools-35b", "instances": (7835610,)}
        given |= {"dph_usd": 1.234, "spent_usd": 5.67, "reason": f"because of {what}", "at": time.time()}
        alarm = Alarm(**{**given, "do": alarms.CONSOLE, **changes})
        alarms.sound(FolderStore(tmp_path / "bucket"), alarm)
        return alarm

    return sounded


def _ours(api: str) -> dict[str, dict[str, Any]]:
    found = httpx.post(f"{api}/automations/filter", json={}, timeout=30).json()
    return {each["name"]: each for each in found if each["name"].startswith("livery: ")}


@pytest.mark.parametrize(
    "what",
    ["box_kept", "box_unknown", "cap_reached", "destroy_unverified", "billed_after_destroy", "reaper_silent"],
)
def test_a_person_is_told_of_each_trouble_with_its_dollars_and_the_console(
    sound: Callable[..., Alarm], webhook: Webhook, what: str
) -> None:
    alarm = sound(what, subject="reaper" if what == "reaper_silent" else FLOW_RUN)
    text = webhook.wait_for(f"because of {what}")
    assert text.startswith(f"Livery: {what.replace('_', ' ')}\n") and alarm.sentence in text
    assert "$1.234/h" in text and "$5.6700 spent" in text and "https://cloud.vast.ai/instances/" in text


def test_two_runs_in_the_same_trouble_are_told_both(sound: Callable[..., Alarm], webhook: Webhook) -> None:
    sound("box_unknown", reason="the first of two")
    sound("box_unknown", reason="the second of two", subject=OTHER_RUN)
    webhook.wait_for("the first of two")
    webhook.wait_for("the second of two")


def test_a_reaper_run_that_fails_is_told_with_its_message(
    prefect_api: str, told: str, webhook: Webhook, tmp_path: Path
) -> None:
    @flow(name="reaper")
    def blind() -> None:
        raise RuntimeError("the list of boxes is incomplete, nothing was destroyed")

    with temporary_settings({PREFECT_API_URL: prefect_api, PREFECT_HOME: tmp_path}):
        assert blind(return_state=True).is_failed()
    text = webhook.wait_for("the list of boxes is incomplete")
    assert text.startswith("Livery: the reaper failed\n") and "console" in text


def test_a_reaper_that_is_silent_from_the_start_is_told_and_an_audit_looks_what_bills(
    prefect_api: str, told: str, webhook: Webhook
) -> None:
    """Installed ten seconds ago and more, and no sweep has said that it saw everything."""
    text = webhook.wait_for("Livery: the reaper is silent")
    assert "python -m flows.reaper --once" in text and "https://cloud.vast.ai/instances/" in text
    wanted = {"deployments": {"name": {"any_": ["now"]}}}
    end = time.monotonic() + PATIENCE_S
    while not httpx.post(f"{prefect_api}/flow_runs/filter", json=wanted, timeout=30).json():
        assert time.monotonic() < end, "no audit was started"
        time.sleep(0.2)


def test_the_address_of_the_webhook_is_nowhere_to_be_read(prefect_api: str, told: str, webhook: Webhook) -> None:
    assert SECRET_PATH not in told
    blocks = httpx.post(f"{prefect_api}/block_documents/filter", json={"include_secrets": False}, timeout=30).text
    rules = httpx.post(f"{prefect_api}/automations/filter", json={}, timeout=30).text
    assert BLOCK in blocks and SECRET_PATH not in blocks + rules


def test_installing_again_renews_and_keeps_what_a_person_has_paused(
    prefect_api: str, told: str, webhook: Webhook
) -> None:
    before = _ours(prefect_api)
    paused = before["livery: reaper failed"]["id"]
    httpx.patch(f"{prefect_api}/automations/{paused}", json={"enabled": False}, timeout=30).raise_for_status()
    install(prefect_api, Notify(_env_file=None, notify_url=SecretStr(webhook.url)), silent_s=10)  # type: ignore[call-arg]
    after = _ours(prefect_api)
    assert {name: each["id"] for name, each in after.items()} == {name: each["id"] for name, each in before.items()}
    assert not after["livery: reaper failed"]["enabled"] and after["livery: alarm"]["enabled"]


def test_a_block_that_prefect_does_not_have_is_one_clear_sentence(prefect_api: str) -> None:
    with pytest.raises(ValueError, match="LIVERY_NOTIFY_BLOCK: Prefect has no block slack-webhook/nobody; make it"):
        install(prefect_api, Notify(_env_file=None, notify_block="slack-webhook/nobody"))  # type: ignore[call-arg]


def test_a_block_of_ones_own_is_used(prefect_api: str, told: str) -> None:
    made = Notify(_env_file=None, notify_block=f"custom-webhook/{BLOCK}")  # type: ignore[call-arg]
    assert install(prefect_api, made, silent_s=10) == f"custom-webhook/{BLOCK}"


def test_where_nobody_is_named_nothing_is_made_and_nothing_is_imported_for_it(prefect_api: str) -> None:
    assert install(prefect_api, Notify(_env_file=None)) is None  # type: ignore[call-arg]


def test_a_wrong_address_ends_up_before_anything_is_rented_and_is_not_shown(
    prefect_api: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LIVERY_NOTIFY_URL", "http://hooks.example/secret-part")
    with pytest.raises(UpError, match="LIVERY_NOTIFY_URL: want https") as caught:
        _install_alarms(Up({}, prefect_api))
    assert "secret-part" not in str(caught.value)
    monkeypatch.delenv("LIVERY_NOTIFY_URL")
    assert _install_alarms(Up({}, prefect_api)) is None
