"""A box of one's own, with a real sshd: rented, logged in to and given back by the code that rents from a market."""

from __future__ import annotations

import getpass
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.destroy import destroy_run
from tasks.domain import Attempt, Flight
from tasks.errors import Ambiguous, AuthError, BootFailed, OfferGone
from tasks.market import open_market
from tasks.market.ssh_host import LEFTOVERS, SshHost
from tasks.offers import plan_run
from tasks.preflight import check_box
from tasks.receipt import write_receipt
from tasks.remote.bundle import box_zip
from tasks.remote.jobs import Jobs
from tasks.remote.ssh import Remote, make_key, wait_for_login
from tasks.rent import RentRequest, rent
from tasks.settings import Settings
from tests.market.owned import OwnedBox
from tests.tasks.pretend import FLOW_RUN, NOW, OTHER_RUN, Clock, rehearsal_recipe
from tests.tasks.remote.conftest import SSHD
from training.box.folder import FolderStore
from training.box.prefetch import MARKER
from training.contract import layout
from training.contract.recipe import Recipe


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnedBox]:
    if not Path(SSHD).exists():
        pytest.skip("no sshd on this machine: install openssh-server")
    box = OwnedBox(tmp_path_factory.mktemp("own"))
    box.start()
    yield box
    box.kill()


@pytest.fixture
def bucket(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "bucket")


@pytest.fixture
def host(own: OwnedBox, bucket: FolderStore, tmp_path: Path, clock: Clock) -> SshHost:
    for left in (layout.BOX_HOME, ".ssh"):
        shutil.rmtree(own.home / left, ignore_errors=True)
    return own.market(bucket, tmp_path, clock)


def _settings(own: OwnedBox, tmp_path: Path, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "market": "ssh_host",
        "ssh_host": "127.0.0.1",
        "ssh_port": own.port,
        "ssh_user": getpass.getuser(),
        "ssh_key_path": own.key_path,
        "bucket": "b",
        "s3_endpoint_url": "http://127.0.0.1:9",
        "s3_access_key_id": "unused",
        "s3_secret_access_key": "unused",
        "box_s3_access_key_id": "unused",
        "box_s3_secret_access_key": "unused",
        "state_dir": tmp_path,
        "poll_s": 0.1,
    }
    return Settings(_env_file=None, **{**values, **changes})  # type: ignore[call-arg]


def _recipe() -> Recipe:
    return rehearsal_recipe(box={"min_host_memory_gb": 0.1, "min_pids": 16})


def _request(host: SshHost, flow_run_id: str = FLOW_RUN, key: str = "ssh-ed25519 AAAA livery") -> RentRequest:
    recipe = _recipe()
    return RentRequest(
        recipe=recipe,
        run=recipe.name,
        flow_run_id=flow_run_id,
        attempt=1,
        offer=host.search(recipe.box)[0],
        public_key=key,
        onstart="touch ~/onstart-has-run",
        hard_end=int(NOW) + 7200,
        hours=1,
    )


def test_a_box_of_ones_own_is_rented_used_and_given_back_and_costs_nothing(
    own: OwnedBox, host: SshHost, bucket: FolderStore, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    recipe, settings = _recipe(), _settings(own, tmp_path)
    plan = plan_run(recipe, host, bucket, now=NOW)
    assert len(plan.offers) == 1 and plan.run_usd == 0.0

    request = _request(host, key=make_key(tmp_path / "run"))
    box = rent(host, bucket, request, settings, clock=clock, sleep=clock.sleep)
    remote = Remote(settings.ssh_user, tmp_path / "run", tmp_path / "known", lambda: box.endpoints)
    wait_for_login(remote, deadline=0)
    remote.put(box_zip(), layout.BOX_ZIP, timeout_s=20)
    assert check_box(remote, recipe, request.offer).checks
    remote.put(b"SECRET=1\n", layout.BOX_PRIVATE_ENV, mode=0o600, timeout_s=20)
    Jobs(remote).start("runner", "token", ["sleep", "600"])
    assert host.search(recipe.box)[0].rentable is False

    left = destroy_run(host, FLOW_RUN, clock=clock, sleep=clock.sleep, store=bucket)
    assert left.clean and left.gone == (box.id,) and host.list_all().instances == ()
    assert remote.greet() == "key not accepted" and own.keys == []
    assert not (own.home / layout.BOX_PRIVATE_ENV).exists() and not (own.home / "onstart-has-run").exists()
    assert json.loads((own.home / layout.BOX_JOBS / "runner/status.json").read_text())["state"] == "exited"
    assert "nothing is bought" in caplog.text and "not ours to destroy" in caplog.text

    attempt = Attempt(
        attempt=1, label=request.label, machine_id=host.machine_id, offer_id=1, dph_usd=0, instance_id=box.id
    )
    flight = Flight(
        flow_run_id=FLOW_RUN, run="r", started_at=NOW, planned_usd=0, max_usd=1, market="ssh_host", attempts=(attempt,)
    )
    receipt = write_receipt(bucket, host, FLOW_RUN, "flow", now=clock.now, flight=flight)
    assert receipt is not None and (receipt.paid_usd, receipt.instances_left) == (0.0, 0)
    assert "not ours to destroy" in receipt.notes[0]


def test_one_run_at_a_time_has_the_host_and_the_other_hears_which(
    host: SshHost, own: OwnedBox, bucket: FolderStore, tmp_path: Path, clock: Clock
) -> None:
    first, second = _request(host), _request(host, OTHER_RUN)
    settings = _settings(own, tmp_path)
    rent(host, bucket, first, settings, clock=clock, sleep=clock.sleep)
    with pytest.raises(OfferGone, match=f"in use by livery:{FLOW_RUN}"):
        rent(host, bucket, second, settings, clock=clock, sleep=clock.sleep)
    assert [row.label for row in host.list_all().instances] == [first.label]
    host.destroy(host.list_all().instances[0].id)
    rent(host, bucket, second, settings, clock=clock, sleep=clock.sleep)


def test_what_an_earlier_run_left_is_cleared_and_its_runner_stopped(
    own: OwnedBox, host: SshHost, tmp_path: Path, clock: Clock, bucket: FolderStore
) -> None:
    assert f"{layout.BOX_HOME}/{MARKER}" in LEFTOVERS, "or the next run takes another's model for its own"
    rent(host, bucket, _request(host), _settings(own, tmp_path), clock=clock, sleep=clock.sleep)
    owner = Remote(getpass.getuser(), own.key_path, tmp_path / "known", lambda: host.list_all().instances[0].endpoints)
    owner.put(box_zip(), layout.BOX_ZIP, timeout_s=20)
    Jobs(owner).start("runner", "earlier", ["sleep", "600"])
    for name in (layout.BOX_EVENTS, f"{layout.BOX_HOME}/{MARKER}", f"{layout.BOX_TRAIN_VENV}/pyvenv.cfg"):
        owner.put(b"old", name, timeout_s=20)
    (bucket.root / f"owned/{host.machine_id}.json").unlink()  # its flow and its destroyers have all gone

    rent(host, bucket, _request(host, OTHER_RUN), _settings(own, tmp_path), clock=clock, sleep=clock.sleep)
    assert Jobs(owner).poll("runner").state in {"unknown", "absent"}
    owner.put(box_zip(), layout.BOX_ZIP, timeout_s=20)
    assert Jobs(owner).poll("runner").state == "absent"
    assert not (own.home / layout.BOX_EVENTS).exists() and not (own.home / layout.BOX_HOME / MARKER).exists()
    assert (own.home / layout.BOX_TRAIN_VENV / "pyvenv.cfg").exists(), "environments are kept"


def test_a_folder_that_is_not_ours_is_never_cleared(
    own: OwnedBox, host: SshHost, bucket: FolderStore, tmp_path: Path, clock: Clock
) -> None:
    checkout = own.home / layout.BOX_HOME / "work"
    checkout.mkdir(parents=True)
    with pytest.raises(BootFailed, match="not Livery's; move it away"):
        rent(host, bucket, _request(host), _settings(own, tmp_path), clock=clock, sleep=clock.sleep)
    assert checkout.is_dir() and host.list_all().instances == ()


def test_a_host_that_does_not_answer_is_given_back_all_the_same(
    own: OwnedBox, host: SshHost, bucket: FolderStore, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    rent(host, bucket, _request(host), _settings(own, tmp_path), clock=clock, sleep=clock.sleep)
    away = own.market(bucket, tmp_path, clock)
    away._port = 9
    assert destroy_run(away, FLOW_RUN, clock=clock, sleep=clock.sleep).clean
    assert "the next run clears them" in caplog.text and host.list_all().instances == ()
    with pytest.raises(Ambiguous, match="refused; see LIVERY_SSH_HOST"):
        away.search(_recipe().box)


def test_a_key_that_is_not_accepted_names_its_setting(own: OwnedBox, bucket: FolderStore, tmp_path: Path) -> None:
    make_key(tmp_path / "stranger")
    with pytest.raises(AuthError, match="LIVERY_SSH_KEY_PATH"):
        own.market(bucket, tmp_path, Clock(), key_path=tmp_path / "stranger").search(_recipe().box)


def test_a_pretended_card_is_not_believed_where_cuda_is_wanted(host: SshHost) -> None:
    (offer,) = host.search(_recipe().box.model_copy(update={"device": "cuda", "tier": "rtxpro6000"}))
    assert offer.num_gpus == 0 and offer.compute_cap is None


def test_the_settings_choose_the_market(own: OwnedBox, tmp_path: Path) -> None:
    chosen = open_market(_settings(own, tmp_path))
    assert isinstance(chosen, SshHost) and chosen.address.endswith(f"@127.0.0.1:{own.port}")
    assert chosen.account_id() == f"ssh_host:{chosen.address}"
