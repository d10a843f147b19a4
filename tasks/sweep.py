"""What one sweep of the reaper found and did: a row a box, for a table, a page and an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tasks.domain import Label
from tasks.errors import DestroyUnverified, LiveryError
from tasks.rules.reaping import Action

CANNOT_SEE_EXIT = 4


class CannotSee(LiveryError):
    """The boxes or the leases could not be read: whether something bills for nothing is unknown."""

    exit_code = CANNOT_SEE_EXIT


@dataclass(frozen=True)
class ReapRow:
    """One box of the account and what the sweep made of it."""

    instance_id: int | None
    label: str | None
    status: str | None
    dph_usd: float | None
    """What it costs now: a stopped box its disk. None if the market does not say."""
    action: Action
    reason: str
    outcome: Literal["", "destroyed", "unverified", "would be destroyed", "next sweep", "another sweep's"] = ""
    over_cap: bool = False
    """Nothing is wrong with it, but the account spends too fast."""

    @property
    def flow_run_id(self) -> str | None:
        label = Label.parse(self.label)
        return label.flow_run_id if label else None


@dataclass(frozen=True)
class Sweep:
    rows: tuple[ReapRow, ...]
    dry_run: bool
    promised_usd_h: float = 0.0
    """$/h of boxes that may exist behind create calls without an answer."""
    blind: str = ""
    """Why the bucket could not be asked; empty if it could."""

    @property
    def unverified(self) -> tuple[ReapRow, ...]:
        return tuple(row for row in self.rows if row.outcome == "unverified")

    @property
    def unknown(self) -> tuple[ReapRow, ...]:
        return tuple(row for row in self.rows if row.action == "unknown")

    @property
    def waiting(self) -> tuple[ReapRow, ...]:
        return tuple(row for row in self.rows if row.outcome == "next sweep")

    @property
    def dph_usd(self) -> float:
        """$/h of all boxes that are left, as far as their prices are stated."""
        return sum(row.dph_usd or 0.0 for row in self.rows if row.outcome != "destroyed")

    @property
    def sentence(self) -> str:
        unpriced = sum(row.dph_usd is None and row.outcome != "destroyed" for row in self.rows)
        return (
            f"{len(self.rows)} boxes, ${self.dph_usd:.3f}/h"
            + (f" and {unpriced} whose price is not stated" if unpriced else "")
            + (
                f", ${self.promised_usd_h:.3f}/h more may be behind create calls without an answer"
                if self.promised_usd_h
                else ""
            )
        )

    def table(self) -> list[dict[str, object]]:
        return [
            {
                "box": row.instance_id,
                "label": row.label or "",
                "status": row.status or "",
                "$/h": row.dph_usd,
                "verdict": row.action,
                "reason": row.reason,
                "outcome": row.outcome,
            }
            for row in self.rows
        ]

    def raise_if_bad(self) -> None:
        """DestroyUnverified if a condemned box may still bill, CannotSee if a box could not be judged."""
        if self.unverified:
            raise DestroyUnverified(f"boxes {ids_of(self.unverified)} may still bill; look at the market's console")
        if self.waiting and not self.dry_run:
            raise DestroyUnverified(
                f"boxes {ids_of(self.waiting)} are condemned and wait for the next sweep: more than LIVERY_MAX_REAP, or than one has time for; "
                "so many at once may be a fault of ours: see a dry run"
            )
        if self.unknown:
            raise CannotSee(f"boxes {ids_of(self.unknown)} could not be judged: {self.unknown[0].reason}")
        if self.blind:
            raise CannotSee(f"leases and intents could not be read: {self.blind}")


def text_table(result: Sweep) -> str:
    """The sweep for a terminal or a cron mail."""
    lines = [f"{'box':>10} {'$/h':>7}  {'verdict':<8} {'outcome':<18} reason"]
    for row in result.rows:
        price = "?" if row.dph_usd is None else f"{row.dph_usd:.3f}"
        lines.append(
            f"{row.instance_id or '-':>10} {price:>7}  {row.action:<8} {row.outcome:<18} {row.reason} [{row.label or 'no label'}]"
        )
    lines.append(f"{result.sentence}{' (dry run)' if result.dry_run else ''}")
    return "\n".join(lines)


def ids_of(rows: Sequence[ReapRow]) -> str:
    return ", ".join(str(row.instance_id or "without id") for row in rows)
