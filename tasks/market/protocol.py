"""What every market must offer. A method does one thing and retries nothing that costs money; `tests/market` holds each to it.

Three kinds of market fit: one that sells (`vast`), a host that its user owns (`ssh_host`), and a cloud. How EC2 fits, to keep it so:

- An offer is an instance type in a zone, on demand or spot. Its `machine_id` is a digest of type and zone: what is remembered as bad is
  a place. `search` reads types, zones and prices; the driver and the links are the image's and the region's.
- `create` is RunInstances with the label as a tag in the same call and ClientToken = sha256(label): there, and only there, a lost reply
  may be asked for again inside `create`, since the token makes it the same box. A bid is the spot market's MaxPrice. Capacity errors
  (InsufficientInstanceCapacity, SpotMaxPriceTooLow, Unsupported) are OfferGone, quotas (VcpuLimitExceeded) are Rejected.
- Ids are the hexadecimal digits after `i-` as an integer, and back.
- `list_all` is DescribeInstances to the last page without the terminated ones, complete when no NextToken is left; `show` of a
  terminated one is None; `destroy` is TerminateInstances, which may be repeated. The account is the caller's identity from STS.
- `attach_key` writes through Instance Connect or the user data of the create call; `charges` are hours at the known price, because the
  bill itself comes a day later.
"""

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
    owned: bool
    """The boxes are the user's own: nothing is bought, and giving back frees the box instead of ending it."""

    def account_id(self) -> str:
        """Identity of the account behind the key. AuthError if the key is bad."""
        ...

    def credit_usd(self) -> float | None:
        """Money left, None if the market does not say, infinite where nothing is billed."""
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

    def charges(self, instance_ids: tuple[int, ...] | None, since: float, until: float) -> list[Charge]:
        """What was charged for these boxes, or with None for every box that the account has had, ours or not."""
        ...
