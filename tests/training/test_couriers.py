"""Files for the runner by real transfer commands over links that break, and in this process from a folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.box.netfault import Link
from tests.training.conftest import BUCKET, place_box, recipe_of
from training.box.files import Item
from training.box.store import Store, StoreDenied, StoreUnreachable
from training.contract.events import Transfer, read_events
from training.couriers import Commanded, Courier, InProcess

DATA = {"weights.bin": os.urandom(2 << 20), "sub/state.json": b"{}"}


class Told(Exception):
    pass


@pytest.fixture
def link(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """In front of the bucket, in this process's environment, which the transfers inherit."""
    link = Link(int(s3["AWS_ENDPOINT_URL_S3"].rpartition(":")[2]))
    for name, value in (s3 | {"AWS_ENDPOINT_URL_S3": link.url}).items():
        monkeypatch.setenv(name, value)
    yield link
    link.close()


def commanded(tmp_path: Path, told: threading.Event | None = None, **budget: float) -> Commanded:
    recipe = recipe_of("counting")
    recipe = recipe.model_copy(update={"budget": recipe.budget.model_copy(update=budget)})
    box = place_box(tmp_path / "box", {}, recipe, "couriers", bucket=BUCKET)
    (box.root / "work").mkdir()

    def stopped() -> None:
        if told is not None and told.is_set():
            raise Told

    return Commanded(box.assignment, sys.executable, box.root / "work", stopped)


def items(prefix: str) -> list[Item]:
    return [
        Item(name=name, key=f"{prefix}/{name}", bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in DATA.items()
    ]


def write(folder: Path) -> Path:
    for name, data in DATA.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("kind", ["commanded", "in this process"])
def test_what_is_sent_comes_back_and_what_is_missing_or_damaged_is_said(
    tmp_path: Path, store: Store, link: Link, kind: str
) -> None:
    courier: Courier = commanded(tmp_path) if kind == "commanded" else InProcess(store)
    prefix = f"couriers/{kind.replace(' ', '-')}"
    courier.send("upload adapter", write(tmp_path / "out"), items(prefix))
    assert courier.fetch("restore sft/4", tmp_path / "back", items(prefix)) == ""
    assert {name: (tmp_path / "back" / name).read_bytes() for name in DATA} == DATA
    assert "does not exist" in courier.fetch("restore sft/4", tmp_path / "none", items("couriers/nowhere"))
    store.put_bytes(f"{prefix}/sub/state.json", b"[]")
    assert "sha256 of what arrived" in courier.fetch("restore sft/4", tmp_path / "damaged", items(prefix))
    if kind == "commanded":
        seen = {event.what for event in read_events(tmp_path / "box" / "events.jsonl") if isinstance(event, Transfer)}
        assert seen == {"upload adapter", "restore sft/4"}


def test_a_restore_whose_link_freezes_is_killed_and_says_nothing_of_the_checkpoint(
    tmp_path: Path, store: Store, link: Link
) -> None:
    InProcess(store).send("", write(tmp_path / "out"), items("couriers/frozen"))
    courier = commanded(tmp_path, stall_s=1)
    link.down_bps = 1e6
    threading.Timer(2.5, link.freeze).start()
    began = time.monotonic()
    with pytest.raises(StoreUnreachable, match=r"restore sft/4: .*no byte moved for"):
        courier.fetch("restore sft/4", tmp_path / "back", items("couriers/frozen"))
    assert time.monotonic() - began < 40


def test_a_key_that_is_refused_is_no_damage(tmp_path: Path, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreDenied, match="check the access key"):
        commanded(tmp_path).fetch("restore sft/4", tmp_path / "back", items("couriers/denied"))


def test_told_to_stop_it_leaves_no_process_behind(tmp_path: Path, store: Store, link: Link) -> None:
    InProcess(store).send("", write(tmp_path / "out"), items("couriers/stopped"))
    told = threading.Event()
    link.down_bps = 100_000
    threading.Timer(2.5, told.set).start()
    with pytest.raises(Told):
        commanded(tmp_path, told).fetch("restore sft/4", tmp_path / "back", items("couriers/stopped"))
    mark = str(tmp_path / "box")
    deadline = time.monotonic() + 10
    while mark in (running := subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout):
        assert time.monotonic() < deadline, [line for line in running.splitlines() if mark in line]
        time.sleep(0.1)
