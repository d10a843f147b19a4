"""AdamW in one pass: its plain twin is torch's own, its kernels are both beside float64, and they compile for every card that we rent."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
adamw, adamw_cases, offline = (
    pytest.importorskip(name) for name in ("kernels.adamw", "tests.kernels.adamw_cases", "tests.kernels.offline")
)


def test_the_plain_twin_is_torchs_loop_to_the_bit() -> None:
    case = adamw_cases.Case()
    mine = [each.clone().requires_grad_() for each in case.parameters]
    theirs = torch.optim.AdamW(mine, 1e-2, (0.9, 0.999), 1e-8, 0.1, foreach=False)
    for number in range(4):
        for each, gradient in zip(mine, case.renew(number), strict=True):
            each.grad = gradient.clone()
        theirs.step()
        adamw.plain_adamw(case.update, adamw_cases.RATES)
    assert all(torch.equal(one, other) for one, other in zip(case.parameters, mine, strict=True))
    for kind, kept in (("exp_avg", case.update.exp_avgs), ("exp_avg_sq", case.update.exp_avg_sqs)):
        assert all(torch.equal(theirs.state[each][kind], one) for each, one in zip(mine, kept, strict=True))


def test_without_a_card_the_twin_runs_and_is_as_near_to_float64() -> None:
    adamw_cases.check()


def test_every_variant_of_the_kernels_beside_float64(interpreted: Callable[..., str]) -> None:
    interpreted("interpreted_adamw.py", "every_variant_beside_float64")


def test_odd_addresses_steps_that_differ_and_what_is_refused(interpreted: Callable[..., str]) -> None:
    interpreted(
        "interpreted_adamw.py",
        "it_is_the_twin_up_to_rounding_and_runs_where_nothing_is_aligned",
        "one_sum_to_the_bit_and_nan_and_overflow_as_torch_has_them",
        "rates_may_be_tensors_and_steps_may_differ",
        "what_cannot_be_gone_through_is_refused_by_name",
        "moments_in_8_bits_are_the_twins",
    )


def test_kernels_broken_on_purpose_are_caught(interpreted: Callable[..., str]) -> None:
    interpreted("interpreted_adamw.py", "a_kernel_broken_on_purpose_is_caught")


def test_the_kernels_compile_for_every_card_with_wide_loads_and_room_for_many_programs(
    run_alone: Callable[..., str],
) -> None:
    found = [
        json.loads(line)
        for line in run_alone("compiled_adamw.py", "90", "100", "120", "80", interpret=False).splitlines()
    ]
    assert {row["kernel"] for row in found} == {
        "square_sums",
        "tensor_norms",
        "clip_factor",
        "coefficients",
        "adamw",
        "adamw_8bit",
    }
    for row in found:
        assert row["shared"] <= offline.SHARED_LIMIT[row["capability"]] and row["stack"] <= 64, row
        # Four blocks of 256 threads on a processor of 65,536 registers keep the memory busy; of those that search codes two and more.
        assert row["registers"] <= (96 if row["kernel"] == "adamw_8bit" else 64), row
        if row["kernel"] == "adamw":
            assert row["wide loads"] >= 4 and row["wide stores"] >= 3, row
        if row["kernel"] == "adamw_8bit":
            assert row["wide loads"] >= 2 and row["wide stores"] >= 1, row
        if row["kernel"] == "square_sums":
            assert row["wide loads"] >= 1, row
