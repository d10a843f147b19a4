"""What the scripts of this folder that run under Triton's interpreter share: all their checks in one process, each told by its name.

To import torch and triton takes longer than most checks.
"""

from __future__ import annotations

import contextlib
import io
import json
import traceback
from collections.abc import Callable
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter


def run(*checks: Callable[[], None]) -> None:
    """Run them one after another; of each, print what it said and how it failed as a line of JSON."""
    patch_once()
    for check in checks:
        said, failed = io.StringIO(), ""
        torch.manual_seed(0)
        empty, empty_like = torch.empty, torch.empty_like
        try:
            with contextlib.redirect_stdout(said):
                check()
        except Exception:  # noqa: BLE001  the checks after it are asked for by other tests
            failed = traceback.format_exc()
        torch.empty, torch.empty_like = empty, empty_like  # type: ignore[assignment]
        print(json.dumps({"check": check.__name__, "said": said.getvalue(), "failed": failed}), flush=True)


def patch_once() -> None:
    """Let a call of a device function find the operators that the launch around it has put into triton.language; it would go through all names there again."""
    patch = interpreter._patch_lang

    def where_it_is_not_yet(fn: Any) -> Any:
        loads = (each.load for each in fn.__globals__.values() if each is tl or each is tl.core)
        if any(map(tl.core.is_builtin, (*loads, tl.tensor.__add__))):
            return patch(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = where_it_is_not_yet
