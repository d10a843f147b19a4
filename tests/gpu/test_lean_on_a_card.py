"""The lean ops and the head on a real card: outputs and every gradient beside float64, at odd sizes and at the models' own, on memory that holds
NaN wherever nothing was written; no wait for the host, inside a CUDA graph, and as fast as the memory allows.

Run it on a machine with a card: `python -m pytest -m gpu tests/gpu/test_lean_on_a_card.py -s`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
    pytest.mark.timeout(280),
]
head, lean, reference = (pytest.importorskip(f"kernels.{name}") for name in ("head", "lean", "reference"))
cases = pytest.importorskip("tests.kernels.lean_cases")

ODD = cases.Sizes(T=37, H=24, heads=3, D=16, R=6, key=8, value=24, experts=12, k=3, vocabulary=101, rows=16)
QWEN35 = cases.Sizes(1031, 2048, 16, 256, 64, key=2048, value=4096, experts=256, k=8, vocabulary=20_011, rows=512)
QWEN3 = cases.Sizes(515, 4096, 64, 128, 128, key=2048, value=4096, experts=128, k=8, vocabulary=20_000, rows=2048)
SIZES = {"odd": ODD, "qwen3.5": QWEN35, "qwen3": QWEN3}


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, filled_with_nan(getattr(torch, name)))


def filled_with_nan(make: Callable[..., Any]) -> Callable[..., Any]:
    def filled(*args: Any, **options: Any) -> Any:
        tensor = make(*args, **options)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return filled


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in SIZES), ("odd", torch.float32)], ids=str
)
def test_every_output_and_gradient_beside_float64(name: str, dtype: Any, poisoned: None) -> None:
    bad = []
    for case in cases.all_cases(SIZES[name]):
        seen = case.results(dtype, "cuda")
        wanted = case.results(torch.float64, "cuda", rounded_to=dtype)
        limit = reference.tolerance(dtype, case.longest_sum)
        if case.name.startswith("token_log_probs"):
            limit *= 2  # logits in the hidden states' dtype, and the slope rounded once more behind its product
        for which, tensor in wanted.items():
            error = reference.relative_error(seen[which], tensor)
            if not error <= limit:
                bad.append(f"{case.name}, {which}: off by {error:.1e}, at most {limit:.1e}")
    assert not bad, "\n".join(bad)


def test_the_head_at_the_models_vocabulary() -> None:
    """In one piece, so that the logits here are the very ones that the head made."""
    torch.manual_seed(0)
    hidden = torch.randn(600, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(248_320, 2048, device="cuda", dtype=torch.bfloat16) * 0.02
    logits = hidden.detach() @ weight.T
    label = torch.randint(0, 248_320, (600,), device="cuda")
    label[::2] = logits[::2].argmax(-1)
    label[::5] = head.IGNORED
    log_prob, entropy, top = head.token_log_probs(hidden, weight, label, rows=600)
    (slope,) = torch.autograd.grad(log_prob.sum(), hidden)
    logits = logits.double()
    wanted = [torch.empty(600, device="cuda", dtype=torch.float64) for _ in range(2)]
    best, counts = logits.amax(-1), label != head.IGNORED
    first_best = (logits == best[:, None]).int().argmax(-1)
    assert torch.equal(top, (first_best == label) & counts) and top.sum() > 100
    head.plain_label_stats(logits, label, *wanted, torch.empty_like(top), 1.0, True)
    assert reference.relative_error(log_prob, wanted[0]) < 1e-5 and reference.relative_error(entropy, wanted[1]) < 1e-5
    limit = reference.tolerance(torch.bfloat16, 248_320)
    assert reference.relative_error(slope, logits @ weight.double()) < limit
    assert not slope[~counts].any()


def test_tensors_that_begin_anywhere_are_taken_before_and_after_aligned_ones() -> None:
    weight = torch.randn(64, device="cuda", dtype=torch.bfloat16)
    buffer = torch.randn(5 * 64 + 3, device="cuda", dtype=torch.bfloat16)
    for start in (1, 0, 3):
        x = buffer[start : start + 320].view(5, 64)
        seen = lean.rms_norm(x, weight, 1e-6, zero_centered=True)
        wanted = lean.rms_norm(x.double(), weight.double(), 1e-6, zero_centered=True)
        assert reference.relative_error(seen, wanted) < reference.tolerance(torch.bfloat16, 64)


def test_no_op_waits_for_the_host_and_a_graph_replays_what_eager_computes() -> None:
    """In one graph as in training: forward of all, then backward of all."""
    sizes = cases.Sizes(512, 512, 4, 64, 32, key=256, value=512, experts=64, k=8, vocabulary=5000, rows=200)
    everything = cases.all_cases(sizes)
    inputs = [{name: each.cuda() for name, each in case.inputs.items()} for case in everything]
    for case, tensors in zip(everything, inputs, strict=True):
        for name, each in tensors.items():
            tensors[name] = each.bfloat16() if each.is_floating_point() else each
        for name in case.leaves:
            tensors[name].requires_grad_()
    leaves = [tensors[name] for case, tensors in zip(everything, inputs, strict=True) for name in case.leaves]

    def step() -> list[Any]:
        outputs = [out for case, tensors in zip(everything, inputs, strict=True) for out in case.op(tensors)]
        flowing = [out for out in outputs if out.requires_grad]
        # Leaves are shared by no two cases, so all gradients come from one backward pass.
        return [*outputs, *torch.autograd.grad(flowing, leaves, [out.detach().cos() for out in flowing])]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = [each.clone() for each in step()]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for each in captured:
        each.detach().zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, two) for one, two in zip(eager, captured, strict=True))


def test_the_document_borders_matter_here_too() -> None:
    case = next(each for each in cases.all_cases(QWEN35) if each.name.startswith("conv_silu_split"))
    packed = case.results(torch.bfloat16, "cuda")
    case.inputs["document"].zero_()
    leaking = case.results(torch.float64, "cuda", rounded_to=torch.bfloat16)
    assert reference.relative_error(packed["2"], leaking["2"]) > 0.05
    assert reference.relative_error(packed["d x"], leaking["d x"]) > 0.05
