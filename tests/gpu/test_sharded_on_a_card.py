"""A 4-bit base on real cards: what one layer unpacked is gone before the next, the ways agree, and the runner trains on it, on one card and on two.

Run it on a machine with a card: `python -m pytest -m gpu tests/gpu/test_sharded_on_a_card.py`; what needs two skips where there is one.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import card_recipe, place

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
    pytest.mark.timeout(500),
]
_LAYERS = (2, 6)
_TOKENS = 4096


def bench(layers: int, way: str) -> Any:
    """A model of the 235B's widths with so many layers, and the benchmark that holds it."""
    from training.sharded import benchmark
    from training.sharded.ranks import Alone

    shape = replace(benchmark.QWEN3_235B, attention_layers=layers)
    setting = benchmark.Setting(
        shape, (_TOKENS,), 2048, 16, 1, "adamw", (way,), 0, (), 0.0, False, False, False, 0, False
    )
    return benchmark._Bench(setting, Alone(), torch.device("cuda", 0))


def forward_and_backward(made: Any) -> tuple[float, dict[str, Any], float]:
    """Loss, gradients of the last layer's experts, and the peak over what stood before, in bytes."""
    model = made._fresh(made.held, made.setting.shape)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    ids = torch.randint(0, 1000, (2, _TOKENS // 2), generator=torch.Generator().manual_seed(1)).cuda()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        hidden = model.get_base_model().model(input_ids=ids, use_cache=False).last_hidden_state
    loss = hidden.float().square().mean()
    loss.backward()
    # Gradients stay and grow with the depth; they are no work.
    kept = sum(p.grad.numel() * 4 for p in model.parameters() if p.grad is not None)
    peak = torch.cuda.max_memory_allocated() - before - kept
    grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None and ".experts" in name}
    return float(loss.detach()), grads, peak


def test_unpacked_weights_do_not_pile_up_with_the_depth() -> None:
    """lesson: a graph that keeps each layer's unpacked weights needs 4.8 GB a layer, 450 GB for the 235B."""
    peaks = []
    for layers in _LAYERS:
        made = bench(layers, "host")
        peaks.append(forward_and_backward(made)[2])
        made.let_go()
    one_layer = 2 * 128 * 3 * 4096 * 1536
    inputs = (_LAYERS[1] - _LAYERS[0]) * _TOKENS * 4096 * 4
    assert peaks[1] - peaks[0] < one_layer / 4 + inputs, [peak / 1e9 for peak in peaks]


def test_host_memory_and_the_card_itself_give_the_same_bits() -> None:
    made = bench(3, "resident")
    loss, wanted, _ = forward_and_backward(made)
    made.held.switch("host")
    again, seen, _ = forward_and_backward(made)
    assert loss == again and seen.keys() == wanted.keys()
    assert all(torch.equal(seen[name], wanted[name]) for name in wanted)


def quantised(gpus: int) -> dict[str, Any]:
    """The card's recipe on a packed base. The tiny widths are not our kernels', which is what `slow_experts` allows."""
    data = card_recipe(allow=["slow_experts"])
    data["model"]["quantisation"], data["box"]["gpus"] = "nf4", gpus
    # torchao's 8-bit optimizer compiles itself in every process and phase; the cascade has it.
    data["optimizer"], data["evaluation"] = "adamw", {"data": None}
    data["phases"] = [phase | {"accumulation": 2 * gpus} for phase in data["phases"] if phase["kind"] != "grpo"]
    return data


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_runner_trains_four_phases_on_a_packed_base(gpus: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{torch.cuda.device_count()} card")
    from training.tiny import make

    make(tmp_path / "world")
    run = place(tmp_path / "box", quantised(gpus), tmp_path / "world")
    run.run(timeout_s=450)
    assert run.of("runner_end")[-1].complete, run.of("abort")
    spoken = {(guard.phase, guard.stage) for guard in run.of("guard")}
    for phase in ("cpt", "sft", "dpo", "kto"):
        assert {(phase, stage) for stage in ("canary", "step1", "checkpoint", "end")} <= spoken
