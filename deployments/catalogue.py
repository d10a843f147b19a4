"""Every deployment, typed. `up` serves them, prefect.yaml is written from them, a test checks each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

Process = Literal["runs", "reaper"]


@dataclass(frozen=True)
class Deployment:
    """One deployment `flow/name`. `process` says which serve process runs it: the reaper shares none with a flow that rents."""

    flow: str
    name: str
    entrypoint: str
    """`module:function` of the flow."""
    process: Process
    description: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    cron: str | None = None
    tags: tuple[str, ...] = ()
    rehearsal_only: bool = False
    """Rents from the pretend market alone: not served with a real account."""

    @property
    def full_name(self) -> str:
        return f"{self.flow}/{self.name}"

    @property
    def file_entrypoint(self) -> str:
        """The entrypoint as prefect.yaml writes it: `flows/finetune.py:finetune`."""
        module, function = self.entrypoint.split(":")
        return f"{module.replace('.', '/')}.py:{function}"

    def load_flow(self) -> Any:
        """The flow object itself."""
        module, function = self.entrypoint.split(":")
        return getattr(import_module(module), function)


CATALOGUE: tuple[Deployment, ...] = (
    Deployment(
        flow="finetune",
        name="full",
        entrypoint="flows.finetune:finetune",
        process="runs",
        description="A whole run: rent, train each phase, upload, evaluate, export, always destroy, receipt.",
        parameters={"recipe": "qwen3.6-35b-a3b"},
        tags=("finetune", "gpu-box"),
    ),
    Deployment(
        flow="finetune",
        name="smoke",
        entrypoint="flows.finetune:finetune",
        process="runs",
        description="The same path with ten steps a phase on an interruptible box: does this recipe, this data and this bucket work at all?",
        parameters={
            "recipe": "qwen3.6-35b-a3b",
            "run_name": "smoke",
            "max_steps": 10,
            "max_usd": 5.0,
            "max_hours": 3,
            "interruptible": True,
        },
        tags=("finetune", "gpu-box", "smoke"),
    ),
    Deployment(
        flow="finetune",
        name="rehearsal",
        entrypoint="flows.finetune:finetune",
        process="runs",
        description="The whole run on the embedded rehearsal: a pretend market, real servers, a tiny model really trained.",
        parameters={"recipe": "tiny-moe"},
        tags=("finetune", "rehearsal"),
        rehearsal_only=True,
    ),
    Deployment(
        flow="plan",
        name="offers",
        entrypoint="flows.plan:plan",
        process="runs",
        description="What a run would take and which offers fit; spends nothing.",
        parameters={"recipe": "qwen3.6-35b-a3b"},
        tags=("plan",),
    ),
    Deployment(
        flow="reaper",
        name="cron",
        entrypoint="flows.reaper:reaper",
        process="reaper",
        description="Every five minutes: list all boxes, judge, destroy, confirm, report. A live lease beats every Prefect state.",
        cron="*/5 * * * *",
        tags=("reaper",),
    ),
    Deployment(
        flow="audit",
        name="daily",
        entrypoint="flows.audit:audit",
        process="reaper",
        description="Every morning: hold the last days' runs against the market's charges, finish receipts, alarm on what was billed after its destroy.",
        cron="15 6 * * *",
        tags=("audit",),
    ),
    Deployment(
        flow="audit",
        name="now",
        entrypoint="flows.audit:audit",
        process="runs",
        description="The same at once, apart from the reaper's process: when the reaper is silent it tells what still bills.",
        tags=("audit",),
    ),
)


def served(process: Process, *, rehearsal: bool) -> tuple[Deployment, ...]:
    """The deployments that one serve process runs."""
    return tuple(entry for entry in CATALOGUE if entry.process == process and (rehearsal or not entry.rehearsal_only))
