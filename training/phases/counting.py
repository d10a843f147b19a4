"""The counting trainer: it keeps the runner's whole contract and trains nothing.

Its state is a number that each step moves in a way decided by run, phase and step alone, so a resumed run ends with the same bytes as an
uninterrupted one. `weights.bin` stands for the adapter, so that a checkpoint has a size and takes time on a slow link.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
from pathlib import Path

from training.contract.events import GroupState
from training.phases.desk import Desk

REQUIRED_FILES = ("state.json", "weights.bin")
RESULT_FILES = REQUIRED_FILES
WEIGHTS_MB = 0.262144
STEP_S = 0.05


def train(desk: Desk) -> Path:
    """Count to the phase's steps; returns the directory of the result."""
    value, losses = _begin(desk)
    step = len(losses)
    begun_from = _digest(value) if not losses else ""
    desk.started(step, rows=None)
    desk.guard("attach", step, {"counter": 1.0})
    seconds = desk.assignment.recipe.step_seconds or STEP_S
    while step < desk.phase.steps and not desk.stop.is_set():
        desk.pulse.begin_step(desk.name, step + 1)
        desk.stop.wait(seconds)
        if desk.stop.is_set():
            break
        step += 1
        value, loss = _step(value, desk, step)
        losses.append(loss)
        desk.stepped(step, loss, desk.pulse.end_step(), {"learning_rate": desk.phase.learning_rate})
        if step % desk.phase.save_every_steps == 0 or step == desk.phase.steps:
            _save(desk, step, value, losses)
    if step and desk.saved_step != step:
        _save(desk, step, value, losses)
    changed = float(_digest(value) != begun_from)
    desk.guard("end", step, {"counter": changed})
    result = desk.keep_result(desk.output / f"checkpoint-{step}", RESULT_FILES) if step else desk.output
    desk.ended(step, groups=_groups(value), losses=_ends(losses), metrics={"value": value})
    return result


def _begin(desk: Desk) -> tuple[float, list[float]]:
    """The number and the losses so far: of the checkpoint, of the phase before, or from nothing."""
    shutil.rmtree(desk.output, ignore_errors=True)
    if desk.resume_dir is not None:
        state = json.loads((desk.resume_dir / "state.json").read_text())
        return state["value"], state["losses"]
    if desk.start is not None:
        return json.loads((desk.start / "state.json").read_text())["value"], []
    return float(desk.assignment.recipe.seed), []


def _step(value: float, desk: Desk, step: int) -> tuple[float, float]:
    noise = random.Random(f"{desk.assignment.run}/{desk.name}/{step}").random()
    loss = 4.0 * math.exp(-3.0 * step / desk.phase.steps) + 0.05 * noise
    return 0.9 * value + noise, round(loss, 6)


def _save(desk: Desk, step: int, value: float, losses: list[float]) -> None:
    directory = desk.output / f"checkpoint-{step}"
    directory.mkdir(parents=True, exist_ok=True)
    state = {"phase": desk.name, "step": step, "value": value, "losses": losses}
    (directory / "state.json").write_text(json.dumps(state))
    size = int((desk.assignment.recipe.checkpoint_mb or WEIGHTS_MB) * 1e6)
    (directory / "weights.bin").write_bytes(random.Random(_digest(value)).randbytes(size))
    desk.save(directory, step, groups=_groups(value), losses=_ends(losses), metrics={"value": value})


def _groups(value: float) -> dict[str, GroupState]:
    return {"counter": GroupState(tensors=1, zero_b=0, norm=abs(value), digest=_digest(value))}


def _ends(losses: list[float]) -> tuple[float | None, float | None]:
    return (losses[0], losses[-1]) if losses else (None, None)


def _digest(value: float) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
