from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from training.phases.reporter import TokenCount


class Counted(nn.Module):
    """Takes what a language model takes."""

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        return input_ids


@pytest.fixture
def watched() -> Iterator[tuple[Counted, TokenCount]]:
    model, count = Counted(), TokenCount()
    count.watch(model)
    yield model, count
    count.close()


def test_padding_is_no_token_and_every_micro_batch_counts(watched: tuple[Counted, TokenCount]) -> None:
    model, count = watched
    ids = torch.zeros(2, 5, dtype=torch.long)
    model(input_ids=ids, attention_mask=torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]))
    model(input_ids=ids[:1], attention_mask=None)  # a packed row has no padding and no mask
    model(input_ids=ids[:1], attention_mask={"full_attention": None, "linear_attention": None})  # nor on a card
    assert count.take() == (17, 4)
    assert count.take() == (0, 0), "each step counts its own"


def test_rollouts_references_and_evaluation_do_not_train(watched: tuple[Counted, TokenCount]) -> None:
    model, count = watched
    ids = torch.zeros(2, 5, dtype=torch.long)
    with torch.no_grad():
        model(input_ids=ids)
    model.eval()
    model(input_ids=ids)
    assert count.take() == (0, 0)


def test_nothing_is_counted_after_the_phase() -> None:
    model, count = Counted(), TokenCount()
    count.watch(model)
    count.close()
    model(input_ids=torch.zeros(1, 3, dtype=torch.long))
    assert count.take() == (0, 0)


def test_what_warms_up_is_no_training_and_what_a_replay_hides_is_added(watched: tuple[Counted, TokenCount]) -> None:
    model, count = watched
    ids = torch.zeros(1, 5, dtype=torch.long)
    with contextlib.suppress(RuntimeError), count.unseen():
        model(input_ids=ids)
        raise RuntimeError("not captured")
    assert count.take() == (0, 0)
    model(input_ids=ids)
    count.add(7, 1)
    assert count.take() == (12, 2)
