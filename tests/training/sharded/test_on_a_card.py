"""The same base on a card: pinned buffers, the quantising kernel, and host memory that the driver knows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training.sharded.inventory import read_inventory
from training.sharded.loader import load
from training.sharded.storage import Matrix, SharedHost

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card"),
]
CARD = torch.device("cuda", 0)


@pytest.mark.parametrize("in_host", [False, True])
def test_a_card_packs_the_bits_that_the_plain_way_does(model: Path, in_host: bool) -> None:
    host = SharedHost(read_inventory(model).shape) if in_host else None
    if host:
        host.register()
    wanted = load(model, device=torch.device("cpu"), dtype=torch.float32)
    seen = load(model, device=CARD, dtype=torch.float32, into=list(host.layers()) if host else None, buffer_bytes=4096)
    for one, other in zip(seen.experts, wanted.experts, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(one.buffers, other.buffers, strict=True))
    for name, room in wanted.matrices.items():
        mine = seen.matrices[name]
        if isinstance(room, Matrix):
            assert isinstance(mine, Matrix)
            assert torch.equal(mine.dequantise(torch.float32).cpu(), room.dequantise(torch.float32))
        else:
            assert isinstance(mine, torch.Tensor) and torch.equal(mine.cpu(), room)


def test_the_card_never_holds_more_than_the_base_and_a_few_buffers(model: Path) -> None:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    base = load(model, device=CARD, dtype=torch.bfloat16, buffer_bytes=4096, buffers=4)
    held = sum(base.report.held_bytes.values())
    # The allocator rounds each tensor up to 512 bytes.
    rounding = 512 * (len(base.matrices) * 2 + 4 * len(base.experts))
    assert torch.cuda.max_memory_allocated() - before <= held + rounding + 16 * 4096 + (1 << 20)
