"""The routed experts with LoRA on both projections, forward and backward: eight kernels and five to seven.

    route -> x·A1 -> up (+LoRA, SwiGLU) -> act·A2 -> down (+LoRA, router weight) -> combine
    dout·B2 -> down backward (dact, SwiGLU backward, router weight) -> dh·B1 -> up backward -> combine -> all factor gradients

The base weights are frozen and get no gradient. Kept for the backward pass: the pre-activations h, two thin products and the routing.
Sums are float32, in a fixed order: two runs give the same bits. Nothing waits for the host and every grid follows from shapes, so the whole
can be captured in a CUDA graph.

Shape letters: T tokens, k experts a token, M = T·k rows, P = M + one tile, E experts, H hidden, I intermediate, J = 2I, R padded rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import moe_kernels
from kernels.adapter import Adapter, only_adds_to_grad
from kernels.grouped_gemm import Routing, Thin, largest_tile, route, thin_product
from kernels.launch import Launcher, power_of_2

SIZE_MULTIPLE = 32  # H and I: the smallest column tile, which the SwiGLU takes in eighths
_ALIGNMENT = 16  # bytes: what a vector load and the bulk copy engine take
_DEFAULTS = {each.name: each.default for each in fields(TensorDescriptor) if each.default is not MISSING}
_LAUNCHERS: dict[tuple[object, ...], Launcher] = {}
_NOTHING = torch.empty(0)


class Tile(NamedTuple):
    """One product's tile: columns, K step, warps, pipeline stages."""

    n: int
    k: int
    warps: int
    stages: int
    tall: bool = False
    """Half as high again where an expert has the rows: each byte of a weight tile then serves more of them, and what bounds these products on
    sm_90 is the way from the L2 cache to the multiprocessors."""


@dataclass(frozen=True)
class Plan:
    """Tile shapes of every kernel; found by measuring, see RESULTS.md."""

    name: str
    tma: bool
    """Weights and grouped rows come by the bulk copy engine (sm_90 on) instead of by pointers."""
    rows: int
    """A tile's height; the last rows of an expert may get half of it."""
    up: Tile
    """Columns count gate and up once: a tile of n columns multiplies 2n."""
    down: Tile
    down_backward: Tile
    up_backward: Tile
    thin: Thin
    gradients: Tile
    """`k` is the number of rows a step."""

    @property
    def heights(self) -> tuple[int, int]:
        """Of an ordinary tile and of a tall one."""
        return self.rows, self.rows + self.rows // 2


SM90 = Plan(
    "sm90",
    tma=True,
    rows=128,
    up=Tile(128, 64, 8, 4),
    down=Tile(256, 64, 8, 4, tall=True),
    down_backward=Tile(256, 64, 8, 4),
    up_backward=Tile(256, 64, 8, 4, tall=True),
    thin=Thin(128, 4, 4),
    gradients=Tile(128, 64, 4, 2),
)
PORTABLE = Plan(
    "portable",
    tma=False,
    rows=128,
    up=Tile(64, 64, 8, 3),
    down=Tile(128, 64, 8, 3),
    down_backward=Tile(128, 64, 8, 3),
    up_backward=Tile(128, 64, 8, 3),
    thin=Thin(128, 4, 3),
    gradients=Tile(128, 64, 4, 2),
)


def plan_for(capability: tuple[int, int]) -> Plan:
    """The plan for a card: sm_90 and sm_100 have the bulk copy engine and 227 KB of shared memory, the rest are held to 99 KB."""
    return SM90 if capability[0] in (9, 10) else PORTABLE


def experts_with_lora(
    x_TH: Tensor,
    expert_Tk: Tensor,
    weight_Tk: Tensor,
    w1_EJH: Tensor,
    w2_EHI: Tensor,
    up: Adapter | None = None,
    down: Adapter | None = None,
    *,
    plan: Plan | None = None,
    accumulate: bool = False,
    check_experts: bool = True,
) -> Tensor:
    """out[t] = sum over t's k experts of weight · down(silu(gate) · up): [T, H], with LoRA on both projections or on neither.

    `accumulate` lets the kernels add the factors' gradients to the masters' .grad themselves, in the masters' dtype, where a backward pass would do
    nothing else with them: one pass over them less. `torch.autograd.grad` and hooks get them handed out as ever.
    `check_experts` reads the largest and smallest index back, which waits for the card; a caller whose indices come from a top-k over E
    numbers can leave it out, and must while a graph is being captured.

    ValueError, before anything is launched, for a wrong shape, dtype, stride, alignment, index or rank.
    """
    plan = plan or plan_for(torch.cuda.get_device_capability(x_TH.device))
    _check(x_TH, expert_Tk, weight_Tk, w1_EJH, w2_EHI, up, down)
    if check_experts:
        _check_indices(expert_Tk, w1_EJH.shape[0])
    if not x_TH.shape[0]:
        return x_TH * 1.0
    masters = (up.lora_A, up.lora_B, down.lora_A, down.lora_B) if up and down else (None,) * 4
    inputs = (x_TH, weight_Tk, *masters)
    # Asked here: inside the function autograd is always off.
    keep = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs)
    return _Experts.apply(*inputs, _Call(expert_Tk, w1_EJH, w2_EHI, up, down, plan, accumulate, keep))


@dataclass(frozen=True)
class _Call:
    """What one call needs besides the tensors that may want a gradient."""

    expert_Tk: Tensor
    w1_EJH: Tensor
    w2_EHI: Tensor
    up: Adapter | None
    down: Adapter | None
    plan: Plan
    accumulate: bool
    keep: bool
    """A backward pass may come."""

    @property
    def lora(self) -> bool:
        return self.up is not None

    @property
    def lasting(self) -> bool:
        """The masters, if any, are parameters; otherwise they were computed for this call."""
        return not (self.up and self.down) or (self.up.lora_A.is_leaf and self.down.lora_A.is_leaf)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a1: Any, b1: Any, a2: Any, b2: Any, call: _Call) -> Tensor:
        layer = _Layer(x, weight, call)
        routing = route(call.expert_Tk, weight, layer.E, call.plan.heights, layer.launch)
        out, kept = layer.forward(x, weight, routing, call.keep)
        if call.keep:
            order = (routing.order_M, routing.share_M, routing.starts_E1, routing.low, routing.high)
            passing = () if call.lasting else (a1, b1, a2, b2)
            ctx.save_for_backward(x, weight, *kept, *layer.factors, *order, call.w1_EJH, call.w2_EHI, *passing)
            layer.empty()
            ctx.layer = layer
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        x, weight, *rest = ctx.saved_tensors
        kept, factors, order, (w1, w2), passing = rest[:3], rest[3:7], rest[7:12], rest[12:14], rest[14:]
        layer, routing = ctx.layer, Routing(*order, ctx.layer.plan.heights)
        layer.fill(w1, w2, tuple(factors), tuple(passing))
        may_add = layer.call.accumulate and layer.call.lora and layer.call.lasting
        layer.accumulate = may_add and only_adds_to_grad([node for node, _ in ctx.next_functions[2:6]])
        wants_dx, wants_factors = ctx.needs_input_grad[0], any(ctx.needs_input_grad[2:6])
        dx, dweight, gradients = layer.backward(
            dout.contiguous(), x, weight, tuple(kept), routing, wants_dx=wants_dx, wants_factors=wants_factors
        )
        layer.empty()
        return dx, dweight, *gradients, None


class _Layer:
    """One call's sizes, constants and launches."""

    def __init__(self, x: Tensor, weight: Tensor, call: _Call) -> None:
        self.call, self.plan = call, call.plan
        self.T, self.H = x.shape
        self.E, self.k, self.I = call.w1_EJH.shape[0], call.expert_Tk.shape[1], call.w2_EHI.shape[2]
        self.M, self.J = self.T * self.k, 2 * self.I
        self.R = call.up.padded if call.up else 16
        self.like = {"device": x.device, "dtype": x.dtype}
        self.accumulate = call.accumulate
        self.factors: tuple[Tensor, ...]
        if call.up and call.down:
            self.factors = (*call.up.copies(x.dtype), *call.down.copies(x.dtype))
        else:
            self.factors = (x, x, x, x)  # never read: without LoRA the kernels are compiled without these loads
        key = (
            x.device,
            x.dtype,
            weight.dtype,
            call.expert_Tk.dtype,
            self.H,
            self.I,
            self.E,
            self.k,
            self.R,
            call.lora,
            self.plan,
        )
        self.launch = _LAUNCHERS.setdefault(key, Launcher())

    def empty(self) -> None:
        """Let go of the weights and factors. Autograd keeps this object as long as the loss lives, whatever becomes of the tensors saved beside it: under
        checkpointing those are dropped and computed again, and weights that were unpacked for one call go with them."""
        call = self.call
        passing = {} if call.lasting else {"up": None, "down": None}
        self._scales = (call.up.scale, call.down.scale) if call.up and call.down else (1.0, 1.0)
        self.call, self.factors = replace(call, w1_EJH=_NOTHING, w2_EHI=_NOTHING, **passing), ()

    def fill(self, w1_EJH: Tensor, w2_EHI: Tensor, factors: tuple[Tensor, ...], passing: tuple[Tensor, ...]) -> None:
        """Take them back; `passing` are the masters that were computed for this call, if they were."""
        adapters = {}
        if passing:
            a1, b1, a2, b2 = (each.detach() for each in passing)
            up, down = self._scales
            adapters = {"up": Adapter(a1, b1, self.E, up), "down": Adapter(a2, b2, self.E, down)}
        self.call, self.factors = replace(self.call, w1_EJH=w1_EJH, w2_EHI=w2_EHI, **adapters), factors

    def forward(self, x: Tensor, weight: Tensor, routing: Routing, keep: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """out, and what the backward pass wants kept: h, x·A1, act·A2."""
        call, H, I = self.call, self.H, self.I
        a1, b1, a2, b2 = self.factors
        h, act = self._rows(self.J if keep else 0), self._rows(I)
        xa1 = xa2 = act
        if call.up:
            xa1 = self._thin(x, a1, routing, K=H, by="A", gather=True, scale=call.up.scale)
        self._product(
            moe_kernels.up,
            self.plan.up,
            (I, H),
            routing,
            lambda n, k: (x, self._weights(call.w1_EJH, n, k), xa1, b1, h, act),
            options=(self.k,),
            flags=(keep,),
        )
        if call.down:
            xa2 = self._thin(act, a2, routing, K=I, by="A", gather=False, scale=call.down.scale)
        y = torch.empty(self.M, H, **self.like)
        self._product(
            moe_kernels.down,
            self.plan.down,
            (H, I),
            routing,
            lambda n, k: (*self._both(act, k), self._weights(call.w2_EHI, n, k), xa2, b2, y, routing.share_M),
        )
        return self._combine(y), (h, xa1, xa2)

    def backward(
        self,
        dout: Tensor,
        x: Tensor,
        weight: Tensor,
        kept: tuple[Tensor, ...],
        routing: Routing,
        wants_dx: bool,
        wants_factors: bool,
    ) -> tuple[Tensor | None, Tensor, tuple[Tensor | None, ...]]:
        call, H, I = self.call, self.H, self.I
        (h, xa1, xa2), (a1, b1, a2, b2) = kept, self.factors
        dh, act = self._rows(self.J), self._rows(I)
        u = v = act
        if call.down:
            u = self._thin(dout, b2, routing, K=H, by="B", gather=True, scale=call.down.scale)
        parts = torch.empty(
            self.M, I // self._fit(self.plan.down_backward, I, H).n, dtype=torch.float32, device=x.device
        )
        self._product(
            moe_kernels.down_backward,
            self.plan.down_backward,
            (I, H),
            routing,
            lambda n, k: (dout, self._weights(call.w2_EHI, k, n), u, a2, h, dh, act, parts, routing.share_M),
            options=(self.k,),
        )
        if call.up:
            v = self._thin(dh, b1, routing, K=self.J, by="B", gather=False, scale=call.up.scale)
        dx, dweight = None, torch.empty_like(weight)
        if wants_dx:
            dx_slots = torch.empty(self.M, H, **self.like)
            self._product(
                moe_kernels.up_backward,
                self.plan.up_backward,
                (H, self.J),
                routing,
                lambda n, k: (*self._both(dh, k), self._weights(call.w1_EJH, k, n), v, a1, dx_slots),
            )
            dx = self._combine(dx_slots, parts, dweight)
        else:
            dweight.copy_(parts.sum(1).view_as(weight))
        if not (call.up and call.down and wants_factors):
            return dx, dweight, (None,) * 4
        inputs = (x, dout, dh, act, xa1, v, u, xa2, routing.share_M, routing.order_M, routing.starts_E1)
        return dx, dweight, self._factor_gradients(call.up, call.down, inputs)

    def _product(
        self,
        kernel: Any,
        tile: Tile,
        size: tuple[int, int],
        routing: Routing,
        operands: Callable[[int, int], tuple[Any, ...]],
        options: tuple[int, ...] = (),
        flags: tuple[bool, ...] = (),
    ) -> None:
        """One grouped product: `size` is (columns, K) of the result, `operands` what the kernel takes for a tile of (n, k)."""
        n, k, warps, stages, tall = self._fit(tile, *size)
        tiles, most = routing.map(self.plan.heights[tall])
        self.launch(
            kernel,
            (most * (size[0] // n),),
            (
                *(*operands(n, k), routing.order_M, tiles, self.H, self.I, self.E, self.R, *options),
                *(self.plan.rows, n, k, tall, self.plan.tma, self.call.lora, *flags),
            ),
            {"num_warps": warps, "num_stages": stages},
            key=flags,
        )

    def _factor_gradients(self, up: Adapter, down: Adapter, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        targets = [adapter.gradient_targets(self.accumulate) for adapter in (up, down)]
        add_a, add_b = (any(target[i] for target in targets) for i in (2, 3))
        for (
            da,
            db,
            adds_a,
            adds_b,
        ) in targets:  # one constant serves both projections: a gradient cleared by itself begins at zero
            if add_a and not adds_a:
                da.zero_()
            if add_b and not adds_b:
                db.zero_()
        (da1, db1, *_), (da2, db2, *_) = targets
        n, rows, warps, stages, _ = self.plan.gradients
        n = min(largest_tile(self.H, n), largest_tile(self.I, n))
        self.launch(
            moe_kernels.factor_gradients,
            (self.E * (2 * self.H + self.J + self.I) // n,),
            (*inputs, da1, db1, da2, db2, self.H, self.I, self.E, self.R, up.rank, self.k, rows, n, add_a, add_b),
            {"num_warps": warps, "num_stages": stages},
            key=(add_a, add_b, up.rank, da1.dtype, db1.dtype, db2.dtype),
        )
        return *up.finish(da1, db1, self.accumulate), *down.finish(da2, db2, self.accumulate)

    def _thin(
        self, rows: Tensor, factor: Tensor, routing: Routing, *, K: int, by: str, gather: bool, scale: float
    ) -> Tensor:
        """Rows times a factor, [P, R]: by A [E, R, K], or by the transposed B [R, E, K]."""
        out = self._rows(self.R)
        thin_product(
            rows,
            factor,
            out,
            routing,
            self.launch,
            self.plan.thin,
            K=K,
            R=self.R,
            experts=self.E,
            top_k=self.k,
            height=self.plan.rows,
            strides=(self.R * K, K) if by == "A" else (K, self.E * K),
            gather=gather,
            scale=scale,
            name=f"{by}{K}{gather}",
        )
        return out

    def _combine(self, slots: Tensor, parts: Tensor | None = None, dweight: Tensor | None = None) -> Tensor:
        out = torch.empty(self.T, self.H, **self.like)
        width = largest_tile(self.H, 1024)
        count = 0 if parts is None else parts.shape[1]
        self.launch(
            moe_kernels.combine,
            (self.T, self.H // width),
            (
                *(
                    slots,
                    out,
                    out if parts is None else parts,
                    out if dweight is None else dweight,
                    self.H,
                    self.k,
                    width,
                ),
                *(count, power_of_2(self.k), power_of_2(max(count, 1))),
            ),
            {"num_warps": 4},
            key=count,
        )
        return out

    def _rows(self, width: int) -> Tensor:
        return torch.empty(self.M + self.plan.heights[1], width, **self.like)

    def _fit(self, tile: Tile, n: int, k: int) -> Tile:
        return tile._replace(n=largest_tile(n, tile.n), k=largest_tile(k, tile.k))

    def _weights(self, weights: Tensor, rows: int, cols: int) -> Any:
        """All experts' matrices as one, behind a descriptor for tiles of [rows, cols] if the copy engine is used."""
        E, height, width = weights.shape
        return _descriptor(weights, E * height, width, rows, cols) if self.plan.tma else weights

    def _both(self, rows: Tensor, k: int) -> tuple[Any, Any]:
        """Grouped rows for whole tiles and for half tiles."""
        if not self.plan.tma:
            return rows, rows
        height, width = rows.shape
        return tuple(_descriptor(rows, height, width, of, k) for of in (self.plan.rows, self.plan.rows // 2))


def _descriptor(base: Tensor, height: int, width: int, rows: int, cols: int) -> Any:
    """Triton's host descriptor of a row-major matrix. Made past its constructor, which checks in 15 µs what `_check` has checked, eight times a call."""
    made = object.__new__(TensorDescriptor)
    vars(made).update(_DEFAULTS, base=base, shape=[height, width], strides=[width, 1], block_shape=[rows, cols])
    return made


def _check(
    x: Tensor, expert: Tensor, weight: Tensor, w1: Tensor, w2: Tensor, up: Adapter | None, down: Adapter | None
) -> None:
    for name, tensor, dims in (("x", x, 2), ("expert", expert, 2), ("weight", weight, 2), ("w1", w1, 3), ("w2", w2, 3)):
        if tensor.dim() != dims:
            raise ValueError(f"{name}: shape {list(tensor.shape)}; want {dims} dimensions")
        if tensor.device != x.device:
            raise ValueError(f"{name}: on {tensor.device}, x on {x.device}; want one device")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}; want it contiguous")
        if tensor.data_ptr() % _ALIGNMENT:
            raise ValueError(
                f"{name}: begins at an address that {_ALIGNMENT} does not divide; want it aligned, clone it"
            )
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(
            f"x: on {x.device}, the current card is {torch.cuda.current_device()}; want torch.cuda.set_device first"
        )
    (T, H), (E, J, _), I = x.shape, w1.shape, w2.shape[2]
    wanted = {
        "expert": (expert.shape, (T, expert.shape[1])),
        "weight": (weight.shape, tuple(expert.shape)),
        "w1": (w1.shape, (E, 2 * I, H)),
        "w2": (w2.shape, (E, H, I)),
    }
    for name, (seen, want) in wanted.items():
        if tuple(seen) != want:
            raise ValueError(
                f"{name}: shape {list(seen)}; want {list(want)} beside x {list(x.shape)} and w2 {list(w2.shape)}"
            )
    if H % SIZE_MULTIPLE or I % SIZE_MULTIPLE:
        raise ValueError(
            f"hidden {H}, intermediate {I}: want multiples of {SIZE_MULTIPLE}; pad the experts or use another path"
        )
    wide = (torch.bfloat16, torch.float16) if x.is_cuda else (torch.float32, torch.float16)
    if x.dtype not in wide:
        raise ValueError(f"x: {x.dtype}; want {' or '.join(map(str, wide))} on {x.device.type}")
    for name, tensor in (("w1", w1), ("w2", w2)):
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name}: {tensor.dtype}; want x's {x.dtype}")
    if expert.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expert: {expert.dtype}; want int32 or int64")
    if weight.dtype not in (x.dtype, torch.float32):
        raise ValueError(f"weight: {weight.dtype}; want {x.dtype} or float32")
    if (up is None) != (down is None):
        raise ValueError("LoRA on one projection alone; want adapters on both or on neither")
    if up and down:
        _check_adapters(x, E, H, J, I, up, down)


def _check_adapters(x: Tensor, E: int, H: int, J: int, I: int, up: Adapter, down: Adapter) -> None:
    if up.rank != down.rank:
        raise ValueError(f"ranks {up.rank} (up) and {down.rank} (down); want the same")
    for name, adapter, sizes in (("up", up, (E, H, J)), ("down", down, (E, I, H))):
        seen = (adapter.experts, adapter.input_size, adapter.output_size)
        if seen != sizes:
            raise ValueError(f"{name} adapter: experts, in, out {list(seen)}; want {list(sizes)}")
        for master in (adapter.lora_A, adapter.lora_B):
            if master.device != x.device:
                raise ValueError(f"{name} adapter: on {master.device}, x on {x.device}; want one device")
            if master.dtype not in (x.dtype, torch.float32):
                raise ValueError(f"{name} adapter: {master.dtype}; want float32 or {x.dtype}")
            if master.data_ptr() % _ALIGNMENT:
                raise ValueError(f"{name} adapter: begins at an address that {_ALIGNMENT} does not divide; clone it")


def _check_indices(expert_Tk: Tensor, experts: int) -> None:
    if expert_Tk.numel():
        low, high = (int(value) for value in expert_Tk.aminmax())
        if low < 0 or high >= experts:
            raise ValueError(f"expert: indices from {low} to {high}; want 0 to {experts - 1}")
