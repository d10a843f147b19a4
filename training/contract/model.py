"""The base of every type that crosses from one machine to another: frozen, typed, and unforgiving about unknown keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator


class Frozen(BaseModel):
    """A value that is never changed after it is made; an unknown key is refused with the nearest right one named."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, data: Any) -> Any:
        if isinstance(data, dict):
            known = list(cls.model_fields)
            for key in data:
                if key not in known:
                    raise ValueError(unknown_key(str(key), known))
        return data


def unknown_key(key: str, known: Iterable[str]) -> str:
    """The sentence for a key nobody knows: what was seen, and the nearest right key or all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key '{key}'; {hint}"


def explain(error: ValidationError, subject: str) -> str:
    """One line a problem: `subject: field.path: what was wrong (seen: value)`."""
    lines = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in item["loc"]) or "(top level)"
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{subject}: {where}: {message}{_seen(item.get('input'), message)}")
    return "\n".join(lines)


def _seen(value: Any, message: str) -> str:
    if isinstance(value, (dict, list)) or message.startswith("unknown key"):
        return ""
    text = repr(value)
    return f" (seen: {text if len(text) <= 80 else text[:77] + '...'})"
