"""Where a micro-batch's documents begin, in the forms that its layers want: made once, read by every layer, no wait for the card.

Shape letters: B rows, S tokens a row, T = B·S tokens, N documents, C chunks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

CHUNK = 64  # tokens: flash-linear-attention's default
_last: list[tuple[Tensor, Tensor]] = []


def document_numbers(rows: int, tokens: int, device: torch.device, options: dict[str, Any]) -> Tensor:
    """The document of each token, [T] int32: what the model was told of packed documents, else one document a row."""
    numbers: Tensor | None = options.get("seq_idx")
    if numbers is not None:
        return numbers.to(device, torch.int32).reshape(-1)
    ends = options.get("cu_seq_lens_q")
    if ends is None:
        return _row_numbers(rows, tokens, device)
    # Without numbers the stock convolution reads over the borders that the rule beside it keeps.
    places = torch.arange(rows * tokens, device=device)
    return torch.searchsorted(ends.to(device)[1:], places, right=True, out_int32=True)


@functools.lru_cache(maxsize=8)
def _row_numbers(rows: int, tokens: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(rows, dtype=torch.int32, device=device).repeat_interleave(tokens)


def chunk_indices(options: dict[str, Any], device: torch.device) -> Tensor | None:
    """(document, chunk in it) of every chunk of 64 tokens, [C, 2] int32 on the card: what the model was given, or made from the lengths that the host
    holds (`cu_seq_lens_cpu`) for the first layer that asks, and kept for the rest of the micro-batch; None without either."""
    given: Tensor | None = options.get("chunk_indices")
    if given is not None:
        return given
    ends = options.get("cu_seq_lens_cpu")
    if ends is None:
        return None
    if not _last or _last[0][0] is not ends or _last[0][1].device != device:
        # What evaluation made must serve training with the same batch: an inference tensor can be kept for no backward pass.
        with torch.inference_mode(False):
            _last[:] = [(ends, _chunk_indices(ends, device))]
    return _last[0][1]


def _chunk_indices(ends_N1: Tensor, device: torch.device) -> Tensor:
    chunks_N = (ends_N1.diff() + CHUNK - 1) // CHUNK
    document_C = torch.arange(len(chunks_N)).repeat_interleave(chunks_N)
    first_N = chunks_N.cumsum(0) - chunks_N
    indices = torch.stack([document_C, torch.arange(len(document_C)) - first_N[document_C]], 1).to(torch.int32)
    if device.type == "cuda":
        return indices.pin_memory().to(device, non_blocking=True)
    return indices.to(device)
