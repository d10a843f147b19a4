"""Our AdamW is torch's in everything but the way: clipping, schedules, hooks, checkpoints, and a trainer that resumes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

pytest.importorskip("triton", reason="triton is not installed")

from kernels import adapter
from tests.training.conftest import recipe_of
from training import liveness, optimizer, packing
from training.liveness import steps
from training.model import attach, load_base, load_tokenizer, lora_tensors
from training.optimizer import AdamW, differs
from training.phases import fast_paths
from training.sharded import resume
from training.sharded.resume import Placed

NUMBERS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    """The second lies in memory as its own transpose, as a lora_B of routed experts does."""
    make = torch.Generator().manual_seed(seed)
    laid = torch.randn(9, 4, generator=make).t()
    return [
        torch.nn.Parameter(each) for each in (torch.randn(7, generator=make), laid, torch.randn(3, 5, generator=make))
    ]


def gradients(of: list[torch.nn.Parameter], number: int) -> None:
    make = torch.Generator().manual_seed(100 + number)
    for each in of:
        each.grad = torch.empty_like(each).copy_(torch.randn(each.shape, generator=make))


def theirs(of: list[torch.nn.Parameter], **changes: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(of, **{**NUMBERS, "foreach": False, **changes})


def close(one: list[Any], other: list[Any]) -> None:
    for mine, wanted in zip(one, other, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("max_norm", [0.5, 1e6, math.inf])
def test_clipping_inside_the_step_is_torchs_clipping_and_then_its_step(max_norm: float) -> None:
    mine, wanted = parameters(), parameters()
    ours, stock = AdamW(mine, **NUMBERS), theirs(wanted)
    for number in range(4):
        gradients(mine, number)
        gradients(wanted, number)
        before = [each.grad.clone() for each in mine]  # type: ignore[union-attr]
        seen, norm = ours.clip(mine, max_norm), torch.nn.utils.clip_grad_norm_(wanted, max_norm)
        torch.testing.assert_close(seen, norm)
        ours.step()
        stock.step()
        assert all(torch.equal(each.grad, old) for each, old in zip(mine, before, strict=True)), "left as they were"
    close(mine, wanted)
    close([ours.state[each]["exp_avg_sq"] for each in mine], [stock.state[each]["exp_avg_sq"] for each in wanted])


def test_a_clipping_is_for_one_step_and_gone_with_its_gradients() -> None:
    mine, wanted = parameters(), parameters()
    ours, stock = AdamW(mine, **NUMBERS), theirs(wanted)
    for forget in (lambda: ours.step(), lambda: ours.zero_grad()):
        gradients(mine, 0)
        ours.clip(mine, 1e-3)
        assert ours.pending is not None
        forget()
        assert ours.pending is None
    mine, ours = wanted, AdamW(wanted, **NUMBERS)
    fresh = parameters()
    stock = theirs(fresh)
    for each in (mine, fresh):
        gradients(each, 1)
    ours.step()
    stock.step()
    close(mine, fresh)


def test_gradients_are_zeros_in_the_same_memory_where_asked() -> None:
    mine = parameters()
    ours = AdamW(mine, **NUMBERS, zero_grads=True)
    gradients(mine, 0)
    places = [each.grad.data_ptr() for each in mine]  # type: ignore[union-attr]
    ours.step()
    assert [each.grad.data_ptr() for each in mine] == places  # type: ignore[union-attr]
    assert not any(bool(each.grad.any()) for each in mine)  # type: ignore[union-attr]


def test_a_parameter_without_a_gradient_is_left_alone_with_its_count() -> None:
    mine, wanted = parameters(), parameters()
    mine[0].requires_grad_(False)
    wanted[0].requires_grad_(False)
    ours, stock = AdamW(mine, **NUMBERS), theirs(wanted)
    for number in range(3):
        for each in (mine, wanted):
            gradients(each, number)
            each[0].grad = None
            if number == 1:
                each[2].grad = None
        ours.clip(mine, 1.0)
        torch.nn.utils.clip_grad_norm_(wanted, 1.0)
        ours.step()
        stock.step()
    close(mine, wanted)
    assert mine[0] not in ours.state and [int(ours.state[each]["step"]) for each in mine[1:]] == [3, 2]
    assert float(AdamW(parameters(), **NUMBERS).clip(parameters(), 1.0)) == 0.0, "no gradients at all"


def test_parameter_groups_and_a_schedule_have_their_own_rates() -> None:
    mine, wanted = parameters(), parameters()
    ours = AdamW([{"params": mine[:1], "lr": 1e-3}, {"params": mine[1:], "weight_decay": 0.0}], **NUMBERS)
    stock = theirs([{"params": wanted[:1], "lr": 1e-3}, {"params": wanted[1:], "weight_decay": 0.0}])  # type: ignore[arg-type]
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in (ours, stock)]
    for number in range(4):
        gradients(mine, number)
        gradients(wanted, number)
        for each in (ours, stock, *schedules):
            each.step()
    close(mine, wanted)


@pytest.mark.parametrize("fused", [True, False])
def test_a_state_of_torchs_loads_here_and_ours_there(fused: bool, tmp_path: Path) -> None:
    """Through a file, as a trainer's optimizer.pt goes."""

    def stored(of: torch.optim.Optimizer) -> dict[str, Any]:
        torch.save(of.state_dict(), tmp_path / "optimizer.pt")
        return torch.load(tmp_path / "optimizer.pt", weights_only=True)  # type: ignore[no-any-return]

    def stock(of: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return theirs(of, fused=True, foreach=None) if fused else theirs(of)

    def trained(of: list[torch.nn.Parameter], by: torch.optim.Optimizer, first: int, last: int) -> None:
        for number in range(first, last):
            gradients(of, number)
            by.step()

    whole, one, two = parameters(), parameters(), parameters()
    trained(whole, theirs(whole), 0, 6)
    for first, second, half in ((AdamW, stock, one), (stock, AdamW, two)):
        begun = first(half, **NUMBERS) if first is AdamW else first(half)
        trained(half, begun, 0, 3)
        goes_on = second(half, **NUMBERS) if second is AdamW else second(half)
        goes_on.load_state_dict(stored(begun))
        assert all(set(goes_on.state[each]) == {"step", "exp_avg", "exp_avg_sq"} for each in half)
        trained(half, goes_on, 3, 6)
        close(half, whole)


def test_moments_stored_in_another_layout_are_laid_out_anew() -> None:
    mine, other = parameters(), parameters()
    other[1] = torch.nn.Parameter(other[1].detach().contiguous())
    stock = theirs(other)
    for number in range(2):
        gradients(other, number)
        stock.step()
    mine = [torch.nn.Parameter(torch.empty_like(each).copy_(new)) for each, new in zip(mine, other, strict=True)]
    ours = AdamW(mine, **NUMBERS)
    ours.load_state_dict(copy.deepcopy(stock.state_dict()))
    assert ours.state[mine[1]]["exp_avg"].stride() == mine[1].stride() != other[1].stride()
    gradients(mine, 2)
    gradients(other, 2)
    ours.step()
    stock.step()
    close(mine, other)


def test_a_state_with_other_maths_and_parameters_of_other_kinds_are_refused() -> None:
    stock = theirs(parameters(), amsgrad=True)
    with pytest.raises(ValueError, match="AdamW with amsgrad"):
        AdamW(parameters(), **NUMBERS).load_state_dict(stock.state_dict())
    for odd, says in (
        (torch.zeros(3, dtype=torch.bfloat16), "torch.bfloat16, want torch.float32"),
        (torch.zeros(4, 6)[:, ::2], "no gap between them"),
        (torch.zeros(0), "want numbers"),
    ):
        with pytest.raises(ValueError, match=says):
            AdamW([torch.nn.Parameter(odd)])
    with pytest.raises(ValueError, match="norm_type inf"):
        AdamW(parameters()).clip(parameters(), 1.0, math.inf)


def test_the_file_of_a_base_in_4_bits_goes_on_to_the_bit(tmp_path: Path) -> None:
    mine, again = parameters(), parameters()
    ours, other = AdamW(mine, **NUMBERS), AdamW(again, **NUMBERS)
    for number in range(3):
        gradients(mine, number)
        ours.step()
    resume.save(tmp_path / "resume", {str(i): Placed(each) for i, each in enumerate(mine)}, ours)
    resume.load(tmp_path / "resume", {str(i): Placed(each) for i, each in enumerate(again)}, other)
    for number in range(3, 5):
        for each, by in ((mine, ours), (again, other)):
            gradients(each, number)
            by.step()
    assert all(torch.equal(one, two) for one, two in zip(mine, again, strict=True))
    assert int(other.state[again[0]]["step"]) == 5


def test_each_step_is_counted_by_those_who_keep_copies_of_the_masters() -> None:
    mine = parameters()
    ours, before, heard = AdamW(mine, **NUMBERS), adapter.optimizer_steps(), []
    ours.register_step_post_hook(lambda *_: heard.append(1))
    gradients(mine, 0)
    ours.step()
    ours.step()
    assert adapter.optimizer_steps() == before + 2 and len(heard) == 2


def test_a_gradient_that_is_not_finite_stops_at_the_guard_and_is_named_before_the_update(tiny: Path) -> None:
    """Clipping in a pass of its own spreads one NaN over all gradients; nobody can say then whence it came."""
    model = attach(load_base(tiny / "model", recipe_of("tiny-moe")), recipe_of("tiny-moe"), None)
    mine = [each for each in model.parameters() if each.requires_grad]
    ours = AdamW(mine, **NUMBERS)
    gradients(mine, 0)
    _, name, tensor = next(iter(lora_tensors(model, "lora_B")))
    assert tensor.grad is not None
    ours.clip(mine, 1.0)
    norms = steps.gradients(model, ours)
    read = torch.stack(torch._foreach_norm([each.grad for each in mine if each.grad is not None]))
    clipped = steps.clipped(norms, ours)
    total = math.sqrt(sum(each.norm**2 for each in clipped))
    assert total == pytest.approx(1.0, rel=1e-5) and sum(each.norm**2 for each in norms) == pytest.approx(
        float(read.square().sum()), rel=1e-5
    )
    tensor.grad[0, 0] = torch.nan
    assert not ours.clip(mine, 1.0).isfinite()
    with pytest.raises(liveness.LivenessError, match=f"the gradient of {name} is not finite; the update is not made"):
        steps.require_finite(steps.gradients(model, ours), 1, "running")


class Watch(TrainerCallback):
    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []
        self.norms: list[float] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        seen = steps.clipped(steps.gradients(model, optimizer), optimizer)
        self.norms.append(math.sqrt(sum(each.norm**2 for each in seen)))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append({name: logs[name] for name in ("loss", "grad_norm", "learning_rate") if name in logs})


@pytest.fixture(scope="module")
def base(tiny: Path) -> Any:
    packing.install()
    return load_base(tiny / "model", recipe_of("tiny-moe"))


@pytest.fixture
def built(base: Any, tiny: Path, tmp_path: Path) -> Callable[..., Any]:
    """A new trainer of TRL on a new adapter, as a phase builds it."""

    def build(into: str, max_norm: float = 0.05, optim: str = "adamw_torch_fused") -> Any:
        model = attach(copy.deepcopy(base), recipe_of("tiny-moe"), None)
        arguments = SFTConfig(
            output_dir=str(tmp_path / into),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            max_steps=6,
            learning_rate=5e-3,
            warmup_steps=2,
            max_grad_norm=max_norm,
            weight_decay=0.01,
            max_length=64,
            router_aux_loss_coef=0.0,
            dataset_text_field="text",
            logging_steps=1,
            save_strategy="steps",
            save_steps=3,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            optim=optim,
            gradient_checkpointing=False,
        )
        rows = Dataset.from_dict({"text": [f"number {n} and so on, " * 3 for n in range(12)]})
        return SFTTrainer(model, args=arguments, train_dataset=rows, processing_class=load_tokenizer(tiny / "model"))

    return build


@pytest.fixture
def trained(built: Callable[..., Any]) -> Callable[..., tuple[Watch, Any]]:
    def train(into: str, *, ours: bool, resume: Path | None = None, **options: Any) -> Any:
        trainer = built(into, **options)
        if ours:
            assert optimizer.adapt(trainer) == ""
        watch = Watch()
        trainer.add_callback(watch)
        trainer.train(resume_from_checkpoint=str(resume) if resume else None)
        return watch, trainer

    return train


def weights(trainer: Any) -> list[Tensor]:
    return [
        tensor.detach().clone() for which in ("lora_A", "lora_B") for _, _, tensor in lora_tensors(trainer.model, which)
    ]


@pytest.mark.train
def test_a_trainer_of_trl_sees_the_norms_and_losses_of_torchs_and_goes_on_from_either_checkpoint(
    trained: Callable[..., tuple[Watch, Any]], tmp_path: Path
) -> None:
    stock, trainer = trained("stock", ours=False)
    wanted = weights(trainer)
    mine, trainer = trained("ours", ours=True)
    assert type(trainer.optimizer.optimizer) is AdamW
    assert max(each["grad_norm"] for each in stock.logs if "grad_norm" in each) > 0.05, "nothing was clipped"
    for one, other in zip(mine.logs, stock.logs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert mine.norms == pytest.approx(stock.norms, rel=1e-4)
    for one, other in zip(weights(trainer), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)

    whole = [each["loss"] for each in mine.logs if "loss" in each]
    again, resumed = trained("again", ours=True, resume=tmp_path / "ours" / "checkpoint-3")
    assert [each["loss"] for each in again.logs if "loss" in each] == whole[3:]
    assert all(torch.equal(one, other) for one, other in zip(weights(resumed), weights(trainer), strict=True))
    crossed, _ = trained("crossed", ours=True, resume=tmp_path / "stock" / "checkpoint-3")
    assert [each["loss"] for each in crossed.logs if "loss" in each] == pytest.approx(whole[3:], rel=1e-4)
    back, _ = trained("back", ours=False, resume=tmp_path / "ours" / "checkpoint-3")
    assert [each["loss"] for each in back.logs if "loss" in each] == pytest.approx(whole[3:], rel=1e-4)


@pytest.mark.train
def test_a_trainer_that_does_not_clip_has_the_norm_all_the_same(trained: Callable[..., tuple[Watch, Any]]) -> None:
    stock, _ = trained("stock", ours=False, max_norm=0.0)
    mine, _ = trained("ours", ours=True, max_norm=0.0)
    for one, other in zip(mine.logs, stock.logs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.train
def test_the_8_bit_one_trains_and_goes_on_from_its_checkpoint_with_the_same_losses(
    trained: Callable[..., tuple[Watch, Any]], tmp_path: Path
) -> None:
    mine, trainer = trained("ours", ours=True, optim="adamw_torch_8bit")
    assert type(trainer.optimizer.optimizer).__module__ == "training.optimizer_8bit"
    again, resumed = trained("again", ours=True, optim="adamw_torch_8bit", resume=tmp_path / "ours" / "checkpoint-3")
    assert again.logs[:3] == mine.logs[3:6]
    assert all(torch.equal(one, other) for one, other in zip(weights(resumed), weights(trainer), strict=True))


@pytest.mark.train
def test_a_phase_takes_it_on_a_card_and_says_why_where_it_cannot(built: Callable[..., Any]) -> None:
    def set_for(trainer: Any, device: str = "cuda", processes: int = 1) -> list[str]:
        said: list[str] = []
        recipe = SimpleNamespace(box=SimpleNamespace(device=device))
        desk = SimpleNamespace(
            assignment=SimpleNamespace(recipe=recipe),
            crew=SimpleNamespace(size=processes),
            notice=lambda what, reason: said.append(f"{what}: {reason}"),
        )
        fast_paths.set_optimizer(desk, trainer)  # type: ignore[arg-type]
        return said

    trainer = built("phase")
    assert set_for(trainer, device="cpu") == [] and trainer.optimizer_cls_and_kwargs is None
    stock = trainer.accelerator.clip_grad_norm_
    assert set_for(trainer, processes=2) == [] and trainer.optimizer_cls_and_kwargs[0] is AdamW
    assert trainer.accelerator.clip_grad_norm_ == stock, "several processes clip together"
    assert set_for(trainer) == [] and trainer.optimizer_cls_and_kwargs[0] is AdamW
    assert trainer.accelerator.clip_grad_norm_ != stock
    odd = built("odd")
    next(each for each in odd.model.parameters() if each.requires_grad).data = torch.zeros(3, dtype=torch.bfloat16)
    (said,) = set_for(odd)
    assert "a parameter is torch.bfloat16, want torch.float32" in said and odd.optimizer_cls_and_kwargs is None
    other = built("other", optim="sgd")
    (said,) = set_for(other)
    assert "the trainer's optimizer is SGD" in said


@pytest.mark.parametrize("kind", ["fp32", "8 bits"])
def test_an_optimizer_that_steps_otherwise_on_the_card_is_not_taken(kind: str) -> None:
    from training.optimizer_8bit import AdamW8bit

    right: Any = AdamW if kind == "fp32" else AdamW8bit
    here = torch.device("cpu")

    class Forgets(right):  # type: ignore[misc]
        def _step(self, number: int, group: Any, rates: Any, clip: Any) -> None:
            super()._step(number, group, rates, None)

    class Faster(right):  # type: ignore[misc]
        def _step(self, number: int, group: Any, rates: Any, clip: Any) -> None:
            super()._step(number, group, rates._replace(lr=rates.lr * 1.05), clip)

    class Refuses(right):  # type: ignore[misc]
        def _step(self, number: int, group: Any, rates: Any, clip: Any) -> None:
            raise RuntimeError("no kernel image is available for execution on the device")

    state = torch.get_rng_state()
    assert differs(right, right, here) == ""
    assert "is off by" in differs(Faster, right, here)
    assert "no kernel image" in differs(Refuses, right, here)
    assert "is off by" in differs(Forgets, right, here)
    assert torch.equal(torch.get_rng_state(), state)
