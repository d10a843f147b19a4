"""What the bill of a run says of boxes that failed, were killed or did their work, and what the budget makes of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from tasks import alarms, boxes
from tasks.billing import receipt_written
from tasks.destroy import destroy_run
from tasks.domain import Attempt, Box, Flight, Intent, Label, Lease, Receipt, Span
from tasks.errors import BootFailed, BoxLost, BudgetReached, TransferFailed
from tasks.lease import write_lease
from tasks.market.vast import VastMarket
from tasks.offers import plan_run
from tasks.phase import Watcher
from tasks.receipt import read_receipt, table, write_receipt
from tasks.remote.jobs import EventTail, Jobs
from tasks.remote.ssh import Remote
from tasks.run import Run
from tests.tasks.pretend import FLOW_RUN, Clock, Pretend, dead_store, rehearsal_recipe
from training.box.store import Store
from training.contract import layout
from training.contract.events import CheckpointDurable, CheckpointSaved, Heartbeat

PHASES = [
    {"kind": "cpt", "data": "bucket:data/cpt.jsonl", "steps": 10, "learning_rate": 1e-4},
    {"kind": "sft", "data": "bucket:data/sft.jsonl", "steps": 10, "learning_rate": 1e-4},
]


class Flown:
    """A run with one rented box whose steps are written by hand, on the virtual clock."""

    def __init__(self, pretend: Pretend, market: VastMarket, store: Store, clock: Clock, tmp_path: Path) -> None:
        self.pretend, self.market, self.store, self.clock, self.tmp_path = pretend, market, store, clock, tmp_path
        self.run = self.start()
        self.box_id = 0

    def start(self, **recipe: Any) -> Run:
        wanted = rehearsal_recipe(phases=PHASES, **recipe)
        settings = self.pretend.settings(self.tmp_path, self.store.bucket)
        run = Run(wanted, {}, FLOW_RUN, self.market, self.store, settings, clock=self.clock)
        run.take_off(plan_run(wanted, self.market, self.store, now=self.clock()))
        return run

    def rent(self) -> None:
        offer = self.run.next_offer().offer
        label = Label(flow_run_id=FLOW_RUN, attempt=self.run.attempts, hard_end=self.run.hard_end)
        self.run.flight.begin_attempt(self.run.attempts, label.text, offer)
        with self.run.flight.span("boot"):
            self.box_id = self.pretend.rented(attempt=self.run.attempts)
            self.clock.sleep(60)
        instance = self.market.show(self.box_id)
        assert instance is not None
        self.run.flight.rented(instance)
        remote = Remote("root", self.tmp_path / "key", self.tmp_path / "known", tuple)
        box = Box(
            instance_id=self.box_id,
            machine_id=offer.machine_id,
            label=label.text,
            run="tools-35b",
            flow_run_id=FLOW_RUN,
            attempt=self.run.attempts,
            ssh_user="root",
            key_path="key",
            known_hosts_path="known",
            dph_usd=offer.dph_total_usd,
            offer=offer,
            rented_at=self.clock(),
        )
        self.run.watcher = Watcher(
            box,
            Jobs(remote),
            EventTail(remote, clock=self.clock),
            self.market.show,
            self.run.recipe.budget,
            spent_usd=self.run.spent_usd,
            deadline=self.run.deadline,
            poll_s=1,
            clock=self.clock,
            sleep=self.clock.sleep,
        )

    def intent(self) -> None:
        last = self.run.flight.flight.attempts[-1]
        intent = Intent(
            flow_run_id=FLOW_RUN,
            run=self.run.recipe.name,
            attempt=last.attempt,
            label=last.label,
            account_id="1",
            offer_id=last.offer_id,
            machine_id=last.machine_id,
            dph_usd=last.dph_usd,
            disk_gb=20,
            written_at=self.clock(),
            state="created",
            instance_id=self.box_id,
        )
        self.store.put_bytes(layout.intent(FLOW_RUN, last.attempt), intent.model_dump_json().encode())

    def train_cpt(self) -> None:
        """A phase of 100 s whose last checkpoint is durable when it ends."""
        with self.run.flight.span("phase cpt"):
            self.clock.sleep(100)
        self.run.view.absorb(
            [CheckpointDurable(phase="cpt", step=10, manifest="m", bytes=1, seconds=1, complete=True, t=self.clock())]
        )

    def fail(self, step: str, seconds: float, error: BaseException) -> None:
        with self.run.flight.span(step):
            self.clock.sleep(seconds)
            raise error

    def receipt(self) -> Receipt:
        found = read_receipt(self.store, self.run.recipe.name, FLOW_RUN)
        assert found is not None
        return found


@pytest.fixture
def flown(pretend: Pretend, market: VastMarket, store: Store, clock: Clock, tmp_path: Path) -> Flown:
    return Flown(pretend, market, store, clock, tmp_path)


def wasted(receipt: Receipt) -> dict[str, float]:
    return {line.what: round(line.hours * 3600) for line in receipt.lines if line.wasted}


def test_a_run_that_is_stopped_has_not_wasted_what_is_durable(flown: Flown) -> None:
    flown.rent()
    flown.train_cpt()

    def body() -> None:
        with receipt_written(flown.run):
            try:
                flown.fail("phase sft", 50, KeyboardInterrupt())
            finally:  # as the guard does, before the receipt is written
                flown.run.close()
                destroy_run(flown.market, FLOW_RUN, clock=flown.clock, sleep=flown.clock.sleep)

    with pytest.raises(KeyboardInterrupt):
        body()
    assert wasted(flown.receipt()) == {"phase sft": 50}
    assert flown.receipt().outcome == "interrupted: KeyboardInterrupt"


def test_training_whose_upload_failed_is_wasted_with_the_upload(flown: Flown) -> None:
    flown.rent()
    flown.train_cpt()
    with flown.run.flight.span("phase sft"):
        flown.clock.sleep(200)
    with pytest.raises(TransferFailed):
        flown.fail("upload sft", 30, TransferFailed("uplink dead"))
    boxes.give_back(flown.run, TransferFailed("uplink dead"))
    assert flown.run.watcher is None, "the next box must not be judged by this one's events"
    write_receipt(flown.store, flown.market, FLOW_RUN, "flow", now=flown.clock(), flight=flown.run.flight.flight)
    assert wasted(flown.receipt()) == {"phase sft": 200, "upload sft": 30}


def test_a_receipt_is_made_of_the_flight_in_hand_where_the_bucket_holds_an_older_one(flown: Flown) -> None:
    flown.rent()
    older = flown.store.get_bytes(layout.flight(FLOW_RUN))
    flown.run.flight.end("completed")
    flown.store.put_bytes(layout.flight(FLOW_RUN), older or b"")
    write_receipt(flown.store, flown.market, FLOW_RUN, "flow", now=flown.clock(), flight=flown.run.flight.flight)
    assert flown.receipt().outcome == "completed"


def intent(label: str, **changes: Any) -> Intent:
    given = {"flow_run_id": FLOW_RUN, "run": "tools-35b", "attempt": 1, "label": label, "account_id": "1"}
    given |= {"offer_id": 1, "machine_id": 1, "dph_usd": 1.0, "disk_gb": 20, "written_at": 0.0, "state": "created"}
    return Intent(**{**given, **changes})


def test_the_box_of_a_flow_that_was_killed_while_it_booted_is_on_the_bill(flown: Flown) -> None:
    offer = flown.run.next_offer().offer
    box_id = flown.pretend.rented()
    flown.run.flight.begin_attempt(1, "label", offer)
    flown.store.put_bytes(layout.intent(FLOW_RUN, 1), intent("label", instance_id=box_id).model_dump_json().encode())
    with pytest.raises(KeyboardInterrupt):
        flown.fail("boot", 600, KeyboardInterrupt())
    flown.market.destroy(box_id)
    receipt = write_receipt(flown.store, flown.market, FLOW_RUN, "reaper", now=flown.clock())
    assert receipt is not None and receipt.boxes == 1
    (line,) = receipt.lines
    assert line.instance_id == box_id and line.wasted and line.usd
    assert receipt.wasted_usd == pytest.approx(receipt.paid_usd) and receipt.paid_usd


def test_a_second_box_of_the_same_create_call_is_on_the_bill_and_wasted(flown: Flown) -> None:
    offer = flown.run.next_offer().offer
    first, second = flown.pretend.rented(), flown.pretend.rented(offer=0)
    flown.run.flight.begin_attempt(1, "label", offer)
    note = intent("label", instance_id=first, also_ids=(second,), state="destroyed")
    flown.store.put_bytes(layout.intent(FLOW_RUN, 1), note.model_dump_json().encode())
    with flown.run.flight.span("boot"):
        flown.clock.sleep(600)
    flown.run.flight.attempt_failed("accepted twice", None)
    receipt = write_receipt(
        flown.store, flown.market, FLOW_RUN, "flow", now=flown.clock(), flight=flown.run.flight.flight
    )
    assert receipt is not None and receipt.boxes == 2
    assert {line.instance_id for line in receipt.lines if line.wasted and line.usd} == {first, second}
    assert sum(line.usd or 0 for line in receipt.lines) == pytest.approx(receipt.paid_usd, abs=1e-5)


def killed_flight(store: Store, began: float) -> None:
    """Of a process that was killed in its second phase."""
    spans = (
        Span(step="boot", started_at=began, ended_at=began + 10, outcome="ok"),
        Span(step="phase sft", started_at=began + 10),
    )
    attempt = Attempt(attempt=1, label="l", machine_id=1, offer_id=1, dph_usd=1.0, instance_id=7, spans=spans)
    flight = Flight(
        flow_run_id=FLOW_RUN,
        run="tools-35b",
        started_at=began,
        planned_usd=1.0,
        max_usd=2.0,
        market="vast",
        attempts=(attempt,),
    )
    store.put_bytes(layout.flight(FLOW_RUN), flight.model_dump_json().encode())


def test_of_a_run_that_was_killed_all_that_no_manifest_holds_is_wasted(market: VastMarket, store: Store) -> None:
    began = time.time() - 100
    killed_flight(store, began)
    receipt = write_receipt(store, market, FLOW_RUN, "reaper", now=began + 200)
    assert receipt is not None and receipt.outcome == "ended by the reaper"
    assert wasted(receipt) == {"boot": 10, "phase sft": 190}
    store.delete(layout.receipt("tools-35b", FLOW_RUN))
    store.put_bytes(layout.manifest("tools-35b", "sft", 5), b"{}")  # 100 s after the start
    receipt = write_receipt(store, market, FLOW_RUN, "reaper", now=began + 200)
    assert receipt is not None and wasted(receipt) == {"phase sft": pytest.approx(100, abs=5)}


def test_a_bill_asked_for_again_the_next_day_does_not_count_the_night(market: VastMarket, store: Store) -> None:
    began = time.time() - 100
    killed_flight(store, began)
    first = write_receipt(store, market, FLOW_RUN, "reaper", now=began + 200)
    again = write_receipt(store, market, FLOW_RUN, "command", now=began + 86_400)
    assert first is not None and again is not None
    assert again.lines == first.lines and again.outcome == first.outcome


def test_a_bill_asked_for_in_mid_run_ends_nothing(market: VastMarket, store: Store) -> None:
    began = time.time() - 100
    killed_flight(store, began)
    write_lease(store, Lease(flow_run_id=FLOW_RUN, run="tools-35b", renewed_at=began, expires_at=began + 1000))
    receipt = write_receipt(store, market, FLOW_RUN, "command", now=began + 150)
    assert receipt is not None and receipt.outcome == "running" and not wasted(receipt)


def test_lines_whose_dollars_cannot_be_read_do_not_say_zero(pretend: Pretend, store: Store, tmp_path: Path) -> None:
    killed_flight(store, time.time() - 100)
    receipt = write_receipt(store, pretend.client(tmp_path, key="revoked"), FLOW_RUN, "reaper")
    assert receipt is not None and receipt.paid_usd is None
    assert [line.usd for line in receipt.lines] == [None, None]
    assert "0.00000" not in table(receipt) and "unknown" in table(receipt)


def test_a_box_that_the_market_has_not_billed_yet_was_not_free(market: VastMarket, store: Store) -> None:
    killed_flight(store, time.time() - 100)
    receipt = write_receipt(store, market, FLOW_RUN, "reaper")
    assert receipt is not None and receipt.paid_usd is None and receipt.wasted_usd is None
    assert "no charges of box 7 yet" in receipt.notes[0]


def test_steps_that_ran_while_the_last_checkpoint_was_uploaded_are_done_again_and_wasted(flown: Flown) -> None:
    flown.rent()
    with flown.run.flight.span("phase cpt"):
        flown.clock.sleep(60)
        flown.run.view.absorb([CheckpointSaved(phase="cpt", step=5, bytes=1, t=flown.clock())])
        flown.clock.sleep(30)
        durable = CheckpointDurable(
            phase="cpt", step=5, manifest="m", bytes=1, seconds=30, complete=False, t=flown.clock()
        )
        flown.run.view.absorb([durable])
        flown.clock.sleep(10)
    boxes.give_back(flown.run, BoxLost("host gone"))
    write_receipt(flown.store, flown.market, FLOW_RUN, "flow", now=flown.clock(), flight=flown.run.flight.flight)
    assert wasted(flown.receipt()) == {"phase cpt": 40}


def test_after_a_loss_in_mid_phase_the_next_boxs_way_to_its_first_step_is_wasted_by_the_loss(flown: Flown) -> None:
    flown.rent()
    flown.train_cpt()
    with pytest.raises(BoxLost):
        flown.fail("phase sft", 50, BoxLost("host gone"))
    boxes.give_back(flown.run, BoxLost("host gone"))
    flown.rent()
    with flown.run.flight.span("phase sft"):
        flown.clock.sleep(60)
    flown.run.flight.attempt_done()
    flown.run.flight.end("completed")
    receipt = write_receipt(
        flown.store, flown.market, FLOW_RUN, "flow", now=flown.clock(), flight=flown.run.flight.flight
    )
    assert receipt is not None and receipt.wasted_usd
    reasons = {(line.what, line.attempt): line.reason for line in receipt.lines if line.wasted}
    assert reasons == {("phase sft", 1): "host gone", ("boot", 2): "second box after: host gone"}
    assert receipt.planned and sum(receipt.planned.values()) == pytest.approx(receipt.planned_usd)


def test_a_bill_that_is_booked_in_part_says_so_far_and_until_when_and_is_made_whole_later(flown: Flown) -> None:
    flown.rent()
    with flown.run.flight.span("phase cpt"):
        flown.clock.sleep(7200)
    flown.run.flight.attempt_done()
    flown.run.flight.end("completed")
    destroy_run(flown.market, FLOW_RUN, clock=flown.clock, sleep=flown.clock.sleep)
    flown.pretend.arm("charges.behind=3600")
    part = write_receipt(flown.store, flown.market, FLOW_RUN, "flow", now=flown.clock())
    assert part is not None and part.so_far and part.booked_until == pytest.approx(flown.clock() - 3600, abs=30)
    assert "so far" in part.notes[0] and not part.final
    flown.clock.sleep(3600)
    whole = write_receipt(flown.store, flown.market, FLOW_RUN, "audit", now=flown.clock())
    assert whole is not None and whole.final and part.paid_usd and whole.paid_usd
    assert whole.paid_usd == pytest.approx(flown.pretend.market.total_usd(), abs=1e-5)
    assert whole.paid_usd > part.paid_usd * 1.5


def test_the_hours_that_a_box_was_kept_are_on_the_bill_as_such_and_it_is_not_whole_before_they_are_booked(
    flown: Flown,
) -> None:
    flown.rent()
    flown.intent()
    with pytest.raises(RuntimeError), receipt_written(flown.run):
        flown.fail("phase cpt", 600, RuntimeError("loss is not finite"))
    flown.clock.sleep(7200)
    destroy_run(flown.market, FLOW_RUN, clock=flown.clock, sleep=flown.clock.sleep, store=flown.store)
    flown.pretend.arm("charges.behind=3600")
    part = write_receipt(flown.store, flown.market, FLOW_RUN, "reaper", now=flown.clock())
    assert part is not None and part.so_far and not part.final
    flown.clock.sleep(3700)
    whole = write_receipt(flown.store, flown.market, FLOW_RUN, "audit", now=flown.clock())
    assert (
        whole is not None
        and whole.final
        and whole.paid_usd == pytest.approx(flown.pretend.market.total_usd(), abs=1e-4)
    )
    kept = [line for line in whole.lines if line.what == "until gone"]
    assert [round(line.hours) for line in kept] == [2] and kept[0].wasted
    assert "still there after: failed: loss is not finite" in kept[0].reason


def test_a_cap_that_ends_a_run_is_told_with_its_dollars(flown: Flown) -> None:
    flown.rent()
    nobody = {PREFECT_API_URL: "http://127.0.0.1:9/api", PREFECT_CLIENT_MAX_RETRIES: 0}
    with temporary_settings(nobody), pytest.raises(BudgetReached), receipt_written(flown.run):
        flown.fail("phase cpt", 60, BudgetReached("about $30 spent, budget.max_usd = $30.00"))
    (alarm,) = alarms.standing(flown.store)
    assert (alarm.what, alarm.subject, alarm.instances) == ("cap_reached", FLOW_RUN, (flown.box_id,))
    assert alarm.spent_usd and alarm.dph_usd and "budget.max_usd" in alarm.reason


def test_a_flow_run_that_is_started_again_keeps_its_earlier_boxes_on_the_bill(flown: Flown) -> None:
    flown.rent()
    first = flown.box_id
    again = flown.start()
    assert [attempt.instance_id for attempt in again.flight.flight.attempts] == [first]
    assert again.flight.flight.attempts[0].ended == "the flow run was started again"
    again.next_offer()
    assert again.attempts == 2, "the label of the first box is not given again"


def test_a_flow_run_that_is_started_again_may_try_as_many_boxes_as_the_first_time(flown: Flown) -> None:
    flown.rent()
    again = flown.start(budget={"attempts": 1})
    assert again.next_offer()


def test_an_offer_that_was_gone_is_no_box_tried(flown: Flown) -> None:
    run = flown.start(budget={"attempts": 1})
    flown.pretend.arm("create.offer_gone_404")
    with pytest.raises(BootFailed):
        boxes.rent(run, run.next_offer(), run.attempts)
    assert run.next_offer()


def test_no_box_is_rented_after_the_hours_are_over(flown: Flown) -> None:
    flown.clock.sleep(12 * 3600)
    with pytest.raises(BudgetReached, match="max_hours = 12"):
        flown.run.next_offer()


def test_what_the_market_has_charged_counts_against_the_budget_where_it_is_more_than_the_hours(flown: Flown) -> None:
    flown.rent()
    flown.pretend.market.contracts[flown.box_id].bill.disk_usd += 29.9999
    with pytest.raises(BudgetReached, match=r"about \$30"):
        flown.run.next_offer()


def test_a_market_that_does_not_answer_about_charges_leaves_the_estimate(flown: Flown, pretend: Pretend) -> None:
    flown.rent()
    flown.run.market = pretend.client(flown.tmp_path, key="revoked")
    assert 0 < flown.run.spent_usd() < 1


def test_a_bucket_that_does_not_answer_for_a_moment_does_not_end_a_run_that_trains(flown: Flown) -> None:
    flown.run.store = dead_store()
    flown.run.refresh()
    assert flown.run.phases_left() == ("cpt", "sft")


def test_while_neither_box_nor_market_answers_only_silence_ends_the_box(flown: Flown, pretend: Pretend) -> None:
    flown.rent()
    assert flown.run.watcher is not None
    flown.run.watcher._show = pretend.client(flown.tmp_path, key="revoked").show
    with pytest.raises(BoxLost, match="no event for"):
        flown.run.watcher.until(lambda view: False)


def test_a_step_that_never_ends_is_no_life_however_the_heart_beats(flown: Flown) -> None:
    flown.rent()
    watcher = flown.run.watcher
    assert watcher is not None
    silent_s = flown.run.recipe.budget.silent_s
    watcher.view.absorb([Heartbeat(phase="sft", step=3, in_step_s=silent_s - 1.0)])
    watcher.until(lambda view: view.in_step_s > 0)
    watcher.view.absorb([Heartbeat(phase="sft", step=3, in_step_s=silent_s + 1.0)])
    with pytest.raises(BoxLost, match="a step has not ended"):
        watcher.until(lambda view: False)
