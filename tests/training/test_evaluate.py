from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

from tests.training.conftest import recipe_of
from training.errors import LivenessError
from training.evaluate import evaluate
from training.liveness import Probe, write_probe
from training.model import attach, load_base, lora_tensors

RECIPE = recipe_of("tiny-moe", evaluation={"data": "bucket:x.jsonl", "rows": 2, "max_new_tokens": 2})


@pytest.fixture
def adapter(tiny: Path, tmp_path: Path) -> Path:
    model = attach(load_base(tiny / "model", RECIPE), RECIPE, None)
    with torch.no_grad():
        for _, _, tensor in lora_tensors(model, "lora_B"):
            tensor.fill_(0.05)
    model.save_pretrained(tmp_path / "adapter")
    del model, tensor
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

    def living() -> list[Any]:
        return [each for each in gc.get_objects() if isinstance(each, Qwen3_5MoeExperts)]

    before = living()  # of other tests of this process
    evaluate(tiny / "model", tiny / "datasets" / "evaluation.jsonl", RECIPE, adapter)
    assert [each for each in living() if not any(each is old for old in before)] == []


def test_an_adapter_that_the_freshly_loaded_base_does_not_answer_with_is_refused(tiny: Path, adapter: Path) -> None:
    """What training ended with is in the probe; here it says otherwise."""
    write_probe(adapter, Probe(ids=(5, 6, 7), adapter=(-1.0, -1.0), base=(-2.0, -2.0)))
    with pytest.raises(LivenessError, match="served answers are") as caught:
        evaluate(tiny / "model", tiny / "datasets" / "evaluation.jsonl", RECIPE, adapter)
    assert caught.value.stage == "serve"


def test_an_adapter_that_changes_nothing_is_refused_without_a_probe_too(tiny: Path, tmp_path: Path) -> None:
    attach(load_base(tiny / "model", RECIPE), RECIPE, None).save_pretrained(tmp_path)
    with pytest.raises(LivenessError, match="exactly as without it"):
        evaluate(tiny / "model", tiny / "datasets" / "evaluation.jsonl", RECIPE, tmp_path)
