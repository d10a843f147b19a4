from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.training.tiny_step import tiny
from training import lean
from training.step_benchmark import Bench, Way
from training.step_profile import marks, shares

pytestmark = pytest.mark.train


def test_a_kernel_belongs_to_the_part_that_was_marked_last_before_its_launch_and_overlaps_count_once() -> None:
    def mark(at: float, name: str) -> dict[str, Any]:
        return {"cat": "user_annotation", "name": f"livery:{name}", "ts": at}

    def kernel(launched: float, at: float, us: float, number: int) -> list[dict[str, Any]]:
        return [
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "args": {"correlation": number}},
            {"cat": "kernel", "name": "k", "ts": at, "dur": us, "args": {"correlation": number}},
        ]

    events = [
        mark(0, "attention"),
        *kernel(1, 100, 1000, 1),
        mark(2, "head"),
        *kernel(3, 600, 1500, 2),
        {"cat": "kernel", "name": "from nowhere", "ts": 5000, "dur": 500, "args": {"correlation": 9}},
    ]
    busy_ms, parts = shares(events)
    assert parts == {"head": 1.5, "attention": 1.0, "unknown": 0.5}
    assert busy_ms == pytest.approx(2.5)


@pytest.mark.parametrize("policy", ["none", "experts_kept", "stock"])
def test_marks_reach_every_part_and_change_nothing(policy: Any) -> None:
    ours = policy != "stock"
    bench = Bench(tiny(recompute=policy if ours else "auto"))
    bench.choose(Way("ours", 48, "grouped", lean=True) if ours else Way("stock", 48, "peft"))
    batch = bench.batches(48, False, 1)[0]
    gradients = []
    for marked in (False, True):
        with marks(bench.base) if marked else nullcontext(), torch.profiler.profile() as profile:
            bench.loss(batch, 48).backward()
        gradients.append(bench._gradients())
        bench.clear()
        seen = {event.name.removeprefix("livery:") for event in profile.events() if event.name.startswith("livery:")}
        parts = {"attention", "gated delta net", "routed experts", "shared expert and router", "norms and residuals"}
        assert seen == ({*parts, "head"} if marked else set())
    for group, tensors in gradients[0].items():
        for one, other in zip(tensors, gradients[1][group], strict=True):
            assert torch.equal(one, other), group
    assert lean.replaced(bench.model) == {} and lean.handed_over(bench.model) == {}
