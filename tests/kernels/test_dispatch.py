"""Which path wins, from what became of the candidates. The candidates themselves run in test_interpreted.py and tests/gpu."""

from __future__ import annotations

import pytest
import torch

from kernels import dispatch, reference
from kernels.dispatch import GROUPED_MM, HOST_LOOP, Choice, NoPathError, Trial, decide
from kernels.moe_lora import PORTABLE, SM90, plan_for


def ours(ms: float = 1.7, fault: str | None = None) -> Trial:
    return Trial("sm90", SM90, {}, None if fault else ms, fault)


def portable(fault: str | None = None) -> Trial:
    return Trial("portable", PORTABLE, {}, None if fault else 1.9, fault)


def torchs(ms: float = 4.7, fault: str | None = None, path: str = GROUPED_MM) -> Trial:
    return Trial(path, None, {}, ms, fault)


def seen(choice: Choice) -> tuple[str, bool]:
    return choice.path, choice.slow


def test_our_kernels_win_where_they_are_right() -> None:
    choice = decide((ours(), torchs()))
    assert seen(choice) == ("sm90", False) and choice.plan is SM90
    assert choice.reason == "right in all results, 1.70 ms a layer beside grouped_mm's 4.70 ms"


def test_the_portable_kernels_step_in_and_are_slow_and_the_reason_says_what_failed() -> None:
    choice = decide((ours(fault="dx is off by 4.5e-01"), portable(), torchs()))
    assert seen(choice) == ("portable", True)
    assert "sm90: dx is off by 4.5e-01" in choice.reason


def test_grouped_mm_wins_only_if_it_is_clearly_faster_and_is_not_slow_then() -> None:
    assert seen(decide((ours(1.7), torchs(1.65)))) == ("sm90", False)
    assert seen(decide((ours(1.7), torchs(1.2)))) == (GROUPED_MM, False)
    assert seen(decide((ours(1.7), torchs(0.1, fault="out is off by nan")))) == ("sm90", False)


def test_torch_alone_is_slow_and_its_host_loop_is_named() -> None:
    assert seen(decide((ours(fault="x"), torchs()))) == (GROUPED_MM, True)
    assert seen(decide((ours(fault="x"), torchs(path=HOST_LOOP)))) == (HOST_LOOP, True)


def test_a_rank_that_our_kernels_do_not_take_is_the_reason() -> None:
    shapes = dispatch.Shapes(2048, 512, 256, 8, rank=128)
    choice = decide((torchs(),), dispatch._unsupported(shapes))
    assert choice.slow and choice.reason == "our kernels take ranks up to 64, the recipe wants 128"


def test_nothing_right_means_no_path_and_every_fault_is_told() -> None:
    with pytest.raises(NoPathError, match=r"sm90: a; portable: b; grouped_mm: c"):
        decide((ours(fault="a"), portable("b"), torchs(fault="c")))


@pytest.mark.parametrize(
    ("capability", "plan"), [((9, 0), SM90), ((10, 0), SM90), ((8, 0), PORTABLE), ((12, 0), PORTABLE)]
)
def test_the_plan_follows_the_capability(capability: tuple[int, int], plan: object) -> None:
    assert plan_for(capability) is plan


def test_a_candidate_that_raises_is_told_and_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("ptxas fatal: no kernel image")

    monkeypatch.setattr(dispatch, "experts_with_lora", broken)
    shapes = dispatch.Shapes(64, 64, 5, 2, 8, tokens=8)
    choice = dispatch.choose(shapes, torch.device("cpu"), torch.float32)
    assert seen(choice) == (GROUPED_MM, True) and "ptxas fatal: no kernel image" in choice.reason


def test_a_gradient_for_an_expert_without_rows_is_a_fault() -> None:
    shapes = dispatch.Shapes(64, 64, 5, 2, 8, tokens=8)
    problem = dispatch.make_problem(shapes, torch.device("cpu"), torch.float32, 8, busy_experts=3)
    wanted = reference.all_results(
        problem.x,
        problem.expert,
        problem.weight,
        problem.w1,
        problem.w2,
        problem.factors,
        2.0,
        problem.dout,
        torch.float32,
    )
    assert max(dispatch.compare(wanted, wanted, problem).values()) == 0
    empty = int((torch.bincount(problem.expert.reshape(-1), minlength=5) == 0).nonzero()[0])
    leaked = wanted | {"dB1": wanted["dB1"].clone()}
    leaked["dB1"][empty, 0, 0] = 1e-9
    assert dispatch.compare(leaked, wanted, problem)["dB1"] == float("inf")
