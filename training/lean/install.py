"""Which modules of a model get our forward, which do not and why, and whether ours is still there."""

from __future__ import annotations

import importlib
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from training.contract.families import Family
from training.experts import who
from training.lean import attention, blocks, delta_net, layers
from training.lean.host_inputs import HostInputs
from training.lean.linears import Inputs
from training.model import family_of

_MARKS = (
    "livery_inputs",
    "livery_handed_over",
    "livery_zero_centered",
    "livery_gated",
    "livery_recompute",
    "livery_home",
    "livery_random",
)


@dataclass(frozen=True)
class Installed:
    """What `install` found."""

    kinds: Mapping[str, int]
    """Modules with our forward, by the kind that `Family.layers` names them."""
    left: Mapping[str, str]
    """Modules that stay in the form of their authors, single linears of ours among them: name -> reason."""
    whole: bool
    """Every decoder layer with all its parts, and the last norm, are ours; linears of them may be `left`."""


class Kind(NamedTuple):
    """One class of modules."""

    name: str
    module_class: type
    forward: Callable[..., Any]
    problem: Callable[[Any], str]
    inputs: Callable[[Any], dict[str, Inputs]]


def install(model: nn.Module) -> Installed:
    """Give each module of the decoder that can be computed here our forward, on the instance; a PEFT model or a bare one, adapters in place.

    What it cannot compute stays stock and is named in `left`. To install again is to look again. LivenessError for a model of no known family,
    ValueError for one without its decoder layers.
    """
    remove(model)
    family = family_of(model)
    kinds = {kind.module_class: kind for kind in _kinds(family)}
    counts: Counter[str] = Counter()
    left: dict[str, str] = {}
    decoder = [(name, module) for name, module in model.named_modules() if type(module) in kinds]
    for name, module in decoder:
        kind = kinds[type(module)]
        problem = _foreign(module) or kind.problem(module)
        if problem:
            left[name] = problem
            continue
        inputs = kind.inputs(module)
        left |= {f"{name}.{path}": why for each in inputs.values() for path, why in each.look(module).items()}
        _put(module, kind, inputs, family)
        counts[kind.name] += 1
    whole = all(_is_installed(module) for _, module in decoder)
    for module in _decoder_layers(model):
        module.livery_random = not whole or any(isinstance(each, _DropoutNd) and each.p for each in module.modules())
    if not counts["decoder_layer"]:
        raise ValueError(f"no {family.layers.decoder_layer} in {type(model).__name__}; want a {family.text_class}")
    return Installed(dict(counts), left, whole)


def remove(model: nn.Module) -> None:
    """Take every forward of ours off again."""
    for module in model.modules():
        if _is_installed(module):
            del module.__dict__["forward"]
        for mark in _MARKS:
            module.__dict__.pop(mark, None)


def is_ours(forward: Any) -> bool:
    """Whether a forward found on an instance is one of this package."""
    return getattr(forward, "__func__", None) in _FORWARDS


def replaced(model: nn.Module) -> dict[str, str]:
    """Modules whose forward was ours and is not any more, with who it is instead."""
    return {
        name: who(module.forward)
        for name, module in model.named_modules()
        if "livery_handed_over" in module.__dict__ and not _is_installed(module)
    }


def handed_over(model: nn.Module) -> dict[str, int]:
    """How often a module of ours called its stock forward in training, where it ever did: because of a cache, a hook, or several adapters at once."""
    return {
        name: module.livery_handed_over
        for name, module in model.named_modules()
        if module.__dict__.get("livery_handed_over")
    }


def set_recompute(model: nn.Module, policy: str) -> None:
    """What every layer computes again in the backward pass, one of `layers.RECOMPUTE`. ValueError for another word, or for a model without our layers."""
    if policy not in layers.RECOMPUTE:
        raise ValueError(f"recompute: {policy!r}; want one of {', '.join(layers.RECOMPUTE)}")
    ours = _decoder_layers(model)
    if not ours:
        raise ValueError("recompute: no decoder layer of this model is ours; want training.lean.install first")
    for module in ours:
        module.livery_recompute = policy


def keep_inputs(model: nn.Module, home: HostInputs | None) -> None:
    """Let what the layers start from, when they compute again, wait in `home`; None: on the card."""
    for module in _decoder_layers(model):
        module.livery_home = home


def recompute_of(model: nn.Module) -> str | None:
    """The policy, or None where no layer is ours."""
    return next((module.livery_recompute for module in _decoder_layers(model)), None)


def takes_no_mask(model: nn.Module) -> bool:
    """Whether packed rows may come with `None` for every kind of mask on a card: the text model takes a dictionary of masks, and every attention
    layer is ours."""
    family = family_of(model)
    return family.layers.mask_a_kind and _attends_by_lengths(model, family)


def no_mask(model: nn.Module, device: torch.device) -> Any:
    """What to give a model as `attention_mask` on a card, so that it builds none for packed rows; None where it must, since an attention layer is not
    ours. A text model that takes no dictionary of masks hands through one of four dimensions as it is, and our layers do not read it."""
    family = family_of(model)
    if not _attends_by_lengths(model, family):
        return None
    if family.layers.mask_a_kind:
        return {"full_attention": None, "linear_attention": None}
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _attends_by_lengths(model: nn.Module, family: Family) -> bool:
    wanted = _class(family, family.layers.attention)
    return all(_is_installed(module) for module in model.modules() if type(module) is wanted)


def _kinds(family: Family) -> Iterator[Kind]:
    names = family.layers

    def kind(field: str, forward: Any, problem: Any, inputs: Any = None) -> Kind:
        return Kind(field, _class(family, getattr(names, field)), forward, problem, inputs or (lambda _: {}))

    yield kind("norm", blocks.norm_forward, blocks.norm_problem)
    yield kind("attention", attention.forward, attention.problem, lambda _: attention.inputs())
    yield kind("mlp", blocks.mlp_forward, blocks.mlp_problem, lambda _: blocks.mlp_inputs())
    yield kind("router", blocks.router_forward, lambda _: "")
    if names.delta_net:
        yield kind("delta_net", delta_net.forward, delta_net.problem, lambda _: delta_net.inputs())
    block = _class(family, family.block_class)
    yield Kind(
        "block",
        block,
        blocks.block_forward,
        blocks.block_problem,
        lambda module: blocks.block_inputs(hasattr(module, "shared_expert")),
    )
    yield kind("decoder_layer", layers.forward, lambda _: "")


def _put(module: Any, kind: Kind, inputs: dict[str, Inputs], family: Family) -> None:
    module.livery_inputs, module.livery_handed_over = inputs, 0
    module.livery_zero_centered, module.livery_gated = family.layers.zero_centered_norm, family.layers.gated_attention
    if kind.name == "decoder_layer":
        module.livery_recompute, module.livery_home = "none", None
    module.forward = types.MethodType(kind.forward, module)


def _foreign(module: nn.Module) -> str:
    forward = module.__dict__.get("forward")
    return f"its forward was replaced by {who(forward)}" if forward is not None else ""


def _is_installed(module: nn.Module) -> bool:
    return is_ours(module.__dict__.get("forward"))


def _decoder_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if "livery_recompute" in module.__dict__]


def _class(family: Family, name: str) -> type:
    return getattr(importlib.import_module(family.modeling), name)  # type: ignore[no-any-return]


_FORWARDS = frozenset(
    {
        attention.forward,
        blocks.block_forward,
        blocks.mlp_forward,
        blocks.norm_forward,
        blocks.router_forward,
        delta_net.forward,
        layers.forward,
    }
)
