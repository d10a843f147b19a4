"""What a transformers trainer does otherwise on a base in 4 bits: how it saves, how it goes on, and how gradients of several processes become one step.

The model is not wrapped. Each process has gradients of its own rows: those of routed experts are already means over the processes (they came home through
the gathering of the adapters), the others are averaged once before the update. So one step is the same whatever the number of processes.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training import parts
from training.contract.manifest import RESUME
from training.contract.recipe import Recipe
from training.experts import ADAPTER
from training.sharded import adapters, resume
from training.sharded.adapters import Factors
from training.sharded.ranks import Ranks
from training.sharded.resume import Placed

_PREFIX = "base_model.model."
_SCHEDULER, _RNG, _ARGUMENTS = "scheduler.pt", "rng_state.pth", "training_args.bin"


def adapt(trainer: Any, recipe: Recipe) -> None:
    """Give this trainer, whose model stands on a packed base, its own ways of saving, loading and stepping."""
    ranks: Ranks = trainer.model.livery_held.ranks
    kept = _Kept(trainer, recipe, ranks)
    trainer.save_model = kept.save_model
    trainer._save_optimizer_and_scheduler = kept.save_optimizer
    trainer._load_optimizer_and_scheduler = kept.load_optimizer
    trainer._load_from_checkpoint = kept.load_model
    trainer._save_rng_state, trainer._load_rng_state = kept.save_random, kept.load_random
    if ranks.size > 1:
        # accelerate would wrap it for averaging in each backward pass, and first send every weight, the absent ones too, from one process to all.
        trainer.accelerator.prepare_model = functools.partial(trainer.accelerator.prepare_model, evaluation_mode=True)
        trainer.accelerator.clip_grad_norm_ = functools.partial(clip, ranks)


def clip(ranks: Ranks, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Average what every process has whole, then clip by the norm of the whole gradient; returns that norm. Collective."""
    assert norm_type == 2.0, norm_type
    there = [each for each in parameters if each.grad is not None]
    everywhere = [each.grad for each in there if parts.part_of(each) is None]
    dealt = [each.grad for each in there if parts.part_of(each) is not None]
    if everywhere:
        flat = torch.cat([grad.flatten() for grad in everywhere])
        ranks.mean(flat)
        for grad, averaged in zip(everywhere, flat.split([grad.numel() for grad in everywhere]), strict=True):
            grad.copy_(averaged.view_as(grad))
    device = there[0].device
    squares = torch.stack([_square(dealt, device), _square(everywhere, device)])
    own = squares[:1].clone()
    ranks.mean(own)
    norm = (own[0] * ranks.size + squares[1]).sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([*everywhere, *dealt], scale)
    return norm


def _square(grads: list[Tensor], device: torch.device) -> Tensor:
    if not grads:
        return torch.zeros((), device=device)
    return torch.stack(torch._foreach_norm(grads)).square().sum()


def save_adapter(model: Any, directory: Path, recipe: Recipe) -> None:
    """PEFT's own directory, from every process's part. Collective."""
    ranks: Ranks = model.livery_held.ranks
    named = {"base": recipe.model.source, "ranks": ranks}
    adapters.save(directory, factors(model), recipe.adapters, recipe.model.family, **named)


def factors(model: Any) -> list[Factors]:
    """Every adapter of the model, in one order everywhere: views of what trains."""
    found = []
    for name, module, A, B in _adapted(model):
        path = name.removeprefix(_PREFIX)
        if not hasattr(module, "parameter_name"):
            found.append(Factors(path, A, B))
            continue
        first, count, everywhere = _dealt(module, A)
        A_nRX, B_nOR = A.view(count, -1, A.shape[1]), B.view(len(B), -1, count).permute(2, 0, 1)
        found.append(Factors(path.removesuffix(".base_layer"), A_nRX, B_nOR, module.parameter_name, first, everywhere))
    return found


def placed(model: Any) -> dict[str, Placed]:
    """What training goes on from, by PEFT's names."""
    found = {}
    for name, module, A, B in _adapted(model):
        if hasattr(module, "parameter_name"):
            first, count, everywhere = _dealt(module, A)
            rank = A.shape[0] // count
            found[f"{name}.lora_A"] = Placed(A, first * rank, everywhere * rank)
            found[f"{name}.lora_B"] = Placed(B, first, everywhere, fastest=count)
        else:
            found[f"{name}.lora_A"], found[f"{name}.lora_B"] = Placed(A), Placed(B)
    return found


def _adapted(model: Any) -> Iterator[tuple[str, Any, Tensor, Tensor]]:
    for name, module in model.named_modules():
        if ADAPTER in getattr(module, "lora_A", ()):
            yield name, module, module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight


def _dealt(module: Any, lora_A: Tensor) -> tuple[int, int, int]:
    """Of a routed adapter: the first expert here, how many are here, how many there are."""
    part = parts.part_of(lora_A)
    return (part.first, part.count, part.experts) if part else (0, module.num_experts, module.num_experts)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer under accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


class _Kept:
    """A trainer's checkpoints: PEFT's own directory, one file to go on from, and the trainer's small ones."""

    def __init__(self, trainer: Any, recipe: Recipe, ranks: Ranks) -> None:
        self._trainer, self._recipe, self._ranks = trainer, recipe, ranks

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        directory = Path(output_dir or self._trainer.args.output_dir)
        save_adapter(self._trainer.model, directory, self._recipe)
        if self._ranks.rank == 0:
            torch.save(self._trainer.args, directory / _ARGUMENTS)

    def load_model(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The adapter comes with the optimizer's state, from one file."""

    def save_optimizer(self, output_dir: str) -> None:
        directory, trainer = Path(output_dir), self._trainer
        told = {"step": str(trainer.state.global_step)}
        resume.save(directory / RESUME, placed(trainer.model), _plain(trainer.optimizer), ranks=self._ranks, told=told)
        if self._ranks.rank == 0:
            torch.save(trainer.lr_scheduler.state_dict(), directory / _SCHEDULER)

    def load_optimizer(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        trainer = self._trainer
        resume.load(Path(checkpoint) / RESUME, placed(trainer.model), _plain(trainer.optimizer))
        trainer.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))
        # The file holds moments; a rate lies in the optimizer's groups, and the schedule writes it there only at its next step.
        for group, rate in zip(trainer.optimizer.param_groups, trainer.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def save_random(self, output_dir: str) -> None:
        """The leader's: rows are dealt out by number, so nothing that is drawn depends on the process."""
        if self._ranks.rank == 0:
            kind, keys, *rest = np.random.get_state(legacy=True)
            state = {
                "python": random.getstate(),
                "numpy": (kind, torch.from_numpy(keys), *rest),
                "cpu": torch.random.get_rng_state(),
            }
            torch.save(state, Path(output_dir) / _RNG)
        self._ranks.barrier()

    def load_random(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        state = torch.load(Path(checkpoint) / _RNG, weights_only=True)
        random.setstate(state["python"])
        kind, keys, *rest = state["numpy"]
        np.random.set_state((kind, keys.numpy(), *rest))
        torch.random.set_rng_state(state["cpu"])
