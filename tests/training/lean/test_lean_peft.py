"""What PEFT, generation and checks do with a model goes on as if its forwards were the stock ones."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from tests.training.conftest import recipe_of
from tests.training.lean.conftest import IDS, adapted, gradients, inputs, logits, randomise, same, twin
from training import experts, lean, liveness
from training.contract.families import Family
from training.contract.recipe import Recipe
from training.model import attach, expected_counts, load_adapter, load_base

GIVEN = {"input_ids": IDS}


@pytest.fixture
def both(family: Family) -> tuple[Any, Any]:
    stock = adapted(family)
    ours = twin(stock)
    lean.install(ours)
    return stock, ours


def agree(both: tuple[Any, Any]) -> torch.Tensor:
    with torch.no_grad():
        wanted, got = (logits(model, GIVEN) for model in both)
    assert float((got - wanted).abs().max()) <= 1e-9 * float(wanted.abs().max())
    return got


def test_disabled_adapters_give_the_base_and_come_back(both: tuple[Any, Any]) -> None:
    before = agree(both)
    with both[0].disable_adapter(), both[1].disable_adapter():
        base = agree(both)
    assert float((before - base).abs().max()) > 1e-3
    assert torch.equal(agree(both), before)


def test_merged_weights_count_once_and_unmerging_restores_them(both: tuple[Any, Any]) -> None:
    before = agree(both)
    for model in both:
        model.merge_adapter()
    merged = agree(both)
    assert float((merged - before).abs().max()) <= 1e-6 * float(before.abs().max())
    for model in both:
        model.unmerge_adapter()
    agree(both)


def test_disabling_what_is_merged_unmerges_it_as_peft_does(both: tuple[Any, Any]) -> None:
    with torch.no_grad(), both[0].disable_adapter(), both[1].disable_adapter():
        base = logits(both[0], GIVEN)
    for model in both:
        model.merge_adapter()
    with both[0].disable_adapter(), both[1].disable_adapter():
        assert float((agree(both) - base).abs().max()) <= 1e-6 * float(base.abs().max())


def test_a_reference_adapter_is_honoured_alone_and_several_go_to_the_stock_forward(both: tuple[Any, Any]) -> None:
    """GRPO's reference is a second adapter; PEFT adds up all that are active."""
    for model in both:
        model.add_adapter("ref", model.peft_config["default"])
        model.double()
        randomise(model, "ref", seed=2)
    both[1].load_state_dict(both[0].state_dict())  # fresh lora_A are drawn at random
    answers = []
    for active in ("default", "ref", ["default", "ref"]):
        for model in both:
            model.base_model.set_adapter(active)
        answers.append(agree(both))
    assert float((answers[0] - answers[1]).abs().max()) > 1e-3
    assert lean.handed_over(both[1]) == {}, "nothing was trained"
    same(gradients(both[1], GIVEN), gradients(both[0], GIVEN))
    assert any("self_attn" in name for name in lean.handed_over(both[1]))


def test_what_is_saved_loads_into_a_stock_model_with_the_same_answer(
    family: Family, both: tuple[Any, Any], tmp_path: Path
) -> None:
    ours = both[1]
    before = agree(both)
    base = twin(ours)
    lean.remove(base)
    ours.save_pretrained(tmp_path)
    fresh = PeftModel.from_pretrained(base.unload(), tmp_path).double()
    with torch.no_grad():
        assert float((logits(fresh, GIVEN) - before).abs().max()) <= 1e-5 * float(before.abs().max())


WRITERS: dict[str, Callable[[Any, Path, Recipe], object]] = {
    "a phase's start": load_adapter,
    "a resumed trainer": lambda model, stored, _: model.load_adapter(stored, "default", is_trainable=True),
    "PEFT's state dict": lambda model, stored, _: set_peft_model_state_dict(
        model, load_file(stored / "adapter_model.safetensors")
    ),
    "PEFT's state dict, in place of the parameters": lambda model, stored, _: set_peft_model_state_dict(
        model, load_file(stored / "adapter_model.safetensors"), low_cpu_mem_usage=True
    ),
    "the canary, which puts back what it found": lambda model, _, recipe: liveness.canary(
        model, IDS[:1], tuple(expected_counts(model.config, recipe))
    ),
}


@pytest.mark.train
@pytest.mark.parametrize("writer", WRITERS)
def test_whoever_writes_the_masters_is_seen_by_the_next_forward(tiny: Path, tmp_path: Path, writer: str) -> None:
    """What the kernels read are copies. Left from before, they would train the adapter of the phase's start and save the one that was loaded."""
    recipe: Recipe = recipe_of("tiny-moe")
    model = attach(load_base(tiny / "model", recipe), recipe, None)
    randomise(model, seed=1)
    model.save_pretrained(tmp_path)
    if not writer.startswith("the canary"):
        randomise(model, seed=2)
    with torch.no_grad():
        before = logits(model, GIVEN)  # makes the copies
        WRITERS[writer](model, tmp_path, recipe)
        got = logits(model, GIVEN)
        lean.remove(model)
        wanted = logits(model, GIVEN)
    assert float((got - wanted).abs().max()) <= 1e-4 * float(wanted.abs().max())
    moved = float((got - before).abs().max()) / float(wanted.abs().max())
    assert (moved == 0.0) if writer.startswith("the canary") else (moved > 1e-2)


def test_text_is_generated_with_a_cache_as_by_the_stock_model(both: tuple[Any, Any]) -> None:
    said = []
    for model in both:
        model.eval()
        # Every step is made again from the whole text, too.
        with torch.no_grad():
            told = model.generate(
                input_ids=IDS, max_new_tokens=12, do_sample=False, output_scores=True, return_dict_in_generate=True
            )
        said.append(told)
    assert torch.equal(said[0].sequences, said[1].sequences)
    for wanted, got in zip(said[0].scores, said[1].scores, strict=True):
        assert float((got - wanted).abs().max()) <= 1e-9 * float(wanted.abs().max())


def test_a_cache_in_training_is_counted_as_the_slow_way(both: tuple[Any, Any]) -> None:
    both[1](**GIVEN, use_cache=True)
    assert any(name.endswith("layers.0") for name in lean.handed_over(both[1]))


def test_router_logits_are_heard_with_their_gradient(both: tuple[Any, Any]) -> None:
    """An auxiliary loss comes from hooks on the routers."""
    losses = [model(**GIVEN, labels=IDS, output_router_logits=True, use_cache=False) for model in both]
    assert len(losses[0].router_logits) == len(losses[1].router_logits) == 4
    for out in losses:
        out.aux_loss.backward()
    grads = [{n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in both]
    assert grads[0]
    same(grads[1], grads[0])


def test_hidden_states_are_recorded(both: tuple[Any, Any]) -> None:
    wanted, got = (model(**GIVEN, output_hidden_states=True, use_cache=False).hidden_states for model in both)
    assert len(wanted) == len(got) == 5
    for w, g in zip(wanted, got, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


def test_a_hook_on_a_linear_is_honoured(both: tuple[Any, Any]) -> None:
    for model in both:
        linear = model.get_base_model().model.layers[-1].self_attn.o_proj
        linear.register_forward_hook(lambda _, __, out: out * 2)
    agree(both)


@pytest.mark.parametrize("norm", ["self_attn.q_norm", "self_attn.k_norm", "linear_attn.norm"])
def test_a_hook_that_comes_late_on_a_norm_inside_a_mixer_is_honoured(both: tuple[Any, Any], norm: str) -> None:
    """The mixers compute these norms in kernels of their own, so nobody calls the module."""
    mixer, _, name = norm.partition(".")
    for model in both:
        for layer in model.get_base_model().model.layers:
            if hasattr(layer, mixer):
                getattr(getattr(layer, mixer), name).register_forward_hook(lambda _, __, out: out * 2)
    agree(both)
    same(gradients(both[1], GIVEN), gradients(both[0], GIVEN))
    assert all(each.endswith(mixer) for each in lean.handed_over(both[1]))


def test_a_layer_merged_again_counts_with_the_factors_of_that_day(both: tuple[Any, Any]) -> None:
    """PEFT writes a merge past the version counter of the weight, and one small enough rides in the thin product, of which a copy is kept."""
    names = ("in_proj_a", "in_proj_b", "k_proj", "v_proj")
    merged = [
        [module for name, module in model.named_modules() if name.endswith(names) and hasattr(module, "lora_A")]
        for model in both
    ]
    for _ in range(3):
        agree(both)
        for linears in merged:
            for linear in linears:
                linear.merge()
        agree(both)
        for linears in merged:
            for linear in linears:
                linear.unmerge()
                with torch.no_grad():
                    linear.lora_A["default"].weight.mul_(3.0)


def test_a_copy_of_a_model_trains_by_itself(both: tuple[Any, Any]) -> None:
    stock, ours = both
    agree(both)
    other = twin(ours)
    assert lean.replaced(other) == {}
    for model in (stock, other):
        randomise(model, seed=9)
    agree((stock, other))
    same(gradients(other, inputs("packed")), gradients(stock, inputs("packed")))
    assert all(each.grad is None for each in ours.parameters())


def test_a_merged_and_unloaded_model_gives_the_same(both: tuple[Any, Any]) -> None:
    agree(both)
    agree((both[0].merge_and_unload(), both[1].merge_and_unload()))


def test_removed_the_model_is_the_stock_one_again(both: tuple[Any, Any]) -> None:
    before = agree(both)
    lean.remove(both[1])
    assert not any(name.startswith("livery_in") for module in both[1].modules() for name in vars(module))
    assert lean.recompute_of(both[1]) is None
    assert torch.allclose(agree(both), before)
    with pytest.raises(ValueError, match=r"want training\.lean\.install first"):
        lean.set_recompute(both[1], "none")


def test_a_model_without_adapters_is_computed_too(both: tuple[Any, Any]) -> None:
    stock, ours = (model.unload() for model in both)
    lean.install(ours)
    agree((stock, ours))


def test_an_unknown_policy_is_refused(both: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="'some'; want one of none, mixer, experts_kept, full"):
        lean.set_recompute(both[1], "some")


def test_a_linear_with_dropout_in_its_adapter_stays_stock_and_is_named(gated: Family) -> None:
    model = adapted(gated)
    attention = model.get_base_model().model.layers[3].self_attn
    attention.q_proj.lora_dropout["default"] = nn.Dropout(0.5)
    found = lean.install(model)
    name = "base_model.model.model.layers.3.self_attn.q_proj"
    assert found.left == {name: "adapter default has dropout"} and found.whole
    drawn: list[int] = []
    attention.q_proj.lora_dropout["default"].register_forward_hook(lambda *_: drawn.append(1))
    torch.manual_seed(0)
    wanted = gradients(model, GIVEN)
    lean.set_recompute(model, "full")
    torch.manual_seed(0)
    same(gradients(model, GIVEN), wanted)  # computed again, it draws the same numbers
    assert len(drawn) == 1 + 2 and lean.handed_over(model) == {}


LEFT: dict[str, tuple[str, str, Any]] = {
    "a bias": ("layers.0.linear_attn.out_proj", "it has a bias", lambda m: bias(m.layers[0].linear_attn.out_proj)),
    "a trained base weight": (
        "layers.3.self_attn.k_proj",
        "its weight is trained, want it frozen",
        lambda m: m.layers[3].self_attn.k_proj.base_layer.weight.requires_grad_(),
    ),
    "a trained norm": ("norm", "its weight is trained, want it frozen", lambda m: m.norm.weight.requires_grad_()),
    "a foreign forward": (
        "layers.1",
        "its forward was replaced by tests.training.lean.test_lean_peft",
        lambda m: setattr(m.layers[1], "forward", foreign),
    ),
    "another activation": (
        "layers.2.mlp.shared_expert",
        "its activation is GELU",
        lambda m: setattr(m.layers[2].mlp.shared_expert, "act_fn", nn.GELU()),
    ),
    "a window": (
        "layers.3.self_attn",
        "its window is 8 tokens",
        lambda m: setattr(m.layers[3].self_attn, "sliding_window", 8),
    ),
    "another number of taps": (
        "layers.0.linear_attn",
        "conv1d is Conv1d",
        lambda m: setattr(m.layers[0].linear_attn, "conv1d", nn.Conv1d(8, 8, 3)),
    ),
}


def foreign(*_: Any, **__: Any) -> None:
    raise AssertionError("never called")


def bias(linear: Any) -> None:
    linear.base_layer.bias = nn.Parameter(torch.zeros(64, dtype=torch.float64), requires_grad=False)


@pytest.mark.parametrize("case", LEFT)
def test_what_cannot_be_computed_here_stays_stock_and_says_why(gated: Family, case: str) -> None:
    where, why, change = LEFT[case]
    model = adapted(gated)
    change(model.get_base_model().model)
    found = lean.install(model)
    assert found.left[f"base_model.model.model.{where}"].startswith(why)
    assert found.whole == where.endswith("_proj")


def test_a_model_that_is_partly_left_stock_still_gives_the_same(gated: Family) -> None:
    stock = adapted(gated)
    stock.get_base_model().model.layers[3].self_attn.attention_dropout = 1e-300
    linear = stock.get_base_model().model.layers[0].linear_attn.out_proj
    linear.base_layer.bias = nn.Parameter(torch.zeros(64, dtype=torch.float64), requires_grad=False)
    stock.get_base_model().model.layers[1].mlp.shared_expert.act_fn = nn.GELU()
    ours = twin(stock)
    found = lean.install(ours)
    assert {name.partition("model.layers.")[2] for name in found.left} == {
        "0.linear_attn.out_proj",
        "3.self_attn",
        "1.mlp",
        "1.mlp.shared_expert",
    }
    for policy in ("none", "mixer", "experts_kept", "full"):
        lean.set_recompute(ours, policy)
        same(gradients(ours, inputs("packed")), gradients(stock, inputs("packed")))


def test_a_forward_that_somebody_replaced_is_named(both: tuple[Any, Any]) -> None:
    ours = both[1]
    assert lean.replaced(ours) == {}
    attention = ours.get_base_model().model.layers[3].self_attn
    attention.forward = types.MethodType(foreign, attention)
    assert list(lean.replaced(ours).values()) == ["tests.training.lean.test_lean_peft.foreign"] or (
        "foreign" in next(iter(lean.replaced(ours).values()))
    )
    assert list(lean.replaced(ours)) == ["base_model.model.model.layers.3.self_attn"]


def test_the_liveness_canary_hears_every_group(tiny: Path) -> None:
    recipe: Recipe = recipe_of("tiny-moe")
    model = attach(load_base(tiny / "model", recipe), recipe, None)
    randomise(model.double())
    model.float()
    lean.install(model)
    groups = tuple(liveness.canary(model, IDS[:1], ("attention", "linear_attention", "shared_expert")))
    assert groups == ("attention", "linear_attention", "shared_expert")
    assert min(experts.calls(model, "adapted").values()) > 0
