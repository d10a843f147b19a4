from __future__ import annotations

from typing import Any

import pytest

from tests.deployments.rehearsal.conftest import PUBLIC_KEY, T0, FakeClock, MarketCaller

DISK_USD_H = 0.15 * 20 / 720


def usd(call: MarketCaller, instance_id: int) -> dict[str, float]:
    call.market.settle()
    return call.market.items_usd(call.market.contracts[instance_id])


def test_a_box_goes_from_nothing_over_created_and_loading_to_running(call: MarketCaller, clock: FakeClock) -> None:
    instance_id = call.create().body["new_contract"]
    seen = []
    for _ in range(11):
        row = call.show(instance_id)
        assert row is not None
        if row["actual_status"] not in seen:
            seen.append(row["actual_status"])
        clock.advance(1)
    assert seen == [None, "created", "loading", "running"]


def test_storage_is_billed_from_accept_and_the_gpu_from_running(call: MarketCaller, clock: FakeClock) -> None:
    instance_id = call.create().body["new_contract"]
    clock.advance(10 + 3600)
    bill = usd(call, instance_id)
    assert bill["gpu"] == pytest.approx(0.30)
    assert bill["disk"] == pytest.approx(DISK_USD_H * 3610 / 3600)


def test_billing_ends_with_destroy(call: MarketCaller, clock: FakeClock) -> None:
    instance_id = call.rent()
    clock.advance(1800)
    call.destroy(instance_id)
    at_destroy = usd(call, instance_id)
    clock.advance(86_400)
    assert usd(call, instance_id) == at_destroy
    assert at_destroy["gpu"] == pytest.approx(0.15)
    assert sum(c.billed_now_usd_h for c in call.market.contracts.values()) == 0


def test_a_stopped_box_still_pays_for_its_disk(call: MarketCaller, clock: FakeClock) -> None:
    instance_id = call.rent()
    call("PUT", f"/api/v0/instances/{instance_id}/", {"state": "stopped"})
    before = usd(call, instance_id)
    clock.advance(3600)
    after = usd(call, instance_id)
    assert after["gpu"] == before["gpu"]
    assert after["disk"] - before["disk"] == pytest.approx(DISK_USD_H)


def test_an_offline_box_pays_nothing(call: MarketCaller, clock: FakeClock) -> None:
    instance_id = call.rent()
    call.market.lose(call.market.contracts[instance_id])
    before = usd(call, instance_id)
    clock.advance(3600)
    assert usd(call, instance_id) == before


def test_a_late_look_bills_as_exactly_as_an_early_one(call: MarketCaller, clock: FakeClock) -> None:
    """Events are played at the time they were due, however late somebody looks."""
    call.market.arm("boot.offline_after=100")
    instance_id = call.rent()
    clock.advance(50_000)
    assert usd(call, instance_id)["gpu"] == pytest.approx(0.30 * 100 / 3600)


def test_a_bid_pays_its_own_price(call: MarketCaller, clock: FakeClock) -> None:
    instance_id = call.rent(price=0.2)
    clock.advance(3600)
    assert usd(call, instance_id)["gpu"] == pytest.approx(0.2)
    row = call.show(instance_id)
    assert row is not None and row["is_bid"] is True


def test_a_losing_bid_may_leave_a_stopped_box_behind_an_error(call: MarketCaller) -> None:
    reply = call.create(price=0.01)
    assert reply.status == 410
    row = call.show(reply.body["new_contract"])
    assert row is not None and row["actual_status"] == row["intended_status"] == "stopped"
    assert call.create(24002002, price=0.01, cancel_unavail=True).body["error"] == "invalid_price"


def test_reboot_keeps_the_box_and_comes_back(call: MarketCaller, clock: FakeClock) -> None:
    instance_id = call.rent()
    assert call("PUT", f"/api/v0/instances/reboot/{instance_id}/", {}).status == 200
    row = call.show(instance_id)
    assert row is not None and row["actual_status"] == "rebooting"
    clock.advance(5)
    row = call.show(instance_id)
    assert row is not None and row["actual_status"] == "running"


def test_a_box_stopped_while_it_boots_does_not_run_later(call: MarketCaller, clock: FakeClock) -> None:
    instance_id = call.create().body["new_contract"]
    clock.advance(5)
    call("PUT", f"/api/v0/instances/{instance_id}/", {"state": "stopped"})
    clock.advance(3600)
    row = call.show(instance_id)
    assert row is not None and row["actual_status"] == "stopped" and usd(call, instance_id)["gpu"] == 0


def test_an_offer_is_free_again_after_its_box_is_destroyed(call: MarketCaller) -> None:
    instance_id = call.rent()
    assert call.create().status == 404
    call.destroy(instance_id)
    assert call.create().status == 200


def test_account_keys_reach_only_new_boxes(call: MarketCaller) -> None:
    def keys(instance_id: int) -> list[Any]:
        import json

        reply = call("GET", f"/api/v0/instances/{instance_id}/ssh/").body
        return list(json.loads(reply["ssh_keys"]))

    before = call.rent()
    call("POST", "/api/v0/ssh/", {"ssh_key": PUBLIC_KEY})
    after = call.rent(24002002)
    assert keys(before) == [] and len(keys(after)) == 1


def test_attaching_the_same_key_twice_is_one_key_and_it_can_be_detached(call: MarketCaller) -> None:
    instance_id = call.rent()
    path = f"/api/v0/instances/{instance_id}/ssh/"
    for _ in range(2):
        assert call("POST", path, {"ssh_key": PUBLIC_KEY}).body["success"]
    key_id = call.market.contracts[instance_id].ssh_keys[0].id
    assert len(call.market.contracts[instance_id].ssh_keys) == 1
    assert call("DELETE", f"{path}{key_id}/").status == 200
    assert call("DELETE", f"{path}{key_id}/").status == 404
    assert call("POST", path, {"ssh_key": "not a key"}).status == 400


def test_charges_name_instance_label_and_every_kind_of_cost(call: MarketCaller, clock: FakeClock) -> None:
    instance_id = call.rent()
    clock.advance(3600)
    day = {"day": {"gte": T0, "lte": clock()}}
    row = call("GET", "/api/v0/charges/", select_filters=day).body["results"][0]
    assert row["source"] == f"instance-{instance_id}" and row["metadata"]["label"] == "livery:run:1:9"
    items = {item["type"]: item["amount"] for item in row["items"]}
    assert set(items) == {"gpu", "disk", "bwd", "bwu"}
    assert row["amount"] == pytest.approx(sum(items.values())) and items["gpu"] == pytest.approx(0.30)


def test_charges_without_a_range_are_refused(call: MarketCaller) -> None:
    assert call("GET", "/api/v0/charges/").status == 400
