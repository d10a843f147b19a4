"""Several frozen projections of one input, each with a LoRA or without, as one operation of autograd.

PEFT makes of a projection two thin products, a scaling and a sum, and of its backward pass three partial gradients of the input, which autograd
adds up one by one. Here the thin products of all projections of an input are one, and the narrow frozen projections (a router, a gate of one
number) come along in it for nothing; each second product is added by its GEMM's epilogue, the input's gradient grows in place, and the
factors' gradients come in float32 and go straight into the masters' .grad.

Shape letters: T tokens, H the input's width, O a projection's, r the rank of one, R the rows of the thin matrix: all ranks, then the narrow
projections, then zeros up to a multiple of 8.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.adapter import only_adds_to_grad, optimizer_steps
from kernels.rows import own_dtype

NARROW = 512
"""The widest projection that joins the thin product: beside the input, which is read once, its result is small."""
_MULTIPLE = 8  # numbers: 16 bytes of bfloat16, what the matrix units' loads want of a row


class Lora(NamedTuple):
    """One projection's adapter as PEFT stores it: the masters, usually float32."""

    a_rH: Tensor
    b_Or: Tensor
    scale: float


class Projection(NamedTuple):
    """x @ weight^T, and scale · (x @ a^T) @ b^T where there is a LoRA."""

    weight_OH: Tensor
    """Frozen: it gets no gradient."""
    lora: Lora | None = None


class Copies:
    """The thin matrix [R, H] of one input's projections and each lora_B, in the activations' dtype.

    They are renewed where a master may have changed since: when any optimizer of torch has made a step, or a version counter moved. They keep
    their place in memory, so that a captured graph which reads them stays right; whoever writes masters unseen by both (an optimizer inside
    such a graph) calls `renew()`.
    """

    def __init__(self) -> None:
        self._seen: tuple[object, ...] = ()
        self._sources: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] = ((), ())
        self._thin_RH: Tensor | None = None
        self._b: tuple[Tensor, ...] = ()

    def of(
        self, loras: Sequence[Lora], narrow: Sequence[Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The thin matrix and each B [O, r] in `dtype`."""
        rows, b = (*(lora.a_rH for lora in loras), *narrow), tuple(lora.b_Or for lora in loras)
        now = (dtype, optimizer_steps(), *((each.data_ptr(), each._version, each.device) for each in (*rows, *b)))
        if self._thin_RH is None or now != self._seen:
            self._sources = rows, b
            self._write(dtype)
            self._seen = now
        assert self._thin_RH is not None
        return self._thin_RH, self._b

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """The copies that are kept now, if any are."""
        return () if self._thin_RH is None else (self._thin_RH, *self._b)

    def renew(self) -> None:
        """Copy the masters anew, in place."""
        if self._thin_RH is not None:
            self._write(self._thin_RH.dtype)

    def _write(self, dtype: torch.dtype) -> None:
        rows, b = self._sources
        # A copy first made while text is generated must serve training later: no inference tensor can be kept for a backward pass.
        with torch.inference_mode(False), torch.no_grad():
            if not self._fits(dtype):
                count, device = sum(map(len, rows)), rows[0].device
                shape = (count + -count % _MULTIPLE, rows[0].shape[1])
                self._thin_RH = torch.zeros(shape, dtype=dtype, device=device)
                self._b = tuple(torch.empty(each.shape, dtype=dtype, device=device) for each in b)
            assert self._thin_RH is not None
            places, first = [], 0
            for each in rows:
                places.append(self._thin_RH[first : first + len(each)])
                first += len(each)
            torch._foreach_copy_([*places, *self._b], [each.detach() for each in (*rows, *b)])

    def _fits(self, dtype: torch.dtype) -> bool:
        rows, b = self._sources
        thin, count = self._thin_RH, sum(map(len, rows))
        if thin is None or thin.dtype != dtype or thin.device != rows[0].device:
            return False
        same = thin.shape == (count + -count % _MULTIPLE, rows[0].shape[1])
        return same and [each.shape for each in self._b] == [each.shape for each in b]


@own_dtype
def project(x: Tensor, projections: Sequence[Projection], copies: Copies | None = None) -> tuple[Tensor, ...]:
    """Every projection of `x` [.., H]: a tuple of [.., O], in x's dtype.

    `copies` are kept from call to call by whoever owns the projections. ValueError for a weight, factor or dtype that does not fit. A weight
    that asks for a gradient is refused while gradients are recorded: it would silently get none.
    """
    _check(x, projections)
    loras = [each.lora for each in projections if each.lora]
    call = _Call.of(projections)
    narrow = [projections[number].weight_OH for number in call.narrow]
    thin_RH, b = (copies or Copies()).of(loras, narrow, x.dtype) if loras else (None, ())
    masters = [master for lora in loras for master in (lora.a_rH, lora.b_Or)]
    weights = [None if number in call.narrow else each.weight_OH for number, each in enumerate(projections)]
    return _Project.apply(x, call, *weights, thin_RH, *b, *masters)  # type: ignore[no-any-return, no-untyped-call]


class _Call(NamedTuple):
    """What one call needs beside tensors."""

    size: int
    """How many projections."""
    adapted: tuple[int, ...]
    """The numbers of those with a LoRA."""
    scales: tuple[float, ...]
    """Theirs."""
    narrow: tuple[int, ...]
    """The numbers of those that join the thin product."""
    widths: tuple[int, ...]
    """Columns of the thin product, for one after another of `adapted`, then of `narrow`."""

    @classmethod
    def of(cls, projections: Sequence[Projection]) -> _Call:
        loras = {number: each.lora for number, each in enumerate(projections) if each.lora}
        width = {number: len(each.weight_OH) for number, each in enumerate(projections) if number not in loras}
        # The widest first: what follows a projection of one number would begin at an odd address.
        # Only what lasts: a weight that was unpacked for this call would have the copies renewed at each.
        lasting = {n for n in width if isinstance(projections[n].weight_OH, torch.nn.Parameter)}
        narrow = sorted((n for n in lasting if loras and width[n] <= NARROW), key=lambda n: -width[n])
        widths = [len(lora.a_rH) for lora in loras.values()] + [width[number] for number in narrow]
        return cls(
            len(projections),
            tuple(loras),
            tuple(lora.scale for lora in loras.values()),
            tuple(narrow),
            tuple(widths),
        )

    def columns(self, thin_TR: Tensor) -> list[Tensor]:
        """Of each of `widths`, and what is left over."""
        ends = [0, *itertools.accumulate(self.widths)]
        return [thin_TR[:, first:last] for first, last in itertools.pairwise([*ends, thin_TR.shape[1]])]


class _Project(torch.autograd.Function):
    """Inputs: x, the call, the weights (None where it is in the thin matrix), the thin matrix, every B [O, r], then a and b of every master, which lend
    their gradients' place: with them among the inputs a layer is recorded although nothing before it wants a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, *tensors: Any) -> tuple[Tensor, ...]:
        weights, thin_RH, b = _split(call, tensors)
        x_TH = x.reshape(-1, x.shape[-1])
        thin_TR, columns = None, []
        if thin_RH is not None:
            thin_TR = x_TH @ thin_RH.t()
            columns = call.columns(thin_TR)
        outputs: list[Any] = [None] * call.size
        for number, weight_OH in enumerate(weights):
            if weight_OH is not None:
                outputs[number] = x.new_empty(*x.shape[:-1], len(weight_OH))
                torch.mm(x_TH, weight_OH.t(), out=outputs[number].view(-1, len(weight_OH)))
        for number, xa_Tr, b_Or, scale in zip(call.adapted, columns, b, call.scales, strict=False):
            outputs[number].view(-1, len(b_Or)).addmm_(xa_Tr, b_Or.t(), alpha=scale)
        for number, y_TO in zip(call.narrow, columns[len(b) :], strict=False):
            outputs[number] = y_TO.reshape(*x.shape[:-1], -1)
        ctx.save_for_backward(x_TH, thin_TR, *weights, thin_RH, *b)
        ctx.call, ctx.shape, ctx.device = call, x.shape, x.device.type
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dy: Tensor | None) -> tuple[Any, ...]:
        with torch.autocast(ctx.device, enabled=False):
            return _backward(ctx, [None if each is None else each.reshape(-1, each.shape[-1]) for each in dy])


def _split(call: _Call, tensors: Sequence[Any]) -> tuple[Sequence[Tensor | None], Tensor | None, Sequence[Tensor]]:
    """(weights, the thin matrix, every B) from what stands in this order."""
    first = call.size + 1
    return tensors[: call.size], tensors[call.size], tensors[first : first + len(call.scales)]


def _backward(ctx: Any, dy: Sequence[Tensor | None]) -> tuple[Any, ...]:
    call = ctx.call
    x_TH, thin_TR, *rest = ctx.saved_tensors
    weights, thin_RH, b = _split(call, rest)
    du_TR = None if thin_TR is None else _thin_gradient(call, thin_TR, dy, b)
    dx = None
    if ctx.needs_input_grad[0]:
        dx = _input_gradient(dy, weights, du_TR, thin_RH).view(ctx.shape)
    masters = 2 * len(b)
    if not masters:
        return dx, *[None] * (1 + call.size + 1)
    nodes = [node for node, _ in ctx.next_functions[-masters:]]
    wanted = ctx.needs_input_grad[-masters:]
    straight = only_adds_to_grad([node for node, wants in zip(nodes, wanted, strict=True) if wants])
    gradients: list[Tensor | None] = [None] * masters
    assert thin_TR is not None and du_TR is not None
    da: Sequence[Tensor] = ()
    if any(wanted[::2]):
        ranks = sum(call.widths[: len(b)])
        da = torch.split(_product(du_TR[:, :ranks].t(), x_TH), call.widths[: len(b)])
    columns = call.columns(thin_TR)
    for i, number in enumerate(call.adapted):
        dy_TO = dy[number]
        if dy_TO is None:
            continue
        if wanted[2 * i]:
            gradients[2 * i] = _deliver(nodes[2 * i], da[i], 1.0, straight)
        if wanted[2 * i + 1]:
            db_Or = _product(dy_TO.t(), columns[i])
            gradients[2 * i + 1] = _deliver(nodes[2 * i + 1], db_Or, call.scales[i], straight)
    return dx, *[None] * (1 + call.size + 1 + len(b)), *gradients


def _thin_gradient(call: _Call, thin_TR: Tensor, dy: Sequence[Tensor | None], b: Sequence[Tensor]) -> Tensor:
    """Of the thin product, [T, R]: scale · dy @ B for a LoRA, the gradient itself for a narrow projection, zero for what fills up."""
    du_TR = torch.empty_like(thin_TR)
    *columns, rest = call.columns(du_TR)
    rest.zero_()
    for i, (place, number) in enumerate(zip(columns, (*call.adapted, *call.narrow), strict=True)):
        dy_TO = dy[number]
        if dy_TO is None:
            place.zero_()
        elif i < len(b):  # with beta 0 what stands in the memory is not read
            place.addmm_(dy_TO, b[i], beta=0, alpha=call.scales[i])
        else:
            place.copy_(dy_TO)
    return du_TR


def _input_gradient(
    dy: Sequence[Tensor | None], weights: Sequence[Tensor | None], du_TR: Tensor | None, thin_RH: Tensor | None
) -> Tensor:
    dx_TH: Tensor | None = None
    for dy_TO, weight_OH in zip(dy, weights, strict=True):
        if dy_TO is not None and weight_OH is not None:
            dx_TH = dy_TO @ weight_OH if dx_TH is None else dx_TH.addmm_(dy_TO, weight_OH)
    if du_TR is not None and thin_RH is not None:
        dx_TH = du_TR @ thin_RH if dx_TH is None else dx_TH.addmm_(du_TR, thin_RH)
    assert dx_TH is not None, "autograd calls nobody without a gradient"
    return dx_TH


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, summed and left in float32 where the operands are narrower."""
    if left.dtype not in (torch.bfloat16, torch.float16):
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _deliver(node: Any, gradient: Tensor, scale: float, straight: bool) -> Tensor | None:
    """Into the master's .grad and None, or handed out for autograd to deal with."""
    if straight and node.variable.grad is not None:
        node.variable.grad.add_(gradient, alpha=scale)
        return None
    if scale != 1.0:
        gradient.mul_(scale)
    if not straight:
        return gradient
    master = node.variable
    # A slice of the group's product would keep all of it alive, and the optimizer wants the master's own layout.
    master.grad = torch.empty_like(master).copy_(gradient)
    return None


def _check(x: Tensor, projections: Sequence[Projection]) -> None:
    H = x.shape[-1]
    for number, (weight, lora) in enumerate(projections):
        if weight.dim() != 2 or weight.shape[1] != H or weight.dtype != x.dtype or weight.device != x.device:
            raise ValueError(
                f"projection {number}: weight {list(weight.shape)} {weight.dtype} on {weight.device}; want [out, {H}] {x.dtype} on {x.device}"
            )
        if weight.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"projection {number}: the weight asks for a gradient; want it frozen, requires_grad_(False)"
            )
        if lora is not None:
            a, b = lora.a_rH, lora.b_Or
            wanted = (a.shape[0], H), (weight.shape[0], a.shape[0])
            if (a.shape, b.shape) != wanted or a.device != x.device or b.device != x.device:
                raise ValueError(
                    f"projection {number}: factors {list(a.shape)} and {list(b.shape)} on {a.device}; want [r, {H}] and [{weight.shape[0]}, r] on {x.device}"
                )
