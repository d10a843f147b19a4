from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from training.sharded.inventory import read_inventory
from training.sharded.loader import load
from training.sharded.storage import Matrix

ROOT = Path(__file__).parents[3]


def run(model: Path, folder: Path, size: int) -> list[dict[str, Any]]:
    program = "tests.training.sharded.processes"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", program, *map(str, (model, folder / "meeting", folder / str(rank), rank, size))],
            cwd=ROOT,
            env=environment,
        )
        for rank in range(size)
    ]
    try:
        assert [process.wait(timeout=200) for process in started] == [0] * size
    finally:
        for process in started:
            process.kill()
    return [torch.load(folder / str(rank)) for rank in range(size)]


@pytest.mark.train
def test_two_processes_share_one_host_copy_and_read_each_byte_once(model: Path, tmp_path: Path, family: str) -> None:
    if family != "qwen3_moe":
        pytest.skip("the threads' tests load every family; processes differ in how they meet alone")
    alone = load(model, device=torch.device("cpu"), dtype=torch.float32)
    ranks = run(model, tmp_path, 2)
    for rank in ranks:
        for seen, layer in zip(rank["layers"], alone.experts, strict=True):
            assert all(map(torch.equal, seen, layer.buffers))
        for name, wanted in alone.matrices.items():
            parts = wanted.values if isinstance(wanted, Matrix) else (wanted,)
            assert all(map(torch.equal, rank["matrices"][name], parts)), name
        assert rank["agreed"] == (True, False)
    assert sum(rank["read"] for rank in ranks) == read_inventory(model).bytes
    assert all(rank["read"] > 0 for rank in ranks)
