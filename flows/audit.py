"""The audit: once a day each run of the last days is held against the market's charges, and receipts are made whole.

`python -m flows audit` does the same where there is no Prefect.
"""

from __future__ import annotations

from prefect import flow

from tasks import artifacts
from tasks.audit import DAYS, audit_with
from tasks.log import guard_secrets
from tasks.settings import settings


@flow(name="audit", flow_run_name="audit of {days} days", timeout_seconds=1800, log_prints=True)
def audit(days: float = DAYS) -> str:
    """Prove that billing stopped, and finish the receipts.

    Fails if a box was billed after its destroy, or is nobody's.

    Args:
        days: how far back to look
    """
    current = settings()
    guard_secrets(current)
    found = audit_with(current, days=days)
    artifacts.show_audit(found.table(), found.headline)
    print(found.text())
    found.raise_if_bad()
    return found.headline
