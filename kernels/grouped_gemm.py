"""What every kernel of the layer shares: the order of rows by expert, the map of row tiles, and thin grouped products.

Rows are (token, choice) pairs, called slots (slot = token·k + choice), sorted by expert. Nothing here waits for the host and every grid
follows from shapes alone, so all of it can be captured in a CUDA graph: the grid has room for the most tiles that any routing of M rows
over E experts can need (M // height + E), and a tile beyond the last one returns at once.

Shape letters: T tokens, k experts a token, M = T·k rows, E experts, H hidden, I intermediate, J = 2I, R rank (padded to a power of two).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Launcher, ceil_div, power_of_2

_COUNT_BLOCK = 128  # slots that one program of the sort places
_COUNT_BLOCKS = 4  # blocks that one program counts
_SCAN_EXPERTS = 16  # experts whose starts one program of the scan works out
_MAP_WIDTH = tl.constexpr(8)  # numbers that a row tile has in the map
_MAP_TILES = 32  # row tiles that one program of the map describes


@dataclass(frozen=True)
class Routing:
    """The rows sorted by expert."""

    order_M: Tensor
    """int32: the slot that stands at each sorted row; within an expert slots keep their order, so the result is the same in every run."""
    share_M: Tensor
    """float32: the router weight of each sorted row. Read through the order it would be one wait more in every tile."""
    starts_E1: Tensor
    """int32 [E + 1]: first row of each expert, and M."""
    low: Tensor
    """The map of tiles of the first height: int32, eight a tile: expert (E if unused), its first tile, how many it has, its first row, its end;
    three are unused. They lie together and are asked for at once: a load that waits for another costs a tile half a microsecond before it begins."""
    high: Tensor
    """The map of tiles of the second height."""
    heights: tuple[int, int]

    def map(self, height: int) -> tuple[Tensor, int]:
        """The map for tiles of this height, and the most tiles that it may hold."""
        tiles = self.low if height == self.heights[0] else self.high
        return tiles, tiles.shape[0] // _MAP_WIDTH.value


def route(expert_Tk: Tensor, weight_Tk: Tensor, experts: int, heights: tuple[int, int], launch: Launcher) -> Routing:
    """Counting sort of the slots by expert, and the maps of tiles of both heights, in three launches; stable, so deterministic."""
    M, device = expert_Tk.numel(), expert_Tk.device
    E2 = power_of_2(experts)
    blocks = ceil_div(M, _COUNT_BLOCK * _COUNT_BLOCKS) * _COUNT_BLOCKS
    low, high = (M // height + experts for height in heights)

    def ints(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device=device)

    totals_E = torch.zeros(E2, dtype=torch.int32, device=device)
    counts, bases = ints(blocks * E2), ints(blocks * E2)
    share_M = torch.empty(M, dtype=torch.float32, device=device)
    order_M, starts_E1, low_tiles, high_tiles = (
        ints(M),
        ints(experts + 1),
        ints(_MAP_WIDTH.value * low),
        ints(_MAP_WIDTH.value * high),
    )
    launch(
        _count,
        (blocks // _COUNT_BLOCKS,),
        (expert_Tk, counts, totals_E, M, E2, _COUNT_BLOCK, _COUNT_BLOCKS),
        {"num_warps": 4},
    )
    some, blocks2 = min(_SCAN_EXPERTS, E2), power_of_2(blocks)
    launch(
        _scan,
        (E2 // some,),
        (counts, totals_E, starts_E1, bases, blocks, M, experts, E2, some, blocks2),
        {"num_warps": 8},
        key=blocks2,
    )
    maps = ceil_div(low, _MAP_TILES), ceil_div(high, _MAP_TILES)
    launch(
        _place,
        (blocks + sum(maps),),
        (
            expert_Tk,
            weight_Tk,
            bases,
            starts_E1,
            order_M,
            share_M,
            low_tiles,
            high_tiles,
            M,
            blocks,
            low,
            high,
            experts,
            E2,
            _COUNT_BLOCK,
            *heights,
            _MAP_TILES,
        ),
        {"num_warps": 8},
    )
    return Routing(order_M, share_M, starts_E1, low_tiles, high_tiles, heights)


@dataclass(frozen=True)
class Thin:
    """The tile of a thin product: rows [rows / split], `k` of the long side at a time."""

    k: int
    warps: int
    stages: int
    split: int = 2
    """A thin product moves bytes and multiplies little, so its row tiles are this many times lower: more of them in flight."""


def thin_product(
    rows: Tensor,
    factor: Tensor,
    out_PR: Tensor,
    routing: Routing,
    launch: Launcher,
    tile: Thin,
    *,
    K: int,
    R: int,
    experts: int,
    top_k: int,
    height: int,
    strides: tuple[int, int],
    gather: bool,
    scale: float,
    name: str,
) -> None:
    """out[row, r] = scale · Σ_K rows[row, K] · factor[expert, r, K]; `factor` is read at expert·strides[0] + r·strides[1] + K.

    With `gather` the left side is one row a token and is read through the order; else it is already sorted.
    """
    tiles, most = routing.map(height)
    launch(
        _thin,
        (most * tile.split,),
        (
            *(rows, factor, out_PR, routing.order_M, tiles, scale),
            *(K, R, experts, top_k, height // tile.split, largest_tile(K, tile.k), *strides, gather, tile.split),
        ),
        {"num_warps": tile.warps, "num_stages": tile.stages},
        key=name,
    )


def largest_tile(size: int, at_most: int) -> int:
    """The largest power of two that divides `size` and is not over `at_most`."""
    return min(size & -size, at_most)


@triton.jit(do_not_specialize=["M"])
def _count(expert, counts, totals, M, E2: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr):
    """How many slots of each block go to each expert; several blocks a program, so that few programs add to the totals."""
    each = tl.arange(0, E2)
    whole = tl.zeros((E2,), tl.int32)
    for i in tl.static_range(BLOCKS):
        block = tl.program_id(0) * BLOCKS + i
        slot = block * BLOCK + tl.arange(0, BLOCK)
        inside = slot < M
        e = tl.load(expert + slot, mask=inside, other=0).to(tl.int32)
        count = tl.histogram(e, E2, mask=inside)
        tl.store(counts + block * E2 + each, count)
        whole += count
    tl.atomic_add(totals + each, whole, sem="relaxed")


@triton.jit(do_not_specialize=["blocks", "M"])
def _scan(
    counts,
    totals,
    starts,
    bases,
    blocks,
    M,
    E: tl.constexpr,
    E2: tl.constexpr,
    SOME: tl.constexpr,
    BLOCKS2: tl.constexpr,
):
    """Where each expert starts, and where in it each block's slots go."""
    each = tl.arange(0, E2)
    some = tl.program_id(0) * SOME + tl.arange(0, SOME)
    total = tl.load(totals + each)
    start = tl.sum(tl.where(each[:, None] < some[None, :], total[:, None], 0), 0)
    tl.store(starts + some, start, mask=some < E)
    if tl.program_id(0) == 0:
        tl.store(starts + E, M)
    block = tl.arange(0, BLOCKS2)
    at = block[:, None] * E2 + some[None, :]
    inside = (block < blocks)[:, None]
    count = tl.load(counts + at, mask=inside, other=0)
    tl.store(bases + at, tl.cumsum(count, 0) - count + start[None, :], mask=inside)


@triton.jit(do_not_specialize=["M", "blocks", "low", "high"])
def _place(
    expert,
    weight,
    bases,
    starts,
    order,
    share,
    low_tiles,
    high_tiles,
    M,
    blocks,
    low,
    high,
    E: tl.constexpr,
    E2: tl.constexpr,
    BLOCK: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SOME: tl.constexpr,
):
    """The first programs put each slot and its router weight at its row; the others describe the row tiles, of height LOW, then of height HIGH."""
    program = tl.program_id(0)
    if program < blocks:
        i = tl.arange(0, BLOCK)
        slot = program * BLOCK + i
        inside = slot < M
        e = tl.load(expert + slot, mask=inside, other=0).to(tl.int32)
        other = tl.load(expert + slot, mask=inside, other=-1).to(tl.int32)
        before = (e[:, None] == other[None, :]) & (i[None, :] < i[:, None])
        row = tl.load(bases + program * E2 + e, mask=inside, other=0) + tl.sum(before.to(tl.int32), 1)
        tl.store(order + row, slot, mask=inside)
        tl.store(share + row, tl.load(weight + slot, mask=inside, other=0.0).to(tl.float32), mask=inside)
    elif program < blocks + tl.cdiv(low, SOME):
        _describe(program - blocks, starts, low_tiles, low, E, E2, LOW, SOME)
    else:
        _describe(program - blocks - tl.cdiv(low, SOME), starts, high_tiles, high, E, E2, HIGH, SOME)


@triton.jit
def _describe(part, starts, tiles, most, E: tl.constexpr, E2: tl.constexpr, HEIGHT: tl.constexpr, SOME: tl.constexpr):
    each = tl.arange(0, E2)
    real = each < E
    count = tl.load(starts + each + 1, mask=real, other=0) - tl.load(starts + each, mask=real, other=0)
    need = (count + HEIGHT - 1) // HEIGHT
    until = tl.cumsum(need, 0)
    tile = part * SOME + tl.arange(0, SOME)
    e = tl.sum((until[None, :] <= tile[:, None]).to(tl.int32), 1)
    first = tl.sum(tl.where(each[None, :] < e[:, None], need[None, :], 0), 1)
    have = tl.sum(tl.where(each[None, :] == e[:, None], need[None, :], 0), 1)
    inside = tile < most
    used = inside & (e < E)
    at = tiles + tile * _MAP_WIDTH
    tl.store(at, tl.minimum(e, E), mask=inside)
    tl.store(at + 1, first, mask=inside)
    tl.store(at + 2, have, mask=inside)
    tl.store(at + 3, tl.load(starts + e, mask=used, other=0), mask=inside)
    tl.store(at + 4, tl.load(starts + e + 1, mask=used, other=0), mask=inside)


@triton.jit
def locate(program, tiles, N_TILES: tl.constexpr, TILE_ROWS: tl.constexpr):
    """(expert, first row, its expert's end, column tile) of a program. Within an expert the row tiles are innermost, so its weights stay in the
    cache."""
    at = tiles + (program // N_TILES) * _MAP_WIDTH
    e, first, have, start, end = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)
    have = tl.maximum(have, 1)
    local = program - first * N_TILES
    return e, start + (local % have) * TILE_ROWS, end, local // have


@triton.jit
def _thin(
    rows,
    factor,
    out,
    order,
    tiles,
    scale,
    K: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    GATHER: tl.constexpr,
    SPLIT: tl.constexpr,
):
    e, row0, end, _ = locate(tl.program_id(0) // SPLIT, tiles, 1, BM * SPLIT)
    if e >= E:
        return
    row0 += (tl.program_id(0) % SPLIT) * BM
    if row0 >= end:
        return
    row = row0 + tl.arange(0, BM)
    inside = row < end
    source = row
    if GATHER:
        source = tl.load(order + row, mask=inside, other=0) // TOP_K
    ks, rs = tl.arange(0, BK), tl.arange(0, R)
    at = rows + source[:, None].to(tl.int64) * K + ks[None, :]
    factor_at = factor + e.to(tl.int64) * EXPERT_STRIDE + rs[:, None] * RANK_STRIDE + ks[None, :]
    total = tl.zeros((BM, R), tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(tl.load(at + k), tl.load(factor_at + k).T, total)
    out_at = out + row[:, None].to(tl.int64) * R + rs[None, :]
    tl.store(out_at, (total * scale).to(out.dtype.element_ty), mask=inside[:, None])
