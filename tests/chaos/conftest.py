from __future__ import annotations

from tests.tasks.pretend_fixtures import (  # noqa: F401 - fixtures
    bucket_admin,
    bucket_server,
    clock,
    market,
    pretend,
    store,
    whole_store,
)
