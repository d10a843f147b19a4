"""Whole models and each of their modules, ours against transformers' and PEFT's: outputs, the input's gradient and every factor's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.lean.conftest import adapted, gradients, inputs, logits, loss, same, twin
from training import lean
from training.contract.families import Family
from training.lean import layers

KINDS = ("rows", "packed", "padded")


@pytest.fixture
def both(family: Family) -> tuple[Any, Any]:
    stock = adapted(family)
    ours = twin(stock)
    found = lean.install(ours)
    assert found.whole and not found.left
    return stock, ours


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_model_gives_the_same_logits_and_the_same_gradients(both: tuple[Any, Any], kind: str) -> None:
    stock, ours = both
    given = inputs(kind)
    real = given.get("attention_mask", torch.ones(1)).bool()
    wanted, got = (logits(model, given) for model in both)
    difference = (got - wanted)[real] if kind == "padded" else got - wanted
    assert float(difference.abs().max()) <= 1e-9 * float(wanted.abs().max())
    same(gradients(ours, given), gradients(stock, given))
    assert lean.handed_over(ours) == {}


@pytest.mark.parametrize("policy", layers.RECOMPUTE)
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_what_is_computed_again_gives_the_same_gradients(both: tuple[Any, Any], policy: str, kind: str) -> None:
    stock, ours = both
    lean.set_recompute(ours, policy)
    assert lean.recompute_of(ours) == policy
    same(gradients(ours, inputs(kind)), gradients(stock, inputs(kind)))


def test_recomputing_runs_what_the_policy_names_twice_and_no_more(gated: Family) -> None:
    model = adapted(gated)
    lean.install(model)
    seen: dict[str, list[str]] = {}
    for policy in layers.RECOMPUTE:
        lean.set_recompute(model, policy)
        ran = seen[policy] = []
        layer = model.get_base_model().model.layers[0]
        parts = {"mixer": layer.linear_attn, "router": layer.mlp.gate, "experts": layer.mlp.experts}
        hooks = [
            part.register_forward_hook(lambda *_, name=name, ran=ran: ran.append(name)) for name, part in parts.items()
        ]
        gradients(model, inputs("rows"))
        for hook in hooks:
            hook.remove()
    counts = {policy: tuple(ran.count(part) for part in parts) for policy, ran in seen.items()}
    assert counts == {"none": (1, 1, 1), "mixer": (2, 1, 1), "experts_kept": (2, 2, 1), "full": (2, 2, 2)}


def test_nothing_is_computed_again_in_evaluation(gated: Family) -> None:
    model = adapted(gated)
    lean.install(model)
    lean.set_recompute(model, "full")
    model.eval()
    layer = model.get_base_model().model.layers[0]
    ran: list[int] = []
    layer.linear_attn.register_forward_hook(lambda *_: ran.append(1))
    gradients(model, inputs("rows"))
    assert len(ran) == 1


def modules_of(model: Any) -> dict[str, Any]:
    """One module of each kind that takes hidden states alone."""
    layers = model.get_base_model().model.layers
    found = {"norm": layers[-1].input_layernorm, "block": layers[-1].mlp}
    if hasattr(layers[0], "linear_attn"):
        found |= {"delta_net": layers[0].linear_attn, "shared_expert": layers[0].mlp.shared_expert}
    return found


def test_each_module_alone_gives_the_same(both: tuple[Any, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 11, 64, generator=generator, dtype=torch.float64)
    for (name, wanted), (_, got) in zip(modules_of(both[0]).items(), modules_of(both[1]).items(), strict=True):
        same(alone(got, x), alone(wanted, x), 1e-10)
        assert lean.is_ours(got.forward) and not lean.is_ours(wanted.forward), name


def test_attention_alone_gives_the_same(both: tuple[Any, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 11, 64, generator=generator, dtype=torch.float64)
    places = torch.arange(11)[None]
    wanted, got = (
        alone(
            model.get_base_model().model.layers[-1].self_attn,
            x,
            position_embeddings=model.get_base_model().model.rotary_emb(x, places.expand(1, 11)),
            attention_mask=None,
        )
        for model in both
    )
    same(got, wanted, 1e-10)


def alone(module: Any, x: Tensor, **options: Any) -> dict[str, Tensor]:
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    out = module(x, **options)
    out = out[0] if isinstance(out, tuple) else out
    generator = torch.Generator().manual_seed(4)
    (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum().backward()
    found = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    assert x.grad is not None
    return found | {"out": out.detach(), "x": x.grad}


def test_two_micro_batches_add_up_to_one_step(both: tuple[Any, Any]) -> None:
    grads = []
    for model in both:
        model.zero_grad(set_to_none=True)
        for kind in ("rows", "packed"):
            loss(model, inputs(kind)).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    same(grads[1], grads[0])


def test_after_an_optimizers_step_the_new_factors_count(both: tuple[Any, Any]) -> None:
    """A fused AdamW writes past the version counters that tell a copy it is old."""
    for model in both:
        gradients(model, inputs("rows"))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        torch.optim.AdamW(trained, lr=1e-3, fused=True).step()
    wanted, got = (logits(model, inputs("rows")) for model in both)
    assert float((got - wanted).abs().max()) <= 1e-6 * float(wanted.abs().max())


def test_documents_that_read_over_a_border_would_be_seen(both: tuple[Any, Any]) -> None:
    stock, ours = both
    given = inputs("packed")
    leaky = {**given, "seq_idx": torch.zeros_like(given["seq_idx"])}
    if hasattr(ours.get_base_model().model.layers[0], "linear_attn"):
        assert float((logits(ours, leaky) - logits(stock, given)).abs().max()) > 1e-3


def test_packed_rows_without_numbers_are_told_apart_by_their_lengths(gated: Family) -> None:
    model = adapted(gated)
    lean.install(model)
    given = inputs("packed")
    told = logits(model, given)
    del given["seq_idx"]
    assert torch.equal(logits(model, given), told)


def test_packed_rows_without_any_mask_are_refused_off_the_card(gated: Family) -> None:
    model = adapted(gated)
    lean.install(model)
    assert lean.takes_no_mask(model)
    nothing = {"full_attention": None, "linear_attention": None}
    with pytest.raises(ValueError, match="4 packed documents without an attention mask"):
        logits(model, {**inputs("packed"), "attention_mask": nothing})
