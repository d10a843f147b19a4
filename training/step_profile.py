"""What the card does in a micro-batch, by the part of the model that it does it for.

Marks are put down where a part begins, forward and backward, and a kernel belongs to the last one before its launch.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training import lean
from training.lean import blocks

_PROFILED = "livery:"


def profiled(base: Any, run: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """GPU milliseconds of one micro-batch, in all (overlaps counted once) and by part."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with marks(base), torch.profiler.profile(activities=kinds) as profile:
        _mark("norms and residuals")
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return shares(json.loads(path.read_text())["traceEvents"])


def shares(events: Sequence[Mapping[str, Any]]) -> tuple[float, dict[str, float]]:
    """Of a Chrome trace: (busy ms, ms by the part whose mark came last before the launch). The host has one thread at work at a time: while the
    backward pass runs in its own, the main one waits."""
    put: list[tuple[float, str]] = []
    launched: dict[int, float] = {}
    work: list[tuple[float, float, int]] = []
    for event in events:
        kind, name = event.get("cat"), str(event.get("name", ""))
        correlation = event.get("args", {}).get("correlation")
        if kind == "user_annotation" and name.startswith(_PROFILED):
            put.append((event["ts"], name.removeprefix(_PROFILED)))
        elif kind in ("cuda_runtime", "cuda_driver") and correlation is not None:
            launched[correlation] = event["ts"]
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append((event["ts"], event["dur"], correlation))
    put.sort()
    times = [at for at, _ in put]
    busy_us, until, parts = 0.0, 0.0, dict[str, float]()
    for began, took, correlation in sorted(work):
        index = bisect.bisect_right(times, launched.get(correlation, -1.0)) - 1
        part = put[index][1] if index >= 0 else "unknown"
        parts[part] = parts.get(part, 0.0) + took
        busy_us += max(0.0, began + took - max(began, until))
        until = max(until, began + took)
    ranked = sorted(parts.items(), key=lambda each: -each[1])
    return round(busy_us / 1e3, 2), {part: round(us / 1e3, 2) for part, us in ranked}


@contextlib.contextmanager
def marks(base: Any) -> Iterator[None]:
    """Marks around the parts of each layer and of the head, for one profiled pass."""
    kept: list[tuple[Any, Any]] = []

    def watch(module: Any, name: str, around: str) -> None:
        kept.append((module, module.__dict__.get("forward")))
        module.forward = _between(module.forward, name, around)

    for layer in base.model.layers:
        mixer = "gated delta net" if hasattr(layer, "linear_attn") else "attention"
        watch(layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn, mixer, "norms and residuals")
        around = "norms and residuals"
        if lean.recompute_of(layer) is None:
            around = "shared expert and router"
            watch(layer.mlp, around, "norms and residuals")
        watch(layer.mlp.experts, "routed experts", around)
    watch(base.model, "norms and residuals", "head")
    # The block's own forward is looked for by its identity, so the part of it that is not the experts is marked where it is computed.
    route = blocks.route
    blocks.route = _marked_route  # type: ignore[assignment]
    try:
        yield
    finally:
        blocks.route = route
        for module, forward in kept:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward


def _marked_route(block: Any, x_TH: Tensor, plain: Any = blocks.route) -> Any:
    name, around = "shared expert and router", "norms and residuals"
    _mark(name)
    routed = plain(block, _Mark.apply(x_TH, around) if _carries(x_TH) else x_TH)
    _mark(around)
    if routed is None:
        return None
    weight = _Mark.apply(routed.weight_Tk, name) if _carries(routed.weight_Tk) else routed.weight_Tk
    if routed.shared is None or not _carries(routed.shared[0]):
        return routed._replace(weight_Tk=weight)
    return routed._replace(weight_Tk=weight, shared=(_Mark.apply(routed.shared[0], name), routed.shared[1]))


def _between(forward: Callable[..., Any], name: str, around: str) -> Callable[..., Any]:
    """A forward that marks where its part begins and ends, and where its backward does."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        _mark(name)
        if args and _carries(args[0]):
            args = (_Mark.apply(args[0], around), *args[1:])
        elif _carries(kwargs.get("hidden_states")):
            kwargs["hidden_states"] = _Mark.apply(kwargs["hidden_states"], around)
        out = forward(*args, **kwargs)
        _mark(around)
        if _carries(out):
            return _Mark.apply(out, name)
        if isinstance(out, tuple) and out and _carries(out[0]):
            return (_Mark.apply(out[0], name), *out[1:])
        if _carries(getattr(out, "last_hidden_state", None)):
            out.last_hidden_state = _Mark.apply(out.last_hidden_state, name)
        return out

    return marked


def _carries(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


class _Mark(torch.autograd.Function):
    """Passes its input through, and puts down a mark when its gradient comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _mark(ctx.name)
        return grads[0], None


def _mark(name: str) -> None:
    with torch.profiler.record_function(_PROFILED + name):
        pass
