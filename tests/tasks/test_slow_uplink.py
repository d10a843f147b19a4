# ruff: noqa: F811 - the fixtures of the box are imported by name, and asked for by it
"""An uplink of 0.38 MB/s for real: a box behind a shaping link, the program that uploads, and what the flow decides about it."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from pathlib import Path

import pytest

from deployments.rehearsal.market import Rental
from tasks import install
from tasks.domain import Box, Label
from tasks.errors import TransferFailed
from tasks.market.vast import VastMarket
from tasks.offers import plan_run
from tasks.phase import RunView
from tasks.remote.jobs import EventTail, Jobs
from tasks.remote.ssh import Remote
from tasks.rules.stalls import patience_s
from tasks.run import Run
from tasks.upload import UplinkWatch
from tests.tasks.pretend import FLOW_RUN, NOW, Clock, Pretend, rehearsal_recipe
from tests.tasks.remote.conftest import SshBox, box, key_path, link, login, remote  # noqa: F401
from tests.training.box.conftest import BUCKET, Weed, weed  # noqa: F401
from tests.training.box.netfault import Link
from training.box.folder import FolderStore
from training.contract import layout
from training.contract.events import EventLog, PhaseEnd, PhaseStart, Step, Transfer
from training.contract.manifest import FileEntry, Manifest
from training.contract.recipe import Assignment, Recipe

PHASE = {"kind": "sft", "data": "bucket:none", "steps": 40, "learning_rate": 1e-3}
BUDGET = {"max_usd": 30, "max_hours": 12, "upload_s": 30}


@pytest.fixture
def recipe() -> Recipe:
    return rehearsal_recipe(name=f"u{secrets.token_hex(4)}", phases=[PHASE], budget=BUDGET, box={"max_dph_usd": 0.40})


@pytest.fixture
def run(pretend: Pretend, market: VastMarket, clock: Clock, recipe: Recipe, tmp_path: Path) -> Run:
    """A run whose first box has trained its phase to the end."""
    made = Run(
        recipe, {"sft": ""}, FLOW_RUN, market, FolderStore(tmp_path / "bucket"), pretend.settings(tmp_path), clock=clock
    )
    made.take_off(plan_run(recipe, market, made.store, now=clock()))
    ranked = made.next_offer()
    label = Label(flow_run_id=FLOW_RUN, attempt=1, hard_end=made.hard_end).text
    made.flight.begin_attempt(1, label, ranked.offer)
    contract = pretend.market.rent(pretend.market.offers[ranked.offer.id], Rental(disk_gb=20, label=label))
    clock.sleep(15)
    instance = market.show(contract.id)
    assert instance is not None and instance.dph_total_usd is not None
    made.flight.rented(instance)
    made.box = Box(
        instance_id=contract.id,
        machine_id=ranked.offer.machine_id,
        label=label,
        run=recipe.name,
        flow_run_id=FLOW_RUN,
        attempt=1,
        ssh_user="x",
        key_path="x",
        known_hosts_path="x",
        dph_usd=instance.dph_total_usd,
        offer=ranked.offer,
        rented_at=NOW,
    )
    return made


def trained(last: int = 40) -> list[PhaseStart | Step | PhaseEnd]:
    step = Step(phase="sft", step=last, max_steps=40, loss=1.0, seconds=1.0, t=NOW + 600)
    return [PhaseStart(phase="sft", step=0, max_steps=40, t=NOW), step] + (
        [PhaseEnd(phase="sft", step=40, max_steps=40, complete=True, t=NOW + 600)] if last == 40 else []
    )


def sending(step: int = 40) -> Transfer:
    what = {"what": f"upload sft/{step}", "direction": "up", "mbps": 3.0}
    return Transfer(done_bytes=1_000_000, total_bytes=24_000_000, light_bytes=8_000_000, **what)  # type: ignore[arg-type]


def test_what_decides_about_an_uplink_is_gathered_from_run_box_and_market(run: Run) -> None:
    view = RunView()
    view.absorb([*trained(), sending()])
    seen = run.predicament(view, sending(), 3.0)
    assert (seen.left_bytes, seen.light_bytes, seen.later_checkpoints) == (23_000_000, 8_000_000, 0)
    assert (seen.unsaved_s, seen.trains_s) == (600, 0)
    assert seen.new_box is not None and seen.new_box.up_mbps > 100
    assert not seen.light_allowed, "the recipe has no word for it"
    run.recipe = run.recipe.model_copy(update={"allow": ("light_checkpoints",)})
    assert run.predicament(view, sending(), 3.0).light_allowed
    assert 29 < seen.left_usd <= 30 and 0 < seen.left_s <= 12 * 3600


def test_in_mid_phase_nothing_less_is_sent_and_the_last_checkpoint_still_has_to_come(run: Run) -> None:
    view = RunView()
    view.absorb([*trained(20), sending(20)])
    seen = run.predicament(view, sending(20), 3.0)
    assert (seen.light_bytes, seen.later_checkpoints) == (None, 1) and seen.trains_s > 0


def test_there_is_no_moving_when_no_other_box_may_be_tried(run: Run) -> None:
    run.attempts = run.recipe.budget.attempts
    assert run.predicament(RunView(), sending(), 3.0).new_box is None


def test_a_phase_whose_last_checkpoint_went_lightly_is_not_trained_again(run: Run) -> None:
    assert run.phases_left() == ("sft",)
    run.store.put_bytes(layout.light_manifest(run.recipe.name, "sft", 40), b"{}")
    run.refresh()
    assert run.phases_left() == ()


@pytest.mark.timeout(120)
def test_0_38_MB_a_second_is_noticed_by_the_flow_and_the_box_is_left_for_one_that_is_cheaper(
    run: Run, remote: Remote, box: SshBox, weed: Weed, recipe: Recipe, tmp_path: Path
) -> None:
    uplink = Link(weed.port)
    uplink.up_bps = 380_000  # 40 MB take 105 s, and have 30
    assignment = Assignment(
        recipe=recipe, run=recipe.name, flow_run_id=FLOW_RUN, attempt=1, bucket=BUCKET, hard_end=int(time.time()) + 999
    )
    secret = "".join(f"{key}={value}\n" for key, value in weed.environ(uplink.port).items())
    remote.put(assignment.model_dump_json().encode(), layout.BOX_ASSIGNMENT, timeout_s=10)
    remote.put(secret.encode(), layout.BOX_PRIVATE_ENV, mode=0o600, timeout_s=10)
    install.install_transfer(remote, recipe, tmp_path)
    checkpoint(box.home / "checkpoint", recipe)
    for event in trained():
        EventLog(box.home / layout.BOX_EVENTS).emit(event)
    jobs, tail, view = Jobs(remote), EventTail(remote), RunView()
    argv = [f"~/{layout.BOX_TRANSFER_VENV}/bin/python", "-m", "training.box.transfer", "upload"]
    argv += ["--assignment", f"~/{layout.BOX_ASSIGNMENT}", "--directory", "~/checkpoint"]
    jobs.start("upload", "t", argv, f"~/{layout.BOX_PRIVATE_ENV}")
    watch = UplinkWatch(recipe.budget, time.monotonic, run.predicament, run.send_less, run.decided)
    with pytest.raises(TransferFailed, match=r"at \d\.\d Mbps; waiting \$.*, sending less .*, another box \$"):
        watched(tail, view, watch, patience_s(recipe.budget.upload_s) + 60)
    jobs.stop("upload", 1)
    (said,) = run.flight.flight.attempts[-1].decisions
    assert "the box is left" in said
    assert not weed.store().list(layout.phase_manifests(recipe.name, "sft")), "half a checkpoint is none"


def watched(tail: EventTail, view: RunView, watch: UplinkWatch, limit_s: float) -> None:
    """As the flow's poll does it, for so long after the upload began."""
    began = None
    while began is None or time.monotonic() - began < limit_s:
        view.absorb(tail.read())
        began = began or (time.monotonic() if view.uploading() else None)
        watch(view)
        time.sleep(0.3)


def checkpoint(directory: Path, recipe: Recipe) -> None:
    directory.mkdir()
    data = os.urandom(40_000_000)
    (directory / "weights.bin").write_bytes(data)
    manifest = Manifest(
        run=recipe.name,
        phase="sft",
        step=40,
        max_steps=40,
        created_at=NOW,
        phase_digest=recipe.phase_digest("sft"),
        data_sha256="0" * 64,
        parent=None,
        versions={},
        files={"weights.bin": FileEntry(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))},
    )
    (directory / "manifest.json").write_text(manifest.model_dump_json())
