"""Run by test_kernel_layer.py under Triton's interpreter: a one-layer Qwen-MoE, once on grouped products and once on our kernels."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from kernels.adapter import Adapter
from kernels.grouped_gemm import Thin
from kernels.moe_lora import Plan, Tile
from tests.kernels import checks
from training import experts
from training.kernel_layer import KernelLayer
from training.liveness.reading import require_reading

PLAN = Plan(
    "tiny",
    tma=False,
    rows=32,
    up=Tile(32, 64, 4, 2),
    down=Tile(64, 32, 4, 2, tall=True),
    down_backward=Tile(32, 64, 4, 2),
    up_backward=Tile(64, 64, 4, 2, tall=True),
    thin=Thin(64, 4, 2),
    gradients=Tile(32, 32, 4, 2),
)
IDS = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))


def adapted() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    base = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    routed = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "o_proj"], target_parameters=routed)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
            elif "experts" in name and "base" in name and "lora" not in name:
                parameter.normal_(std=0.2)
    return model


def two_micro_batches(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    loss = sum(model(input_ids=ids, labels=ids, use_cache=False).loss for ids in IDS.split(1))
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == wanted.keys() and sum("experts" in name for name in wanted) == 4
    for name, gradient in wanted.items():
        error = float((ours[name] - gradient).norm() / gradient.norm())
        assert gradient.norm() > 0 and error < 1e-5, (name, error)


def one_projection_alone(*models: Any) -> None:
    """With one projection's adapter switched off, values and gradients are still the grouped path's."""
    for quiet in ("gate_up_proj", "down_proj"):
        seen = []
        for model in models:
            (_, wrapper) = next(iter(experts.outer_wrappers(model)))
            link = next(each for each in experts.chain(wrapper) if each.parameter_name == quiet)
            model.zero_grad()
            link._disable_adapters = True
            loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
            loss.backward()
            link._disable_adapters = False
            seen.append((loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        torch.testing.assert_close(seen[1][0], seen[0][0], rtol=1e-5, atol=1e-5)
        assert seen[0][1].keys() == seen[1][1].keys() and sum("experts" in name for name in seen[0][1]) == 2
        for name, gradient in seen[0][1].items():
            torch.testing.assert_close(seen[1][1][name], gradient, rtol=1e-3, atol=1e-5)


class ForOneCall:
    """Weights and masters that are made for each call, as those of a packed base are."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, module: Any, hidden: Any, ids: Any, weights: Any, active: Any) -> Any:
        up, down = module.gate_up_proj.clone(), module.down_proj.clone()
        self.made += [weakref.ref(up), weakref.ref(down)]
        passing = {
            name: [replace(each, A=each.A * 1, B=(each.B.t() * 1).t()) for each in of] for name, of in active.items()
        }
        self.made += [weakref.ref(factor) for (each,) in passing.values() for factor in (each.A, each.B)]
        unpacked = SimpleNamespace(gate_up_proj=up, down_proj=down, num_experts=module.num_experts)
        return KernelLayer(PLAN)(unpacked, hidden, ids, weights, passing)


def nothing_of_one_call_is_kept(model: Any, wanted: dict[str, torch.Tensor]) -> None:
    """Under checkpointing, what was made for the forward pass is gone after it: 94 layers of it would not fit."""
    layer = ForOneCall()
    experts.install(model, layer=layer)
    model.zero_grad()
    gc.disable()
    loss = sum(model(input_ids=ids, labels=ids, use_cache=False).loss for ids in IDS.split(1))
    assert len(layer.made) == 12 and not any(each() is not None for each in layer.made)
    loss.backward()
    assert len(layer.made) == 24 and not any(each() is not None for each in layer.made)
    gc.enable()
    same({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, wanted)


def copies_that_are_not_kept_are_gone(model: Any, wanted: dict[str, torch.Tensor]) -> None:
    """What the kernels read of a streamed base's adapters: kept, 94 layers of it are half of the masters' memory again."""
    made: list[Any] = []
    write = Adapter._written

    def watched(self: Adapter, room: Any) -> Any:
        made.append(weakref.ref(room[1]))
        return write(self, room)

    Adapter._written = watched  # type: ignore[method-assign]
    for kept in (True, False):
        made.clear()
        experts.install(model, layer=KernelLayer(PLAN, keep_copies=kept))
        for _, wrapper in experts.outer_wrappers(model):
            for link in experts.chain(wrapper):
                vars(link.lora_A["default"].weight).pop("livery_adapter", None)
        model.zero_grad()
        gc.disable()
        loss = sum(model(input_ids=ids, labels=ids, use_cache=False).loss for ids in IDS.split(1))
        assert made and any(each() is not None for each in made) == kept
        loss.backward()
        gc.enable()
        same({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, wanted)
    Adapter._written = write  # type: ignore[method-assign]


if __name__ == "__main__":
    checks.patch_once()
    grouped = adapted()
    kernels = copy.deepcopy(grouped)
    experts.install(grouped)
    assert experts.choice(grouped) is None
    experts.install(kernels, layer=KernelLayer(PLAN))
    wanted_loss, wanted = two_micro_batches(grouped)
    loss, gradients = two_micro_batches(kernels)
    assert abs(loss - wanted_loss) < 1e-5, (loss, wanted_loss)
    same(gradients, wanted)
    nothing_of_one_call_is_kept(kernels, wanted)
    copies_that_are_not_kept_are_gone(kernels, wanted)
    experts.install(kernels, layer=KernelLayer(PLAN))

    one_projection_alone(grouped, kernels)
    # Reads each projection's delta by itself, as a run does before its first step.
    require_reading(kernels)

    for model in (grouped, kernels):  # after a step the kernels' copies of the factors are new
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True).step()
    with torch.no_grad():
        after = [model(input_ids=IDS[:1], use_cache=False).logits for model in (grouped, kernels)]
        with grouped.disable_adapter(), kernels.disable_adapter():
            off = [model(input_ids=IDS[:1], use_cache=False).logits for model in (grouped, kernels)]
    torch.testing.assert_close(after[1], after[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(off[1], off[0], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(after[0], off[0], atol=1e-3)
