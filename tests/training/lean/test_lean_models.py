"""Whole models and each of their modules, ours against transformers' and PEFT's: outputs, the input's gradient and every factor's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.lean.conftest import adapted, gradients, inputs, logits, loss, same, twin
from training import lean, packing
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


@pytest.mark.parametrize("policy", layers.RECOMPUTE)
def test_a_model_in_eval_gives_gradients_all_the_same(both: tuple[Any, Any], policy: str) -> None:
    stock, ours = both
    lean.set_recompute(ours, policy)
    for model in both:
        model.eval()
    same(gradients(ours, inputs("rows")), gradients(stock, inputs("rows")))


@pytest.mark.parametrize("policy", layers.RECOMPUTE)
def test_documents_of_one_token_and_rows_of_one_document_are_computed(both: tuple[Any, Any], policy: str) -> None:
    stock, ours = both
    lean.set_recompute(ours, policy)
    ids = inputs("rows")["input_ids"]
    for given in (
        {"input_ids": ids[:, :1]},
        packing.packed_inputs([ids[:1, :1]]),
        packing.packed_inputs(list(ids[:1].split(1, dim=1))),
        packing.packed_inputs([ids[:1]]),
    ):
        wanted, got = gradients(stock, given), gradients(ours, given)
        # One token attends to itself alone: what its queries and keys get is the rounding of nothing.
        least = 1e-13 * max(float(each.norm()) for each in wanted.values())
        for name, value in wanted.items():
            assert float((got[name] - value).norm()) <= 1e-9 * float(value.norm()) + least, name


@pytest.mark.parametrize("policy", layers.RECOMPUTE)
def test_rows_may_be_given_as_embeddings_and_at_any_place(both: tuple[Any, Any], policy: str) -> None:
    lean.set_recompute(both[1], policy)
    ids = inputs("rows")["input_ids"]
    found = []
    for model in both:
        x = model.get_input_embeddings()(ids).detach().requires_grad_()
        places = torch.stack([torch.arange(13) + 5, torch.arange(13)])
        out = model(inputs_embeds=x, position_ids=places, use_cache=False).logits
        out.square().mean().backward()
        found.append({"out": out.detach(), "x": x.grad})
    same(found[1], found[0])


@pytest.mark.parametrize("policy", layers.RECOMPUTE)
def test_two_forwards_may_wait_for_one_backward(both: tuple[Any, Any], policy: str) -> None:
    lean.set_recompute(both[1], policy)
    found = []
    for model in both:
        model.zero_grad(set_to_none=True)
        first, second = loss(model, inputs("packed")), loss(model, inputs("padded"))
        with torch.no_grad(), model.disable_adapter():
            logits(model, inputs("rows"))
        (first * second).backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    same(found[1], found[0])


def test_what_was_first_run_in_inference_mode_trains(both: tuple[Any, Any]) -> None:
    stock, ours = both
    given = inputs("packed")
    with torch.inference_mode():
        logits(ours, given)
    same(gradients(ours, given), gradients(stock, given))


def test_transformers_own_checkpointing_computes_nothing_again(both: tuple[Any, Any]) -> None:
    stock, ours = both
    ours.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    ran: list[int] = []
    ours.get_base_model().model.layers[0].mlp.gate.register_forward_hook(lambda *_: ran.append(1))
    for policy, times in (("none", 1), ("full", 2)):
        ran.clear()
        lean.set_recompute(ours, policy)
        same(gradients(ours, inputs("padded")), gradients(stock, inputs("padded")))
        assert len(ran) == times, policy


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


def test_packed_rows_without_their_lengths_are_refused(gated: Family) -> None:
    """The convolution would stop at the borders, and the rule's state beside it would not."""
    model = adapted(gated)
    lean.install(model)
    given = inputs("packed")
    with pytest.raises(ValueError, match=r"packed documents by seq_idx alone.*want cu_seq_lens_q, too"):
        logits(model, {name: given[name] for name in ("input_ids", "position_ids", "seq_idx")})


def test_two_packed_rows_are_refused_where_a_state_runs_through_them_and_right_elsewhere(
    both: tuple[Any, Any],
) -> None:
    stock, ours = both
    ids = inputs("rows")["input_ids"]
    documents = [ids[:1, :6], ids[:1, 6:], ids[1:]]
    given = packing.packed_inputs(documents)
    two = {name: given[name].view(2, 13) for name in ("input_ids", "position_ids", "seq_idx")}
    if hasattr(ours.get_base_model().model.layers[0], "linear_attn"):
        with pytest.raises(packing.PackingError, match="packed rows come one at a time"):
            logits(ours, {**given, **two})
        return
    wanted = torch.cat([logits(stock, {"input_ids": document}) for document in documents], 1).view(2, 13, -1)
    assert float((logits(ours, {**given, **two}) - wanted).abs().max()) <= 1e-9 * float(wanted.abs().max())


def test_packed_rows_without_any_mask_are_refused_off_the_card(both: tuple[Any, Any]) -> None:
    nothing = lean.no_mask(both[1], torch.device("cpu"))
    with pytest.raises(ValueError, match="4 packed documents without an attention mask"):
        logits(both[1], {**inputs("packed"), "attention_mask": nothing})
    one = {**packing.packed_inputs([inputs("rows")["input_ids"][:1]]), "attention_mask": nothing}
    if isinstance(nothing, dict):  # with no mask at all, one document is causal by itself
        assert torch.equal(logits(both[1], one), logits(both[1], {"input_ids": one["input_ids"]}))
        return
    with pytest.raises(ValueError, match="1 packed documents without an attention mask"):
        logits(both[1], one)


def test_a_model_with_an_attention_of_others_builds_its_mask(gated: Family) -> None:
    model = adapted(gated)
    lean.install(model)
    assert lean.takes_no_mask(model) and lean.no_mask(model, torch.device("cpu")) is not None
    del model.get_base_model().model.layers[3].self_attn.__dict__["forward"]
    assert not lean.takes_no_mask(model) and lean.no_mask(model, torch.device("cpu")) is None
