"""Before the first step: does the gated delta rule's kernel on this card give the gradients that the rule has?

Compilers have got its backward pass wrong on single generations of cards, with a loss that looked healthy. Here a short packed row of the model's own
head sizes goes through the kernel and, token by token in float32, through the rule as it is written.

Shape letters: T tokens, K query and key heads, V value heads, D numbers of a head.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from triton.runtime.errors import TritonError

from training.errors import ModelError
from training.lean import delta_net

_LENGTHS = (70, 1, 64, 25)  # more than a chunk, one token, a whole chunk, part of one
# Norm of a difference over the norm. In bfloat16 all were below 0.005 on an H200 where the kernel was right; a wrong product is off by its whole size.
# In float32 the kernel's products are tf32: at most 0.002 there.
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 1e-2, torch.float32: 1e-2}
_TOLERANCE_ELSE = 1e-3


@dataclass(frozen=True)
class Heads:
    """Of one gated delta net: how many, and numbers of each."""

    keys: int
    key_dim: int
    values: int
    value_dim: int


def check_rule(model: nn.Module) -> dict[str, float]:
    """How far output and gradients are from the rule, each as a share of its norm; empty if no gated delta net of the model is ours. ModelError where one
    is too far, or where the kernel refuses this card. The first call on a card compiles and tunes the kernels that training needs anyway."""
    net: Any = next((each for each in model.modules() if _is_ours(each)), None)
    if net is None:
        return {}
    heads = Heads(net.num_k_heads, net.head_k_dim, net.num_v_heads, net.head_v_dim)
    rule = functools.partial(delta_net.delta_rule, sys.modules[type(net).__module__])
    try:
        apart = differences(rule, heads, net.conv1d.weight)
    except (RuntimeError, TritonError) as error:
        raise ModelError(
            f"the gated delta rule's kernel refuses this card: {error}; install the Triton it names, or rent another kind of card"
        ) from error
    limit = _TOLERANCE.get(net.conv1d.weight.dtype, _TOLERANCE_ELSE)
    wrong = [f"{name} by {difference:.1e}" for name, difference in apart.items() if not difference <= limit]
    if wrong:
        raise ModelError(
            f"the gated delta rule's kernel is wrong on this card: off in {', '.join(wrong)} of the norm, want at most {limit:.0e};"
            " install another Triton or flash-linear-attention, or rent another kind of card"
        )
    return apart


def differences(rule: Callable[..., Tensor], heads: Heads, like: Tensor) -> dict[str, float]:
    """How far output and gradients of `rule`, given by name what `delta_net.delta_rule` is given after its first argument, are from the rule as it is
    written, each as a share of its norm (a NaN is not below anything). On a short packed row in the dtype and on the device of `like`."""
    given = _random_row(heads, like)
    weights = torch.randn(given["value"].shape, generator=_generator(1)).to(given["value"])
    # Gates that forget a fifth a token: what crosses a border or a chunk then counts. A model's own may forget all at once.
    A_log = torch.full((heads.values,), math.log(0.3)).to(given["value"])
    gates = {"A_log": A_log, "dt_bias": torch.zeros_like(A_log)}
    options = _options(A_log.device)
    found = _with_gradients(lambda **row: rule(**gates, **row, options=options), given, weights)
    wide = {name: each.float() for name, each in given.items()}
    wanted = _with_gradients(lambda **row: _rule_as_written(**gates, **row), wide, weights.float())
    return {name: float((found[name].float() - value).norm() / value.norm()) for name, value in wanted.items()}


def _is_ours(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "__func__", None) is delta_net.forward


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _random_row(heads: Heads, like: Tensor) -> dict[str, Tensor]:
    """What the rule is given, [1, T, ...], in the dtype of `like`; gates before their activations."""
    keys, values = (heads.keys, heads.key_dim), (heads.values, heads.value_dim)
    shapes = {"query": keys, "key": keys, "value": values, "decay": values[:1], "beta": values[:1]}
    draw = _generator(0)
    return {name: torch.randn(1, sum(_LENGTHS), *shape, generator=draw).to(like) for name, shape in shapes.items()}


def _options(device: torch.device) -> dict[str, Any]:
    ends = torch.tensor([0, *itertools.accumulate(_LENGTHS)], dtype=torch.int32)
    return {"cu_seq_lens_q": ends.to(device), "cu_seq_lens_cpu": ends}


def _with_gradients(rule: Any, given: dict[str, Tensor], weights: Tensor) -> dict[str, Tensor]:
    with torch.enable_grad(), torch.autocast(weights.device.type, enabled=False):
        row = {name: each.detach().clone().requires_grad_() for name, each in given.items()}
        out = rule(**row)
        gradients = torch.autograd.grad((out * weights).sum(), list(row.values()))
    return {"output": out.detach(), **dict(zip(row, gradients, strict=True))}


def _rule_as_written(
    A_log: Tensor, dt_bias: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> Tensor:
    """The recurrence, token by token: the state forgets, then takes in what its key does not yet recall."""
    share = value.shape[2] // key.shape[2]
    query, key = (nn.functional.normalize(each, dim=-1, eps=1e-6) for each in (query, key))
    query, key = (each[0].repeat_interleave(share, dim=1) for each in (query * query.shape[-1] ** -0.5, key))
    log_decay = -A_log.float().exp() * nn.functional.softplus(decay[0] + dt_bias.float())
    kept, taken, rows = log_decay.exp(), torch.sigmoid(beta[0]), []
    starts = {0, *itertools.accumulate(_LENGTHS)}
    state = torch.zeros(value.shape[2], key.shape[-1], value.shape[-1], device=value.device)
    for t in range(value.shape[1]):
        if t in starts:
            state = torch.zeros_like(state)
        state = state * kept[t, :, None, None]
        recalled = (state * key[t, :, :, None]).sum(1)
        news = (value[0, t] - recalled) * taken[t, :, None]
        state = state + key[t, :, :, None] * news[:, None, :]
        rows.append((state * query[t, :, :, None]).sum(1))
    return torch.stack(rows)[None]
