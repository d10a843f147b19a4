from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.train
RECIPES = Path(__file__).parents[2] / "training" / "recipes"


def setting() -> Any:
    from training.benchmark import Setting

    return Setting(layers=4, tokens=96, rank=4, steps=1, device="cpu", dtype="float32", tiny=True)


def test_a_ratio_is_printed_where_both_ways_compute_the_same() -> None:
    from training.benchmark import _lines, measure_layers

    document = measure_layers(setting())
    assert document["check"]["passed"] and document["check"]["factored_runs_a_layer"] > 0
    assert set(document["check"]["gradient_cosine"]) >= {"attention", "routed_experts.down_proj"}
    stock, ours = document["ways"]["stock"], document["ways"]["factored"]
    assert document["ratio"]["tokens_per_s"] == pytest.approx(ours["tokens_per_s"] / stock["tokens_per_s"], abs=1e-3)
    assert "factored against stock" in "\n".join(_lines(document)) and document["versions"]["torch"]


def test_a_faster_way_that_leaves_something_out_gets_no_ratio_and_is_named() -> None:
    from training import experts
    from training.benchmark import _lines, measure_layers

    def without_down(module: Any, hidden: Any, ids: Any, weights: Any, active: Any) -> Any:
        layer = experts._GroupedLayer(experts.torch_grouped_mm)
        return layer(module, hidden, ids, weights, {**active, "down_proj": ()})

    document = measure_layers(setting(), without_down)
    assert not document["check"]["passed"] and "ratio" not in document
    assert "routed_experts.down_proj" in document["check"]["wrong"]
    said = "\n".join(_lines(document))
    assert (
        "THE TWO DO NOT AGREE" in said and "routed_experts.down_proj" in said and "factored against stock" not in said
    )


def test_without_a_card_real_shapes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from training.benchmark import main

    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    assert main(["--layers", "4"]) == 2
    assert "no CUDA card here" in capsys.readouterr().err


def test_a_recipe_that_cannot_be_used_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from training.benchmark import main

    assert main(["cascade", "--recipe", str(tmp_path / "none.yaml")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "none.yaml: cannot be read" in line


def test_a_computation_that_is_not_there_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    from training.benchmark import main

    assert main(["--tiny", "--layer", "training.experts:nothing"]) == 2
    assert "seen 'training.experts:nothing', want MODULE:NAME" in capsys.readouterr().err


def test_the_cascade_counts_the_cpu_seconds_of_all_its_phases(tmp_path: Path) -> None:
    """With the counting trainer, which keeps the runner's whole contract and trains nothing."""
    out = tmp_path / "cascade.json"
    words = ["cascade", "--steps", "2", "--recipe", str(RECIPES / "counting.yaml"), "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "training.benchmark", *words], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    document = json.loads(out.read_text())
    assert document["complete"] and list(document["phases"]) == ["cpt", "sft", "dpo", "kto", "grpo"]
    assert document["cpu_s"] > 0 and "cascade of 2 steps a phase" in done.stdout
