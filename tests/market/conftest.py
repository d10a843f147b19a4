from tests.tasks.pretend_fixtures import clock, market, pretend  # noqa: F401
