from __future__ import annotations

import json

import pytest

from tasks.domain import Instance, UnparsedInstance
from tasks.errors import (
    Ambiguous,
    AuthError,
    EndpointGone,
    InvalidRequest,
    MarketError,
    NotFound,
    OfferGone,
    QuotaExhausted,
    RateLimited,
    Rejected,
    ShapeError,
)
from tasks.market import replies

AUTH = {"success": False, "error": "auth_error", "msg": "Invalid user key"}
NO_ASK = "error 404/3603: no_such_ask Instance type by id 7 is not available."


def _text(body: object) -> str:
    return body if isinstance(body, str) else json.dumps(body)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, AUTH, AuthError),
        (403, {"error": "auth_error", "msg": "This action requires login."}, AuthError),
        (403, "forbidden", AuthError),
        (404, AUTH, AuthError),
        (404, {"success": False, "error": "auth_error", "msg": "Session expired. Please log in again."}, AuthError),
        (404, {"error": "no_such_instance", "msg": "Instance 5 not found."}, NotFound),
        (404, {"error": "not_found", "msg": "Instance not found"}, NotFound),
        (404, {"error": "invalid_args", "msg": NO_ASK, "ask_id": 7}, OfferGone),
        (410, {"error": "no_such_ask", "msg": "Instance type by id 7 is no longer available."}, OfferGone),
        (410, {"error": "deprecated_endpoint", "msg": "use v1"}, EndpointGone),
        (404, "Not Found", ShapeError),
        (404, {"error": "teapot", "msg": "?"}, ShapeError),
        (400, {"error": "invalid_args", "msg": "error 400/3467: Invalid args"}, InvalidRequest),
        (400, {"error": "invalid_request", "msg": "Invalid json body"}, InvalidRequest),
        (422, "what", InvalidRequest),
        (429, "API requests too frequent: endpoint threshold=2.0", RateLimited),
        (429, {"detail": "API requests too frequent endpoint threshold=4.5"}, RateLimited),
        (429, {"success": False, "error": "rate_limit_exceeded", "msg": "slow down"}, RateLimited),
        (429, {"error": "search_quota_exceeded"}, QuotaExhausted),
        (408, "", Ambiguous),
        (409, "", Ambiguous),
        (425, "", Ambiguous),
        (500, "Internal Server Error", Ambiguous),
        (504, "<html>504</html>", Ambiguous),
        (301, "", ShapeError),
        (200, {"success": False, "error": "spend_rate_limit", "msg": "slow down"}, Rejected),
    ],
)
def test_the_body_decides_what_an_error_means(status: int, body: object, kind: type[MarketError]) -> None:
    assert type(replies.error_of("call", status, {}, _text(body))) is kind


@pytest.mark.parametrize("body", [{"success": True}, {"offers": []}, [], "null"])
def test_a_success_is_no_error(body: object) -> None:
    assert replies.error_of("call", 200, {}, _text(body)) is None


@pytest.mark.parametrize(("status", "kind"), [(200, Rejected), (410, EndpointGone), (500, Ambiguous)])
def test_an_error_that_made_a_box_all_the_same_carries_its_id(status: int, kind: type[MarketError]) -> None:
    error = replies.error_of("call", status, {}, _text({"success": False, "error": "x", "new_contract": 888}))
    assert isinstance(error, kind) and error.instance_id == 888


def test_the_market_says_how_long_to_wait() -> None:
    error = replies.error_of("call", 429, {"retry-after": "2"}, "too frequent")
    assert isinstance(error, RateLimited) and error.retry_after_s == 2.0


def test_an_error_names_the_call_and_what_the_market_said() -> None:
    error = replies.error_of("DELETE /api/v0/instances/5/", 404, {}, _text(AUTH))
    assert str(error) == (
        "DELETE /api/v0/instances/5/: HTTP 404 auth_error: Invalid user key; "
        "check LIVERY_MARKET_API_KEY (the reaper's own: LIVERY_REAPER_API_KEY) and its permissions"
    )


def test_secrets_of_a_reply_are_redacted_and_json_stays_json() -> None:
    text = _text({"new_contract": 5, "instance_api_key": 'a"b', "note": "k3y", "sha": "0" * 64, "onstart": "x=1"})
    clean = replies.redact(text, "k3y")
    assert json.loads(clean) == {
        "new_contract": 5,
        "instance_api_key": "[secret]",
        "note": "[secret]",
        "sha": "[secret]",
        "onstart": "[secret]",
    }


ROW = {
    "id": 5,
    "label": "x",
    "machine_id": "35101",
    "dph_total": "1.25",
    "public_ipaddr": " 198.51.100.7 ",
    "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": "41022"}]},
    "ssh_host": "ssh5.vast.ai",
    "ssh_port": 15610,
    "storage_cost": 0.144,
    "disk_space": 250.0,
}


def test_numbers_as_text_are_numbers_and_the_address_is_stripped() -> None:
    box = replies.instance_of(ROW)
    assert isinstance(box, Instance)
    assert (box.machine_id, box.dph_total_usd) == (35101, 1.25)
    assert [(point.host, point.port, point.kind) for point in box.endpoints] == [
        ("198.51.100.7", 41022, "direct"),
        ("ssh5.vast.ai", 15610, "proxy"),
    ]
    assert box.storage_usd_hour == pytest.approx(0.05)


@pytest.mark.parametrize("ports", [None, 7, [22], {}, {"22/tcp": []}, {"22/tcp": None}])
def test_ports_of_another_form_leave_the_proxy(ports: object) -> None:
    box = replies.instance_of({**ROW, "ports": ports})
    assert isinstance(box, Instance)
    assert [point.kind for point in box.endpoints] == ["proxy"]


def test_a_row_whose_nullable_fields_are_all_null_is_still_a_box() -> None:
    box = replies.instance_of({"id": 5, **{name: None for name in ROW if name != "id"}})
    assert box == Instance(id=5)


@pytest.mark.parametrize(
    ("row", "instance_id", "label"),
    [
        ({**ROW, "machine_id": "n/a"}, 5, "x"),
        ({**ROW, "dph_total": {"value": None}}, 5, "x"),
        ({**ROW, "dph_total": float("nan")}, 5, "x"),
        ({**ROW, "label": 3, "id": None}, None, None),
        ({**ROW, "label": ["x"]}, 5, None),
        ("a text", None, None),
        (None, None, None),
    ],
)
def test_a_row_that_cannot_be_read_is_handed_on_with_what_can_be_read(
    row: object, instance_id: int | None, label: str | None
) -> None:
    box = replies.instance_of(row)
    assert isinstance(box, UnparsedInstance)
    assert (box.id, box.label) == (instance_id, label) and box.problem


@pytest.mark.parametrize("body", [{"instances": None}, {"instances": []}])
def test_showing_a_box_that_is_gone_has_two_forms(body: object) -> None:
    assert replies.one_instance("show", body) is None


@pytest.mark.parametrize("body", [{}, [], {"instances": "x"}, {"instances": [ROW, ROW]}, {"instances": {"id": "?"}}])
def test_showing_a_box_in_an_unknown_form_is_never_gone(body: object) -> None:
    with pytest.raises(ShapeError):
        replies.one_instance("show", body)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Bavaria, DE", "DE"),
        (", US", "US"),
        ("California, United States", "US"),
        ("Somewhere", None),
        ("", None),
        (None, None),
    ],
)
def test_countries_come_in_several_spellings(text: str | None, code: str | None) -> None:
    assert replies.country_of(text) == code


OFFER = {
    "id": 1,
    "machine_id": 2,
    "num_gpus": 1,
    "gpu_ram": 97887,
    "disk_space": 1000,
    "dph_total": 1.0,
    "cpu_ram": 512_000,
    "cpu_cores": 128,
    "cpu_cores_effective": 32,
}


def test_host_memory_is_our_share_of_the_machine() -> None:
    assert replies.offer_of(OFFER).host_memory_gb == 128.0


@pytest.mark.parametrize(("extra", "share_gb"), [({"gpu_frac": 0.5}, 256.0), ({}, None)])
def test_null_cores_leave_the_share_of_gpus_or_nothing(extra: dict[str, float], share_gb: float | None) -> None:
    assert replies.offer_of({**OFFER, "cpu_cores": None, **extra}).host_memory_gb == share_gb


@pytest.mark.parametrize("field", ["id", "machine_id", "dph_total", "gpu_ram"])
def test_an_offer_without_a_needed_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        replies.offer_of({**OFFER, field: None})


def test_bandwidth_that_is_priced_by_the_terabyte_only_is_not_free() -> None:
    row = {"id": 1, "machine_id": 2, "num_gpus": 1, "gpu_ram": 97887, "disk_space": 900, "dph_total": 1.0}
    offer = replies.offer_of(
        {**row, "internet_down_cost_per_tb": 20.0, "inet_up_cost": 0.0, "internet_up_cost_per_tb": 9}
    )
    assert (offer.inet_down_usd_gb, offer.inet_up_usd_gb) == (0.02, 0.0)


@pytest.mark.parametrize(("seen", "told"), [(0, False), (1, True), (True, True), (None, None)])
def test_a_flag_may_be_a_number(seen: object, told: bool | None) -> None:
    box = replies.instance_of({"id": 1, "is_bid": seen})
    assert isinstance(box, Instance) and box.is_bid is told


def test_a_number_too_large_for_any_machine_is_a_row_that_cannot_be_read() -> None:
    assert isinstance(replies.instance_of({"id": 1, "dph_total": 10**400}), UnparsedInstance)
