# ruff: noqa: F811 - the fixtures of the box are imported by name, and asked for by it
"""A run whose box is outbid, rebooted, dearer or at the end of its contract, or whose own budget ends: it saves what it can and gives the box back.

The box is a real SSH server on which the real runner counts; market and clock pretend.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from deployments.rehearsal.market import Rental
from tasks import boxes, install, prefetch, steps
from tasks.domain import Box, Label, RankedOffer
from tasks.errors import BoxLost, BudgetReached, LiveryError, RunAborted
from tasks.market.vast import VastMarket
from tasks.offers import plan_run
from tasks.phase import RUNNER, RunView, Watcher
from tasks.remote.bundle import box_zip
from tasks.remote.jobs import EventTail, Jobs
from tasks.remote.ssh import Remote
from tasks.run import Run
from tasks.silence import MarketWord
from tests.tasks.pretend import FLOW_RUN, Clock, Pretend, rehearsal_recipe
from tests.tasks.remote.conftest import SshBox, box, key_path  # noqa: F401
from training.box.folder import FolderStore
from training.contract import layout
from training.contract.events import Transfer
from training.contract.recipe import Assignment

E = TypeVar("E", bound=LiveryError)
# The recipe saves at the end only: what is in the bucket before was saved because the runner was told to.
PHASE = {"kind": "cpt", "data": "bucket:none", "steps": 400, "learning_rate": 1e-3, "save_every_steps": 400}


class OnTheRoad:
    """A run in the middle of its first phase."""

    def __init__(self, pretend: Pretend, market: VastMarket, clock: Clock, tmp_path: Path) -> None:
        self.pretend, self.market, self.clock, self.bucket = pretend, market, clock, tmp_path / "bucket"
        self.store = FolderStore(self.bucket)
        self.recipe = rehearsal_recipe(phases=[PHASE], step_seconds=0.05, box={"max_dph_usd": 0.40})
        settings = pretend.settings(tmp_path, market_pace=0.01, poll_s=0.5)
        self.run = Run(self.recipe, {"cpt": ""}, FLOW_RUN, market, self.store, settings, clock=clock)
        self.run.take_off(plan_run(self.recipe, market, self.store, now=clock()))

    def rent(self, ssh: SshBox, key: Path) -> None:
        ranked = self.run.next_offer()
        offer = self.pretend.market.offers[ranked.offer.id]
        label = Label(flow_run_id=FLOW_RUN, attempt=1, hard_end=self.run.hard_end).text
        self.run.flight.begin_attempt(1, label, ranked.offer)
        with self.run.flight.span("boot"):
            contract = self.pretend.market.rent(offer, Rental(disk_gb=self.recipe.box.disk_gb, label=label))
            self.clock.sleep(15)
        instance = self.market.show(contract.id)
        assert instance is not None and instance.dph_total_usd is not None
        self.run.flight.rented(instance)
        self.run.open(self._box(ranked, contract.id, label, instance.dph_total_usd, key, ssh), instance.endpoints)

    def start(self, ssh: SshBox) -> None:
        """The real runner as a detached job, as `boxes.start_runner` starts it, but with this Python."""
        run, remote = self.run, self.run.login
        assignment = Assignment(
            recipe=self.recipe,
            run=self.recipe.name,
            flow_run_id=FLOW_RUN,
            attempt=1,
            bucket=f"folder:{self.bucket}",
            hard_end=self.run.hard_end,
            dph_usd=0.1,
        )
        remote.put(box_zip(), layout.BOX_ZIP, timeout_s=20)
        remote.put(assignment.model_dump_json().encode(), layout.BOX_ASSIGNMENT, timeout_s=20)
        jobs = Jobs(remote)
        command = [sys.executable, "-m", "training.runner", "--assignment", f"{ssh.home}/{layout.BOX_ASSIGNMENT}"]
        jobs.start(RUNNER, run.token, command)
        assert run.box is not None
        run.watcher = Watcher(
            run.box,
            jobs,
            EventTail(remote, clock=self.clock),
            self.market.show,
            run.recipe.budget,
            spent_usd=run.spent_usd,
            deadline=run.deadline,
            poll_s=0.5,
            around=run.around(),
            pace=0.01,
            clock=self.clock,
            sleep=self._sleep,
        )

    def train(self, until: Callable[[RunView], bool]) -> RunView:
        assert self.run.watcher is not None
        self.run.watcher.until(until)
        return self.run.view

    def ends(self, kind: type[E], said: str) -> E:
        """Watching on ends so; the run goes on to give the box back as the flow does."""
        with self.run.flight.span("phase cpt"), pytest.raises(kind, match=said) as caught:
            self.train(lambda view: False)
        return caught.value

    def safe_step(self) -> int | None:
        self.run.refresh()
        manifest = self.run.manifests.get("cpt")
        return manifest.step if manifest else None

    def _sleep(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        time.sleep(0.05)

    def _box(self, ranked: RankedOffer, instance_id: int, label: str, dph_usd: float, key: Path, ssh: SshBox) -> Box:
        user = os.environ.get("USER") or subprocess.run(["id", "-un"], capture_output=True, text=True).stdout.strip()
        return Box(
            instance_id=instance_id,
            machine_id=ranked.offer.machine_id,
            label=label,
            run=self.recipe.name,
            flow_run_id=FLOW_RUN,
            attempt=1,
            ssh_user=user,
            key_path=str(key),
            known_hosts_path=str(ssh.root / "known"),
            dph_usd=dph_usd,
            offer=ranked.offer,
            rented_at=self.clock(),
        )


class _Ports:
    def __init__(self, ssh: SshBox) -> None:
        self._ssh = ssh

    @property
    def direct_port(self) -> int:
        return int(self._ssh.port)

    proxy_port = 1


@pytest.fixture
def road(
    pretend: Pretend,
    market: VastMarket,
    clock: Clock,
    tmp_path: Path,
    box: SshBox,
    key_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., OnTheRoad]]:
    """A run that has trained three steps on a box with these faults."""
    made: list[OnTheRoad] = []
    monkeypatch.setattr(pretend.market.host, "endpoints", lambda contract: _Ports(box))

    def make(*faults: str) -> OnTheRoad:
        pretend.arm(*faults)
        run = OnTheRoad(pretend, market, clock, tmp_path)
        made.append(run)
        run.rent(box, key_path)
        run.start(box)
        run.train(lambda view: view.phase("cpt").step >= 3)
        return run

    yield make
    for run in made:
        run.run.close()


def test_a_price_over_the_recipes_cap_is_left_with_everything_saved_and_the_next_price_counts(
    road: Callable[..., OnTheRoad], pretend: Pretend
) -> None:
    run = road("price.increase_after=600")
    before = run.run.spent_usd()
    run.clock.sleep(1200)
    (contract,) = pretend.market.alive()
    error = run.ends(
        BoxLost, r"its price rose from \$0\.\d+/h to \$0\.\d+/h, box.max_dph_usd = \$0.40; saved and verified"
    )
    assert (error.blame, error.fault) == ("other", "price")
    safe = run.safe_step()
    assert safe is not None and safe == run.run.view.phase("cpt").step >= 3, "no step is lost"
    (attempt,) = run.run.flight.flight.attempts
    assert [usd for _, usd in attempt.repriced] == [pytest.approx(contract.dph_total_usd, abs=1e-4)]
    boxes.give_back(run.run, error)
    assert not pretend.market.alive() and run.run.spent_usd() > before
    assert run.store.list("hosts/") == [], "its machine has done nothing wrong"
    assert run.run.flight.flight.attempts[-1].wasted is False
    run.run.flight.begin_attempt(2, "l", run.run.planned.offers[0].offer)
    assert "its price rose" in run.run.flight.flight.attempts[-1].after_loss, (
        "what the second box takes to get here is wasted"
    )


def test_a_contract_that_is_about_to_end_is_left_in_time_with_everything_saved(
    road: Callable[..., OnTheRoad], pretend: Pretend
) -> None:
    run = road("contract.ends_after=3600")
    run.clock.sleep(3200)
    error = run.ends(BoxLost, r"its contract ends in \d+ s, and saving takes up to \d+ s; saved and verified")
    assert (error.blame, error.fault) == ("other", "contract")
    assert run.safe_step() == run.run.view.phase("cpt").step
    boxes.give_back(run.run, error)
    assert not pretend.market.alive()


@pytest.mark.parametrize(
    ("limit", "said"), [("usd", r"spent about \$30\.\d+ of budget"), ("hours", "budget.max_hours = 12 is over")]
)
def test_at_its_limit_a_run_saves_uploads_verifies_and_says_what_is_safe(
    road: Callable[..., OnTheRoad], pretend: Pretend, limit: str, said: str
) -> None:
    run = road()
    (contract,) = pretend.market.alive()
    if limit == "usd":
        contract.bill.disk_usd += 30.0
        run.clock.sleep(601)  # until the market is asked again
    else:
        run.clock.now = run.run.deadline
    error = run.ends(BudgetReached, f"{said}.*; saved and verified: cpt step \\d+ of 400 .*run again to go on")
    safe = run.safe_step()
    assert safe == run.run.view.phase("cpt").step >= 3 and f"cpt step {safe} of 400" in str(error)
    assert Jobs(run.run.login).poll(RUNNER).exit_code == 143


def test_a_run_that_needs_less_for_its_end_than_for_a_save_is_finished(road: Callable[..., OnTheRoad]) -> None:
    run = road()
    run.clock.now = run.run.deadline - run.run.rest_s(run.run.view) - 5
    assert run.run.watcher is not None and run.run.rest_s(run.run.view) < run.run.watcher._save_s()
    step = run.run.view.phase("cpt").step
    run.train(lambda view: view.phase("cpt").step > step)


def test_a_box_that_still_downloads_when_the_money_is_spent_is_not_paid_for_any_longer(
    road: Callable[..., OnTheRoad], pretend: Pretend
) -> None:
    run = road()
    bytes_more = Transfer(what="prefetch model", direction="down", done_bytes=1, total_bytes=9, mbps=1.0)
    run.run.saw_bytes(bytes_more)
    pretend.market.alive()[0].bill.disk_usd += 30.0
    run.clock.sleep(601)
    with pytest.raises(BudgetReached, match=r"spent about \$30\.\d+ .*has not trained yet"):
        run.run.saw_bytes(bytes_more)
    with pytest.raises(BudgetReached):
        run.run.heard_installer(b"Downloading torch")


def test_the_story_of_a_run_that_stops_itself_is_kept(road: Callable[..., OnTheRoad]) -> None:
    run = road()
    assert run.run.box is not None
    with pytest.raises(RunAborted), steps.replaced_if_lost(run.run, run.run.box):
        raise RunAborted("step 3: the loss is nan")
    assert run.store.get_bytes(layout.events(run.recipe.name, FLOW_RUN, 1))


def test_what_the_last_save_could_not_make_durable_is_said(road: Callable[..., OnTheRoad], box: SshBox) -> None:
    run = road()
    box.kill()
    box.start()  # the runner is gone, and so is what it had not saved
    run.clock.now = run.run.deadline
    run.ends(BudgetReached, "nothing is in the bucket yet; run again")


def test_after_a_reboot_the_box_answers_at_its_new_port_without_its_runner_and_is_given_back(
    road: Callable[..., OnTheRoad], box: SshBox, pretend: Pretend
) -> None:
    run = road()
    box.kill()
    box.move()
    box.start()
    error = run.ends(BoxLost, "the runner is gone without an exit code: the box was restarted")
    assert error.blame == "host"
    boxes.give_back(run.run, error)
    assert not pretend.market.alive()
    assert run.store.get_bytes(layout.events(run.recipe.name, FLOW_RUN, 1)), "its disk was kept, and its story is"


def test_the_run_is_known_to_get_somewhere_by_its_steps_and_not_by_its_heartbeats(
    road: Callable[..., OnTheRoad],
) -> None:
    run = road()
    at, step = run.run.progress_at, run.run.view.phase("cpt").step
    run.clock.sleep(60)
    run.train(lambda view: view.phase("cpt").step >= step + 3)
    assert run.run.progress_at >= at + 60


def _outbid(pretend: Pretend) -> int:
    """A bid box that was outbid a moment ago."""
    pretend.arm("bid.outbid_after=1")
    offer = next(iter(pretend.market.offers.values()))
    contract = pretend.market.rent(offer, Rental(disk_gb=20, bid_usd=offer.dph_base_usd))
    pretend.clock.sleep(60)
    return contract.id


@pytest.mark.parametrize("step", ["install", "prefetch"])
def test_a_box_outbid_while_it_installs_or_downloads_is_lost_by_the_markets_word_and_not_by_minutes_of_silence(
    pretend: Pretend, market: VastMarket, clock: Clock, step: str
) -> None:
    remote = Remote("nobody", "key", "known", tuple)  # as a box whose every address is dead
    ask = MarketWord(_outbid(pretend), market.show, clock=clock)
    began = clock.now
    times: dict[str, Any] = {"clock": clock, "sleep": clock.sleep}
    watching: dict[str, Callable[[], object]] = {
        "install": partial(install.follow, Jobs(remote), "i", budget_s=900, ears=install.Ears(on_silence=ask), **times),
        "prefetch": partial(prefetch.watch, remote, rehearsal_recipe(), on_silence=ask, **times),
    }
    with pytest.raises(BoxLost, match="outbid") as caught:
        watching[step]()
    assert caught.value.blame == "other" and clock.now - began < 15


def test_a_market_that_does_not_answer_either_decides_nothing(pretend: Pretend, clock: Clock, tmp_path: Path) -> None:
    box_id = _outbid(pretend)
    MarketWord(box_id, pretend.client(tmp_path, key="revoked").show, clock=clock)(1e6)


def test_a_machine_whose_box_fell_silent_because_it_was_outbid_is_not_blamed(
    road: Callable[..., OnTheRoad], pretend: Pretend
) -> None:
    run = road()
    (contract,) = pretend.market.alive()
    contract.bid_usd = 0.1
    pretend.market.stop(contract)
    boxes.give_back(run.run, BoxLost("start of job runner: no answer from the box in 60 s"))
    assert run.store.list("hosts/") == []
    assert run.run.flight.flight.attempts[-1].ended.endswith("no answer from the box in 60 s: outbid")
