from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.sharded.threads import Thread, on_ranks
from training.sharded import resume
from training.sharded.headers import CheckpointError
from training.sharded.resume import Placed

E, R, X = 8, 4, 16
START = torch.Generator().manual_seed(5)
EXPERTS, LINEAR = torch.randn(E, R, X, generator=START), torch.randn(R, X, generator=START)
# As PEFT holds it: [out, R·E], the expert the fastest index.
FASTEST = torch.randn(X, R * E, generator=START)


class Rank:
    """One rank's tensors and optimizer: some experts, and a linear layer's factor that all have."""

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.first, self.last = rank * E // ranks, (rank + 1) * E // ranks
        self.experts = nn.Parameter(EXPERTS[self.first : self.last].clone())
        self.linear = nn.Parameter(LINEAR.clone())
        self.fastest = nn.Parameter(self._mine(FASTEST))
        self.optimizer = torch.optim.AdamW([self.experts, self.linear, self.fastest], lr=1e-2)

    def _mine(self, whole: Tensor) -> Tensor:
        return whole.view(X, R, E)[:, :, self.first : self.last].flatten(1).clone()

    @property
    def placed(self) -> dict[str, Placed]:
        return {
            "l.experts": Placed(self.experts, self.first, E),
            "l.q_proj": Placed(self.linear),
            "l.fastest": Placed(self.fastest, self.first, E, fastest=self.last - self.first),
        }

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        self.experts.grad = torch.randn(E, R, X, generator=generator)[self.first : self.last]
        self.linear.grad = torch.randn(R, X, generator=generator)
        self.fastest.grad = self._mine(torch.randn(X, R * E, generator=generator))
        self.optimizer.step()


def stepped(rank: int, ranks: int, numbers: range, start: Path | None = None) -> Rank:
    each = Rank(rank, ranks)
    if start is not None:
        assert resume.load(start, each.placed, each.optimizer) == {"step": str(numbers.start)}
    for number in numbers:
        each.step(number)
    return each


def whole(ranks: list[Rank]) -> tuple[Tensor, Tensor, Tensor]:
    fastest = torch.cat([each.fastest.detach().view(X, R, -1) for each in ranks], dim=2)
    return torch.cat([each.experts.detach() for each in ranks]), ranks[0].linear.detach(), fastest


def test_four_ranks_go_on_as_two_and_then_as_one(tmp_path: Path) -> None:
    wanted = whole([stepped(0, 1, range(9))])
    start: Path | None = None
    seen: list[Rank] = []
    for ranks, numbers in ((4, range(3)), (2, range(3, 6)), (1, range(6, 9))):
        path = tmp_path / f"{ranks}.safetensors"

        def work(
            rank: Thread, count: int = ranks, numbers: range = numbers, path: Path = path, start: Path | None = start
        ) -> Rank:
            mine = stepped(rank.rank, count, numbers, start)
            told = {"step": str(numbers.stop)}
            resume.save(path, mine.placed, mine.optimizer, ranks=rank, told=told)
            return mine

        seen, start = on_ranks(ranks, work), path
    assert all(map(torch.equal, whole(seen), wanted))


def test_the_file_is_the_same_whoever_wrote_it(tmp_path: Path) -> None:
    for ranks in (1, 4):
        on_ranks(
            ranks,
            lambda rank, ranks=ranks: resume.save(
                tmp_path / str(ranks), (mine := stepped(rank.rank, ranks, range(2))).placed, mine.optimizer, ranks=rank
            ),
        )
    assert (tmp_path / "1").read_bytes() == (tmp_path / "4").read_bytes()


def test_moments_in_8_bits_come_back_as_the_same_codes(tmp_path: Path) -> None:
    from torchao.optim import AdamW8bit

    weight = nn.Parameter(torch.randn(4, 32, 64))
    optimizer = AdamW8bit([weight])
    state = optimizer.state[weight]
    state["step"] = torch.tensor(3.0)
    for kind, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        state[kind] = optimizer._new_buffer(weight.detach(), signed)
        state[kind].copy_(torch.randn(4, 32, 64) if signed else torch.rand(4, 32, 64))
    resume.save(tmp_path / "r", {"w": Placed(weight, 0, 4)}, optimizer)
    # The two halves, each on a rank of its own.
    for half in (0, 1):
        mine = nn.Parameter(torch.zeros(2, 32, 64))
        again = AdamW8bit([mine])
        resume.load(tmp_path / "r", {"w": Placed(mine, 2 * half, 4)}, again)
        assert torch.equal(mine, weight[2 * half : 2 * half + 2])
        assert float(again.state[mine]["step"]) == 3
        for kind in ("exp_avg", "exp_avg_sq"):
            seen, wanted = again.state[mine][kind], state[kind]
            assert type(seen) is type(wanted)
            assert torch.equal(seen.codes.view(-1), wanted.codes.view(-1)[half * 4096 : half * 4096 + 4096])
            assert torch.equal(seen.scale, wanted.scale[half * 16 : half * 16 + 16])


def test_moments_in_8_bits_whose_blocks_no_expert_ends_are_kept_as_what_they_stand_for(tmp_path: Path) -> None:
    from torchao.optim import AdamW8bit

    # 4,608 numbers in 18 blocks of 256, and 4 experts.
    weight = nn.Parameter(torch.randn(4, 18, 64))
    optimizer = AdamW8bit([weight])
    state = optimizer.state[weight]
    state["step"] = torch.tensor(1.0)
    for kind in ("exp_avg", "exp_avg_sq"):
        state[kind] = optimizer._new_buffer(weight.detach(), kind == "exp_avg")
        state[kind].copy_(torch.rand(4, 18, 64))
    resume.save(tmp_path / "r", {"w": Placed(weight, 0, 4)}, optimizer)
    mine = nn.Parameter(torch.zeros(1, 18, 64))
    again = torch.optim.AdamW([mine])
    resume.load(tmp_path / "r", {"w": Placed(mine, 2, 4)}, again)
    assert torch.equal(again.state[mine]["exp_avg"], state["exp_avg"].dequantize()[2:3])


def test_moments_in_8_bits_go_on_in_fp32_where_the_optimizer_wants_that(tmp_path: Path) -> None:
    from torchao.optim import AdamW8bit

    weight = nn.Parameter(torch.randn(64, 64))
    optimizer = AdamW8bit([weight])
    state = optimizer.state[weight]
    state["step"] = torch.tensor(1.0)
    for kind in ("exp_avg", "exp_avg_sq"):
        state[kind] = optimizer._new_buffer(weight.detach(), kind == "exp_avg")
        state[kind].copy_(torch.rand(64, 64))
    resume.save(tmp_path / "r", {"w": Placed(weight)}, optimizer)
    mine = nn.Parameter(torch.zeros(64, 64))
    again = torch.optim.AdamW([mine])
    resume.load(tmp_path / "r", {"w": Placed(mine)}, again)
    assert torch.equal(again.state[mine]["exp_avg_sq"], state["exp_avg_sq"].dequantize())


def test_before_the_first_step_the_weights_alone_are_kept(tmp_path: Path) -> None:
    mine = Rank()
    resume.save(tmp_path / "r", mine.placed, mine.optimizer)
    again = Rank()
    again.linear.data.zero_()
    assert resume.load(tmp_path / "r", again.placed, again.optimizer) == {}
    assert torch.equal(again.linear, LINEAR) and not again.optimizer.state


@pytest.mark.parametrize(
    ("name", "shape", "reason"),
    [
        ("l.other", (R, X), r"lacks l\.other\.exp_avg \(3 such\)"),
        ("l.q_proj", (R, X + 1), r"l\.q_proj\.weight has shape \[4, 16\], want \[4, 17\]"),
    ],
)
def test_a_file_of_another_recipe_is_refused_and_nothing_is_changed(
    tmp_path: Path, name: str, shape: tuple[int, ...], reason: str
) -> None:
    mine = stepped(0, 1, range(1))
    resume.save(tmp_path / "r", mine.placed, mine.optimizer)
    again = Rank()
    before = again.experts.detach().clone()
    with pytest.raises(CheckpointError, match=reason):
        resume.load(tmp_path / "r", again.placed | {name: Placed(nn.Parameter(torch.zeros(shape)))}, again.optimizer)
    assert torch.equal(again.experts, before)


def test_a_tensor_of_the_file_that_is_not_trained_here_is_an_error(tmp_path: Path) -> None:
    mine = stepped(0, 1, range(1))
    resume.save(tmp_path / "r", mine.placed, mine.optimizer)
    with pytest.raises(CheckpointError, match=r"holds l\.experts\.exp_avg, which is not trained here"):
        resume.load(tmp_path / "r", {"l.q_proj": Placed(mine.linear)}, mine.optimizer)


def test_a_torn_file_and_a_file_of_something_else_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    mine = stepped(0, 1, range(1))
    resume.save(tmp_path / "r", mine.placed, mine.optimizer)
    os.truncate(tmp_path / "r", (tmp_path / "r").stat().st_size - 8)
    with pytest.raises(CheckpointError, match="the file is torn"):
        resume.load(tmp_path / "r", mine.placed, mine.optimizer)
    save_file({"x": torch.ones(1)}, tmp_path / "x")
    with pytest.raises(CheckpointError, match="is no resume file of this version"):
        resume.load(tmp_path / "x", mine.placed, mine.optimizer)


def test_a_tensor_that_was_never_stepped_is_an_error(tmp_path: Path) -> None:
    mine = Rank()
    mine.experts.grad = torch.ones_like(mine.experts)
    mine.optimizer.step()
    with pytest.raises(ValueError, match=r"stepped 0\.0, 1\.0 times; one that never gets a gradient does not train"):
        resume.save(tmp_path / "r", mine.placed, mine.optimizer)


def test_a_save_in_which_a_rank_fails_leaves_the_older_file(tmp_path: Path) -> None:
    mine = stepped(0, 1, range(1))
    resume.save(tmp_path / "r", mine.placed, mine.optimizer)
    before = (tmp_path / "r").read_bytes()

    def work(rank: Thread) -> None:
        each = stepped(rank.rank, 2, range(2))
        placed = each.placed if rank.rank == 0 else {"l.lost": each.placed["l.experts"]}
        resume.save(tmp_path / "r", placed, each.optimizer, ranks=rank)

    with pytest.raises(KeyError, match="lost"):
        on_ranks(2, work)
    assert (tmp_path / "r").read_bytes() == before
