"""The listing of instances: filters, pages, the counts that prove it complete, and the faults that garble it."""

from __future__ import annotations

import base64
import binascii
import json
from collections import Counter
from typing import Any

from deployments.rehearsal import search
from deployments.rehearsal.api.rows import instance_row
from deployments.rehearsal.api.transport import (
    Reply,
    Request,
    Route,
    deprecated,
    error,
    json_query,
    number,
    too_frequent,
)
from deployments.rehearsal.market import Contract, Market

PAGE_ROWS = 25
PAGE_ROWS_IF_NOT_POSITIVE = 5
STORED_COLUMNS = {
    "id",
    "label",
    "actual_status",
    "intended_status",
    "cur_state",
    "gpu_name",
    "verification",
    "machine_id",
    "host_id",
    "start_date",
    "image_uuid",
}
NULLABLE = (
    "label",
    "actual_status",
    "status_msg",
    "ports",
    "public_ipaddr",
    "start_date",
    "end_date",
    "extra_env",
    "uptime_mins",
    "gpu_util",
    "gpu_temp",
    "mem_usage",
    "geolocation",
)
Row = dict[str, Any]


class Listings:
    def __init__(self, market: Market) -> None:
        self.market = market
        self.routes = [
            Route("GET", "/api/v0/instances/", self.list_v0),
            Route("GET", "/api/v1/instances/", self.list_v1, every_s=1.0),
        ]

    def list_v0(self, request: Request) -> Reply:
        return deprecated("GET /api/v0/instances/ is deprecated. Use GET /api/v1/instances/.")

    def list_v1(self, request: Request) -> Reply:
        faults = self.market.faults
        if faults.take("list.410") is not None:
            return deprecated("This endpoint is deprecated.")
        if self.market.alive() and faults.take("list.empty_but_success") is not None:
            return Reply(body=_listing([], 0, {}, None))
        if request.query.get("after_token") and faults.take("list.page2_429") is not None:
            return too_frequent(1.0)
        filters = json_query(request, "select_filters", dict)
        if unknown := set(filters) - STORED_COLUMNS:
            raise search.InvalidArgs(f"select_filters: cannot filter on {sorted(unknown)}")
        rows = [instance_row(self.market, contract) for contract in self._listed()]
        return self._page(request, [row for row in rows if _passes(row, filters)])

    def _listed(self) -> list[Contract]:
        """The living boxes as far as this endpoint knows: a new one may be missing yet, one that is gone may still be there."""
        now, found = self.market.clock(), []
        for contract in self.market.contracts.values():
            stale_s = float(contract.effects.get("list.stale_after_destroy", 0.0))
            ghost = contract.ended_at is not None and now < contract.ended_at + stale_s
            hidden = now < contract.created_at + float(contract.effects.get("list.lag", 0.0))
            if ghost or (not contract.gone and not hidden and not self.market.gone_when_looked_at(contract)):
                found.append(contract)
        return found

    def _page(self, request: Request, rows: list[Row]) -> Reply:
        order = json_query(request, "order_by", list)
        column, descending = "id", False
        if order and isinstance(order[0], dict):
            column, descending = str(order[0].get("col", "id")), order[0].get("dir") == "desc"
        rows.sort(key=lambda row: (_sortable(row.get(column)), row["id"]), reverse=descending)
        limit = int(number(request.query.get("limit", PAGE_ROWS), "limit"))
        limit = min(limit, PAGE_ROWS) if limit > 0 else PAGE_ROWS_IF_NOT_POSITIVE
        start = 0
        if token := request.query.get("after_token"):
            after = _cursor_key(token)
            if after is None:
                return Reply(400, error("invalid_token", "Invalid paging cursor."))
            passed = [(_sortable(row.get(column)), row["id"]) for row in rows]
            start = sum(1 for key in passed if (key >= after if descending else key <= after))
        page = rows[start : start + limit]
        more = start + limit < len(rows)
        token_out = _cursor_token(page[-1].get(column), page[-1]["id"]) if more and page else None
        return Reply(body=self._garbled(page, rows, token_out, request))

    def _garbled(self, page: list[Row], rows: list[Row], token: str | None, request: Request) -> Row:
        faults, total = self.market.faults, len(rows)
        counts = Counter(str(row["label"] or "") for row in rows)
        if page and (missing := faults.take("list.missing_row")) is not None:
            missing_id = int(missing) or max(row["id"] for row in page)
            page = [row for row in page if row["id"] != missing_id]
        if faults.take("list.bad_total") is not None:
            total += 1
        if page and faults.take("list.null_fields") is not None:
            page = [{**row, **dict.fromkeys(NULLABLE)} for row in page]
        if page and faults.take("list.one_malformed_row") is not None:
            broken = {"machine_id": "n/a", "start_date": "yesterday", "dph_total": {"value": None}, "ports": 7}
            page = [{**page[0], **broken}, *page[1:]]
        if select := json_query(request, "select_cols", list):
            page = page if "*" in select else [{name: row.get(name) for name in select} for row in page]
        return _listing(page, total, dict(counts), token)


def _listing(page: list[Row], total: int, labels: dict[str, int], token: str | None) -> Row:
    return {
        "success": True,
        "instances_found": len(page),
        "total_instances": total,
        "label_counts": labels,
        "next_token": token,
        "instances": page,
    }


def _passes(row: Row, filters: dict[str, Any]) -> bool:
    """The listing's filters; unlike the search's, a label may be compared with null."""
    for name, ops in filters.items():
        if not isinstance(ops, dict):
            raise search.InvalidArgs(f"{name}: got {ops!r}, wanted {{op: value}}")
        for op, wanted in ops.items():
            if wanted is None and op in ("eq", "neq"):
                if (row[name] is None) != (op == "eq"):
                    return False
            elif not search.matches({name: row[name]}, {name: {op: wanted}}):
                return False
    return True


def _sortable(value: Any) -> tuple[int, Any]:
    """Orders nulls before everything and never compares text with numbers."""
    if value is None:
        return (0, 0)
    return (1, float(value)) if isinstance(value, (int, float)) else (2, str(value))


def _cursor_token(value: Any, id: int) -> str:
    return base64.urlsafe_b64encode(json.dumps([value, id]).encode()).decode()


def _cursor_key(token: str) -> tuple[tuple[int, Any], int] | None:
    try:
        value, id = json.loads(base64.urlsafe_b64decode(token))
        return _sortable(value), int(id)
    except (ValueError, TypeError, binascii.Error):
        return None
