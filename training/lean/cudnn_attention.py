"""Causal attention over packed documents by cuDNN, through its own front end.

On an H200 16,384 tokens of 8 documents with 16 heads of 256 take it 3.3 ms, forward and backward, and torch's variable-length kernel (flash-attention 2)
5.0. torch 2.11 hands packed rows to cuDNN, too, but builds the plan anew in each call, 50 ms of the host's time, and the gradients were wrong. Here a
plan is built once for each size. Sizes are rounded up: a plan takes documents that are no more and no longer, and rows that are no longer, than it was
built for. Nothing is read on the host, so a captured graph replays with other borders.

Shape letters: T tokens, N heads, K key-value heads, D numbers of a head, E borders, B documents of a plan, S tokens of its longest document.
"""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FEWEST, _SHORTEST, _TOKENS = 8, 1024, 4096


class Sizes(NamedTuple):
    """What a plan is built for."""

    documents: int
    longest: int
    tokens: int
    heads: int
    key_heads: int
    head_size: int
    dtype: torch.dtype
    scale: float
    device: int


def missing(device: torch.device, head_size: int) -> str:
    """Why it is not to be tried, if so."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "not a Hopper card"
    if head_size % 8 or head_size > 256:
        return f"heads of {head_size} numbers"
    return "" if find_spec("cudnn") else "nvidia-cudnn-frontend is not installed"


def attend(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, ends_E: Tensor, longest: int, scale: float) -> Tensor:
    """[T, N, D] in bfloat16 or float16. `ends_E` is 0, the end of each document, and T at last, int32; documents without tokens may stand at its end."""
    out: Tensor = _Attend.apply(q_TND, k_TKD, v_TKD, ends_E, longest, scale)
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        T, N, D = q.shape
        if T * N * D >= 2**31:
            raise ValueError(f"{T} tokens of {N} heads of {D} numbers; want fewer than 2^31 numbers in a packed row")
        sizes = Sizes(
            _power_of_2(max(_FEWEST, len(ends) - 1)),
            _power_of_2(max(_SHORTEST, longest)),
            -(-T // _TOKENS) * _TOKENS,
            N,
            k.shape[1],
            D,
            q.dtype,
            scale,
            q.device.index,
        )
        out, norm = torch.empty_like(q), torch.empty(T, N, 1, dtype=torch.float32, device=q.device)
        lengths, offsets = _borders(ends, sizes)
        given = {"q": q, "k": k, "v": v, "out": out, "norm": norm}
        _run(_forward_plan(sizes), sizes.device, given | _named(lengths, offsets))
        ctx.save_for_backward(q, k, v, out, norm, lengths, offsets)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, norm, lengths, offsets = ctx.saved_tensors
        gradients = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
        given = {"q": q, "k": k, "v": v, "out": out, "norm": norm, "dout": dout.contiguous()}
        _run(_backward_plan(ctx.sizes), ctx.sizes.device, given | gradients | _named(lengths, offsets))
        return *gradients.values(), None, None, None


def _power_of_2(at_least: int) -> int:
    return 1 << (at_least - 1).bit_length()


def _borders(ends_E: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """(each document's length [B], where it starts in the numbers of queries, of keys and of row norms [3, B + 4]), int32. What is missing of B is
    documents without tokens; what is over is there so that each row starts at 16 bytes."""
    wanted = sizes.documents + 4
    padded = torch.cat([ends_E, ends_E[-1:].expand(wanted - len(ends_E))])
    numbers = _numbers(sizes.heads, sizes.key_heads, sizes.head_size, ends_E.device)
    return padded.diff()[: sizes.documents], numbers * padded


@functools.cache
def _numbers(heads: int, key_heads: int, head_size: int, device: torch.device) -> Tensor:
    """Of a token, [3, 1]."""
    with torch.inference_mode(False):
        each = [[heads * head_size], [key_heads * head_size], [heads]]
        return torch.tensor(each, dtype=torch.int32, device=device)


def _named(lengths: Tensor, offsets: Tensor) -> dict[str, Tensor]:
    starts = dict(zip(("queries", "keys", "rows"), offsets, strict=True))
    return {"query_lengths": lengths, "key_lengths": lengths, **starts}


class _Plan(NamedTuple):
    graph: Any
    tensors: dict[str, Any]
    workspace: int


def _run(plan: _Plan, device: int, given: dict[str, Tensor]) -> None:
    tensors = {plan.tensors[name]: tensor for name, tensor in given.items()}
    workspace = torch.empty(max(1, plan.workspace), dtype=torch.uint8, device=given["q"].device)
    plan.graph.execute(tensors, workspace, handle=_handle(device))


def _handle(device: int) -> Any:
    import cudnn  # type: ignore[import-not-found]

    handle = _handles(device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    return handle


@functools.cache
def _handles(device: int) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.cache
def _forward_plan(sizes: Sizes) -> _Plan:
    graph, tensors, masks = _begun(sizes)
    out, norm = graph.sdpa(tensors["q"], tensors["k"], tensors["v"], generate_stats=True, **masks)
    _shape(out.set_output(True), sizes, sizes.heads, tensors["queries"])
    dim, stride = _norm_shape(sizes)
    norm.set_output(True).set_data_type(_cudnn().data_type.FLOAT).set_dim(dim).set_stride(stride)
    norm.set_ragged_offset(tensors["rows"])
    return _built(graph, tensors | {"out": out, "norm": norm})


@functools.cache
def _backward_plan(sizes: Sizes) -> _Plan:
    graph, tensors, masks = _begun(sizes)
    tensors["out"], tensors["dout"] = (
        _packed(graph, sizes, n, sizes.heads, tensors["queries"]) for n in ("out", "dout")
    )
    dim, stride = _norm_shape(sizes)
    tensors["norm"] = graph.tensor(name="norm", dim=dim, stride=stride, data_type=_cudnn().data_type.FLOAT)
    tensors["norm"].set_ragged_offset(tensors["rows"])
    # Without these its workspace would hold, and fill with zeros, as many tokens as documents of the longest length have.
    tokens = {"max_total_seq_len_q": sizes.tokens, "max_total_seq_len_kv": sizes.tokens}
    inputs = (tensors[name] for name in ("q", "k", "v", "out", "dout", "norm"))
    for name, each in zip(("dq", "dk", "dv"), graph.sdpa_backward(*inputs, **masks, **tokens), strict=True):
        heads, offsets = (sizes.heads, "queries") if name == "dq" else (sizes.key_heads, "keys")
        _shape(each.set_output(True), sizes, heads, tensors[offsets])
        tensors[name] = each
    return _built(graph, tensors)


def _begun(sizes: Sizes) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """A graph with the tensors that both directions have, and the arguments that say who reads whom. RuntimeError inside a CUDA graph's capture, which
    cuDNN's compiler would break."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"no plan for {sizes} before the capture of a CUDA graph; run a micro-batch of this size first"
        )
    types = _cudnn().data_type
    graph = _cudnn().pygraph(
        io_data_type=types.BFLOAT16 if sizes.dtype == torch.bfloat16 else types.HALF,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        handle=_handle(sizes.device),
    )
    B = sizes.documents
    tensors: dict[str, Any] = {}
    sides = {"query_lengths": B, "key_lengths": B, "queries": B + 1, "keys": B + 1, "rows": B + 1}
    for name, length in sides.items():
        tensors[name] = graph.tensor(name=name, dim=[length, 1, 1, 1], stride=[1, 1, 1, 1], data_type=types.INT32)
    tensors["q"] = _packed(graph, sizes, "q", sizes.heads, tensors["queries"])
    tensors["k"], tensors["v"] = (_packed(graph, sizes, n, sizes.key_heads, tensors["keys"]) for n in ("k", "v"))
    masks = {"attn_scale": sizes.scale, "use_causal_mask": True, "use_padding_mask": True}
    return graph, tensors, masks | {"seq_len_q": tensors["query_lengths"], "seq_len_kv": tensors["key_lengths"]}


def _packed(graph: Any, sizes: Sizes, name: str, heads: int, offsets: Any) -> Any:
    types = _cudnn().data_type
    dtype = types.BFLOAT16 if sizes.dtype == torch.bfloat16 else types.HALF
    dim, stride = _dense_shape(sizes, heads)
    tensor = graph.tensor(name=name, dim=dim, stride=stride, data_type=dtype)
    tensor.set_ragged_offset(offsets)
    return tensor


def _shape(tensor: Any, sizes: Sizes, heads: int, offsets: Any) -> None:
    dim, stride = _dense_shape(sizes, heads)
    tensor.set_dim(dim).set_stride(stride).set_ragged_offset(offsets)


def _dense_shape(sizes: Sizes, heads: int) -> tuple[list[int], list[int]]:
    """As if every document were of the longest length; the offsets say where each one really starts."""
    B, S, D = sizes.documents, sizes.longest, sizes.head_size
    return [B, heads, S, D], [S * heads * D, D, heads * D, 1]


def _norm_shape(sizes: Sizes) -> tuple[list[int], list[int]]:
    B, S, N = sizes.documents, sizes.longest, sizes.heads
    return [B, N, S, 1], [S * N, 1, N, 1]


def _built(graph: Any, tensors: dict[str, Any]) -> _Plan:
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([_cudnn().heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return _Plan(graph, tensors, graph.get_workspace_size())


def _cudnn() -> Any:
    import cudnn

    return cudnn
