"""Lines that fail a whole flow: a slow uplink, with and without the word for less, and a slow downlink. Each is noticed, decided and on the receipt."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.journeys.conftest import JOURNEY_S, Ended, Journey, completed, wasted
from training.contract import layout

pytestmark = [pytest.mark.journey, pytest.mark.timeout(600)]
Make = Callable[..., Journey]
PHASES = [{"kind": "cpt", "data": "bucket:datasets/tiny/cpt.jsonl", "steps": 20, "learning_rate": 1e-3}]
SLOW = "net.uplink=0.38@machine:36001"


def fly_until_the_uplink_dies(here: Journey, recipe: str) -> Ended:
    """It was fast when it was measured, and is slow when the first checkpoint is saved."""
    child = here.take_off(recipe, phases=None)
    here.wait_for(lambda: here.said("the runner has started"))
    here.rehearsal.control.arm(SLOW)
    child.process.wait(JOURNEY_S)
    return here.landed(child)


def shown(here: Journey, flow_run_id: str | None) -> tuple[list[dict[str, Any]], str]:
    """Rows and caption of the transfers on the run's page."""
    wanted = {"flow_run_id": {"any_": [flow_run_id]}, "key": {"any_": ["transfers"]}}
    url = f"{here.environ['PREFECT_API_URL']}/artifacts/filter"
    (artifact,) = httpx.post(url, json={"artifacts": wanted}, timeout=30).json()
    return json.loads(artifact["data"]), artifact["description"]


def test_an_uplink_that_dies_under_a_run_is_left_for_what_costs_less_and_the_receipt_has_the_wasted_dollars(
    journey: Make,
) -> None:
    here = journey()
    changes = ("upload_s: 90", "upload_s: 20", "step_seconds: 0.05", "step_seconds: 0.2")
    ended = fly_until_the_uplink_dies(here, here.recipe(*changes, checkpoint_mb=24, phases=PHASES))
    completed(here, ended, boxes=2, phases=("cpt",))
    receipt = here.receipt(ended.flow_run_id)
    (upload,) = [line for line in receipt.lines if line.attempt == 1 and line.what == "upload cpt"]
    assert upload.wasted and upload.hours * 3600 < 60, "0.38 MB/s are noticed long before a minute has passed"
    assert "waiting $" in upload.reason and "another box $" in upload.reason and "the box is left" in upload.reason
    assert "sending less is not allowed (allow: [light_checkpoints])" in upload.reason
    first = [line for line in receipt.lines if line.attempt == 1]
    assert all(line.wasted for line in first), "nothing of it was durable"
    lost_usd = sum(line.usd or 0.0 for line in first)
    assert lost_usd > 0 and receipt.wasted_usd is not None and receipt.wasted_usd >= lost_usd - 1e-6
    assert receipt.charges["up"] > 0 and receipt.charges["down"] > 0
    rows, caption = shown(here, ended.flow_run_id)
    slow, fast = [row for row in rows if row["what"] == "upload cpt/20"]
    assert slow["box"] != fast["box"] and slow["left"] != "done" and fast["left"] == "done"
    # 0.38 MB/s are 3; what the kernel's own buffers swallow at first counts, too.
    assert 1.0 < float(slow["Mbps"]) < 10.0, slow
    assert "the box is left" in caption


def test_with_the_recipes_word_less_is_sent_from_the_order_to_the_export(journey: Make) -> None:
    here = journey()
    # No other box is cheap enough, so that waiting and sending less are what is left.
    changes = ("upload_s: 90", "upload_s: 25", "step_seconds: 0.05", "step_seconds: 0.2", "max_dph_usd: 1.0")
    recipe = here.recipe(*changes, "max_dph_usd: 0.31", checkpoint_mb=12, phases=PHASES, allow=["light_checkpoints"])
    ended = fly_until_the_uplink_dies(here, recipe)
    assert ended.code == 0, ended.output[-4000:]
    assert here.billed_now() == 0
    receipt = here.receipt(ended.flow_run_id)
    assert (receipt.outcome, receipt.boxes, receipt.wasted_usd) == ("completed", 1, 0)
    assert not here.manifests() and here.store.size(layout.light_manifest("counting", "cpt", 20)) is not None
    adapter = here.store.get_bytes(layout.adapter("counting") + "weights.bin") or b""
    assert len(adapter) == 6_000_000, "in bfloat16"
    exported = json.loads(here.store.get_bytes(layout.exported("counting")) or b"")
    assert set(exported["sha256"]) == {"weights.bin", "state.json"}
    _, caption = shown(here, ended.flow_run_id)
    assert "sending less $" in caption and "less is sent" in caption
    assert any("less is sent" in note for note in receipt.notes), receipt.notes


def test_a_host_whose_downlink_will_not_make_it_is_left_early_and_remembered_and_the_receipt_has_its_dollars(
    journey: Make,
) -> None:
    here = journey("net.downlink=0.38@machine:36001")
    here.store.put_bytes("models/tiny-moe/more.safetensors", os.urandom(24_000_000))
    changes = ("min_inet_down_mbps: 50", "min_inet_down_mbps: 0", "prefetch_s: 90", "prefetch_s: 30")
    ended = here.fly(here.recipe(*changes, "size_gb: 0.0017", "size_gb: 0.024", phases=PHASES), phases=None)
    completed(here, ended, boxes=2, phases=("cpt",))
    receipt = here.receipt(ended.flow_run_id)
    (line,) = [line for line in receipt.lines if line.attempt == 1 and line.what == "prefetch"]
    assert line.wasted and line.hours * 3600 < 25, (
        "63 s are needed, and 30 s allowed: that is known after a fifth of them"
    )
    assert "too slow: prefetch" in line.reason and "next offer" in line.reason
    assert line.reason == wasted(here, ended)[1].reason
    assert receipt.wasted_usd is not None and receipt.wasted_usd > 0
    host = json.loads(here.store.get_bytes("hosts/36001.json") or b"{}")
    assert "too slow" in json.dumps(host)
    rows, _ = shown(here, ended.flow_run_id)
    assert len([row for row in rows if row["what"] == "prefetch model"]) == 2
