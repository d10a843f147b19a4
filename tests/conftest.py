"""How the files are dealt out to the workers, and the one Prefect server of the tests that need one."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

# Whole flows. A Prefect server needs as long to start as a flow to fly, so the files that need one are two workers' work: the faults
# alone take as long as everything else of them.
FAULTS, SERVED = "tests/journeys/test_faults.py", "tests/journeys/test_served.py"
WITH_SERVER = ("tests/journeys/", "tests/flows/", "tests/deployments/test_automations.py")
MUSEUM = "tests/training/test_bypasses.py"
# Against real servers, boxes and clocks.
WAITING = ("tests/deployments/", "tests/market/", "tests/oracle/", "tests/tasks/", "tests/training/box/")
# One worker for both, since they look at the same minute of training, or of the interpreter.
SHARED = {
    "tests/training/test_resume.py": "tests/training/test_cascade.py",
    "tests/kernels/test_head.py": "tests/kernels/test_lean.py",
}

# A view of a run that is shown where no server is named would start one of Prefect's own: 16 CPU-seconds for each worker, and nobody looks at it.
os.environ["PREFECT_SERVER_ALLOW_EPHEMERAL_MODE"] = "false"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """What the tests' modules have imported stays, and is set apart: the garbage collector walks it again and again, a fifth of what tests with models
    take."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole flows first, since they are the longest; then files that compute, of these the long ones first, and files that wait in turn: a core has
    enough to do with one of each."""
    long = {_group(item.nodeid) for item in items if item.get_closest_marker("train")} | {MUSEUM}
    groups = dict.fromkeys(_group(item.nodeid) for item in items if _group(item.nodeid) not in (FAULTS, SERVED))
    waiting = [group for group in groups if group.startswith(WAITING)]
    computing = sorted(
        (group for group in groups if not group.startswith(WAITING)), key=lambda group: group not in long
    )
    order = [FAULTS, SERVED, *itertools.chain.from_iterable(itertools.zip_longest(computing, waiting))]
    items.sort(key=lambda item: order.index(_group(item.nodeid)))


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


_SERVER, _server = pytest.StashKey[str](), contextlib.ExitStack()


@pytest.fixture(scope="module")
def prefect_api(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a Prefect server of this worker, with a home of its own, started as the product starts it."""
    from deployments.up import running

    stash = request.config.stash
    if _SERVER not in stash:
        with contextlib.chdir(tmp_path_factory.mktemp("prefect")):
            stash[_SERVER] = _server.enter_context(running(private_server=True, serve=False, with_market=False)).api_url
    return stash[_SERVER]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The server ends with the whole flows: one that nobody asks still takes a fortieth of a core."""
    yield
    if _SERVER in item.config.stash and (nextitem is None or _group(nextitem.nodeid) not in (FAULTS, SERVED)):
        del item.config.stash[_SERVER]
        _server.close()


def pytest_unconfigure() -> None:
    _server.close()
