"""The kernels under Triton's interpreter: outputs and every gradient beside float64, on memory that holds NaN wherever nothing was written."""

from __future__ import annotations

from collections.abc import Callable


def test_every_result_beside_float64_with_empty_and_crowded_experts_and_gradients_accumulated(
    run_alone: Callable[..., str],
) -> None:
    run_alone("interpreted.py", "every_result_beside_float64_and_accumulation", interpret=True)


def test_adapters_in_other_layouts_with_hooks_changed_or_absent(run_alone: Callable[..., str]) -> None:
    run_alone(
        "interpreted.py",
        "the_kernels_add_to_grad_only_where_nobody_else_wants_the_gradients",
        "copies_follow_the_masters_also_past_their_version_counter",
        "without_lora_and_without_dx",
        "a_lora_b_that_lies_transposed_and_a_cleared_gradient",
        "nf4_as_the_reference",
        interpret=True,
    )


def test_the_self_check_catches_a_kernel_broken_on_purpose(run_alone: Callable[..., str]) -> None:
    said = run_alone("interpreted.py", "a_kernel_broken_on_purpose_is_caught", interpret=True)
    assert "out is off by" in said and "dweight is off by" in said
