from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from deployments.rehearsal import catalogue
from deployments.rehearsal.api import Api
from deployments.rehearsal.market import Market
from tasks.market.limiter import INTERVALS_S
from tests.deployments.rehearsal.conftest import CHEAPEST, FakeClock, MarketCaller


def crowd(call: MarketCaller, count: int) -> list[int]:
    """`count` boxes, more than there are offers."""
    offer = catalogue.OFFERS[-1]
    for i in range(count):
        call.market.offers[90_000 + i] = catalogue.Offer(
            **{**offer.__dict__, "id": 90_000 + i, "machine_id": 50_000 + i}
        )
    return [call.create(90_000 + i, label=f"livery:run:{i}:9").body["new_contract"] for i in range(count)]


# Keys


def test_no_key_is_403_and_a_wrong_key_is_404_auth_error(call: MarketCaller) -> None:
    assert call("GET", "/api/v0/users/current/", key=None).status == 403
    wrong = call("GET", "/api/v0/users/current/", key="0" * 64)
    assert wrong.status == 404 and wrong.body == {
        "success": False,
        "error": "auth_error",
        "msg": "Invalid user key",
    }


def test_a_wrong_key_on_delete_looks_like_gone_only_to_who_reads_no_body(call: MarketCaller) -> None:
    instance_id = call.rent()
    refused = call("DELETE", f"/api/v0/instances/{instance_id}/", key="0" * 64)
    assert refused.status == 404 and refused.body["error"] == "auth_error"
    assert call.listed() == [instance_id]
    call.destroy(instance_id)
    gone = call.destroy(instance_id)
    assert gone.status == 404 and gone.body["error"] == "no_such_instance"


def test_the_reaper_key_is_the_same_account(call: MarketCaller) -> None:
    ids = {
        call("GET", "/api/v0/users/current/", key=key).body["id"]
        for key in (call.market.account_key, call.market.reaper_key)
    }
    assert len(ids) == 1


def test_an_instance_key_may_show_stop_and_destroy_its_own_instance_only(call: MarketCaller) -> None:
    mine, other = call.rent(), call.rent(24002002)
    key = call.market.contracts[mine].api_key
    own, foreign = f"/api/v0/instances/{mine}/", f"/api/v0/instances/{other}/"
    assert call("GET", own, key=key).status == 200
    assert call("PUT", own, {"state": "stopped"}, key=key).status == 200
    for method, path in (("GET", foreign), ("DELETE", foreign), ("GET", "/api/v1/instances/"), ("GET", "/api/v0/ssh/")):
        assert call(method, path, key=key).status == 403, path
    assert call("DELETE", own, key=key).status == 200
    assert call("GET", own, key=key).body["error"] == "auth_error"
    assert call.listed() == [other]


def test_users_current_no_longer_takes_owner(call: MarketCaller) -> None:
    assert call("GET", "/api/v0/users/current/", owner="me").status == 400
    assert call("GET", "/api/v0/users/current/").body["credit"] == pytest.approx(100.0)


# Rate limits


@pytest.fixture
def strict(clock: FakeClock) -> MarketCaller:
    return MarketCaller(Api(Market(clock), pace=1.0), clock)


def test_calls_closer_than_the_threshold_are_429_in_plain_text(strict: MarketCaller) -> None:
    assert strict("GET", "/api/v1/instances/").status == 200
    refused = strict("GET", "/api/v1/instances/")
    assert refused.status == 429 and refused.body == "API requests too frequent: endpoint threshold=1.0"
    strict.clock.advance(1.0)
    assert strict("GET", "/api/v1/instances/").status == 200


# Seconds between two calls of one endpoint by one key, from the market's documentation of November 2026.
DOCUMENTED_S = {
    ("PUT", "/api/v0/asks/{id}/"): 4.5,
    ("PUT", "/api/v0/instances/bid_price/{id}/"): 5.5,
    ("GET", "/api/v0/instances/{id}/"): 2.0,
    ("GET", "/api/v1/instances/"): 1.0,
    ("DELETE", "/api/v0/instances/{id}/"): 3.0,
    ("PUT", "/api/v0/instances/{id}/"): 1.0,
    ("PUT", "/api/v0/instances/reboot/{id}/"): 1.0,
    ("PUT", "/api/v0/instances/recycle/{id}/"): 1.0,
    ("POST", "/api/v0/ssh/"): 1.0,
    ("DELETE", "/api/v0/instances/{id}/ssh/{key_id}/"): 2.0,
    ("GET", "/api/v0/charges/"): 1.0,
}


def test_the_limits_are_the_documented_ones_and_our_client_keeps_them(call: MarketCaller) -> None:
    kept = {(route.method, route.template): route.every_s for route in call.api.routes}
    assert {endpoint: kept[endpoint] for endpoint in DOCUMENTED_S} == DOCUMENTED_S
    search = next(route for route in call.api.routes if route.template == "/api/v0/bundles/")
    assert search.per_minute == 10
    assert [endpoint for endpoint, every_s in INTERVALS_S.items() if every_s < kept[endpoint]] == []
    assert INTERVALS_S[("POST", "/api/v0/bundles/")] >= 60 / search.per_minute


def test_limits_are_per_method_template_and_key(strict: MarketCaller) -> None:
    strict("GET", "/api/v0/instances/1/")
    assert strict("GET", "/api/v0/instances/2/").status == 429
    assert strict("DELETE", "/api/v0/instances/1/").status == 404
    assert strict("GET", "/api/v0/instances/1/", key=strict.market.reaper_key).status == 200


def test_a_hasty_create_is_penalised(strict: MarketCaller) -> None:
    strict.create()
    assert strict.create(24002002).status == 429
    strict.clock.advance(4.6)
    assert strict.create(24002002).status == 429
    strict.clock.advance(12)
    assert strict.create(24002002).status == 200


def test_search_allows_ten_a_minute(strict: MarketCaller) -> None:
    for _ in range(10):
        assert strict("POST", "/api/v0/bundles/", {}).status == 200
    assert strict("POST", "/api/v0/bundles/", {}).status == 429
    strict.clock.advance(60)
    assert strict("POST", "/api/v0/bundles/", {}).status == 200


def test_pace_scales_the_limits(clock: FakeClock) -> None:
    fast = MarketCaller(Api(Market(clock), pace=0.1), clock)
    fast.destroy(1)
    clock.advance(0.2)
    assert fast.destroy(1).status == 429
    clock.advance(0.1)
    assert fast.destroy(1).status == 404


# Create


@pytest.mark.parametrize(
    "body",
    [
        {"disk": 7},
        {"disk": 100_000},
        {"label": "x" * 257},
        {"onstart": "x" * 4097},
        {"onstart": "x" * 4000, "args_str": "y" * 97},
        {"env": {"A": "x" * 256}},
        {"env": {f"-p {port}:{port}": "1" for port in range(65)}},
        {"env": " ".join(f"-p {port}:{port}" for port in range(65))},
        {"image": "x" * 1025},
        {"price": 0.0001},
        {"disk": "much"},
    ],
)
def test_a_create_beyond_the_limits_is_refused_and_makes_nothing(call: MarketCaller, body: dict[str, Any]) -> None:
    reply = call.create(**body)
    assert reply.status == 400 and "new_contract" not in reply.body
    assert call.listed() == []


def test_an_unknown_offer_is_404_invalid_args_with_the_token_only_in_the_msg(call: MarketCaller) -> None:
    reply = call.create(1)
    assert reply.status == 404 and reply.body["error"] == "invalid_args" and "no_such_ask" in reply.body["msg"]


def test_a_taken_offer_with_cancel_unavail_is_410(call: MarketCaller) -> None:
    call.rent()
    reply = call.create(cancel_unavail=True)
    assert reply.status == 410 and reply.body["error"] == "no_such_ask"


def test_env_comes_as_object_or_flags_without_ports(call: MarketCaller) -> None:
    first = call.rent(env={"-p 8000:8000": "1", "A": "b"})
    second = call.rent(24002002, env="-e A=b -p 8000:8000 -e 'C=d e'")
    rows = [call.show(i) for i in (first, second)]
    assert [row and row["extra_env"] for row in rows] == [[["A", "b"]], [["A", "b"], ["C", "d e"]]]


def test_a_body_that_is_no_json_is_refused(call: MarketCaller) -> None:
    from deployments.rehearsal.api import Request

    reply = call.api.handle(Request("POST", "/api/v0/bundles/", {}, b"{", call.market.account_key))
    assert reply.status == 400 and reply.body == {"error": "invalid_request", "msg": "Invalid json body"}


# Show and list


def test_a_destroyed_or_unknown_instance_shows_as_null(call: MarketCaller) -> None:
    instance_id = call.rent()
    call.destroy(instance_id)
    assert call.show(instance_id) is None and call.show(1) is None


def test_the_direct_endpoint_appears_with_running_and_the_address_has_a_trailing_space(
    call: MarketCaller, clock: FakeClock
) -> None:
    instance_id = call.create().body["new_contract"]
    row = call.show(instance_id)
    assert row is not None and row["ports"] is None and row["actual_status"] is None
    clock.advance(10)
    row = call.show(instance_id)
    assert row is not None and row["ports"]["22/tcp"][0]["HostPort"] == "41022"
    assert row["public_ipaddr"] == "127.0.0.1 " and row["ssh_port"] == 15_610


def test_the_v0_listing_is_gone(call: MarketCaller) -> None:
    reply = call("GET", "/api/v0/instances/")
    assert reply.status == 410 and reply.body["error"] == "deprecated_endpoint"


def test_pages_hold_25_rows_and_the_cursor_leads_through_all(call: MarketCaller) -> None:
    ids = crowd(call, 60)
    seen: list[int] = []
    token: str | None = None
    for expected in (25, 25, 10):
        query = {"after_token": token} if token else {}
        body = call("GET", "/api/v1/instances/", limit="100", **query).body
        assert len(body["instances"]) == body["instances_found"] == expected and body["total_instances"] == 60
        seen += [row["id"] for row in body["instances"]]
        token = body["next_token"]
    assert token is None and seen == ids


def test_the_cursor_survives_a_row_that_goes_away(call: MarketCaller) -> None:
    ids = crowd(call, 30)
    first = call("GET", "/api/v1/instances/").body
    call.destroy(ids[24])
    second = call("GET", "/api/v1/instances/", after_token=first["next_token"]).body
    assert [row["id"] for row in second["instances"]] == ids[25:]


def test_descending_pages_lead_through_all_too(call: MarketCaller) -> None:
    ids = crowd(call, 30)
    order = [{"col": "id", "dir": "desc"}]
    first = call("GET", "/api/v1/instances/", order_by=order).body
    second = call("GET", "/api/v1/instances/", order_by=order, after_token=first["next_token"]).body
    assert [row["id"] for page in (first, second) for row in page["instances"]] == ids[::-1]


def test_a_limit_that_is_not_positive_means_five(call: MarketCaller) -> None:
    crowd(call, 8)
    assert len(call.listed(limit="0")) == 5


def test_a_bad_cursor_is_refused(call: MarketCaller) -> None:
    reply = call("GET", "/api/v1/instances/", after_token="nonsense")
    assert reply.status == 400 and reply.body["error"] == "invalid_token"


def test_the_listing_filters_stored_columns_and_counts_labels(call: MarketCaller) -> None:
    first, second = call.rent(label="livery:a:1:9"), call.rent(24002002, label="livery:b:1:9")
    assert call.listed(select_filters={"label": {"eq": "livery:a:1:9"}}) == [first]
    assert call.listed(select_filters={"id": {"in": [second]}}) == [second]
    assert call.listed(select_filters={"actual_status": {"eq": "loading"}}) == []
    assert call("GET", "/api/v1/instances/").body["label_counts"] == {"livery:a:1:9": 1, "livery:b:1:9": 1}
    assert call("GET", "/api/v1/instances/", select_filters={"dph_total": {"lt": 1}}).status == 400


def test_a_mistyped_column_comes_back_as_null_not_as_an_error(call: MarketCaller) -> None:
    call.rent()
    body = call("GET", "/api/v1/instances/", select_cols=["id", "lable"]).body
    assert body["instances"][0]["lable"] is None


def test_bulk_destroy_ends_every_named_box(call: MarketCaller) -> None:
    ids = [call.rent(), call.rent(24002002)]
    assert call("DELETE", "/api/v0/instances/", {"instance_ids": ids}).status == 200
    assert call.listed() == []
    assert call("DELETE", "/api/v0/instances/", {"instance_ids": ids}).status == 404


def test_labels_can_be_changed(call: MarketCaller) -> None:
    instance_id = call.rent()
    assert call("PUT", f"/api/v0/instances/{instance_id}/", {"label": "other"}).status == 200
    row = call.show(instance_id)
    assert row is not None and row["label"] == "other"


def test_a_path_without_its_slash_is_not_found(call: MarketCaller) -> None:
    assert call("GET", "/api/v1/instances").status == 404


def test_a_bid_price_changes_only_bids(call: MarketCaller) -> None:
    bid, plain = call.rent(price=0.2), call.rent(24002002)
    assert call("PUT", f"/api/v0/instances/bid_price/{bid}/", {"client_id": "me", "price": 0.4}).status == 200
    row = call.show(bid)
    assert row is not None and row["dph_base"] == 0.4
    assert call("PUT", f"/api/v0/instances/bid_price/{plain}/", {"price": 0.4}).status == 400


def test_logs_are_fetched_from_a_url_of_their_own(call: MarketCaller) -> None:
    instance_id = call.rent()
    url = call("PUT", f"/api/v0/instances/request_logs/{instance_id}/", {"tail": "10"}).body["result_url"]
    assert re.fullmatch(r"http://127\.0\.0\.1/_rehearsal/logs/\S{20,}", url)


def test_keys_never_stand_in_a_url_or_a_row(call: MarketCaller) -> None:
    instance_id = call.rent()
    text = repr(call.show(instance_id)) + repr(call("GET", "/api/v1/instances/").body)
    for key in (call.market.account_key, call.market.reaper_key, call.market.contracts[instance_id].api_key):
        assert key not in text


def test_the_cheapest_rehearsal_offer_comes_first() -> None:
    rehearsal = [offer for offer in catalogue.OFFERS if offer.gpu_name == "Rehearsal CPU"]
    assert min(rehearsal, key=lambda offer: offer.dph_base_usd).id == CHEAPEST


def test_the_pretend_market_binds_no_other_address() -> None:
    """Every address in the source is loopback, but for the sentence that warns of weed's default."""
    folder = Path(catalogue.__file__).parent
    for path in folder.rglob("*.py"):
        for line in path.read_text().splitlines():
            if "0.0.0.0" in line:
                assert "HostIp" in line or line.strip().startswith(("#", '"')), f"{path.name}: {line}"
