"""What we hand to cuDNN for packed documents: a stand-in with its front end's arguments reads memory by the shapes, strides and offsets it was given."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch
from torch import Tensor

from training.lean import cudnn_attention, packed_attention

CPU = torch.device("cpu")


class Described:
    """A tensor of a graph, as `cudnn.tensor` is set up."""

    def __init__(self, dim: list[int] | None = None, stride: list[int] | None = None) -> None:
        self.dim, self.stride, self.offset, self.output = dim, stride, None, False

    def set_output(self, output: bool) -> Described:
        self.output = output
        return self

    def set_data_type(self, _: Any) -> Described:
        return self

    def set_dim(self, dim: list[int]) -> Described:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Described:
        self.stride = stride
        return self

    def set_ragged_offset(self, offset: Described) -> Described:
        self.offset = offset
        return self

    def document(self, given: dict[Described, Tensor], number: int, tokens: int) -> Tensor:
        """[heads, tokens, numbers], a view of what was given."""
        start = int(given[self.offset][number])
        return given[self].as_strided((self.dim[1], tokens, self.dim[3]), self.stride[1:], start)


class Graph:
    built: list[Graph] = []

    def __init__(self, **_: Any) -> None:
        Graph.built.append(self)
        self.run: Any = None
        self.tokens: int | None = None

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: Any) -> Described:
        return Described(dim, stride)

    def sdpa(self, q: Described, k: Described, v: Described, *, generate_stats: bool, **masks: Any) -> Any:
        assert generate_stats
        out, norm = Described(), Described()

        def run(given: dict[Described, Tensor]) -> None:
            for number, n in self._documents(given, q, **masks):
                each = (x.document(given, number, n) for x in (q, k, v))
                mixed, log = attention(*each, masks["attn_scale"])
                out.document(given, number, n).copy_(mixed)
                norm.document(given, number, n).copy_(log[..., None])

        self.run = run
        return out, norm

    def sdpa_backward(
        self, *inputs: Described, max_total_seq_len_q: int, max_total_seq_len_kv: int, **masks: Any
    ) -> Any:
        self.tokens = max_total_seq_len_q
        assert max_total_seq_len_kv == max_total_seq_len_q
        gradients = [Described() for _ in range(3)]

        def run(given: dict[Described, Tensor]) -> None:
            for number, n in self._documents(given, inputs[0], **masks):
                q, k, v, out, dout, norm = (x.document(given, number, n) for x in inputs)
                leaves = [x.clone().requires_grad_() for x in (q, k, v)]
                with torch.enable_grad():
                    mixed, log = attention(*leaves, masks["attn_scale"])
                assert torch.allclose(mixed, out) and torch.allclose(log, norm[..., 0])
                for where, gradient in zip(gradients, torch.autograd.grad(mixed, leaves, dout), strict=True):
                    where.document(given, number, n).copy_(gradient)

        self.run = run
        return gradients

    def _documents(
        self,
        given: dict[Described, Tensor],
        q: Described,
        *,
        attn_scale: float,
        use_causal_mask: bool,
        use_padding_mask: bool,
        seq_len_q: Described,
        seq_len_kv: Described,
    ) -> Iterator[tuple[int, int]]:
        assert use_causal_mask and use_padding_mask
        assert torch.equal(given[seq_len_q], given[seq_len_kv])
        lengths = given[seq_len_q].tolist()
        assert len(lengths) == q.dim[0] and max(lengths) <= q.dim[2]
        assert self.tokens is None or sum(lengths) <= self.tokens
        yield from enumerate(lengths)

    def execute(self, given: dict[Described, Tensor], workspace: Tensor, *, handle: Any) -> None:
        small = [tensor for tensor in given.values() if tensor.dtype == torch.int32]
        # Rows of a table start where cuDNN may read 16 bytes at once.
        assert small and all(tensor.storage_offset() * 4 % 16 == 0 and tensor.is_contiguous() for tensor in small)
        self.run(given)

    def validate(self) -> None: ...
    def build_operation_graph(self) -> None: ...
    def create_execution_plans(self, _: Any) -> None: ...
    def check_support(self) -> None: ...
    def build_plans(self) -> None: ...
    def get_workspace_size(self) -> int:
        return 0


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """([N, n, D], log of the sums [N, n]) of one document."""
    share, n = q.shape[0] // k.shape[0], q.shape[1]
    k, v = (x.repeat_interleave(share, dim=0) for x in (k, v))
    score = (q @ k.transpose(1, 2) * scale).masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    return score.softmax(-1) @ v, score.logsumexp(-1)


@pytest.fixture(autouse=True)
def front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = types.SimpleNamespace(BFLOAT16="bf16", HALF="half", FLOAT="float", INT32="int32")
    module: Any = types.ModuleType("cudnn")
    module.pygraph, module.data_type, module.heur_mode = Graph, kinds, types.SimpleNamespace(A="a")
    monkeypatch.setitem(sys.modules, "cudnn", module)
    monkeypatch.setattr(cudnn_attention, "_handle", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    Graph.built.clear()
    for plan in (cudnn_attention._forward_plan, cudnn_attention._backward_plan, cudnn_attention._numbers):
        plan.cache_clear()


def row(lengths: tuple[int, ...], heads: int = 4, keys: int = 2, D: int = 8) -> tuple[list[Tensor], Tensor, Tensor]:
    """Queries, keys and values, beside other numbers as one product makes them; the output's gradient; the ends."""
    T, generator = sum(lengths), torch.Generator().manual_seed(0)
    both = torch.randn(T, 2 * keys, D, generator=generator)
    q, dout = (torch.randn(T, heads, D, generator=generator) for _ in range(2))
    leaves = [q.requires_grad_(), both[:, :keys].requires_grad_(), both[:, keys:].requires_grad_()]
    return leaves, dout, torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("lengths", [(13,), (5, 1, 7, 30, 3), (9, 4, 0, 0, 0), (3,) * 11])
def test_each_document_reads_itself_and_its_gradients_find_their_places(lengths: tuple[int, ...]) -> None:
    leaves, dout, ends = row(lengths)
    seen, wanted = (
        (out := call(*leaves, ends, max(lengths), 0.3), *torch.autograd.grad(out, leaves, dout))
        for call in (cudnn_attention.attend, packed_attention.plain)
    )
    for a, b in zip(seen, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_plan_serves_rows_of_other_documents_that_are_no_larger() -> None:
    for lengths in ((30, 12), (5, 1, 7, 30, 3), (1000,), (3,) * 8):
        leaves, dout, ends = row(lengths)
        out = cudnn_attention.attend(*leaves, ends, max(lengths), 0.3)
        torch.autograd.grad(out, leaves, dout)
    assert len(Graph.built) == 2
    cudnn_attention.attend(*row((3,) * 9)[0], row((3,) * 9)[2], 3, 0.3)
    cudnn_attention.attend(*row((1025,))[0], row((1025,))[2], 1025, 0.3)
    assert len(Graph.built) == 4


def test_no_plan_is_built_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, _, ends = row((9, 4))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run a micro-batch of this size first"):
        cudnn_attention.attend(*leaves, ends, 9, 0.3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cudnn_attention.attend(*leaves, ends, 9, 0.3)


def test_a_row_whose_numbers_do_not_fit_an_offset_is_refused() -> None:
    q, k = (torch.empty(2**20, n, 256, device="meta") for n in (8, 1))
    with pytest.raises(ValueError, match=r"2\^31"):
        cudnn_attention.attend(q, k, k, torch.tensor([0, 2**20], dtype=torch.int32), 2**20, 0.3)


def test_it_is_for_hopper_cards_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda", 0)
    assert cudnn_attention.missing(CPU, 256) == "not a Hopper card"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert cudnn_attention.missing(card, 256) == "not a Hopper card"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert "512" in cudnn_attention.missing(card, 512)
    monkeypatch.setattr(cudnn_attention, "find_spec", lambda _: object())
    assert cudnn_attention.missing(card, 256) == ""
    monkeypatch.setattr(cudnn_attention, "find_spec", lambda _: None)
    assert "nvidia-cudnn-frontend" in cudnn_attention.missing(card, 256)
