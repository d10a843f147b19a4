"""What PyTorch's allocator is told before torch is imported.

By itself it takes memory of the card in blocks that it never joins. A CUDA graph then kept 10 GB that nothing used: 134.8 GB were taken for a
micro-batch of 16,384 tokens of Qwen3.6-35B-A3B, and 124.4 in segments that grow (training/RESULTS.md).
"""

from __future__ import annotations

import os

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def grow_segments() -> None:
    """Have memory taken in segments that grow, unless the environment says something of its own about the allocator."""
    if not any(name in os.environ for name in _NAMES):
        os.environ[_NAMES[0]] = "expandable_segments:True"
