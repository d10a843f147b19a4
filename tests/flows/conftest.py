from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from prefect.testing.utilities import prefect_test_harness

from tests.tasks.pretend_fixtures import (  # noqa: F401
    bucket_admin,
    bucket_server,
    clock,
    environment,
    market,
    pretend,
    store,
)


@pytest.fixture(scope="session", autouse=True)
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One server for all tests of flows; the harness replaces the database, not the home, so that is set here."""
    os.environ["PREFECT_HOME"] = str(tmp_path_factory.mktemp("prefect"))
    # The thirty seconds that are the default are too few on a busy machine.
    with prefect_test_harness(server_startup_timeout=120):
        yield
