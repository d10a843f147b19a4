from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tasks.errors import (
    Ambiguous,
    AuthError,
    EndpointGone,
    MarketError,
    OfferGone,
    QuotaExhausted,
    RateLimited,
    Rejected,
    ShapeError,
    UserError,
)
from tasks.market.limiter import Limiter
from tasks.market.protocol import CreateRequest
from tasks.market.vast import MAX_REPLY_BYTES, SEARCH_ROWS, VastMarket, create_body, search_body
from tests.tasks.pretend import FLOW_RUN, NOW, PUBLIC_KEY, Clock, Pretend, pretend_market, recipe

LABEL = f"livery:{FLOW_RUN}:1:{int(NOW) + 3600}"


def _request(market: VastMarket, **changes: object) -> CreateRequest:
    offer = min(market.search(recipe().box), key=lambda one: one.dph_total_usd)
    given = {"offer": offer, "image": "img", "disk_gb": 250, "label": LABEL, "onstart": "true", **changes}
    return CreateRequest(**given)  # type: ignore[arg-type]


def _odd(reply: httpx.Response, tmp_path: Path, clock: Clock, **options: object) -> VastMarket:
    """A client whose every call gets this reply, for bytes that no real server would send twice alike."""
    limiter = Limiter(tmp_path, "k3y-of-ours", 0.001, clock=clock, sleep=clock.sleep)
    transport = httpx.MockTransport(lambda request: reply)
    given = {"clock": clock, "sleep": clock.sleep, "transport": transport, **options}
    return VastMarket("http://127.0.0.1:9", "k3y-of-ours", limiter, **given)  # type: ignore[arg-type]


def test_the_search_prices_the_disk_that_will_be_asked_for(market: VastMarket) -> None:
    small, large = (
        {offer.id: offer for offer in market.search(recipe(box={"disk_gb": disk}).box)} for disk in (50, 250)
    )
    assert large[24001001].dph_total_usd == pytest.approx(small[24001001].dph_total_usd + 0.15 * 200 / 720)


def test_the_search_leaves_the_filters_to_us(market: VastMarket) -> None:
    ids = {offer.id for offer in market.search(recipe().box)}
    assert {24001006, 24001007, 24001008, 24001011, 24001013, 24001014} <= ids


def test_a_bid_is_searched_as_a_bid_and_created_with_a_price(market: VastMarket) -> None:
    assert search_body(recipe(box={"interruptible": True}).box)["type"] == "bid"
    assert create_body(_request(market, bid_usd=0.7))["price"] == 0.7
    assert create_body(_request(market))["price"] is None


def test_a_box_of_several_cards_is_asked_for_as_such(market: VastMarket) -> None:
    four = recipe(model={"quantisation": "nf4"}, box={"tier": "h100", "gpus": 4}).box
    assert search_body(four)["num_gpus"] == {"eq": 4} and search_body(recipe().box)["num_gpus"] == {"eq": 1}
    assert {(offer.num_gpus, offer.gpu_name) for offer in market.search(four)} == {
        (4, "H100 SXM"),
        (4, "H100 PCIE"),
        (4, "A100 SXM4"),
    }, "the memory band alone holds both cards"


def test_a_search_without_a_list_of_offers_is_an_error_and_not_empty(tmp_path: Path, clock: Clock) -> None:
    for body in ({"offers": {"id": 1}}, {"results": []}, []):
        with pytest.raises(ShapeError, match="offers"):
            _odd(httpx.Response(200, json=body), tmp_path, clock).search(recipe().box)


def test_one_offer_that_cannot_be_read_is_said_and_skipped_but_not_all_of_them(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"id": 1, "machine_id": 2, "num_gpus": 1, "gpu_ram": 97887, "disk_space": 900, "dph_total": 1.0}
    market = _odd(httpx.Response(200, json={"offers": [row, {**row, "dph_total": "dear"}]}), tmp_path, clock)
    assert [offer.id for offer in market.search(recipe().box)] == [1]
    assert "1 of 2 offers cannot be read" in caplog.text
    with pytest.raises(ShapeError, match="none of 1"):
        _odd(httpx.Response(200, json={"offers": [{}]}), tmp_path, clock).search(recipe().box)


def test_a_search_that_was_cut_off_says_so(tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    row = {"id": 1, "machine_id": 2, "num_gpus": 1, "gpu_ram": 97887, "disk_space": 900, "dph_total": 1.0}
    _odd(httpx.Response(200, json={"offers": [row] * (SEARCH_ROWS - 1)}), tmp_path, clock).search(recipe().box)
    assert "may have more" not in caplog.text
    _odd(httpx.Response(200, json={"offers": [row] * SEARCH_ROWS}), tmp_path, clock).search(recipe().box)
    assert "may have more" in caplog.text


def test_create_returns_the_new_box_and_it_is_what_was_asked_for(market: VastMarket) -> None:
    box = market.show(market.create(_request(market)))
    assert box is not None
    assert (box.label, box.is_bid, box.disk_space_gb) == (LABEL, False, 250)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("create.offer_gone_404", OfferGone),
        ("create.offer_gone_410", OfferGone),
        ("create.spend_limit", Rejected),
        ("create.drop_after_commit", Ambiguous),
        ("create.504_after_commit", Ambiguous),
        ("create.504_before_commit", Ambiguous),
        ("create.success_false_with_contract", Rejected),
    ],
)
def test_create_is_sent_once_whatever_comes_back(
    pretend: Pretend, market: VastMarket, fault: str, kind: type[MarketError]
) -> None:
    request = _request(market)
    pretend.arm(fault)
    with pytest.raises(kind):
        market.create(request)
    assert pretend.count("PUT", "/api/v0/asks/") == 1


def test_a_refusal_that_made_a_box_says_which(pretend: Pretend, market: VastMarket) -> None:
    request = _request(market)
    pretend.arm("create.success_false_with_contract")
    with pytest.raises(Rejected) as caught:
        market.create(request)
    assert caught.value.instance_id == pretend.market.alive()[0].id


@pytest.mark.parametrize(
    "reply",
    [
        httpx.Response(200, json={"success": True}),
        httpx.Response(200, json={"success": True, "new_contract": "soon"}),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json=[]),
        httpx.Response(429, text="API requests too frequent"),
        httpx.Response(429, json={"error": "quota_exceeded"}),
        httpx.Response(200, text="[" * 100_000),
        httpx.Response(302, headers={"location": "https://elsewhere"}),
        httpx.Response(404, text="Not Found"),
    ],
)
def test_a_reply_to_create_that_is_neither_yes_nor_a_definite_no_is_ambiguous(
    market: VastMarket, tmp_path: Path, clock: Clock, reply: httpx.Response
) -> None:
    with pytest.raises(Ambiguous):
        _odd(reply, tmp_path, clock).create(_request(market))


def test_the_new_boxs_id_may_be_written_as_text(market: VastMarket, tmp_path: Path, clock: Clock) -> None:
    reply = httpx.Response(200, json={"success": True, "new_contract": "7835610"})
    assert _odd(reply, tmp_path, clock).create(_request(market)) == 7835610


@pytest.mark.parametrize("key", ["", "k3y of ours", "k3y-of-ours\n", "k3y-ößü"])
def test_a_key_that_cannot_be_sent_is_refused_without_being_shown(key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="LIVERY_MARKET_API_KEY") as caught:
        VastMarket("http://127.0.0.1:9", key, Limiter(tmp_path, key))
    assert not key or key.strip() not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://console.vast.ai", "http://127.0.0.1.example.com", "ftp://127.0.0.1", "console"]
)
def test_the_key_goes_to_no_address_without_tls_but_loopback(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="want https://"):
        VastMarket(url, "key", Limiter(tmp_path, "key"))


def test_a_bad_key_is_an_auth_error_though_the_market_answers_404(pretend: Pretend, tmp_path: Path) -> None:
    market = pretend.client(tmp_path, key="not-the-key")
    for call in (market.account_id, market.list_all, lambda: market.show(1), lambda: market.destroy(1)):
        with pytest.raises(AuthError):
            call()


def test_an_expired_session_is_not_a_box_that_is_gone(pretend: Pretend, market: VastMarket) -> None:
    box = pretend.rented()
    pretend.arm("auth.session_expired_404@2")
    with pytest.raises(AuthError):
        market.destroy(box)
    with pytest.raises(AuthError):
        market.show(box)


def test_destroying_what_is_not_there_is_no_error(market: VastMarket) -> None:
    market.destroy(1)


def test_a_reply_about_another_box_is_an_error_and_not_an_answer(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(ShapeError, match="about box 8"):
        _odd(httpx.Response(200, json={"instances": {"id": 8}}), tmp_path, clock).show(7)


def test_showing_a_box_that_does_not_exist_is_none(market: VastMarket) -> None:
    assert market.show(1) is None


def test_all_pages_are_read_and_counted(pretend: Pretend, market: VastMarket) -> None:
    for _ in range(20):
        pretend.rented()
    pretend.market.offers |= {
        100 + n: pretend.market.offers[24001001].__class__(
            **{**pretend.market.offers[24001001].__dict__, "id": 100 + n}
        )
        for n in range(40)
    }
    for _ in range(40):
        pretend.rented()
    listing = market.list_all()
    assert listing.complete and len(listing.instances) == 60
    assert len(listing.of_run(FLOW_RUN)) == 60


@pytest.mark.parametrize("fault", ["list.bad_total", "list.missing_row", "list.null_fields", "list.wrong_account"])
def test_a_listing_that_does_not_add_up_is_read_again(pretend: Pretend, market: VastMarket, fault: str) -> None:
    pretend.rented()
    pretend.arm(fault)
    listing = market.list_all()
    assert listing.complete and len(listing.instances) == 1
    assert pretend.count("GET", "/api/v1/instances/") == 2


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("list.bad_total@always", "market counts 2"),
        ("list.missing_row@always", "0 rows were read"),
        ("list.null_fields@always", "labels"),
    ],
)
def test_a_listing_that_never_adds_up_is_incomplete_and_says_why(
    pretend: Pretend, market: VastMarket, fault: str, problem: str
) -> None:
    pretend.rented()
    pretend.arm(fault)
    listing = market.list_all()
    assert not listing.complete and problem in listing.problem


def _listing(*labels: str | None, total: object, counts: object = None, token: str | None = None) -> httpx.Response:
    rows = [{"id": number, "label": label} for number, label in enumerate(labels, 1)]
    body = {"id": 7, "instances": rows, "total_instances": total, "label_counts": counts, "next_token": token}
    return httpx.Response(200, json=body)


@pytest.mark.parametrize("counts", [{LABEL: 1, "": 1}, {LABEL: 1}, {LABEL: "1", "null": 3}, {}, None])
def test_how_boxes_of_others_are_counted_does_not_matter(counts: object, tmp_path: Path, clock: Clock) -> None:
    """A count that differs in form only would otherwise blind the reaper for good."""
    assert _odd(_listing(LABEL, None, total="2", counts=counts), tmp_path, clock).list_all().complete


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (_listing(None, total=1, counts={LABEL: 1}), "0 rows have the label"),
        (_listing(LABEL, total=None), "did not say how many"),
        (_listing(LABEL, total=True), "did not say how many"),
        (_listing(LABEL, total=1, token="again"), "the pages do not end"),
    ],
)
def test_a_listing_without_its_proof_is_incomplete(
    reply: httpx.Response, problem: str, tmp_path: Path, clock: Clock
) -> None:
    listing = _odd(reply, tmp_path, clock).list_all()
    assert not listing.complete and problem in listing.problem


def test_a_key_that_answers_for_another_account_in_between_proves_nothing(pretend: Pretend, market: VastMarket) -> None:
    market.list_all()
    pretend.arm("list.wrong_account")
    listing = market._list_once()
    assert not listing.complete and "account" in listing.problem
    assert market.list_all().complete


def test_a_listing_that_breaks_off_keeps_what_it_has(pretend: Pretend, market: VastMarket) -> None:
    base = pretend.market.offers[24001001]
    pretend.market.offers |= {100 + n: base.__class__(**{**base.__dict__, "id": 100 + n}) for n in range(30)}
    for _ in range(30):
        pretend.rented()
    pretend.arm("list.page2_429@always")
    listing = market.list_all()
    assert not listing.complete and "broke off after 25 rows" in listing.problem
    assert len(listing.instances) == 25


def test_one_row_that_cannot_be_read_is_counted_and_not_dropped(pretend: Pretend, market: VastMarket) -> None:
    boxes = {pretend.rented(), pretend.rented()}
    pretend.arm("list.one_malformed_row@always")
    listing = market.list_all()
    assert listing.complete
    assert len(listing.instances) == 1 and len(listing.unparsed) == 1
    assert {listing.instances[0].id, listing.unparsed[0].id} == boxes
    assert listing.unparsed[0].label and listing.unparsed[0].label.startswith("livery:")


def test_a_listing_that_the_market_no_longer_serves_is_an_error_and_not_empty(
    pretend: Pretend, market: VastMarket
) -> None:
    pretend.arm("list.410")
    with pytest.raises(EndpointGone):
        market.list_all()


@pytest.mark.parametrize("body", [{}, {"instances": None}, [], {"instances": {}}, {"success": True, "instances": "x"}])
def test_a_listing_of_an_unknown_form_is_an_error_and_not_empty(body: object, tmp_path: Path, clock: Clock) -> None:
    market = _odd(httpx.Response(200, json={"id": 7, **body} if isinstance(body, dict) else body), tmp_path, clock)
    with pytest.raises(ShapeError):
        market.list_all()


def test_reading_is_repeated_with_growing_pauses_and_then_given_up(tmp_path: Path, clock: Clock) -> None:
    market = _odd(httpx.Response(503, text="busy"), tmp_path, clock, jitter=lambda: 0.0)
    with pytest.raises(Ambiguous, match="503"):
        market.show(1)
    assert [pause for pause in clock.slept if pause >= 1] == [1, 2, 4, 8, 15]


def test_jitter_lengthens_a_pause_by_at_most_a_quarter(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(Ambiguous):
        _odd(httpx.Response(503), tmp_path, clock, jitter=lambda: 1.0).show(1)
    assert [pause for pause in clock.slept if pause >= 1] == [1.25, 2.5, 5, 10, 18.75]


def test_a_wait_that_the_market_asks_for_is_kept(tmp_path: Path, clock: Clock) -> None:
    reply = httpx.Response(429, text="API requests too frequent", headers={"Retry-After": "9"})
    with pytest.raises(RateLimited):
        _odd(reply, tmp_path, clock, jitter=lambda: 0.0).show(1)
    assert [pause for pause in clock.slept if pause >= 1] == [9, 9, 9, 9, 15]


def test_a_quota_is_not_asked_again(tmp_path: Path, clock: Clock) -> None:
    reply = httpx.Response(429, json={"error": "search_quota_exceeded"}, headers={"X-RateLimit-Reset": "midnight"})
    with pytest.raises(QuotaExhausted, match="until midnight"):
        _odd(reply, tmp_path, clock).search(recipe().box)
    assert clock.slept == []


def test_who_has_a_budget_of_seconds_does_not_retry_past_it(tmp_path: Path, clock: Clock) -> None:
    market = _odd(httpx.Response(503), tmp_path, clock, budget_s=5.0, jitter=lambda: 0.0)
    with pytest.raises(Ambiguous):
        market.show(1)
    assert sum(clock.slept) < 5


def test_an_endless_reply_is_cut(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(Ambiguous, match="longer than 8 MB"):
        _odd(httpx.Response(200, content=b"x" * (MAX_REPLY_BYTES + 1)), tmp_path, clock).destroy(1)


def test_a_reply_that_drips_is_ended_though_each_byte_came_in_time(tmp_path: Path, clock: Clock) -> None:
    def drip() -> Iterator[bytes]:
        while True:
            clock.now += 20
            yield b" "

    for budget_s, least_s in ((None, 120), (30.0, 30), (0.0, 5)):
        began = clock.now
        with pytest.raises(Ambiguous, match="no end of it"):
            _odd(httpx.Response(200, content=drip()), tmp_path, clock, budget_s=budget_s).destroy(1)
        assert least_s < clock.now - began <= least_s + 25


def test_in_a_hurry_a_call_whose_turn_comes_too_late_is_not_sent(
    pretend: Pretend, tmp_path: Path, clock: Clock
) -> None:
    market = pretend.client(tmp_path, budget_s=5.0)
    for _ in range(2):
        market.destroy(1)
    with pytest.raises(RateLimited, match="not sent"):
        market.destroy(1)
    assert pretend.count("DELETE", "/") == 2


def test_after_a_refusal_the_endpoint_is_left_alone_by_all(pretend: Pretend, tmp_path: Path, clock: Clock) -> None:
    box = pretend.rented()
    pretend.arm("destroy.429=1")
    with pytest.raises(RateLimited):
        pretend.client(tmp_path).destroy(box)
    began = clock.now
    pretend.client(tmp_path).destroy(box)
    assert clock.now - began == pytest.approx(3.3)


def test_nobody_there_is_ambiguous(tmp_path: Path, clock: Clock) -> None:
    limiter = Limiter(tmp_path, "key", 0.001, clock=clock, sleep=clock.sleep)
    with pytest.raises(Ambiguous, match="ConnectError"):
        VastMarket("http://127.0.0.1:9", "key", limiter, clock=clock, sleep=clock.sleep).destroy(1)


def test_no_key_appears_in_an_error_a_log_or_a_url(
    pretend: Pretend, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    reply = httpx.Response(500, text="your key k3y-of-ours is bad")
    with pytest.raises(Ambiguous) as caught:
        _odd(reply, tmp_path, clock).destroy(1)
    assert "k3y-of-ours" not in str(caught.value) and "[secret]" in str(caught.value)
    market = pretend.client(tmp_path)
    market.create(_request(market))
    market.list_all()
    for secret in (pretend.market.account_key, pretend.market.alive()[0].api_key, "k3y-of-ours"):
        assert secret not in caplog.text
        assert not [path for _, path in pretend.calls if secret in path]


def test_attaching_a_key_twice_is_no_error(pretend: Pretend, market: VastMarket) -> None:
    box = pretend.rented()
    market.attach_key(box, PUBLIC_KEY)
    market.attach_key(box, PUBLIC_KEY)
    assert [key.text for key in pretend.market.contracts[box].ssh_keys] == [PUBLIC_KEY]


def test_charges_are_dollars_by_box_and_kind(pretend: Pretend, market: VastMarket, clock: Clock) -> None:
    box, other = pretend.rented(), pretend.rented()
    clock.now += 3600
    charges = market.charges((box,), NOW - 60, clock.now)
    assert {charge.instance_id for charge in charges} == {box} != {other}
    assert {charge.kind for charge in charges} == {"gpu", "disk", "down", "up"}
    paid = pretend.market.items_usd(pretend.market.contracts[box])
    assert sum(charge.usd for charge in charges) == pytest.approx(sum(paid.values()))


def test_charges_of_all_boxes_come_with_their_time_and_label(
    pretend: Pretend, market: VastMarket, clock: Clock
) -> None:
    boxes = {pretend.rented(), pretend.rented()}
    clock.sleep(3600)
    found = market.charges(None, NOW - 60, clock.now)
    assert {charge.instance_id for charge in found} == boxes
    assert {(charge.since, charge.until) for charge in found} == {(NOW, clock.now)}
    assert all((charge.label or "").startswith("livery:") for charge in found)


def test_charges_are_read_to_the_last_page(pretend: Pretend, market: VastMarket, clock: Clock) -> None:
    first = pretend.market.contracts[pretend.rented()]
    pretend.market.contracts |= {first.id + n: replace(first, id=first.id + n) for n in range(1, 600)}
    clock.sleep(60)
    assert len({charge.instance_id for charge in market.charges(None, NOW - 60, clock.now)}) == 600


def test_charges_that_break_off_are_an_error_and_not_a_smaller_bill(tmp_path: Path, clock: Clock) -> None:
    body = {"success": True, "results": [], "total": 3}
    with pytest.raises(ShapeError, match="0 of 3 rows"):
        _odd(httpx.Response(200, json=body), tmp_path, clock).charges(None, NOW, NOW)


def test_charges_of_an_unknown_form_are_an_error_and_not_zero(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(ShapeError):
        _odd(httpx.Response(200, json={"success": True}), tmp_path, clock).charges((1,), NOW, NOW)


def test_the_credit_is_read_and_unknown_is_none(market: VastMarket, tmp_path: Path, clock: Clock) -> None:
    assert market.credit_usd() == 100.0
    assert _odd(httpx.Response(200, json={"id": 1, "credit": None}), tmp_path, clock).credit_usd() is None


def test_the_limits_of_the_market_are_never_broken(clock: Clock, tmp_path: Path) -> None:
    """The market refuses what comes too early; a client that paces itself is never refused, so nothing is ever asked twice."""
    with pretend_market(clock, pace=1.0) as pretend:
        market = pretend.client(tmp_path)
        box = pretend.rented()
        for _ in range(3):
            market.list_all()
            market.show(box)
            market.destroy(box)
        assert pretend.count("DELETE", "/") == 3 and pretend.count("GET", "/api/v1/instances/") == 3
