# ruff: noqa: F811 - the fixtures of the box are imported by name, and asked for by it
"""Prefetch on a real box from a real bucket, as the flow starts and watches it."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import pytest

from tasks import install, prefetch, preflight
from tasks.errors import BoxLost, PreflightFailed, TransferFailed
from tasks.hosts import kind_of
from tasks.prefetch import _together
from tasks.remote.jobs import Jobs
from tasks.remote.ssh import Remote
from tasks.rules.stalls import Sample
from tests.tasks.remote.conftest import SshBox, box, counting_recipe, key_path, link, login, remote  # noqa: F401
from tests.training.box.conftest import BUCKET, Weed, weed  # noqa: F401
from tests.training.box.netfault import Link
from training.contract import layout
from training.contract.events import Transfer
from training.contract.recipe import Assignment, Recipe


@pytest.fixture
def uplink(weed: Weed) -> Link:
    return Link(weed.port)


@pytest.fixture
def recipe() -> Recipe:
    name = f"p{secrets.token_hex(4)}"
    return counting_recipe(
        model={"source": f"bucket:models/{name}", "family": "qwen3_5_moe", "size_gb": 0.001},
        phases=[{"kind": "sft", "data": f"bucket:data/{name}.jsonl", "steps": 4, "learning_rate": 0.001}],
    )


@pytest.fixture
def ready(remote: Remote, weed: Weed, uplink: Link, recipe: Recipe, tmp_path: Path) -> Remote:
    """A box with its assignment, its credentials and the transfer environment."""
    assignment = Assignment(
        recipe=recipe, run=recipe.name, flow_run_id="f", attempt=1, bucket=BUCKET, hard_end=int(time.time()) + 999
    )
    secret = "".join(f"{key}={value}\n" for key, value in weed.environ(uplink.port).items())
    remote.put(assignment.model_dump_json().encode(), layout.BOX_ASSIGNMENT, timeout_s=10)
    remote.put(secret.encode(), layout.BOX_PRIVATE_ENV, mode=0o600, timeout_s=10)
    install.install_transfer(remote, recipe, tmp_path)
    return remote


def mirror(weed: Weed, recipe: Recipe, size: int = 2_000_000) -> None:
    weed.store().put_bytes(f"{recipe.model.source.removeprefix('bucket:')}/model.safetensors", os.urandom(size))
    weed.store().put_bytes(recipe.phases[0].data.removeprefix("bucket:"), b'{"messages": []}\n')


def test_model_and_data_arrive_and_progress_is_told(ready: Remote, weed: Weed, recipe: Recipe, box: SshBox) -> None:
    mirror(weed, recipe)
    prefetch.start(ready, "t")
    prefetch.start(ready, "t")  # a retry of the task
    seen: list[Transfer] = []
    prefetch.watch(ready, recipe, poll_s=0.2, on_transfer=seen.append)
    assert (box.home / layout.BOX_MODEL / "model.safetensors").stat().st_size == 2_000_000
    assert (box.home / layout.BOX_DATA / "sft.jsonl").exists()
    assert {event.what for event in seen if event.finished} == {"prefetch model", "prefetch data"}


def test_missing_data_is_not_held_against_the_host(ready: Remote, recipe: Recipe) -> None:
    prefetch.start(ready, "t")
    with pytest.raises(TransferFailed, match="does not exist; upload it") as caught:
        prefetch.watch(ready, recipe, poll_s=0.2)
    assert caught.value.blame == "other"


def test_a_stalled_prefetch_fails_the_host_and_names_the_rate(
    ready: Remote, weed: Weed, uplink: Link, recipe: Recipe
) -> None:
    mirror(weed, recipe)
    uplink.freeze()
    prefetch.start(ready, "t")
    impatient = recipe.model_copy(update={"budget": recipe.budget.model_copy(update={"stall_s": 1})})
    with pytest.raises(TransferFailed, match="Mbps") as caught:
        prefetch.watch(ready, impatient, poll_s=0.2)
    assert caught.value.blame == "host"


def test_a_host_that_will_not_make_it_is_left_long_before_its_budget_ends(
    ready: Remote, weed: Weed, uplink: Link, recipe: Recipe
) -> None:
    mirror(weed, recipe, 40_000_000)
    uplink.down_bps = 380_000  # 105 s for what has 30
    prefetch.start(ready, "t")
    hasty = recipe.model_copy(update={"budget": recipe.budget.model_copy(update={"prefetch_s": 30})})
    began = time.monotonic()
    with pytest.raises(
        TransferFailed, match=r"too slow: prefetch: .* Mbps are needed for 30 s in all; next offer"
    ) as caught:
        prefetch.watch(ready, hasty, poll_s=0.2)
    assert time.monotonic() - began < 20
    assert (caught.value.blame, kind_of(caught.value)) == ("host", "network"), "which is how it is remembered"
    assert Jobs(ready).poll(prefetch.JOB).state == "exited", "it does not go on downloading"


def test_the_budget_begins_with_the_download_and_not_when_it_is_first_waited_for(
    ready: Remote, weed: Weed, uplink: Link, recipe: Recipe
) -> None:
    """While packages install it is looked at as well, so a host that will not make it does not install first."""
    mirror(weed, recipe)
    uplink.freeze()
    prefetch.start(ready, "t")
    now = [0.0]
    watched = prefetch.Prefetch(ready, recipe, clock=lambda: now[0])
    assert watched.look() is False
    now[0] = recipe.budget.prefetch_s + 1.0
    jobs = Jobs(ready)
    jobs.start("installing", "t", ["sleep", "60"])
    with pytest.raises(TransferFailed, match="over budget"):
        install.follow(jobs, "installing", budget_s=60, ears=install.Ears(meanwhile=watched.look))
    jobs.stop("installing", 1)


def test_a_rebooted_box_loses_its_prefetch(
    ready: Remote, weed: Weed, uplink: Link, recipe: Recipe, box: SshBox
) -> None:
    mirror(weed, recipe)
    uplink.freeze()
    prefetch.start(ready, "t")
    box.reboot()
    with pytest.raises(BoxLost, match="job is lost"):
        prefetch.watch(ready, recipe, poll_s=0.2)


def test_links_pass_on_a_good_line_and_fail_on_a_slow_one(ready: Remote, uplink: Link, recipe: Recipe) -> None:
    assert preflight.check_links(ready, recipe).ok
    uplink.up_bps = 380_000
    with pytest.raises(PreflightFailed, match=r"uplink_mbps: seen 3\.\d Mbps, want ≥ 20 Mbps") as caught:
        preflight.check_links(ready, recipe)
    assert caught.value.blame == "host"


def test_model_and_data_count_as_one_transfer() -> None:
    joined = _together({"a": [Sample(1, 5), Sample(2, 10)], "b": [Sample(3, 7)]})
    assert [sample.done_bytes for sample in joined] == [5, 10, 17]
