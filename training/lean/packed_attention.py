"""Which kernel packed documents' attention gets on this card: cuDNN's where it is right and not slower, else torch's own.

Asked for the first time it computes a short row both ways, with all gradients, and times a longer one; nothing of that is kept but the answer.

Shape letters: T tokens, N heads, K key-value heads, D numbers of a head, E borders.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from training.lean import cudnn_attention

Attend = Callable[..., Tensor]
"""(queries, keys, values, ends, longest document, scale) -> [T, N, D]."""

_CHECKED = (70, 1, 64, 300, 129, 0, 0)  # across blocks' borders, alone, a whole block, empty
_TIMED = (1500, 2596)
_TIMED_RUNS = 5
_CLEARLY = 1.05
"""torch's kernel takes over only if it is faster by more than the noise of a short timing."""
# Norm of a difference over the norm, beside float32 of the same inputs. Weights and their gradients are rounded to the dtype once on their way.
_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


class Shapes(NamedTuple):
    heads: int
    key_heads: int
    head_size: int
    dtype: torch.dtype


class Choice(NamedTuple):
    cudnn: bool
    reason: str
    slow: bool
    """cuDNN is faster on such a card, and cannot be had."""


@functools.cache
def choose(shapes: Shapes, device: torch.device, torchs: Attend) -> Choice:
    """RuntimeError inside the capture of a CUDA graph, which the check would become a part of."""
    reason = cudnn_attention.missing(device, shapes.head_size)
    if reason:
        return Choice(False, f"torch's kernel: {reason}", slow="not installed" in reason)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("packed attention is used first inside a CUDA graph's capture; run a micro-batch first")
    mine = other = 0.0
    with _alone():
        try:
            fault = _fault(shapes, device)
            if not fault:
                mine, other = (_milliseconds(each, shapes, device) for each in (cudnn_attention.attend, torchs))
        except Exception as error:  # noqa: BLE001 - a card whose cuDNN refuses must not end the run: torch's is there, and this is told
            fault = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    return _decide(fault, mine, other)


def _decide(fault: str, mine: float, other: float) -> Choice:
    if fault:
        return Choice(False, f"torch's kernel, since cuDNN's will not do: {fault}", slow=True)
    times = f"{sum(_TIMED)} tokens forward and backward in {mine:.2f} ms by cuDNN, {other:.2f} ms by torch's kernel"
    if other * _CLEARLY < mine:
        return Choice(False, f"torch's kernel: {times}", slow=False)
    return Choice(True, f"cuDNN: {times}", slow=False)


def plain(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, ends_E: Tensor, longest: int, scale: float) -> Tensor:
    """The same in plain torch, document by document; the host reads the ends."""
    share = q_TND.shape[1] // k_TKD.shape[1]
    outs = []
    for a, b in pairwise(ends_E.tolist()):
        keys, values = (each[a:b].repeat_interleave(share, dim=1) for each in (k_TKD, v_TKD))
        score_NTT = torch.einsum("snd,tnd->nst", q_TND[a:b], keys) * scale
        later_TT = torch.ones(b - a, b - a, dtype=torch.bool, device=q_TND.device).triu(1)
        outs.append(torch.einsum("nst,tnd->snd", score_NTT.masked_fill(later_TT, float("-inf")).softmax(-1), values))
    return torch.cat(outs)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """With gradients, and out of sight of a checkpoint around it, which would count what is saved here among its own."""
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cuda", enabled=False),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
        yield


class _Row(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    ends: Tensor
    longest: int


def _fault(shapes: Shapes, device: torch.device) -> str:
    """What is wrong with cuDNN's results, if anything is."""
    row = _random_row(shapes, _CHECKED, device)
    seen = _results(cudnn_attention.attend, row)
    wide = row._replace(q=row.q.float(), k=row.k.float(), v=row.v.float(), dout=row.dout.float())
    wanted = _results(plain, wide)
    limit = _TOLERANCE[shapes.dtype]
    apart = {name: float((seen[name].float() - value).norm() / value.norm()) for name, value in wanted.items()}
    wrong = [f"{name} by {off:.1e}" for name, off in apart.items() if not off <= limit]  # a NaN is not below anything
    return f"off in {', '.join(wrong)} of the norm, want at most {limit:.0e}" if wrong else ""


def _milliseconds(attend: Attend, shapes: Shapes, device: torch.device) -> float:
    row = _random_row(shapes, _TIMED, device)
    _results(attend, row)
    events: list[Any] = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_TIMED_RUNS)]  # type: ignore[no-untyped-call]
    for start, end in events:
        start.record()
        _results(attend, row)
        end.record()
    torch.cuda.synchronize(device)
    return float(sorted(start.elapsed_time(end) for start, end in events)[_TIMED_RUNS // 2])


def _random_row(shapes: Shapes, lengths: tuple[int, ...], device: torch.device) -> _Row:
    generator = torch.Generator(device).manual_seed(0)  # of its own: training's random numbers stay as they are
    T, D = sum(lengths), shapes.head_size
    heads = (shapes.heads, shapes.key_heads, shapes.key_heads, shapes.heads)
    q, k, v, dout = (torch.randn(T, n, D, generator=generator, device=device).to(shapes.dtype) for n in heads)
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    return _Row(q, k, v, dout, ends, max(lengths))


def _results(attend: Attend, row: _Row) -> dict[str, Tensor]:
    leaves = [each.detach().requires_grad_() for each in row[:3]]
    out = attend(*leaves, row.ends, row.longest, row.q.shape[-1] ** -0.5)
    found = (out.detach(), *torch.autograd.grad(out, leaves, row.dout))
    return dict(zip(("out", "dq", "dk", "dv"), found, strict=True))
