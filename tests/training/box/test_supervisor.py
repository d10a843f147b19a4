from __future__ import annotations

import fcntl
import threading
from pathlib import Path

from training.box import supervisor


def test_somebody_who_only_looks_does_not_keep_a_job_from_starting(tmp_path: Path) -> None:
    """The dead-man and every poll hold a job's lock for an instant; a start in that instant was told that another job runs."""
    looker, starter = (tmp_path / "lock").open("a+"), (tmp_path / "lock").open("a+")
    with looker, starter:
        fcntl.flock(looker, fcntl.LOCK_SH)
        done = threading.Timer(0.05, lambda: fcntl.flock(looker, fcntl.LOCK_UN))
        done.start()
        assert supervisor._taken(starter)
        done.join()


def test_a_lock_that_a_job_holds_is_not_taken(tmp_path: Path) -> None:
    holder, starter = (tmp_path / "lock").open("a+"), (tmp_path / "lock").open("a+")
    with holder, starter:
        fcntl.flock(holder, fcntl.LOCK_SH)
        assert not supervisor._taken(starter)
