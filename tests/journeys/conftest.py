"""Whole flows against the rehearsal: the real flow process, a real Prefect server, real SSH boxes, a real bucket; only the market pretends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments import rehearsal
from deployments.processes import Child
from deployments.seed import store_of
from tasks.domain import Receipt, ReceiptLine
from tasks.recipes import shipped
from training.box.store import Store
from training.contract import layout

ROOT = Path(__file__).parents[2]
# Two phases are enough for a fault; one journey flies all five.
SHORT = ("cpt", "sft")
# A whole flow takes seconds; a journey that takes minutes hangs.
JOURNEY_S = 240.0


@dataclass
class Ended:
    """A flow process that has ended."""

    code: int
    output: str
    flow_run_id: str | None


@dataclass
class Journey:
    """One rehearsal and the flows flown against it."""

    rehearsal: rehearsal.Rehearsal
    environ: dict[str, str]
    store: Store
    folder: Path
    children: list[Child] = field(default_factory=list)

    def fly(self, recipe: str = "counting", **parameters: Any) -> Ended:
        """Run the flow to its end in a process of its own."""
        child = self.take_off(recipe, **parameters)
        child.process.wait(JOURNEY_S)
        return self.landed(child)

    def recipe(self, *changes: str, **fields: Any) -> str:
        """The counting recipe with some words replaced (old, new, old, new …) and some fields, as a file of this journey."""
        text = shipped()["counting"].read_text()
        for old, new in zip(changes[::2], changes[1::2], strict=True):
            assert old in text, f"the recipe has no '{old}'"
            text = text.replace(old, new)
        path = self.folder / "changed.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(text) | fields))
        return str(path)

    def take_off(self, recipe: str = "counting", **parameters: Any) -> Child:
        """Start the flow and come back at once."""
        parameters = {"phases": list(SHORT), **parameters}
        program = "import json, sys; from flows.finetune import finetune; finetune(**json.loads(sys.argv[1]))"
        log = self.folder / f"flow-{len(self.children)}.log"
        child = Child(
            "flow", [sys.executable, "-c", program, json.dumps({"recipe": recipe, **parameters})], self.environ, log
        )
        self.children.append(child)
        return child

    def landed(self, child: Child) -> Ended:
        output = child.log_path.read_text(errors="replace")
        ids = [label.split(":")[1] for label in self.labels()]
        return Ended(int(child.process.returncode), output, ids[-1] if ids else None)

    def reap(self) -> str:
        """One sweep of the reaper, without Prefect."""
        done = subprocess.run(
            [sys.executable, "-m", "flows.reaper", "--once"],
            env=self.environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.stdout + done.stderr

    def labels(self) -> list[str]:
        return [str(instance["label"]) for instance in self.world()["instances"]]

    def world(self) -> dict[str, Any]:
        return self.rehearsal.control.state()

    def billed_now(self) -> int:
        return int(self.world()["instances_left"])

    def receipt(self, flow_run_id: str | None, run: str = "counting") -> Receipt:
        assert flow_run_id is not None, "no box was ever rented"
        data = self.store.get_bytes(layout.receipt(run, flow_run_id))
        assert data is not None, "no receipt in the bucket"
        return Receipt.model_validate_json(data)

    def manifests(self, run: str = "counting") -> list[str]:
        return [info.key for info in self.store.list(f"runs/{run}/manifests/")]

    def wait_for(self, what: Callable[[], bool], seconds: float = JOURNEY_S) -> None:
        end = time.monotonic() + seconds
        while not what():
            alive = any(child.alive() for child in self.children)
            time.sleep(0.1)
            assert what() or (alive and time.monotonic() < end), "waited in vain; the flow said:\n" + "\n".join(
                child.tail(40) for child in self.children
            )

    def said(self, words: str) -> bool:
        return any(
            words in child.log_path.read_text(errors="replace") for child in self.children if child.log_path.exists()
        )


def completed(journey: Journey, ended: Ended, *, boxes: int, phases: tuple[str, ...] = SHORT) -> None:
    assert ended.code == 0, ended.output[-4000:]
    assert journey.billed_now() == 0
    receipt = journey.receipt(ended.flow_run_id)
    assert (receipt.outcome, receipt.instances_left, receipt.boxes) == ("completed", 0, boxes)
    assert receipt.final and receipt.planned
    assert receipt.paid_usd is not None and receipt.paid_usd == pytest.approx(journey.world()["total_usd"], abs=2e-4)
    assert {key.split("/")[3] for key in journey.manifests()} == set(phases)
    assert not journey.store.list("alarms/")


def wasted(journey: Journey, ended: Ended) -> dict[int, ReceiptLine]:
    """The first wasted line of each attempt."""
    lines = [line for line in journey.receipt(ended.flow_run_id).lines if line.wasted]
    return {line.attempt: line for line in reversed(lines)}


@pytest.fixture
def journey(tmp_path: Path, prefect_api: str) -> Iterator[Callable[..., Journey]]:
    """Make a rehearsal with the named faults and the small world in its bucket."""
    with contextlib.ExitStack() as stack:

        def make(*faults: str, **environ: str) -> Journey:
            world = stack.enter_context(rehearsal.start(tmp_path / "rehearsal", faults=faults, boot_s=0.3, pace=0.02))
            pace = {
                "LIVERY_LEASE_S": "6",
                "LIVERY_LEASE_RENEW_S": "1",
                "LIVERY_POLL_S": "0.3",
                "LIVERY_STATE_DIR": str(tmp_path / "state"),
            }
            variables = {
                **os.environ,
                **world.env,
                **pace,
                "PREFECT_API_URL": prefect_api,
                "PREFECT_HOME": str(tmp_path / "home"),
                "PREFECT_LOGGING_EXTRA_LOGGERS": "tasks,flows",
                **environ,
            }
            store = store_of(world.env)
            seed(store)
            made = Journey(world, variables, store, tmp_path)
            stack.callback(lambda: [child.stop(5) for child in made.children])
            return made

        yield make


# The counting trainer reads no weights, but the prefetch moves them: a few hundred kilobytes are enough to be measured.
_MODEL = {"model.safetensors": os.urandom(300_000), "tokenizer.json": b"{}"}
_CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
_ASKED = {"role": "user", "content": "Weather in Oslo?"}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_SAID = {"role": "assistant", "content": "I do not know."}
ROWS: dict[str, list[dict[str, Any]]] = {
    "cpt": [{"text": f"A text about nothing, number {n}."} for n in range(8)],
    "sft": [{"messages": [_ASKED, _CALLED], "tools": _TOOLS}] * 8,
    "dpo": [{"prompt": [_ASKED], "chosen": [_CALLED], "rejected": [_SAID], "tools": _TOOLS}] * 8,
    "kto": [{"prompt": [_ASKED], "completion": [_CALLED], "label": n % 2 == 0, "tools": _TOOLS} for n in range(8)],
    "grpo": [{"messages": [_ASKED], "tools": _TOOLS, "answer": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]
    * 8,
}


def seed(store: Store) -> None:
    for name, data in _MODEL.items():
        store.put_bytes(f"models/tiny-moe/{name}", data)
    for kind, rows in ROWS.items():
        store.put_bytes(f"datasets/tiny/{kind}.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
