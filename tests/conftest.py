"""How the files are dealt out to the workers, and the one Prefect server of the tests that need one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

# Whole flows. A Prefect server needs as long to start as a flow to fly, so the files that need one are two workers' work: the faults
# alone take as long as everything else of them.
FAULTS, SERVED = "tests/journeys/test_faults.py", "tests/journeys/test_served.py"
WITH_SERVER = ("tests/journeys/", "tests/flows/", "tests/deployments/test_automations.py")
# One worker for both, since they look at the same minute of training.
SHARED = {"tests/training/test_resume.py": "tests/training/test_cascade.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files begin first, so that they are not the tail."""
    long = {_file(item.nodeid) for item in items if item.get_closest_marker("train")}
    first = (FAULTS, SERVED)
    items.sort(
        key=lambda item: (
            first.index(_group(item.nodeid)) if _group(item.nodeid) in first else len(first),
            _file(item.nodeid) not in long,
        )
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole files to a worker, so that a module's fixtures are made once; some files go together."""
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(nodeid)

    return Grouped(config, log)


def _group(nodeid: str) -> str:
    file = _file(nodeid)
    return SERVED if file.startswith(WITH_SERVER) and file != FAULTS else SHARED.get(file, file)


def _file(nodeid: str) -> str:
    return nodeid.split("::")[0]


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prefect server of this session, with a home of its own, started as the product starts it."""
    from deployments.up import running

    with contextlib.ExitStack() as stack:
        with contextlib.chdir(tmp_path_factory.mktemp("prefect")):
            up = stack.enter_context(running(private_server=True, serve=False, with_market=False))
        yield up.api_url
