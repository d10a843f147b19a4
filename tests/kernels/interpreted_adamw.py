"""What the interpreter shows of AdamW's kernels; run by test_adamw.py by the names of its checks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kernels import adamw, adamw_8bit
from kernels.adamw import AdamWPass, GradientNorm, Rates
from kernels.adamw_8bit import AdamW8bitPass, Update8bit
from tests.kernels import adamw_cases, checks
from tests.kernels.adamw_cases import PACKED_SHORT, RATES, SHORT, Case
from tests.kernels.interpreted import Broken, poison


def every_variant_beside_float64() -> None:
    poison()
    adamw_cases.check()


def it_is_the_twin_up_to_rounding_and_runs_where_nothing_is_aligned() -> None:
    case, twin = Case(), Case()
    odd = [torch.empty(each.numel() + 1)[1:].view(each.shape).copy_(each) for each in Case(transposed=False).renew(0)]
    case.transposed = False
    for number, each in enumerate(case.parameters):
        case.parameters[number] = each.contiguous()
    moments = ([torch.zeros_like(each) for each in case.parameters] for _ in range(2))
    case.update = case.update._replace(gradients=odd, **dict(zip(("exp_avgs", "exp_avg_sqs"), moments, strict=True)))
    assert odd[1].data_ptr() % 16
    one_pass = AdamWPass()
    one_pass(case.update, RATES)
    assert not one_pass._table.aligned
    adamw.plain_adamw(twin.update, RATES)
    for seen, wanted in zip(case.parameters, twin.parameters, strict=True):
        torch.testing.assert_close(seen, wanted, rtol=2e-7, atol=2e-8)


def one_sum_to_the_bit_and_nan_and_overflow_as_torch_has_them() -> None:
    gradients, norm = Case().renew(0), GradientNorm()
    first = norm(gradients, 1.0)
    again = norm([each.clone() for each in gradients], 1.0)
    assert torch.equal(first.both_2, again.both_2) and torch.equal(first.norms_n, again.norms_n)
    for odd in (torch.nan, torch.inf):
        gradients[1][5, 7] = odd
        clip = norm(gradients, 1.0)
        finite = clip.norms_n.isfinite().tolist()
        assert finite == [True, False, True, True, True, True], "only the one is named"
        parameters = [each.clone().requires_grad_() for each in gradients]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        wanted = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        assert torch.equal(clip.norm.isnan(), wanted.isnan()) and not clip.norm.isfinite()
        seen = [each * clip.factor for each in gradients]
        assert all(torch.equal(a.isnan(), b.grad.isnan()) for a, b in zip(seen, parameters, strict=True))


def rates_may_be_tensors_and_steps_may_differ() -> None:
    case, twin = Case(scale=0.0), Case(scale=0.0)
    for each in (case, twin):
        each.update.steps[0].fill_(999)
        each.update.steps[1].fill_(41)
    AdamWPass()(case.update, Rates(torch.tensor(1e-2), 0.9, torch.tensor(0.999, dtype=torch.float64), 1e-8, 0.0))
    adamw.plain_adamw(twin.update, Rates(1e-2))
    assert [int(each) for each in case.update.steps] == [1000, 42, 1, 1, 1, 1]
    for seen, wanted in zip(case.parameters, twin.parameters, strict=True):
        # The rate itself is rounded to float32.
        torch.testing.assert_close(seen, wanted, rtol=1e-6, atol=0)


def what_cannot_be_gone_through_is_refused_by_name() -> None:
    def refused(says: str, **changes: Any) -> None:
        case = Case()
        replaced = {name: [*getattr(case.update, name)] for name in changes}
        for name, tensor in changes.items():
            replaced[name][1] = tensor
        before = [each.clone() for each in case.parameters]
        with pytest.raises(ValueError, match=re.escape(says)):
            AdamWPass()(case.update._replace(**replaced), RATES)
        assert all(torch.equal(a, b) for a, b in zip(before, case.parameters, strict=True))

    refused("its gradient: [128, 129] with strides (129, 1); want the parameter's", gradients=torch.ones(128, 129))
    refused("its exp_avg: torch.float64; want torch.float32", exp_avgs=torch.ones(129, 128).t().double())
    refused("and no gap between them", gradients=torch.ones(129, 256)[:, :128].t())
    refused("want one number", steps=torch.zeros(2))


def moments_in_8_bits_are_the_twins() -> None:
    poison()
    bad = adamw_cases.check_packed()
    assert not bad, bad
    update = adamw_cases.packed()
    odd = torch.zeros(70, 100).t().contiguous().t()
    for changes, says in (
        ({"parameters": [odd], "gradients": [odd]}, "whole blocks of 256, contiguous or transposed"),
        ({"gradients": [torch.zeros(16, 256)]}, "strides (256, 1); want the parameter's"),
        ({"exp_avgs": [update.exp_avgs[0]._replace(scale=torch.zeros(5))]}, "its scale: 5 of torch.float32"),
    ):
        first = Update8bit(*(each[:1] for each in update))
        with pytest.raises(ValueError, match=re.escape(says)):
            AdamW8bitPass()(first._replace(**changes), RATES)


def a_kernel_broken_on_purpose_is_caught() -> None:
    def with_moments_swapped(args: tuple[Any, ...]) -> tuple[Any, ...]:
        table = args[0].clone()
        table[0, [2, 3]] = table[0, [3, 2]]
        return (table, *args[1:])

    def with_beta2_rounded(args: tuple[Any, ...]) -> tuple[Any, ...]:
        rates = args[1].clone()
        rates[2] = rates[2].float()
        return (args[0], rates, *args[2:])

    def with_twice_the_rate(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0], args[1] * torch.tensor([2, 1, 1, 1, 1]), *args[2:])

    def without_the_last_chunk(args: tuple[Any, ...]) -> tuple[Any, ...]:
        sizes = args[3].clone()
        sizes[1] -= 128
        return (*args[:3], sizes, *args[4:])

    def said(name: str, bend: Any) -> str:
        whole = getattr(adamw, name)
        setattr(adamw, name, Broken(whole, bend))
        try:
            case = Case(shapes=SHORT, scale=0.0)
            bad = adamw_cases.faults_of(case, 2, RATES, 1.0)
            gradients = case.renew(0)
            bad += adamw_cases.norm_faults(gradients, GradientNorm()(gradients, 1.0), 1.0)
        finally:
            setattr(adamw, name, whole)
        return "; ".join(bad)

    def with_one_map_for_both(args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args[:9], *args[7:9], *args[11:])

    def with_scales_of_the_next_row(args: tuple[Any, ...]) -> tuple[Any, ...]:
        table = args[0].clone()
        table[0, 3] += 4
        return (table, *args[1:])

    whole = adamw_8bit.adamw_8bit
    for bend, says in (
        (with_one_map_for_both, "exp_avg_sqs 2: codes"),
        (with_scales_of_the_next_row, "exp_avgs 0: scales"),
    ):
        adamw_8bit.adamw_8bit = Broken(whole, bend)
        assert says in "; ".join(adamw_cases.check_packed(shapes=PACKED_SHORT))
    adamw_8bit.adamw_8bit = whole

    assert said("adamw", lambda args: args) == ""
    assert "exp_avg 0 is off" in said("adamw", with_moments_swapped)
    assert "exp_avg_sq 3 is off" in said("coefficients", with_beta2_rounded)
    assert "parameters 3 is off" in said("coefficients", with_twice_the_rate)
    assert "exp_avg_sq 1 is off" in said("adamw", without_the_last_chunk)
    assert "norms_n" in said("square_sums", without_the_last_chunk)


if __name__ == "__main__":
    checks.run(
        every_variant_beside_float64,
        it_is_the_twin_up_to_rounding_and_runs_where_nothing_is_aligned,
        one_sum_to_the_bit_and_nan_and_overflow_as_torch_has_them,
        rates_may_be_tensors_and_steps_may_differ,
        what_cannot_be_gone_through_is_refused_by_name,
        moments_in_8_bits_are_the_twins,
        a_kernel_broken_on_purpose_is_caught,
    )
