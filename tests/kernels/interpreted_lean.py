"""What the interpreter shows of the lean ops and the head; run by test_lean.py and test_head.py by the names of its checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kernels import conv, gates, head, lean, norms, reference, rope, router
from tests.kernels import checks
from tests.kernels.interpreted import Broken, poison
from tests.kernels.lean_cases import Case, Sizes, all_cases, head_case

ODD = Sizes(T=37, H=24, heads=3, D=16, R=6, key=8, value=24, experts=12, k=3, vocabulary=101, rows=16)
EVEN = Sizes(T=67, H=64, heads=2, D=32, R=32, key=32, value=64, experts=16, k=4, vocabulary=5000, rows=67)


def errors(case: Case) -> dict[str, float]:
    seen, wanted = case.results(torch.float32), case.results(torch.float64, rounded_to=torch.float32)
    return {name: reference.relative_error(seen[name], wanted[name]) for name in wanted}


def close(case: Case) -> bool:
    limit = reference.tolerance(torch.float32, case.longest_sum)
    return all(error <= limit for error in errors(case).values())


def every_op_beside_float64() -> None:
    poison()
    for sizes in (ODD, EVEN):
        for case in all_cases(sizes):
            assert close(case), (case.name, errors(case))


def the_head_says_whether_the_label_is_the_likeliest_and_the_lowest_of_equals_is() -> None:
    poison()
    hidden, weight = torch.eye(8), torch.randn(8, 6000).mul_(4).round_().T.contiguous()
    best = weight.argmax(0)
    for label in (best, torch.full((8,), 3), torch.full((8,), 5999), torch.full((8,), -100)):
        log_prob, entropy, top = head.token_log_probs(hidden, weight, label, rows=3)
        wanted = head.token_log_probs(hidden.double(), weight.double(), label)
        assert torch.equal(top, wanted[2]) and torch.equal(top, (best == label))
        assert (
            reference.relative_error(log_prob, wanted[0]) < 1e-5 and reference.relative_error(entropy, wanted[1]) < 1e-5
        )
    assert (weight == weight.amax(0)).sum(0).max() > 1, "no equals among the likeliest: the test wants some"
    log_prob, _, top = head.token_log_probs(hidden, weight, torch.tensor([6000] * 4 + [-7] * 4))
    assert log_prob.isnan().all() and not top.any()


def equal_logits_choose_the_lowest_experts_and_rows_of_nan_stay_among_the_experts() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5, [float("nan")] * 5])
    weight, expert = lean.top_k_router(logits, 3)
    assert expert[0].tolist() == [1, 2, 4] and expert[1].tolist() == [0, 1, 2]
    assert weight[2].isnan().all() and expert[2].min() >= 0 and expert[2].max() < 5


def without_a_gradient_the_logits_stay_as_they_are() -> None:
    case = head_case(ODD)
    t, seen = case.inputs, []
    launch = head.launch

    def spy(fn: Any, grid: Any, tensors: Any, *rest: Any) -> None:
        before = tensors[0].clone()
        launch(fn, grid, tensors, *rest)
        seen.append(torch.equal(before, tensors[0]))

    head.launch = spy
    head.token_log_probs(t["hidden"], t["w"], t["label"])
    head.token_log_probs(t["hidden"].requires_grad_(), t["w"], t["label"])
    head.launch = launch
    assert seen == [True, False]


def every_kernel_broken_on_purpose_is_caught() -> None:
    cases = {case.name: case for case in all_cases(ODD)}

    def caught(name: str, module: Any, kernel: str, bend: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> None:
        real = getattr(module, kernel)
        assert close(cases[name]), errors(cases[name])
        setattr(module, kernel, Broken(real, bend))
        assert not close(cases[name]), f"{kernel} was bent and nobody saw it"
        setattr(module, kernel, real)

    def without(place: int) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        return lambda args: (*args[:place], torch.zeros_like(args[place]), *args[place + 1 :])

    def a_row_less(place: int) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        return lambda args: (*args[:place], args[place] - 1, *args[place + 1 :])

    borders = "conv_silu_split of packed documents, channels beside others"
    caught(borders, conv, "conv", without(2))
    caught(borders, conv, "conv_backward", without(2))
    caught(borders, conv, "conv_backward", a_row_less(7))
    poison()
    for kind in ("zero centred", "plain"):
        caught(f"rms_norm, {kind}", norms, "norm", a_row_less(6))
        caught(f"add_rms_norm, {kind}", norms, "norm_backward", without(1))
        caught(f"query_gate_norm_rope and sigmoid_mul of its view, {kind}", rope, "rotate", without(3))
        caught(f"query_gate_norm_rope and sigmoid_mul of its view, {kind}", rope, "rotate_backward", without(1))
        caught(f"norm_rope of a view, {kind}", rope, "rotate_backward", without(5))
    caught("gated_rms_norm with gates beside something else", norms, "gated_norm_backward", without(2))
    caught("silu_mul of halves", gates, "gated_backward", a_row_less(5))
    caught("shared_add with its gate beside the router's logits", gates, "add_shared", without(3))
    caught("shared_add with its gate beside the router's logits", gates, "add_shared_backward", a_row_less(5))
    caught("top_k_router, normalised", router, "choose_backward", without(1))
    caught("token_log_probs with ignored labels", head, "label_stats", lambda args: (args[0], args[1].abs(), *args[2:]))


if __name__ == "__main__":
    checks.run(
        every_op_beside_float64,
        the_head_says_whether_the_label_is_the_likeliest_and_the_lowest_of_equals_is,
        equal_logits_choose_the_lowest_experts_and_rows_of_nan_stay_among_the_experts,
        without_a_gradient_the_logits_stay_as_they_are,
        every_kernel_broken_on_purpose_is_caught,
    )
