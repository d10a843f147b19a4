"""The experts layer's kernels on a real card: every result beside float64, twice the same bits, no wait for the host, inside a CUDA graph.

Run it on a machine with a card: `python -m pytest -m gpu tests/gpu/test_kernels_on_a_card.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
    pytest.mark.timeout(280),
]

benchmark, dispatch, moe_lora, nf4, reference, adapter_module = (
    pytest.importorskip(f"kernels.{name}")
    for name in ("benchmark", "dispatch", "moe_lora", "nf4", "reference", "adapter")
)
DEVICE = torch.device("cuda", 0)
PLANS = [moe_lora.PORTABLE]
if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0):
    PLANS.append(moe_lora.plan_for(torch.cuda.get_device_capability()))


def problem(shapes: dispatch.Shapes, tokens: int, busy: int) -> dispatch.Problem:
    return dispatch.make_problem(shapes, DEVICE, torch.bfloat16, tokens, busy)


def wanted(p: dispatch.Problem) -> dict[str, Any]:
    return reference.all_results(p.x, p.expert, p.weight, p.w1, p.w2, p.factors, dispatch._SCALE, p.dout)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
@pytest.mark.parametrize("rank", [8, 16, 32, 64])
@pytest.mark.parametrize(("tokens", "busy"), [(1, 8), (700, 9), (700, 64)])
def test_every_result_beside_float64_at_every_rank_with_empty_and_crowded_experts(
    plan: moe_lora.Plan, rank: int, tokens: int, busy: int
) -> None:
    p = problem(dispatch.Shapes(512, 256, 64, 8, rank), tokens, busy)
    trial = dispatch.try_path(p, None, wanted(p), plan)
    assert trial.ok, trial


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_the_tiny_models_sizes_are_taken(plan: moe_lora.Plan) -> None:
    p = problem(dispatch.Shapes(64, 32, 8, 2, 4), 50, 6)
    assert dispatch.try_path(p, None, wanted(p), plan).ok


@pytest.mark.parametrize("shape", ["35B", "235B"])
def test_two_runs_give_the_same_bits_and_accumulation_is_float32(shape: str) -> None:
    case = benchmark.make_case(benchmark.SHAPES[shape], 1024, seed=1)
    path = benchmark.OursTraining(case, PLANS[-1])
    first, second = path.results(), path.results()
    assert all(torch.equal(first[name], second[name]) for name in reference.RESULTS)
    once = [master.grad.clone() for master in path.masters]
    path.step()
    for master, one in zip(path.masters, once, strict=True):
        assert master.grad.dtype == torch.float32
        assert reference.relative_error(master.grad, 2 * one) < 1e-6


def test_a_captured_graph_replays_what_eager_computes() -> None:
    case = benchmark.make_case(benchmark.SHAPES["35B"], 512, seed=2)
    path = benchmark.OursTraining(case, PLANS[-1])
    path.step()
    graph = benchmark._capture(path.step)
    for master in path.masters:
        master.grad.zero_()
    graph.replay()
    torch.cuda.synchronize()
    replayed = [master.grad.clone() for master in path.masters]
    for master in path.masters:
        master.grad.zero_()
    path.step()
    assert all(torch.equal(one, master.grad) for one, master in zip(replayed, path.masters, strict=True))


def test_the_self_check_takes_our_kernels_and_catches_one_broken_on_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = dispatch.Shapes(2048, 512, 64, 8, 32, tokens=1024)
    good = dispatch.choose(shapes, DEVICE)
    assert good.plan is PLANS[-1] and not good.slow, good
    real = moe_lora._Layer._combine

    def loses_a_slot(self: Any, slots: Any, *rest: Any) -> Any:
        slots[3] = 0
        return real(self, slots, *rest)

    monkeypatch.setattr(moe_lora._Layer, "_combine", loses_a_slot)
    bad = dispatch.choose(shapes, DEVICE)
    assert bad.plan is None and bad.slow and "is off by" in bad.reason, bad


def test_the_copies_follow_an_optimizer_that_is_fused() -> None:
    masters = [torch.randn(size, device=DEVICE, requires_grad=True) for size in ((4 * 8, 64), (64, 8 * 4))]
    adapter = adapter_module.Adapter(masters[0], masters[1], 4, 1.0)
    before = [copy.clone() for copy in adapter.copies(torch.bfloat16)]
    for master in masters:
        master.grad = torch.ones_like(master)
    torch.optim.AdamW(masters, lr=0.5, fused=True).step()
    assert not any(torch.equal(one, two) for one, two in zip(before, adapter.copies(torch.bfloat16), strict=True))


def test_nf4_is_the_references_bit_for_bit_and_dequantises_at_the_wanted_rate() -> None:
    weights = torch.randn(64 * 200_000, device=DEVICE).bfloat16()
    codes, _ = nf4.tables(weights.device)
    packed, absmax = nf4.quantise(weights)
    expected = reference.quantise_nf4(weights, codes)
    assert torch.equal(packed, expected[0]) and torch.equal(absmax, expected[1])
    out = nf4.dequantise(packed, absmax, torch.empty_like(weights))
    assert torch.equal(out, reference.dequantise_nf4(packed, absmax, codes, torch.bfloat16))
    count = 64 * (1 << 23)
    packed = torch.randint(0, 256, (count // 2,), device=DEVICE, dtype=torch.uint8)
    absmax, out = torch.rand(count // 64, device=DEVICE), torch.empty(count, device=DEVICE, dtype=torch.bfloat16)
    ms = benchmark._median_ms(lambda: nf4.dequantise(packed, absmax, out), 20)
    rate = count * (2 + 0.5 + 4 / 64) / ms / 1e9
    print(f"dequantise {rate:.2f} TB/s")
    if "H200" in torch.cuda.get_device_name():
        assert rate >= 2.9


def test_bad_input_is_refused_before_a_launch() -> None:
    p = problem(dispatch.Shapes(64, 32, 8, 2, 4), 50, 6)
    with pytest.raises(ValueError, match="expert: indices from 0 to 8; want 0 to 7"):
        moe_lora.experts_with_lora(p.x, torch.full_like(p.expert, 8).fill_diagonal_(0), p.weight, p.w1, p.w2)
