"""What runs on a card alone, with a plain stand-in for each kernel of other people that has its documented arguments: which numbers we hand over."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

from tests.training.lean.conftest import DOCUMENTS, adapted, gradients, inputs, same, twin
from training import lean
from training.contract.families import Family
from training.lean import attention, delta_net, segments


def flash_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool,
    use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool,
    A_log: Tensor,
    dt_bias: Tensor,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
) -> tuple[Tensor, None]:
    """As version 0.6.0 documents it: raw gates, [B, T, heads, D], fewer query than value heads, one row if it is packed."""
    assert use_qk_l2norm_in_kernel and use_gate_in_kernel and use_beta_sigmoid_in_kernel
    assert q.shape == k.shape and v.shape[2] % q.shape[2] == 0 and g.shape == beta.shape == v.shape[:3]
    decay = -A_log.double().exp() * nn.functional.softplus(g.double() + dt_bias.double())
    options = {"beta": torch.sigmoid(beta), "use_qk_l2norm_in_kernel": True, "cu_seqlens": cu_seqlens}
    if cu_seqlens is not None:
        assert q.shape[0] == 1
        assert chunk_indices is None or chunk_indices.tolist() == chunks_of(cu_seqlens.tolist())
    return modeling.torch_chunk_gated_delta_rule(q, k, v, g=decay, **options)[0], None


def chunks_of(ends: list[int]) -> list[list[int]]:
    """As flash-linear-attention lists them: (document, chunk of 64 tokens in it)."""
    lengths = [b - a for a, b in itertools.pairwise(ends)]
    return [[number, chunk] for number, length in enumerate(lengths) for chunk in range(-(-length // 64))]


def _attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, share: int) -> Tensor:
    k, v = (each.repeat_interleave(share, dim=1) for each in (k, v))
    parts = []
    for a, b in itertools.pairwise(ends.tolist()):
        rows = [each[a:b].transpose(0, 1)[None] for each in (q, k, v)]
        parts.append(nn.functional.scaled_dot_product_attention(*rows, is_causal=True)[0].transpose(0, 1))
    return torch.cat(parts)


def early_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    return_aux: Any = None,
) -> Tensor:
    """As torch 2.10 has it: no scale, as many key heads as query heads."""
    assert is_causal and query.shape == key.shape == value.shape
    assert max_q == max_k == int(cu_seq_q.diff().max())
    return _attend(query, key, value, cu_seq_q, 1)


def late_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """As torch 2.13 has it."""
    assert window_size == (-1, 0) and scale == query.shape[-1] ** -0.5
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert cu_seq_q.dtype == torch.int32 and max_q == int(cu_seq_q.diff().max())
    return _attend(query, key, value, cu_seq_q, query.shape[1] // key.shape[1])


@pytest.fixture(params=[early_varlen, late_varlen], ids=["torch 2.10", "torch 2.13"])
def on_a_card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_net, "fast_rule", lambda device: flash_linear_attention)
    monkeypatch.setattr(attention, "takes_packed", lambda query: True)
    found = attention._varlen_attn
    monkeypatch.setattr(attention, "_varlen_attn", lambda: (request.param, names_of(request.param)))
    assert found() is not None, "torch has lost its variable-length attention"


def names_of(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(
        function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
    )


def test_packed_documents_need_no_mask_and_train_as_with_one(family: Family, on_a_card: None) -> None:
    stock = adapted(family)
    ours = twin(stock)
    lean.install(ours)
    wanted = gradients(stock, inputs("packed"))
    given = inputs("packed")
    given["attention_mask"] = lean.no_mask(ours, torch.device("cpu"))
    given["cu_seq_lens_cpu"] = given["cu_seq_lens_q"].clone()
    for policy in ("none", "full"):
        lean.set_recompute(ours, policy)
        same(gradients(ours, given), wanted)


@pytest.mark.parametrize("kind", ["rows", "padded"])
def test_whole_rows_go_through_the_fast_rule_row_by_row(gated: Family, on_a_card: None, kind: str) -> None:
    stock = adapted(gated)
    ours = twin(stock)
    lean.install(ours)
    same(gradients(ours, inputs(kind)), gradients(stock, inputs(kind)))


def test_chunk_indices_are_made_once_a_micro_batch() -> None:
    ends = torch.tensor([0, 9, 10, 13, 213], dtype=torch.int32)
    first = segments.chunk_indices({"cu_seq_lens_cpu": ends}, torch.device("cpu"))
    assert first is not None and first.dtype == torch.int32
    assert first.tolist() == chunks_of(ends.tolist())
    assert segments.chunk_indices({"cu_seq_lens_cpu": ends}, torch.device("cpu")) is first
    other = segments.chunk_indices({"cu_seq_lens_cpu": torch.tensor([0, 5], dtype=torch.int32)}, torch.device("cpu"))
    assert other is not None and other.tolist() == [[0, 0]]
    assert segments.chunk_indices({}, torch.device("cpu")) is None


def test_chunk_indices_made_in_inference_mode_serve_a_backward_pass() -> None:
    options = {"cu_seq_lens_cpu": torch.tensor([0, 9, 70], dtype=torch.int32)}
    with torch.inference_mode():
        found = segments.chunk_indices(options, torch.device("cpu"))
    assert found is not None and not found.is_inference()
    assert segments.chunk_indices(options, torch.device("meta")).device.type == "meta"  # type: ignore[union-attr]


def test_a_token_belongs_to_the_document_whose_lengths_hold_it() -> None:
    given = inputs("packed")
    numbers = segments.document_numbers(1, 83, torch.device("cpu"), {"cu_seq_lens_q": given["cu_seq_lens_q"]})
    assert torch.equal(numbers, given["seq_idx"][0]) and numbers.dtype == torch.int32
    assert sum(document.shape[1] for document in DOCUMENTS) == 83
    rows = segments.document_numbers(2, 3, torch.device("cpu"), {})
    assert rows.tolist() == [0, 0, 0, 1, 1, 1] and rows.dtype == torch.int32
