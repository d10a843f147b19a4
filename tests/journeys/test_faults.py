"""Named faults, flown by the whole flow: each ends with no box billed and a receipt that tells the truth.

The counting recipe keeps the runner's contract in seconds; tests/training/test_cascade.py trains for real. Faults that do not disturb each
other share a flight.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tasks.lease import read_lease
from tests.journeys.conftest import JOURNEY_S, ROOT, Journey, completed, wasted

pytestmark = [pytest.mark.journey, pytest.mark.timeout(600)]
Make = Callable[..., Journey]
ALL = ("cpt", "sft", "dpo", "kto", "grpo")


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


def test_a_lost_create_reply_dropped_connections_and_a_destroy_that_lies_cost_patience_and_no_second_box(
    journey: Make,
) -> None:
    here = journey("create.drop_after_commit", "ssh.drop_mid_command=3", "destroy.200_but_stays=3")
    completed(here, here.fly(), boxes=1)


def test_a_box_that_never_boots_an_old_driver_and_a_slow_uplink_are_each_given_back_for_the_next_offer(
    journey: Make,
) -> None:
    here = journey(
        "boot.loading_forever@machine:36001", "box.driver_old@machine:36002", "net.uplink=0.38@machine:36003"
    )
    ended = here.fly(here.recipe("boot_s: 60", "boot_s: 10"))
    completed(here, ended, boxes=4)
    reasons = wasted(here, ended)
    assert "not running after" in reasons[1].reason
    assert "driver" in reasons[2].reason and "580.65.06" in reasons[2].reason
    assert "uplink" in reasons[3].reason
    assert {info.key for info in here.store.list("hosts/")} == {
        f"hosts/{machine}.json" for machine in (36001, 36002, 36003)
    }, "remembered"


def test_after_a_failed_import_probe_and_a_box_lost_in_mid_phase_the_third_goes_on_from_the_manifest(
    journey: Make,
) -> None:
    here = journey("box.import_broken=pydantic_core@machine:36001", "box.lost_at=sft:18@machine:36002")
    ended = here.fly(here.recipe("step_seconds: 0.05", "step_seconds: 0.8"))
    completed(here, ended, boxes=3)
    assert "pydantic_core" in wasted(here, ended)[1].reason
    assert wasted(here, ended)[2].what in {"phase sft", "upload cpt"}
    lines = here.receipt(ended.flow_run_id).lines
    assert "phase cpt" not in [line.what for line in lines if line.attempt == 3], "what was durable is not done again"
    again = [line for line in lines if line.attempt == 3 and line.wasted]
    assert {"boot", "prefetch"} <= {line.what for line in again}, "paid a second time because of the loss"
    assert all(line.reason.startswith("third box after: ") for line in again)
    assert "resumed from runs/counting/manifests/sft/" in ended.output


def test_after_sigkill_of_the_flow_two_ticks_of_the_reaper_leave_nothing(journey: Make) -> None:
    # Longer than the reaper's own start takes on a busy machine.
    here = journey(LIVERY_LEASE_S="15")
    child = here.take_off()
    here.wait_for(lambda: here.said("phase cpt: 20 steps"))
    child.process.send_signal(signal.SIGKILL)
    child.process.wait(10)
    assert here.billed_now() == 1, "nobody else has destroyed it"
    assert "keep" in here.reap(), "the lease is still live"
    time.sleep(float(here.environ["LIVERY_LEASE_S"]))
    here.reap()
    assert here.billed_now() == 0
    receipt = here.receipt(here.landed(child).flow_run_id)
    assert (receipt.written_by, receipt.instances_left) == ("reaper", 0)
    assert receipt.paid_usd == pytest.approx(here.world()["total_usd"], abs=2e-4)


# Two of a kind tell names from kinds.
SEVEN = {"cpt": "cpt", "tools": "sft", "style": "sft", "first": "dpo", "kto": "kto", "second": "dpo", "grpo": "grpo"}


def _phase(name: str, kind: str, steps: int) -> dict[str, object]:
    data = f"bucket:datasets/tiny/{kind}.jsonl"
    return {"name": name, "kind": kind, "data": data, "steps": steps, "learning_rate": 1e-3, "save_every_steps": 10}


def test_sigterm_in_the_sixth_of_seven_phases_destroys_and_bills_and_a_run_of_the_same_name_goes_on_with_the_sixth(
    journey: Make,
) -> None:
    here = journey(LIVERY_KEEP_BOX="no")
    # The sixth is longer than the uploads of those before it, which the training does not wait for.
    phases = [_phase(name, kind, 60 if name == "second" else 4) for name, kind in SEVEN.items()]
    recipe = here.recipe("step_seconds: 0.05", "step_seconds: 0.2", phases=phases)
    child = here.take_off(recipe, phases=None)
    here.wait_for(lambda: any("/second/" in key for key in here.manifests()))
    child.process.terminate()
    child.process.wait(JOURNEY_S)
    assert here.billed_now() == 0
    assert here.receipt(here.landed(child).flow_run_id).outcome.startswith("interrupted")
    ended = here.fly(recipe, phases=None)
    assert (ended.code, here.billed_now()) == (0, 0), ended.output[-3000:]
    assert {key.split("/")[3] for key in here.manifests()} == set(SEVEN)
    trained = {line.what for line in here.receipt(ended.flow_run_id).lines if line.what.startswith("phase ")}
    assert "phase grpo" in trained and trained <= {"phase second", "phase grpo"}, "what was durable is not done again"


def test_only_a_keep_flag_that_says_yes_keeps_the_box_of_a_failed_run_and_it_has_an_end(journey: Make) -> None:
    here = journey(LIVERY_KEEP_BOX="yes")
    child = here.take_off()
    here.wait_for(lambda: here.said("phase cpt: 20 steps"))
    child.process.terminate()
    child.process.wait(JOURNEY_S)
    assert here.billed_now() == 1
    lease = read_lease(here.store, here.landed(child).flow_run_id or "")
    assert lease is not None and lease.hold_until is not None and lease.hold_until < time.time() + 2 * 3600 + 60
    assert "held for debugging" in here.reap()
    assert here.billed_now() == 1


def test_a_wrong_key_is_one_sentence_and_exit_code_2(journey: Make) -> None:
    here = journey(LIVERY_MARKET_API_KEY="wrong-key-12345")
    done = subprocess.run(
        [sys.executable, "-m", "flows", "finetune", "counting"],
        env=here.environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "LIVERY_MARKET_API_KEY" in error
    assert "wrong-key-12345" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert here.world()["instances"] == []
