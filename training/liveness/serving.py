"""After training: a merge that changes what it should and nothing else, and a server that really applies the adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from training.contract.layout import PROBE
from training.contract.model import Frozen
from training.errors import LivenessError
from training.liveness.rollouts import base_weight
from training.liveness.static import group_of, lora_layers
from training.model import ADAPTER, family_of

_SHARE = 0.25  # a server's own rounding may take this share of the way from the adapter's answer to the base's
_MERGED, _ROUNDING = 0.05, 1e-5  # of the adapter's own effect, and of the numbers themselves in float32


class Probe(Frozen):
    """A prompt, and what the base with and without the adapter makes of it: whoever serves the adapter can be held against it."""

    ids: tuple[int, ...] = Field(min_length=2)
    adapter: tuple[float, ...]
    """Log-probability of ids[1:] given what stands before each, with the adapter."""
    base: tuple[float, ...]
    """The same without it."""

    @property
    def distance(self) -> float:
        return _mean_distance(self.adapter, self.base)


def probe_of(model: Any, ids: Tensor) -> Probe:
    """The probe of a model with its adapter, for token ids [1, T] on its device. LivenessError if the adapter changes nothing in these answers."""
    adapter = log_probabilities(model, ids)
    with model.disable_adapter():
        base = log_probabilities(model, ids)
    # Held against the very same products with a factor of zero: without the adapter they come in another order and round in another way.
    with _silent(model):
        silent = log_probabilities(model, ids)
    probe = Probe(ids=tuple(ids[0].tolist()), adapter=adapter, base=base)
    if adapter == silent or not probe.distance > 0:
        raise LivenessError(
            "the model answers the probe with its adapter exactly as without it",
            stage="serve",
            cause="the adapter is not applied",
        )
    return probe


@contextmanager
def _silent(model: Any) -> Iterator[None]:
    """The adapter switched on and computed, and multiplied by zero."""
    layers = [module for _, module in lora_layers(model)]
    before = [module.scaling[ADAPTER] for module in layers]
    try:
        for module in layers:
            module.scaling[ADAPTER] = 0.0
        yield
    finally:
        for module, scaling in zip(layers, before, strict=True):
            module.scaling[ADAPTER] = scaling


def log_probabilities(model: Any, ids: Tensor) -> tuple[float, ...]:
    """Of each token but the first, given those before it: T - 1 numbers for ids [1, T]."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    model.train(was_training)
    return tuple(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist())


def require_served(probe: Probe, served: Sequence[float]) -> dict[str, float]:
    """Distances of a server's log-probabilities of `probe.ids[1:]` from the adapter's and the base's answers (mean of absolute differences).
    LivenessError if they are not the adapter's: servers take an adapter whose names they do not know, and apply nothing."""
    if len(served) != len(probe.adapter):
        raise LivenessError(f"served {len(served)} log-probabilities, want {len(probe.adapter)}", stage="serve")
    away, from_base = _mean_distance(served, probe.adapter), _mean_distance(served, probe.base)
    if not away <= _SHARE * probe.distance:
        as_base = from_base <= _SHARE * probe.distance
        raise LivenessError(
            f"served answers are {away:.3g} away from the adapter's and {from_base:.3g} from the base's, which are {probe.distance:.3g} apart:"
            f" {'the base answers' if as_base else 'neither of them answers'}",
            stage="serve",
            cause="the server applies no adapter: its names match none of the served model's"
            if as_base
            else "another adapter or base is served, or only a part of the adapter is applied",
        )
    return {"from_adapter": away, "from_base": from_base}


def require_merged(model: Any, ids: Tensor) -> dict[str, float]:
    """Merge, look, and put back: each adapted weight must change by s·B·A, the answers must stay, and afterwards every bit is as before.

    For whoever merges this adapter, before they trust the merge: Livery itself exports the adapter alone and never merges. It wants a float32 copy
    on which it may be tried, with room for every adapted weight once more. ValueError for a bfloat16 base, which a merge and
    its reversal would damage. Returns the norm of the change a group.
    """
    family, layers = family_of(model), lora_layers(model)
    weights = {name: base_weight(module) for name, module in layers}
    if odd := next((name for name, weight in weights.items() if weight.dtype is not torch.float32), None):
        raise ValueError(f"require_merged: {odd} is {weights[odd].dtype}; want a float32 copy of the model")
    before = {name: weight.clone() for name, weight in weights.items()}
    wanted = log_probabilities(model, ids)
    with model.disable_adapter():
        effect = _mean_distance(wanted, log_probabilities(model, ids))
    changes: dict[str, float] = {}
    model.merge_adapter([ADAPTER])
    try:
        for name, module in layers:
            group = group_of(family, name, module)
            changes[group] = changes.get(group, 0.0) + _require_delta(name, module, group, before[name])
        merged = log_probabilities(model, ids)
    finally:
        model.unmerge_adapter()
        for name, module in layers:
            base_weight(module).copy_(before[name])  # W + d - d is not W in floating point
    scale = max(1.0, *(abs(each) for each in wanted))
    if not _mean_distance(merged, wanted) <= _MERGED * effect + _ROUNDING * scale:
        raise LivenessError(
            f"merged, the model answers {_mean_distance(merged, wanted):.2g} away from what it answers unmerged, of {effect:.2g} that the adapter makes",
            stage="merge",
            cause="a part of the adapter is not merged, or is merged twice",
        )
    return changes


def _require_delta(name: str, module: Any, group: str, before: Tensor) -> float:
    change = base_weight(module) - before
    a, b = module.lora_A[ADAPTER].weight.detach(), module.lora_B[ADAPTER].weight.detach()
    experts = getattr(module, "num_experts", 1)
    delta = torch.einsum("ore,erx->eox", b.view(b.shape[0], -1, experts), a.view(experts, -1, a.shape[1]))
    delta = (module.scaling[ADAPTER] * delta).view_as(change)
    if not float((change - delta).norm()) <= 1e-3 * float(delta.norm()) or not float(delta.norm()) > 0:
        raise LivenessError(
            f"{name}: merging changes its weight by {float(change.norm()):.3g} in norm, s·B·A is {float(delta.norm()):.3g}, their difference"
            f" {float((change - delta).norm()):.3g}",
            stage="merge",
            group=group,
            tensor=name,
            cause="the factors of the experts are read in another order, or the delta is not added",
        )
    return float(delta.norm())


def read_probe(adapter: Path) -> Probe | None:
    """The probe beside an adapter, if one was written."""
    path = adapter / PROBE
    return Probe.model_validate_json(path.read_text()) if path.exists() else None


def write_probe(adapter: Path, probe: Probe) -> None:
    (adapter / PROBE).write_text(probe.model_dump_json())


def _mean_distance(these: Sequence[float], those: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(these, those, strict=True)) / len(those)
