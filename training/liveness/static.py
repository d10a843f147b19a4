"""What can be seen without running anything: versions, who stands where which forward should, switches, trainer arguments.

A list of known faults is never complete, so none of this is a proof of life; it is the diagnosis that the canary and the gradients lack.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from packaging.version import Version
from peft.tuners.lora.layer import LoraLayer, ParamWrapper
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.utils.import_utils import is_kernels_available

from training import experts
from training.contract.families import Family
from training.contract.recipe import Phase
from training.errors import LivenessError, Stage
from training.experts import who
from training.model import ADAPTER, EXPERTS_IMPLEMENTATION, family_of

FOREIGN_MODULES = ("unsloth", "unsloth_zoo", "liger_kernel", "axolotl")
_FOREIGN_DISTRIBUTIONS = ("kernels", *FOREIGN_MODULES)
_VERSIONS = {
    "peft": ("0.20", "0.22", "an older one takes the base for the reference of an adapter on fused experts"),
    "transformers": ("5.23", "6", "an older one lets documents of a packed row leak into each other in silence"),
    "trl": ("1.16", "2", "an older one ignores the tools of KTO rows"),
}


def require_versions() -> dict[str, str]:
    """The versions that decide whether an adapter trains; LivenessError if one is outside what was tested, or a library that replaces model code
    is installed or loaded."""
    refuse_foreign("versions")
    seen = {name: metadata.version(name) for name in _VERSIONS}
    for name, (least, below, why) in _VERSIONS.items():
        if not Version(least) <= Version(seen[name]) < Version(below):
            raise LivenessError(
                f"{name} {seen[name]} is installed; want >= {least} and < {below}: {why}", stage="versions", cause=name
            )
    if is_kernels_available():
        raise LivenessError(
            "transformers takes a package named kernels for Hugging Face's and may replace whole layers; uninstall it",
            stage="versions",
            cause="kernels",
        )
    return seen


def refuse_foreign(stage: Stage) -> None:
    """LivenessError if a library is about that replaces forwards of experts, or that our own folder `kernels` would hide."""
    loaded = [name for name in FOREIGN_MODULES if name in sys.modules]
    present = [name for name in _FOREIGN_DISTRIBUTIONS if _installed(name)] if stage == "versions" else []
    if loaded or present:
        names = ", ".join(sorted({*loaded, *present}))
        raise LivenessError(
            f"{names} {'is loaded in' if loaded else 'is installed beside'} this process; it replaces model code on import, uninstall it",
            stage=stage,
            cause=names,
        )


def require_static(model: Any, stage: Stage = "static") -> None:
    """LivenessError names the first place where another forward, class or switch stands than the one that trains, and who put it there."""
    refuse_foreign(stage)
    for fault in faults(model):
        raise LivenessError(fault.reason, stage=stage, group=fault.group, tensor=fault.tensor, cause=fault.cause)


def require_active(model: Any, stage: Stage) -> None:
    """LivenessError unless every adapted layer has exactly our adapter switched on, unmerged and trainable."""
    family = family_of(model)
    for name, module in lora_layers(model):
        problem = _switched(module)
        if problem:
            group = group_of(family, name, module)
            raise LivenessError(f"{name}: {problem}", stage=stage, group=group, tensor=name, cause=problem)


def require_arguments(args: Any, phase: Phase, stage: Stage = "static") -> None:
    """LivenessError if the trainer was built with an argument that goes round the adapters or hides that they are dead."""
    checkpointing = getattr(args, "gradient_checkpointing_kwargs", None) or {}
    aux = getattr(args, "router_aux_loss_coef", phase.router_aux_loss)
    wrong = {
        "use_liger_kernel": (
            getattr(args, "use_liger_kernel", False),
            "it replaces the experts' forward when training begins",
        ),
        "torch_compile": (
            getattr(args, "torch_compile", False),
            "a graph captured once does not see what is switched later",
        ),
        "packing_strategy": (
            getattr(args, "packing", False) and getattr(args, "packing_strategy", "") == "wrapped",
            "'wrapped' mixes documents; want bfd or bfd_split",
        ),
        "use_vllm": (
            getattr(args, "use_vllm", False),
            "its weight sync merges the adapter into the bfloat16 base and back",
        ),
        "router_aux_loss_coef": (
            aux != phase.router_aux_loss,
            f"is {aux}, the recipe says {phase.router_aux_loss}; with a frozen router it only leaks into other adapters",
        ),
        "logging_nan_inf_filter": (getattr(args, "logging_nan_inf_filter", False), "it shows a NaN as a loss of 0.0"),
        "gradient_checkpointing_kwargs": (
            getattr(args, "gradient_checkpointing", False) and checkpointing.get("use_reentrant", True),
            "want use_reentrant False: the other way loses gradients of layers whose input needs none",
        ),
    }
    for argument, (is_wrong, why) in wrong.items():
        if is_wrong:
            raise LivenessError(f"trainer argument {argument}: {why}", stage=stage, cause=argument)


@dataclass(frozen=True)
class Fault:
    """Something that stands where the training forward should."""

    reason: str
    group: str | None
    tensor: str | None
    cause: str


def faults(model: Any) -> Iterator[Fault]:
    """Every replaced forward or class and every wrong switch of a model, those of the routed experts first."""
    family = family_of(model)
    modeling = importlib.import_module(family.modeling)
    if getattr(model.get_base_model(), "use_kernels", False):
        yield Fault("the model was loaded with use_kernels", None, None, "use_kernels replaces whole layers")
    for name, block in blocks(model):
        yield from _block_faults(name, block, family, modeling)
    for name, module in lora_layers(model):
        group = group_of(family, name, module)
        yield from _wrapper_faults(name, module, group)
        if problem := _switched(module):
            yield Fault(f"{name}: {problem}", group, name, problem)
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if ".layers." in name and forward is not None and not _is_ours(forward):
            yield Fault(f"{name}.forward was replaced", family.group_of(name), name, who(forward))
    for name, cause in _lean_replaced(model).items():
        yield Fault(f"{name}.forward is not training.lean's any more", family.group_of(name), name, cause)


def blocks(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, block) of every mixture-of-experts block."""
    for name, module in model.named_modules():
        if name.endswith(".mlp") and hasattr(module, "experts"):
            yield name, module


def likely_cause(model: Any, group: str) -> str:
    """Who stands where our, PEFT's or the model's forward should: of this group's own layers if possible, else anybody."""
    found = list(faults(model))
    near = [
        fault for fault in found if fault.group == group or (fault.group or "").split(".")[0] == group.split(".")[0]
    ]
    for fault in near or found:
        return f"{fault.reason}: {fault.cause}"
    loaded = [name for name in FOREIGN_MODULES if name in sys.modules]
    if loaded:
        return f"{', '.join(loaded)} is loaded"
    for name, module in model.named_modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if ".layers." in name and not str(hook.__module__).startswith(("transformers.", "torch.")):
                return f"{name} has a forward hook: {who(hook)}"
    return "unknown: no replaced forward was found; see whether the block above calls this module at all"


def recompute_of(layer: nn.Module) -> str | None:
    """What a decoder layer of ours computes again in its backward pass; None for a layer of transformers'."""
    lean = _lean()
    return None if lean is None else lean.recompute_of(layer)  # type: ignore[no-any-return]


def _block_faults(name: str, block: Any, family: Family, modeling: ModuleType) -> Iterator[Fault]:
    group = family.routed_groups()[0]
    if (type(block).__module__, type(block).__name__) != (family.modeling, family.block_class):
        yield Fault(f"{name} is a {_class(block)}, want {family.block_class}", group, name, _class(block))
    elif _file(type(block).forward) != modeling.__file__:
        yield Fault(f"{family.block_class}.forward was replaced", group, name, who(type(block).forward))
    if "forward" in block.__dict__ and not _is_ours(block.forward):
        yield Fault(f"{name}.forward was replaced", group, name, who(block.forward))
    wrappers = list(experts.chain(block.experts))
    base = wrappers[-1].base_layer if wrappers else block.experts
    if (type(base).__module__, type(base).__name__) != (family.modeling, family.experts_class):
        yield Fault(f"{name}.experts is a {_class(base)}, want {family.experts_class}", group, name, _class(base))
        return
    if not _is_dispatcher(type(base).forward):
        yield Fault(f"{family.experts_class}.forward was replaced", group, f"{name}.experts", who(type(base).forward))
    seen = base.config._experts_implementation
    if seen != EXPERTS_IMPLEMENTATION:
        reason = f"{name}.experts reads the experts implementation {seen!r}, want {EXPERTS_IMPLEMENTATION!r}"
        yield Fault(reason, group, f"{name}.experts", "_experts_implementation was set or lost after loading")
    elif ALL_EXPERTS_FUNCTIONS[seen].__module__ != ALL_EXPERTS_FUNCTIONS.__module__:
        cause = who(ALL_EXPERTS_FUNCTIONS[seen])
        yield Fault(f"the registry's {seen!r} is not transformers' own", group, f"{name}.experts", cause)


def _wrapper_faults(name: str, module: Any, group: str) -> Iterator[Fault]:
    cls = type(module)
    if isinstance(module, ParamWrapper) and cls is not ParamWrapper:
        yield Fault(f"{name} is a {_class(module)}, want PEFT's ParamWrapper", group, name, _class(module))
    elif _file(cls.forward) != getattr(
        sys.modules.get(cls.__module__), "__file__", None
    ) or not cls.__module__.startswith("peft."):
        yield Fault(f"{cls.__name__}.forward was replaced", group, name, who(cls.forward))
    if getattr(module, "livery_layer", None) is not None and not _is_ours(module.__dict__.get("forward")):
        yield Fault(f"{name}.forward is not training.experts", group, name, who(module.forward))


def _switched(module: Any) -> str:
    active = list(module.active_adapters)
    if module.disable_adapters:
        return "its adapters are switched off"
    if module.merged:
        return f"its adapter {', '.join(module.merged_adapters)} is merged into the base"
    if active != [ADAPTER]:
        return f"its active adapter is {', '.join(active) or 'none'}, want {ADAPTER}"
    if not (module.lora_A[ADAPTER].weight.requires_grad and module.lora_B[ADAPTER].weight.requires_grad):
        return "its adapter is frozen"
    return ""


def lora_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """(name, layer) of everything with our adapter on it, the routed experts first."""
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLayer) and ADAPTER in m.lora_B]
    return sorted(found, key=lambda each: not isinstance(each[1], ParamWrapper))


def group_of(family: Family, name: str, module: Any) -> str:
    if isinstance(module, ParamWrapper):
        return f"routed_experts.{module.parameter_name}"
    return family.group_of(name) or "other"


def _is_ours(forward: Any) -> bool:
    if getattr(forward, "__func__", None) is experts._forward:
        return True
    lean = _lean()
    return lean is not None and bool(lean.is_ours(forward))


def _lean_replaced(model: Any) -> dict[str, str]:
    lean = _lean()
    return {} if lean is None else lean.replaced(model)  # type: ignore[no-any-return]


def _lean() -> Any:
    """None if nobody has imported it: then it is installed nowhere. Not imported here, since it needs triton."""
    return sys.modules.get("training.lean")


def _is_dispatcher(forward: Any) -> bool:
    """Whether a class's forward is still the one that asks transformers' registry. Its name proves nothing: functools.wraps copies it."""
    cells = dict(zip(getattr(forward, "__code__", _NO_CODE).co_freevars, forward.__closure__ or (), strict=False))
    interface = cells.get("experts_interface")
    return interface is not None and interface.cell_contents is ALL_EXPERTS_FUNCTIONS


def _file(function: Any) -> str | None:
    code = getattr(function, "__code__", None)
    return code.co_filename if code is not None else None


def _class(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


_NO_CODE = (lambda: None).__code__
