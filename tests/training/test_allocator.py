"""What torch's allocator is told must stand in the environment before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.conftest import place_box, recipe_of
from training import allocator, runner
from training.phases.desk import Home

WORD = "expandable_segments:True"
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    before = dict(os.environ)
    for name in NAMES:
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize("name", NAMES)
def test_segments_grow_unless_the_environment_says_something_itself(name: str) -> None:
    allocator.grow_segments()
    assert os.environ.pop("PYTORCH_ALLOC_CONF") == WORD
    os.environ[name] = "max_split_size_mb:64"
    allocator.grow_segments()
    assert [os.environ.get(each) for each in NAMES if each != name] == [None]


@pytest.mark.parametrize(
    ("recipe", "said"), [("qwen3.6-35b-a3b", WORD), ("qwen3.6-35b-a3b-nf4", None), ("tiny-moe", None)]
)
def test_a_run_on_a_card_says_it_and_one_with_a_base_in_4_bits_does_not(
    recipe: str, said: str | None, tmp_path: Path
) -> None:
    box = place_box(tmp_path / "box", {}, recipe_of(recipe), "run", bucket=f"folder:{tmp_path}")
    runner._begin(box.assignment, Home(box.root))
    assert os.environ.get("PYTORCH_ALLOC_CONF") == said


def test_nothing_that_the_runner_and_the_benchmark_begin_with_imports_torch() -> None:
    code = "import sys, training.runner, training.benchmark; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
