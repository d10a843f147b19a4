"""Tiny models of each family in float64, as PEFT and transformers compute them and as we do."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from training import experts, packing
from training.contract.families import FAMILIES, Family
from training.tiny import make_model

VOCABULARY = 97
IDS = torch.randint(3, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(0))
DOCUMENTS = [torch.randint(3, VOCABULARY, (1, n), generator=torch.Generator().manual_seed(n)) for n in (9, 1, 3, 70)]


class Wide:
    """torch for a modeling file, in which float32 is float64: its norms, router and rule would drop to float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@pytest.fixture(params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Family:
    """Each family, and float64 all through its code."""
    known = FAMILIES[request.param]
    packing.install()
    widen(known, monkeypatch)
    return known


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Family:
    """The family with all kinds of layers, in float64."""
    packing.install()
    widen(FAMILIES["qwen3_5_moe"], monkeypatch)
    return FAMILIES["qwen3_5_moe"]


def widen(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(family.modeling), "torch", Wide())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def lora_config(family: Family, **changes: Any) -> LoraConfig:
    leaves = {leaf for group in family.linears for leaf in family.leaves(group, gate_projections=True)}
    settings: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": sorted(leaves),
        "target_parameters": list(family.routed),
    }
    return LoraConfig(**settings | changes)


def adapted(family: Family, **changes: Any) -> Any:
    """With adapters on everything, none of them zero, and our routed experts in plain products."""
    name = next(name for name, known in FAMILIES.items() if known is family)
    base = make_model(VOCABULARY, 1, 0, family=name).double().requires_grad_(False)
    base.set_experts_implementation(
        "eager"
    )  # torch's grouped_mm takes no float64; without adapters the model's own experts run
    model = get_peft_model(base, lora_config(family, **changes)).double()
    randomise(model)
    experts.install(model, grouped_mm=experts.reference_grouped_mm)
    return model.train()


def randomise(model: Any, adapter: str = "default", seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"lora_B.{adapter}" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.05)
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)


def twin(model: Any) -> Any:
    """The same model again, with our experts on it."""
    other = copy.deepcopy(model)
    experts.install(other, grouped_mm=experts.reference_grouped_mm)
    return other


def inputs(kind: str) -> dict[str, Any]:
    """Keyword arguments of a forward pass: plain rows, packed documents, or rows with padding left and right."""
    if kind == "packed":
        return packing.packed_inputs(DOCUMENTS)
    if kind == "rows":
        return {"input_ids": IDS}
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    mask[1, -5:] = 0
    return {"input_ids": IDS, "attention_mask": mask}


def logits(model: Any, given: dict[str, Any]) -> Tensor:
    return model(**given, use_cache=False).logits  # type: ignore[no-any-return]


def loss(model: Any, given: dict[str, Any]) -> Tensor:
    """Of every token that counts, with other weights for each so that no gradient cancels."""
    out = torch.log_softmax(logits(model, given), -1)
    seed = torch.Generator().manual_seed(5)
    weights = torch.rand(out.shape, generator=seed, dtype=torch.float64)
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        weights = weights * mask[..., None]
    return (out * weights).mean()


def gradients(model: Any, given: dict[str, Any]) -> dict[str, Tensor]:
    """Of every adapter, and of the input embeddings under the name `input`."""
    model.zero_grad(set_to_none=True)
    caught: list[Tensor] = []

    def listen(_: Any, __: Any, out: Tensor) -> Tensor:
        caught.append(out.detach().requires_grad_())
        return caught[-1]

    hook = model.get_base_model().model.embed_tokens.register_forward_hook(listen)
    try:
        loss(model, given).backward()
    finally:
        hook.remove()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return found | {"input": caught[0].grad}


def same(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert float((got[name] - value).norm()) <= tolerance * float(value.norm()) + 1e-18, name


def modules(model: Any, name: str) -> Iterator[Any]:
    return (module for module in model.modules() if type(module).__name__ == name)
