"""Which tests share a worker, and which begin first: a session's servers are started once, and the long ones are not the tail."""

from __future__ import annotations

import pytest

# Longest first; the other files follow as they come. A group runs on one worker, so its module's and session's servers are started once.
FIRST = (
    "tests/journeys/test_faults.py",
    "tests/training/test_cascade.py",
    "tests/journeys/test_served.py",
    "tests/training/test_runner.py",
)
GROUPS = {"tests/flows/": "prefect harness", "tests/journeys/test_bad_input.py": "tests/journeys/test_faults.py"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(_file(item))))
    items.sort(key=lambda item: FIRST.index(_group(_file(item))) if _group(_file(item)) in FIRST else len(FIRST))


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


def _group(file: str) -> str:
    return next((group for prefix, group in GROUPS.items() if file.startswith(prefix)), file)
