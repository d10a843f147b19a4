"""The lean decoder on a real card at Qwen3.6-35B's widths: each module beside float64, packed documents, no wait for the host, nothing handed over.

Run it on a machine with a card: `python -m pytest -m gpu tests/gpu/test_lean_modules_on_a_card.py`.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from tests.training.lean.conftest import lora_config, widen
from training import experts, lean, packing
from training.contract.families import FAMILIES
from training.lean import layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
    pytest.mark.timeout(400),
]

LENGTHS = (190, 1, 70, 64, 175)
TOKENS = sum(LENGTHS)
FAMILY = FAMILIES["qwen3_5_moe"]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """Four layers of the real widths, with fewer experts and a small vocabulary; bfloat16, adapters in float32."""
    from peft import get_peft_model
    from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    packing.install()
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    config = Qwen3_5MoeTextConfig(num_hidden_layers=4, layer_types=kinds, num_experts=32, vocab_size=2048)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    base = Qwen3_5MoeForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    base.set_experts_implementation("grouped_mm")
    model = get_peft_model(base, lora_config(FAMILY, r=32, lora_alpha=64, lora_dropout=0.0)).to("cuda")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    experts.install(model)
    assert lean.install(model).whole
    yield model.train()
    torch.cuda.empty_cache()


def packed(device: str) -> dict[str, Any]:
    ends = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    numbers = torch.arange(len(LENGTHS), dtype=torch.int32).repeat_interleave(torch.tensor(LENGTHS))[None]
    return {
        "cu_seq_lens_q": ends.to(device),
        "cu_seq_lens_k": ends.to(device),
        "cu_seq_lens_cpu": ends,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
        "seq_idx": numbers.to(device),
    }


def positions(device: str) -> Any:
    return torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)


def border_mask() -> Any:
    """[1, 1, T, T]: a token reads its own document up to itself."""
    number = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return ((number[:, None] == number) & torch.ones(TOKENS, TOKENS).tril().bool())[None, None]


@pytest.mark.parametrize("documents", ["packed", "one row"])
@pytest.mark.parametrize("path", ["layers.0.linear_attn", "layers.3.self_attn", "layers.1.mlp.shared_expert"])
def test_a_module_and_every_gradient_beside_float64(
    model: Any, path: str, documents: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = model.get_base_model().model
    module = text.get_submodule(path)
    x = torch.randn(1, TOKENS, 2048, generator=torch.Generator().manual_seed(1)).bfloat16()
    got = run(module, x.cuda(), options(text, path, documents, "cuda"))
    reference = exact(module)
    widen(FAMILY, monkeypatch)
    use_plain_rule(monkeypatch)
    wanted = run(reference, x.double(), options(text, path, documents, "cpu"))
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        error = float((got[name].double().cpu() - value).norm() / value.norm())
        # On a CPU, at a thirtieth of these widths, both ways of rounding lie 3 to 6 units of 2^-9 from float64.
        assert error <= 10 * 2**-9, (name, error)
        assert got[name].dtype == (torch.float32 if "lora" in name else torch.bfloat16), name


def options(text: Any, path: str, documents: str, device: str) -> dict[str, Any]:
    if path.endswith("shared_expert"):
        return {}
    found = packed(device) if documents == "packed" else {}
    if path.endswith("self_attn"):
        places = positions(device) if documents == "packed" else torch.arange(TOKENS, device=device)[None]
        rotary = copy.deepcopy(text.rotary_emb).to(device)
        dtype = torch.bfloat16 if device == "cuda" else torch.float64
        # What the card reads is rounded to bfloat16; so does the reference.
        embeddings = rotary(torch.empty(0, dtype=torch.bfloat16, device=device), places.expand(1, TOKENS))
        found["position_embeddings"] = tuple(each.to(dtype) for each in embeddings)
        found["attention_mask"] = border_mask() if documents == "packed" and device == "cpu" else None
    return found


def exact(module: Any) -> Any:
    """The stock module in float64 on the CPU, its adapters rounded as the card's products read them."""
    other = copy.deepcopy(module)
    lean.remove(other)
    other = other.cpu().double()
    for name, parameter in other.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16().double()
    return other


def use_plain_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' rule and convolution in plain torch, whatever kernels are installed here; documents one by one."""
    modeling = importlib.import_module(FAMILY.modeling)
    rule = getattr(modeling.torch_chunk_gated_delta_rule, "__closure__", None)
    cells = dict(zip(modeling.torch_chunk_gated_delta_rule.__code__.co_freevars, rule or (), strict=False))
    monkeypatch.setattr(packing, "has_fast_rule", lambda: False)
    plain = cells["plain_rule"].cell_contents

    def by_document(query: Any, key: Any, value: Any, **given: Any) -> tuple[Any, None]:
        if given.get("cu_seqlens") is not None:
            return packing._document_by_document(plain, query, key, value, given)  # type: ignore[return-value]
        return plain(query, key, value, **given)  # type: ignore[no-any-return]

    def conv(x: Any, weight: Any, bias: Any = None, activation: Any = None, **given: Any) -> Any:
        numbers = given.get("seq_idx")
        numbers = torch.zeros(x.shape[0], x.shape[-1], dtype=torch.int32) if numbers is None else numbers
        return packing.masked_conv(x, weight, bias, activation, numbers)

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", by_document)
    monkeypatch.setattr(modeling, "causal_conv1d_fn", conv)


def run(module: Any, x: Any, options: dict[str, Any]) -> dict[str, Any]:
    module.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda):
        out = module(x, **options)
    out = out[0] if isinstance(out, tuple) else out
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    (out * weights.to(out.device, out.dtype)).sum().backward()
    found = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    return found | {"out": out.detach(), "x": x.grad}


def micro_batch(model: Any) -> Any:
    ids = torch.randint(0, 2048, (1, TOKENS), generator=torch.Generator().manual_seed(2)).cuda()
    given = {"input_ids": ids, "position_ids": positions("cuda"), **packed("cuda")}
    given["attention_mask"] = {"full_attention": None, "linear_attention": None}
    # Not the sum of squares, which a norm holds fast.
    weights = torch.randn(1, TOKENS, 2048, generator=torch.Generator().manual_seed(3)).cuda() / TOKENS

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            hidden = model.get_base_model().model(**given, use_cache=False).last_hidden_state
        (hidden.float() * weights).sum().backward()
        return hidden.detach().float()

    return step


@pytest.mark.parametrize("policy", layers.RECOMPUTE)
def test_a_micro_batch_never_waits_for_the_host_and_every_policy_gives_the_same(model: Any, policy: str) -> None:
    from kernels.dispatch import waits_for_host

    step = micro_batch(model)
    grads = {}
    for each in ("none", policy):
        lean.set_recompute(model, each)
        model.zero_grad(set_to_none=True)
        step()
        grads[each] = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert len(grads["none"]) == sum(parameter.requires_grad for parameter in model.parameters())
    # Alike but for what the attention's backward adds up in no fixed order.
    for name, value in grads["none"].items():
        assert float((grads[policy][name] - value).norm()) <= 2**-6 * float(value.norm()), name
    assert not waits_for_host(step), "the host waited for the card inside a micro-batch"
    assert lean.handed_over(model) == {}


def test_the_delta_rules_kernel_gives_the_rules_gradients_here(model: Any) -> None:
    apart = lean.check_rule(model)
    print(apart)
    assert max(apart.values()) <= 2e-2


def test_documents_in_one_row_do_not_read_each_other(model: Any) -> None:
    model.eval()
    try:
        assert packing.check(model) <= 2e-2
    finally:
        model.train()


def test_an_optimizer_that_is_fused_is_followed(model: Any) -> None:
    step = micro_batch(model)
    model.zero_grad(set_to_none=True)
    before = step()
    saved = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True).step()
    after = step()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in saved:
                parameter.copy_(saved[name])
    assert float((after - before).norm()) > 1e-2 * float(before.norm())
    assert float((step() - before).norm()) <= 1e-3 * float(before.norm())
