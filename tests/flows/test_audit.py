from __future__ import annotations

import json

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.audit import audit
from tests.tasks.pretend import Pretend


def test_the_audit_shows_what_it_found_and_fails_where_something_bills_for_nobody(
    pretend: Pretend, environment: dict[str, str]
) -> None:
    assert audit(return_state=True).is_completed()
    pretend.clock.now = 1_790_000_000
    stray = pretend.rented()
    pretend.market.contracts[stray].label = None
    state = audit(days=4000, return_state=True)
    assert state.is_failed() and f"box {stray} was billed and is nobody's" in str(state.message)
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["audit"])))
    newest = max(found, key=lambda artifact: artifact.created)
    (row,) = json.loads(str(newest.data))
    assert row["flow run"] == f"box-{stray}" and row["dollars"].startswith("$")


def test_the_audit_takes_days_and_nothing_else() -> None:
    assert set(audit.parameters.properties) == {"days"}
    with pytest.raises(Exception, match="days"):
        audit.validate_parameters({"days": "many"})
