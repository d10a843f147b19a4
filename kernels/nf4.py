"""NF4 in blocks of 64: 4 bits a weight and one float32 scale a block, bit for bit what bitsandbytes makes.

The code of a value is the number of thresholds below value · (1 / absmax), the thresholds being half-way between codes; the high half of a byte
is the earlier weight. The codes are those of QLoRA (arXiv 2305.14314, appendix E) in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import ceil_div

BLOCK = 64
_BLOCKS = 16  # blocks that one program quantises
_BYTES = 2048  # packed bytes that one program dequantises
CODES = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_TABLES: dict[torch.device, tuple[Tensor, Tensor]] = {}


def quantise(weights: Tensor) -> tuple[Tensor, Tensor]:
    """(packed uint8 [n / 2], absmax float32 [n / 64]) of any number of weights that 64 divides. ValueError otherwise."""
    _require("weights", weights, (torch.bfloat16, torch.float16, torch.float32))
    count = weights.numel()
    if count % BLOCK:
        raise ValueError(f"weights: {count} of them; want a multiple of {BLOCK}, the block that shares a scale")
    packed = torch.empty(count // 2, dtype=torch.uint8, device=weights.device)
    absmax = torch.empty(count // BLOCK, dtype=torch.float32, device=weights.device)
    blocks = count // BLOCK
    if blocks:
        _quantise[(ceil_div(blocks, _BLOCKS),)](
            weights, packed, absmax, tables(weights.device)[1], blocks, _BLOCKS, BLOCK // 2, weights.is_cuda
        )
    return packed, absmax


def dequantise(packed: Tensor, absmax: Tensor, out: Tensor) -> Tensor:
    """Write the weights into `out` (any shape of 2·packed numbers) and return it. ValueError if the sizes do not belong together."""
    _require("packed", packed, (torch.uint8,))
    _require("absmax", absmax, (torch.float32,))
    _require("out", out, (torch.bfloat16, torch.float16, torch.float32))
    if out.numel() != 2 * packed.numel() or absmax.numel() * BLOCK != out.numel():
        raise ValueError(
            f"{packed.numel()} packed bytes, {absmax.numel()} scales, {out.numel()} weights; want n / 2, n / {BLOCK} and n"
        )
    if len({packed.device, absmax.device, out.device}) > 1:
        raise ValueError(f"packed on {packed.device}, absmax on {absmax.device}, out on {out.device}; want one device")
    if packed.numel():
        _dequantise[(ceil_div(packed.numel(), _BYTES),)](
            packed, absmax, tables(packed.device)[0], out, packed.numel(), _BYTES, BLOCK // 2, num_warps=4
        )
    return out


def _require(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: {tensor.dtype}; want {' or '.join(map(str, dtypes))}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()}; want it contiguous")


def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The 16 codes, and the 15 thresholds half-way between them, in float32."""
    if device not in _TABLES:
        codes = torch.tensor(CODES, dtype=torch.float32)
        _TABLES[device] = (codes.to(device), ((codes[1:] + codes[:-1]) / 2).to(device))
    return _TABLES[device]


@triton.jit
def _quantise(
    weights, packed, absmax, thresholds, blocks, BLOCKS: tl.constexpr, HALF: tl.constexpr, CARD: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = (block < blocks)[:, None]
    pair = tl.arange(0, HALF)[None, :]
    at = weights + block[:, None] * (2 * HALF) + 2 * pair
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + 1, mask=inside, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    # As bitsandbytes has it on a card and on a CPU: on a card the fast reciprocal, whose infinity gives a block of zeros the code 0 throughout; on a
    # CPU the exact one, and the code of zero. Both are read back as zeros.
    if CARD:
        scale = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [largest], dtype=tl.float32, is_pure=True, pack=1
        )[:, None]
    else:
        scale = tl.where(largest > 0, 1.0 / largest, 0.0)[:, None]
    first, second = first * scale, second * scale
    high, low = tl.zeros((BLOCKS, HALF), tl.int32), tl.zeros((BLOCKS, HALF), tl.int32)
    for i in tl.static_range(15):
        threshold = tl.load(thresholds + i)
        high += (first > threshold).to(tl.int32)
        low += (second > threshold).to(tl.int32)
    tl.store(packed + block[:, None] * HALF + pair, ((high << 4) | low).to(tl.uint8), mask=inside)
    tl.store(absmax + block, largest, mask=block < blocks)


@triton.jit
def _dequantise(packed, absmax, codes, out, count, BYTES: tl.constexpr, HALF: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BYTES
    i = first + tl.arange(0, BYTES)
    inside = i < count
    byte = tl.load(packed + i, mask=inside, other=0).to(tl.int32)
    scale = tl.load(absmax + i // HALF, mask=inside, other=0.0)
    high, low = tl.load(codes + (byte >> 4)) * scale, tl.load(codes + (byte & 15)) * scale
    at = 2 * first + tl.arange(0, 2 * BYTES)
    tl.store(out + at, tl.interleave(high, low).to(out.dtype.element_ty), mask=at < 2 * count)
