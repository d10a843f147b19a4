from __future__ import annotations

import time

import pytest

from flows.__main__ import main as flows
from tasks.domain import Offer
from tasks.errors import BootFailed, BoxError, BoxLost, InstallFailed, LoginFailed, PreflightFailed, TransferFailed
from tasks.hosts import HALF_LIFE_DAYS, BadHost, Failure, Kind, bad_machines, kind_of, read_hosts, remember, table
from tests.tasks.pretend import NOW
from training.box.store import Store

DAY = 86_400.0


def test_the_terminal_shows_what_is_remembered_without_prefect(
    environment: dict[str, str], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    remember(store, 35101, "boot", "not running after 900 s", now=time.time(), usd=0.25)
    assert flows(["hosts"]) == 0
    said = capsys.readouterr().out
    assert "35101" in said and "boot: not running after 900 s" in said and "hosts/<machine id>.json" in said


def offer(machine_id: int, host_id: int | None) -> Offer:
    return Offer(
        id=machine_id * 10,
        machine_id=machine_id,
        host_id=host_id,
        gpu_name="RTX PRO 6000 WS",
        num_gpus=1,
        gpu_ram_mb=97_887,
        disk_space_gb=500,
        dph_total_usd=1.1,
    )


@pytest.mark.parametrize("kind", HALF_LIFE_DAYS)
def test_one_failure_counts_for_one_half_life_of_its_kind(store: Store, kind: Kind) -> None:
    remember(store, 35101, kind, "x", now=NOW)
    end = NOW + HALF_LIFE_DAYS[kind] * DAY
    assert bad_machines(store, now=end - 60)
    assert not bad_machines(store, now=end + 60)


def test_a_machine_that_fails_again_is_left_out_for_longer() -> None:
    once = BadHost(machine_id=1, failures=(Failure(kind="boot", reason="x", at=NOW),))
    twice = once.model_copy(update={"failures": once.failures * 2})
    assert (once.until - NOW) / DAY == pytest.approx(3, abs=0.01)
    assert (twice.until - NOW) / DAY == pytest.approx(6, abs=0.01)
    late = once.model_copy(update={"failures": (*once.failures, Failure(kind="boot", reason="y", at=NOW + 30 * DAY))})
    assert late.until - NOW - 30 * DAY == pytest.approx(3 * DAY, rel=0.01), "what is long ago hardly counts"


def test_a_machine_is_remembered_with_reason_date_dollars_and_end(store: Store) -> None:
    remember(store, 35101, "boot", "not running after 900 s", now=NOW, usd=0.25, host_id=7, run="tools")
    remember(store, 35101, "network", "uplink 3 Mbps", now=NOW + 3600, usd=0.5)
    (note,) = read_hosts(store)
    assert (note.host_id, [failure.usd for failure in note.failures]) == (7, [0.25, 0.5])
    said = bad_machines(store, now=NOW + 3600)[35101]
    assert said == "uplink 3 Mbps (2027-01-03, 2 failures, $0.75; out until 2027-01-08)"


def test_a_drivers_failure_outlasts_a_busy_lines() -> None:
    assert HALF_LIFE_DAYS["hardware"] > HALF_LIFE_DAYS["lost"] > HALF_LIFE_DAYS["network"]


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BootFailed("x"), "boot"),
        (LoginFailed("x"), "boot"),
        (PreflightFailed("x", fault="driver"), "hardware"),
        (PreflightFailed("x", fault="uplink_mbps"), "network"),
        (InstallFailed("x"), "install"),
        (TransferFailed("x"), "network"),
        (BoxLost("x"), "lost"),
    ],
)
def test_an_errors_kind_decides_how_long_it_counts(error: BoxError, kind: str) -> None:
    assert kind_of(error) == kind


def test_two_machines_of_one_host_take_its_others_with_them(store: Store) -> None:
    offers = [offer(1, 7), offer(2, 7), offer(3, 7), offer(4, 8), offer(5, None)]
    remember(store, 1, "boot", "x", now=NOW, host_id=7)
    remember(store, 1, "boot", "again", now=NOW, host_id=7)
    remember(store, 5, "boot", "of no known host", now=NOW)
    assert set(bad_machines(store, now=NOW, offers=offers)) == {1, 5}, "two failures of one machine are no host's"
    remember(store, 2, "boot", "x", now=NOW, host_id=7)
    found = bad_machines(store, now=NOW, offers=offers)
    assert set(found) == {1, 2, 3, 5}
    assert found[3] == "host 7 is left out, its machines 1, 2 failed lately"
    assert set(bad_machines(store, now=NOW + 4 * DAY, offers=offers)) == {1}, "machine 1 failed twice, the host is free"


def test_deleting_the_object_forgives_the_machine(store: Store) -> None:
    remember(store, 35101, "boot", "x", now=NOW)
    store.delete("hosts/35101.json")
    assert bad_machines(store, now=NOW) == {}


def test_a_note_that_cannot_be_read_is_said_and_skipped(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put_bytes("hosts/1.json", b"not json")
    remember(store, 2, "boot", "x", now=NOW)
    assert set(bad_machines(store, now=NOW)) == {2}
    assert "hosts/1.json cannot be read" in caplog.text


def test_the_table_shows_the_dearest_first_and_who_is_forgiven(store: Store) -> None:
    remember(store, 1, "install", "old", now=NOW - 30 * DAY, usd=9)
    remember(store, 2, "boot", "cheap", now=NOW, usd=0.1, host_id=7)
    remember(store, 3, "boot", "dear", now=NOW, usd=0.9, host_id=7)
    lines = table(read_hosts(store), now=NOW).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["3", "2", "1"]
    assert "forgiven" in lines[3] and "boot: dear" in lines[1]
    assert lines[4] == "host 7: all its machines are left out"
    assert table([], now=NOW) == "no machine has failed"
