"""Our 8-bit AdamW is torchao's in everything but the way: maths, state_dict, schedules, and a trainer that resumes."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("torchao", reason="torchao is not installed")

from torchao import optim as torchao
from torchao.optim import adam as theirs_inside
from torchao.optim.subclass_8bit import OptimState8bit

from kernels import adapter
from training.optimizer import adapt
from training.optimizer_8bit import AdamW8bit, unfit
from training.sharded import resume
from training.sharded.resume import Placed

NUMBERS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao compiles its step, for which a machine without a compiler has nothing; the step itself is plain torch."""
    monkeypatch.setattr(theirs_inside.torch, "compile", lambda function, **_: function)


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    """A lora_A, a lora_B of routed experts that lies transposed, and one whose moments are too few to be packed."""
    make = torch.Generator().manual_seed(seed)
    made = (
        torch.randn(32, 256, generator=make),
        torch.randn(512, 24, generator=make).t(),
        torch.randn(7, 3, generator=make),
    )
    return [torch.nn.Parameter(each * 0.01) for each in made]


def gradients(of: list[torch.nn.Parameter], number: int) -> None:
    make = torch.Generator().manual_seed(100 + number)
    for each in of:
        each.grad = torch.empty_like(each).copy_(torch.randn(each.shape, generator=make))


def train(of: list[torch.nn.Parameter], by: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        gradients(of, number)
        by.step()


def alike(mine: list[torch.nn.Parameter], ours: Any, wanted: list[torch.nn.Parameter], stock: Any) -> None:
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        for kind in ("exp_avg", "exp_avg_sq"):
            seen, want = ours.state[one][kind], stock.state[other][kind]
            assert type(seen) is type(want)
            if isinstance(seen, OptimState8bit):
                apart = (seen.codes.int() - want.codes.int()).abs()
                assert int(apart.max()) <= 1 and float(apart.float().mean()) <= 1e-3
                seen, want = seen.scale, want.scale
            torch.testing.assert_close(seen, want, rtol=1e-5, atol=1e-9)
        assert ours.state[one]["step"] == stock.state[other]["step"]


def test_steps_are_torchaos_whether_clipped_before_or_within() -> None:
    mine, wanted = parameters(), parameters()
    ours, stock = AdamW8bit(mine, **NUMBERS), torchao.AdamW8bit(wanted, **NUMBERS)
    before = adapter.optimizer_steps()
    for number in range(4):
        gradients(mine, number)
        gradients(wanted, number)
        norm = torch.nn.utils.clip_grad_norm_(wanted, 1.0)
        torch.testing.assert_close(ours.clip(mine, 1.0), norm)
        ours.step()
        stock.step()
        for each in (ours, stock):
            each.param_groups[0]["lr"].mul_(0.5)
    alike(mine, ours, wanted, stock)
    assert adapter.optimizer_steps() == before + 8


def test_a_state_of_torchaos_loads_here_and_ours_there(tmp_path: Path) -> None:
    """Through a file, as a trainer's optimizer.pt goes."""
    whole = parameters()
    stock = torchao.AdamW8bit(whole, **NUMBERS)
    train(whole, stock, range(6))
    for first, second in ((AdamW8bit, torchao.AdamW8bit), (torchao.AdamW8bit, AdamW8bit), (AdamW8bit, AdamW8bit)):
        mine = parameters()
        begun = first(mine, **NUMBERS)
        train(mine, begun, range(3))
        torch.save(begun.state_dict(), tmp_path / "optimizer.pt")
        goes_on = second(mine, **NUMBERS)
        goes_on.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
        train(mine, goes_on, range(3, 6))
        alike(mine, goes_on, whole, stock)


def test_the_file_of_a_base_in_4_bits_goes_on_to_the_bit(tmp_path: Path) -> None:
    mine, again = parameters(), parameters()
    ours, other = AdamW8bit(mine, **NUMBERS), AdamW8bit(again, **NUMBERS)
    train(mine, ours, range(3))
    resume.save(tmp_path / "resume", {str(i): Placed(each) for i, each in enumerate(mine)}, ours)
    resume.load(tmp_path / "resume", {str(i): Placed(each) for i, each in enumerate(again)}, other)
    train(mine, ours, range(3, 5))
    train(again, other, range(3, 5))
    assert all(torch.equal(one, two) for one, two in zip(mine, again, strict=True))


def test_gradients_are_zeros_where_asked() -> None:
    mine = parameters()
    ours = AdamW8bit(mine, **NUMBERS, zero_grads=True)
    gradients(mine, 0)
    ours.step()
    assert not any(bool(each.grad.any()) for each in mine)  # type: ignore[union-attr]


def test_what_is_not_taken_is_refused_by_name() -> None:
    odd = torch.nn.Parameter(torch.zeros(256, 300).t().clone(memory_format=torch.preserve_format))
    assert "transposed with whole blocks of 256 in each row" not in unfit([odd])
    crooked = torch.nn.Parameter(torch.zeros(96, 64).t())
    assert "transposed with whole blocks of 256 in each row" in unfit([crooked])
    with pytest.raises(ValueError, match=r"use torchao\.optim\.AdamW8bit"):
        AdamW8bit([crooked])
    with pytest.raises(ValueError, match="bfloat16"):
        AdamW8bit([torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))])
    stock = torchao.AdamW8bit(parameters(), **NUMBERS, amsgrad=True)
    with pytest.raises(ValueError, match="amsgrad"):
        AdamW8bit(parameters(), **NUMBERS).load_state_dict(copy.deepcopy(stock.state_dict()))


def test_a_state_whose_codes_mean_other_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = parameters(), parameters()
    stock = torchao.AdamW8bit(other, **NUMBERS)
    train(other, stock, range(1))
    stock.state[other[1]]["exp_avg"].qmap.mul_(1.5)
    with pytest.raises(ValueError, match=r"the state keeps moments in blocks of 256 by a map from -1\.489 to 1\.5"):
        AdamW8bit(mine, **NUMBERS).load_state_dict(stock.state_dict())
    coarse = torchao.AdamW8bit(other, **NUMBERS, block_size=512)
    train(other, coarse, range(1))
    with pytest.raises(ValueError, match="blocks of 512"):
        AdamW8bit(mine, **NUMBERS).load_state_dict(coarse.state_dict())
    from torchao.optim import subclass_8bit

    monkeypatch.setattr(subclass_8bit, "get_qmap_unsigned", subclass_8bit.get_qmap_signed)
    with pytest.raises(ValueError, match="torchao keeps moments"):
        AdamW8bit(mine, **NUMBERS)


def test_a_trainer_gets_ours_with_its_numbers_and_keeps_its_own_clipping() -> None:
    model = torch.nn.Linear(256, 32)
    clip = object()
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6, "block_size": 256, "bf16_stochastic_round": False}

    def trainer(stock: Any, **changes: Any) -> Any:
        return SimpleNamespace(
            args=None,
            model=model,
            get_optimizer_cls_and_kwargs=lambda args, of: (stock, options | changes),
            accelerator=SimpleNamespace(clip_grad_norm_=clip),
        )

    fitting = trainer(torchao.AdamW8bit)
    assert adapt(fitting, clips=False) == "" and fitting.accelerator.clip_grad_norm_ is clip
    made, numbers = fitting.optimizer_cls_and_kwargs
    group = made(model.parameters(), **numbers).param_groups[0]
    assert made is AdamW8bit and group["betas"] == (0.9, 0.99) and group["eps"] == 1e-6
    assert "optimizer is SGD" in adapt(trainer(torch.optim.SGD))
    assert "blocks are of 128 numbers, want 256" in adapt(trainer(torchao.AdamW8bit, block_size=128))
    model.weight.data = model.weight.data.bfloat16()
    assert "bfloat16" in adapt(trainer(torchao.AdamW8bit))
