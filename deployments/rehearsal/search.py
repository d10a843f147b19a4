"""Evaluates the market's search language over rows: `{"field": {"op": value}}`, all filters joined by and."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

NOT_FILTERS = {
    "type",
    "order",
    "limit",
    "allocated_storage",
    "disable_bundling",
    "target_reliability",
    "client_id",
    "sort_option",
    "resource_type",
}
# Seen live (vast-cli pull request 394): the server takes `rented` and does nothing with it.
IGNORED = {"rented"}
DEFAULT_LIMIT = 64
DEFAULT_ALLOCATED_GB = 8.0

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "neq": operator.ne,
    "gt": operator.gt,
    "gte": operator.ge,
    "lt": operator.lt,
    "lte": operator.le,
}


class InvalidArgs(ValueError):
    """What the caller sent cannot be evaluated; the text goes into the reply's msg."""


def matches(row: Row, filters: Mapping[str, Any]) -> bool:
    """Whether the row passes every filter. A null field passes no comparison, except that null is false for booleans."""
    return all(_passes(row, name, ops) for name, ops in filters.items() if name not in IGNORED)


def ordered(rows: Sequence[Row], order: Any) -> list[Row]:
    """Rows sorted by `[["column", "asc"|"desc"], …]`; nulls last, ids break ties."""
    result = sorted(rows, key=lambda row: row["id"])
    for entry in reversed(order if isinstance(order, list) else []):
        if not (isinstance(entry, (list, tuple)) and len(entry) == 2 and entry[1] in ("asc", "desc")):
            raise InvalidArgs(f"order: got {entry!r}, wanted [column, asc|desc]")
        column, down = entry[0], entry[1] == "desc"
        known = [row for row in result if row.get(column) is not None]
        unknown = [row for row in result if row.get(column) is None]
        result = sorted(known, key=lambda row: row[column], reverse=down) + unknown
    return result


def _passes(row: Row, name: str, ops: Any) -> bool:
    if not isinstance(ops, Mapping):
        raise InvalidArgs(f"{name}: got {ops!r}, wanted {{op: value}}")
    seen = _column(row, name)
    return all(_holds(name, seen, op, wanted) for op, wanted in ops.items())


def _column(row: Row, name: str) -> Any:
    if name == "verified":
        return row["verification"] == "verified"
    if name == "external":
        return bool(row["external"])
    if name == "driver_version":
        return row["driver_vers"]
    if name == "geolocation":
        return row["country_code"]
    if name not in row:
        raise InvalidArgs(f"unknown field {name}")
    return row[name]


def _holds(name: str, seen: Any, op: str, wanted: Any) -> bool:
    if op in ("in", "notin"):
        if not isinstance(wanted, list):
            raise InvalidArgs(f"{name}: {op} wants a list, got {wanted!r}")
        inside = any(seen == _like(seen, w, name) for w in wanted)
        return seen is not None and (inside if op == "in" else not inside)
    if op not in _COMPARE:
        raise InvalidArgs(f"{name}: unknown operator {op}")
    return seen is not None and bool(_COMPARE[op](seen, _like(seen, wanted, name)))


def _like(seen: Any, wanted: Any, name: str) -> Any:
    """The wanted value in the column's type: the official client sends numbers and booleans as strings."""
    if wanted is None or seen is None or isinstance(wanted, type(seen)):
        return wanted
    try:
        if isinstance(seen, bool):
            return str(wanted).strip().lower() in ("true", "1", "1.0")
        if isinstance(seen, (int, float)):
            return float(wanted)
    except (TypeError, ValueError):
        raise InvalidArgs(f"{name}: got {wanted!r}, wanted a number") from None
    return str(wanted)
