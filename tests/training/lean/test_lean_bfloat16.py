"""In bfloat16 with float32 masters, as on a card: no further from float64 than PEFT's own forward under autocast is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.lean.conftest import adapted, gradients, inputs, twin
from training import lean, packing
from training.contract.families import FAMILIES
from training.lean import layers

PARTS = {
    "delta_net": ("qwen3_5_moe", "layers.0.linear_attn"),
    "gated attention": ("qwen3_5_moe", "layers.3.self_attn"),
    "shared expert": ("qwen3_5_moe", "layers.0.mlp.shared_expert"),
    "attention": ("qwen3_moe", "layers.0.self_attn"),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_module_rounds_no_worse_than_stock(part: str) -> None:
    family, path = PARTS[part]
    packing.install()
    model = adapted(FAMILIES[family])
    stock, ours = narrow(model), narrow(model)
    assert lean.install(ours).whole
    exact = widened(stock)
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(4):
        x = torch.randn(2, 40, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).bfloat16()
        # float64 of the same rounded inputs and weights, so that only the arithmetic differs.
        wanted = run(exact, path, x.double())
        got, rounded = (run(model, path, x) for model in (ours, stock))
        assert got.keys() == wanted.keys()
        for name, value in wanted.items():
            assert got[name].dtype == (torch.float32 if "lora" in name else torch.bfloat16)
            mine, theirs = (float((each[name].double() - value).norm() / value.norm()) for each in (got, rounded))
            errors.setdefault(name, []).append((mine, theirs))
    for name, each in errors.items():
        mine, theirs = (sum(column) / len(each) for column in zip(*each, strict=True))
        # Both are a few units of 2^-9; two roundings more or fewer in a chain of about ten are this much, and 1.19 was the most seen.
        assert mine <= 1.4 * theirs, (name, mine, theirs)


def narrow(model: Any) -> Any:
    """bfloat16 base, float32 adapters."""
    other = twin(model).bfloat16()
    for name, parameter in other.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
    return other


def widened(model: Any) -> Any:
    other = copy.deepcopy(model).double()
    for name, parameter in other.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16().double()  # what the products read
    return other


def run(model: Any, path: str, x: Tensor) -> dict[str, Tensor]:
    text = model.get_base_model().model
    module = text.get_submodule(path)
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    options: dict[str, Any] = {}
    if path.endswith("self_attn"):
        places = torch.arange(x.shape[1])[None].expand(2, -1)
        options = {"position_embeddings": text.rotary_emb(x, places), "attention_mask": None}
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.bfloat16):
        out = module(x, **options)
        out = out[0] if isinstance(out, tuple) else out
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    (out.double() * weights).sum().backward()
    assert x.grad is not None
    found = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    return found | {"out": out.detach(), "x": x.grad}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_policy_gives_the_same_bits(family: str) -> None:
    packing.install()
    ours = narrow(adapted(FAMILIES[family]))
    assert lean.install(ours).whole
    found: dict[str, dict[str, Tensor]] = {}
    for policy in layers.RECOMPUTE:
        lean.set_recompute(ours, policy)
        with torch.autocast("cpu", torch.bfloat16):
            found[policy] = gradients(ours, inputs("packed"))
    for policy, each in found.items():
        assert each.keys() == found["none"].keys()
        for name, value in found["none"].items():
            assert torch.equal(each[name], value), (policy, name)
