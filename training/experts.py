"""Routed experts with LoRA: the parameters stay in PEFT's `ParamWrapper`, the computation is ours and factored.

PEFT adds B·A to the whole expert stack in each forward (1.6 GB a layer on Qwen3.6-35B); here each token goes through its expert's two
thin factors instead. Saving, loading, `disable_adapter`, a second adapter and merging stay PEFT's own. The forward is installed on each
outermost wrapper *instance*, so that a library which later replaces a class or a registry entry does not touch it; one that replaces
the instance's forward is named by `replaced`.

Shape letters: T tokens, S = T·k rows sorted by expert, k experts a token, E experts, H hidden, I intermediate, R rank, O out, X in.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]
_PARAMETERS = ("gate_up_proj", "down_proj")
_RANK_MULTIPLE = 8  # grouped_mm wants strides of whole 16 bytes: 8 numbers of bfloat16


class ExpertsError(RuntimeError):
    """The routed experts of this model are not of the form that our computation is written for."""


def install(model: nn.Module, grouped_mm: GroupedMatmul | None = None) -> int:
    """Give every outermost wrapper of a layer's experts our forward; returns how many. ExpertsError on an unknown layout."""
    wrappers = dict(outer_wrappers(model))
    for name, wrapper in wrappers.items():
        _require_known_layout(name, wrapper)
        wrapper.livery_calls = 0
        wrapper.livery_grouped_mm = grouped_mm or torch_grouped_mm
        wrapper.forward = types.MethodType(_forward, wrapper)
    return len(wrappers)


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


def replaced(model: nn.Module) -> dict[str, str]:
    """Wrappers whose forward is no longer ours, with who it is instead."""
    return {
        name: _who(wrapper.forward)
        for name, wrapper in outer_wrappers(model)
        if getattr(wrapper.__dict__.get("forward"), "__func__", None) is not _forward
    }


def calls(model: nn.Module) -> dict[str, int]:
    """How often each layer's experts ran through our forward since they were installed."""
    return {name: getattr(wrapper, "livery_calls", 0) for name, wrapper in outer_wrappers(model)}


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


def host_sync(device: torch.device) -> bool:
    """True if grouped_mm makes the GPU wait for the host on this card: torch's fallback copies the offsets to the CPU and loops."""
    x = torch.zeros(16, 16, device=device, dtype=torch.bfloat16)
    w = torch.zeros(2, 16, 16, device=device, dtype=torch.bfloat16)
    ends = torch.tensor([8, 16], device=device, dtype=torch.int32)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch_grouped_mm(x, w, ends)
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def _forward(self: Any, hidden_TH: Tensor, expert_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
    self.livery_calls += 1
    experts, factors = _active_factors(self)
    return _grouped_experts(experts, hidden_TH, expert_Tk, weight_Tk, factors, self.livery_grouped_mm)


def _active_factors(wrapper: Any) -> tuple[Any, dict[str, list[tuple[Tensor, Tensor, float]]]]:
    """The experts module under the wrappers, and per parameter the factors of every adapter that is switched on now."""
    chain = []
    while isinstance(wrapper, ParamWrapper):
        chain.append(wrapper)
        wrapper = wrapper.base_layer
    factors: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
    for link in chain:
        if link.disable_adapters:
            if link.merged:
                link.unmerge()
        elif not link.merged:
            active = [name for name in link.active_adapters if name in link.lora_A]
            factors[link.parameter_name] = [_factors(link, name) for name in active]
    return wrapper, factors


def _factors(wrapper: Any, adapter: str) -> tuple[Tensor, Tensor, float]:
    """PEFT's two flat matrices as A [E, R, X] and B [E, O, R]. In B the expert is the *fastest* index of a column, in A the slowest row
    index; reading B the other way round keeps every shape and trains nonsense."""
    A, B, E = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight, wrapper.num_experts
    dtype = wrapper.get_param().dtype
    a_ERX = A.reshape(E, -1, A.shape[-1]).to(dtype)
    b_EOR = B.reshape(B.shape[0], -1, E).permute(2, 0, 1).to(dtype).contiguous()
    missing = -a_ERX.shape[1] % _RANK_MULTIPLE
    if missing:
        a_ERX = nn.functional.pad(a_ERX, (0, 0, 0, missing))
        b_EOR = nn.functional.pad(b_EOR, (0, missing))
    return a_ERX, b_EOR, wrapper.scaling[adapter]


def _grouped_experts(
    experts: Any,
    hidden_TH: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    factors: dict[str, list[tuple[Tensor, Tensor, float]]],
    grouped_mm: GroupedMatmul,
) -> Tensor:
    T, k = expert_Tk.shape
    order_S = torch.argsort(expert_Tk.reshape(-1), stable=True)
    counts_E = torch.bincount(expert_Tk.reshape(-1), minlength=experts.num_experts)
    ends_E = counts_E.cumsum(0).to(torch.int32)

    def linear(x_SX: Tensor, parameter: str) -> Tensor:
        y_SO = grouped_mm(x_SX, getattr(experts, parameter).transpose(-2, -1), ends_E)
        for a_ERX, b_EOR, scale in factors.get(parameter, ()):
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
    link, seen = wrapper, []
    while isinstance(link, ParamWrapper):
        seen.append(link.parameter_name)
        if not link._did_swap_in_out_features:
            raise ExpertsError(
                f"{name}: {link.parameter_name} is not stored as [expert, out, in]; want peft >= 0.19.1 and such experts"
            )
        link = link.base_layer
    if set(seen) - set(_PARAMETERS):
        raise ExpertsError(f"{name}: adapters on {', '.join(seen)}; this computation knows {' and '.join(_PARAMETERS)}")
    if getattr(link, "has_bias", False) or not hasattr(link, "_apply_gate"):
        raise ExpertsError(f"{name}: {type(link).__name__} has a bias or no gate; want the fused Qwen form")


def _who(function: Any) -> str:
    target = getattr(function, "__func__", function)
    return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', repr(target))}"
