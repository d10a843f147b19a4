"""Packed attention by cuDNN on a real card at two models' heads: results beside float32, other borders in a captured graph, and what is chosen.

Run it on a machine with a card: `python -m pytest -m gpu tests/gpu/test_packed_attention_on_a_card.py`.
"""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch
from torch import Tensor

from kernels.dispatch import waits_for_host
from training.lean import attention, cudnn_attention, packed_attention
from training.lean.packed_attention import Attend, Shapes

HEADS = {"35B": (16, 2, 256), "235B": (64, 4, 128)}
LENGTHS = (1500, 1, 64, 300, 130, 53, 0, 0, 0)
OTHERS = (64, 400, 1003, 200, 128, 1, 252, 0, 0)
TOKENS = sum(LENGTHS)
MISSING = cudnn_attention.missing(torch.device("cuda", 0), 256) if torch.cuda.is_available() else "no CUDA card"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.timeout(300),
]


def row(model: str) -> list[Tensor]:
    """Queries, keys, values and the output's gradient; keys and values lie beside each other, as one product makes them."""
    heads, keys, D = HEADS[model]
    generator = torch.Generator("cuda").manual_seed(0)
    q, both, dout = (
        torch.randn(TOKENS, n, D, generator=generator, device="cuda").bfloat16() for n in (heads, 2 * keys, heads)
    )
    return [q, both[:, :keys], both[:, keys:], dout]


def ends(lengths: tuple[int, ...]) -> Tensor:
    assert sum(lengths) == TOKENS
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def results(attend: Attend, given: list[Tensor], borders: Tensor, longest: int = max(LENGTHS)) -> list[Tensor]:
    *leaves, dout = (each.detach().requires_grad_() for each in given)
    out = attend(*leaves, borders, longest, dout.shape[-1] ** -0.5)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.detach())]


def close(seen: list[Tensor], given: list[Tensor], lengths: tuple[int, ...]) -> bool:
    wanted = results(packed_attention.plain, [each.float() for each in given], ends(lengths))
    # Weights, and what their gradients are made of, are rounded to bfloat16 on their way: 0.003 on an H200.
    return all(float((a.float() - b).norm()) <= 6e-3 * float(b.norm()) for a, b in zip(seen, wanted, strict=True))


@pytest.mark.parametrize("longest", [max(LENGTHS), TOKENS])
@pytest.mark.parametrize("model", HEADS)
def test_every_result_beside_float32_without_a_wait_for_the_host(model: str, longest: int) -> None:
    given, borders = row(model), ends(LENGTHS)
    assert close(results(cudnn_attention.attend, given, borders, longest), given, LENGTHS)
    assert not waits_for_host(lambda: results(cudnn_attention.attend, given, borders, longest))


def test_a_captured_graph_replays_with_other_borders() -> None:
    given, borders = row("35B"), ends(LENGTHS)
    results(cudnn_attention.attend, given, borders)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen = results(cudnn_attention.attend, given, borders)
    borders.copy_(ends(OTHERS))
    graph.replay()
    assert close(seen, given, OTHERS) and not close(seen, given, LENGTHS)


@pytest.mark.parametrize("model", HEADS)
def test_the_choice_is_cudnn_and_says_what_it_measured(model: str) -> None:
    choice = packed_attention.choose(Shapes(*HEADS[model], torch.bfloat16), torch.device("cuda", 0), attention.torchs)
    print(model, choice.reason)
    assert choice.cudnn, choice.reason
