"""Each named fault, flown by the whole flow: it ends with no box billed and a receipt that tells the truth.

The counting recipe keeps the runner's contract in seconds; `test_cascade.py` trains for real.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from tests.journeys.conftest import SHORT, Ended, Journey

pytestmark = pytest.mark.journey
Make = Callable[..., Journey]
ALL = ("cpt", "sft", "dpo", "kto", "grpo")


def completed(journey: Journey, ended: Ended, *, boxes: int, phases: tuple[str, ...] = SHORT) -> None:
    assert ended.code == 0, ended.output[-4000:]
    assert journey.billed_now() == 0
    receipt = journey.receipt(ended.flow_run_id)
    assert (receipt.outcome, receipt.instances_left, receipt.boxes) == ("completed", 0, boxes)
    assert receipt.paid_usd is not None and receipt.paid_usd == pytest.approx(journey.world()["total_usd"], abs=2e-4)
    assert {key.split("/")[3] for key in journey.manifests()} == set(phases)
    assert not journey.store.list("alarms/")


def test_a_run_with_nothing_wrong_is_paid_destroyed_and_told(journey: Make) -> None:
    here = journey()
    ended = here.fly(phases=ALL)
    completed(here, ended, boxes=1, phases=ALL)
    assert here.receipt(ended.flow_run_id).wasted_usd == 0
    assert here.store.size("runs/counting/adapter/exported.json")
    for secret in ("LIVERY_MARKET_API_KEY", "LIVERY_S3_SECRET_ACCESS_KEY", "LIVERY_BOX_S3_SECRET_ACCESS_KEY"):
        assert here.environ[secret] not in ended.output
    again = here.fly(phases=ALL)
    assert again.code == 0
    assert len(here.labels()) == 1, "a finished run rents nothing"


def test_a_lost_reply_to_create_leaves_one_box_that_is_adopted_by_its_label(journey: Make) -> None:
    here = journey("create.drop_after_commit")
    completed(here, here.fly(), boxes=1)


def test_a_box_that_loads_for_ever_is_given_back_and_the_next_is_tried(journey: Make) -> None:
    here = journey("boot.loading_forever")
    ended = here.fly(here.recipe("boot_s: 30", "boot_s: 6"))
    completed(here, ended, boxes=2)
    wasted = [line for line in here.receipt(ended.flow_run_id).lines if line.wasted]
    assert wasted and "not running after" in wasted[0].reason


def test_a_driver_too_old_is_found_at_the_first_login(journey: Make) -> None:
    here = journey("box.driver_old")
    ended = here.fly()
    completed(here, ended, boxes=2)
    assert "driver" in next(line for line in here.receipt(ended.flow_run_id).lines if line.wasted).reason
    assert here.store.list("hosts/"), "the machine is remembered"


def test_a_slow_uplink_is_measured_before_anything_is_trained(journey: Make) -> None:
    here = journey("net.uplink=0.38")
    ended = here.fly()
    completed(here, ended, boxes=2)
    assert "uplink" in next(line for line in here.receipt(ended.flow_run_id).lines if line.wasted).reason


def test_dropped_connections_in_mid_command_cost_nothing(journey: Make) -> None:
    here = journey("ssh.drop_mid_command=3")
    completed(here, here.fly(), boxes=1)


def test_a_box_lost_in_mid_phase_is_replaced_and_the_phase_goes_on_from_its_manifest(journey: Make) -> None:
    here = journey("box.lost_at=sft:12")
    ended = here.fly(here.recipe("step_seconds: 0.05", "step_seconds: 0.4"))
    completed(here, ended, boxes=2)
    assert "phase cpt" not in [line.what for line in here.receipt(ended.flow_run_id).lines if line.attempt == 2], (
        "what was durable is not done again"
    )
    assert "resumed from runs/counting/manifests/sft/" in ended.output
    assert any(line.wasted and line.what == "phase sft" for line in here.receipt(ended.flow_run_id).lines)


def test_a_destroy_that_says_200_and_does_nothing_is_not_believed(journey: Make) -> None:
    here = journey("destroy.200_but_stays=3")
    completed(here, here.fly(), boxes=1)


def test_a_failing_import_probe_ends_the_box_and_not_the_run(journey: Make) -> None:
    here = journey("box.import_broken=pydantic_core")
    ended = here.fly()
    completed(here, ended, boxes=2)


def test_after_sigkill_of_the_flow_two_ticks_of_the_reaper_leave_nothing(journey: Make) -> None:
    here = journey()
    child = here.take_off()
    here.wait_for(lambda: here.said("phase sft: 20 steps"))
    child.process.send_signal(signal.SIGKILL)
    child.process.wait(10)
    assert here.billed_now() == 1, "nobody else has destroyed it"
    first = here.reap()
    assert "keep" in first, first
    time.sleep(float(here.environ["LIVERY_LEASE_S"]))
    here.reap()
    assert here.billed_now() == 0
    receipt = here.receipt(here.landed(child).flow_run_id)
    assert (receipt.written_by, receipt.instances_left) == ("reaper", 0)
    assert receipt.paid_usd == pytest.approx(here.world()["total_usd"], abs=2e-4)


def test_sigterm_destroys_the_box_and_writes_the_receipt_before_the_flow_ends(journey: Make) -> None:
    here = journey()
    child = here.take_off()
    here.wait_for(lambda: here.said("phase cpt: 20 steps"))
    child.process.terminate()
    child.process.wait(60)
    assert here.billed_now() == 0
    assert here.receipt(here.landed(child).flow_run_id).outcome.startswith("interrupted")


def test_a_run_of_the_same_name_goes_on_from_the_manifests_of_a_dead_one(journey: Make) -> None:
    here = journey()
    child = here.take_off()
    here.wait_for(lambda: here.said("phase cpt step 20: durable"))
    child.process.terminate()
    child.process.wait(60)
    ended = here.fly()
    assert ended.code == 0, ended.output[-3000:]
    assert "phase cpt" not in [line.what for line in here.receipt(ended.flow_run_id).lines]
    assert here.billed_now() == 0


@pytest.mark.parametrize("flag", ["0", "false", "no", ""])
def test_a_keep_flag_that_does_not_say_yes_destroys(journey: Make, flag: str) -> None:
    here = journey(LIVERY_KEEP_BOX=flag)
    child = here.take_off()
    here.wait_for(lambda: here.said("phase cpt: 20 steps"))
    child.process.terminate()
    child.process.wait(60)
    assert here.billed_now() == 0
