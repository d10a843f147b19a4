from __future__ import annotations

from collections.abc import Iterator

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_LOGGING_TO_API_ENABLED, temporary_settings

from tasks import artifacts
from tests.tasks.pretend_fixtures import (  # noqa: F401
    bucket_admin,
    bucket_server,
    clock,
    environment,
    market,
    pretend,
    store,
    whole_store,
)


@pytest.fixture(scope="module", autouse=True)
def flows_run_against_the_server(prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Results go to a home of the module; nothing here reads logs from the server, so none are on their way when it ends."""
    home = tmp_path_factory.mktemp("home")
    updates = {PREFECT_API_URL: prefect_api, PREFECT_HOME: home, PREFECT_LOGGING_TO_API_ENABLED: False}
    with temporary_settings(updates), pytest.MonkeyPatch.context() as patch:
        # Another test of this process may have shown something to nobody, after which a page stays quiet for a while.
        patch.setattr(artifacts, "shown", artifacts.Page().show)
        yield
