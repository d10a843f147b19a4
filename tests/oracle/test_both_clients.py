"""What the market's official client sends and what ours sends, for the same wish: the pretend market keeps both bodies."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.market.protocol import CreateRequest
from tasks.market.vast import search_body
from tasks.recipes import load_recipe, shipped
from tests.tasks.pretend import FLOW_RUN, NOW, Clock, Pretend, pretend_market
from training.contract.recipe import Box

pytestmark = pytest.mark.oracle

# Units of the official client's query language, where they are not the market's own.
SCALED = {"gpu_ram": 1000, "gpu_total_ram": 1000, "cpu_ram": 1000, "duration": 86_400}
OPERATORS = {"eq": "=", "neq": "!=", "gte": ">=", "lte": "<=", "gt": ">", "lt": "<", "in": " in ", "notin": " notin "}
# What the client spells so, the documentation calls so.
DIRECT = {"ssh_direc ssh_proxy": "ssh_direct"}
NOT_FILTERS = {"type", "order", "limit", "allocated_storage"}


@pytest.fixture(scope="module")
def pretend() -> Iterator[Pretend]:
    with pretend_market(Clock()) as market:
        yield market


@pytest.fixture(scope="module")
def official(vastai: Path, pretend: Pretend, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Runs calls of the official client, `(method, keywords)`, in one process; the bodies that the market got."""
    home = tmp_path_factory.mktemp("home")

    def send(*calls: tuple[str, dict[str, Any]]) -> list[Any]:
        script = (
            "import json, sys\nfrom vastai import VastAI\nv = VastAI()\n"
            "for method, keywords in json.load(sys.stdin):\n    getattr(v, method)(**keywords)"
        )
        environment = {"HOME": str(home), "VAST_URL": pretend.url, "VAST_API_KEY": pretend.market.account_key}
        before = len(pretend.bodies)
        done = subprocess.run(
            [str(vastai / "python"), "-c", script],
            input=json.dumps(calls),
            capture_output=True,
            text=True,
            env=environment,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert "Warning" not in done.stderr, "it knows every field that we filter by"
        return pretend.bodies[before:]

    return send


def shipped_boxes() -> dict[str, Box]:
    """The boxes that the shipped recipes ask for, on demand and as a bid."""
    boxes = {name: load_recipe(name).box for name in shipped()}
    bids = {f"{name}, bid": box.model_copy(update={"interruptible": True}) for name, box in boxes.items()}
    return {**boxes, **bids}


def wish(body: dict[str, Any]) -> dict[str, Any]:
    """The body in the words of the official client's own search."""
    filters = [
        _term(name, op, value) for name, ops in body.items() if name not in NOT_FILTERS for op, value in ops.items()
    ]
    ((column, direction),) = body["order"]
    return {
        "query": " ".join(filters),
        "type": {"bid": "interruptible"}.get(body["type"], body["type"]),
        "order": column + ("-" if direction == "desc" else ""),
        "limit": body["limit"],
        "storage": body["allocated_storage"],
        # Its default filters are ours to name.
        "no_default": True,
    }


def _term(name: str, op: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{name}{OPERATORS[op]}[{','.join(map(str, value))}]"
    if name in SCALED:
        return f"{name}{OPERATORS[op]}{value / SCALED[name]:.12g}"
    return f"{name}{OPERATORS[op]}{str(value).replace(' ', '_')}"


def normal(value: Any) -> Any:
    """The same number as text, whole or broken is the same wish."""
    if isinstance(value, dict):
        return {name: normal(each) for name, each in value.items()}
    if isinstance(value, list):
        return [normal(each) for each in value]
    if isinstance(value, bool) or value is None:
        return value
    try:
        return round(float(value), 6)
    except ValueError:
        return value


def test_both_clients_send_equivalent_search_bodies_for_every_shipped_recipe(
    official: Callable[..., list[Any]], pretend: Pretend, tmp_path: Path
) -> None:
    boxes, ours = shipped_boxes(), {}
    client = pretend.client(tmp_path)
    for name, box in boxes.items():
        client.search(box)
        ours[name] = normal(pretend.bodies[-1])
    *theirs, plain = official(
        *[("search_offers", wish(search_body(box))) for box in boxes.values()],
        ("search_offers", {"query": "num_gpus=1"}),
    )
    assert {name: normal(body) for name, body in zip(boxes, theirs, strict=True)} == ours
    assert "gpu_ram>=90 gpu_ram<=100 num_gpus=1 " in wish(search_body(boxes["qwen3.6-35b-a3b"]))["query"], "in GB"
    by_itself = {name: value for name, value in plain.items() if name not in {*NOT_FILTERS, "num_gpus"}}
    unasked = {name for body in ours.values() for name, value in by_itself.items() if body.get(name) != value}
    assert unasked <= {"verified"}, "of its own filters only this one is ours to count"


def test_both_clients_ask_for_the_same_box_on_demand_and_as_a_bid(
    official: Callable[..., list[Any]], pretend: Pretend, tmp_path: Path
) -> None:
    market, label = pretend.client(tmp_path), f"livery:{FLOW_RUN}:1:{int(NOW) + 3600}"
    offers = [offer for offer in market.search(load_recipe("qwen3.6-35b-a3b").box) if offer.disk_space_gb > 250]
    ours, calls = [], []
    for bid_usd, first, second in ((None, *offers[:2]), (0.7, *offers[2:4])):
        request = CreateRequest(offer=first, image="img", disk_gb=250, label=label, onstart="true", bid_usd=bid_usd)
        market.create(request)
        ours.append(normal(pretend.bodies[-1]))
        box = {"image": "img", "disk": 250, "label": label, "onstart_cmd": "true", "price": bid_usd, "env": {}}
        calls.append(("create_instance", {"id": second.id, "ssh": True, "direct": True, "cancel_unavail": True, **box}))
    assert [made.bid_usd for made in pretend.market.alive()] == [None, 0.7]
    theirs = [normal({**body, "runtype": DIRECT.get(body["runtype"])}) for body in official(*calls)]
    assert [made.bid_usd for made in pretend.market.alive()] == [None, 0.7, None, 0.7]
    for mine, body in zip(ours, theirs, strict=True):
        assert mine.pop("target_state") == "running", "what the market takes where nothing is said"
        assert mine == {name: body[name] for name in mine}
