"""What every market must offer. A method does one thing and retries nothing that costs money."""

from __future__ import annotations

from typing import Protocol

from tasks.domain import Charge, Instance, Listing, Offer
from training.contract.model import Frozen
from training.contract.recipe import Box as BoxWanted


class CreateRequest(Frozen):
    """What is asked of the market for one box. Holds no secret: the market shows `env` and `onstart` to anyone with the key."""

    offer: Offer
    image: str
    disk_gb: int
    label: str
    onstart: str
    bid_usd: float | None = None
    """None rents on demand; a number bids."""


class Market(Protocol):
    name: str

    def account_id(self) -> str:
        """Identity of the account behind the key. AuthError if the key is bad."""
        ...

    def credit_usd(self) -> float | None:
        """Money left, None if the market does not say."""
        ...

    def search(self, want: BoxWanted) -> list[Offer]:
        """All offers of the tier priced for the wanted disk, filtered loosely by the market; tasks/rules decides. ShapeError rather than an empty list on a reply of unknown form."""
        ...

    def create(self, request: CreateRequest) -> int:
        """Rent; the box's id. Sent once, never retried. OfferGone and InvalidRequest mean that nothing was made; Rejected may carry an id; Ambiguous means look for the label."""
        ...

    def show(self, instance_id: int) -> Instance | None:
        """One box; None only if an authenticated reply says that it does not exist."""
        ...

    def list_all(self) -> Listing:
        """Every box of the account with proof of completeness."""
        ...

    def destroy(self, instance_id: int) -> None:
        """Ask once for destruction. Returning is no proof: only a complete listing without the box is."""
        ...

    def attach_key(self, instance_id: int, public_key: str) -> None:
        """Let this key log in; survives the host's rewriting of authorized_keys."""
        ...

    def charges(self, instance_ids: tuple[int, ...], since: float, until: float) -> list[Charge]:
        """What was charged for these boxes."""
        ...
