"""The whole step's parts that only a card has: nothing waits inside a micro-batch, and a graph of it adds the same gradients.

Run it on a machine with a card: `python -m pytest -m gpu tests/gpu/test_step_on_a_card.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import torch

from training.step_benchmark import Bench, Setting, Way

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
    pytest.mark.timeout(400),
]
TOKENS = 1024


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """Four layers of the real widths."""
    bench = Bench(Setting(layers=4, tokens=2 * TOKENS, micro=(TOKENS,), recompute="none"))
    bench.choose(Way("ours", TOKENS, "ours", lean=True))
    yield bench
    bench.drop_optimizer()


def gradients(bench: Bench) -> dict[str, torch.Tensor]:
    return {group: torch.cat([each.flatten() for each in parts]) for group, parts in bench._gradients().items()}


def require_close(these: dict[str, torch.Tensor], those: dict[str, torch.Tensor]) -> None:
    assert these.keys() == those.keys() and len(these) == 5
    for group, seen in these.items():
        assert float((seen - those[group]).norm() / those[group].norm()) < 0.02, group


@pytest.mark.parametrize("packed", [False, True])
def test_head_loss_and_layers_never_wait_for_the_host(bench: Bench, packed: bool) -> None:
    batch = bench.batches(TOKENS, packed, 1)[0]
    for _ in range(2):
        bench.loss_and_gradients(batch, TOKENS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bench.loss_and_gradients(batch, TOKENS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        bench.clear()


def test_a_replayed_graph_adds_the_gradients_of_the_batch_at_hand_by_the_masters_as_they_are(bench: Bench) -> None:
    from training.lean.graph import MicroBatchGraph

    first, second = bench.batches(TOKENS, False, 2)
    graph = MicroBatchGraph(bench.model, lambda batch: bench.loss(batch, TOKENS), first)
    assert all(float(each.grad.abs().max()) == 0.0 for each in bench.trainable if each.grad is not None)

    def both(run: Any) -> tuple[float, dict[str, torch.Tensor]]:
        losses = [run(batch).clone() for batch in (first, second)]
        return float(torch.stack(losses).sum()), gradients(bench)

    for _ in range(2):
        loss, seen = both(graph)
        for each in bench.trainable:
            each.grad = None
        eager_loss, wanted = both(lambda batch: bench.loss_and_gradients(batch, TOKENS))
        assert loss == pytest.approx(eager_loss, rel=2e-3)
        require_close(seen, wanted)
        with pytest.raises(ValueError, match=r"another \.grad"):
            graph(first)
        with torch.no_grad():
            for each, grad in zip(bench.trainable, graph._grads, strict=True):
                each.grad = grad
                if grad is not None:
                    grad.zero_()
                each.mul_(1.2)
    with pytest.raises(ValueError, match="the graph was captured with"):
        graph({name: each[:, :-1] if isinstance(each, torch.Tensor) else each for name, each in first.items()})
    bench.clear()
