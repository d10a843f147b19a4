"""AdamW whose moments lie in 8 bits, as torchao keeps them, in one pass over memory.

A moment is codes of one byte, which a map of 256 numbers gives values, and for every 256 numbers a scale, their largest size. The map is made of lines,
one for each power of ten, so the kernel computes which code must be the nearest or the one before it, and reads one threshold to know; halving would
read eight. A block is 256 numbers in the order of the tensor's *indices*. A lora_B that lies in memory as its own transpose is therefore gone through in tiles: what is next to each other
in memory is in other blocks. The format is torchao's (OptimState8bit, after arXiv 2110.02861), so are the steps; so checkpoints are exchanged.

Shape letters: n tensors, R blocks of a tile, O x N a transposed tensor's indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adamw import (
    COEFFICIENTS,
    Clip,
    Rates,
    RatesOnCard,
    Row,
    Table,
    is_dense,
    layout,
    on_kernel,
    prepare,
    sent,
)
from kernels.launch import ceil_div

BLOCK = 256
"""Numbers of one scale."""
_ROWS, _WARPS = 4, 8
_CHUNK = 8 * _ROWS * BLOCK
_TALL, _TALL_WARPS = 8, 8
_LEAST_SCALE = 1e-12  # torchao's
_COLUMNS = ("parameter", "gradient", "codes", "scale", "codes_sq", "scale_sq")
_MANY = 16
"""A height of which a tile's loads are wide, along memory."""
_DECADES = 7


class Moment(NamedTuple):
    """`codes` uint8 of the parameter's shape, contiguous; `scale` float32 [numbers / 256]; `qmap` float32 [256] must be `dynamic_map`,
    signed for exp_avg only: who keeps the state sees to it, since to read it back from a card is to wait."""

    codes: Tensor
    scale: Tensor
    qmap: Tensor


class Update8bit(NamedTuple):
    """Tensors of one update, side by side: n of each. `counts` are the updates made, this one included; see `kernels.adamw.Update`."""

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    exp_avgs: Sequence[Moment]
    exp_avg_sqs: Sequence[Moment]
    counts: Sequence[float]


def dynamic_map(signed: bool) -> Tensor:
    """torchao's float32 [256], rising: 0, 1, and of each power of ten from 1e-6 to 1 the middles of as many equal parts of its last tenth to the whole:
    twice as many from one to the next. If `signed`, half as many, and their negatives."""
    values = [torch.tensor([0.0, 1.0], device="cpu")]
    for decade in range(_DECADES):
        borders = torch.linspace(0.1, 1, ((1 if signed else 2) << decade) + 1, device="cpu")
        middles = (borders[:-1] + borders[1:]) / 2 * 10 ** (decade - _DECADES + 1)
        values += [middles, -middles] if signed else [middles]
    return torch.cat(values).sort().values


def thresholds(qmap: Tensor) -> Tensor:
    """float32 [256]: of each code the least number that is as near to it as to the one before, as subtracting in float32 has it."""
    low, half = qmap[:-1], (qmap[1:] - qmap[:-1]) * 0.5
    at = low + half
    for _ in range(4):
        at = torch.nextafter(at, at.new_tensor(-2.0))
    for _ in range(12):
        at = torch.where(at - low >= half, at, torch.nextafter(at, at.new_tensor(2.0)))
    return torch.cat([at.new_tensor([-torch.inf]), at])


def fits(parameter: Tensor) -> bool:
    """Whether the kernels take this layout: indices in the order of memory or, of a matrix, in that of its transpose with whole blocks in each row."""
    if parameter.numel() % BLOCK or not parameter.numel():
        return False
    return parameter.is_contiguous() or _is_transposed(parameter)


class AdamW8bitPass:
    """`AdamW8bitPass()(update, rates, clip, zero)`: as `kernels.adamw.AdamWPass`, with moments in 8 bits.

    ValueError for tensors that do not fit together, or of a layout that is not taken (`fits`).
    """

    def __init__(self) -> None:
        self._flat = Table(_COLUMNS, lambda shape: ceil_div(shape.numel(), _CHUNK), _require)
        self._tall = Table(_COLUMNS, lambda shape: ceil_div(shape[0], _TALL) * (shape[1] // BLOCK), _require)
        self._rates = RatesOnCard()
        self._maps: tuple[Tensor, ...] = ()

    @torch.no_grad()
    def __call__(self, update: Update8bit, rates: Rates, clip: Clip | None = None, zero: bool = False) -> None:
        if not update.parameters:
            return
        if not on_kernel(update.parameters[0]):
            plain_adamw_8bit(update, rates, clip, zero)
            return
        tall = [_is_transposed(each) for each in update.parameters]
        rows: list[Row] = [(p, g, m.codes, m.scale, v.codes, v.scale) for p, g, m, v in zip(*update[:4], strict=True)]
        maps = self._maps_on(update.parameters[0].device)
        for table, transposed in ((self._flat, False), (self._tall, True)):
            chosen = [number for number, is_tall in enumerate(tall) if is_tall == transposed]
            if not chosen:
                continue
            table.point([rows[number] for number in chosen])
            device = table.device
            counts_n = sent([float(update.counts[number]) for number in chosen], torch.float32, device)
            numbers = torch.empty(len(chosen), COEFFICIENTS, dtype=torch.float32, device=device)
            prepare(table, self._rates(rates, device), numbers, counts_n)
            many = transposed and all(update.parameters[number].shape[0] % _MANY == 0 for number in chosen)
            _launch(table, numbers, maps, clip, (table.aligned, many, clip is not None, zero), transposed)

    def _maps_on(self, device: torch.device) -> tuple[Tensor, ...]:
        """Numbers and thresholds of both maps."""
        if not self._maps or self._maps[0].device != device:
            maps = [dynamic_map(signed) for signed in (True, False)]
            each_with_its = [each for qmap in maps for each in (qmap, thresholds(qmap))]
            self._maps = tuple(sent(each, torch.float32, device) for each in each_with_its)
        return self._maps


def plain_adamw_8bit(update: Update8bit, rates: Rates, clip: Clip | None = None, zero: bool = False) -> None:
    """`AdamW8bitPass` in plain torch, tensor by tensor in torchao's order of operations; only 1 - beta^t is made in float64, torchao's is in float32."""
    lr, beta1, beta2, eps, weight_decay = (float(each) for each in rates)
    for p, g, m8, v8, count in zip(*update, strict=True):
        clipped = g if clip is None else g * clip.factor
        m = dequantise(m8).lerp(clipped, 1 - beta1)
        v = dequantise(v8).lerp(clipped.square(), 1 - beta2)
        quantise(m, m8)
        quantise(v, v8)
        denominator = v.sqrt() / (1 - beta2**count) ** 0.5 + eps
        p.copy_(p - lr * weight_decay * p - lr * (m / (1 - beta1**count)) / denominator)
        if zero:
            g.zero_()


def dequantise(moment: Moment) -> Tensor:
    values = moment.qmap[moment.codes.int()].view(-1, BLOCK) * moment.scale[:, None]
    return values.view(moment.codes.shape)


def quantise(values: Tensor, moment: Moment) -> None:
    """Overwrite `moment` with the nearest codes, the upper of two that are as near."""
    blocks = values.contiguous().view(-1, BLOCK)
    scale = blocks.abs().amax(-1).clip(_LEAST_SCALE)
    scaled, qmap = (blocks / scale[:, None]).view(values.shape), moment.qmap
    code = (torch.searchsorted(qmap, scaled, right=True) - 1).clamp(min=0)
    upper = (code + 1).clamp(max=255)
    code = torch.where(scaled - qmap[code] >= (qmap[upper] - qmap[code]) * 0.5, upper, code)
    moment.codes.copy_(code)
    moment.scale.copy_(scale)


def _is_transposed(tensor: Tensor) -> bool:
    is_matrix = tensor.dim() == 2 and not tensor.is_contiguous() and tensor.t().is_contiguous()
    return is_matrix and tensor.shape[1] % BLOCK == 0


def _require(number: int, row: Row, columns: Sequence[str]) -> None:
    p = row[0]
    for name, each in zip(columns, row, strict=True):
        where = f"tensor {number} {list(p.shape)}, its {name}"
        kind, count = torch.uint8 if name.startswith("codes") else torch.float32, p.numel()
        if name.startswith("scale"):
            count //= BLOCK
        if each.dtype is not kind or each.numel() != count or each.device != p.device:
            raise ValueError(
                f"{where}: {each.numel()} of {each.dtype} on {each.device}; want {count} of {kind} on {p.device}"
            )
        if name in ("parameter", "gradient"):
            if each.shape != p.shape or layout(each) != layout(p) or not fits(each) or not is_dense(each):
                raise ValueError(
                    f"{where}: {list(each.shape)} with strides {each.stride()}; want the parameter's, whole blocks of {BLOCK}, contiguous or transposed"
                )
        elif not each.is_contiguous():
            raise ValueError(f"{where}: strides {each.stride()}; want it contiguous")


def _launch(
    table: Table,
    numbers: Tensor,
    maps: tuple[Tensor, ...],
    clip: Clip | None,
    how: tuple[Any, ...],
    transposed: bool,
) -> None:
    where = (table.addresses, table.tensor_C, table.part_C, table.sizes_n, table.heights_n)
    tensors = (*where, numbers, numbers if clip is None else clip.both_2, *maps)
    shape = (_TALL, _TALL) if transposed else (_CHUNK // BLOCK, _ROWS)
    constants = (*shape, BLOCK, len(_COLUMNS), COEFFICIENTS, _LEAST_SCALE, transposed, *how)
    warps = _TALL_WARPS if transposed else _WARPS
    table.launch(adamw_8bit, (table.chunks,), (*tensors, *constants), {"num_warps": warps}, key=constants)


@triton.jit
def nearest(value, thresholds, SIGNED: tl.constexpr):
    """The code whose number is nearest to `value` of [-1, 1], the upper of two that are as near.

    Between two powers of ten a number's place among the codes is a line, on which their thresholds are the whole numbers; only the lowest is a fifth of
    a code above its own, where lines of two slopes meet. So the whole part of the place less a quarter is the code or the one before it, and the threshold
    between the two says which.
    """
    PARTS: tl.constexpr = 1 if SIGNED else 2
    size = tl.abs(value)
    # Counted from zero's code. Below 1e-6 the first line goes on, its lowest threshold the one to zero: 0.14 or 0.19 above.
    steep = tl.full(value.shape, PARTS * 1e6 / 0.9, tl.float32)
    start = tl.full(value.shape, 0.75 - PARTS / 9, tl.float32)
    for i in tl.static_range(1, 7):
        above = size >= 1e-7 * 10**i
        steep = tl.where(above, (PARTS << i) * 1e6 / 10**i / 0.9, steep)
        start = tl.where(above, PARTS * ((1 << i) - 1) + 0.75 - (PARTS << i) / 9, start)
    position = size * steep + start
    # NaN has a code like any other number: it must not read elsewhere.
    before = tl.where(position >= 0, position, 0.0).to(tl.int32)
    if SIGNED:
        before = tl.where(value < 0, 126 - before, 127 + before)
    return before + tl.where(value >= tl.load(thresholds + 1 + before), 1, 0)


@triton.jit
def keep_moment(
    value,
    codes,
    scales,
    at_codes,
    at_scales,
    inside_codes,
    inside_scales,
    thresholds,
    SIGNED: tl.constexpr,
    LEAST: tl.constexpr,
):
    scale = tl.maximum(tl.max(tl.abs(value), 1), LEAST)
    code = nearest(tl.div_rn(value, tl.broadcast_to(scale[:, None], value.shape)), thresholds, SIGNED)
    tl.store(codes + at_codes, code.to(tl.uint8), mask=inside_codes)
    tl.store(scales + at_scales, scale, mask=inside_scales)


@triton.jit
def adamw_8bit(
    addresses,
    tensor_C,
    part_C,
    sizes_n,
    heights_n,
    numbers,
    both_2,
    qmap,
    thresholds,
    qmap_sq,
    thresholds_sq,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    LEAST: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ALIGNED: tl.constexpr,
    MANY: tl.constexpr,
    CLIP: tl.constexpr,
    ZERO: tl.constexpr,
):
    """CHUNK blocks, of one tensor in the order of memory or, TRANSPOSED, of as many rows beneath each other: ROWS of them at once."""
    program = tl.program_id(0)
    which = tl.load(tensor_C + program)
    part = tl.load(part_C + program).to(tl.int64)
    size, height = tl.load(sizes_n + which), tl.load(heights_n + which)
    if MANY:
        height = tl.multiple_of(height, 16)
    width = size // height
    if TRANSPOSED:
        width = tl.multiple_of(width, BLOCK)
    where, row = addresses + which * COLUMNS, numbers + which * COEFFICIENTS
    FLOAT: tl.constexpr = 16 if ALIGNED else 4
    BYTE: tl.constexpr = 16 if ALIGNED else 1
    parameter = tl.multiple_of(tl.load(where).to(tl.pointer_type(tl.float32)), FLOAT)
    gradient = tl.multiple_of(tl.load(where + 1).to(tl.pointer_type(tl.float32)), FLOAT)
    codes = tl.multiple_of(tl.load(where + 2).to(tl.pointer_type(tl.uint8)), BYTE)
    scales = tl.load(where + 3).to(tl.pointer_type(tl.float32))
    codes_sq = tl.multiple_of(tl.load(where + 4).to(tl.pointer_type(tl.uint8)), BYTE)
    scales_sq = tl.load(where + 5).to(tl.pointer_type(tl.float32))
    factor = 1.0
    if CLIP:
        factor = tl.load(both_2 + 1)
    keep, rate, correction, slope = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    slope_sq, eps = tl.load(row + 5), tl.load(row + 6)
    for i in range(0, CHUNK, ROWS):
        line = i + tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK)[None, :]
        if TRANSPOSED:
            # Tiles that follow each other lie beneath each other, where memory goes on.
            tiles = (height + CHUNK - 1) // CHUNK
            across = (part // tiles) * BLOCK
            down = (part % tiles) * CHUNK + line
            at = down[:, None] + (across + column) * height
            at_codes = down[:, None] * width + across + column
            at_scales = down * (width // BLOCK) + part // tiles
            inside = down < height
        else:
            block = part * CHUNK + line
            at = block[:, None] * BLOCK + column
            at_codes = at
            at_scales = block
            inside = block < size // BLOCK
        mask = tl.broadcast_to(inside[:, None], (ROWS, BLOCK))
        g = tl.load(gradient + at, mask=mask, other=0.0)
        p = tl.load(parameter + at, mask=mask, other=0.0)
        if CLIP:
            g *= factor
        code, code_sq = tl.load(codes + at_codes, mask=mask, other=0), tl.load(codes_sq + at_codes, mask=mask, other=0)
        scale, scale_sq = (
            tl.load(scales + at_scales, mask=inside, other=0.0),
            tl.load(scales_sq + at_scales, mask=inside, other=0.0),
        )
        m = tl.load(qmap + code.to(tl.int32)) * scale[:, None]
        v = tl.load(qmap_sq + code_sq.to(tl.int32)) * scale_sq[:, None]
        m += slope * (g - m)
        v += slope_sq * (g * g - v)
        p = p * keep - tl.div_rn(rate * m, tl.sqrt_rn(v) * correction + eps)
        tl.store(parameter + at, p, mask=mask)
        if ZERO:
            tl.store(gradient + at, tl.zeros_like(p), mask=mask)
        keep_moment(m, codes, scales, at_codes, at_scales, mask, inside, thresholds, True, LEAST)
        keep_moment(v, codes_sq, scales_sq, at_codes, at_scales, mask, inside, thresholds_sq, False, LEAST)
