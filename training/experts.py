"""Routed experts with LoRA: the parameters stay in PEFT's `ParamWrapper`, the computation is ours and factored.

PEFT adds B·A to the whole expert stack in each forward (1.6 GB a layer on Qwen3.6-35B); here each token goes through its expert's two
thin factors instead. Saving, loading, `disable_adapter`, a second adapter and merging stay PEFT's own. The forward is installed on each
outermost wrapper *instance*, so that a library which later replaces a class or a registry entry does not touch it; one that replaces
the instance's forward is named by `replaced`.

Nothing here makes a GPU wait for the host: `forward_syncs` shows it on the card at hand.

Shape letters: T tokens, S = T·k rows sorted by expert, k experts a token, E experts, H hidden, I intermediate, R rank, O out, X in.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from training.errors import LivenessError

if TYPE_CHECKING:
    from kernels.dispatch import Choice

ADAPTER = "default"  # TRL looks for this name
GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]
_PARAMETERS = ("gate_up_proj", "down_proj")
_RANK_MULTIPLE = 8  # grouped_mm wants strides of whole 16 bytes: 8 numbers of bfloat16


@dataclass(frozen=True)
class Lora:
    """One adapter of one expert parameter, as PEFT stores it: two flat matrices, float32 while training.

    In `A` the expert is the slowest index of a row, in `B` the *fastest* of a column; reading B the other way round keeps every shape and
    trains nonsense.
    """

    A: Tensor
    """[E·R, X]"""
    B: Tensor
    """[O, R·E]"""
    num_experts: int
    scaling: float

    def a_ERX(self) -> Tensor:
        return self.A.reshape(self.num_experts, -1, self.A.shape[-1])

    def b_EOR(self) -> Tensor:
        return self.B.reshape(self.B.shape[0], -1, self.num_experts).permute(2, 0, 1)


Active = Mapping[str, Sequence[Lora]]
"""Per parameter name (`gate_up_proj`, `down_proj`) the adapters that are switched on; empty where none is."""


class Layer(Protocol):
    """A whole routed computation: hidden_TH, ids [T, k], weights [T, k] -> [T, H] in hidden's dtype, with gradients for hidden, weights and every
    A and B of `active`. `experts` holds the frozen `gate_up_proj` [E, 2I, H], `down_proj` [E, H, I], `_apply_gate` and `num_experts`."""

    def __call__(
        self, experts: Any, hidden_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, active: Active
    ) -> Tensor: ...


def install(model: nn.Module, layer: Layer | None = None, grouped_mm: GroupedMatmul | None = None) -> int:
    """Give every outermost wrapper of a layer's experts our forward; returns how many. LivenessError on an unknown layout.

    `layer` replaces the whole routed computation, `grouped_mm` only the product of sorted rows with their experts' matrices. With neither, a
    model in bfloat16 on a card gets what `kernels.dispatch` finds right and fastest there (`choice` tells which), any other grouped products.
    """
    wrappers = dict(outer_wrappers(model))
    for name, wrapper in wrappers.items():
        _require_known_layout(name, wrapper)
    chosen = None
    if layer is None and grouped_mm is None and wrappers:
        layer, chosen = _best_layer(model, next(iter(wrappers.values())))
    for wrapper in wrappers.values():
        wrapper.livery_calls = wrapper.livery_adapted = wrapper.livery_trained = 0
        wrapper.livery_layer = layer or _GroupedLayer(grouped_mm or torch_grouped_mm)
        wrapper.livery_choice = chosen
        wrapper.forward = types.MethodType(_forward, wrapper)
    return len(wrappers)


def uninstall(model: nn.Module) -> None:
    """PEFT's own forward again: ours is an attribute of each instance."""
    for _, wrapper in outer_wrappers(model):
        wrapper.__dict__.pop("forward", None)


def choice(model: nn.Module) -> Choice | None:
    """Which computation `install` chose for this card, and why; None where it had no choice to make."""
    return next((getattr(wrapper, "livery_choice", None) for _, wrapper in outer_wrappers(model)), None)


def outer_wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, wrapper) once a layer: PEFT nests one wrapper per expert parameter, the outermost is the one that is called."""
    inner = {
        id(module.base_layer)
        for module in model.modules()
        if isinstance(module, ParamWrapper) and isinstance(module.base_layer, ParamWrapper)
    }
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper) and module.parameter_name in _PARAMETERS and id(module) not in inner:
            yield name, module


def chain(wrapper: Any) -> Iterator[Any]:
    """A layer's wrappers from the outermost inwards."""
    while isinstance(wrapper, ParamWrapper):
        yield wrapper
        wrapper = wrapper.base_layer


def weights(wrapper: Any) -> Any:
    """What a layer's experts compute with now: `gate_up_proj` [E, 2I, H], `down_proj` [E, H, I] and `_apply_gate`. The module under the wrappers, or,
    of a base in 4 bits, what is unpacked for the asking (collective where it is gathered)."""
    module, _ = _active_factors(wrapper)
    unpacked = getattr(getattr(wrapper, "livery_layer", None), "unpacked", None)
    return unpacked(module) if unpacked else module


def replaced(model: nn.Module) -> dict[str, str]:
    """Wrappers whose forward is no longer ours, with who it is instead."""
    return {
        name: who(wrapper.forward)
        for name, wrapper in outer_wrappers(model)
        if getattr(wrapper.__dict__.get("forward"), "__func__", None) is not _forward
    }


def calls(model: nn.Module, which: Literal["calls", "adapted", "trained"] = "calls") -> dict[str, int]:
    """How often each layer's experts ran through our forward since they were installed: at all, with the adapter in it, or with the adapter
    in it and a gradient to come."""
    return {name: getattr(wrapper, f"livery_{which}", 0) for name, wrapper in outer_wrappers(model)}


def who(function: Any) -> str:
    """Module and name of a function, and its file where the module's name lies about it (functools.wraps copies names)."""
    target = getattr(function, "__func__", function)
    code = getattr(target, "__code__", None)
    name = f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', repr(target))}"
    home = getattr(sys.modules.get(getattr(target, "__module__", None) or ""), "__file__", None)
    if code is None or home in (None, code.co_filename):
        return name
    return f"{name} (really {code.co_qualname} in {code.co_filename})"


def torch_grouped_mm(x_SX: Tensor, w_EXO: Tensor, ends_E: Tensor) -> Tensor:
    """Rows S of x, sorted by expert, times their expert's matrix: [S, O]."""
    return nn.functional.grouped_mm(x_SX.to(w_EXO.dtype), w_EXO, offs=ends_E)


def reference_grouped_mm(x_SX: Tensor, w_EXO: Tensor, ends_E: Tensor) -> Tensor:
    """The same in plain matrix products, one expert after another: slow, and easy to believe."""
    parts, start = [], 0
    for expert, end in enumerate(ends_E.tolist()):
        parts.append(x_SX[start:end].to(w_EXO.dtype) @ w_EXO[expert])
        start = end
    return torch.cat(parts)


def forward_syncs(model: nn.Module, tokens: int = 64) -> bool:
    """True if a forward and backward of one whole layer of routed experts makes the GPU wait for the host on this card. Gradients already
    there are left alone. ValueError if the model has no routed experts with LoRA, or is not on a GPU."""
    wrapper = next((each for _, each in outer_wrappers(model)), None)
    if wrapper is None or not wrapper.get_param().is_cuda:
        raise ValueError("forward_syncs: want a model on a GPU whose routed experts carry LoRA")
    from kernels.dispatch import waits_for_host  # it needs triton, which a machine without a card may lack

    return waits_for_host(lambda: _forward_and_backward(wrapper, tokens))


def _forward_and_backward(wrapper: Any, tokens: int) -> None:
    experts, active = _active_factors(wrapper)
    weight = experts.gate_up_proj
    top_k = min(experts.num_experts, 8)
    with torch.enable_grad():
        hidden = torch.randn(tokens, weight.shape[-1], device=weight.device, dtype=weight.dtype, requires_grad=True)
        scores = torch.randn(tokens, experts.num_experts, device=weight.device).softmax(-1)
        best, ids = scores.topk(top_k, dim=-1)
        out = wrapper.livery_layer(experts, hidden, ids, best.to(weight.dtype), active)
        factors = [factor for loras in active.values() for lora in loras for factor in (lora.A, lora.B)]
        torch.autograd.grad(out.float().square().sum(), [hidden, *(each for each in factors if each.requires_grad)])


def _forward(self: Any, hidden_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
    experts, active = _active_factors(self)
    adapted = all(
        ADAPTER in link.lora_A and ADAPTER in link.active_adapters and not link.disable_adapters and not link.merged
        for link in chain(self)
    )
    self.livery_calls += 1
    self.livery_adapted += adapted
    self.livery_trained += adapted and torch.is_grad_enabled()
    return self.livery_layer(experts, hidden_TH, expert_Tk, weight_Tk, active)


def _active_factors(wrapper: Any) -> tuple[Any, dict[str, list[Lora]]]:
    """The experts module under the wrappers, and per parameter the factors of every adapter that is switched on now."""
    factors: dict[str, list[Lora]] = {}
    base = wrapper
    for link in chain(wrapper):
        base = link.base_layer
        if link.disable_adapters:
            if link.merged:
                link.unmerge()
        elif not link.merged:
            active = [name for name in link.active_adapters if name in link.lora_A]
            factors[link.parameter_name] = [_lora(link, name) for name in active]
    return base, factors


def _lora(link: Any, adapter: str) -> Lora:
    return Lora(link.lora_A[adapter].weight, link.lora_B[adapter].weight, link.num_experts, link.scaling[adapter])


def _factors(lora: Lora, dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    """A [E, R, X] and B [E, O, R] in the base's dtype, their rank padded with zeros to what grouped_mm takes."""
    a_ERX, b_EOR = lora.a_ERX().to(dtype), lora.b_EOR().to(dtype).contiguous()
    missing = -a_ERX.shape[1] % _RANK_MULTIPLE
    if missing:
        a_ERX = nn.functional.pad(a_ERX, (0, 0, 0, missing))
        b_EOR = nn.functional.pad(b_EOR, (0, missing))
    return a_ERX, b_EOR, lora.scaling


def _best_layer(model: nn.Module, wrapper: Any) -> tuple[Layer | None, Choice | None]:
    """Our kernels where the card shows that they are right on it. Nothing to choose on a CPU, or in float32, which they do not take."""
    weight = wrapper.get_param()
    if not weight.is_cuda or weight.dtype != torch.bfloat16:
        return None, None
    from training import kernel_layer  # it needs triton, which a machine without a card may lack

    experts, active = _active_factors(wrapper)
    rank = max((lora.A.shape[0] // lora.num_experts for loras in active.values() for lora in loras), default=1)
    top_k = model.config.get_text_config().num_experts_per_tok
    chosen = kernel_layer.best(experts, top_k, rank)
    return kernel_layer.KernelLayer(chosen.plan) if chosen.plan else None, chosen


@dataclass(frozen=True)
class _GroupedLayer:
    """The routed computation in grouped products: rows sorted by expert, through both linears and their factors, and back."""

    grouped_mm: GroupedMatmul

    def __call__(self, experts: Any, hidden_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, active: Active) -> Tensor:
        return _grouped_experts(experts, hidden_TH, expert_Tk, weight_Tk, active, self.grouped_mm)


GROUPED = _GroupedLayer(torch_grouped_mm)
"""What computes a layer where nothing faster was chosen."""


def _grouped_experts(
    experts: Any, hidden_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor, active: Active, grouped_mm: GroupedMatmul
) -> Tensor:
    T, k = expert_Tk.shape
    expert_S, order_S = torch.sort(expert_Tk.reshape(-1), stable=True)
    # bincount would make the GPU wait for the host; the ends of sorted runs need no counting.
    numbers_E = torch.arange(experts.num_experts, device=expert_S.device)
    ends_E = torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)

    def linear(x_SX: Tensor, parameter: str) -> Tensor:
        weight = getattr(experts, parameter)
        y_SO = grouped_mm(x_SX, weight.transpose(-2, -1), ends_E)
        for lora in active.get(parameter, ()):
            a_ERX, b_EOR, scale = _factors(lora, weight.dtype)
            r_SR = grouped_mm(x_SX, a_ERX.transpose(-2, -1), ends_E) * scale
            y_SO = y_SO + grouped_mm(r_SR, b_EOR.transpose(-2, -1), ends_E)
        return y_SO

    x_SH = hidden_TH[order_S // k]
    y_SH = linear(experts._apply_gate(linear(x_SH, "gate_up_proj")), "down_proj")
    y_SH = y_SH * weight_Tk.reshape(-1)[order_S].unsqueeze(-1)
    back_S = torch.empty_like(order_S)
    back_S[order_S] = torch.arange(order_S.numel(), device=order_S.device)
    return y_SH[back_S].view(T, k, -1).sum(1).to(hidden_TH.dtype)


def _require_known_layout(name: str, wrapper: Any) -> None:
    links = list(chain(wrapper))
    base = links[-1].base_layer
    wanted = {"is_transposed": False, "has_bias": False, "is_concatenated": True, "has_gate": True}
    odd = [f"{flag} is {not value}" for flag, value in wanted.items() if getattr(base, flag, value) is not value]
    odd += [f"{each} is missing" for each in ("_apply_gate", *_PARAMETERS) if not hasattr(base, each)]
    odd += [
        f"{link.parameter_name} is read as [expert, in, out]" for link in links if not link._did_swap_in_out_features
    ]
    if odd:
        raise LivenessError(
            f"{name}: {type(base).__name__} has another layout: {', '.join(odd)}; want fused gate_up_proj [E, 2I, H] and down_proj [E, H, I],"
            " not transposed, no bias, and peft >= 0.19.1",
            stage="attach",
            group=f"routed_experts.{links[0].parameter_name}",
            tensor=name,
        )
