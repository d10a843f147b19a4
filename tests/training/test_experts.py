"""Our factored experts against stock PEFT, which adds the delta to the whole stack of experts."""

from __future__ import annotations

import itertools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.training.conftest import recipe_of
from training import experts
from training.errors import LivenessError
from training.model import attach, load_base, lora_config

RECIPE = recipe_of("tiny-moe")
IDS = torch.randint(3, 700, (2, 19), generator=torch.Generator().manual_seed(0))


def trained(model: Any, seed: int = 1) -> Any:
    """As after some training: no lora_B is zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


@pytest.fixture
def both(tiny: Path) -> tuple[Any, Any]:
    """The same adapted model twice: stock PEFT, and ours."""
    torch.manual_seed(0)
    stock = get_peft_model(load_base(tiny / "model", RECIPE), lora_config(RECIPE.adapters, RECIPE.model.family))
    ours = attach(load_base(tiny / "model", RECIPE), RECIPE, None)
    ours.load_state_dict(stock.state_dict())
    return trained(stock), trained(ours)


def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def test_the_factored_forward_and_gradients_equal_stock_peft(both: tuple[Any, Any]) -> None:
    stock, ours = both
    for model in both:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    torch.testing.assert_close(logits(ours), logits(stock), rtol=1e-4, atol=1e-4)
    stock_grads = {name: p.grad for name, p in stock.named_parameters() if p.grad is not None}
    our_grads = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert stock_grads.keys() == our_grads.keys()
    for name, grad in stock_grads.items():
        assert float((grad - our_grads[name]).norm()) <= 1e-4 * float(grad.norm()) + 1e-8, name


def test_reading_lora_b_with_the_experts_slowest_would_be_seen(
    both: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, ours = both
    right = experts._factors

    def wrong(lora: experts.Lora, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, float]:
        a, _, scale = right(lora, dtype)
        return a, lora.B.reshape(lora.B.shape[0], lora.num_experts, -1).permute(1, 0, 2).contiguous(), scale

    monkeypatch.setattr(experts, "_factors", wrong)
    assert float((logits(ours) - logits(stock)).abs().max()) > 1e-2


def test_a_second_adapter_is_honoured_alone_and_together_with_the_first(both: tuple[Any, Any]) -> None:
    """GRPO's reference is one; PEFT adds the deltas of all that are active."""
    for model in both:
        model.add_adapter("ref", model.peft_config["default"])
        trained(model, seed=2)
    both[1].load_state_dict(both[0].state_dict())
    answers = []
    for active in ("default", "ref", ["default", "ref"]):
        for model in both:
            model.base_model.set_adapter(active)
        stock, ours = (logits(model).detach() for model in both)
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-4)
        answers.append(ours)
    assert all(float((a - b).abs().max()) > 1e-2 for a, b in itertools.combinations(answers, 2))


def test_another_layer_may_do_the_whole_routed_computation(both: tuple[Any, Any]) -> None:
    """It gets the masters in PEFT's flat layout, and its gradients reach them."""
    seen: list[tuple[str, torch.dtype]] = []

    def one_expert_after_another(
        base: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, active: experts.Active
    ) -> torch.Tensor:
        seen.extend((name, lora.B.dtype) for name, loras in active.items() for lora in loras)
        out = torch.zeros_like(hidden)
        for expert in range(base.num_experts):
            token, place = torch.where(ids == expert)

            def linear(x: torch.Tensor, name: str, expert: int = expert) -> torch.Tensor:
                y = x @ getattr(base, name)[expert].T
                for lora in active[name]:
                    y = y + lora.scaling * (x @ lora.a_ERX()[expert].T) @ lora.b_EOR()[expert].T
                return y

            y = linear(base._apply_gate(linear(hidden[token], "gate_up_proj")), "down_proj")
            out = out.index_add(0, token, y * weights[token, place, None])
        return out

    stock, ours = both
    assert experts.install(ours, layer=one_expert_after_another) == 4
    torch.testing.assert_close(logits(ours), logits(stock), rtol=1e-4, atol=1e-4)
    assert set(seen) == {("gate_up_proj", torch.float32), ("down_proj", torch.float32)}
    for model in both:
        model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    for (name, wanted), (_, got) in zip(stock.named_parameters(), ours.named_parameters(), strict=True):
        if wanted.grad is not None:
            torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_an_unknown_layout_is_refused_when_it_is_attached(both: tuple[Any, Any]) -> None:
    name, wrapper = next(experts.outer_wrappers(both[1]))
    wrapper.base_layer.base_layer.has_bias = True
    with pytest.raises(LivenessError, match="has_bias is True") as caught:
        experts.install(both[1])
    assert (caught.value.stage, caught.value.tensor) == ("attach", name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_on_a_gpu_no_layer_of_experts_waits_for_the_host(both: tuple[Any, Any]) -> None:
    ours = both[1].to("cuda", torch.bfloat16)
    assert not experts.forward_syncs(ours)
    experts.install(ours, grouped_mm=experts.reference_grouped_mm)
    assert experts.forward_syncs(ours), "a loop over the experts reads their counts on the host"


def test_asking_whether_the_host_waits_wants_a_gpu(both: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="want a model on a GPU"):
        experts.forward_syncs(both[1])


def test_torch_grouped_mm_equals_the_plain_reference_with_an_empty_expert() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(10, 16, generator=generator), torch.randn(4, 16, 8, generator=generator)
    ends = torch.tensor([3, 3, 9, 10], dtype=torch.int32)
    torch.testing.assert_close(experts.torch_grouped_mm(x, w, ends), experts.reference_grouped_mm(x, w, ends))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
def test_on_a_gpu_an_expert_without_tokens_gets_a_gradient_of_exactly_zero() -> None:
    """Its rows of the result are allocated and not written; memory full of NaN would show it."""
    generator, ends = torch.Generator("cuda").manual_seed(0), torch.tensor([0, 300, 300, 1024], dtype=torch.int32)
    x = torch.randn(1024, 256, device="cuda", generator=generator).to(torch.bfloat16)
    w = (torch.randn(4, 256, 32, device="cuda", generator=generator) / 16).to(torch.bfloat16).requires_grad_()
    exact = w.detach().float().requires_grad_()
    experts.reference_grouped_mm(x.float(), exact, ends).sum().backward()
    poison = [torch.full((1 << 26,), float("nan"), device="cuda") for _ in range(4)]
    del poison
    experts.torch_grouped_mm(x, w, ends.cuda()).sum().backward()
    assert w.grad is not None and exact.grad is not None
    assert not w.grad[[0, 2]].any()
    # bfloat16 keeps 8 bits: each product is off by at most 2^-9, and the errors of a sum average out.
    assert float((w.grad.float() - exact.grad).norm() / exact.grad.norm()) < 1e-2


def test_a_rank_that_is_no_multiple_of_eight_is_padded(tiny: Path) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=3, lora_alpha=6, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    model = trained(get_peft_model(load_base(tiny / "model", RECIPE), config))
    wanted = logits(model).detach()
    assert experts.install(model) == 4
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4)


def test_switching_the_adapter_off_gives_the_base(tiny: Path, both: tuple[Any, Any]) -> None:
    base, ours = load_base(tiny / "model", RECIPE), both[1]
    with ours.disable_adapter():
        torch.testing.assert_close(logits(ours), logits(base), rtol=1e-4, atol=1e-4)


def test_merging_gives_the_same_answers(both: tuple[Any, Any]) -> None:
    ours = both[1]
    wanted = logits(ours).detach()
    ours.merge_adapter()
    torch.testing.assert_close(logits(ours), wanted, rtol=1e-3, atol=1e-3)
    ours.unmerge_adapter()
    torch.testing.assert_close(logits(ours), wanted, rtol=1e-3, atol=1e-3)


def test_every_forward_is_counted_and_a_replaced_one_is_named(both: tuple[Any, Any]) -> None:
    ours = both[1]
    logits(ours)
    with torch.no_grad():
        logits(ours)
        with ours.disable_adapter():
            logits(ours)
    for which, wanted in (("calls", 3), ("adapted", 2), ("trained", 1)):
        assert set(experts.calls(ours, which).values()) == {wanted}, which
    assert experts.replaced(ours) == {}
    name, wrapper = next(experts.outer_wrappers(ours))
    wrapper.forward = types.MethodType(somebody_elses_forward, wrapper)
    replaced = experts.replaced(ours)
    assert list(replaced) == [name]
    assert "somebody_elses_forward" in replaced[name]


def somebody_elses_forward(self: Any, *arguments: Any) -> Any:
    base = self.base_layer.base_layer
    return base(*arguments)
