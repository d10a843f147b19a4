"""Micro-batches of one packed row as CUDA graphs, although no two rows have the same documents.

A graph has room for so many tokens, documents and chunks. What a row leaves free becomes more documents, of tokens without a label and no longer than the
data's own, since attention takes time by the square of their length; the list of ends is filled up with documents of no tokens at all, whose chunks are
read by nobody and write nothing. Numbers of documents and positions are computed from the ends inside the graph.

Shape letters: T tokens, N documents, C chunks of 64 tokens.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from training.lean.graph import CudaGraphs, MicroBatchGraph, Recorder
from training.lean.segments import CHUNK

IGNORED = -100
LEAST_FULL = 0.7
"""Of a graph's tokens, on average over the data: what is free costs as much as what is not."""
_CHUNK_STEP = 4
Results = Callable[[dict[str, Any], Tensor], tuple[Tensor, ...]]
"""Of a model's inputs and the tokens that the loss is divided by: the loss, then whatever else is wanted."""


class Room(NamedTuple):
    """What a graph is captured for."""

    tokens: int
    documents: int
    chunks: int
    longest: int
    """Tokens of a document."""

    @classmethod
    def for_rows(cls, lengths: Sequence[Sequence[int]], rows: int) -> Room:
        """For any so many rows of these at once, each given by the lengths of its documents."""
        tokens, longest = (
            -(-most // CHUNK) * CHUNK for most in (rows * max(map(sum, lengths)), max(map(max, lengths)))
        )
        # Those of the row that has most of them together with what it leaves free, so many times; and one of no tokens.
        documents = max(-(-(rows * (len(row) * longest - sum(row)) + tokens) // longest) for row in lengths) + 1
        # Every document ends in a chunk of its own that is not full: what all of a row lose by that is counted, then at most one for what is left free.
        lost = max(sum(-each % CHUNK for each in row) for row in lengths)
        chunks = tokens // CHUNK + -(-rows * lost // CHUNK) + 1
        return cls(tokens, documents, -(-chunks // _CHUNK_STEP) * _CHUNK_STEP, longest)

    def holds(self, ends: Sequence[int]) -> bool:
        """Whether a row whose documents end there (the first number is 0) fits."""
        if ends[-1] > self.tokens or max(last - first for first, last in itertools.pairwise(ends)) > self.longest:
            return False
        filled = _filled(ends, self)
        return len(filled) <= self.documents and _chunks(filled) <= self.chunks


def places(ends: Sequence[int], room: Room) -> Tensor:
    """[P] int32 on the host: `room.documents + 1` ends, then from the next multiple of 4 on (document, chunk in it) of `room.chunks` chunks.

    The last document has no tokens, and chunks beyond the row's are its first."""
    filled = _filled(ends, room)
    filled += [room.tokens] * (room.documents + 1 - len(filled))
    pairs = [
        (document, chunk)
        for document, (first, last) in enumerate(itertools.pairwise(filled))
        for chunk in range(-(-(last - first) // CHUNK))
    ]
    pairs += [(room.documents - 1, 0)] * (room.chunks - len(pairs))
    gap = [0] * (_first_chunk(room) - len(filled))
    return torch.tensor([*filled, *gap, *itertools.chain.from_iterable(pairs)], dtype=torch.int32)


def inputs_of(ids_1T: Tensor, labels_1T: Tensor, places_P: Tensor, room: Room) -> dict[str, Any]:
    """A model's inputs for a row of `room.tokens`, computed on the card from the places.

    Every tensor here is new at each call: flash-linear-attention keeps what it computed from a list of ends by the list's identity, and in a graph
    would go on with the documents of the first row.
    """
    ends = places_P[: room.documents + 1]
    chunks = places_P[_first_chunk(room) :].view(-1, 2)
    at_T = torch.arange(room.tokens, device=places_P.device)
    document_T = torch.searchsorted(ends[1:], at_T, right=True, out_int32=True)
    return {
        "input_ids": ids_1T,
        "labels": labels_1T,
        "position_ids": (at_T - ends[document_T])[None],
        "seq_idx": document_T[None],
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": room.longest,
        "max_length_k": room.longest,
        "chunk_indices": chunks,
    }


class PackedGraphs:
    """`graphs(ids, labels, ends, items)` runs a packed micro-batch, forward and backward, and returns its results; None if it has to be launched kernel by
    kernel. `tell` hears of the capture, `warn` (if not given, `tell`) of what has put an end to graphs."""

    def __init__(
        self,
        model: nn.Module,
        results_of: Results,
        room: Room,
        tell: Callable[[str], None],
        recorder: Callable[[], Recorder] = CudaGraphs,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._model, self._results_of, self._room, self._recorder = model, results_of, room, recorder
        self._tell, self._warn = tell, warn or tell
        self._graph: MicroBatchGraph | None = None
        self._given_up = False

    def __call__(
        self, ids_1T: Tensor, labels_1T: Tensor, ends: Sequence[int], items: Tensor
    ) -> tuple[Tensor, ...] | None:
        if self._given_up:
            return None
        if not self._room.holds(ends):
            return self._give_up(
                f"a row of {ends[-1]} tokens in {len(ends) - 1} documents came up, room is for {self._room}"
            )
        batch = _batch(ids_1T, labels_1T, ends, items, self._room)
        if self._graph is None or not self._graph.fits_model:
            if any(each.grad is not None for each in self._model.parameters()):
                return self._give_up("the model was given other memory in the middle of a step")
            self._graph = None  # its memory is the next one's
            self._capture(batch)
        return None if self._graph is None else self._graph(batch)

    def _capture(self, batch: dict[str, Any]) -> None:
        room, began = self._room, time.perf_counter()
        try:
            self._graph = MicroBatchGraph(
                self._model,
                lambda given: self._results_of(
                    inputs_of(given["ids"], given["labels"], given["places"], room), given["items"]
                ),
                batch,
                self._recorder(),
            )
        except RuntimeError as error:
            # A graph is speed and nothing else: what this card, its memory or these versions cannot capture trains without. Warming up left gradients.
            self._model.zero_grad(set_to_none=True)
            self._give_up(f"not captured, {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            return
        self._tell(
            f"a micro-batch of up to {room.tokens} tokens in {room.documents - 1} documents is one graph, captured in {time.perf_counter() - began:.1f} s"
        )

    def _give_up(self, reason: str) -> None:
        self._given_up, self._graph = True, None
        self._warn(f"{reason}; micro-batches are launched kernel by kernel from here on")


def _batch(ids_1T: Tensor, labels_1T: Tensor, ends: Sequence[int], items: Tensor, room: Room) -> dict[str, Any]:
    free = room.tokens - ids_1T.shape[1]
    where = places(ends, room)
    if ids_1T.is_cuda:
        where = where.pin_memory().to(ids_1T.device, non_blocking=True)
    return {
        "ids": nn.functional.pad(ids_1T, (0, free)),
        "labels": nn.functional.pad(labels_1T, (0, free), value=IGNORED),
        "places": where,
        "items": items.detach().reshape(()).to(ids_1T.device, torch.float32),
    }


def _filled(ends: Sequence[int], room: Room) -> list[int]:
    """The ends, with as many documents more as what is left free makes."""
    return [*ends, *range(ends[-1] + room.longest, room.tokens, room.longest)] + [room.tokens] * (
        ends[-1] < room.tokens
    )


def _chunks(ends: Sequence[int]) -> int:
    """Of the documents between these ends."""
    return sum(-(-(last - first) // CHUNK) for first, last in itertools.pairwise(ends))


def _first_chunk(room: Room) -> int:
    # A kernel that knows its pointer to be a multiple of 16 bytes is compiled otherwise.
    return -(-(room.documents + 1) // 4) * 4
