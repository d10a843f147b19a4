"""Our kernels under the whole model: loss and every gradient as the grouped path's, in Triton's interpreter, so in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.dispatch import Choice
from tests.training.conftest import recipe_of
from training import experts, lean, packing
from training.errors import ModelError

ROOT = Path(__file__).parents[2]


@pytest.mark.train
def test_every_gradient_of_the_model_is_the_grouped_paths_with_checkpointing_and_accumulation() -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "kernels_in_a_model.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def test_a_gate_that_is_not_silu_is_told_and_is_slow() -> None:
    from training import kernel_layer

    experts = SimpleNamespace(gate_up_proj=torch.zeros(2, 64, 32), num_experts=2, act_fn=torch.nn.functional.gelu)
    choice = kernel_layer.best(experts, top_k=1, rank=4)
    assert choice.slow and choice.plan is None and "SiLU" in choice.reason


def test_two_adapters_at_once_are_refused() -> None:
    from training import kernel_layer

    with pytest.raises(ValueError, match="2 adapters switched on at once"):
        kernel_layer._adapter(["one", "two"])


def test_a_slow_path_needs_the_recipes_word_and_is_then_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.training.kernels_in_a_model import adapted
    from training.phases import fast_paths

    monkeypatch.setattr(packing, "has_fast_rule", lambda: True)
    model = adapted()
    experts.install(model)
    model.livery_lean = lean.Installed({}, {}, whole=True)
    for _, wrapper in experts.outer_wrappers(model):
        wrapper.livery_choice = Choice("grouped_mm", None, "sm90: dx is off by 4.5e-01", slow=True, trials=())
    data = recipe_of("tiny-moe").model_dump(mode="json")
    box = data["box"] | {"tier": "h200", "device": "cuda"}
    adapters = data["adapters"] | {"groups": ["routed_experts"]}
    notices: list[tuple[str, str]] = []

    def desk(*allow: str) -> SimpleNamespace:
        recipe = recipe_of("tiny-moe", box=box, adapters=adapters, allow=["fewer_groups", *allow])
        return SimpleNamespace(
            assignment=SimpleNamespace(recipe=recipe), notice=lambda what, detail: notices.append((what, detail))
        )

    with pytest.raises(ModelError, match=r"grouped_mm: sm90: dx is off by 4\.5e-01; write `allow: \[slow_experts\]`"):
        fast_paths.require(desk(), model)
    assert notices == []
    fast_paths.require(desk("slow_experts"), model)
    assert notices == [("slow path", "the routed experts run on grouped_mm: sm90: dx is off by 4.5e-01")]
