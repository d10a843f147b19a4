"""The kernels under Triton's interpreter: outputs and every gradient beside float64, on memory that holds NaN wherever nothing was written."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path


def test_every_result_beside_float64_with_empty_and_crowded_experts_and_gradients_accumulated(
    interpreted: Callable[..., str],
) -> None:
    interpreted("interpreted.py", "every_result_beside_float64_and_accumulation")


def test_adapters_in_other_layouts_with_hooks_changed_or_absent(interpreted: Callable[..., str]) -> None:
    interpreted(
        "interpreted.py",
        "the_kernels_add_to_grad_only_where_nobody_else_wants_the_gradients",
        "copies_follow_the_masters_also_past_their_version_counter",
        "without_lora_and_without_dx",
        "a_lora_b_that_lies_transposed_and_a_cleared_gradient",
        "nf4_as_the_reference",
    )


def test_the_self_check_catches_a_kernel_broken_on_purpose(interpreted: Callable[..., str]) -> None:
    said = interpreted("interpreted.py", "a_kernel_broken_on_purpose_is_caught")
    assert "out is off by" in said and "dweight is off by" in said


def test_every_check_of_the_scripts_is_asked_for() -> None:
    folder = Path(__file__).parent
    tests = "".join(path.read_text() for path in folder.glob("test_*.py"))
    for script in folder.glob("interpreted*.py"):
        tree = ast.parse(script.read_text())
        (call,) = (
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "checks.run"
        )
        run = {ast.unparse(name) for name in call.args}
        assert run == {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.args.args} - {
            "poison"
        }
        assert not [name for name in run if f'"{name}"' not in tests]
