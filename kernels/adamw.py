"""AdamW over many float32 tensors at once, in as few passes over memory as it takes: one read of the gradients for their norm, then one pass that
clips, updates parameter and moments, and may zero the gradient.

Torch's clipping multiplies every gradient in a pass of its own; here the factor stays on the card and the update multiplies. Nothing waits for the
host: rates, step counts and factor are read where they lie. Tensors are cut into chunks, a program takes one chunk, and a table tells it which
tensor that is of and where in memory this one lies; a tensor is gone through as memory lies, so any dense layout will do that all its four share.

Shape letters: n tensors, C chunks of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Launcher, ceil_div
from kernels.rows import takes_kernel

Number = float | Tensor
Row = Sequence[Tensor]
_CHUNK, _BLOCK, _WARPS = 16_384, 1024, 8
_SUM_BLOCK = 1024
_COUNTED = 128
_ALIGNED = 16  # bytes: what a thread loads at once
_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it
_COLUMNS = ("parameter", "gradient", "exp_avg", "exp_avg_sq", "step")
COEFFICIENTS = 8
"""Numbers that a step of a tensor multiplies with: see `coefficients`."""
_STEP_BITS = 24  # float32 counts no further


class Clip(NamedTuple):
    """What clipping by the norm of all gradients asks for, where they lie."""

    both_2: Tensor
    norms_n: Tensor
    """float32: each gradient's own norm."""

    @property
    def norm(self) -> Tensor:
        """float32 []: of all of them, before clipping."""
        return self.both_2[0]

    @property
    def factor(self) -> Tensor:
        """float32 []: min(1, max_norm / (norm + 1e-6)); NaN if the norm is."""
        return self.both_2[1]


class Rates(NamedTuple):
    """AdamW's numbers, each a float or a tensor of one number. One on the card is read there."""

    lr: Number
    beta1: Number = 0.9
    beta2: Number = 0.999
    eps: Number = 1e-8
    weight_decay: Number = 0.0


class Update(NamedTuple):
    """Tensors of one update, side by side: n of each. `steps` are float32 [], the updates made so far; all else float32 with one layout a row."""

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    steps: Sequence[Tensor]


class GradientNorm:
    """`GradientNorm()(gradients, max_norm)`: see `Clip`. It keeps its tables from call to call.

    Sums are made in one order, so equal gradients have one norm to the bit. ValueError for a gradient that is not float32 and dense.
    """

    def __init__(self) -> None:
        self._table = Table(("gradient",), _chunks, _require)

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor], max_norm: float) -> Clip:
        if not gradients:
            raise ValueError("no gradient at all to take the norm of; was there a backward pass?")
        if not on_kernel(gradients[0]):
            return plain_norm(gradients, max_norm)
        self._table.point([[each] for each in gradients])
        return _norm(self._table, max_norm)


class AdamWPass:
    """`AdamWPass()(update, rates, clip, zero)`: one AdamW step of all tensors, in place. It keeps its tables from call to call.

    With `clip` the gradients count multiplied by its factor; they themselves stay as they are, or are zeros afterwards with `zero`. ValueError for
    tensors that are not float32, not dense, or not laid out like their parameter.
    """

    def __init__(self) -> None:
        self._table, self._rates = Table(_COLUMNS, _chunks, _require), RatesOnCard()

    @torch.no_grad()
    def __call__(self, update: Update, rates: Rates, clip: Clip | None = None, zero: bool = False) -> None:
        parameters = update.parameters
        if not parameters:
            return
        if not on_kernel(parameters[0]):
            plain_adamw(update, rates, clip, zero)
            return
        self._table.point(list(zip(*update, strict=True)))
        _adamw(self._table, self._rates(rates, self._table.device), clip, zero)


def plain_norm(gradients: Sequence[Tensor], max_norm: float) -> Clip:
    """`GradientNorm` in plain torch."""
    norms_n = torch.stack(torch._foreach_norm(list(gradients))).float()
    norm = norms_n.double().square().sum().sqrt().float()
    return Clip(torch.stack([norm, (max_norm / (norm + _CLIP_EPS)).clamp(max=1.0)]), norms_n)


def plain_adamw(update: Update, rates: Rates, clip: Clip | None = None, zero: bool = False) -> None:
    """`AdamWPass` in plain torch, as torch.optim.AdamW has it tensor by tensor."""
    lr, beta1, beta2, eps, weight_decay = (float(each) for each in rates)
    for p, g, m, v, step in zip(*update, strict=True):
        step += 1
        t = float(step)
        clipped = g if clip is None else g * clip.factor
        p.mul_(1 - lr * weight_decay)
        m.lerp_(clipped, 1 - beta1)
        v.mul_(beta2).addcmul_(clipped, clipped, value=1 - beta2)
        denominator = (v.sqrt() / (1 - beta2**t) ** 0.5).add_(eps)
        p.addcdiv_(m, denominator, value=-lr / (1 - beta1**t))
        if zero:
            g.zero_()


def layout(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that have any: tensors of one shape and one layout have their numbers in one order in memory."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def is_dense(tensor: Tensor) -> bool:
    """Whether its numbers fill a piece of memory with no gap and no overlap, in whatever order."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != filled:
            return False
        filled *= size
    return True


def on_kernel(tensor: Tensor) -> bool:
    return tensor.is_cuda or takes_kernel(tensor)


class RatesOnCard:
    """`RatesOnCard()(rates, device)`: float64 [5] there, sent only when a number has changed. In float32 beta2 would be off by more than float32 can say
    of 1 - beta2."""

    def __init__(self) -> None:
        self._seen: tuple[float, ...] = ()
        self._there: Tensor | None = None

    def __call__(self, rates: Rates, device: torch.device) -> Tensor:
        tensors = [isinstance(each, Tensor) and each.device == device for each in rates]
        numbers = tuple(0.0 if is_there else float(each) for each, is_there in zip(rates, tensors, strict=True))
        if self._there is None or self._there.device != device or numbers != self._seen or any(tensors):
            self._there, self._seen = sent(numbers, torch.float64, device), numbers
            for place, each, is_there in zip(self._there, rates, tensors, strict=True):
                if is_there:
                    place.copy_(each.reshape(()))  # type: ignore[union-attr]
        return self._there


class Table:
    """Where many tensors lie, a row each, and which program takes which piece of which. On the device; written anew only where a tensor has moved.

    `chunks` says of a row's first tensor how many programs take it, `require(number, row, columns)` refuses what none can go through.
    """

    device: torch.device
    addresses: Tensor
    """int64 [n, columns]"""
    sizes_n: Tensor
    heights_n: Tensor
    """int64: the size of the first dimension."""
    tensor_C: Tensor
    part_C: Tensor
    """int32: the chunk's number within its tensor."""
    first_n: Tensor
    """int32 [n + 1]: each tensor's first chunk."""

    aligned: bool
    """Whether all begin where a thread can load 16 bytes at once."""

    def __init__(
        self,
        columns: Sequence[str],
        chunks: Callable[[torch.Size], int],
        require: Callable[[int, Row, Sequence[str]], None],
    ) -> None:
        self._columns, self._chunks, self._require = columns, chunks, require
        self._gradient = columns.index("gradient")
        self._seen: list[int] = []
        self._forms: list[Any] = []
        self._shapes: list[torch.Size] = []
        self.launch = Launcher()

    @property
    def tensors(self) -> int:
        return len(self._shapes)

    @property
    def chunks(self) -> int:
        return len(self.tensor_C)

    def point(self, rows: Sequence[Row]) -> None:
        """Point at these rows of tensors. ValueError for one that no program can go through."""
        seen = [each.data_ptr() for row in rows for each in row]
        # A gradient is made anew by each backward pass: at an address that is known another may lie, or lie otherwise.
        forms = [(each.dtype, each.shape, each.stride()) for each in (row[self._gradient] for row in rows)]
        if seen == self._seen and forms == self._forms:
            return
        for number, row in enumerate(rows):
            self._require(number, row, self._columns)
        firsts = [row[0] for row in rows]
        shapes = [each.shape for each in firsts]
        if shapes != self._shapes or firsts[0].device != self.device:
            self._cut(shapes, firsts[0].device)
        self.addresses.copy_(sent(seen, torch.int64, self.device).view(self.addresses.shape))
        counts = self._columns.index("step") if "step" in self._columns else -1
        self.aligned = all(i % len(self._columns) == counts or not at % _ALIGNED for i, at in enumerate(seen))
        self._seen, self._forms = seen, forms

    def _cut(self, shapes: list[torch.Size], device: torch.device) -> None:
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            raise ValueError(f"tensors on {device}; want that card made current by torch.cuda.set_device")
        if self._shapes and device != self.device:
            self.launch = Launcher()
        self.device, self._shapes, self._seen = device, shapes, []
        self.addresses = torch.empty(len(shapes), len(self._columns), dtype=torch.int64, device=device)
        chunks_n = torch.tensor([self._chunks(each) for each in shapes], device="cpu")
        first_n = torch.cat([chunks_n.new_zeros(1), chunks_n.cumsum(0)])
        tensor_C = torch.arange(len(shapes), device="cpu").repeat_interleave(chunks_n)
        part_C = torch.arange(len(tensor_C), device="cpu") - first_n[tensor_C]
        self.sizes_n = sent([each.numel() for each in shapes], torch.int64, device)
        self.heights_n = sent([each[0] if each else 1 for each in shapes], torch.int64, device)
        self.tensor_C, self.part_C, self.first_n = (
            sent(each, torch.int32, device) for each in (tensor_C, part_C, first_n)
        )


def _chunks(shape: torch.Size) -> int:
    return ceil_div(shape.numel(), _CHUNK)


def _require(number: int, row: Row, names: Sequence[str]) -> None:
    first = row[0]
    for name, each in zip(names, row, strict=True):
        where = f"tensor {number} {list(first.shape)}, its {name}"
        if each.dtype is not torch.float32:
            raise ValueError(f"{where}: {each.dtype}; want torch.float32")
        if each.device != first.device:
            raise ValueError(f"{where}: on {each.device}; want {first.device}, like all of them")
        if name == "step":
            if each.numel() != 1:
                raise ValueError(f"{where}: {list(each.shape)}; want one number")
            continue
        if each.numel() == 0 or not is_dense(each):
            raise ValueError(
                f"{where}: {list(each.shape)} with strides {each.stride()}; want numbers, and no gap between them"
            )
        if each.shape != first.shape or layout(each) != layout(first):
            raise ValueError(
                f"{where}: {list(each.shape)} with strides {each.stride()}; want the parameter's {list(first.shape)} with {first.stride()}"
            )


def sent(values: Iterable[Any] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the device, without waiting for it: from pinned memory, which torch keeps until it has been read."""
    here = values.to(dtype) if isinstance(values, Tensor) else torch.tensor(list(values), dtype=dtype, device="cpu")
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def _norm(table: Table, max_norm: float) -> Clip:
    device, n = table.device, table.tensors
    partial_C = torch.empty(table.chunks, dtype=torch.float32, device=device)
    square_n = torch.empty(n, dtype=torch.float64, device=device)
    norms_n, both_2 = (torch.empty(size, dtype=torch.float32, device=device) for size in (n, 2))
    where = (table.addresses, table.tensor_C, table.part_C, table.sizes_n)
    launch, each = table.launch, (table.chunks,)
    sums = (*where, partial_C, _CHUNK, _BLOCK, table.aligned)
    launch(square_sums, each, sums, {"num_warps": _WARPS}, key=table.aligned)
    launch(tensor_norms, (n,), (partial_C, table.first_n, square_n, norms_n, _SUM_BLOCK), {"num_warps": 4})
    launch(clip_factor, (1,), (square_n, both_2, n, float(max_norm), _CLIP_EPS, _SUM_BLOCK), {"num_warps": 4})
    return Clip(both_2, norms_n)


def prepare(table: Table, rates_5: Tensor, numbers: Tensor, counts_n: Tensor | None) -> None:
    """Fill `numbers` [n, COEFFICIENTS] with what the step of each tensor multiplies with: of step `counts_n`, float32, or one more than where the table's
    column `step` points, which is then counted."""
    n, held = table.tensors, counts_n is None
    where = table.addresses if counts_n is None else counts_n
    constants = (_COUNTED, len(_COLUMNS), COEFFICIENTS, _STEP_BITS, held)
    table.launch(
        coefficients, (ceil_div(n, _COUNTED),), (where, rates_5, numbers, n, *constants), {"num_warps": 4}, key=held
    )


def _adamw(table: Table, rates_5: Tensor, clip: Clip | None, zero: bool) -> None:
    n = table.tensors
    numbers = torch.empty(n, COEFFICIENTS, dtype=torch.float32, device=table.device)
    prepare(table, rates_5, numbers, None)
    where = (table.addresses, table.tensor_C, table.part_C, table.sizes_n)
    constants = (_CHUNK, _BLOCK, len(_COLUMNS), COEFFICIENTS, table.aligned, clip is not None, zero)
    tensors = (*where, numbers, numbers if clip is None else clip.both_2)
    table.launch(adamw, (table.chunks,), (*tensors, *constants), {"num_warps": _WARPS}, key=constants)


@triton.jit
def floats_at(row, column: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in this column of the table. If it is not known to be aligned, each number is loaded by itself."""
    address = tl.load(row + column).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(address, 16 if ALIGNED else 4)


@triton.jit
def square_sums(
    addresses,
    tensor_C,
    part_C,
    sizes_n,
    partial_C,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One chunk's sum of squares."""
    chunk = tl.program_id(0)
    which = tl.load(tensor_C + chunk)
    first = tl.load(part_C + chunk).to(tl.int64) * CHUNK
    size = tl.load(sizes_n + which)
    values = floats_at(addresses + which, 0, ALIGNED)
    total = tl.zeros((BLOCK,), tl.float32)
    # A whole chunk without a mask: the size of a tensor is of no known multiple, and a mask by it would break up the loads.
    if size - first >= CHUNK:
        for i in range(0, CHUNK, BLOCK):
            value = tl.load(values + (first + i + tl.arange(0, BLOCK)))
            total += value * value
    else:
        for i in range(0, CHUNK, BLOCK):
            at = first + i + tl.arange(0, BLOCK)
            value = tl.load(values + at, mask=at < size, other=0.0)
            total += value * value
    tl.store(partial_C + chunk, tl.sum(total, 0))


@triton.jit
def tensor_norms(partial_C, first_n, square_n, norms_n, BLOCK: tl.constexpr):
    which = tl.program_id(0)
    begin, end = tl.load(first_n + which), tl.load(first_n + which + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    for i in range(begin, end, BLOCK):
        at = i + tl.arange(0, BLOCK)
        total += tl.load(partial_C + at, mask=at < end, other=0.0).to(tl.float64)
    square = tl.sum(total, 0)
    tl.store(square_n + which, square)
    tl.store(norms_n + which, tl.sqrt(square).to(tl.float32))


@triton.jit(do_not_specialize=["n", "max_norm", "eps"])
def clip_factor(square_n, both_2, n, max_norm, eps, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float64)
    for i in range(0, n, BLOCK):
        at = i + tl.arange(0, BLOCK)
        total += tl.load(square_n + at, mask=at < n, other=0.0)
    norm = tl.sqrt(tl.sum(total, 0)).to(tl.float32)
    factor = tl.div_rn(max_norm, norm + eps)
    tl.store(both_2, norm)
    # Not a minimum, which would make 1 of NaN.
    tl.store(both_2 + 1, tl.where(factor > 1.0, 1.0, factor))


@triton.jit(do_not_specialize=["n"])
def coefficients(
    where,
    rates_5,
    numbers,
    n,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    BITS: tl.constexpr,
    HELD: tl.constexpr,
):
    """Count each tensor's step, and make of rates and count what its update multiplies with; in float64, as torch does on the host. `where` are the
    counts or, HELD, the table whose column 4 says where each lies."""
    which = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = which < n
    if HELD:
        steps = tl.load(where + which * COLUMNS + 4, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(steps, mask=inside, other=0.0) + 1.0
        tl.store(steps, step, mask=inside)
    else:
        step = tl.load(where + which, mask=inside, other=1.0)
    lr, beta1, beta2 = tl.load(rates_5), tl.load(rates_5 + 1), tl.load(rates_5 + 2)
    eps, decay = tl.load(rates_5 + 3), tl.load(rates_5 + 4)
    count = step.to(tl.int32)
    power1, power2 = tl.full((BLOCK,), 1.0, tl.float64), tl.full((BLOCK,), 1.0, tl.float64)
    square1, square2 = beta1, beta2
    for bit in range(BITS):
        is_set = ((count >> bit) & 1) == 1
        power1 = tl.where(is_set, power1 * square1, power1)
        power2 = tl.where(is_set, power2 * square2, power2)
        square1 *= square1
        square2 *= square2
    none = tl.zeros((BLOCK,), tl.float64)
    row = numbers + which * COEFFICIENTS
    tl.store(row, (1.0 - lr * decay + none).to(tl.float32), mask=inside)
    tl.store(row + 1, (lr / (1.0 - power1)).to(tl.float32), mask=inside)
    tl.store(row + 2, (1.0 / tl.sqrt(1.0 - power2)).to(tl.float32), mask=inside)
    tl.store(row + 3, (1.0 - beta1 + none).to(tl.float32), mask=inside)
    tl.store(row + 4, (beta2 + none).to(tl.float32), mask=inside)
    tl.store(row + 5, (1.0 - beta2 + none).to(tl.float32), mask=inside)
    tl.store(row + 6, (eps + none).to(tl.float32), mask=inside)


@triton.jit
def update_block(
    at,
    left,
    parameter,
    gradient,
    exp_avg,
    exp_avg_sq,
    numbers,
    MASKED: tl.constexpr,
    CLIP: tl.constexpr,
    ZERO: tl.constexpr,
):
    """One block's step: everything read once and written once."""
    keep, rate, correction, slope, beta2, slope_sq, eps, factor = numbers
    if MASKED:
        inside = at < left
    else:
        inside = None
    g = tl.load(gradient + at, mask=inside)
    p, m, v = (
        tl.load(parameter + at, mask=inside),
        tl.load(exp_avg + at, mask=inside),
        tl.load(exp_avg_sq + at, mask=inside),
    )
    if CLIP:
        g *= factor
    m += slope * (g - m)
    v = v * beta2 + slope_sq * g * g
    p = p * keep - tl.div_rn(rate * m, tl.sqrt_rn(v) * correction + eps)
    tl.store(parameter + at, p, mask=inside)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    if ZERO:
        tl.store(gradient + at, tl.zeros_like(p), mask=inside)


@triton.jit
def adamw(
    addresses,
    tensor_C,
    part_C,
    sizes_n,
    numbers,
    both_2,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CLIP: tl.constexpr,
    ZERO: tl.constexpr,
):
    """One chunk's step."""
    chunk = tl.program_id(0)
    which = tl.load(tensor_C + chunk)
    first = tl.load(part_C + chunk).to(tl.int64) * CHUNK
    size = tl.load(sizes_n + which)
    where, row = addresses + which * COLUMNS, numbers + which * COEFFICIENTS
    p, g = floats_at(where, 0, ALIGNED), floats_at(where, 1, ALIGNED)
    m, v = floats_at(where, 2, ALIGNED), floats_at(where, 3, ALIGNED)
    factor = 1.0
    if CLIP:
        factor = tl.load(both_2 + 1)
    # Read before the first store, behind which the compiler would have to read them again.
    how = (
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
        tl.load(row + 4),
        tl.load(row + 5),
        tl.load(row + 6),
        factor,
    )
    # Whole chunks without a mask: the size of a tensor is of no known multiple, and a mask by it would break up loads and stores.
    if size - first >= CHUNK:
        for i in range(0, CHUNK, BLOCK):
            at = first + i + tl.arange(0, BLOCK)
            update_block(at, size, p, g, m, v, how, False, CLIP, ZERO)
    else:
        for i in range(0, CHUNK, BLOCK):
            at = first + i + tl.arange(0, BLOCK)
            update_block(at, size, p, g, m, v, how, True, CLIP, ZERO)
