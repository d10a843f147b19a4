# ruff: noqa: F811 - the fixtures of the box are imported by name, and asked for by it
"""What a run does with boxes that fail it, and how it finds one that moved."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.rehearsal.market import Rental
from tasks import boxes, steps
from tasks.domain import Box, Label
from tasks.errors import BootFailed, BoxError, BoxLost, PreflightFailed, RunAborted
from tasks.hosts import read_hosts
from tasks.market.vast import VastMarket
from tasks.offers import plan_run
from tasks.phase import Watcher
from tasks.remote.jobs import EventTail, Jobs
from tasks.remote.ssh import Remote
from tasks.rent import RentRequest, rent
from tasks.run import Run
from tests.tasks.pretend import FLOW_RUN, PUBLIC_KEY, Clock, Pretend, rehearsal_recipe
from tests.tasks.remote.conftest import SshBox, box, key_path  # noqa: F401
from training.box.store import Store


class Renter:
    """A run that rents on the virtual clock and does with a failure what the flow does."""

    def __init__(self, pretend: Pretend, market: VastMarket, store: Store, clock: Clock, tmp_path: Path) -> None:
        recipe = rehearsal_recipe()
        settings = pretend.settings(tmp_path, store.bucket, market_pace=0.1, poll_s=0.5)
        self.pretend, self.clock = pretend, clock
        self.run = Run(recipe, {}, FLOW_RUN, market, store, settings, clock=clock)
        self.run.take_off(plan_run(recipe, market, store, now=clock()))

    def try_one(self, error: BoxError | None = None) -> int:
        """Rent the next offer; what goes wrong, or `error` after ten minutes, gives it back. The machine tried."""
        run, offer = self.run, self.run.next_offer().offer
        label = Label(flow_run_id=FLOW_RUN, attempt=run.attempts, hard_end=run.hard_end)
        run.flight.begin_attempt(run.attempts, label.text, offer)
        try:
            with run.flight.span("boot"):
                run.flight.rented(self._rent(run, offer))
                self.clock.sleep(600)
                if error:
                    raise error
        except BoxError as failed:
            boxes.give_back(run, failed)
            steps._raise_if_hopeless(run, failed)
        return offer.machine_id

    def _rent(self, run: Run, offer: Any) -> Any:
        request = RentRequest(
            recipe=run.recipe,
            run=run.recipe.name,
            flow_run_id=FLOW_RUN,
            attempt=run.attempts,
            offer=offer,
            public_key=PUBLIC_KEY,
            onstart="true",
            hard_end=run.hard_end,
            hours=1.0,
        )
        return rent(
            run.market, run.store, request, run.settings, clock=self.clock, sleep=self.clock.sleep, destroy_s=300
        )


@pytest.fixture
def renter(pretend: Pretend, market: VastMarket, store: Store, clock: Clock, tmp_path: Path) -> Renter:
    return Renter(pretend, market, store, clock, tmp_path)


def test_the_second_box_with_the_same_image_fault_ends_the_run_naming_the_image(
    renter: Renter, pretend: Pretend, store: Store
) -> None:
    pretend.arm("boot.status_msg@always")
    first = renter.try_one()
    with pytest.raises(
        RunAborted, match=r"box\.image: pytorch/pytorch:\S+ failed alike \(manifest unknown\)"
    ) as caught:
        renter.try_one()
    second = renter.run.flight.flight.attempts[-1].machine_id
    assert f"on machines {first}, {second}" in str(caught.value) and first != second
    assert store.list("hosts/") == [], "no machine is blamed for an image"
    assert renter.run.attempts == 2 and not pretend.market.alive()


def test_different_image_faults_are_not_added_up(renter: Renter, pretend: Pretend) -> None:
    pretend.arm("boot.status_msg=toomanyrequests: rate limit")
    renter.try_one()
    renter.try_one(PreflightFailed("cuda_init: 803", blame="image", fault="cuda_init"))
    renter.try_one()
    with pytest.raises(RunAborted, match="cuda_init"):
        renter.try_one(PreflightFailed("cuda_init: 803", blame="image", fault="cuda_init"))


def test_a_failed_box_is_remembered_by_machine_with_reason_date_dollars_and_host(
    renter: Renter, store: Store, clock: Clock
) -> None:
    machine = renter.try_one(PreflightFailed("driver: seen 550.54.15", fault="driver"))
    (note,) = read_hosts(store)
    (failure,) = note.failures
    assert (note.machine_id, failure.kind, failure.reason) == (machine, "hardware", "driver: seen 550.54.15")
    assert failure.at == clock() and failure.run == renter.run.recipe.name
    attempt = renter.run.flight.flight.attempts[-1]
    assert failure.usd == pytest.approx(attempt.dph_usd * 610 / 3600, rel=0.05)
    offered = next(each.offer for each in renter.run.planned.offers if each.offer.machine_id == machine)
    assert note.host_id == offered.host_id is not None


def test_a_box_that_is_outbid_is_not_remembered(renter: Renter, store: Store) -> None:
    renter.try_one(BootFailed("box 1 was outbid before it ran", blame="other", fault="outbid"))
    assert store.list("hosts/") == []


@pytest.fixture
def moving(
    renter: Renter,
    pretend: Pretend,
    box: SshBox,
    key_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[SimpleNamespace]:
    """A run with a login on a real box, whose ports the market tells: `ports.direct_port`, `ports.proxy_port`."""
    ports = SimpleNamespace(direct_port=box.port, proxy_port=1)
    monkeypatch.setattr(pretend.market.host, "endpoints", lambda contract: ports)
    instance_id = pretend.rented()
    pretend.clock.sleep(30)
    instance = renter.run.market.show(instance_id)
    assert instance is not None and len(instance.endpoints) == 2
    offer = renter.run.planned.offers[0].offer
    rented = Box(
        instance_id=instance_id,
        machine_id=offer.machine_id,
        label=instance.label or "",
        run="r",
        flow_run_id=FLOW_RUN,
        attempt=1,
        ssh_user=os.environ.get("USER") or subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip(),
        key_path=str(key_path),
        known_hosts_path=str(box.root / "known"),
        dph_usd=1.0,
        offer=offer,
        rented_at=0.0,
    )
    yield SimpleNamespace(ports=ports, box=box, remote=renter.run.open(rented, instance.endpoints))
    renter.run.close()


def test_a_box_whose_port_has_changed_is_found_through_the_api_at_the_reconnect(
    moving: SimpleNamespace, pretend: Pretend
) -> None:
    assert moving.remote.run("echo here", timeout_s=20).text == "here\n"
    pretend.calls.clear()
    assert moving.remote.run("true", timeout_s=20).code == 0
    assert pretend.calls == [], "a connection that holds asks nobody"
    moving.box.kill()
    moving.box.move()
    moving.ports.direct_port = moving.box.port
    moving.box.start()
    assert moving.remote.run("echo there", timeout_s=20).text == "there\n"


def test_the_proxy_is_asked_for_too_when_the_direct_way_is_shut(moving: SimpleNamespace) -> None:
    assert moving.remote.run("true", timeout_s=20).code == 0
    moving.ports.direct_port, moving.ports.proxy_port = 1, moving.box.port
    moving.remote.close()
    assert moving.remote.run("true", timeout_s=20).code == 0


def test_a_key_that_the_host_has_dropped_is_attached_again(
    moving: SimpleNamespace,
    pretend: Pretend,
    key_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    public_key = key_path.with_name("id.pub").read_text().strip()
    assert moving.remote.run("true", timeout_s=20).code == 0
    moving.box.let_in("")
    moving.remote.close()
    assert moving.remote.run("true", timeout_s=20).code is None
    (contract,) = pretend.market.alive()
    assert public_key in [key.text for key in contract.ssh_keys] and "it is attached again" in caplog.text
    moving.box.let_in(public_key)  # as the host does with what the market tells it
    assert moving.remote.run("true", timeout_s=20).code == 0


def test_the_checks_of_a_box_share_their_seconds(renter: Renter) -> None:
    renter.try_one()
    renter.run.preflight_left_s = 120.0
    with boxes._timed(renter.run, "preflight"):
        pass
    assert 119 < renter.run.preflight_left_s < 120


def test_a_market_that_does_not_answer_does_not_lose_a_box_that_has_not_moved(
    moving: SimpleNamespace, pretend: Pretend
) -> None:
    assert moving.remote.run("true", timeout_s=20).code == 0
    moving.remote.close()
    pretend.arm("auth.session_expired_404=100")
    assert moving.remote.run("true", timeout_s=20).code == 0


@pytest.mark.parametrize(
    ("fault", "said", "blame"),
    [("bid.outbid_after=1", "outbid", "other"), ("host.reclaim_stop=1", "'stopped'", "host")],
)
def test_a_box_that_is_outbid_in_mid_run_is_lost_without_blame_and_one_that_is_reclaimed_with_it(
    renter: Renter, pretend: Pretend, fault: str, said: str, blame: str
) -> None:
    pretend.arm(fault)
    offer = renter.run.planned.offers[0].offer
    rental = Rental(
        disk_gb=20, label=None, bid_usd=offer.min_bid_usd * 2 if "outbid" in fault and offer.min_bid_usd else None
    )
    contract = pretend.market.rent(next(iter(pretend.market.offers.values())), rental)
    pretend.clock.sleep(60)
    remote = Remote("nobody", "key", "known", tuple)
    watcher = Watcher(
        SimpleNamespace(instance_id=contract.id, dph_usd=1.0),  # type: ignore[arg-type]
        Jobs(remote),
        EventTail(remote, clock=pretend.clock),
        renter.run.market.show,
        renter.run.recipe.budget,
        spent_usd=lambda: 0.0,
        deadline=float("inf"),
        poll_s=1,
        clock=pretend.clock,
        sleep=pretend.clock.sleep,
    )
    with pytest.raises(BoxLost, match=said) as caught:
        watcher.until(lambda view: False)
    assert caught.value.blame == blame
