"""What is sent, in which order and form, and what happens when it cannot be; against a real S3 server and a folder."""

from __future__ import annotations

import array
import json
import os
import random
import struct
import time
from pathlib import Path

import pytest

from tests.training.box.netfault import Link
from tests.training.checkpoints import NAMES, checkpoint, manifest, steps, uploader_of, wait
from training.box.store import Store
from training.contract import layout
from training.contract.durable import Interval
from training.contract.events import CheckpointDurable, Notice, read_events
from training.contract.manifest import Parent, parse_manifest
from training.uploader import UploadFailed


@pytest.fixture
def s3_here(s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The server's address and key in this process's environment, which the transfers inherit."""
    for name, value in s3.items():
        monkeypatch.setenv(name, value)
    return s3


def test_the_newest_waiting_checkpoint_wins_and_a_final_one_is_never_dropped(
    tmp_path: Path, s3_here: dict[str, str]
) -> None:
    uploader, _, store = uploader_of(tmp_path, s3_here, "newest")
    for phase, step in (("cpt", 10), ("sft", 2), ("sft", 4), ("sft", 6)):
        uploader.stage(checkpoint(tmp_path / phase, step), NAMES, manifest("newest", phase, step))
    wait(uploader)
    uploader.close()
    assert steps(store, "newest", "cpt") == [10]
    assert steps(store, "newest", "sft") == [6], "the first upload takes a second, in which newer ones replaced 2 and 4"


def test_staged_files_survive_the_trainers_rotation(tmp_path: Path) -> None:
    uploader, _, store = uploader_of(tmp_path, {}, "rotation")
    directory = checkpoint(tmp_path / "cpt", 10)
    uploader.stage(directory, NAMES, manifest("rotation", "cpt", 10))
    for name in NAMES:
        os.unlink(directory / name)
    wait(uploader)
    uploader.close()
    assert steps(store, "rotation", "cpt") == [10]


def test_an_unfinished_phase_keeps_its_last_two(tmp_path: Path) -> None:
    uploader, _, store = uploader_of(tmp_path, {}, "two")
    for step in (2, 4, 6):
        uploader.stage(checkpoint(tmp_path / "cpt", step), NAMES, manifest("two", "cpt", step))
        wait(uploader)
    uploader.close()
    assert steps(store, "two", "cpt") == [4, 6]


def test_what_was_begun_from_an_older_end_of_the_phase_before_never_pushes_a_new_checkpoint_out(tmp_path: Path) -> None:
    """The phase before had to be trained again: the old, finished checkpoint of this one lies at a later step than the new ones."""
    uploader, _, store = uploader_of(tmp_path, {}, "again")
    for step, sha256 in ((10, "a"), (2, "b"), (4, "b")):
        parent = Parent(key=layout.manifest("again", "cpt", 9), sha256=sha256 * 64)
        begun = manifest("again", "sft", step).model_copy(update={"parent": parent})
        uploader.stage(checkpoint(tmp_path / "sft", step), NAMES, begun)
        wait(uploader)
    uploader.close()
    assert steps(store, "again", "sft") == [2, 4]


def test_a_last_checkpoint_that_cannot_be_uploaded_is_given_up_and_blamed_on_the_box(
    tmp_path: Path, s3_here: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader, said, _ = uploader_of(tmp_path, s3_here, "dead", attempts=2, pauses_s=(0.1,))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    uploader.stage(checkpoint(tmp_path / "cpt", 10), NAMES, manifest("dead", "cpt", 10))
    with pytest.raises(UploadFailed, match="failed 2 times") as caught:
        wait(uploader)
    uploader.close()
    assert not caught.value.user_fault
    assert len(said) == 2


def test_a_bucket_that_refuses_is_the_users_fault_and_not_tried_again(
    tmp_path: Path, s3_here: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    uploader, said, _ = uploader_of(tmp_path, s3_here, "denied")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    uploader.stage(checkpoint(tmp_path / "cpt", 10), NAMES, manifest("denied", "cpt", 10))
    with pytest.raises(UploadFailed) as caught:
        wait(uploader)
    uploader.close()
    assert caught.value.user_fault
    assert len(said) == 1


def test_what_waits_at_the_end_stays_staged_with_its_manifest(tmp_path: Path, s3_here: dict[str, str]) -> None:
    uploader, _, store = uploader_of(tmp_path, s3_here, "staged", python="/nowhere/python", pauses_s=(60.0,))
    uploader.stage(checkpoint(tmp_path / "cpt", 10), NAMES, manifest("staged", "cpt", 10))
    uploader.close()
    staged = tmp_path / "box" / "work" / "staging" / "cpt_00000010"
    assert sorted(path.name for path in staged.iterdir()) == ["manifest.json", *NAMES]
    assert steps(store, "staged", "cpt") == []


@pytest.mark.parametrize("fault", ["not an error that is expected", "a disk too full for a notice"])
def test_a_fault_in_the_uploader_is_an_error_of_the_run_and_never_a_silence(
    tmp_path: Path, s3_here: dict[str, str], fault: str
) -> None:
    """With its thread dead, an empty queue would look like durable checkpoints, and a full one would be waited for till the hard end."""
    python = "/nowhere\0/python" if fault.startswith("not") else "/nowhere/python"
    uploader, _, _ = uploader_of(tmp_path, s3_here, "fault", python=python, attempts=2, pauses_s=(0.1,))

    def full(what: str, reason: str) -> None:
        raise OSError(28, "No space left on device")

    if fault.startswith("a disk"):
        uploader.notice = full
    uploader.stage(checkpoint(tmp_path / "cpt", 10), NAMES, manifest("fault", "cpt", 10))
    with pytest.raises(UploadFailed, match="failed 2 times"):
        wait(uploader)
    uploader.close()


# The rhythm.


def test_once_the_uplink_is_measured_a_save_waits_for_its_interval_and_the_end_for_none(
    tmp_path: Path, s3_here: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.uploader.MEASURED_BYTES", 1)
    uploader, _, store = uploader_of(tmp_path, s3_here, "rhythm")
    uploader._rhythm._assignment = uploader._rhythm._assignment.model_copy(
        update={"dph_usd": 1.0, "inet_up_usd_gb": 1e4}
    )
    uploader.stage(checkpoint(tmp_path / "cpt", 2), NAMES, manifest("rhythm", "cpt", 2))
    wait(uploader)
    assert uploader._rhythm.next_at - time.monotonic() > 30, uploader._rhythm._interval
    uploader.stage(checkpoint(tmp_path / "cpt", 4), NAMES, manifest("rhythm", "cpt", 4))
    time.sleep(3)
    staged = tmp_path / "box" / "work" / "staging" / "cpt_00000004"
    assert steps(store, "rhythm", "cpt") == [2] and uploader.is_idle()
    assert (staged / "manifest.json").exists(), "it is whole on this box meanwhile, for a runner that is started again"
    uploader.stage(checkpoint(tmp_path / "cpt", 6), NAMES, manifest("rhythm", "cpt", 6))
    uploader.stage(checkpoint(tmp_path / "cpt", 10), NAMES, manifest("rhythm", "cpt", 10))
    deadline = time.monotonic() + 60
    while steps(store, "rhythm", "cpt") != [10] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert steps(store, "rhythm", "cpt") == [10], (
        "the last one is never made to wait, and takes the waiting ones' place"
    )
    uploader.close()
    (told,) = [e for e in read_events(tmp_path / "box" / "events.jsonl") if isinstance(e, Notice)]
    assert told.routine and told.what == "durable interval"


def test_what_waits_for_its_interval_is_sent_when_the_run_is_told_to_stop(
    tmp_path: Path, s3_here: dict[str, str]
) -> None:
    uploader, _, store = uploader_of(tmp_path, s3_here, "told")
    uploader._rhythm._interval = Interval(3600.0, 1.0, "for this test")
    uploader._rhythm.began()
    uploader.stage(checkpoint(tmp_path / "cpt", 4), NAMES, manifest("told", "cpt", 4))
    wait(uploader)
    uploader.close()
    assert steps(store, "told", "cpt") == [4]


def test_an_empty_file_right_after_a_save_stops_the_run_and_is_never_sent(tmp_path: Path) -> None:
    uploader, _, store = uploader_of(tmp_path, {}, "empty")
    directory = checkpoint(tmp_path / "cpt", 10)
    (directory / NAMES[1]).write_bytes(b"")
    with pytest.raises(UploadFailed, match=f"{NAMES[1]} has 0 bytes right after it was saved") as caught:
        uploader.stage(directory, NAMES, manifest("empty", "cpt", 10))
    uploader.close()
    assert not caught.value.user_fault and steps(store, "empty", "cpt") == []


# Less on a slow uplink.

ALLOWED: dict[str, object] = {"allow": ("light_checkpoints",)}


def light_steps(store: Store, run: str, phase: str) -> list[int]:
    return [int(info.key[-13:-5]) for info in store.list(layout.light_manifests(run, phase))]


def order(tmp_path: Path, text: str) -> None:
    (tmp_path / "box" / "uplink.json").write_text(text)


def test_an_order_from_outside_sends_the_last_checkpoint_in_its_light_form_and_no_other(
    tmp_path: Path, s3_here: dict[str, str]
) -> None:
    uploader, said, store = uploader_of(tmp_path, s3_here, "light", changes=ALLOWED)
    order(tmp_path, '{"send": "light", "reason": "61 Mbps"}')
    uploader.stage(checkpoint(tmp_path / "cpt", 4), NAMES, manifest("light", "cpt", 4))
    wait(uploader)
    assert steps(store, "light", "cpt") == [4] and light_steps(store, "light", "cpt") == []
    staged = uploader.stage(checkpoint(tmp_path / "cpt", 10), NAMES, manifest("light", "cpt", 10))
    wait(uploader)
    uploader.close()
    assert 10 not in steps(store, "light", "cpt") and light_steps(store, "light", "cpt") == [10]
    light = parse_manifest(store.get_bytes(layout.light_manifest("light", "cpt", 10)) or b"", "light")
    assert light.stands_for == staged.sealed, "what the next phase names as its parent"
    full = (tmp_path / "cpt" / "checkpoint-10" / "weights.bin").stat().st_size
    assert light.files["weights.bin"].bytes == full // 4 * 2
    assert (uploader.light_results["cpt"] / "weights.bin").exists(), "for the export"
    assert any("told from outside" in each for each in said)
    durable = [e for e in read_events(tmp_path / "box" / "events.jsonl") if isinstance(e, CheckpointDurable)]
    assert [(each.step, each.light) for each in durable] == [(4, False), (10, True)]


def test_an_order_given_while_the_whole_is_being_sent_ends_that_and_sends_less(
    tmp_path: Path, s3_here: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(s3_here["AWS_ENDPOINT_URL_S3"].rpartition(":")[2])
    link = Link(port)
    link.up_bps = 200_000
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", link.url)
    budget: dict[str, float] = {"stall_s": 20, "upload_s": 100}
    uploader, _, store = uploader_of(tmp_path, s3_here, "midway", changes=ALLOWED, budget=budget)
    directory = checkpoint(tmp_path / "cpt", 10)
    (directory / "optimizer.pt").write_bytes(os.urandom(20 << 20))
    uploader.stage(directory, (*NAMES, "optimizer.pt"), manifest("midway", "cpt", 10))
    while link.bytes_up < 300_000:
        time.sleep(0.1)
    order(tmp_path, '{"send": "light"}')
    wait(uploader)
    uploader.close()
    link.close()
    assert steps(store, "midway", "cpt") == [] and light_steps(store, "midway", "cpt") == [10]
    assert store.list(f"{layout.run('midway')}/blobs/"), "the light files"
    assert store.abort_uploads(layout.run("midway")) == 0, "what was half sent is not left to be billed"


def adapter(directory: Path, size: int) -> tuple[str, ...]:
    """An adapter of `size` random fp32 numbers for the routed experts and a hundred for attention, in a directory that is to be staged."""
    header: dict[str, object] = {}
    at = 0
    for name, count in (("layers.0.self_attn.q_proj.lora_A.weight", 100), ("layers.0.mlp.experts.lora_A.weight", size)):
        header[name] = {"dtype": "F32", "shape": [count], "data_offsets": [at, at + 4 * count]}
        at += 4 * count
    text = json.dumps(header).encode()
    numbers = array.array("f", (random.random() for _ in range(100 + size))).tobytes()
    directory.mkdir(parents=True)
    (directory / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + numbers)
    (directory / "adapter_config.json").write_text("{}")
    return "adapter_config.json", "adapter_model.safetensors"


def test_on_a_line_that_may_die_the_adapter_without_its_experts_goes_first_and_is_no_checkpoint(
    tmp_path: Path, s3_here: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(int(s3_here["AWS_ENDPOINT_URL_S3"].rpartition(":")[2]))
    link.up_bps = 200_000
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", link.url)
    budget: dict[str, float] = {"stall_s": 20, "upload_s": 300}
    uploader, said, store = uploader_of(tmp_path, s3_here, "first", changes=ALLOWED, budget=budget)
    order(tmp_path, '{"send": "light"}')
    names = adapter(tmp_path / "cpt" / "checkpoint-10", 1 << 20)
    uploader.stage(tmp_path / "cpt" / "checkpoint-10", names, manifest("first", "cpt", 10))
    prefix = layout.first("first", "cpt", 10)
    deadline = time.monotonic() + 60
    while not any("first of cpt/10 is in the bucket" in each for each in said):
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    sizes = {info.key.removeprefix(prefix): info.size for info in store.list(prefix)}
    assert set(sizes) == set(names) and sizes["adapter_model.safetensors"] < 1000
    assert light_steps(store, "first", "cpt") == [], "two megabytes of experts are still to come"
    link.up_bps = None
    wait(uploader)
    uploader.close()
    link.close()
    assert light_steps(store, "first", "cpt") == [10] and store.list(prefix) == []


def test_an_uplink_too_slow_for_its_budget_goes_light_only_with_the_recipes_word(
    tmp_path: Path, s3_here: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(int(s3_here["AWS_ENDPOINT_URL_S3"].rpartition(":")[2]))
    link.up_bps = 380_000
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", link.url)
    uploader, said, store = uploader_of(
        tmp_path, s3_here, "word", changes=ALLOWED, budget={"stall_s": 20, "upload_s": 15}
    )
    directory = checkpoint(tmp_path / "cpt", 10)
    (directory / "optimizer.pt").write_bytes(os.urandom(30 << 20))
    uploader.stage(directory, (*NAMES, "optimizer.pt"), manifest("word", "cpt", 10))
    wait(uploader)
    uploader.close()
    link.close()
    assert steps(store, "word", "cpt") == [] and light_steps(store, "word", "cpt") == [10]
    assert any("the uplink is too slow" in each for each in said)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"send": "less"}', "order for the uplink not understood"),
        ("[]", "order for the uplink not understood"),
        ('{"send": "light"}', "order for the uplink not obeyed: uplink.json holds"),
    ],
)
def test_an_order_that_cannot_be_read_or_is_not_allowed_is_said_once_and_obeyed_by_nobody(
    tmp_path: Path, s3_here: dict[str, str], text: str, words: str
) -> None:
    uploader, said, store = uploader_of(tmp_path, s3_here, "order")
    order(tmp_path, text)
    uploader.stage(checkpoint(tmp_path / "cpt", 10), NAMES, manifest("order", "cpt", 10))
    wait(uploader)
    uploader.close()
    assert steps(store, "order", "cpt") == [10]
    assert sum(words in each for each in said) == 1
