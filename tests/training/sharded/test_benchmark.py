"""The benchmark computes what it claims to measure, also on a machine without a card."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

from training import experts
from training.experts import Lora
from training.sharded import benchmark
from training.sharded.benchmark import MODELS
from training.sharded.execution import unpack
from training.sharded.ranks import Alone
from training.sharded.stand_in import PageableModules
from training.sharded.synthetic import random_base


def test_the_stand_in_computes_the_same_layer() -> None:
    shape = MODELS["tiny"]
    layer = random_base(shape, Alone(), torch.device("cpu"), torch.float32).experts[1]
    gate_up, down = unpack(layer, shape, torch.float32)

    class Module:
        num_experts, gate_up_proj, down_proj = shape.experts, gate_up, down

        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate) * up

    torch.manual_seed(1)
    E, H, I, R = shape.experts, shape.hidden, shape.intermediate, 8  # noqa: E741
    active = {
        "gate_up_proj": [Lora(torch.randn(E * R, H) * 0.1, torch.randn(2 * I, R * E) * 0.1, E, 2.0)],
        "down_proj": [Lora(torch.randn(E * R, I) * 0.1, torch.randn(H, R * E) * 0.1, E, 2.0)],
    }
    results = []
    for compute in (PageableModules(layer, shape, Alone()), experts.GROUPED):
        hidden = torch.randn(20, H, generator=torch.Generator().manual_seed(2)).requires_grad_()
        ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(row))[:2] for row in range(20)])
        weights = torch.rand(20, 2, generator=torch.Generator().manual_seed(3))
        out = compute(Module(), hidden, ids, weights, active)
        (grad,) = torch.autograd.grad(out.square().sum(), hidden)
        results.append((out.detach(), grad))
    for seen, wanted in zip(*results, strict=True):
        torch.testing.assert_close(seen, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.train
def test_every_way_is_measured_on_one_base_and_gives_one_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["--tiny", "--steps", "1", "--stand-in", "--save", "--load-layers", "2", "--host-layers", "2"]
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr(sys, "argv", ["benchmark", *command, "--json", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(benchmark.__name__, run_name="__main__")
    assert ended.value.code == 0
    document = json.loads((tmp_path / "out.json").read_text())
    ways = {step["way"]: step for step in document["steps"]}
    assert set(ways) == {"resident", "host"} and ways["resident"]["loss"] == pytest.approx(ways["host"]["loss"])
    assert ways["host"]["asked"] > 0 and ways["host"]["unforeseen"] <= 1
    assert set(document["saved"]) == {"fused", "per_expert", "resume", "loaded"}
    assert "pageable modules" in capsys.readouterr().out
    files, cache = document["loaded"]["files"], document["loaded"]["cache"]
    assert files["read_of_checkpoint"] == 1 and cache["from_cache"] and cache["read_of_checkpoint"] < 0.6


@pytest.mark.train
def test_the_8_bit_optimizer_is_never_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    pytest.importorskip("torchao", reason="torchao is not installed")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was to be compiled")

    monkeypatch.setattr(torch, "compile", refuse)
    seen = []
    whole = benchmark._train
    monkeypatch.setattr(benchmark, "_train", lambda *args, **options: seen.append(whole(*args, **options)) or seen[-1])
    out = tmp_path / "out.json"
    arguments = ["--tiny", "--optimizer", "adamw_8bit", "--ways", "host", "--tokens", "64", "--steps", "2", "--save"]
    assert benchmark.main([*arguments, "--json", str(out)]) == 0
    assert "resume" in json.loads(out.read_text())["saved"]
    _, _, trainer = seen[0]
    assert type(trainer.optimizer.optimizer).__module__ == "training.optimizer_8bit"


def test_without_a_card_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    assert benchmark.main(["--tokens", "8192"]) == 2
    assert "0 cards here, want 1" in capsys.readouterr().err
