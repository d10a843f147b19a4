"""The account: who the key belongs to, its SSH keys, its charges."""

from __future__ import annotations

from typing import Any

from deployments.rehearsal import search
from deployments.rehearsal.api.transport import (
    Reply,
    Request,
    Route,
    error,
    invalid_args,
    json_query,
    number,
    parse_body,
    public_key,
)
from deployments.rehearsal.market import Contract, Market, SshKey


class Account:
    def __init__(self, market: Market) -> None:
        self.market = market
        self.routes = [
            Route("GET", "/api/v0/ssh/", self.keys),
            Route("POST", "/api/v0/ssh/", self.add_key, every_s=1.0),
            Route("DELETE", "/api/v0/ssh/{id}/", self.remove_key),
            Route("GET", "/api/v0/users/current/?", self.user),
            Route("GET", "/api/v0/charges/", self.charges, every_s=1.0),
        ]

    def keys(self, request: Request) -> Reply:
        return Reply(body=[key_row(k, self.market.user_id) for k in self.market.account_ssh_keys])

    def add_key(self, request: Request) -> Reply:
        key = self.market.add_account_key(public_key(parse_body(request)))
        return Reply(body={"success": True, "key": key_row(key, self.market.user_id)})

    def remove_key(self, request: Request, id: int) -> Reply:
        keys = self.market.account_ssh_keys
        if id not in {k.id for k in keys}:
            return Reply(404, error("not_found", f"SSH key {id} not found."))
        self.market.account_ssh_keys = [k for k in keys if k.id != id]
        return Reply(body={"success": True})

    def user(self, request: Request) -> Reply:
        if "owner" in request.query:
            return invalid_args("owner is not a parameter")
        market = self.market
        other = market.faults.take("list.wrong_account") is not None
        return Reply(
            body={
                "id": market.user_id + (1 if other else 0),
                "email": "rehearsal@localhost",
                "username": "rehearsal",
                "balance": 0.0,
                "credit": round(market.remaining_credit_usd(), 6),
                "ssh_key": market.account_ssh_keys[-1].text if market.account_ssh_keys else None,
                "key_id": 1,
                "has_billing": True,
                "total_spend": -round(market.total_usd(), 6),
            }
        )

    def charges(self, request: Request) -> Reply:
        filters = json_query(request, "select_filters", dict)
        day = filters.get("day")
        if not (isinstance(day, dict) and {"gte", "lte"} <= set(day)):
            raise search.InvalidArgs("select_filters: day needs gte and lte")
        since, until = number(day["gte"], "day.gte"), number(day["lte"], "day.lte")
        rows = [
            self._charge(contract)
            for contract in self.market.contracts.values()
            if contract.created_at <= until and (contract.ended_at or until) >= since and self._booked(contract)
        ]
        limit = int(number(request.query.get("limit", 100), "limit"))
        first = int(number(request.query.get("after_token", 0), "after_token"))
        page, last = rows[first : first + limit], first + limit
        body = {"success": True, "count": len(page), "total": len(rows), "results": page}
        return Reply(body=body | ({"next_token": str(last)} if last < len(rows) else {}))

    def _booked(self, contract: Contract) -> bool:
        lag_s = self.market.faults.peek("charges.lag")
        if lag_s is None:
            return True
        self.market.faults.note("charges.lag")
        return contract.ended_at is not None and self.market.clock() >= contract.ended_at + float(lag_s)

    def _charge(self, contract: Contract) -> dict[str, Any]:
        end = contract.ended_at if contract.ended_at is not None else self.market.clock()
        items = self.market.items_usd(contract)
        behind_s = self.market.faults.peek("charges.behind")
        if behind_s is not None:
            self.market.faults.note("charges.behind")
            whole_s, booked_s = end - contract.created_at, self.market.clock() - float(behind_s) - contract.created_at
            part = max(0.0, min(1.0, booked_s / whole_s)) if whole_s else 1.0
            items, end = {name: usd * part for name, usd in items.items()}, contract.created_at + whole_s * part
        return {
            "type": "instance",
            "source": f"instance-{contract.id}",
            "description": f"Instance {contract.id}",
            "metadata": {"label": contract.label, "machine_id": contract.offer.machine_id},
            "start": contract.created_at,
            "end": end,
            "amount": sum(items.values()),
            "items": [{"type": name, "amount": amount} for name, amount in items.items()],
        }


def key_row(key: SshKey, user_id: int) -> dict[str, Any]:
    return {"id": key.id, "user_id": user_id, "key": key.text, "public_key": key.text, "deleted_at": None}
