from __future__ import annotations

import pytest

from tasks.hosts import bad_machines, remember
from tests.tasks.pretend import NOW
from training.box.store import Store


def test_a_machine_is_remembered_with_its_reason_until_it_expires(store: Store) -> None:
    remember(store, 35101, "uplink 3 Mbps", now=NOW)
    remember(store, 35102, "driver 550", now=NOW, days=1)
    assert bad_machines(store, now=NOW + 3600) == {35101: "uplink 3 Mbps", 35102: "driver 550"}
    assert bad_machines(store, now=NOW + 2 * 86_400) == {35101: "uplink 3 Mbps"}
    assert bad_machines(store, now=NOW + 8 * 86_400) == {}


def test_deleting_the_object_forgives_the_machine(store: Store) -> None:
    remember(store, 35101, "x", now=NOW)
    store.delete("hosts/35101.json")
    assert bad_machines(store, now=NOW) == {}


def test_a_note_that_cannot_be_read_is_said_and_skipped(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.put_bytes("hosts/1.json", b"not json")
    remember(store, 2, "x", now=NOW)
    assert bad_machines(store, now=NOW) == {2: "x"}
    assert "hosts/1.json cannot be read" in caplog.text
