"""A part of an adapter: where it lies in the whole, and that the parts of all make the whole again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.training.sharded.threads import Thread, on_ranks
from training import parts
from training.sharded.ranks import Alone

E, R, X, O = 8, 3, 5, 7  # noqa: E741  the legend's letters
A = torch.arange(E * R * X, dtype=torch.float32).view(E * R, X)
B = torch.arange(O * R * E, dtype=torch.float32).view(O, R * E)


def mine(rank: Thread) -> tuple[Tensor, Tensor]:
    """This rank's experts, marked as such."""
    count = E // rank.size
    first = rank.rank * count
    a = A.view(E, R, X)[first : first + count].flatten(0, 1).clone()
    b = B.view(O, R, E)[:, :, first : first + count].flatten(1).clone()
    parts.mark(a, b, first, count, E, rank)
    return a, b


@pytest.mark.parametrize("size", [2, 4])
def test_the_parts_of_all_ranks_are_the_whole_and_each_finds_its_own_in_it(size: int) -> None:
    def work(rank: Thread) -> None:
        for part, whole in zip(mine(rank), (A, B), strict=True):
            assert torch.equal(parts.whole(part), whole)
            assert parts.whole_shape(part) == tuple(whole.shape)
            assert torch.equal(parts.mine(part, whole), part)

    on_ranks(size, work)


def test_what_is_whole_stays_what_it_is() -> None:
    weight = nn.Parameter(A.clone())
    assert torch.equal(parts.whole(weight), A) and not parts.whole(weight).requires_grad
    assert parts.mine(weight, A) is A and parts.part_of(weight) is None
    assert parts.total_norms([weight], [2.5]) == [2.5]


def test_norms_are_those_of_the_whole_tensors() -> None:
    def work(rank: Thread) -> list[float]:
        a, b = mine(rank)
        return parts.total_norms([a, A, b], [float(a.norm()), float(A.norm()), float(b.norm())])

    wanted = pytest.approx([float(A.norm()), float(A.norm()), float(B.norm())], rel=1e-6)
    assert all(found == wanted for found in on_ranks(4, work))


def test_a_process_alone_needs_no_part() -> None:
    alone = Alone()
    room = torch.empty(3)
    alone.gather(room, torch.ones(3))
    assert room.tolist() == [1, 1, 1]
