from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

from tests.training.conftest import recipe_of
from training.evaluate import evaluate
from training.model import attach, load_base

RECIPE = recipe_of("tiny-moe", evaluation={"data": "bucket:x.jsonl", "rows": 2, "max_new_tokens": 2})


@pytest.fixture
def adapter(tiny: Path, tmp_path: Path) -> Path:
    attach(load_base(tiny / "model", RECIPE), RECIPE, None).save_pretrained(tmp_path / "adapter")
    gc.collect()
    return tmp_path / "adapter"


@pytest.fixture
def no_chance() -> Iterator[None]:
    """No collection by chance: on a card nothing but memory that runs out would call for one, and that is too late."""
    gc.disable()
    yield
    gc.enable()


def test_a_scored_model_is_gone_before_the_next_is_loaded(tiny: Path, adapter: Path, no_chance: None) -> None:
    """Two bases of 67 GB do not fit on a card."""
    evaluate(tiny / "model", tiny / "datasets" / "evaluation.jsonl", RECIPE, adapter)
    assert [each for each in gc.get_objects() if isinstance(each, Qwen3_5MoeExperts)] == []
