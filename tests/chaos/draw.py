"""What goes wrong in a run, and when: drawn from a seed alone, so that `--only SEED-NUMBER` draws the same again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from deployments.rehearsal.faults import FAULTS

T = TypeVar("T")
How = Literal["bare", "served", "worker", "container"]
"""Who started the flow's process: a person, `serve`, a process worker, or a container's entry point."""

START = "start"
# In the order of a run; all but the first are steps of the flight record, so every way of running a flow shows them alike.
MOMENTS = (
    START,
    "create",
    "boot",
    "preflight",
    "install",
    "preflight links",
    "prefetch",
    "phase cpt",
    "upload cpt",
    "phase sft",
    "upload sft",
    "export",
    "destroy",
)
# How long after the moment at most: long enough to meet all that happens in it.
_WITHIN_S = {START: 6.0, "create": 1.0, "boot": 1.5, "phase cpt": 3.0, "phase sft": 3.0, "destroy": 0.5}
TRAINING = MOMENTS[MOMENTS.index("phase cpt") : MOMENTS.index("export")]

PROCESS: tuple[tuple[str, How], ...] = (
    ("flow.sigkill", "bare"),
    ("flow.sigkill", "served"),
    ("flow.sigkill", "worker"),
    ("flow.sigterm", "bare"),
    ("flow.sigterm", "served"),
    ("flow.sigterm_twice", "bare"),
    ("flow.sigterm_twice", "served"),
    ("flow.sigint", "bare"),
    ("api.cancel", "served"),
    ("api.cancel", "worker"),
    ("api.suspend", "served"),
    ("api.suspend", "worker"),
    ("api.delete", "served"),
    ("serve.sigterm", "served"),
    ("serve.sigint", "served"),
    ("serve.sigkill", "served"),
    ("machine.sigkill", "served"),
    ("worker.sigterm", "worker"),
    ("worker.sigkill", "worker"),
    ("machine.sigkill", "worker"),
    ("container.sigterm", "container"),
    ("server.restart", "bare"),
    ("server.restart", "served"),
    ("server.gone", "bare"),
)
# Values of market faults that suit runs of half a minute; the rest have their defaults.
_VALUES: dict[str, Sequence[str]] = {
    "list.lag": ("4", "10"),
    "list.stale_after_destroy": ("4", "10"),
    "destroy.hang": ("6", "20"),
    "net.stall_after": ("0", "300000", "1000000"),
    "box.lost_at": ("cpt:1", "cpt:14", "sft:1", "sft:12"),
    "box.import_broken": ("pydantic_core", "boto3"),
}
# A process fault for three of five runs, and every twentieth run trains for real.
_PROCESS_OF_FIVE, _TRAINS_EVERY = 3, 20


@dataclass(frozen=True)
class Case:
    """One run and the one thing that goes wrong in it."""

    name: str
    """SEED-NUMBER."""
    fault: str
    """Of PROCESS, or a market fault as the rehearsal writes it."""
    how: How
    at: str
    delay_s: float
    trains: bool = False

    @property
    def is_market(self) -> bool:
        return self.kind in FAULTS

    @property
    def kind(self) -> str:
        return self.fault.partition("=")[0].partition("@")[0]


def draw(seed: int, number: int) -> Case:
    """The case of this number. Faults come from shuffled decks, so that each is met before one is met twice more."""
    dice = random.Random(f"{seed}-{number}")
    five, within = divmod(number, 5)
    name, trains = f"{seed}-{number}", number % _TRAINS_EVERY == _TRAINS_EVERY // 2
    if within < _PROCESS_OF_FIVE:
        fault, how = _from_deck(PROCESS, seed, five * _PROCESS_OF_FIVE + within)
        at = dice.choice(TRAINING if trains else MOMENTS)
    else:
        kind, how = _from_deck(tuple(FAULTS), seed, five * (5 - _PROCESS_OF_FIVE) + within - _PROCESS_OF_FIVE), "bare"
        fault, at = _specified(kind, dice), START if _strikes_at_start(kind) else dice.choice(MOMENTS)
    return Case(name, fault, how, at, round(dice.uniform(0, _WITHIN_S.get(at, 0.8)), 2), trains)


# What the box's own destroyer can meet: whoever else would destroy it is dead.
MARKET_DEAF = (
    "destroy.429",
    "destroy.200_but_stays",
    "destroy.success_false",
    "destroy.404_but_alive",
    "destroy.500_but_done",
    "destroy.hang=2",
)
ORPHANED = "orphaned"
HANGS = "job hangs, heart beats"
FROZEN = "job frozen"


def draw_deadman(seed: int, number: int) -> Case:
    """A run whose orchestrator is killed, with no reaper: the box is alone, or its job hangs, or the market does not listen."""
    dice = random.Random(f"deadman-{seed}-{number}")
    fault = _from_deck((ORPHANED, ORPHANED, ORPHANED, HANGS, FROZEN, *MARKET_DEAF), seed, number)
    if fault == HANGS:
        at = "phase cpt"
    elif fault == FROZEN:
        at = dice.choice(TRAINING)
    else:
        at = dice.choice(MOMENTS[MOMENTS.index("boot") :])
    return Case(f"{seed}-{number}", fault, "bare", at, round(dice.uniform(0, _WITHIN_S.get(at, 0.8)), 2))


def _strikes_at_start(kind: str) -> bool:
    """Faults that a box is made with, and those of the calls that make one, must be armed before."""
    fault = FAULTS[kind]
    return (fault.hits == "box" and not fault.live) or kind.partition(".")[0] in {"search", "create"}


def _specified(kind: str, dice: random.Random) -> str:
    if kind in _VALUES:
        return f"{kind}={dice.choice(_VALUES[kind])}"
    fault = FAULTS[kind]
    if fault.kind is float and fault.unit == "s" and fault.hits == "box":
        return f"{kind}={dice.uniform(0.5, 20):.1f}"
    return kind


def _from_deck(deck: Sequence[T], seed: int, number: int) -> T:
    turn, place = divmod(number, len(deck))
    cards = list(deck)
    random.Random(f"deck-{seed}-{turn}").shuffle(cards)
    return cards[place]
