"""What stops training for good. No torch here, so that the runner can tell them apart without loading it."""

from __future__ import annotations

from typing import Literal

Stage = Literal[
    "versions",
    "load",
    "attach",
    "static",
    "canary",
    "step1",
    "step2",
    "running",
    "rollout",
    "reference",
    "checkpoint",
    "restore",
    "end",
    "merge",
    "serve",
]


class LivenessError(RuntimeError):
    """The adapter is not what it should be, or does not act. Names the stage at which that was seen, the LoRA group and the tensor where one is to
    blame, and who probably did it."""

    def __init__(
        self,
        reason: str,
        *,
        stage: Stage,
        group: str | None = None,
        tensor: str | None = None,
        cause: str | None = None,
    ) -> None:
        super().__init__(reason)
        self.stage, self.group, self.tensor, self.cause = stage, group, tensor, cause


class ModelError(RuntimeError):
    """The model cannot be trained here in the way that the recipe asks for."""


class HostMemoryError(RuntimeError):
    """This machine has too little memory left, or does not let it be locked; another one may do."""


class NoCardError(RuntimeError):
    """The recipe wants a card and torch finds none: this machine is to blame, another one may do."""
