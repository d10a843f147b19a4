"""How fast, how well used and how dear: what is worked out of a step's seconds and tokens. Standard library and the contract only.

What cannot be known is None: there is no MFU on a CPU, nor for a model whose config.json is not understood.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training.contract import layout
from training.contract.flops import PEAK_TFLOPS, token_flops, utilisation
from training.contract.recipe import Adapters, Assignment
from training.contract.shapes import ModelShape, ShapeError, read_shape

PeakFrom = Literal["measured", "data sheet"]
_ASK_S = 3.0


@dataclass(frozen=True)
class Peak:
    """TFLOP/s of the card at dense bf16, and where that was read."""

    tflops: float
    source: PeakFrom


@dataclass(frozen=True)
class Meter:
    """Turns tokens and seconds into the share of the box's cards that they used."""

    adapters: Adapters
    shape: ModelShape | None
    peak: Peak | None
    """Of one card."""
    gpus: int = 1

    @classmethod
    def of(cls, assignment: Assignment, home: Path) -> Meter:
        """For the box whose folder is `home`: the model's shape from its own files, the peak as the device probe measured it there, or the
        tier's."""
        recipe = assignment.recipe
        if recipe.box.device != "cuda":
            return cls(recipe.adapters, None, None)
        shape, peak = _shape(home / "model" / "config.json"), _measured(home) or _data_sheet(assignment)
        return cls(recipe.adapters, shape, peak, recipe.box.gpus)

    def mfu(self, tokens: int | None, rows: int | None, seconds: float) -> float | None:
        """Model FLOPs utilisation of a step over `rows` sequences of `tokens` together."""
        if self.shape is None or self.peak is None or not tokens or not rows or seconds <= 0:
            return None
        flops = token_flops(self.shape, self.adapters, tokens / rows).total
        return utilisation(flops, tokens / seconds, self.peak.tflops * self.gpus)


@dataclass(frozen=True)
class Gpu:
    """What the driver says of the first card; all None where there is no driver, or it does not answer."""

    util_percent: float | None = None
    power_w: float | None = None
    memory_mb: float | None = None


def ask_gpu() -> Gpu:
    """One query of nvidia-smi, some tens of milliseconds. A throttled or shared card shows here and nowhere else."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Gpu()
    wanted = "--query-gpu=utilization.gpu,power.draw,memory.used"
    try:
        answer = subprocess.run(
            [program, wanted, "--format=csv,noheader,nounits", "--id=0"],
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return Gpu()
    fields = [_number(word) for word in answer.stdout.partition("\n")[0].split(",")]
    return Gpu(*fields) if len(fields) == 3 else Gpu()


def _number(word: str) -> float | None:
    """nvidia-smi writes `[N/A]` for what a card does not tell."""
    try:
        return float(word)
    except ValueError:
        return None


def _shape(config: Path) -> ModelShape | None:
    try:
        return read_shape(config.read_bytes())
    except (OSError, ShapeError):
        return None


def _measured(home: Path) -> Peak | None:
    path = home / Path(layout.BOX_DEVICE_FACTS).name
    try:
        tflops = float(json.loads(path.read_text(encoding="utf-8"))["matmul_tflops"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Peak(tflops, "measured") if tflops > 0 else None


def _data_sheet(assignment: Assignment) -> Peak | None:
    tflops = PEAK_TFLOPS.get(assignment.recipe.box.tier)
    return Peak(tflops, "data sheet") if tflops else None
