"""A box that does not answer: the market's word on it decides long before its silence would."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tasks.domain import Instance
from tasks.errors import BoxLost, MarketError
from tasks.rules.interruption import OUT_OF_SIGHT_S, lost_by_row

log = logging.getLogger(__name__)
_ASK_EVERY_S = 10.0


class MarketWord:
    """Asks the market about one silent box, at most every ten seconds: asking costs one of its rate-limited calls. `pace` shortens the pauses, as
    the rehearsal's clock needs it."""

    def __init__(
        self,
        instance_id: int,
        show: Callable[[int], Instance | None],
        *,
        pace: float = 1.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._instance_id, self._show, self._pace, self._clock = instance_id, show, min(1.0, pace), clock
        self._asked_at = 0.0

    def __call__(self, silent_s: float) -> None:
        """BoxLost if the market says that the box is gone or taken back, or has not seen it either for a while. An unsure answer decides nothing."""
        now = self._clock()
        if now - self._asked_at < _ASK_EVERY_S * self._pace:
            return
        self._asked_at = now
        try:
            row = self._show(self._instance_id)
        except MarketError as error:
            log.warning("box %d does not answer, nor does the market: %s", self._instance_id, error)
            return
        loss = lost_by_row(row, now=now, silent_s=silent_s, out_of_sight_s=OUT_OF_SIGHT_S * self._pace)
        if loss is not None:
            raise BoxLost(f"box {self._instance_id}: {loss.sentence}", blame=loss.blame, fault=loss.fault)
        said = row.actual_status if row is not None else None
        log.warning("box %d does not answer; the market says '%s', still waiting", self._instance_id, said)
