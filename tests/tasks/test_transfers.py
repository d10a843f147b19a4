"""Transfers as people see them while they run."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.transfers import TransferTable
from tests.tasks.pretend import Clock
from training.contract.events import Transfer
from training.contract.recipe import Budget


class Shown(TransferTable):
    """Counts what would go to the page; without a run there is none."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(Budget(max_usd=1), clock=clock)
        self.times = list[float]()

    def _show(self, now: float) -> None:
        self.times.append(now)
        super()._show(now)


@pytest.fixture
def table(clock: Clock) -> Shown:
    return Shown(clock)


def moved(done: int, seq: int, **changes: Any) -> Transfer:
    given = {
        "what": "prefetch model",
        "direction": "down",
        "total_bytes": 67_000_000_000,
        "mbps": 300.0,
        "eta_s": 1700.0,
    }
    return Transfer.model_validate({**given, "done_bytes": done, "seq": seq, **changes})


def test_a_row_tells_bytes_rate_projected_finish_and_budget(table: Shown, clock: Clock) -> None:
    table.saw(7, [moved(0, 1, mbps=0.0, eta_s=None)])
    clock.now += 100
    table.saw(7, [moved(3_750_000_000, 2)])
    assert table.rows() == [
        {
            "box": 7,
            "what": "prefetch model",
            "way": "down",
            "done": "3.75 GB of 67.00 GB",
            "%": "6",
            "Mbps": "300.00",
            "left": "28 min",
            "projected s": "1800",
            "budget s": 1500,
        }
    ]


def test_the_page_is_asked_seldom_but_at_once_for_what_begins_and_ends(table: Shown, clock: Clock) -> None:
    began = clock.now
    for second in range(12):
        table.saw(7, [moved(second, second + 1)])
        clock.now += 1
    assert [at - began for at in table.times] == [0, 5, 10]
    table.saw(7, [moved(13, 20, finished=True)])
    table.saw(7, [moved(13, 20, finished=True)])
    assert len(table.times) == 4, "the same word again is no news"


def test_the_same_transfer_on_another_box_is_a_row_of_its_own_and_what_was_never_measured_is_not_zero(
    table: Shown,
) -> None:
    for box in (7, 8):
        table.saw(box, [moved(500, 1, total_bytes=500, mbps=0.0, eta_s=None, finished=True)])
    assert [(row["box"], row["done"], row["Mbps"], row["left"]) for row in table.rows()] == [
        (7, "0.5 kB of 0.5 kB", "", "done"),
        (8, "0.5 kB of 0.5 kB", "", "done"),
    ]
