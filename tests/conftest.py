"""Which files begin first: the workers take whole files in this order, so that the long ones are not the tail."""

from __future__ import annotations

import pytest

FIRST = (
    "tests/journeys/test_faults.py",
    "tests/training/test_cascade.py",
    "tests/journeys/test_served.py",
    "tests/training/test_runner.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(_file(item)) if _file(item) in FIRST else len(FIRST))


def _file(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]
