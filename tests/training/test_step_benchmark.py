from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from training import lean
from training.step_benchmark import Bench, Setting, Way, _agreement, _marks, lines, measure, shares, ways

pytestmark = pytest.mark.train


def tiny(**changes: Any) -> Setting:
    given = {"layers": 4, "tokens": 96, "micro": (24, 48), "rank": 4, "steps": 1, "device": "cpu", "dtype": "float32"}
    return Setting(**{**given, "tiny": True, **changes})


def test_every_way_makes_the_same_step_and_the_ratios_are_of_its_rates() -> None:
    document = measure(tiny(trainer=True))
    found = document["ways"]
    assert document["check"]["passed"] and set(found) == {way.label for way in ways(tiny())} | {"trainer"}
    unpacked = [facts["loss"] for name, facts in found.items() if name not in ("ours-packed 48", "trainer")]
    assert max(unpacked) - min(unpacked) < 1e-4 * max(unpacked)
    assert found["ours 48"]["recompute"] == "none" and found["stock 24"]["recompute"] == "full"
    best = max(found[name]["tokens_per_s"] for name in ("ours 24", "ours 48"))
    assert document["ratio"]["best of ours against the seed"] == pytest.approx(
        best / found["seed 24"]["tokens_per_s"], rel=1e-2
    )
    said = "\n".join(lines(document))
    assert "ours-packed 48" in said and "best of ours against the seed" in said


def test_a_way_that_leaves_an_adapter_out_gets_no_ratio() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(50, generator=generator)
    whole = {"attention": [gradient], "shared_expert": [gradient]}
    for other in (
        {"attention": [gradient]},
        {"attention": [torch.randn(50, generator=generator)], "shared_expert": [gradient]},
    ):
        found = _agreement({"stock": (1.0, whole), "ours": (1.0, other)}, "float32")
        assert not found["passed"] and len(found["wrong"]) == 1
    assert not _agreement({"stock": (1.0, whole), "ours": (1.01, whole)}, "float32")["passed"]
    assert _agreement({"stock": (1.0, whole), "ours": (1.0, whole)}, "float32")["passed"]
    document = {"setting": {**vars(tiny())}, "adapter_parameters": 1, "gflop_a_token": 1.0, "matmul_tflops": None}
    assert "OURS AND STOCK DO NOT AGREE" in "\n".join(lines({**document, "ways": {}, "check": found}))


def test_each_way_puts_its_own_forwards_in_place_and_takes_the_others_away() -> None:
    bench = Bench(tiny(recompute="experts_kept"))
    assert bench.choose(Way("ours", 48, "grouped", lean=True)) == "experts_kept"
    assert lean.recompute_of(bench.model) == "experts_kept" and not bench.base.is_gradient_checkpointing
    assert bench.choose(Way("stock", 24, "peft")) == "full"
    assert lean.recompute_of(bench.model) is None and bench.base.is_gradient_checkpointing
    assert not any("forward" in module.__dict__ for module in bench.base.model.modules())


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


def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from training.benchmark import main

    out = tmp_path / "step.json"
    words = "step --tiny --rank 4 --steps 1 --micro 24 48 --only seed ours --recompute mixer --json"
    assert main([*words.split(), str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["what"] == "step" and list(document["ways"]) == ["ours 48", "seed 24", "ours 24", "seed 48"]
    assert document["ways"]["ours 48"]["recompute"] == "mixer"
    assert "s a step" in capsys.readouterr().out


def test_what_there_is_no_time_for_says_so_and_what_was_measured_is_kept_at_once() -> None:
    kept: list[int] = []
    document = measure(
        tiny(seconds=0.0, ways=("ours",), trainer=True), keep=lambda found: kept.append(len(found["ways"]))
    )
    assert kept == [1, 2, 3]
    assert all(facts == {"failed": "not begun: 0 s are over"} for facts in document["ways"].values())
    assert "not begun" in "\n".join(lines(document))


def test_without_a_card_the_real_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from training.benchmark import main

    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    assert main(["step"]) == 2
    assert "no CUDA card here" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["none", "experts_kept", "stock"])
def test_marks_reach_every_part_and_change_nothing(policy: Any) -> None:
    ours = policy != "stock"
    bench = Bench(tiny(recompute=policy if ours else "auto"))
    bench.choose(Way("ours", 48, "grouped", lean=True) if ours else Way("stock", 48, "peft"))
    batch = bench.batches(48, False, 1)[0]
    gradients = []
    for marked in (False, True):
        with _marks(bench.base) if marked else nullcontext(), torch.profiler.profile() as profile:
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
