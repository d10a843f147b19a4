"""Every kernel compiles for every card that we rent, fits its shared memory, spills nothing that matters and uses its matrix units. No card needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.kernels.offline import SHARED_LIMIT

Row = dict[str, Any]
PRODUCTS = {"up", "down", "down_backward", "up_backward"}
MOST_STACK = 64  # bytes a thread: Triton's own few words; kilobytes mean that a tile does not fit the registers
MATRIX_UNIT = {80: "mma.sync", 90: "wgmma", 100: "tcgen05", 120: "mma.sync"}


def rows(run_alone: Callable[..., str], plan: str, shape: str, *capabilities: int) -> list[Row]:
    printed = run_alone("compiled.py", plan, shape, *map(str, capabilities), interpret=False)
    return [json.loads(line) for line in printed.splitlines()]


def judge(found: list[Row]) -> None:
    for row in found:
        capability = row["capability"]
        assert row["shared"] <= SHARED_LIMIT[capability], row
        assert row["registers"] <= 255 and row["stack"] <= MOST_STACK, row
        if row["kernel"] in PRODUCTS:
            assert row[MATRIX_UNIT[capability]] > 0, row


def test_the_hopper_kernels_fit_and_bring_weights_by_the_copy_engine(run_alone: Callable[..., str]) -> None:
    """The SwiGLU's backward also at the larger model's sizes."""
    found = rows(run_alone, "sm90", "35B", 90, 100)
    judge(found)
    assert [row["kernel"] for row in found if row["capability"] == 90].count("down_backward") == 2
    for row in found:
        assert (row["tma"] > 0) == (row["kernel"] in PRODUCTS), row
    assert {row["kernel"] for row in found} >= PRODUCTS | {
        "_count",
        "_scan",
        "_place",
        "_thin",
        "combine",
        "factor_gradients",
    }


def test_the_portable_kernels_fit_99_kb_and_compile_for_ampere_and_for_blackwell_workstations(
    run_alone: Callable[..., str],
) -> None:
    found = rows(run_alone, "portable", "35B", 120, 80)
    judge(found)
    assert {row["kernel"] for row in found} >= PRODUCTS | {"_quantise", "_dequantise"}
    assert max(row["shared"] for row in found) <= SHARED_LIMIT[120]
    assert not any(row["tma"] for row in found)


def test_a_kernel_that_spills_or_overflows_is_seen() -> None:
    good = {"kernel": "up", "capability": 120, "shared": 65_536, "registers": 200, "stack": 0, "mma.sync": 96}
    judge([good])
    for bad in ({"shared": 102_400}, {"stack": 808}, {"mma.sync": 0}):
        with pytest.raises(AssertionError):
            judge([good | bad])


def test_no_loop_has_two_products_into_one_sum() -> None:
    """Triton miscompiles two dots into one accumulator of one iteration on Blackwell, without a word."""
    import ast
    from pathlib import Path

    def doubled(source: str) -> list[str]:
        found = []
        for loop in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For)):
            sums = [
                ast.unparse(node.targets[0])
                for node in ast.walk(loop)
                if isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Call)
                and ast.unparse(node.value.func) == "tl.dot"
            ]
            found += [name for name in set(sums) if sums.count(name) > 1]
        return found

    folder = Path(__file__).parents[2] / "kernels"
    sources = [path.read_text() for path in folder.glob("*.py")]
    assert sum(source.count("tl.dot(") for source in sources) > 10
    assert not [name for source in sources for name in doubled(source)]
    assert doubled("for k in range(0, K, B):\n    s = tl.dot(a, b, s)\n    s = tl.dot(c, d, s)\n") == ["s"]
