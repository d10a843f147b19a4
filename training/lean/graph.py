"""A whole micro-batch as one CUDA graph: forward, backward and the gradients' sums, launched by one call.

At 4,096 tokens a micro-batch is some 8,000 kernels, each of which takes the host 40 to 60 us to launch; the card needs half of that. A graph is bound
to what it was captured with: shapes, the memory of its inputs, of the masters and of their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_WARM_UP = 2


class MicroBatchGraph:
    """`graph(batch)` adds the gradients of `loss_of(batch)` to every trainable parameter's .grad, and returns the loss.

    Every batch must have the shapes of the one it was captured with; what is no tensor is taken from that one. The loss is overwritten by the next call.
    Adapters are copied to the kernels' dtype inside the graph, so a replay sees what any optimizer wrote. Zero gradients in place between steps
    (`zero_grad(set_to_none=False)`): a new .grad would be one that the graph does not know. ValueError where that has happened.
    """

    def __init__(self, model: nn.Module, loss_of: Callable[[dict[str, Any]], Tensor], batch: Mapping[str, Any]) -> None:
        self._batch = {name: each.clone() if _on_card(each) else each for name, each in batch.items()}
        self._trainable = [each for each in model.parameters() if each.requires_grad]
        before = [None if each.grad is None else each.grad.clone() for each in self._trainable]
        self._warm_up(loss_of)
        self._graph = torch.cuda.CUDAGraph()
        _copy_anew(model)
        with torch.cuda.graph(self._graph):
            loss = loss_of(self._batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self._loss = loss.detach()
        # What was copied while capturing lies in the graph's own memory, and holds nothing before a replay.
        _copy_anew(model)
        self._grads = [each.grad for each in self._trainable]
        with torch.no_grad():
            for grad, old in zip(self._grads, before, strict=True):
                if grad is not None:
                    grad.zero_() if old is None else grad.copy_(old)

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        if any(each.grad is not grad for each, grad in zip(self._trainable, self._grads, strict=True)):
            raise ValueError(
                "a parameter has another .grad than when the graph was captured; want zero_grad(set_to_none=False)"
            )
        for name, mine in self._batch.items():
            if not _on_card(mine):
                continue
            if batch[name].shape != mine.shape or batch[name].dtype != mine.dtype:
                raise ValueError(
                    f"{name}: {batch[name].dtype} {list(batch[name].shape)}; the graph was captured with {mine.dtype} {list(mine.shape)}"
                )
            mine.copy_(batch[name], non_blocking=True)
        self._graph.replay()
        return self._loss

    def _warm_up(self, loss_of: Callable[[dict[str, Any]], Tensor]) -> None:
        """Everything is compiled, every .grad is there, and the allocator of the stream has seen it all."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                loss_of(self._batch).backward()  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize()


def _on_card(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _copy_anew(model: nn.Module) -> None:
    """Have every adapter copied to the kernels' dtype by the next forward, which while capturing makes it a part of the graph."""
    for copies in _linear_copies(model):
        copies._seen = ()
    for parameter in model.parameters():
        kept = getattr(parameter, "livery_adapter", None)
        if kept is not None:
            kept.renew()


def _linear_copies(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        for inputs in module.__dict__.get("livery_inputs", {}).values():
            yield from inputs._copies.values()
