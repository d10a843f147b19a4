"""One rank of a box, as a process of its own: `python -m tests.training.sharded.processes MODEL RENDEZVOUS OUT RANK RANKS`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from training.sharded.inventory import read_inventory
from training.sharded.loader import load
from training.sharded.ranks import Distributed
from training.sharded.storage import Matrix, open_shared_host


def main(model: Path, rendezvous: str, out: Path, rank: int, size: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    ranks, cpu = Distributed(), torch.device("cpu")
    host = open_shared_host(read_inventory(model).shape, ranks, cpu)
    base = load(model, device=cpu, dtype=torch.float32, ranks=ranks, into=list(host.layers()), buffer_bytes=4096)
    agreed = (ranks.all(True), ranks.all(rank == 0))
    matrices = {
        name: tuple(room.values) if isinstance(room, Matrix) else (room,) for name, room in base.matrices.items()
    }
    # The whole layers, which the other rank filled half of.
    layers = [tuple(buffer.clone() for buffer in layer.buffers) for layer in host.layers()]
    torch.save({"layers": layers, "matrices": matrices, "read": base.report.read_bytes, "agreed": agreed}, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
