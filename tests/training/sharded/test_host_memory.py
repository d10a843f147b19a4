from __future__ import annotations

from pathlib import Path

import pytest

from training.sharded.host_memory import HostMemoryError, available_bytes, require_memory

GB = 10**9


def box(root: Path, available: int, limit: str = "", used: int = 0, cached: int = 0, old: bool = False) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:   {available >> 10} kB\n")
    group = root / ("sys/fs/cgroup/memory" if old else "sys/fs/cgroup")
    group.mkdir(parents=True)
    if limit:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(f"{limit}\n")
        (group / ("memory.usage_in_bytes" if old else "memory.current")).write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 5\nactive_file {cached}\ninactive_file 0\nshmem 7\n")
    return root


@pytest.mark.parametrize("old", [False, True])
def test_the_containers_limit_counts_and_the_page_cache_does_not(tmp_path: Path, old: bool) -> None:
    # A checkpoint that was just fetched fills the cache.
    assert available_bytes(box(tmp_path, 400 * GB, str(200 * GB), 180 * GB, 150 * GB, old)) == 170 * GB


@pytest.mark.parametrize("limit", ["", "max"])
def test_without_a_limit_the_kernels_number_counts(tmp_path: Path, limit: str) -> None:
    assert available_bytes(box(tmp_path, 4096 * 1000, limit)) == 4096 * 1000


def test_too_little_memory_is_an_error_with_both_numbers_before_any_is_taken(tmp_path: Path) -> None:
    root = box(tmp_path, 64 * 10**9)
    require_memory(60 * GB, "the base", root)
    with pytest.raises(HostMemoryError, match=r"the base takes 127\.7 GB of host memory, 64\.0 GB are left"):
        require_memory(127_700_000_000, "the base", root)


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
