from __future__ import annotations

import pytest

from training.contract.durable import BID_LOSSES_PER_H, LOSSES_PER_H, MAX_S, STEP_HURT, durable_interval

GB = 10**9


def cost_usd_h(seconds: float, *, size_bytes: int, mbps: float, dph_usd: float, up_usd_gb: float) -> float:
    """What an interval costs an hour, by the sentence of the docstring."""
    upload_h = size_bytes * 8 / 1e6 / mbps / 3600
    upload_usd = STEP_HURT * upload_h * dph_usd + size_bytes / GB * up_usd_gb
    hours = seconds / 3600
    return LOSSES_PER_H * dph_usd * hours / 2 + upload_usd / hours


@pytest.mark.parametrize("size_gb", [3.0, 11.4])
@pytest.mark.parametrize("up_usd_gb", [0.0, 0.0005])
def test_no_other_interval_is_cheaper(size_gb: float, up_usd_gb: float) -> None:
    facts = {"size_bytes": int(size_gb * GB), "dph_usd": 1.2, "up_usd_gb": up_usd_gb}
    best = durable_interval(uplink_mbps=400, **facts)  # type: ignore[arg-type]
    costs = [cost_usd_h(best.seconds * factor, mbps=400, **facts) for factor in (0.7, 0.9, 1.0, 1.1, 1.4)]  # type: ignore[arg-type]
    assert min(costs) == costs[2]


def test_a_box_that_others_can_outbid_is_saved_more_often() -> None:
    facts = {"size_bytes": 11 * GB, "uplink_mbps": 800.0, "dph_usd": 1.0}
    steady = durable_interval(**facts, losses_per_h=LOSSES_PER_H)  # type: ignore[arg-type]
    bid = durable_interval(**facts, losses_per_h=BID_LOSSES_PER_H)  # type: ignore[arg-type]
    assert bid.seconds < steady.seconds / 3 and bid.at_risk_usd < steady.at_risk_usd


def test_uploads_never_overtake_each_other_and_the_seeds_uplink_takes_its_hours() -> None:
    slow = durable_interval(size_bytes=7 * GB, uplink_mbps=3.04, dph_usd=1.2)
    assert slow.seconds == pytest.approx(7e9 / 0.38e6, rel=0.001)
    assert "as fast as the uplink lets them follow" in slow.sentence


def test_it_is_never_shorter_than_a_save_nor_longer_than_an_hour_of_work() -> None:
    assert durable_interval(size_bytes=GB, uplink_mbps=8000, dph_usd=1.0, save_s=2000).seconds == 2000
    dear = durable_interval(size_bytes=10 * GB, uplink_mbps=8000, dph_usd=0.3, up_usd_gb=0.1)
    assert dear.seconds == MAX_S and "at most 3600 s" in dear.sentence


def test_until_the_uplink_is_measured_every_save_is_sent() -> None:
    first = durable_interval(size_bytes=GB, uplink_mbps=None, dph_usd=1.0, save_s=60)
    assert first.seconds == 60 and "until the uplink has been measured" in first.sentence


def test_the_sentence_gives_size_time_rate_and_dollars() -> None:
    told = durable_interval(size_bytes=int(11.4e9), uplink_mbps=200, dph_usd=1.2).sentence
    assert "11.4 GB every" in told and "456 s to send at 200 Mbps" in told and "of training at risk" in told


def test_a_machine_that_costs_nothing_sends_as_often_as_it_can() -> None:
    assert durable_interval(size_bytes=GB, uplink_mbps=800, dph_usd=0.0).seconds == 10
