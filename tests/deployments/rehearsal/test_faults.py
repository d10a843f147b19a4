"""What each fault does to the market's replies. Those that need a real box are in test_boxes.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deployments.rehearsal.faults import FAMILIES, FAULTS, FaultBook, parse, table
from tests.deployments.rehearsal.conftest import CHEAPEST, PUBLIC_KEY, FakeClock, MarketCaller


@pytest.fixture
def arm(call: MarketCaller) -> Any:
    return call.market.arm


# How a fault is written


@pytest.mark.parametrize(
    ("spec", "value", "left", "machine"),
    [
        ("list.410", True, 1, None),
        ("net.uplink=0.38@always", 0.38, None, None),
        ("net.uplink", 0.38, 1, None),
        ("boot.loading_forever@2", True, 2, None),
        ("box.driver_old@machine:36001", "550.127.05", None, 36001),
        ("destroy.429=4", 4, 4, None),
        ("destroy.429=4@2", 4, 8, None),
        ("box.lost_at=sft:5", "sft:5", 1, None),
        ("boot.status_msg=no space left on device@once", "no space left on device", 1, None),
    ],
)
def test_a_spec_is_name_value_scope(spec: str, value: Any, left: int | None, machine: int | None) -> None:
    armed = parse(spec)
    assert (armed.value, armed.left, armed.machine_id) == (value, left, machine)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("create.drop_after_comit", "create.drop_after_commit"),
        ("uplink", "net.uplink"),
        ("net.uplink=slow", "MB/s"),
        ("net.uplink=-1", "not negative"),
        ("list.410=3", "takes no value"),
        ("list.410@sometimes", "once, always, a count or machine:"),
        ("list.410@0", "once, always, a count or machine:"),
        ("box.lost_at", "phase:step"),
        ("box.lost_at=sft", "box.lost_at=sft:5"),
        ("ssh.direct_blocked=maybe", "blackhole or refuse"),
    ],
)
def test_a_wrong_spec_is_refused_with_what_would_be_right(spec: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse(spec)


def test_the_table_names_every_fault_once_and_fits_a_terminal() -> None:
    lines = table().splitlines()
    named = [line.split()[0].partition("=")[0] for line in lines if line.startswith("  ") and line[2] != " "]
    assert sorted(named) == sorted(FAULTS)
    assert max(map(len, lines)) <= 120
    assert {name.partition(".")[0] for name in FAULTS} == set(FAMILIES)


def test_every_fault_is_exercised_by_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert [name for name in FAULTS if name not in tests] == []


def test_a_fault_strikes_as_often_as_its_scope_says() -> None:
    book = FaultBook()
    book.arm("list.410@2")
    assert [book.take("list.410") for _ in range(3)] == [True, True, None]
    book.arm("list.410@machine:7")
    assert [book.take("list.410", m) for m in (6, 7, None, 7)] == [None, True, None, True]
    assert book.rows()[0]["fired"] == 2


# Search


def test_the_days_search_quota_may_be_used_up_until_midnight(call: MarketCaller, arm: Any) -> None:
    arm("search.quota@2")
    for path, body in (("/api/v0/bundles/", {}), ("/api/v0/search/asks/", {"q": {}})):
        reply = call("POST" if "bundles" in path else "PUT", path, body)
        assert reply.status == 429 and reply.body["error"] == "search_quota_exceeded"
        assert reply.headers["X-RateLimit-Reset"].endswith("T00:00:00Z")
    assert call("POST", "/api/v0/bundles/", {}).status == 200


def test_the_offers_may_come_as_an_object(call: MarketCaller, arm: Any) -> None:
    arm("search.object_not_list")
    assert isinstance(call("POST", "/api/v0/bundles/", {}).body["offers"], dict)
    assert isinstance(call("POST", "/api/v0/bundles/", {}).body["offers"], list)


# Create


def test_drop_after_commit_leaves_a_box_and_no_reply(call: MarketCaller, arm: Any) -> None:
    arm("create.drop_after_commit")
    assert call.create().drop
    assert len(call.listed()) == 1
    assert not call.create(24002002).drop


def test_504_after_commit_leaves_a_box_behind_a_gateway_page(call: MarketCaller, arm: Any) -> None:
    arm("create.504_after_commit")
    reply = call.create()
    assert reply.status == 504 and "<html>" in reply.body
    assert len(call.listed()) == 1


def test_504_before_commit_leaves_nothing(call: MarketCaller, arm: Any) -> None:
    arm("create.504_before_commit")
    assert call.create().status == 504
    assert call.listed() == []
    assert call.create().status == 200


def test_create_429_leaves_nothing(call: MarketCaller, arm: Any) -> None:
    arm("create.429")
    assert call.create().status == 429
    assert call.listed() == []
    assert call.create().status == 200


def test_a_reply_without_the_id_hides_a_box_that_runs(call: MarketCaller, arm: Any) -> None:
    arm("create.200_without_id")
    assert call.create().body == {"success": True}
    assert len(call.listed()) == 1


def test_success_false_with_contract_names_a_box_that_runs(call: MarketCaller, arm: Any) -> None:
    arm("create.success_false_with_contract")
    reply = call.create()
    assert reply.status == 200 and reply.body["success"] is False
    assert call.listed() == [reply.body["new_contract"]]


def test_double_accept_makes_two_boxes_with_one_label(call: MarketCaller, arm: Any) -> None:
    arm("create.double_accept")
    reply = call.create()
    body = call("GET", "/api/v1/instances/").body
    assert body["label_counts"] == {"livery:run:1:9": 2}
    assert reply.body["new_contract"] == min(row["id"] for row in body["instances"])


def test_offer_gone_comes_in_two_forms(call: MarketCaller, arm: Any) -> None:
    arm("create.offer_gone_404")
    first = call.create()
    assert (first.status, first.body["error"]) == (404, "invalid_args") and "no_such_ask" in first.body["msg"]
    arm("create.offer_gone_410")
    second = call.create()
    assert (second.status, second.body["error"]) == (410, "no_such_ask")
    assert call.listed() == []


def test_spend_limit_is_a_failure_inside_200(call: MarketCaller, arm: Any) -> None:
    arm("create.spend_limit")
    reply = call.create()
    assert reply.status == 200 and reply.body["success"] is False and reply.body["error"] == "spend_rate_limit"
    assert call.listed() == []


def test_a_bid_may_come_back_as_on_demand_at_full_price(call: MarketCaller, arm: Any) -> None:
    arm("create.returns_on_demand_for_bid")
    row = call.show(call.rent(price=0.2))
    assert row is not None and row["is_bid"] is False and row["dph_base"] == 0.30


def test_an_on_demand_create_does_not_use_up_the_bid_fault(call: MarketCaller, arm: Any) -> None:
    arm("create.returns_on_demand_for_bid")
    call.rent()
    row = call.show(call.rent(24002002, price=0.25))
    assert row is not None and row["is_bid"] is False


def test_the_label_may_be_lost(call: MarketCaller, arm: Any) -> None:
    arm("create.label_lost")
    row = call.show(call.rent())
    assert row is not None and row["label"] is None


def test_the_disk_may_be_short_and_the_gpu_another(call: MarketCaller, arm: Any) -> None:
    arm("create.disk_short=0.4")
    arm("create.other_gpu")
    row = call.show(call.rent())
    assert row is not None
    assert (row["disk_space"], row["gpu_name"], row["gpu_ram"]) == (8.0, "RTX 4090", 4000)


def test_the_box_may_be_dearer_than_its_offer(call: MarketCaller, arm: Any) -> None:
    arm("create.dearer=2")
    row = call.show(call.rent())
    assert row is not None and row["dph_base"] == pytest.approx(0.60)


# Show and list


def test_a_living_box_may_show_as_null_or_an_empty_list(call: MarketCaller, arm: Any) -> None:
    instance_id = call.rent()
    arm("show.null=2")
    assert [call.show(instance_id) is None for _ in range(3)] == [True, True, False]
    arm("show.empty_list")
    assert call("GET", f"/api/v0/instances/{instance_id}/").body == {"instances": []}


def test_a_new_box_may_be_404_for_a_while_and_listed_all_the_same(call: MarketCaller, arm: Any) -> None:
    arm("show.404_lag=2")
    instance_id = call.create().body["new_contract"]
    replies = [call("GET", f"/api/v0/instances/{instance_id}/").status for _ in range(3)]
    assert replies == [404, 404, 200] and call.listed() == [instance_id]


def test_the_v1_listing_may_be_410(call: MarketCaller, arm: Any) -> None:
    arm("list.410")
    assert call("GET", "/api/v1/instances/").body["error"] == "deprecated_endpoint"
    assert call("GET", "/api/v1/instances/").status == 200


def test_a_missing_row_is_still_counted(call: MarketCaller, arm: Any) -> None:
    first, second = call.rent(), call.rent(24002002)
    for spec, left in (("list.missing_row", first), (f"list.missing_row={first}", second)):
        arm(spec)
        body = call("GET", "/api/v1/instances/").body
        assert [row["id"] for row in body["instances"]] == [left] and body["total_instances"] == 2


def test_null_fields_are_null_in_every_row(call: MarketCaller, arm: Any) -> None:
    call.rent()
    arm("list.null_fields")
    row = call("GET", "/api/v1/instances/").body["instances"][0]
    assert row["label"] is row["actual_status"] is row["ports"] is row["start_date"] is None and row["id"]


def test_one_malformed_row_keeps_its_id(call: MarketCaller, arm: Any) -> None:
    ids = [call.rent(), call.rent(24002002)]
    arm("list.one_malformed_row")
    rows = call("GET", "/api/v1/instances/").body["instances"]
    assert [row["id"] for row in rows] == ids
    assert rows[0]["machine_id"] == "n/a" and isinstance(rows[1]["machine_id"], int)


def test_the_second_page_may_be_429(call: MarketCaller, arm: Any) -> None:
    for i in range(3):
        call.rent(CHEAPEST + i)
    arm("list.page2_429")
    first = call("GET", "/api/v1/instances/", limit="2")
    assert first.status == 200
    statuses = [
        call("GET", "/api/v1/instances/", limit="2", after_token=first.body["next_token"]).status for _ in range(2)
    ]
    assert statuses == [429, 200]


def test_the_total_may_be_wrong(call: MarketCaller, arm: Any) -> None:
    call.rent()
    arm("list.bad_total")
    assert [call("GET", "/api/v1/instances/").body["total_instances"] for _ in range(2)] == [2, 1]


def test_an_empty_listing_may_be_a_lie(call: MarketCaller, arm: Any) -> None:
    arm("list.empty_but_success")
    assert call.listed() == []
    instance_id = call.rent()
    body = call("GET", "/api/v1/instances/").body
    assert body["success"] is True and body["instances"] == [] and body["total_instances"] == 0
    assert call.listed() == [instance_id]


def test_the_account_may_change_under_a_listing(call: MarketCaller, arm: Any) -> None:
    arm("list.wrong_account")
    first, second = (call("GET", "/api/v0/users/current/").body["id"] for _ in range(2))
    assert first != second


def test_a_new_box_may_stay_out_of_the_listing_and_its_counts(call: MarketCaller, arm: Any) -> None:
    arm("list.lag=60")
    instance_id = call.rent()
    hidden = call("GET", "/api/v1/instances/").body
    assert (hidden["instances"], hidden["total_instances"], hidden["label_counts"]) == ([], 0, {})
    assert call.show(instance_id) is not None
    call.clock.advance(60)
    assert call.listed() == [instance_id]


def test_a_destroyed_box_may_stay_in_the_listing_unbilled(call: MarketCaller, arm: Any) -> None:
    arm("list.stale_after_destroy=60")
    instance_id = call.rent()
    call.destroy(instance_id)
    assert call.listed() == [instance_id] and call.show(instance_id) is None
    assert call.destroy(instance_id).body["error"] == "no_such_instance"
    assert call.market.contracts[instance_id].billed_now_usd_h == 0
    call.clock.advance(60)
    assert call.listed() == []


@pytest.mark.parametrize(("fault", "status"), [("read.429=2", 429), ("read.502=2", 502)])
def test_reading_may_be_refused_and_changing_is_not(call: MarketCaller, arm: Any, fault: str, status: int) -> None:
    instance_id = call.rent()
    arm(fault)
    assert call("PUT", f"/api/v0/instances/{instance_id}/", {"label": "other"}).status == 200
    replies = [
        call("GET", "/api/v1/instances/"),
        call("POST", "/api/v0/bundles/", {}),
        call("GET", "/api/v1/instances/"),
    ]
    assert [reply.status for reply in replies] == [status, status, 200]


# Keys


def test_a_key_that_may_only_read_changes_nothing_and_the_reapers_still_does(call: MarketCaller, arm: Any) -> None:
    instance_id = call.rent()
    arm("auth.read_only")
    for reply in (call.destroy(instance_id), call.create(24002002), call.destroy(instance_id)):
        assert (reply.status, reply.body["error"]) == (403, "auth_error")
    assert call.listed() == [instance_id] and call("POST", "/api/v0/bundles/", {}).status == 200
    assert call("DELETE", f"/api/v0/instances/{instance_id}/", key=call.market.reaper_key).status == 200


def test_a_revoked_key_is_404_for_every_call_and_the_reaper_still_sees(call: MarketCaller, arm: Any) -> None:
    arm("auth.revoked_midway=30")
    instance_id = call.rent()
    assert call.destroy(0).body["error"] == "no_such_instance"
    call.clock.advance(30)
    assert call.destroy(instance_id).body["error"] == "auth_error"
    assert call("GET", "/api/v1/instances/", key=call.market.reaper_key).body["total_instances"] == 1
    assert call.market.faults.rows()[0]["fired"] == 1


def test_an_expired_session_is_404_auth_error_once(call: MarketCaller, arm: Any) -> None:
    arm("auth.session_expired_404")
    instance_id = call.market.contracts[call.market.rent(call.market.offers[CHEAPEST], _rental()).id].id
    reply = call.destroy(instance_id)
    assert reply.status == 404 and reply.body["error"] == "auth_error" and "Session expired" in reply.body["msg"]
    assert call.destroy(instance_id).status == 200


def test_without_credit_nothing_is_made_and_running_boxes_stop(call: MarketCaller, arm: Any) -> None:
    instance_id = call.rent()
    arm("credit.zero")
    row = call.show(instance_id)
    assert row is not None and row["actual_status"] == row["intended_status"] == "stopped"
    refused = call.create(24002002)
    assert refused.status == 200 and refused.body["success"] is False and "new_contract" not in refused.body
    assert call("GET", "/api/v0/users/current/").body["credit"] == 0
    assert call.market.disarm("credit.zero") and call.create(24002002).body["success"]


# Destroy


def test_destroy_429_repeats_and_keeps_the_box(call: MarketCaller, arm: Any) -> None:
    instance_id = call.rent()
    arm("destroy.429=2")
    assert [call.destroy(instance_id).status for _ in range(3)] == [429, 429, 200]
    assert call.listed() == []


def test_destroyed_200_but_stays_billed_for_n_looks(call: MarketCaller, arm: Any) -> None:
    instance_id = call.rent()
    arm("destroy.200_but_stays=3")
    assert call.destroy(instance_id).body["success"] is True
    call.clock.advance(3600)
    assert call.show(instance_id) is not None
    assert call.market.items_usd(call.market.contracts[instance_id])["gpu"] == pytest.approx(0.30)
    assert call.listed() == [instance_id]
    assert call.show(instance_id) is not None
    assert call.show(instance_id) is None and call.listed() == []


def test_a_second_delete_ends_a_box_that_stayed(call: MarketCaller, arm: Any) -> None:
    instance_id = call.rent()
    arm("destroy.200_but_stays=1000")
    call.destroy(instance_id)
    assert call.listed() == [instance_id]
    assert call.destroy(instance_id).status == 200 and call.listed() == []


def test_destroy_500_but_done(call: MarketCaller, arm: Any) -> None:
    instance_id = call.rent()
    arm("destroy.500_but_done")
    assert call.destroy(instance_id).status == 500
    assert call.listed() == []


def test_destroy_may_hang_and_do_nothing(call: MarketCaller, arm: Any) -> None:
    instance_id = call.rent()
    arm("destroy.hang=7")
    reply = call.destroy(instance_id)
    assert reply.drop and reply.hold_s == 7
    assert call.listed() == [instance_id]


@pytest.mark.parametrize(
    ("fault", "status", "error"),
    [("destroy.success_false", 200, "internal_error"), ("destroy.404_but_alive", 404, "no_such_instance")],
)
def test_a_destroy_may_be_refused_in_odd_ways_and_the_box_stays(
    call: MarketCaller, arm: Any, fault: str, status: int, error: str
) -> None:
    instance_id = call.rent()
    arm(fault)
    for _ in range(2):
        reply = call.destroy(instance_id)
        assert (reply.status, reply.body["success"], reply.body["error"]) == (status, False, error)
        assert call.listed() == [instance_id]
    assert call.destroy(instance_id).body["success"] and call.listed() == []


# Boot and afterwards


def test_loading_forever_never_runs_and_bills_only_the_disk(call: MarketCaller, arm: Any, clock: FakeClock) -> None:
    arm("boot.loading_forever")
    instance_id = call.rent()
    clock.advance(86_400)
    row = call.show(instance_id)
    assert row is not None and row["actual_status"] == "loading"
    assert call.market.items_usd(call.market.contracts[instance_id])["gpu"] == 0
    second = call.show(call.rent(24002002))
    assert second is not None and second["actual_status"] == "running"


def test_a_status_msg_tells_of_a_pull_that_never_ends(call: MarketCaller, arm: Any) -> None:
    arm("boot.status_msg=toomanyrequests: pull rate limit")
    row = call.show(call.rent())
    assert row is not None
    assert (row["actual_status"], row["status_msg"]) == ("loading", "toomanyrequests: pull rate limit")


def test_a_container_may_exit_at_once(call: MarketCaller, arm: Any) -> None:
    arm("boot.exited")
    row = call.show(call.rent())
    assert row is not None and row["actual_status"] == "exited"


@pytest.mark.parametrize(
    ("spec", "status"),
    [("boot.offline_after=60", "offline"), ("host.reclaim_stop=60", "stopped"), ("bid.outbid_after=60", "stopped")],
)
def test_a_running_box_may_be_taken_away(
    call: MarketCaller, arm: Any, clock: FakeClock, spec: str, status: str
) -> None:
    arm(spec)
    instance_id = call.rent(price=0.25)
    for advance, expected in ((59, "running"), (2, status)):
        clock.advance(advance)
        row = call.show(instance_id)
        assert row is not None and row["actual_status"] == expected


def test_a_host_may_reboot_and_the_box_comes_back_at_new_ports_and_stays(
    call: MarketCaller, arm: Any, clock: FakeClock
) -> None:
    arm("host.reboots_after=60")
    instance_id = call.rent()
    contract = call.market.contracts[instance_id]
    clock.advance(60)
    row = call.show(instance_id)
    assert row is not None and (row["actual_status"], contract.port_moves) == ("rebooting", 1)
    for _ in range(2):
        clock.advance(3600)
        row = call.show(instance_id)
        assert row is not None and (row["actual_status"], contract.port_moves) == ("running", 1)


def test_only_a_bid_is_outbid(call: MarketCaller, arm: Any, clock: FakeClock) -> None:
    arm("bid.outbid_after=1")
    instance_id = call.rent()
    clock.advance(100)
    row = call.show(instance_id)
    assert row is not None and row["actual_status"] == "running"


def test_a_running_box_may_have_no_address(call: MarketCaller, arm: Any) -> None:
    arm("boot.no_address")
    row = call.show(call.rent())
    assert row is not None
    assert (row["actual_status"], row["ports"], row["ssh_host"], row["ssh_port"]) == ("running", None, None, None)


def test_a_contract_that_ends_stops_the_box_for_good_and_deletes_it_two_days_later(
    call: MarketCaller, arm: Any, clock: FakeClock
) -> None:
    arm("contract.ends_after=3600")
    instance_id = call.rent()
    row = call.show(instance_id)
    assert row is not None and row["end_date"] == clock() + 3600
    clock.advance(3600)
    again = call("PUT", f"/api/v0/instances/{instance_id}/", {"state": "running"})
    assert again.body["success"] is False
    box = call.market.contracts[instance_id]
    assert box.status == "stopped" and box.billed_now_usd_h == pytest.approx(0.15 * 20 / 720)
    clock.advance(48 * 3600 + 5)
    assert call.listed() == [] and box.ended_at == box.ends_at + 48 * 3600


def test_without_a_fault_a_contract_ends_when_the_offer_said(call: MarketCaller, clock: FakeClock) -> None:
    instance_id = call.rent(24001012)
    clock.advance(10_800)
    row = call.show(instance_id)
    assert row is not None and row["actual_status"] == row["intended_status"] == "stopped"


def test_unknown_may_come_back(call: MarketCaller, arm: Any, clock: FakeClock) -> None:
    arm("boot.unknown_then_back=10")
    instance_id = call.rent()
    seen = []
    for _ in range(14):
        row = call.show(instance_id)
        assert row is not None
        seen.append(row["actual_status"])
        clock.advance(1)
    assert seen[0] == "running" and seen[2] == "unknown" and seen[-1] == "running"


def test_the_price_may_rise_under_a_running_box(call: MarketCaller, arm: Any, clock: FakeClock) -> None:
    arm("price.increase_after=3600")
    instance_id = call.rent()
    clock.advance(7200)
    call.market.settle()
    assert call.market.items_usd(call.market.contracts[instance_id])["gpu"] == pytest.approx(0.30 + 0.45)


def test_a_fault_bound_to_a_machine_spares_the_others(call: MarketCaller, arm: Any) -> None:
    arm("boot.exited@machine:36002")
    rows = [call.show(call.rent(ask)) for ask in (CHEAPEST, 24002002)]
    assert [row and row["actual_status"] for row in rows] == ["running", "exited"]


def test_a_bill_may_be_behind_and_then_holds_a_part(call: MarketCaller, arm: Any, clock: FakeClock) -> None:
    arm("charges.behind=3600")
    instance_id, began = call.rent(), clock()
    clock.advance(7200)
    call.destroy(instance_id)

    def row() -> dict[str, Any]:
        day = {"day": {"gte": began, "lte": clock()}}
        found: dict[str, Any] = call("GET", "/api/v0/charges/", select_filters=day).body["results"][0]
        return found

    part = row()
    assert part["end"] == pytest.approx(began + 3600, abs=60)
    clock.advance(3600)
    assert row()["amount"] == pytest.approx(2 * part["amount"], rel=0.05)


def test_a_box_may_be_on_the_bill_only_long_after_its_end(call: MarketCaller, arm: Any, clock: FakeClock) -> None:
    arm("charges.lag=3600")
    instance_id, began = call.rent(), clock()

    def booked() -> int:
        day = {"day": {"gte": began, "lte": clock()}}
        return len(call("GET", "/api/v0/charges/", select_filters=day).body["results"])

    clock.advance(7200)
    assert booked() == 0
    call.destroy(instance_id)
    assert booked() == 0
    clock.advance(3600)
    assert booked() == 1


# SSH faults as the market plans them; their real effect is in test_boxes.py


def test_ssh_opens_keys_arrive_and_ports_move_in_their_time(call: MarketCaller, arm: Any, clock: FakeClock) -> None:
    for spec in ("ssh.refused_for=5", "ssh.key_missing_for=8", "ssh.port_changes_after=12"):
        arm(spec)
    instance_id = call.rent()
    box = call.market.contracts[instance_id]
    seen = []
    for advance in (0, 6, 3, 4):
        clock.advance(advance)
        call.market.settle()
        seen.append((box.ssh_open, box.keys_live, box.port_moves))
    assert seen == [(False, False, 0), (True, False, 0), (True, True, 0), (True, True, 1)]


def test_dropped_keys_come_back_by_attaching_through_the_api(call: MarketCaller, arm: Any, clock: FakeClock) -> None:
    arm("ssh.key_dropped_after=5")
    instance_id = call.rent()
    path, box = f"/api/v0/instances/{instance_id}/ssh/", call.market.contracts[instance_id]
    call("POST", path, {"ssh_key": PUBLIC_KEY})
    clock.advance(6)
    call.market.settle()
    assert not box.keys_live
    call("POST", path, {"ssh_key": PUBLIC_KEY})
    assert box.keys_live


def test_attaching_a_key_may_be_refused(call: MarketCaller, arm: Any) -> None:
    instance_id = call.rent()
    arm("ssh.attach_refused")
    path = f"/api/v0/instances/{instance_id}/ssh/"
    replies = [call("POST", path, {"ssh_key": PUBLIC_KEY}) for _ in range(2)]
    assert [reply.status for reply in replies] == [400, 200]
    assert replies[0].body["error"] == "team_ssh_keys_not_supported"


def test_a_live_fault_strikes_a_box_that_is_up_and_is_taken_back(call: MarketCaller, arm: Any) -> None:
    instance_id = call.rent()
    arm("net.uplink=0.5")
    box = call.market.contracts[instance_id]
    assert box.effects == {"net.uplink": 0.5}
    assert call.market.disarm("net.uplink") and box.effects == {}
    assert not call.market.disarm("net.uplink")


def _rental() -> Any:
    from deployments.rehearsal.market import Rental

    return Rental(20.0)
