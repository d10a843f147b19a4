from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import recipe_of
from training import packing
from training.model import attach, load_base, lora_tensors

RECIPE = recipe_of("tiny-moe")
LENGTHS = (1, 3, 17, 70)  # shorter than the convolution's four taps, and longer than a chunk of the rule


@pytest.fixture
def model(tiny: Path) -> Any:
    packing.install()
    model = attach(load_base(tiny / "model", RECIPE), RECIPE, None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, _, tensor in lora_tensors(model, "lora_B"):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.05)
    return model


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 700, (1, length), generator=generator) for length in LENGTHS]


def gradients(model: Any, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Gradients of the sum over all tokens' logsumexp: every position of every document counts."""
    model.zero_grad()
    for row in rows:
        model(**row, use_cache=False).logits.logsumexp(-1).sum().backward()
    return {name: tensor.grad.clone() for _, name, tensor in lora_tensors(model, "lora_A")}


def test_packed_documents_train_exactly_as_alone(model: Any) -> None:
    alone = gradients(model, [{"input_ids": document} for document in documents()])
    packed = gradients(model, [packing.packed_inputs(documents())])
    for name, grad in alone.items():
        assert float((packed[name] - grad).norm()) <= 1e-4 * float(grad.norm()), name


def test_the_self_check_passes_on_our_path(model: Any) -> None:
    assert packing.check(model) < 1e-5


@pytest.mark.parametrize("size", [0.0, 0.05, 0.15])
def test_rounding_that_sends_a_token_to_another_expert_is_no_leak(tiny: Path, size: float) -> None:
    """In bfloat16, on a card and on a CPU: an adapter that had trained stopped a healthy phase here."""
    packing.install()
    data = RECIPE.model_dump(mode="json")["model"] | {"dtype": "bfloat16"}
    recipe = recipe_of("tiny-moe", model=data)
    model = attach(load_base(tiny / "model", recipe), recipe, None)
    with torch.no_grad():
        for seed, (_, _, tensor) in enumerate(lora_tensors(model, "lora_B")):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * size)
    assert packing.check(model) < 1e-2
    exact = packing.packed_inputs
    with pytest.MonkeyPatch.context() as leaking:
        leaking.setattr(
            packing, "packed_inputs", lambda rows: {name: exact(rows)[name] for name in ("input_ids", "position_ids")}
        )
        with pytest.raises(packing.PackingError):
            packing.check(model)


def test_a_convolution_that_looks_across_the_border_is_caught(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = packing.masked_conv
    monkeypatch.setattr(
        packing, "masked_conv", lambda x, w, b, a, document: exact(x, w, b, a, torch.zeros_like(document))
    )
    with pytest.raises(packing.PackingError, match="logits differ"):
        packing.check(model)


def test_position_ids_alone_leak_and_are_caught(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = packing.packed_inputs
    monkeypatch.setattr(
        packing, "packed_inputs", lambda rows: {name: exact(rows)[name] for name in ("input_ids", "position_ids")}
    )
    with pytest.raises(packing.PackingError):
        packing.check(model)


def test_an_attention_mask_beside_position_ids_leaks_and_is_caught(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = packing.packed_inputs
    monkeypatch.setattr(
        packing,
        "packed_inputs",
        lambda rows: exact(rows) | {"attention_mask": torch.ones_like(exact(rows)["input_ids"])},
    )
    with pytest.raises(packing.PackingError):
        packing.check(model)
