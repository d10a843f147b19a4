"""Renting one box: the intent first, the create call once, and nothing left behind that was not verified.

Creating is neither atomic nor repeatable here: an offer can be accepted twice, an error may still carry a new box, and a lost reply may
hide one. So the intent is in the bucket before the call, the box is known by its label, and every doubt ends in a verified destroy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tasks.destroy import DEADLINE_S, destroy_run
from tasks.domain import Instance, Intent, Label, Listing, Offer, UnparsedInstance
from tasks.errors import (
    Ambiguous,
    BootFailed,
    BoxError,
    BudgetReached,
    DestroyUnverified,
    MarketError,
    ShapeError,
    UserError,
)
from tasks.evidence import promised
from tasks.market.protocol import CreateRequest, Market
from tasks.rules.pricing import BID_MARGIN, CREDIT_MARGIN, dph_at_disk, storage_usd_h
from tasks.rules.tiers import TIERS
from tasks.settings import Settings
from tasks.signals import signals_held
from training.box.store import Store, StoreError
from training.contract import layout
from training.contract.recipe import Recipe

log = logging.getLogger(__name__)
Blame = Literal["host", "image", "other"]

# How long a created box has been seen to stay out of the listings.
LABEL_LAG_S = 180.0
_DEAD_STATES = {"exited", "stopped", "frozen", "unknown", "offline", "error"}
# None of these recovers; the state stays at loading. Where the image is at fault another box would most likely fail alike.
_FATAL_MESSAGES: tuple[tuple[str, Blame], ...] = (
    ("manifest unknown", "image"),
    ("unauthorized", "image"),
    ("toomanyrequests", "image"),
    ("failed to pull image", "host"),
    ("no space left on device", "host"),
    ("unexpected eof", "host"),
    ("oci runtime create failed", "host"),
    ("error response from daemon", "host"),
)


@dataclass(frozen=True)
class RentRequest:
    recipe: Recipe
    run: str
    flow_run_id: str
    attempt: int
    offer: Offer
    public_key: str
    onstart: str
    hard_end: int
    hours: float
    """Planned, for the question whether the credit will last."""

    @property
    def label(self) -> str:
        return Label(flow_run_id=self.flow_run_id, attempt=self.attempt, hard_end=self.hard_end).text

    @property
    def bid_usd(self) -> float | None:
        """None rents on demand. A bid goes a little over the least one, and never over the recipe's cap; BootFailed where no such bid wins."""
        box, offer = self.recipe.box, self.offer
        if not box.interruptible:
            return None
        if offer.min_bid_usd is None:
            raise BootFailed(f"offer {offer.id} states no least bid, so none can be made; next offer", blame="other")
        disk_usd = storage_usd_h(offer, box.disk_gb)
        bid = round(min(offer.min_bid_usd * BID_MARGIN, box.max_dph_usd - disk_usd), 4)
        if bid <= offer.min_bid_usd:
            raise BootFailed(
                f"offer {offer.id}: bids start at ${offer.min_bid_usd:.3f}/h and its disk takes ${disk_usd:.3f}/h, "
                f"box.max_dph_usd = ${box.max_dph_usd:.2f}; next offer",
                blame="other",
            )
        return bid


def rent(
    market: Market,
    store: Store,
    request: RentRequest,
    settings: Settings,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
    destroy_s: float = DEADLINE_S,
) -> Instance:
    """A running box with our key and an address to log in to.

    Nothing was made: UserError (credit), BudgetReached (account's $/h), OfferGone, InvalidRequest, Rejected, AuthError, StoreError, and
    BootFailed where no bid can win.
    Something was made and is verified gone again: BootFailed, or another error with a note that says so. It could not be
    verified: DestroyUnverified. A create whose outcome stays unknown is a BootFailed that blames nobody.
    """
    return _Renting(market, store, request, settings, clock, sleep, destroy_s).rent()


class _Renting:
    def __init__(
        self,
        market: Market,
        store: Store,
        request: RentRequest,
        settings: Settings,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        destroy_s: float,
    ) -> None:
        self.market, self.store, self.request, self.settings = market, store, request, settings
        self.clock, self.sleep, self.destroy_s = clock, sleep, destroy_s
        self.made: set[int] = set()
        self.intent: Intent | None = None

    def rent(self) -> Instance:
        account_id, bid_usd = self.market.account_id(), self.request.bid_usd
        self._require_credit()
        self._clear_leftovers()
        self._require_rate(_readable(self.market.list_all()))
        self._write_intent(account_id)
        began = self.clock()
        try:
            instance_id = self._create(bid_usd)
            self._verify(self._first_look(instance_id))
            self.market.attach_key(instance_id, self.request.public_key)
            return self._running(instance_id, until=began + self.request.recipe.box.boot_s)
        except Exception as error:
            # Whatever it was, a box may exist by now, and whoever catches this would rent the next one beside it.
            self._give_back(error)
            raise

    def _require_credit(self) -> None:
        credit, offer = self.market.credit_usd(), self.request.offer
        if credit is None:
            log.warning("the market does not say how much credit is left; renting without that check")
            return
        needed = self._dph() * self.request.hours * CREDIT_MARGIN
        if credit < needed:
            raise UserError(
                f"credit: ${credit:.2f} left, offer {offer.id} needs ${needed:.2f} "
                f"({self.request.hours:.1f} h at ${self._dph():.2f}/h and a fifth more); add credit or train less"
            )

    def _clear_leftovers(self) -> None:
        """A retried task or an earlier attempt may have left a box under this flow run's name."""
        left = destroy_run(
            self.market,
            self.request.flow_run_id,
            deadline_s=self.destroy_s,
            sleep=self.sleep,
            clock=self.clock,
            poll_s=self.settings.poll_s,
        )
        if not left.clean:
            raise DestroyUnverified(
                f"an earlier box of this flow run may still bill ({_ids(left.unverified)}): {left.reason}; no other is rented beside it"
            )
        if left.gone:
            log.warning("boxes %s of this flow run were still there and are destroyed", _ids(left.gone))

    def _require_rate(self, listing: Listing) -> None:
        """The account-wide cap counts every box, ours or not, boxes whose price is not stated as dear as this one, and those that an
        unanswered create call may have made."""
        running = sum(self._rate_of(box) for box in listing.instances) + self._dph() * len(listing.unparsed)
        unseen_usd_h = sum(intent.dph_usd for intent in promised(self.store, listing.instances, self.clock()))
        if running + unseen_usd_h + self._dph() > self.settings.max_dph_usd:
            unseen = f"${unseen_usd_h:.2f}/h more may be behind create calls of the last hour without an answer, "
            raise BudgetReached(
                f"account: ${running:.2f}/h are running in {len(listing.instances) + len(listing.unparsed)} boxes, "
                f"{unseen if unseen_usd_h else ''}"
                f"this one adds ${self._dph():.2f}/h, limit ${self.settings.max_dph_usd:.2f}/h (LIVERY_MAX_DPH_USD)"
            )

    def _rate_of(self, box: Instance) -> float:
        """A stopped box bills its disk only; a box that boots will soon bill in full."""
        if box.actual_status in {"stopped", "exited", "offline"} and box.storage_usd_hour is not None:
            return box.storage_usd_hour
        return self._dph() if box.dph_total_usd is None else box.dph_total_usd

    def _write_intent(self, account_id: str) -> None:
        request = self.request
        self.intent = Intent(
            flow_run_id=request.flow_run_id,
            run=request.run,
            attempt=request.attempt,
            label=request.label,
            account_id=account_id,
            offer_id=request.offer.id,
            machine_id=request.offer.machine_id,
            dph_usd=self._dph(),
            disk_gb=request.recipe.box.disk_gb,
            written_at=self.clock(),
        )
        self.store.put_bytes(
            layout.intent(request.flow_run_id, request.attempt), self.intent.model_dump_json().encode()
        )

    def _create(self, bid_usd: float | None) -> int:
        request = self.request
        wanted = CreateRequest(
            offer=request.offer,
            image=request.recipe.box.image,
            disk_gb=request.recipe.box.disk_gb,
            label=request.label,
            onstart=request.onstart,
            bid_usd=bid_usd,
        )
        try:
            # A signal between the reply and the intent would leave a box whose id nobody knows, and listings may hide it for minutes.
            with signals_held():
                return self._created(self.market.create(wanted))
        except Ambiguous as error:
            return self._created(self._reconcile(error))
        except MarketError as error:
            if error.instance_id is None:
                self._note("refused", reason=str(error))
                raise
            self._created(error.instance_id)
            raise BootFailed(f"refused, and a box was made all the same: {error}", blame="other") from error

    def _created(self, instance_id: int) -> int:
        self.made.add(instance_id)
        self._note("created", instance_id=instance_id)
        return instance_id

    def _reconcile(self, error: Ambiguous) -> int:
        """Nobody knows whether the box exists: look for its label as long as it has been seen to hide."""
        log.warning("create: %s; looking for the label %s", error, self.request.label)
        if error.instance_id is not None:
            self.made.add(error.instance_id)
        until = self.clock() + LABEL_LAG_S * min(1.0, self.settings.market_pace)
        while True:
            mine = self._mine()
            if len(mine) == 1:
                log.info("create: box %d carries the label and is adopted", mine[0].id)
                return mine[0].id
            if mine:
                self.made |= {box.id for box in mine}
                raise BootFailed(f"create was accepted {len(mine)} times; all are given back", blame="other") from error
            if self.clock() >= until:
                self._note("unresolved", reason=str(error))
                raise BootFailed(
                    f"create: {error}; no box with the label {self.request.label} appeared; the reaper watches for it",
                    blame="other",
                ) from error
            self.sleep(self.settings.poll_s)

    def _mine(self) -> tuple[Instance, ...]:
        """Boxes with exactly this label; none while the listing cannot be read, for then one may be hidden."""
        try:
            listing = self.market.list_all()
        except MarketError as error:
            log.warning("create: the boxes cannot be listed yet: %s", error)
            return ()
        return tuple(box for box in listing.instances if box.label == self.request.label)

    def _first_look(self, instance_id: int) -> Instance:
        """The new box's own row. Reading lags behind writing on this market, so "no such box" is asked again."""
        until = self.clock() + LABEL_LAG_S * min(1.0, self.settings.market_pace)
        while (box := self.market.show(instance_id)) is None:
            if self.clock() >= until:
                raise BootFailed(f"box {instance_id} was promised and never appeared", blame="other")
            self.sleep(self.settings.poll_s)
        return box

    def _verify(self, box: Instance) -> None:
        """What was got against what was asked; any difference ends this box. What the market does not say is not held against it."""
        request, want, tier = self.request, self.request.recipe.box, TIERS[self.request.recipe.box.tier]
        wrong: list[tuple[str, object, object, Blame]] = []
        if box.label != request.label:
            wrong.append(("label", box.label, request.label, "other"))
        if box.is_bid is not None and box.is_bid != want.interruptible:
            wrong.append(("bid", box.is_bid, want.interruptible, "other"))
        if box.machine_id is not None and box.machine_id != request.offer.machine_id:
            wrong.append(("machine", box.machine_id, request.offer.machine_id, "other"))
        if box.num_gpus is not None and box.num_gpus != want.gpus:
            wrong.append(("GPUs", box.num_gpus, want.gpus, "host"))
        if box.gpu_name and _card(box.gpu_name) != _card(request.offer.gpu_name):
            wrong.append(("GPU", box.gpu_name, request.offer.gpu_name, "host"))
        if box.gpu_ram_mb is not None and not tier.min_memory_mb <= box.gpu_ram_mb <= tier.max_memory_mb:
            seen = f"{box.gpu_ram_mb:.0f} MB ({box.gpu_name})"
            wrong.append(("GPU memory", seen, f"{tier.min_memory_mb} to {tier.max_memory_mb} MB", "host"))
        if box.disk_space_gb is not None and box.disk_space_gb < want.disk_gb - 1:
            wrong.append(("disk", f"{box.disk_space_gb:.0f} GB", f"{want.disk_gb} GB", "host"))
        if box.dph_total_usd is not None and box.dph_total_usd > want.max_dph_usd + 1e-6:
            wrong.append(("price", f"${box.dph_total_usd:.3f}/h", f"at most ${want.max_dph_usd:.2f}/h", "other"))
        if wrong:
            listed = "; ".join(f"{what}: seen {seen}, want {wanted}" for what, seen, wanted, _ in wrong)
            blame: Blame = "host" if any(fault[3] == "host" for fault in wrong) else "other"
            raise BootFailed(f"box {box.id} is not what was rented: {listed}", blame=blame, fault=wrong[0][0])

    def _running(self, instance_id: int, until: float) -> Instance:
        """Wait for the state running and an address; the deadline counts from the create call."""
        last = "nothing"
        while self.clock() < until:
            box = self.market.show(instance_id)
            if box is not None:
                last = f"{box.actual_status or 'no state'}{f' ({box.status_msg})' if box.status_msg else ''}"
                _require_hope(box)
                if box.actual_status == "running" and (ready := self._with_address(box)):
                    # A price can rise, and a row that was empty at first can have been filled in, while the box boots.
                    self._verify(ready)
                    return ready
            self.sleep(self.settings.poll_s)
        raise BootFailed(
            f"box {instance_id} on machine {self.request.offer.machine_id} is not running after "
            f"{self.request.recipe.box.boot_s} s; last seen: {last}"
        )

    def _with_address(self, box: Instance) -> Instance | None:
        """The box with all its addresses, once the listing shows no second box of this label: a double accept shows here."""
        listing = _readable(self.market.list_all())
        rows: tuple[Instance | UnparsedInstance, ...] = (*listing.instances, *listing.unparsed)
        for extra in rows:
            if extra.label == self.request.label and extra.id not in (None, box.id):
                self.made.add(extra.id)
                raise BootFailed(
                    f"the offer was accepted twice (boxes {box.id} and {extra.id}); all are given back", blame="other"
                )
        if box.id not in {row.id for row in rows}:
            return None  # A listing that lags behind our own box would hide a second one just as well.
        row = next((row for row in listing.instances if row.id == box.id), box)
        # Showing one box has been seen to leave out the mapped ports that the listing has.
        ready = box if len(box.endpoints) >= len(row.endpoints) else box.model_copy(update={"endpoints": row.endpoints})
        return ready if ready.endpoints else None

    def _give_back(self, error: Exception) -> None:
        if not self.made and self.intent is not None and self.intent.state == "refused":
            return
        left = destroy_run(
            self.market,
            self.request.flow_run_id,
            deadline_s=self.destroy_s,
            clock=self.clock,
            sleep=self.sleep,
            poll_s=self.settings.poll_s,
            also=self.made,
        )
        self._note_boxes({*self.made, *left.gone, *left.unverified})
        if not left.clean:
            raise DestroyUnverified(
                f"{error}; box {_ids(left.unverified)} could not be verified as destroyed: {left.reason}"
            ) from error
        said = f"box {_ids(left.gone)} is destroyed and verified gone" if left.gone else "no box of it exists"
        if self.intent is not None and (left.gone or self.intent.state != "unresolved"):
            self._note("destroyed" if left.gone else "refused", reason=str(error))
        log.warning("attempt %d: %s; %s", self.request.attempt, error, said)
        if isinstance(error, BoxError) and left.gone:
            raise type(error)(f"{error}; {said}", blame=error.blame, fault=error.fault) from error
        error.add_note(said)

    def _note_boxes(self, ids: set[int]) -> None:
        """Every box that the call made goes into the intent, for all of them are billed."""
        if self.intent is None or not ids:
            return
        first = self.intent.instance_id if self.intent.instance_id is not None else min(ids)
        self.intent = self.intent.model_copy(update={"instance_id": first, "also_ids": tuple(sorted(ids - {first}))})
        self._note(self.intent.state, reason=self.intent.reason)

    def _note(
        self,
        state: Literal["written", "created", "refused", "unresolved", "destroyed"],
        *,
        instance_id: int | None = None,
        reason: str = "",
    ) -> None:
        """Keep the intent up to date. The label on the box says the same, so a bucket that fails now stops nothing."""
        if self.intent is None:
            return
        known = instance_id if instance_id is not None else self.intent.instance_id
        closed_at = None if state in {"written", "created"} else self.clock()
        self.intent = self.intent.model_copy(
            update={"state": state, "instance_id": known, "reason": reason[:300], "closed_at": closed_at}
        )
        key = layout.intent(self.request.flow_run_id, self.request.attempt)
        try:
            self.store.put_bytes(key, self.intent.model_dump_json().encode())
        except StoreError as error:
            log.warning("intent of attempt %d is not up to date: %s", self.request.attempt, error)

    def _dph(self) -> float:
        return dph_at_disk(self.request.offer, self.request.recipe.box.disk_gb)


def _require_hope(box: Instance) -> None:
    """BootFailed as soon as the box's state or message says that it will never run."""
    message = (box.status_msg or "").lower()
    for words, blame in _FATAL_MESSAGES:
        if words in message and box.actual_status != "running":
            said = f"box {box.id} will not boot: {(box.status_msg or '').strip()[:200]}"
            raise BootFailed(said, blame=blame, fault=words)
    if box.taken_back and box.is_bid:
        raise BootFailed(f"box {box.id} was outbid before it ran", blame="other", fault="outbid")
    if box.actual_status in _DEAD_STATES or box.taken_back:
        state = "stopped" if box.taken_back else box.actual_status
        raise BootFailed(f"box {box.id} is {state}: {box.status_msg or 'no message'}", fault=str(state))


def _readable(listing: Listing) -> Listing:
    """ShapeError unless every box of the account could be counted: what cannot be counted cannot be capped."""
    if listing.complete:
        return listing
    raise ShapeError(f"the account's boxes cannot be listed in full, so nothing is rented: {listing.problem}")


def _card(name: str) -> str:
    return name.replace("_", " ").strip().lower()


def _ids(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) or "unknown"
