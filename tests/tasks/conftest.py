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
