"""Transfers by the real command line and child processes, against a real bucket over links that break."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.box.conftest import BUCKET, Weed
from tests.training.box.netfault import Link
from training.box.child import Fenced
from training.box.store import Store, StoreConflict
from training.box.transfer import load_private_env
from training.box.upload import _write_manifest, by_importance
from training.contract import layout
from training.contract.checks import CheckReport
from training.contract.claims import Claim
from training.contract.events import CheckpointDurable, Notice, Transfer, read_events
from training.contract.manifest import FileEntry, Manifest
from training.contract.recipe import Assignment, Recipe

MB = 1 << 20


class Home:
    """A box's ~/livery with an assignment, and the transfer module's command line on it."""

    def __init__(self, root: Path, environ: dict[str, str], run: str, **budget: object) -> None:
        self.root, self.environ, self.run_name = root, environ, run
        recipe = Recipe.model_validate(
            {
                "name": run,
                "model": {"source": f"bucket:models/{run}", "family": "qwen3_5_moe", "size_gb": 0.01},
                "phases": [{"kind": "sft", "data": f"bucket:data/{run}.jsonl", "steps": 4, "learning_rate": 0.001}],
                "box": {
                    "tier": "rehearsal",
                    "device": "none",
                    "min_inet_up_mbps": 20,
                    "min_inet_down_mbps": 20,
                },
                "budget": {"max_usd": 1, "stall_s": 5, **budget},
                "trainer": "counting",
            }
        )
        assignment = Assignment(
            recipe=recipe, run=run, flow_run_id="f", attempt=1, bucket=BUCKET, hard_end=int(time.time()) + 999
        )
        root.mkdir(parents=True)
        (root / "recipe.json").write_text(assignment.model_dump_json())

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "training.box.transfer", *words, "--assignment", str(self.root / "recipe.json")],
            env={**os.environ, **self.environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, *words: str) -> tuple[int, str]:
        process = self.start(*words)
        output = process.communicate(timeout=120)[0]
        return process.returncode, output

    def events(self, kind: type) -> list[object]:
        return [event for event in read_events(self.root / "events.jsonl") if isinstance(event, kind)]


@pytest.fixture
def home(tmp_path: Path, weed: Weed, link: Link, request: pytest.FixtureRequest) -> Callable[..., Home]:
    def make(**budget: object) -> Home:
        run = "t" + hashlib.sha1(request.node.name.encode()).hexdigest()[:10]
        return Home(tmp_path / "livery", weed.environ(link.port), run, **budget)

    return make


def mirror_model(store: Store, home: Home, size: int = 3 * MB) -> dict[str, bytes]:
    files = {"config.json": b"{}", "model-1.safetensors": os.urandom(size), "sub/tokenizer.json": b"[]"}
    for name, data in files.items():
        store.put_bytes(f"models/{home.run_name}/{name}", data)
    store.put_bytes(f"data/{home.run_name}.jsonl", b'{"messages": []}\n')
    return files


def checkpoint(root: Path, home: Home, files: dict[str, bytes], step: int = 4) -> Manifest:
    root.mkdir(parents=True)
    for name, data in files.items():
        (root / name).write_bytes(data)
    manifest = Manifest(
        run=home.run_name,
        phase="sft",
        step=step,
        max_steps=4,
        created_at=1.0,
        phase_digest="d",
        data_sha256="s",
        parent=None,
        versions={},
        files={
            name: FileEntry(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data)) for name, data in files.items()
        },
    )
    (root / "manifest.json").write_text(manifest.model_dump_json())
    return manifest


def test_prefetch_brings_model_and_data_verified_and_the_marker_last(store: Store, home: Callable[..., Home]) -> None:
    box = home()
    files = mirror_model(store, box)
    code, output = box.call("prefetch")
    assert code == 0, output
    for name, data in files.items():
        assert (box.root / "model" / name).read_bytes() == data
    marker = json.loads((box.root / "prefetched.json").read_text())["files"]
    assert set(marker) == {"data/sft.jsonl", *(f"model/{name}" for name in files)}
    assert marker["model/config.json"]["sha256"] == hashlib.sha256(b"{}").hexdigest()
    finished = {event.what for event in box.events(Transfer) if event.finished}  # type: ignore[attr-defined]
    assert finished == {"prefetch model", "prefetch data"}


def test_a_second_prefetch_moves_nothing(store: Store, home: Callable[..., Home], link: Link) -> None:
    box = home()
    mirror_model(store, box)
    assert box.call("prefetch")[0] == 0
    link.refuse()
    assert box.call("prefetch")[0] == 0


def test_missing_data_or_an_empty_model_is_the_users_and_says_what_to_do(
    store: Store, home: Callable[..., Home]
) -> None:
    box = home()
    code, output = box.call("prefetch")
    assert code == 2 and f"data/{box.run_name}.jsonl does not exist" in output and "recipe's data" in output
    store.put_bytes(f"data/{box.run_name}.jsonl", b"{}\n")
    code, output = box.call("prefetch")
    assert code == 2 and "mirror the model there first" in output
    assert not (box.root / "prefetched.json").exists()


def test_a_bad_key_ends_at_once_and_is_not_printed(home: Callable[..., Home]) -> None:
    box = home()
    box.environ["AWS_SECRET_ACCESS_KEY"] = "w" * 40
    began = time.monotonic()
    code, output = box.call("prefetch")
    assert code == 2 and "check the access key" in output
    assert "w" * 40 not in output and time.monotonic() - began < 10


def test_the_private_file_gives_way_to_the_boxs_own_environment(store: Store, home: Callable[..., Home]) -> None:
    box = home()
    mirror_model(store, box)
    lines = "".join(f"{key}={value}\n" for key, value in box.environ.items() if key != "AWS_ENDPOINT_URL_S3")
    (box.root / "private.env").write_text(lines + "AWS_ENDPOINT_URL_S3=http://127.0.0.1:1\n")
    box.environ = {"AWS_ENDPOINT_URL_S3": box.environ["AWS_ENDPOINT_URL_S3"]}
    code, output = box.call("prefetch")
    assert code == 0, output


def test_a_corrupted_download_is_fetched_again(store: Store, home: Callable[..., Home], link: Link) -> None:
    box = home()
    files = mirror_model(store, box)
    link.flip_down_byte_at = 1_000_000
    code, output = box.call("prefetch")
    assert code == 0, output
    assert (box.root / "model/model-1.safetensors").read_bytes() == files["model-1.safetensors"]


def test_an_object_that_is_not_what_it_claims_is_named_and_not_fetched_until_the_budget_ends(
    store: Store, home: Callable[..., Home], link: Link
) -> None:
    box = home(prefetch_s=300)
    mirror_model(store, box)
    key = f"models/{box.run_name}/model-1.safetensors"
    store._client.put_object(Bucket=BUCKET, Key=key, Body=os.urandom(3 * MB), Metadata={"sha256": "0" * 64})
    code, output = box.call("prefetch")
    assert code == 6 and f"{key}: sha256 of what arrived is " in output and "want 000000000000" in output
    assert link.bytes_down < 7 * MB, "twice, to be sure that it is not the line"


# What the runner asks for.


def errand(box: Home, folder: Path, data: dict[str, bytes], what: str = "restore sft/4") -> tuple[str, ...]:
    items = [
        {
            "name": name,
            "key": layout.blob(box.run_name, hashlib.sha256(content).hexdigest()),
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        for name, content in data.items()
    ]
    path = box.root / "errand.json"
    path.write_text(json.dumps({"what": what, "folder": str(folder), "items": items}))
    return "--errand", str(path)


def test_a_checkpoint_comes_back_by_name_with_its_rate_in_the_events(
    store: Store, home: Callable[..., Home], link: Link, tmp_path: Path
) -> None:
    box = home()
    data = {"adapter/weights": os.urandom(3 * MB), "state.json": b"{}"}
    for content in data.values():
        store.put_bytes(layout.blob(box.run_name, hashlib.sha256(content).hexdigest()), content)
    link.flip_down_byte_at = 1_000_000
    code, output = box.call("fetch", *errand(box, tmp_path / "back", data))
    assert code == 0, output
    assert {name: (tmp_path / "back" / name).read_bytes() for name in data} == data
    last = box.events(Transfer)[-1]
    assert isinstance(last, Transfer) and (last.what, last.direction, last.finished) == ("restore sft/4", "down", True)
    assert last.line_bytes > 6 * MB, "what was fetched again is counted"


def test_a_restore_over_a_frozen_link_is_killed_within_its_stall_rule(
    store: Store, home: Callable[..., Home], link: Link, tmp_path: Path
) -> None:
    box = home(stall_s=1)
    data = {"weights": os.urandom(3 * MB)}
    store.put_bytes(layout.blob(box.run_name, hashlib.sha256(data["weights"]).hexdigest()), data["weights"])
    link.down_bps = 1e6
    process = box.start("fetch", *errand(box, tmp_path / "back", data))
    while link.bytes_down < MB:
        time.sleep(0.02)
    link.freeze()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 3 and "restore sft/4, try 3: no byte moved" in output, output


def test_a_blob_that_is_missing_has_an_exit_code_of_its_own(
    store: Store, home: Callable[..., Home], tmp_path: Path
) -> None:
    box = home()
    code, output = box.call("fetch", *errand(box, tmp_path / "back", {"weights": b"never sent"}))
    assert code == 6 and "does not exist" in output


def test_what_is_sent_for_the_export_has_a_budget_too(store: Store, home: Callable[..., Home], link: Link) -> None:
    box = home(upload_s=3, stall_s=2)
    data = {"weights": os.urandom(4 * MB)}
    (box.root / "weights").write_bytes(data["weights"])
    words = errand(box, box.root, data, what="upload adapter")
    link.up_bps = 200_000
    code, output = box.call("send", *words)
    assert code == 3 and "upload adapter, try " in output and "budget of 3 s is used up" in output
    link.up_bps = None
    assert box.call("send", *words)[0] == 0
    assert store.get_bytes(layout.blob(box.run_name, hashlib.sha256(data["weights"]).hexdigest())) == data["weights"]


def test_a_link_frozen_for_good_is_given_up_with_its_rates(store: Store, home: Callable[..., Home], link: Link) -> None:
    box = home(stall_s=1)
    mirror_model(store, box)
    process = box.start("prefetch")
    link.freeze()
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 3 and "no byte moved" in output and "Mbps" in output
    assert len(box.events(Notice)) == 2


def test_a_link_that_refuses_for_seconds_does_not_use_up_a_try(
    store: Store, home: Callable[..., Home], link: Link
) -> None:
    box = home(stall_s=15)
    mirror_model(store, box)
    link.refuse()
    threading.Timer(5, link.accept).start()
    code, output = box.call("prefetch")
    assert code == 0, output
    assert box.events(Notice) == []


def test_a_checkpoint_is_durable_only_with_its_manifest_which_goes_last(
    store: Store, home: Callable[..., Home], link: Link, tmp_path: Path
) -> None:
    box = home()
    manifest = checkpoint(tmp_path / "c", box, {"big": os.urandom(12 * MB), "small": b"x"})
    link.up_bps = 5e6
    process = box.start("upload", "--directory", str(tmp_path / "c"))
    key = layout.manifest(box.run_name, "sft", 4)
    small = layout.blob(box.run_name, manifest.files["small"].sha256)
    while store.size(small) is None:
        time.sleep(0.05)
    assert store.size(key) is None
    os.kill(process.pid, signal.SIGKILL)  # the child must go with it, not finish in secret
    process.communicate()
    time.sleep(4)
    assert store.size(key) is None
    assert box.events(CheckpointDurable) == []
    link.up_bps = None
    code, output = box.call("upload", "--directory", str(tmp_path / "c"))
    assert code == 0, output
    (durable,) = box.events(CheckpointDurable)
    assert isinstance(durable, CheckpointDurable)
    assert durable.manifest == key and durable.complete and 0 < durable.bytes <= 12 * MB
    assert store.get_bytes(key) == (tmp_path / "c/manifest.json").read_bytes()


def test_a_superseded_box_sends_no_byte_and_a_claim_made_meanwhile_keeps_its_manifest_out(
    store: Store, home: Callable[..., Home], link: Link, tmp_path: Path
) -> None:
    box = home()
    newer = Claim(number=2, runner="x", flow_run_id="other", attempt=3, at=0.0).model_dump_json().encode()
    manifest = checkpoint(tmp_path / "c", box, {"big": os.urandom(6 * MB), "small": b"x"})
    link.up_bps = 5e6
    process = box.start("upload", "--directory", str(tmp_path / "c"), "--claim", "1")
    while store.size(layout.blob(box.run_name, manifest.files["small"].sha256)) is None:
        time.sleep(0.05)
    store.put_bytes(layout.claim(box.run_name, 2), newer)
    link.up_bps = None
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 5, output
    assert "claim 2 of flow run other, attempt 3, has superseded ours (1)" in output
    assert store.size(layout.manifest(box.run_name, "sft", 4)) is None

    checkpoint(tmp_path / "d", box, {"other": b"y"}, step=3)
    assert box.call("upload", "--directory", str(tmp_path / "d"), "--claim", "1")[0] == 5
    assert store.list(f"runs/{box.run_name}/blobs/{hashlib.sha256(b'y').hexdigest()}") == []
    assert box.call("upload", "--directory", str(tmp_path / "d"), "--claim", "2")[0] == 0


def test_an_upload_repeated_sends_nothing_and_a_shared_blob_goes_once(
    store: Store, home: Callable[..., Home], tmp_path: Path
) -> None:
    box = home()
    data = os.urandom(MB)
    checkpoint(tmp_path / "a", box, {"one": data, "two": data}, step=2)
    assert box.call("upload", "--directory", str(tmp_path / "a"))[0] == 0
    checkpoint(tmp_path / "b", box, {"one": data, "new": b"n"}, step=4)
    assert box.call("upload", "--directory", str(tmp_path / "b"))[0] == 0
    assert box.call("upload", "--directory", str(tmp_path / "b"))[0] == 0
    assert [event.bytes for event in box.events(CheckpointDurable)] == [MB, 1, 0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("harm", ["missing", "changed", "no manifest"])
def test_a_checkpoint_that_is_not_what_its_manifest_says_is_never_uploaded(
    store: Store, home: Callable[..., Home], tmp_path: Path, harm: str
) -> None:
    box = home()
    checkpoint(tmp_path / "c", box, {"weights": b"right"})
    if harm == "missing":
        (tmp_path / "c/weights").unlink()
    elif harm == "changed":
        (tmp_path / "c/weights").write_bytes(b"wrong")
    else:
        (tmp_path / "c/manifest.json").unlink()
    code, output = box.call("upload", "--directory", str(tmp_path / "c"))
    assert code == 2 and "Traceback" not in output and ("manifest" in output)
    assert store.list(layout.run(box.run_name)) == []


def test_a_frozen_uplink_is_noticed_and_another_try_finishes(
    home: Callable[..., Home], link: Link, tmp_path: Path
) -> None:
    box = home(stall_s=2)
    checkpoint(tmp_path / "c", box, {"big": os.urandom(12 * MB)})
    link.up_bps = 3e6
    process = box.start("upload", "--directory", str(tmp_path / "c"))
    while link.bytes_up < MB:
        time.sleep(0.02)
    link.freeze()
    frozen = time.monotonic()
    while not box.events(Notice):
        time.sleep(0.05)
    assert time.monotonic() - frozen < 10
    link.thaw()
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output


def test_a_slow_link_over_its_budget_is_given_up(home: Callable[..., Home], link: Link, tmp_path: Path) -> None:
    box = home(upload_s=3, stall_s=2)
    checkpoint(tmp_path / "c", box, {"big": os.urandom(4 * MB)})
    link.up_bps = 200_000
    code, output = box.call("upload", "--directory", str(tmp_path / "c"))
    assert code == 3 and "budget of 3 s is used up" in output


def links(box: Home, *words: str) -> CheckReport:
    code, output = box.call("links", "--nonce", "n1", "--seconds", "2", *words)
    assert code == 0, output
    return CheckReport.model_validate_json(output.splitlines()[-1])


def test_good_links_pass_and_leave_nothing_behind(store: Store, home: Callable[..., Home]) -> None:
    box = home()
    report = links(box, "--bytes", str(8 * MB))
    assert report.ok and report.nonce == "n1" and {check.id for check in report.checks} >= {"bucket_clock"}
    assert float(report.facts["uplink_mbps"]) > 20
    assert store.list(layout.run(box.run_name)) == []


def test_a_slow_uplink_fails_with_its_measured_rate_in_bounded_time(home: Callable[..., Home], link: Link) -> None:
    box = home()
    link.up_bps = 380_000  # 3.04 Mbps
    began = time.monotonic()
    report = links(box)
    assert [check.id for check in report.failed] == ["uplink_mbps"]
    assert 2.4 < float(report.facts["uplink_mbps"]) < 3.6
    assert time.monotonic() - began < 15


def test_a_slow_downlink_fails_with_its_measured_rate_in_bounded_time(home: Callable[..., Home], link: Link) -> None:
    box = home()
    link.down_bps = 380_000
    began = time.monotonic()
    report = links(box, "--bytes", str(16 * MB))  # all of them would take 44 s
    assert [check.id for check in report.failed] == ["downlink_mbps"]
    assert 2.0 < float(report.facts["downlink_mbps"]) < 3.6
    assert time.monotonic() - began < 20


def test_an_empty_data_file_or_shard_is_the_users_and_named(store: Store, home: Callable[..., Home]) -> None:
    box = home()
    mirror_model(store, box)
    store.put_bytes(f"data/{box.run_name}.jsonl", b"")
    code, output = box.call("prefetch")
    assert code == 2 and f"data/{box.run_name}.jsonl has 0 bytes; upload it again" in output
    store.put_bytes(f"data/{box.run_name}.jsonl", b"{}\n")
    store.put_bytes(f"models/{box.run_name}/model-1.safetensors", b"")
    code, output = box.call("prefetch")
    assert code == 2 and "model-1.safetensors has 0 bytes; mirror the model again" in output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_named_at_once_and_is_this_machines_fault(store: Store, home: Callable[..., Home]) -> None:
    box = home(stall_s=60)
    data = mirror_model(store, box)["model-1.safetensors"]
    etag = store.version(f"models/{box.run_name}/model-1.safetensors")
    assert etag is not None and len(data) == 3 * MB
    (box.root / "model").mkdir()
    (box.root / "model" / f"model-1.safetensors.{etag.strip(chr(34))[:16]}.part").symlink_to("/dev/full")
    code, output = box.call("prefetch")
    assert code == 4 and "this machine's disk failed: No space left on device" in output
    assert box.events(Notice) == [], "no other way is tried"


def test_a_checkpoint_with_an_empty_file_is_never_uploaded(
    store: Store, home: Callable[..., Home], tmp_path: Path
) -> None:
    box = home()
    checkpoint(tmp_path / "c", box, {"optimizer.pt": b"", "weights": b"right"})
    code, output = box.call("upload", "--directory", str(tmp_path / "c"))
    assert code == 2 and "optimizer.pt has 0 bytes: it was never written whole" in output
    assert store.list(layout.run(box.run_name)) == []


def test_what_can_be_used_without_the_trainer_goes_first() -> None:
    sizes = {"optimizer.pt": 20 * MB, "adapter_model.safetensors": 40 * MB, "trainer_state.json": 9, "rng_state.pth": 7}
    files = {name: FileEntry(sha256="0" * 64, bytes=size) for name, size in sizes.items()}
    order = [name for name, _ in by_importance(files)]
    assert order == ["rng_state.pth", "trainer_state.json", "adapter_model.safetensors", "optimizer.pt"]


def test_a_manifest_that_another_wrote_meanwhile_is_not_overwritten(
    store: Store, home: Callable[..., Home], link: Link, tmp_path: Path
) -> None:
    """The look for a newer claim and the write are two requests; what is written in between must stay."""
    box = home()
    checkpoint(tmp_path / "c", box, {"weights": b"ours"})
    key = layout.manifest(box.run_name, "sft", 4)
    seen = store.version(key)
    store.put_bytes(key, b"another's")
    with pytest.raises(StoreConflict):
        _write_manifest(store, box.run_name, 0, key, (tmp_path / "c/manifest.json").read_bytes(), seen)
    assert store.get_bytes(key) == b"another's"
    newer = Claim(number=2, runner="x", flow_run_id="other", attempt=3, at=0.0).model_dump_json().encode()
    store.put_bytes(layout.claim(box.run_name, 2), newer)
    with pytest.raises(Fenced, match="claim 2 of flow run other"):
        _write_manifest(store, box.run_name, 0, key, (tmp_path / "c/manifest.json").read_bytes(), seen)


def test_the_seeds_uplink_is_given_up_within_a_minute_of_its_rule_and_what_arrived_is_kept(
    store: Store, home: Callable[..., Home], link: Link, tmp_path: Path
) -> None:
    """0.38 MB/s, the host that would have taken five hours. The rule needs a fifth of the budget to look and as long to be sure."""
    box = home(upload_s=30, stall_s=20)
    checkpoint(tmp_path / "c", box, {"big": os.urandom(64 * MB)})
    link.up_bps = 380_000
    began = time.monotonic()
    code, output = box.call("upload", "--directory", str(tmp_path / "c"))
    assert code == 3 and "too slow" in output and "Mbps" in output, output
    assert time.monotonic() - began < 60
    assert store.size(layout.manifest(box.run_name, "sft", 4)) is None
    sent = [event for event in box.events(Transfer) if event.direction == "up"]  # type: ignore[attr-defined]
    assert sent[0].done_bytes == 0 and sent[-1].line_bytes > 0  # type: ignore[attr-defined]


def test_a_renewed_key_in_the_private_file_goes_before_the_one_that_the_runner_was_started_with(
    tmp_path: Path,
) -> None:
    old = {"AWS_ACCESS_KEY_ID": "old", "AWS_SECRET_ACCESS_KEY": "old", "AWS_SESSION_TOKEN": "old", "HF_TOKEN": "box"}
    lines = ["AWS_ACCESS_KEY_ID=new", "AWS_SECRET_ACCESS_KEY=new", "HF_TOKEN=file"]
    (tmp_path / "private.env").write_text("\n".join(lines))
    environ = dict(old)
    load_private_env(tmp_path / "private.env", environ)
    assert environ["AWS_ACCESS_KEY_ID"] == "old", "a key that lasts: what the box says is nearer"
    (tmp_path / "private.env").write_text("\n".join([*lines, "AWS_CREDENTIAL_EXPIRATION=2030-01-01T00:00:00+00:00"]))
    environ = dict(old)
    load_private_env(tmp_path / "private.env", environ)
    assert (environ["AWS_ACCESS_KEY_ID"], environ["HF_TOKEN"]) == ("new", "box") and "AWS_SESSION_TOKEN" not in environ


def test_the_mirror_command_puts_the_prefetched_model_into_the_bucket_once(
    store: Store, home: Callable[..., Home]
) -> None:
    box = home()
    source = f"hub:me/{box.run_name}@{'a' * 40}"
    assignment = Assignment.model_validate_json((box.root / "recipe.json").read_bytes())
    model = assignment.recipe.model.model_copy(update={"source": source, "mirror": True})
    changed = assignment.model_copy(update={"recipe": assignment.recipe.model_copy(update={"model": model})})
    (box.root / "recipe.json").write_text(changed.model_dump_json())
    data = os.urandom(MB)
    (box.root / "model").mkdir()
    (box.root / "model/weights.safetensors").write_bytes(data)
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": MB}
    (box.root / "prefetched.json").write_text(json.dumps({"files": {"model/weights.safetensors": entry}}))
    for _ in range(2):
        code, output = box.call("mirror")
        assert code == 0, output
    assert store.get_bytes(layout.mirror(source) + "weights.safetensors") == data
    assert json.loads(store.get_bytes(layout.mirror_list(source)) or b"")["files"] == {"weights.safetensors": entry}
    assert {event.what for event in box.events(Transfer)} == {"upload mirror"}  # type: ignore[attr-defined]
