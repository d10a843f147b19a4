from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.tiny_step import tiny
from training import lean
from training.step_benchmark import Bench, Way, _agreement, _ratios, lines, measure, ways

pytestmark = pytest.mark.train


def test_every_way_makes_the_same_step_and_the_ratios_are_of_its_rates() -> None:
    document = measure(tiny(trainer=True))
    found = document["ways"]
    assert document["check"]["passed"] and set(found) == {way.label for way in ways(tiny(trainer=True))}
    unpacked = [facts["loss"] for name, facts in found.items() if name not in ("ours-packed 48", "trainer 48")]
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


def test_the_command_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from training.benchmark import main

    out = tmp_path / "step.json"
    words = "step --tiny --rank 4 --steps 1 --micro 24 48 --only seed ours --recompute mixer --json"
    assert main([*words.split(), str(out)]) == 0
    document = json.loads(out.read_text())
    assert document["what"] == "step" and list(document["ways"]) == ["seed 24", "ours 48", "ours 24", "seed 48"]
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--micro 24 48 --tokens 100",
            "--micro: seen 24, with rows of 24 and --tokens 100; want a multiple of the one",
        ),
        ("--micro 24 40 --tokens 240", "--micro: seen 40, with rows of 24"),
        ("--only ours fastest", "--only: seen fastest; want some of experts, ours, ours-packed, portable, seed, stock"),
        ("--optimizer adamw_8bit", "--optimizer: seen adamw_8bit, which steps on a card; want adamw with --tiny"),
    ],
)
def test_what_would_be_told_of_another_step_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate of tokens that were not there, no way at all, an optimizer that did not step."""
    from training.benchmark import main

    assert main(["step", "--tiny", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_another_optimizer_is_another_step_and_gets_no_ratio() -> None:
    found = {
        "ours 48": {"tokens_per_s": 4.0},
        "seed 24": {"tokens_per_s": 2.0},
        "ours-packed 48": {"tokens_per_s": 2.0},
    }
    packed = {"seconds packed against unpacked, ours 48": 2.0}
    assert _ratios(found, tiny()) == {"best of ours against the seed": 2.0, **packed}
    assert _ratios(found, tiny(optimizer="adamw_8bit")) == packed


def test_the_fast_ways_are_timed_after_a_whole_step_and_the_slow_ones_after_a_micro_batch() -> None:
    class Counting(Bench):
        def _step(self, batches: Any, items: int, run: Any) -> float:
            steps.append(len(batches))
            return super()._step(batches, items, run)

    steps: list[int] = []
    bench = Counting(tiny(steps=2))
    fast = bench.measure(Way("ours", 48, "grouped", lean=True))
    assert steps == [1, 2, 2, 2] and len(fast["step_s_all"]) == 2
    steps.clear()
    slow = bench.measure(Way("stock", 24, "peft"))
    assert steps == [1, 4, 4] and len(slow["step_s_all"]) == 2


def test_shares_and_peaks_that_no_card_gave_are_unknown() -> None:
    facts = Bench(tiny()).measure(Way("ours", 48, "grouped", lean=True))
    unknown = ("busy_ms", "busy_share", "step_busy_share", "peak_gb", "peak_reserved_gb", "static_gb", "mfu")
    assert [facts[name] for name in unknown] == [None] * len(unknown)
    assert facts["micro_ms"] > 0 and facts["optimizer_ms"] > 0
