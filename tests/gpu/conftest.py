"""The tiny world and its bucket, as in tests/training."""

from __future__ import annotations

from tests.training.conftest import make_box, s3, store, tiny

__all__ = ["make_box", "s3", "store", "tiny"]
