"""A step small enough for one core."""

from __future__ import annotations

from typing import Any

from training.step_setting import Setting


def tiny(**changes: Any) -> Setting:
    given = {"layers": 4, "tokens": 96, "micro": (24, 48), "rank": 4, "steps": 1, "device": "cpu", "dtype": "float32"}
    return Setting(**{**given, "tiny": True, **changes})
