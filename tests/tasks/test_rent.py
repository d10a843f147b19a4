from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tasks.destroy import destroy_run
from tasks.domain import Instance, Intent, Label
from tasks.errors import (
    AuthError,
    BootFailed,
    BudgetReached,
    DestroyUnverified,
    MarketError,
    OfferGone,
    Rejected,
    ShapeError,
    UserError,
)
from tasks.market.vast import VastMarket
from tasks.reap import sweep
from tasks.rent import rent
from tests.tasks.pretend import (
    FLOW_RUN,
    OTHER_RUN,
    PUBLIC_KEY,
    Clock,
    Pretend,
    dead_store,
    rehearsal_recipe,
    rent_request,
)
from training.box.store import Store, StoreError
from training.contract import layout
from training.contract.recipe import Recipe


@pytest.fixture
def renting(pretend: Pretend, market: VastMarket, store: Store, clock: Clock, tmp_path: Path) -> Any:
    """Rents the cheapest rehearsal offer; keyword arguments change the recipe."""

    def run(wanted: Recipe | None = None, *, into: Store | None = None, **settings: Any) -> Instance:
        wanted = wanted or rehearsal_recipe()
        request = rent_request(market, wanted)
        current = pretend.settings(tmp_path, market_pace=0.1, **settings)
        pretend.calls.clear()
        return rent(market, into or store, request, current, clock=clock, sleep=clock.sleep, destroy_s=300)

    return run


def _intent(store: Store) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.get_bytes(layout.intent(FLOW_RUN, 1)) or b"{}")
    return found


def _creates(pretend: Pretend) -> int:
    return pretend.count("PUT", "/api/v0/asks/")


def test_a_rented_box_runs_has_our_key_and_both_addresses(renting: Any, pretend: Pretend, store: Store) -> None:
    box = renting()
    assert box.actual_status == "running"
    assert [point.kind for point in box.endpoints] == ["direct", "proxy"]
    made = pretend.market.contracts[box.id]
    assert [key.text for key in made.ssh_keys] == [PUBLIC_KEY]
    assert made.label and made.label.startswith(f"livery:{FLOW_RUN}:1:")
    assert made.env == {}
    assert _intent(store)["state"] == "created" and _intent(store)["instance_id"] == box.id


def test_the_intent_is_in_the_bucket_before_the_create_call(renting: Any, pretend: Pretend) -> None:
    with pytest.raises(StoreError):
        renting(into=dead_store())
    assert _creates(pretend) == 0 and not pretend.market.contracts


@pytest.mark.parametrize("fault", ["create.drop_after_commit", "create.504_after_commit"])
def test_a_box_whose_create_reply_was_lost_is_adopted_by_its_label(
    renting: Any, pretend: Pretend, store: Store, fault: str
) -> None:
    pretend.arm(fault)
    box = renting()
    assert _creates(pretend) == 1, "create is never sent twice"
    assert [made.id for made in pretend.market.alive()] == [box.id]
    assert _intent(store)["instance_id"] == box.id


def test_a_box_that_shows_up_late_is_adopted_too(renting: Any, pretend: Pretend, clock: Clock) -> None:
    pretend.arm("create.drop_after_commit", "list.empty_but_success@1")
    renting()
    assert _creates(pretend) == 1 and len(pretend.market.alive()) == 1


def test_a_create_that_may_have_failed_and_left_no_box_stays_unresolved(
    renting: Any, pretend: Pretend, store: Store
) -> None:
    pretend.arm("create.504_before_commit")
    with pytest.raises(BootFailed, match="no box with the label") as caught:
        renting()
    assert caught.value.blame == "other"
    assert _creates(pretend) == 1 and _intent(store)["state"] == "unresolved"


def test_a_lost_reply_that_hid_two_boxes_ends_in_none(renting: Any, pretend: Pretend) -> None:
    pretend.arm("create.drop_after_commit", "create.double_accept")
    with pytest.raises(BootFailed, match="accepted 2 times"):
        renting()
    assert len(pretend.market.contracts) == 2 and not pretend.market.alive()


def test_an_offer_that_was_accepted_twice_ends_in_no_box(renting: Any, pretend: Pretend) -> None:
    pretend.arm("create.double_accept")
    with pytest.raises(BootFailed, match=r"accepted twice.*verified gone"):
        renting()
    assert len(pretend.market.contracts) == 2 and not pretend.market.alive()


@pytest.mark.parametrize("fault", ["create.offer_gone_404", "create.offer_gone_410"])
def test_an_offer_that_is_taken_made_nothing_and_the_intent_says_refused(
    renting: Any, pretend: Pretend, store: Store, fault: str
) -> None:
    pretend.arm(fault)
    with pytest.raises(OfferGone):
        renting()
    assert _intent(store)["state"] == "refused" and not pretend.market.contracts


def test_a_spend_limit_is_not_tried_on_the_next_offer(renting: Any, pretend: Pretend) -> None:
    pretend.arm("create.spend_limit")
    with pytest.raises(Rejected, match="spend rate limit"):
        renting()
    assert not pretend.market.contracts


def test_a_refusal_that_made_a_box_destroys_it(renting: Any, pretend: Pretend, store: Store) -> None:
    pretend.arm("create.success_false_with_contract")
    with pytest.raises(BootFailed, match=r"made all the same.*verified gone") as caught:
        renting()
    assert caught.value.blame == "other"
    assert len(pretend.market.contracts) == 1 and not pretend.market.alive()
    assert _intent(store)["state"] == "destroyed"


@pytest.mark.parametrize(
    ("fault", "what", "blame"),
    [
        ("create.label_lost", "label: seen None", "other"),
        ("create.disk_short", "disk: seen 10 GB, want 20 GB", "host"),
        ("create.other_gpu", "GPU memory: seen 4000 MB", "host"),
    ],
)
def test_a_box_that_is_not_what_was_rented_goes_back(
    renting: Any, pretend: Pretend, fault: str, what: str, blame: str
) -> None:
    pretend.arm(fault)
    with pytest.raises(BootFailed, match=what) as caught:
        renting()
    assert caught.value.blame == blame and "verified gone" in str(caught.value)
    assert not pretend.market.alive()


def test_a_box_with_fewer_cards_than_were_rented_goes_back(
    pretend: Pretend, market: VastMarket, store: Store, clock: Clock, tmp_path: Path
) -> None:
    model = {"size_gb": 0.01, "dtype": "float32", "quantisation": "nf4"}
    request = rent_request(market, rehearsal_recipe(model=model, box={"gpus": 2}))
    offers = pretend.market.offers
    offers[request.offer.id] = replace(offers[request.offer.id], num_gpus=1)
    current = pretend.settings(tmp_path, market_pace=0.1)
    with pytest.raises(BootFailed, match="GPUs: seen 1, want 2") as caught:
        rent(market, store, request, current, clock=clock, sleep=clock.sleep, destroy_s=300)
    assert caught.value.blame == "host" and not pretend.market.alive()


def test_a_bid_that_became_on_demand_goes_back(renting: Any, pretend: Pretend) -> None:
    pretend.arm("create.returns_on_demand_for_bid")
    with pytest.raises(BootFailed, match="bid: seen False, want True"):
        renting(rehearsal_recipe(box={"interruptible": True}))
    assert not pretend.market.alive()


def test_a_bid_goes_a_little_over_the_least_and_never_over_the_cap(pretend: Pretend, market: VastMarket) -> None:
    wanted = rehearsal_recipe(box={"interruptible": True})
    request = rent_request(market, wanted)
    assert request.bid_usd is not None and request.offer.min_bid_usd is not None
    assert request.offer.min_bid_usd < request.bid_usd < request.offer.min_bid_usd * 1.2
    assert rent_request(market, rehearsal_recipe()).bid_usd is None
    capped = rent_request(market, rehearsal_recipe(box={"interruptible": True, "max_dph_usd": 0.17}))
    assert capped.bid_usd is not None and capped.bid_usd < 0.17


@pytest.mark.parametrize(
    ("fault", "said", "blame"),
    [
        ("boot.loading_forever", "not running after 60 s; last seen: loading", "host"),
        ("boot.status_msg", "will not boot: Error response from daemon: manifest unknown", "image"),
        ("boot.status_msg=unauthorized: authentication required", "unauthorized", "image"),
        ("boot.status_msg=toomanyrequests: rate limit", "toomanyrequests", "image"),
        ("boot.status_msg=no space left on device", "no space left", "host"),
        ("boot.exited", "is exited", "host"),
    ],
)
def test_a_box_that_never_runs_goes_back_with_its_reason(
    renting: Any, pretend: Pretend, fault: str, said: str, blame: str
) -> None:
    pretend.arm(fault)
    with pytest.raises(BootFailed, match=said) as caught:
        renting()
    assert caught.value.blame == blame and not pretend.market.alive()


def test_a_hopeless_message_does_not_wait_for_the_deadline(renting: Any, pretend: Pretend, clock: Clock) -> None:
    pretend.arm("boot.status_msg")
    began = clock.now
    with pytest.raises(BootFailed):
        renting()
    assert clock.now - began < 40


@pytest.mark.parametrize("fault", ["show.404_lag=3", "show.null", "show.empty_list"])
def test_a_box_that_cannot_be_shown_at_once_is_waited_for(renting: Any, pretend: Pretend, fault: str) -> None:
    pretend.arm(fault)
    assert renting().actual_status == "running"


def test_nothing_is_rented_beside_a_leftover_that_will_not_go(renting: Any, pretend: Pretend) -> None:
    pretend.rented(offer=3)
    pretend.arm("destroy.200_but_stays=1000@always")
    with pytest.raises(DestroyUnverified, match="earlier box") as caught:
        renting()
    assert caught.value.exit_code == 5 and _creates(pretend) == 0


def test_a_leftover_of_the_same_flow_run_goes_first_and_other_runs_are_left_alone(
    renting: Any, pretend: Pretend
) -> None:
    leftover, other = pretend.rented(offer=3), pretend.rented(OTHER_RUN, offer=3)
    box = renting()
    assert {made.id for made in pretend.market.alive()} == {other, box.id} and leftover != box.id


def test_a_failed_box_that_will_not_go_is_the_error_that_counts(renting: Any, pretend: Pretend) -> None:
    pretend.arm("boot.exited", "destroy.200_but_stays=1000@always")
    with pytest.raises(DestroyUnverified, match=r"exited.*could not be verified"):
        renting()


def test_a_key_that_is_revoked_after_the_create_is_never_a_clean_end(renting: Any, pretend: Pretend) -> None:
    pretend.arm("auth.revoked_midway=1")
    with pytest.raises(DestroyUnverified, match="auth_error"):
        renting()
    assert pretend.market.alive()


def test_too_little_credit_is_refused_with_what_is_needed(renting: Any, pretend: Pretend) -> None:
    pretend.market.credit_usd = 0.2
    with pytest.raises(UserError, match=r"\$0\.20 left, offer 24002001 needs \$0\.3\d"):
        renting()
    assert _creates(pretend) == 0


def test_the_accounts_rate_is_capped_over_all_its_boxes(renting: Any, pretend: Pretend) -> None:
    pretend.rented(OTHER_RUN)
    with pytest.raises(BudgetReached, match=r"\$1\.10/h are running in 1 boxes.*limit \$1\.20/h"):
        renting(max_dph_usd=1.2)
    assert _creates(pretend) == 0


@pytest.mark.parametrize(
    ("ago_s", "state", "counted"), [(60, "unresolved", True), (600, "written", True), (60, "written", False)]
)
def test_what_an_unanswered_create_may_have_made_counts_before_another_is_rented(
    renting: Any, market: VastMarket, store: Store, clock: Clock, ago_s: float, state: Any, counted: bool
) -> None:
    intent = Intent(
        flow_run_id=OTHER_RUN,
        run="other",
        attempt=1,
        label=Label(flow_run_id=OTHER_RUN, attempt=1, hard_end=2_000_000_000).text,
        account_id=market.account_id(),
        offer_id=1,
        machine_id=1,
        dph_usd=1.1,
        state=state,
        disk_gb=100,
        written_at=clock() - ago_s,
    )
    store.put_bytes(layout.intent(OTHER_RUN, 1), intent.model_dump_json().encode())
    if counted:
        with pytest.raises(
            BudgetReached, match=r"\$0\.00/h are running in 0 boxes, \$1\.10/h more may be behind create calls"
        ):
            renting(max_dph_usd=1.2)
    else:
        assert renting(max_dph_usd=1.2).id


@pytest.mark.parametrize("fault", ["list.bad_total@always", "list.missing_row@always"])
def test_nothing_is_rented_while_the_boxes_cannot_be_counted(renting: Any, pretend: Pretend, fault: str) -> None:
    pretend.rented(OTHER_RUN)
    pretend.arm(fault)
    with pytest.raises((ShapeError, DestroyUnverified)):
        renting()
    assert _creates(pretend) == 0


def test_a_bad_key_is_known_before_anything_is_written(
    pretend: Pretend, store: Store, clock: Clock, tmp_path: Path, market: VastMarket
) -> None:
    request = rent_request(market, rehearsal_recipe())
    stranger = pretend.client(tmp_path, key="wrong")
    with pytest.raises(AuthError):
        rent(stranger, store, request, pretend.settings(tmp_path), clock=clock, sleep=clock.sleep)
    assert store.list("intents/") == []


def test_whatever_goes_wrong_after_the_create_the_box_goes_back_first(
    renting: Any, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The market breaks off each time a key is attached."""
    monkeypatch.setattr(pretend.market, "attach_key", lambda *_: (_ for _ in ()).throw(ConnectionError("gone")))
    with pytest.raises(MarketError) as caught:
        renting()
    assert "verified gone" in "".join(caught.value.__notes__)
    assert not pretend.market.alive()


@pytest.mark.parametrize(
    "faults",
    [
        ("create.success_false_with_contract",),
        ("create.double_accept",),
        ("create.drop_after_commit", "create.double_accept"),
    ],
)
def test_every_box_that_was_made_and_given_back_is_in_the_intent(
    renting: Any, pretend: Pretend, store: Store, faults: tuple[str, ...]
) -> None:
    pretend.arm(*faults)
    with pytest.raises(BootFailed):
        renting()
    intent = _intent(store)
    assert {intent["instance_id"], *intent["also_ids"]} == set(pretend.market.contracts)
    assert intent["state"] == "destroyed"


def test_a_bid_that_cannot_win_within_the_cap_makes_nothing(renting: Any, pretend: Pretend, store: Store) -> None:
    with pytest.raises(BootFailed, match=r"bids start at \$0\.\d+/h .* box\.max_dph_usd = \$0\.05") as caught:
        renting(rehearsal_recipe(box={"interruptible": True, "max_dph_usd": 0.05}))
    assert caught.value.blame == "other" and _creates(pretend) == 0 and store.list("intents/") == []


def test_a_run_that_is_not_interruptible_never_bids(renting: Any, pretend: Pretend) -> None:
    box = renting()
    assert box.is_bid is False and pretend.market.contracts[box.id].bid_usd is None
    wanted = rehearsal_recipe(box={"interruptible": True})
    assert pretend.bodies and all(not body.get("price") for body in pretend.bodies)
    pretend.market.contracts.clear()
    assert renting(wanted).is_bid is True


def test_a_price_that_rises_while_the_box_boots_ends_it(
    renting: Any, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = pretend.market._run

    def dearer(contract: Any, at: float) -> None:
        contract.dph_base_usd *= 10
        run(contract, at)

    monkeypatch.setattr(pretend.market, "_run", dearer)
    with pytest.raises(BootFailed, match=r"price: seen \$\d+\.\d+/h, want at most \$1\.00/h") as caught:
        renting()
    assert caught.value.blame == "other" and not pretend.market.alive()


def test_another_card_of_the_same_memory_is_told_by_its_name(
    renting: Any, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An H100 NVL lies in the band of the RTX PRO 6000."""
    run = pretend.market._run

    def other(contract: Any, at: float) -> None:
        contract.gpu_name = "H100 NVL"
        run(contract, at)

    monkeypatch.setattr(pretend.market, "_run", other)
    with pytest.raises(BootFailed, match="GPU: seen H100 NVL, want ") as caught:
        renting()
    assert (caught.value.blame, caught.value.fault) == ("host", "GPU") and not pretend.market.alive()


def test_a_box_that_is_outbid_before_it_runs_does_not_blame_its_machine(
    renting: Any, pretend: Pretend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretend.market, "_run", lambda contract, at: pretend.market._play(contract, "stopped", at))
    with pytest.raises(BootFailed, match="outbid before it ran") as caught:
        renting(rehearsal_recipe(box={"interruptible": True}))
    assert caught.value.blame == "other" and not pretend.market.alive()
    with pytest.raises(BootFailed, match="is stopped") as caught:
        renting()
    assert caught.value.blame == "host", "a host that takes an on-demand box back is to blame"


class Terminated(BaseException):
    """What SIGTERM raises in a flow."""


def test_a_run_that_is_killed_between_the_create_and_its_reply_leaves_its_box_to_the_reaper(
    renting: Any, pretend: Pretend, market: VastMarket, store: Store, clock: Clock, tmp_path: Path, monkeypatch: Any
) -> None:
    create = market.create

    def killed(request: Any) -> int:
        create(request)
        raise Terminated

    monkeypatch.setattr(market, "create", killed)
    with pytest.raises(Terminated):
        renting()
    assert (_intent(store)["state"], _intent(store)["instance_id"]) == ("written", None), "nobody knows its id"
    (left,) = pretend.market.alive()
    settings = pretend.settings(tmp_path, market_pace=0.1)

    def sweeps() -> str:
        done = sweep(market, store, settings, clock=clock, sleep=clock.sleep, settle=lambda flow_run_id, by: None)
        return next(row.outcome or row.action for row in done.rows if row.instance_id == left.id)

    assert sweeps() == "keep", "its run may only be about to write its lease"
    clock.now += settings.lease_s + 60
    assert sweeps() == "destroyed" and not pretend.market.alive()


class Struck(BaseException):
    """What Prefect's handler of SIGTERM raises, under another name."""


class StrikesAtTheReply(httpx.HTTPTransport):
    """SIGTERM comes when the market has made the box and nobody has read its reply."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if request.method == "PUT" and "/asks/" in request.url.path:
            os.kill(os.getpid(), signal.SIGTERM)
        return response


def test_a_signal_between_create_and_its_reply_loses_no_box_however_long_listings_hide_it(
    pretend: Pretend, store: Store, clock: Clock, tmp_path: Path
) -> None:
    """The id is in the intent before the signal strikes, so whoever destroys next needs no listing to find the box."""

    def strike(number: int, frame: Any) -> None:
        raise Struck

    pretend.arm("list.lag=3600")
    market = pretend.client(tmp_path, transport=StrikesAtTheReply())
    before = signal.signal(signal.SIGTERM, strike)
    try:
        with pytest.raises(Struck):
            rent(
                market,
                store,
                rent_request(market, rehearsal_recipe()),
                pretend.settings(tmp_path),
                clock=clock,
                sleep=clock.sleep,
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    (made,) = pretend.market.alive()
    assert _intent(store)["instance_id"] == made.id
    left = destroy_run(market, FLOW_RUN, store=store, clock=clock, sleep=clock.sleep)
    assert left.clean and left.gone == (made.id,) and not pretend.market.alive()
