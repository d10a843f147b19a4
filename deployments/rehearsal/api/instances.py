"""One instance: shown, changed, restarted, given keys, destroyed."""

from __future__ import annotations

import json
import secrets

from deployments.rehearsal import search
from deployments.rehearsal.api.account import key_row
from deployments.rehearsal.api.offers import PRICE_RANGE_USD
from deployments.rehearsal.api.rows import instance_row
from deployments.rehearsal.api.transport import (
    Reply,
    Request,
    Route,
    error,
    no_such_instance,
    number,
    parse_body,
    public_key,
    too_frequent,
)
from deployments.rehearsal.market import Contract, Market

LABEL_MAX_MANAGE = 1024
DESTROY_EVERY_S = 3.0


class Instances:
    def __init__(self, market: Market, base_url: str) -> None:
        self.market = market
        self.base_url = base_url
        self.log_tokens: dict[str, int] = {}
        one = "/api/v0/instances/{id}/"
        self.routes = [
            Route("GET", one, self.show, every_s=2.0, for_instance_key=True),
            Route("PUT", one, self.manage, every_s=1.0, for_instance_key=True),
            Route("DELETE", one, self.destroy, every_s=DESTROY_EVERY_S, for_instance_key=True),
            Route("DELETE", "/api/v0/instances/", self.destroy_many, every_s=DESTROY_EVERY_S),
            Route("PUT", "/api/v0/instances/reboot/{id}/", self.reboot, every_s=1.0),
            Route("PUT", "/api/v0/instances/recycle/{id}/", self.recycle, every_s=1.0),
            Route("PUT", "/api/v0/instances/bid_price/{id}/", self.bid_price, every_s=5.5),
            Route("PUT", "/api/v0/instances/request_logs/{id}/?", self.request_logs),
            Route("GET", one + "ssh/", self.keys),
            Route("POST", one + "ssh/", self.attach_key),
            Route("DELETE", one + "ssh/{key_id}/", self.detach_key, every_s=2.0),
        ]

    def show(self, request: Request, id: int) -> Reply:
        faults, contract = self.market.faults, self._living(id)
        if contract is None:
            return Reply(body={"instances": None})
        if contract.show_lag_polls > 0:
            contract.show_lag_polls -= 1
            return no_such_instance(id)
        if faults.take("show.null") is not None:
            return Reply(body={"instances": None})
        if faults.take("show.empty_list") is not None:
            return Reply(body={"instances": []})
        gone = self.market.gone_when_looked_at(contract)
        return Reply(body={"instances": None if gone else instance_row(self.market, contract)})

    # Change and destroy

    def manage(self, request: Request, id: int) -> Reply:
        contract, body = self._living(id), parse_body(request)
        if contract is None:
            return no_such_instance(id)
        if "label" in body:
            if len(str(body["label"])) > LABEL_MAX_MANAGE:
                return Reply(400, error("label_too_long", f"Label is longer than {LABEL_MAX_MANAGE}."))
            contract.label = str(body["label"])
        match body.get("state"):
            case None:
                pass
            case "stopped":
                self.market.stop(contract)
            case "running" if not contract.lost and self.market.clock() < contract.ends_at:
                self.market.start(contract)
            case "running":
                return Reply(body=error("no_capacity", "Required resources are currently unavailable."))
            case other:
                raise search.InvalidArgs(f"state: got {other!r}, wanted running or stopped")
        return Reply(body={"success": True})

    def destroy(self, request: Request, id: int) -> Reply:
        market, contract = self.market, self._living(id)
        if contract is None:
            return no_such_instance(id)
        if (refused := self._not_destroyed(contract)) is not None:
            return refused
        machine_id = contract.offer.machine_id
        if (polls := market.faults.take("destroy.200_but_stays", machine_id)) is not None:
            contract.stays_polls = int(polls)
            return Reply(body={"success": True, "msg": f"Instance {id} destroyed."})
        market.destroy(contract)
        if market.faults.take("destroy.500_but_done", machine_id) is not None:
            return Reply(500, "Internal Server Error")
        return Reply(body={"success": True, "msg": f"Instance {id} destroyed."})

    def destroy_many(self, request: Request) -> Reply:
        ids = parse_body(request).get("instance_ids")
        if not isinstance(ids, list):
            raise search.InvalidArgs("instance_ids: wanted a list")
        for id in ids:
            contract = self._living(int(id))
            if contract is None:
                return no_such_instance(int(id))
            self.market.destroy(contract)
        return Reply(body={"success": True})

    def reboot(self, request: Request, id: int) -> Reply:
        return self._restart(id, wipe=False)

    def recycle(self, request: Request, id: int) -> Reply:
        return self._restart(id, wipe=True)

    def bid_price(self, request: Request, id: int) -> Reply:
        contract = self._living(id)
        if contract is None:
            return no_such_instance(id)
        price = number(parse_body(request).get("price"), "price")
        if not contract.is_bid or not PRICE_RANGE_USD[0] <= price <= PRICE_RANGE_USD[1]:
            return Reply(400, error("invalid_price", f"price {price} refused; the instance must be a bid."))
        contract.bid_usd = contract.dph_base_usd = price
        return Reply(body={"success": True})

    def request_logs(self, request: Request, id: int) -> Reply:
        if id not in self.market.contracts:
            return no_such_instance(id)
        token = secrets.token_urlsafe(16)
        self.log_tokens[token] = id
        return Reply(body={"success": True, "result_url": f"{self.base_url}/_rehearsal/logs/{token}", "msg": ""})

    # SSH keys

    def keys(self, request: Request, id: int) -> Reply:
        contract = self._living(id)
        if contract is None:
            return no_such_instance(id)
        rows = [key_row(k, self.market.user_id) for k in contract.ssh_keys]
        # JSON inside JSON, as the market sends it.
        return Reply(body={"success": True, "ssh_keys": json.dumps(rows)})

    def attach_key(self, request: Request, id: int) -> Reply:
        contract = self._living(id)
        if contract is None:
            return no_such_instance(id)
        key = public_key(parse_body(request))
        if self.market.faults.take("ssh.attach_refused", contract.offer.machine_id) is not None:
            return Reply(400, error("team_ssh_keys_not_supported", "SSH keys of a team cannot be attached."))
        self.market.attach_key(contract, key)
        return Reply(body={"success": True, "msg": "SSH key added to instance."})

    def detach_key(self, request: Request, id: int, key_id: int) -> Reply:
        contract = self._living(id)
        if contract is None:
            return no_such_instance(id)
        if not self.market.detach_key(contract, key_id):
            return Reply(404, error("not_found", f"SSH key {key_id} not found on instance {id}."))
        return Reply(body={"success": True})

    def _living(self, id: int) -> Contract | None:
        contract = self.market.contracts.get(id)
        return None if contract is None or contract.gone else contract

    def _not_destroyed(self, contract: Contract) -> Reply | None:
        """The reply to a DELETE that a fault keeps from doing anything."""
        faults, machine_id = self.market.faults, contract.offer.machine_id
        if faults.take("destroy.429", machine_id) is not None:
            return too_frequent(DESTROY_EVERY_S)
        if (hang_s := faults.take("destroy.hang", machine_id)) is not None:
            return Reply(drop=True, hold_s=float(hang_s))
        if faults.take("destroy.success_false", machine_id) is not None:
            return Reply(body=error("internal_error", "Instance could not be destroyed."))
        if faults.take("destroy.404_but_alive", machine_id) is not None:
            return no_such_instance(contract.id)
        return None

    def _restart(self, id: int, *, wipe: bool) -> Reply:
        contract = self._living(id)
        if contract is None:
            return no_such_instance(id)
        if contract.status != "running":
            return Reply(400, error("invalid_args", f"Instance {id} is {contract.status}, not running."))
        self.market.reboot(contract, wipe=wipe)
        return Reply(body={"success": True})
