"""The live lease of a run: an object in the bucket, renewed by a thread of the flow while it lives.

Only who renews it is alive, whatever any database says of the run; the reaper destroys the boxes of a lease that has run out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from pydantic import ValidationError

from tasks.domain import Lease
from tasks.rules.reaping import LeaseSeen
from training.box.store import Store, StoreError
from training.contract import layout

log = logging.getLogger(__name__)


def write_lease(store: Store, lease: Lease) -> None:
    store.put_bytes(layout.lease(lease.flow_run_id), lease.model_dump_json().encode())


def read_lease(store: Store, flow_run_id: str) -> Lease | None:
    """None only if the bucket says that there is none; StoreError if it does not answer or holds something else."""
    data = store.get_bytes(layout.lease(flow_run_id))
    if data is None:
        return None
    try:
        return Lease.model_validate_json(data)
    except ValidationError:
        raise StoreError(f"{layout.lease(flow_run_id)} is not a lease") from None


def lease_of(key: str, content: bytes | StoreError | None) -> LeaseSeen:
    """What reading a lease's object gave."""
    if content is None:
        return LeaseSeen()
    if isinstance(content, StoreError):
        return LeaseSeen(problem=str(content))
    try:
        return LeaseSeen(Lease.model_validate_json(content))
    except ValidationError:
        return LeaseSeen(problem=f"{key} is not a lease")


def look_for_lease(store: Store, flow_run_id: str) -> LeaseSeen:
    """The lease, its absence, or why neither is known."""
    try:
        return LeaseSeen(read_lease(store, flow_run_id))
    except StoreError as error:
        return LeaseSeen(problem=str(error))


def hold(store: Store, flow_run_id: str, run: str, *, now: float, until: float, max_age_s: float | None = None) -> None:
    """Keep the run's box for debugging until then; the reaper destroys it afterwards. StoreError if that cannot be promised."""
    held = Lease(
        flow_run_id=flow_run_id, run=run, renewed_at=now, expires_at=now, hold_until=until, max_age_s=max_age_s
    )
    write_lease(store, held)


def end_lease(store: Store, flow_run_id: str, now: float, *, of_before: float | None = None) -> None:
    """Nobody answers for the run's boxes any more: the reaper need not wait for the lease to run out. A hold stands, and so does a lease
    that was renewed after `of_before`: the flow run was started again, and lives. StoreError."""
    lease = read_lease(store, flow_run_id)
    if lease is not None and of_before is not None and lease.renewed_at > of_before:
        return
    if lease is not None and lease.hold_until is None and lease.expires_at > now:
        write_lease(store, lease.model_copy(update={"expires_at": now}))


class LeaseThread:
    """Renews the lease until it is stopped. `on_renew` tells the box as well, for its dead-man switch."""

    def __init__(
        self,
        store: Store,
        flow_run_id: str,
        run: str,
        *,
        lease_s: float,
        renew_s: float,
        on_renew: Callable[[], None] = lambda: None,
        progress_at: Callable[[], float | None] = lambda: None,
        max_age_s: float | None = None,
        patience_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._flow_run_id, self._run = store, flow_run_id, run
        self._lease_s, self._renew_s = lease_s, renew_s
        self._max_age_s, self._patience_s = max_age_s, patience_s
        self._on_renew, self._progress_at, self._clock = on_renew, progress_at, clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="lease", daemon=True)
        self._telling: threading.Thread | None = None

    def start(self) -> None:
        """Write the first lease, then renew in the background. StoreError if not even the first can be written: then nothing may be rented."""
        self.renew()
        self._thread.start()

    def renew(self) -> None:
        now = self._clock()
        write_lease(
            self._store,
            Lease(
                flow_run_id=self._flow_run_id,
                run=self._run,
                renewed_at=now,
                expires_at=now + self._lease_s,
                progress_at=self._progress_at(),
                max_age_s=self._max_age_s,
                patience_s=self._patience_s,
            ),
        )

    def stop(self) -> None:
        """No renewal begins after this returns. What is stuck in a dead network is left behind: these are daemons."""
        self._stop.set()
        for thread in (self._thread, self._telling):
            if thread is not None and thread.is_alive():
                thread.join(timeout=5)

    def _loop(self) -> None:
        while not self._stop.wait(self._renew_s):
            try:
                self.renew()
            except Exception as error:  # noqa: BLE001 - protects a healthy box: it is reaped when the thread that renews its lease has died
                log.warning(
                    "lease not renewed, tried again in %.0f s: %s: %s", self._renew_s, type(error).__name__, error
                )
            self._tell()

    def _tell(self) -> None:
        """Beside the renewals: reaching a box that swallows connections, or its market, can take longer than the lease."""
        if self._telling is None or not self._telling.is_alive():
            self._telling = threading.Thread(target=self._told, name="lease-box", daemon=True)
            self._telling.start()

    def _told(self) -> None:
        try:
            self._on_renew()
        except Exception as error:  # noqa: BLE001 - whatever reaching the box may raise, the next renewal tries again
            log.warning("the box was not told that the run lives: %s: %s", type(error).__name__, error)
