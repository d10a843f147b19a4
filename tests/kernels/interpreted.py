"""What the interpreter shows of the kernels; run by test_interpreted.py by the names of its checks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import dispatch, moe_kernels, moe_lora, nf4, reference
from kernels.adapter import Adapter, lay_out
from tests.kernels import checks, tiny


def poison() -> None:
    """Every buffer that a kernel leaves unwritten, or reads too far, now holds NaN."""
    empty, empty_like = torch.empty, torch.empty_like

    def filled(tensor: Tensor) -> Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    torch.empty = lambda *a, **k: filled(empty(*a, **k))
    torch.empty_like = lambda *a, **k: filled(empty_like(*a, **k))


def run(case: tiny.Tiny, accumulate: bool = True, lora: bool = True) -> Tensor:
    adapters = (case.up, case.down) if lora else (None, None)
    return moe_lora.experts_with_lora(
        case.x, case.expert, case.weight, case.w1, case.w2, *adapters, plan=tiny.PLAN, accumulate=accumulate
    )


def close(seen: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    errors = {name: reference.relative_error(seen[name], wanted[name]) for name in seen}
    limit = reference.tolerance(torch.float32, 128)
    assert all(error <= limit for error in errors.values()), errors


def every_result_beside_float64_and_accumulation() -> None:
    poison()
    case, wanted = tiny.make(), None
    wanted = case.wanted
    assert (torch.bincount(case.expert.reshape(-1), minlength=5) == 0).any()
    leaves = [case.x.requires_grad_(), case.weight.requires_grad_()]
    out = run(case)
    out.backward(case.dout)
    seen = {"out": out.detach(), "dx": leaves[0].grad, "dweight": leaves[1].grad}
    close(seen | case.grouped([master.grad for master in case.masters]), wanted)
    run(case).backward(case.dout)
    close(case.grouped([master.grad / 2 for master in case.masters]), wanted)
    before = [master.grad.clone() for master in case.masters]
    handed_out = torch.autograd.grad(run(case), case.masters, case.dout)
    close(case.grouped(list(handed_out)), wanted)
    assert all(torch.equal(one, master.grad) for one, master in zip(before, case.masters, strict=True))


def a_lora_b_that_lies_transposed_and_a_cleared_gradient() -> None:
    poison()
    case = tiny.make(T=20, rank=16)
    wanted = case.wanted
    for master in case.masters[1::2]:
        lay_out(master)
    run(case).backward(case.dout)
    assert case.masters[1].grad.stride() == case.masters[1].stride() == (1, 128)
    case.masters[0].grad = case.masters[3].grad = None
    run(case).backward(case.dout)
    times = (1, 2, 2, 1)
    close(case.grouped([master.grad / n for master, n in zip(case.masters, times, strict=True)]), wanted)


def the_kernels_add_to_grad_only_where_nobody_else_wants_the_gradients() -> None:
    added, targets = [], Adapter.gradient_targets

    def spy(self: Adapter, accumulate: bool) -> Any:
        added.append(accumulate)
        return targets(self, accumulate)

    Adapter.gradient_targets = spy
    case, heard = tiny.make(T=8), []
    run(case).backward(case.dout)
    torch.autograd.grad(run(case), case.masters, case.dout)
    run(case, accumulate=False).backward(case.dout)
    case.masters[1].register_hook(heard.append)
    case.masters[0].grad = case.masters[1].grad = case.masters[2].grad = case.masters[3].grad = None
    run(case).backward(case.dout)
    assert added == [True, True, False, False, False, False, False, False] and len(heard) == 1
    Adapter.gradient_targets = targets
    close(case.grouped([master.grad for master in case.masters]), case.wanted)


def copies_follow_the_masters_also_past_their_version_counter() -> None:
    case = tiny.make(T=12)
    copies = case.up.copies(torch.float32)
    assert case.up.copies(torch.float32)[1] is copies[1]
    with torch.no_grad():
        case.masters[1].mul_(2)
        case.factors[1].mul_(2)
    close({"out": run(case).detach()}, {"out": case.wanted["out"]})

    version, before = case.masters[0]._version, case.up.copies(torch.float32)[0].clone()
    case.masters[0].grad = torch.ones_like(case.masters[0])
    torch.optim.AdamW(case.masters[:1], lr=0.1, fused=True).step()
    assert case.masters[0]._version == version, "this optimizer now moves the counter; the test wants one that does not"
    now = case.up.copies(torch.float32)[0]
    assert not torch.equal(now, before) and torch.equal(now[:, :8], case.masters[0].detach().view(5, 8, 64))


def without_lora_and_without_dx() -> None:
    poison()
    case = tiny.make(T=12)
    none = tuple(torch.zeros_like(factor) for factor in case.factors)
    case.weight.requires_grad_()
    out = run(case, lora=False)
    out.backward(case.dout)
    wanted = reference.all_results(case.x, case.expert, case.weight, case.w1, case.w2, none, 1.0, case.dout)
    close({"out": out.detach(), "dweight": case.weight.grad}, wanted)


def nf4_as_the_reference() -> None:
    for dtype in (torch.float32, torch.float16):
        weights = torch.randn(64 * 9).to(dtype)
        weights[64:128] = 0
        codes, thresholds = nf4.tables(weights.device)
        weights[0], weights[1:16] = 1, thresholds.to(dtype)
        packed, absmax = nf4.quantise(weights)
        wanted = reference.quantise_nf4(weights, codes)
        assert torch.equal(packed, wanted[0]) and torch.equal(absmax, wanted[1])
        out = nf4.dequantise(packed, absmax, torch.empty(9, 64, dtype=dtype))
        assert torch.equal(out.view(-1), reference.dequantise_nf4(packed, absmax, codes, dtype))


def a_kernel_broken_on_purpose_is_caught() -> None:
    dispatch._CHECK_TOKENS, dispatch.PORTABLE = 12, tiny.PLAN
    shapes = dispatch.Shapes(hidden=64, intermediate=64, experts=5, top_k=2, rank=8)
    device = torch.device("cpu")
    good = dispatch.choose(shapes, device, torch.float32)
    assert (good.path, good.slow) == ("tiny", False), good.reason

    combine = moe_kernels.combine
    for broken in (drops_one_slot(combine), forgets_the_router_weights_gradient(combine)):
        moe_kernels.combine = broken
        bad = dispatch.choose(shapes, device, torch.float32)
        assert (bad.path, bad.plan, bad.slow) == ("grouped_mm", None, True), bad
        assert "is off by" in bad.reason, bad.reason
        print(bad.reason)
    moe_kernels.combine = combine


class Broken:
    """A kernel whose arguments are bent before it runs."""

    def __init__(self, fn: Any, bend: Any) -> None:
        self.fn, self.bend = fn, bend

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.fn[grid](*self.bend(args), **options)


def drops_one_slot(fn: Any) -> Broken:
    def bend(args: tuple[Any, ...]) -> tuple[Any, ...]:
        args[0][3] = 0
        return args

    return Broken(fn, bend)


def forgets_the_router_weights_gradient(fn: Any) -> Broken:
    def bend(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args[:2], torch.zeros_like(args[2]) if args[7] else args[2], *args[3:])

    return Broken(fn, bend)


if __name__ == "__main__":
    checks.run(
        every_result_beside_float64_and_accumulation,
        a_lora_b_that_lies_transposed_and_a_cleared_gradient,
        the_kernels_add_to_grad_only_where_nobody_else_wants_the_gradients,
        copies_follow_the_masters_also_past_their_version_counter,
        without_lora_and_without_dx,
        nf4_as_the_reference,
        a_kernel_broken_on_purpose_is_caught,
    )
