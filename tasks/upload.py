"""Uplink monitoring: a checkpoint is worth nothing until it is in the bucket, and an uplink can die in the middle of a run.

Every upload is judged against the recipe's budget, while training goes on as well as after it. What is done about one that will not make
it is a question of dollars (tasks.rules.uplink): it is waited for, the box is told to send less, or it is left for another.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable

from tasks.errors import TransferFailed
from tasks.phase import RunView
from tasks.remote.ssh import Remote
from tasks.rules.stalls import TRIES_S, Sample, TransferVerdict, judge_transfer
from tasks.rules.uplink import Decision, Predicament, decide
from training.box.store import Store, StoreError
from training.contract import layout
from training.contract.claims import ClaimError, newest_claim
from training.contract.events import Transfer
from training.contract.recipe import Budget

log = logging.getLogger(__name__)
# What has been decided is asked again so often: prices, offers and rates change.
_AGAIN_S = 60.0
_PUT_S = 60.0


def tell_to_send_less(remote: Remote, reason: str) -> None:
    """From now on the box sends the light form of its checkpoints. TransferFailed or BoxLost if that cannot be written there."""
    word = json.dumps({"send": "light", "reason": reason}).encode()
    remote.put(word, layout.BOX_UPLINK, timeout_s=_PUT_S)


def drop_half_sent(store: Store, run: str, flow_run_id: str) -> None:
    """Abort what the boxes of this flow run left half sent: the bucket bills it until then, and no box goes on from it. Call it when they are
    gone. If another flow run has claimed the run meanwhile, what is half sent may be its own and is left alone."""
    try:
        claim = newest_claim(store, run)
        if claim is None or claim.flow_run_id != flow_run_id:
            return
        if count := store.abort_uploads(f"{layout.run(run)}/"):
            log.info("%d uploads that were half done are taken out of the bucket", count)
    except (StoreError, ClaimError) as error:
        log.warning("uploads that were half done may still lie in the bucket: %s", error)


class UplinkWatch:
    """Judges the uploads of one box against `budget.upload_s` and `budget.stall_s`. Call it once a poll.

    `predicament` gathers what a decision needs (view, upload, Mbps); `send_less` tells the box; `decided` hears each new decision.
    """

    def __init__(
        self,
        budget: Budget,
        clock: Callable[[], float],
        predicament: Callable[[RunView, Transfer, float], Predicament],
        send_less: Callable[[str], None],
        decided: Callable[[Decision], None],
    ) -> None:
        self._budget, self._clock = budget, clock
        self._predicament, self._send_less, self._decided = predicament, send_less, decided
        self._idle_since: float | None = None
        self._upload: tuple[str, int] = ("", 0)
        self._samples: list[Sample] = []
        self._began = 0.0
        self._decision: Decision | None = None
        self._decided_at = 0.0

    def __call__(self, view: RunView) -> None:
        """TransferFailed if the upload stands still, or if leaving the box is the cheapest way to end it."""
        now, upload = self._clock(), view.uploading()
        if upload is not None:
            self._idle_since = None
            self._follow(upload, now)
            verdict = self._judged(upload, now)
            if verdict.state == "ok":
                self._decision = None
            else:
                self._act(view, upload, verdict, now)
        elif view.awaits_upload():
            self._await_its_turn(now)
        else:
            self._idle_since = None

    def _await_its_turn(self, now: float) -> None:
        """Nothing is being sent, and a phase that has ended is not durable: it is being hashed, or its manifest is on its way."""
        self._idle_since = now if self._idle_since is None else self._idle_since
        if now - self._idle_since > self._budget.upload_s:
            raise TransferFailed(
                f"upload: nothing was sent for {now - self._idle_since:.0f} s after training, budget.upload_s = {self._budget.upload_s}"
            )

    def _follow(self, upload: Transfer, now: float) -> None:
        if (upload.what, upload.total_bytes) != self._upload:
            self._upload, self._samples, self._began = (upload.what, upload.total_bytes), [], now
            self._decision = None
        # A part is acknowledged whole: four of them side by side on a slow link say nothing for a minute and a half.
        moved = upload.line_bytes or upload.done_bytes
        if not self._samples or moved != self._samples[-1].done_bytes:
            self._samples.append(Sample(now, moved))

    def _judged(self, upload: Transfer, now: float) -> TransferVerdict:
        return judge_transfer(
            upload.what,
            self._samples,
            upload.total_bytes,
            started_at=self._began,
            now=now,
            budget_s=self._budget.upload_s,
            # The box itself ends a transfer that stalls and tries other settings first.
            stall_s=TRIES_S * self._budget.stall_s,
            done_bytes=upload.done_bytes,
        )

    def _mean_mbps(self, now: float) -> float:
        moved = self._samples[-1].done_bytes - self._samples[0].done_bytes
        return moved * 8 / 1e6 / (now - self._began) if now > self._began else 0.0

    def _act(self, view: RunView, upload: Transfer, verdict: TransferVerdict, now: float) -> None:
        if verdict.state == "stalled":
            raise TransferFailed(verdict.sentence)
        if self._decision is not None and now - self._decided_at < _AGAIN_S:
            return
        mbps = verdict.mbps or self._mean_mbps(now)
        if mbps == 0:
            return  # nothing has moved yet, so there is nothing to project by; the stall rule ends it
        before, self._decision = self._decision, decide(self._predicament(view, upload, mbps))
        self._decided_at = now
        sentence = self._decision.sentence
        if before is None or before.way != self._decision.way:
            log.warning("%s; %s", verdict.sentence, sentence)
            self._decided(self._decision)
            if self._decision.way == "light":
                self._send_less(sentence)
        if self._decision.way == "move":
            raise TransferFailed(sentence)
