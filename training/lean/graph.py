"""A whole micro-batch as one CUDA graph: forward, backward and the gradients' sums, launched by one call.

At 4,096 tokens a micro-batch is some 6,000 kernels, each of which takes the host 40 to 60 us to launch; the card needs half of that. A graph is bound
to what it was captured with: shapes, the memory of its inputs, of the masters, of the copies that the kernels read, and of the gradients.

The copies are written by a graph of their own, once after each optimizer step. Shape letters: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kernels.adapter import optimizer_steps
from training import experts

_WARM_UP = 2
Results = Callable[[dict[str, Any]], tuple[Tensor, ...]]
"""Of a batch: the loss, then whatever else is wanted of it."""
_COUNTS = ("livery_calls", "livery_adapted", "livery_trained")


class Recorder(Protocol):
    """What makes a piece of work repeatable."""

    def warm_up(self, work: Callable[[], None]) -> None:
        """Do it once, for real."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Returns what does it again, with the memory that `work` used now. Whether it is done now, too, is not said."""


class CudaGraphs:
    """CUDA graphs of one memory pool: they are never replayed at the same time, and so may use each other's."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: what the allocator keeps for a stream, no other can use.
        self._aside = torch.cuda.Stream()

    def warm_up(self, work: Callable[[], None]) -> None:
        self._aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._aside):
            work()
        torch.cuda.current_stream().wait_stream(self._aside)
        torch.cuda.synchronize()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        # A data loader's thread, or one that looks after the card, may go on meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph.replay


class MicroBatchGraph:
    """`graph(batch)` adds the gradients of `results_of(batch)[0]` to every trainable parameter's .grad, and returns the results.

    Every batch must have the shapes of the one it was captured with; what is no tensor is taken from that one. Results are overwritten by the next
    call. Gradients lie in memory of the graph's own: after an optimizer step they are zeroed and put in place, whatever the step left there.
    To be captured between two steps, while gradients are None or of no worth. RuntimeError where something in the micro-batch waits for the host.
    """

    def __init__(
        self, model: nn.Module, results_of: Results, batch: Mapping[str, Any], recorder: Recorder | None = None
    ) -> None:
        recorder = recorder or CudaGraphs()
        self._wrappers = [wrapper for _, wrapper in experts.outer_wrappers(model)]
        self._batch = {name: each.clone() if isinstance(each, Tensor) else each for name, each in batch.items()}
        self._trainable = [each for each in model.parameters() if each.requires_grad]
        self._places = [each.data_ptr() for each in self._trainable]
        # Before anything runs: put into what a forward pass has left free, each would keep a large block from being given back.
        self._grads = [torch.zeros_like(each) for each in self._trainable]
        self._results: tuple[Tensor, ...] = ()

        def work() -> None:
            results = results_of(self._batch)
            results[0].backward()  # type: ignore[no-untyped-call]
            self._results = tuple(each.detach() for each in results)

        self._put_gradients()
        before = self._counts()
        try:
            for _ in range(_WARM_UP):
                recorder.warm_up(work)
            self._renew = recorder.record(lambda: _renew_copies(model))
            warm = self._counts()
            self._replay = recorder.record(work)
            self._ran = [
                [now - then for now, then in zip(*each, strict=True)] for each in zip(self._counts(), warm, strict=True)
            ]
        finally:
            # None of it trained, whether it comes to a graph or not.
            self._set_counts(before)
        # Held, since whoever kept them may make others: an adapter that is scaled otherwise for a while gets copies of its own.
        self._read = [tensor for copies in _copies(model) for tensor in copies.kept]
        self._steps = optimizer_steps()
        self._renew()
        self._put_gradients()

    @property
    def fits_model(self) -> bool:
        """False once a master's memory is another than it was: then only a new graph will do."""
        return all(each.data_ptr() == place for each, place in zip(self._trainable, self._places, strict=True))

    def __call__(self, batch: Mapping[str, Any]) -> tuple[Tensor, ...]:
        self._begin()
        for name, mine in self._batch.items():
            if not isinstance(mine, Tensor):
                continue
            if batch[name].shape != mine.shape or batch[name].dtype != mine.dtype:
                raise ValueError(
                    f"{name}: {batch[name].dtype} {list(batch[name].shape)}; the graph was captured with {mine.dtype} {list(mine.shape)}"
                )
            mine.copy_(batch[name], non_blocking=True)
        self._replay()
        # What a replay runs, Python does not see: whoever counts forwards of the experts must hear of it.
        for wrapper, ran in zip(self._wrappers, self._ran, strict=True):
            for name, more in zip(_COUNTS, ran, strict=True):
                setattr(wrapper, name, getattr(wrapper, name) + more)
        return self._results

    def _begin(self) -> None:
        """After an optimizer step, new copies of the masters and gradients of nothing."""
        if self._steps != optimizer_steps():
            self._steps = optimizer_steps()
            self._renew()
            self._put_gradients()
        elif any(each.grad is not grad for each, grad in zip(self._trainable, self._grads, strict=True)):
            raise ValueError(
                "a parameter has another .grad than when the graph was captured; want one optimizer step, then the next micro-batches"
            )

    def _put_gradients(self) -> None:
        with torch.no_grad():
            torch._foreach_zero_(self._grads)
        for each, grad in zip(self._trainable, self._grads, strict=True):
            each.grad = grad

    def _counts(self) -> list[list[int]]:
        return [[getattr(wrapper, name) for name in _COUNTS] for wrapper in self._wrappers]

    def _set_counts(self, counts: list[list[int]]) -> None:
        for wrapper, each in zip(self._wrappers, counts, strict=True):
            for name, count in zip(_COUNTS, each, strict=True):
                setattr(wrapper, name, count)


def _renew_copies(model: nn.Module) -> None:
    for copies in _copies(model):
        copies.renew()


def _copies(model: nn.Module) -> Iterator[Any]:
    """Everything that holds the adapters in the kernels' dtype."""
    for module in model.modules():
        for inputs in module.__dict__.get("livery_inputs", {}).values():
            yield from inputs.copies()
    for parameter in model.parameters():
        kept = getattr(parameter, "livery_adapter", None)
        if kept is not None:
            yield kept
