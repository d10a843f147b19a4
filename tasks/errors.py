"""What can go wrong, drawn as a tree.

LiveryError
├── UserError            a mistake in recipe, data, settings: nothing was rented, nothing is retried        exit 2
├── MarketError          the market answered, or did not
│   ├── AuthError            401, 403, or any body that says auth_error, a 404 among them                    exit 2
│   ├── RateLimited          429 of the interval limiter
│   ├── QuotaExhausted       429 until a stated time
│   ├── NotFound             404 whose body says so
│   ├── OfferGone            taken by somebody else
│   ├── EndpointGone         410: the API has moved; this version of Livery is too old
│   ├── InvalidRequest       400
│   ├── Rejected             200 with success: false; may carry the id of a box made anyway
│   ├── Ambiguous            no reply, 5xx, unreadable: it may or may not have happened
│   └── ShapeError           200 of a form nobody knows: never read as "empty" or "gone"
├── BoxError             this box will not do: destroy it, remember the machine, try the next offer
│   ├── BootFailed
│   ├── LoginFailed
│   ├── PreflightFailed
│   ├── InstallFailed
│   ├── TransferFailed
│   └── BoxLost
├── RunAborted           the runner stopped itself; another box would fail alike                             exit 1
├── NoOffers             nothing passes the filters                                                          exit 3
├── AttemptsExhausted    every box tried was unfit                                                           exit 4
├── BudgetReached        dollars or hours of the recipe are used up; what was trained is in the bucket       exit 4
└── DestroyUnverified    a box may still bill                                                                exit 5
"""

from __future__ import annotations

from typing import ClassVar, Literal


class LiveryError(Exception):
    exit_code: ClassVar[int] = 1


class UserError(LiveryError, ValueError):
    exit_code = 2


class MarketError(LiveryError):
    """Carries the box's id when one is known to exist in spite of the error."""

    def __init__(self, message: str, *, instance_id: int | None = None) -> None:
        super().__init__(message)
        self.instance_id = instance_id


class AuthError(MarketError):
    exit_code = 2


class RateLimited(MarketError):
    def __init__(self, message: str, *, retry_after_s: float | None = None, instance_id: int | None = None) -> None:
        super().__init__(message, instance_id=instance_id)
        self.retry_after_s = retry_after_s


class QuotaExhausted(MarketError):
    pass


class NotFound(MarketError):
    pass


class OfferGone(MarketError):
    pass


class EndpointGone(MarketError):
    pass


class InvalidRequest(MarketError):
    exit_code = 2


class Rejected(MarketError):
    pass


class Ambiguous(MarketError):
    pass


class ShapeError(MarketError):
    pass


class BoxError(LiveryError):
    """`blame` host: the machine is remembered and left out for a while; image: two boxes with the same `fault` end the run; other: the
    machine is innocent. `fault` names what failed in one word, such as a check's id."""

    exit_code = 4

    def __init__(self, message: str, *, blame: Literal["host", "image", "other"] = "host", fault: str = "") -> None:
        super().__init__(message)
        self.blame = blame
        self.fault = fault


class BootFailed(BoxError):
    pass


class LoginFailed(BoxError):
    pass


class PreflightFailed(BoxError):
    pass


class InstallFailed(BoxError):
    pass


class TransferFailed(BoxError):
    pass


class BoxLost(BoxError):
    pass


class RunAborted(LiveryError):
    pass


class NoOffers(LiveryError):
    exit_code = 3


class AttemptsExhausted(LiveryError):
    exit_code = 4


class BudgetReached(LiveryError):
    exit_code = 4


class DestroyUnverified(LiveryError):
    exit_code = 5
