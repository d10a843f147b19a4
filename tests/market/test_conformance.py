"""What every market must do, whoever stands behind it: one list of checks, each held against each provider.

A new provider is one class with the few knobs below and a line in `PROVIDERS`.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tasks.destroy import destroy_run
from tasks.domain import Instance, Label, Listing, Offer
from tasks.errors import Ambiguous, AuthError, MarketError, OfferGone
from tasks.market.protocol import CreateRequest, Market
from tasks.market.vast import VastMarket
from tasks.remote.ssh import make_key
from tests.market.owned import OwnedBox
from tests.tasks.pretend import FLOW_RUN, NOW, PUBLIC_KEY, Clock, Pretend, rehearsal_recipe
from tests.tasks.remote.conftest import SSHD
from training.box.folder import FolderStore
from training.box.store import StoreUnreachable
from training.contract import layout
from training.contract.recipe import Box

LABEL = Label(flow_run_id=FLOW_RUN, attempt=1, hard_end=int(NOW) + 7200).text


class Provider(Protocol):
    """A market, and the knobs behind it that no client has."""

    market: Market
    clock: Clock

    def refused(self) -> Market:
        """The same market with credentials that are not accepted."""

    def lose_the_reply(self) -> None:
        """The next create happens, and its reply is lost."""

    def hide_the_list(self) -> None:
        """From now on what boxes there are cannot be read."""

    def boxes(self) -> int:
        """How many boxes there really are."""

    def lets_in(self, instance_id: int, public_key: str) -> bool: ...


class Vast:
    def __init__(self, pretend: Pretend, folder: Path) -> None:
        self.pretend, self.folder, self.clock = pretend, folder, pretend.clock
        self.market: Market = pretend.client(folder)

    def refused(self) -> Market:
        return self.pretend.client(self.folder, key="a-key-that-was-revoked")

    def lose_the_reply(self) -> None:
        self.pretend.arm("create.drop_after_commit")

    def hide_the_list(self) -> None:
        self.pretend.arm("list.missing_row@always")

    def boxes(self) -> int:
        return len(self.pretend.market.alive())

    def lets_in(self, instance_id: int, public_key: str) -> bool:
        return [key.text for key in self.pretend.market.contracts[instance_id].ssh_keys] == [public_key]


class OwnHost:
    def __init__(self, box: OwnedBox, folder: Path, clock: Clock) -> None:
        self.box, self.folder, self.clock = box, folder, clock
        self.store = _Deaf(folder / "bucket")
        self.market: Market = box.market(self.store, folder, clock)

    def refused(self) -> Market:
        make_key(self.folder / "stranger")
        return self.box.market(self.store, self.folder, self.clock, key_path=self.folder / "stranger")

    def lose_the_reply(self) -> None:
        self.store.deaf = True

    def hide_the_list(self) -> None:
        for path in (self.store.root / "owned").iterdir():
            path.write_text("{")

    def boxes(self) -> int:
        return len(list((self.store.root / "owned").glob("*.json")))

    def lets_in(self, instance_id: int, public_key: str) -> bool:
        return [line.rsplit(" ", 1)[0] for line in self.box.keys] == [public_key]


class _Deaf(FolderStore):
    """A bucket that writes once and whose answer is lost."""

    deaf = False

    def put_bytes(self, key: str, data: bytes, **options: Any) -> None:
        super().put_bytes(key, data, **options)
        if self.deaf:
            self.deaf = False
            raise StoreUnreachable("the connection was lost")


def finds_offers_of_a_known_form(provider: Provider) -> None:
    """At least one offer: a card of the tier, a price, an identity that outlives the listing."""
    offers = provider.market.search(_want())
    assert offers
    for offer in offers:
        assert offer.id > 0 and offer.machine_id > 0 and offer.num_gpus == 1
        assert math.isfinite(offer.dph_total_usd) and offer.dph_total_usd >= 0
        assert 7_000 <= offer.gpu_ram_mb <= 9_000 and offer.disk_space_gb >= _want().disk_gb


def creates_a_box_that_carries_its_label(provider: Provider) -> None:
    """The label is on the box from the create call on, by id and in the listing: it is all that a stranger has to go by."""
    box = provider.market.show(_create(provider))
    assert box is not None and box.label == LABEL
    assert [row.id for row in provider.market.list_all().of_run(FLOW_RUN)] == [box.id]


def tells_price_and_kind_of_a_box(provider: Provider) -> None:
    """What the box costs an hour, and that it is not a bid: nobody else says whether we got what we asked for."""
    box = provider.market.show(_create(provider))
    assert box is not None and box.is_bid is False
    assert box.dph_total_usd is not None and 0 <= box.dph_total_usd <= _want().max_dph_usd
    assert box.num_gpus == 1 and box.gpu_ram_mb is not None and box.disk_space_gb is not None
    assert box.machine_id is not None


def never_gives_one_offer_twice(provider: Provider) -> None:
    """An offer that is taken is gone, and nothing is made."""
    offer = _offer(provider)
    _create(provider, offer)
    with pytest.raises(OfferGone):
        _create(provider, offer)
    assert provider.boxes() == 1


def leaves_a_lost_reply_to_be_found_by_its_label(provider: Provider) -> None:
    """A create whose reply is lost is Ambiguous and is not sent again; the one box that it made is in the listing."""
    offer = _offer(provider)
    provider.lose_the_reply()
    with pytest.raises(Ambiguous):
        _create(provider, offer)
    assert provider.boxes() == 1
    assert len(provider.market.list_all().of_run(FLOW_RUN)) == 1


def lists_everything_or_says_that_it_cannot(provider: Provider) -> None:
    """A listing is complete, or nobody takes it for one."""
    assert provider.market.list_all().instances == ()
    box = _create(provider)
    listing = provider.market.list_all()
    assert listing.complete and not listing.unparsed and [row.id for row in listing.instances] == [box]
    provider.hide_the_list()
    try:
        listing = provider.market.list_all()
    except MarketError:
        return
    assert not listing.complete or listing.unparsed, "a hidden box was passed over in silence"


def knows_a_box_that_is_gone_no_more(provider: Provider) -> None:
    """Neither one that never was nor one that was destroyed; and the next box is another one."""
    assert provider.market.show(1) is None
    first = _create(provider)
    provider.market.destroy(first)
    assert provider.market.show(first) is None
    assert _create(provider) != first
    assert provider.market.show(first) is None


def destroys_as_often_as_it_is_asked(provider: Provider) -> None:
    """Verified by complete listings; asking again is no error and harms nobody."""
    box = _create(provider)
    done = destroy_run(provider.market, FLOW_RUN, deadline_s=60, clock=provider.clock, sleep=provider.clock.sleep)
    assert done.clean and done.gone == (box,) and provider.boxes() == 0
    provider.market.destroy(box)
    assert destroy_run(provider.market, FLOW_RUN, clock=provider.clock, sleep=provider.clock.sleep).clean


def never_takes_a_refused_key_for_an_empty_house(provider: Provider) -> None:
    """With credentials that are not accepted nothing is said to be gone."""
    box, stranger = _create(provider), provider.refused()
    with pytest.raises(AuthError):
        stranger.search(_want())
    for there in (lambda: stranger.show(box) is not None, lambda: bool(stranger.list_all().instances)):
        with contextlib.suppress(AuthError):
            assert there(), "gone, says a key that is not accepted"
    assert provider.boxes() == 1


def attaches_a_key_once(provider: Provider) -> None:
    """Through the market and not by hand; a repetition after a lost reply is no error."""
    box = _create(provider)
    provider.market.attach_key(box, PUBLIC_KEY)
    provider.market.attach_key(box, PUBLIC_KEY)
    assert provider.lets_in(box, PUBLIC_KEY)


def is_one_account_throughout(provider: Provider) -> None:
    """The same identity at each question and under each listing."""
    account = provider.market.account_id()
    assert account and account == provider.market.account_id() == provider.market.list_all().account_id


def says_what_was_charged(provider: Provider) -> None:
    """Dollars for each box asked about, and for no other."""
    box = _create(provider)
    provider.clock.now += 3600
    provider.market.destroy(box)
    charges = provider.market.charges((box,), NOW - 60, provider.clock.now + 60)
    assert {charge.instance_id for charge in charges} == {box}
    assert all(charge.usd >= 0 for charge in charges)
    assert provider.market.owned == (sum(charge.usd for charge in charges) == 0)


CHECKS: tuple[Callable[[Provider], None], ...] = (
    finds_offers_of_a_known_form,
    creates_a_box_that_carries_its_label,
    tells_price_and_kind_of_a_box,
    never_gives_one_offer_twice,
    leaves_a_lost_reply_to_be_found_by_its_label,
    lists_everything_or_says_that_it_cannot,
    knows_a_box_that_is_gone_no_more,
    destroys_as_often_as_it_is_asked,
    never_takes_a_refused_key_for_an_empty_house,
    attaches_a_key_once,
    is_one_account_throughout,
    says_what_was_charged,
)
PROVIDERS = ("vast", "ssh_host")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("provider", PROVIDERS, indirect=True)
def test_a_provider(provider: Provider, check: Callable[[Provider], None]) -> None:
    check(provider)


class _TakesAuthForGone(VastMarket):
    def show(self, instance_id: int) -> Instance | None:
        try:
            return super().show(instance_id)
        except AuthError:
            return None


class _TakesAnyListForWhole(VastMarket):
    def list_all(self) -> Listing:
        return super().list_all().model_copy(update={"complete": True, "problem": ""})


class _AsksTwice(VastMarket):
    def create(self, request: CreateRequest) -> int:
        try:
            return super().create(request)
        except Ambiguous:
            return super().create(request)


class _ForgetsTheLabel(VastMarket):
    def create(self, request: CreateRequest) -> int:
        return super().create(request.model_copy(update={"label": ""}))


class _ForgetsTheKey(VastMarket):
    def attach_key(self, instance_id: int, public_key: str) -> None:
        pass


class _OnlySaysSo(VastMarket):
    def destroy(self, instance_id: int) -> None:
        pass


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        (never_takes_a_refused_key_for_an_empty_house, _TakesAuthForGone),
        (lists_everything_or_says_that_it_cannot, _TakesAnyListForWhole),
        (leaves_a_lost_reply_to_be_found_by_its_label, _AsksTwice),
        (creates_a_box_that_carries_its_label, _ForgetsTheLabel),
        (attaches_a_key_once, _ForgetsTheKey),
        (destroys_as_often_as_it_is_asked, _OnlySaysSo),
    ],
    ids=lambda part: part.__name__,
)
def test_a_check_catches_the_provider_that_breaks_it(
    check: Callable[[Provider], None], broken: type[VastMarket], pretend: Pretend, tmp_path: Path
) -> None:
    provider, make = Vast(pretend, tmp_path), pretend.client

    def broken_client(*given: Any, **options: Any) -> VastMarket:
        market = make(*given, **options)
        market.__class__ = broken
        return market

    pretend.client = broken_client  # type: ignore[method-assign]
    provider.market = pretend.client(tmp_path)
    with pytest.raises((AssertionError, pytest.fail.Exception, OfferGone)):
        check(provider)


def _want() -> Box:
    return rehearsal_recipe().box


def _offer(provider: Provider) -> Offer:
    return min(provider.market.search(_want()), key=lambda offer: offer.dph_total_usd)


def _create(provider: Provider, offer: Offer | None = None) -> int:
    wanted = CreateRequest(
        offer=offer or _offer(provider), image="image", disk_gb=_want().disk_gb, label=LABEL, onstart="true"
    )
    return provider.market.create(wanted)


@pytest.fixture(scope="module")
def owned_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnedBox]:
    if not Path(SSHD).exists():
        pytest.skip("no sshd on this machine: install openssh-server")
    box = OwnedBox(tmp_path_factory.mktemp("owned"))
    box.start()
    yield box
    box.kill()


@pytest.fixture
def provider(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Provider:
    if request.param == "vast":
        return Vast(request.getfixturevalue("pretend"), tmp_path)
    box: OwnedBox = request.getfixturevalue("owned_box")
    for left in (layout.BOX_HOME, ".ssh"):
        shutil.rmtree(box.home / left, ignore_errors=True)
    return OwnHost(box, tmp_path, clock)
