"""How much memory of the host this process may still take: what the kernel has, and what the container is allowed."""

from __future__ import annotations

from pathlib import Path

from training.errors import HostMemoryError

_GROUPS = (
    ("sys/fs/cgroup", "memory.max", "memory.current"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def require_memory(wanted_bytes: int, what: str, root: Path = Path("/")) -> None:
    """HostMemoryError if `what` does not fit. Asked beforehand, since a container that takes too much is not refused but killed."""
    left = available_bytes(root)
    if wanted_bytes > left:
        raise HostMemoryError(
            f"{what} takes {wanted_bytes / 1e9:.1f} GB of host memory, {left / 1e9:.1f} GB are left; want a box with more (box.min_host_memory_gb), or cards that hold the base"
        )


def available_bytes(root: Path = Path("/")) -> int:
    """The smaller of what the kernel says is available and what the container's limit leaves; pages of files do not count as taken."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    (available,) = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    for folder, limit, usage in _GROUPS:
        group = root / folder
        if (group / limit).is_file() and (group / usage).is_file():
            most = (group / limit).read_text().strip()
            if most != "max":
                taken = int((group / usage).read_text()) - _file_pages(group / "memory.stat")
                available = min(available, int(most) - taken)
    return available


def _file_pages(stat: Path) -> int:
    """Of the page cache, which gives way. Shared memory is not among them."""
    counts = dict(line.split() for line in stat.read_text().splitlines()) if stat.is_file() else {}
    return sum(int(counts.get(name, 0)) for name in ("active_file", "inactive_file"))
