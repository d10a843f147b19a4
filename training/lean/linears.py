"""Linear layers as PEFT wraps them, read anew at each call: what is disabled, merged or switched over then counts at once.

Saving, loading, merging and switching stay PEFT's own; only the products are ours (`kernels.lora_linear`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn

from kernels.lora_linear import Copies, Lora, Projection, project
from training.lean.handover import frozen, hand_over, untouched

_UNPACKED = "unpacked"
"""The method by which a packed layer gives its weight; see `training.sharded.model.PackedLinear`."""


class Inputs:
    """The linears of one input, by their paths from the module that owns them; together they are one product."""

    def __init__(self, *paths: str) -> None:
        self._paths = paths
        self._left: frozenset[str] = frozenset()
        self._copies: dict[tuple[str | None, ...], Copies] = {}

    def look(self, module: Any) -> dict[str, str]:
        """Path and reason of every linear that cannot be part of the product, whatever is switched on: it is called as it is."""
        left = {}
        for path in self._paths:
            linear = _at(module, path)
            adapters = linear.lora_A if type(linear) is LoraLinear else ()
            problem = _problem(linear) or next((p for name in adapters if (p := _adapter_problem(linear, name))), "")
            if problem:
                left[path] = problem
        self._left = frozenset(left)
        return left

    def __call__(self, module: Any, x: Tensor) -> tuple[Tensor, ...]:
        """All outputs, each linear as it is switched now."""
        linears = [_at(module, path) for path in self._paths]
        found = [_look(linear) for linear in linears]
        together = [each for each in found if each is not None]
        if len(together) == len(linears):
            return self._project(x, together)
        if any(each is None and path not in self._left for each, path in zip(found, self._paths, strict=True)):
            hand_over(module)
        outputs = iter(self._project(x, together))
        return tuple(
            _called(linear, x) if each is None else next(outputs) for each, linear in zip(found, linears, strict=True)
        )

    def copies(self) -> Iterable[Copies]:
        """What holds the factors in the kernels' dtype, by the adapters that have been switched on."""
        return self._copies.values()

    def _project(self, x: Tensor, found: list[tuple[Projection, str | None]]) -> tuple[Tensor, ...]:
        if not found:
            return ()
        projections, names = zip(*found, strict=True)
        copies = self._copies.get(names)
        if copies is None:
            copies = self._copies[names] = Copies()
        return project(x.to(projections[0].weight_OH.dtype), projections, copies)


def _called(linear: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, linear) if isinstance(linear, Tensor) else linear(x)


def _at(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _look(linear: Any) -> tuple[Projection, str | None] | None:
    """The projection as PEFT's own forward would compute it now, and which adapter is in it. It runs for every linear of every layer, ahead of the
    kernels: modules are read through their dictionaries, which costs a tenth of asking them."""
    if _problem(linear):
        return None
    if type(linear) is not LoraLinear:
        return Projection(linear if isinstance(linear, Tensor) else _weight(linear)), None
    if linear._disable_adapters and linear.merged_adapters:
        linear.unmerge()
    inside = vars(linear)["_modules"]
    weight = _weight(inside["base_layer"])
    # PEFT merges past the version counter: detached, it is no parameter, and no copy of it is kept from call to call.
    if linear._disable_adapters or linear.merged_adapters:
        return Projection(weight.detach()), None
    lora_A, lora_B = (vars(inside[name])["_modules"] for name in ("lora_A", "lora_B"))
    active = [name for name in linear.active_adapters if name in lora_A]
    if not active:
        return Projection(weight.detach()), None
    if len(active) > 1 or _adapter_problem(linear, active[0]):
        return None
    (name,) = active
    a, b = (vars(each[name])["_parameters"]["weight"] for each in (lora_A, lora_B))
    return Projection(weight, Lora(a, b, linear.scaling[name])), name


def _problem(linear: Any) -> str:
    """Why the layer itself cannot be computed here."""
    if isinstance(linear, Tensor):  # the router is a bare weight
        return frozen(linear)
    base = linear
    if type(linear) is LoraLinear:
        if linear.fan_in_fan_out:
            return "its weight is stored transposed"
        base = vars(linear)["_modules"]["base_layer"]
    if type(base) is not nn.Linear and not hasattr(type(base), _UNPACKED):
        return f"it is a {type(base).__name__}, want torch's Linear or PEFT's LoRA on one"
    parameters = vars(base)["_parameters"]
    if parameters["bias"] is not None:
        return "it has a bias"
    if not (untouched(linear) and (base is linear or untouched(base))):
        return "it has a hook or another forward"
    return frozen(parameters["weight"])


def _weight(base: Any) -> Tensor:
    """[O, H]; of a layer packed in 4 bits, made for this call. What recomputes whole layers never keeps it longer than one."""
    weight: Tensor = vars(base)["_parameters"]["weight"]
    unpack = getattr(type(base), _UNPACKED, None)
    return unpack(base, weight.dtype) if unpack else weight


def _adapter_problem(linear: Any, name: str) -> str:
    """Why this adapter is none of plain factors."""
    if name in linear.lora_variant:
        return f"adapter {name} is of kind {type(linear.lora_variant[name]).__name__}, want plain LoRA"
    inside = vars(linear)["_modules"]
    if type(vars(inside["lora_dropout"])["_modules"][name]) is not nn.Identity:
        return f"adapter {name} has dropout"
    factors = [vars(inside[each])["_modules"][name] for each in ("lora_A", "lora_B")]
    if any(vars(factor)["_parameters"]["bias"] is not None for factor in factors):
        return f"adapter {name} has a bias"
    if not all(map(untouched, factors)):
        return f"adapter {name} has a hook or another forward"
    return ""
