from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tasks import alarms
from tasks.domain import Alarm, Attempt, Flight, Span
from tasks.log import guard_secrets
from tests.tasks.pretend import FLOW_RUN, NOW, OTHER_RUN, Pretend
from training.box.folder import FolderStore
from training.box.store import Store
from training.contract import layout


def alarm(**changes: Any) -> Alarm:
    given = {"what": "destroy_unverified", "subject": FLOW_RUN, "run": "tools-35b", "instances": (7,), "dph_usd": 1.23}
    given |= {"spent_usd": 4.5, "reason": "still listed", "do": "look at the console", "at": NOW}
    return Alarm(**{**given, **changes})


class Prefect:
    """What its server hears."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.logins: list[str | None] = []
        self.status = 204


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return FolderStore(tmp_path / "bucket")


@pytest.fixture
def prefect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Prefect]:
    server = Prefect()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/api/events"
            server.logins.append(self.headers.get("authorization"))
            server.heard += json.loads(body)
            self.send_response(server.status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    monkeypatch.setenv("PREFECT_API_URL", f"http://127.0.0.1:{http.server_address[1]}/api")
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()


def test_an_alarm_names_boxes_dollars_an_hour_dollars_spent_and_what_to_do() -> None:
    said = alarm().sentence
    for words in (
        "destroy unverified",
        "tools-35b",
        FLOW_RUN,
        "box 7",
        "$1.230/h",
        "$4.5000 spent",
        "look at the console",
    ):
        assert words in said


def test_unknown_dollars_of_an_alarm_are_called_unknown() -> None:
    said = alarm(dph_usd=None, spent_usd=None, instances=()).sentence
    assert "$/h unknown" in said and "spent unknown" in said and "no box known" in said and "$0" not in said


def test_an_alarm_is_an_object_a_line_of_the_log_and_an_event_of_prefects(
    store: Store, prefect: Prefect, caplog: pytest.LogCaptureFixture
) -> None:
    alarms.sound(store, alarm())
    (kept,) = alarms.standing(store)
    assert (kept.subject, kept.told_at) == (FLOW_RUN, NOW) and store.get_bytes(layout.alarm(FLOW_RUN))
    assert "ALARM destroy unverified" in caplog.text
    (event,) = prefect.heard
    assert event["event"] == "livery.alarm.destroy-unverified" and event["payload"]["text"] == alarm().sentence
    assert event["related"] == [
        {"prefect.resource.id": f"prefect.flow-run.{FLOW_RUN}", "prefect.resource.role": "flow-run"}
    ]


def test_an_alarm_that_stands_is_not_told_at_every_sweep_but_again_after_hours(store: Store, prefect: Prefect) -> None:
    for minutes in (0, 5, 10):
        alarms.sound(store, alarm(at=NOW + 60 * minutes))
    assert len(prefect.heard) == 1
    alarms.sound(store, alarm(at=NOW + 600, instances=(7, 8)))
    assert len(prefect.heard) == 2, "another box is news"
    alarms.sound(store, alarm(at=NOW + 600 + alarms.TELL_AGAIN_S, instances=(7, 8)))
    assert len(prefect.heard) == 3


def test_an_alarm_that_prefect_did_not_take_is_told_when_it_is_next_met(store: Store, prefect: Prefect) -> None:
    prefect.status = 503
    alarms.sound(store, alarm())
    assert alarms.standing(store)[0].told_at is None
    prefect.status = 204
    alarms.sound(store, alarm(at=NOW + 300))
    assert alarms.standing(store)[0].told_at == NOW + 300


def test_of_two_alarms_about_one_subject_the_more_urgent_stays_and_both_are_told(
    store: Store, prefect: Prefect
) -> None:
    alarms.sound(store, alarm())
    alarms.sound(store, alarm(what="cap_reached"))
    assert [each.what for each in alarms.standing(store)] == ["destroy_unverified"]
    assert [event["event"] for event in prefect.heard] == [
        "livery.alarm.destroy-unverified",
        "livery.alarm.cap-reached",
    ]


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:9/api"])
def test_without_prefect_and_without_a_bucket_sounding_raises_nothing(
    url: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    if url:
        monkeypatch.setenv("PREFECT_API_URL", url)
    lost = FolderStore(tmp_path / "lost")
    lost.root.rmdir()
    lost.root.write_text("a file where the bucket was")
    alarms.sound(lost, alarm())
    assert "ALARM destroy unverified" in caplog.text and "not written down" in caplog.text


def test_no_secret_goes_to_prefect_with_an_alarm(
    store: Store, prefect: Prefect, pretend: Pretend, tmp_path: Path
) -> None:
    guard_secrets(pretend.settings(tmp_path, market_api_key="a-very-secret-key"))
    alarms.sound(store, alarm(reason="HTTP 401 for a-very-secret-key"))
    assert "a-very-secret-key" not in json.dumps(prefect.heard) and "[secret]" in prefect.heard[0]["payload"]["text"]


def test_a_server_with_a_login_is_given_it(store: Store, prefect: Prefect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:pass")
    alarms.sound(store, alarm())
    assert prefect.logins == ["Basic YWRtaW46cGFzcw=="]


def test_a_complete_listing_settles_the_alarms_of_runs_and_boxes_that_are_gone_and_no_others(store: Store) -> None:
    for subject, what in (
        (FLOW_RUN, "box_unknown"),
        (OTHER_RUN, "box_kept"),
        ("box-7", "box_unknown"),
        ("box-8", "box_unknown"),
        ("box-9", "billed_without_owner"),
        ("account", "cap_reached"),
        ("reaper", "reaper_blind"),
    ):
        alarms.sound(store, alarm(subject=subject, what=what))
    assert set(alarms.settle(store, runs={OTHER_RUN}, boxes={8})) == {FLOW_RUN, "box-7"}
    assert {each.subject for each in alarms.standing(store)} == {OTHER_RUN, "box-8", "box-9", "account", "reaper"}


def test_a_sweep_of_one_run_settles_that_runs_alarm_only(store: Store) -> None:
    for subject in (FLOW_RUN, OTHER_RUN):
        alarms.sound(store, alarm(subject=subject))
    assert alarms.settle(store, runs=(), boxes=(), only=FLOW_RUN) == [FLOW_RUN]


def test_what_the_audit_found_is_not_answered_by_boxes_that_are_gone(store: Store) -> None:
    alarms.sound(store, alarm(what="billed_after_destroy"))
    alarms.answered(store, FLOW_RUN)
    assert not alarms.settle(store, runs=(), boxes=()) and len(alarms.standing(store)) == 1


def test_an_object_that_is_no_alarm_is_said_and_disturbs_nobody(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put_bytes(layout.alarm(OTHER_RUN), b"{}")
    alarms.sound(store, alarm())
    with caplog.at_level(logging.WARNING):
        assert [each.subject for each in alarms.standing(store)] == [FLOW_RUN]
    assert f"alarms/{OTHER_RUN}.json is not an alarm" in caplog.text


def test_an_alarm_about_a_run_takes_box_and_dollars_from_its_flight_record(store: Store) -> None:
    boot = Span(step="boot", started_at=NOW)
    attempt = Attempt(attempt=1, label="l", machine_id=1, offer_id=1, dph_usd=2.0, instance_id=7, spans=(boot,))
    facts: dict[str, Any] = {"flow_run_id": FLOW_RUN, "run": "tools-35b", "started_at": NOW, "planned_usd": None}
    flight = Flight(**facts, max_usd=9.0, market="vast", attempts=(attempt,))
    store.put_bytes(layout.flight(FLOW_RUN), flight.model_dump_json().encode())
    made = alarms.of_run(store, FLOW_RUN, "box_kept", reason="r", do="d", at=NOW + 1800)
    assert (made.run, made.instances, made.dph_usd, made.spent_usd) == ("tools-35b", (7,), 2.0, 1.0)


def test_the_reaper_says_that_it_saw_everything(prefect: Prefect) -> None:
    alarms.reaper_saw_everything(NOW)
    assert [event["event"] for event in prefect.heard] == ["livery.reaper.saw-all"]


@pytest.mark.parametrize("key", ["pnu_5ecret5ecret\nx", "pnu_5ecret\u00fc5ecret"])
def test_a_key_that_cannot_be_sent_neither_hinders_an_alarm_nor_reaches_a_log(
    store: Store, prefect: Prefect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    monkeypatch.setenv("PREFECT_API_KEY", key)
    alarms.sound(store, alarm())
    assert not prefect.heard and alarms.standing(store)
    assert "Prefect was not told" in caplog.text and "5ecret" not in caplog.text


def test_a_line_break_at_the_end_of_a_key_is_not_part_of_it(
    store: Store, prefect: Prefect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_KEY", "pnu_5ecret\n")
    alarms.sound(store, alarm())
    assert prefect.logins == ["Bearer pnu_5ecret"]
