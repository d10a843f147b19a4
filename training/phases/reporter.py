"""What the trainer does, told to the desk: steps, checkpoints, the end; and the checks that belong to those moments."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from training import liveness
from training.contract.events import GroupState
from training.contract.layout import PROBE
from training.phases.desk import Desk

# |reward| of the very first step of DPO and KTO: policy and reference are the same model, so exactly 0 in float32.
_REFERENCE_TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}


class TokenCount:
    """Counts what goes through the model with a gradient: rollouts, references and evaluations do not train, padding is no token."""

    def __init__(self) -> None:
        self._tokens: list[int | torch.Tensor] = []
        self._rows = 0
        self._hook: Any = None
        self._paused = False

    def watch(self, model: Any) -> None:
        self._hook = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def take(self) -> tuple[int, int]:
        """(tokens, rows) since the last call."""
        # Only here does the host wait for the device.
        tokens, rows = sum(int(each) for each in self._tokens), self._rows
        self._tokens, self._rows = [], 0
        return tokens, rows

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """What goes through the model meanwhile does not count: warming up and capturing a graph is no training, and a replay is not seen."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def add(self, tokens: int, rows: int) -> None:
        """What trained unseen."""
        self._tokens.append(tokens)
        self._rows += rows

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _see(self, model: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if self._paused or ids is None or not torch.is_grad_enabled() or not model.training:
            return
        self._rows += ids.shape[0]
        # Where packed rows need no mask, there may be one `None` a kind of layer.
        self._tokens.append(mask.sum() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else ids.numel())


class Reporter(TrainerCallback):
    """Tells the desk what the trainer does: steps, checkpoints, the end; and stops it when the runner is told to stop."""

    def __init__(
        self,
        desk: Desk,
        start: Path,
        before: Mapping[str, GroupState],
        rows: int,
        *,
        grad_norms: Callable[[], Mapping[str, float]] = dict,
        write_probe: Callable[[Path], None] | None = None,
        count: TokenCount | None = None,
    ) -> None:
        """`grad_norms` gives the newest norm of each group's gradient; `write_probe` puts a probe beside the last adapter of the run; `count` is somebody
        else's, too."""
        self._desk, self._start, self._before, self._rows = desk, start, before, rows
        self._grad_norms, self._write_probe = grad_norms, write_probe
        self._count = count or TokenCount()
        self._seconds, self._counted = 0.0, (0, 0)
        """Of the last step, over all processes: its length, its tokens and rows."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        if self._desk.resume is not None:
            liveness.require_restored(self._desk.resume.manifest, state.global_step, model, optimizer)
            self._desk.guard("restore", state.global_step, {})
        self._desk.started(state.global_step, self._rows)
        self._count.watch(model)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._count.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._desk.pulse.begin_step(self._desk.name, state.global_step + 1)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._stop_if_told(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._seconds, self._counted = self._desk.pulse.end_step(), self._desk.crew.total(self._count.take())
        self._stop_if_told(state, control)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        metrics = {name: float(value) for name, value in logs.items() if isinstance(value, (int, float))}
        loss = metrics.pop("loss")
        metrics.pop("num_tokens", None)  # counts from the process's start, and not in all methods alike; ours below
        tokens, rows = self._counted
        self._desk.stepped(
            state.global_step, loss, self._seconds, metrics, tokens=tokens, rows=rows, grad_norms=self._grad_norms()
        )
        if state.global_step == 1 and self._desk.phase.kind in ("dpo", "kto"):
            liveness.require_reference(metrics, _REFERENCE_TOLERANCE[self._desk.assignment.recipe.model.dtype])
            self._desk.guard("reference", 1, {})

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Before a final checkpoint is let out, every group must have changed."""
        final = state.global_step >= state.max_steps
        groups = liveness.group_states(model, self._start if final else None)
        if final:
            moved = liveness.require_changed(dict(self._before), groups, model)
            self._desk.guard("end", state.global_step, moved)
        directory = self._desk.output / f"checkpoint-{state.global_step}"
        extra = ()
        if final and self._write_probe is not None:
            self._write_probe(directory)
            extra = (PROBE,)
        losses, metrics = summary(state.log_history)
        self._desk.save(directory, state.global_step, groups=groups, losses=losses, metrics=metrics, extra=extra)

    def _stop_if_told(self, state: Any, control: Any) -> None:
        if self._desk.told_to_stop():
            control.should_training_stop = True
            control.should_save = state.global_step not in (0, self._desk.saved_step)


def summary(history: Sequence[Mapping[str, Any]]) -> tuple[tuple[float | None, float | None], dict[str, float]]:
    """First and last loss of the phase, and its last metrics; of GRPO's reward and silence the mean over the phase. The history is part of a
    checkpoint, so this is right after a resume, too."""
    steps = [entry for entry in history if "loss" in entry]
    if not steps:
        return (None, None), {}
    skipped = ("loss", "epoch", "step", "learning_rate", "num_tokens")
    last = {
        name: float(value)
        for name, value in steps[-1].items()
        if name not in skipped and isinstance(value, (int, float)) and math.isfinite(value)
    }
    for name in ("reward", "frac_reward_zero_std"):
        values = [float(entry[name]) for entry in steps if name in entry]
        if values:
            last[f"mean_{name}"] = sum(values) / len(values)
    return (float(steps[0]["loss"]), float(steps[-1]["loss"])), last
