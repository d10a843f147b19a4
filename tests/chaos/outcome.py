"""What became of the runs: counted, added up, and printed as one table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.chaos.draw import Case


@dataclass
class Outcome:
    """One run after its fault and two ticks of the reaper."""

    case: str
    fault: str
    at: str
    boxes: int = 0
    reaped: int = 0
    """Boxes that were still there when the first tick began."""
    left: int = 0
    usd: float = 0.0
    wasted_usd: float = 0.0
    lost_steps: int = 0
    """Trained on a box, in no durable manifest."""
    beyond_interval: int = 0
    """Of these, beyond the recipe's save interval."""
    manifests: int = 0
    lost_manifests: list[str] = field(default_factory=list)
    struck: bool = True
    state: str = ""
    """How the flow's process ended."""
    remarks: list[str] = field(default_factory=list)
    """What a person should look at, though no box is left for it."""
    error: str = ""
    """Why the program could not tell how this run ended."""
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        return bool(self.left or self.lost_manifests or self.error)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def line(self) -> str:
        parts = [
            f"{self.case:<12} {self.fault:<34} at {self.at:<16} {self.seconds:5.0f} s",
            f"boxes {self.boxes}, reaped {self.reaped}, left {self.left}, wasted ${self.wasted_usd:.4f}",
            f"steps lost {self.lost_steps} ({self.beyond_interval} beyond a save), manifests {self.manifests}",
        ]
        parts += [f"flow {self.state}"] if self.state else []
        parts += [] if self.struck else ["did not strike"]
        parts += [f"LOST MANIFESTS {', '.join(self.lost_manifests)}"] if self.lost_manifests else []
        parts += [f"ERROR {self.error}"] if self.error else []
        return "; ".join(parts + self.remarks)


def new(case: Case) -> Outcome:
    return Outcome(case.name, f"{case.fault} ({case.how})" if not case.is_market else case.fault, case.at)


def give_back(
    tick: Callable[[], object], left: Callable[[], set[int]], between: Callable[[], object]
) -> tuple[int, int]:
    """Two ticks of the reaper: how many boxes there were before the first and are after the second."""
    before = len(left())
    tick()
    between()
    tick()
    return before, len(left())


def report(outcomes: Sequence[Outcome], again: str) -> str:
    """The table, what a person should look at, and the line that counts."""
    lines = [
        f"{'fault':<38} {'runs':>4} {'struck':>6} {'boxes':>5} {'reaped':>6} {'left':>4} {'wasted $':>9} {'steps lost':>10} {'beyond save':>11}  where",
    ]
    for fault, found in sorted(_by_fault(outcomes).items()):
        where = Counter(each.at for each in found)
        lines.append(
            f"{fault:<38} {len(found):>4} {sum(each.struck for each in found):>6} {_sum(found, 'boxes'):>5} {_sum(found, 'reaped'):>6} "
            f"{_sum(found, 'left'):>4} {sum(each.wasted_usd for each in found):>9.4f} {_sum(found, 'lost_steps'):>10} "
            f"{_sum(found, 'beyond_interval'):>11}  {', '.join(f'{at} {count}' if count > 1 else at for at, count in where.items())}"
        )
    lines += [f"  {each.case}: {remark}" for each in outcomes for remark in each.remarks]
    lines += [f"  {each.line}\n    again: {again} --only {each.case}" for each in outcomes if each.bad]
    lines.append(
        f"paid ${sum(each.usd for each in outcomes):.4f}, wasted ${sum(each.wasted_usd for each in outcomes):.4f}; "
        f"manifests durable {_sum(outcomes, 'manifests')}, lost {sum(len(each.lost_manifests) for each in outcomes)}; "
        f"runs that could not be judged {sum(bool(each.error) for each in outcomes)}"
    )
    lines.append(f"left: {_sum(outcomes, 'left')} of {len(outcomes)}")
    return "\n".join(lines)


def exit_code(outcomes: Sequence[Outcome], wanted: int) -> int:
    """0 only if every run was judged and none left a box or lost a manifest."""
    return int(len(outcomes) != wanted or any(each.bad for each in outcomes))


def _by_fault(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    grouped: dict[str, list[Outcome]] = defaultdict(list)
    for each in outcomes:
        name, _, how = each.fault.partition(" (")
        grouped[name.partition("=")[0] + (f" ({how}" if how else "")].append(each)
    return grouped


def _sum(outcomes: Sequence[Outcome], name: str) -> int:
    return sum(int(getattr(each, name)) for each in outcomes)
