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


def test_a_peak_of_reserved_memory_does_not_hold_what_was_given_back_before(bench: Bench) -> None:
    gone = torch.empty(6_000_000_000, dtype=torch.uint8, device="cuda")
    del gone
    bench.reset_peak()
    held_gb = torch.cuda.memory_allocated() / 1e9
    bench.loss_and_gradients(bench.batches(TOKENS, False, 1)[0], TOKENS)
    peaks = bench.peaks()
    bench.clear()
    assert peaks["peak_gb"] is not None and peaks["peak_reserved_gb"] is not None
    assert held_gb < peaks["peak_gb"] <= peaks["peak_reserved_gb"] < held_gb + 6


@pytest.mark.parametrize("packed", [False, True])
def test_a_replayed_graph_adds_the_gradients_of_the_batch_at_hand_by_the_masters_as_they_are(
    bench: Bench, packed: bool
) -> None:
    """Packed, the rows have other documents than the one that was captured."""
    way = Way("ours", TOKENS, "ours", lean=True, packed=packed, graph=True)
    batches = bench.batches(TOKENS, packed, 3)
    graph = bench._run(way, batches, TOKENS)
    optimizer = torch.optim.SGD(bench.trainable, lr=0.0)

    def all_of(run: Any) -> tuple[float, dict[str, torch.Tensor]]:
        losses = [run(batch, TOKENS).clone() for batch in batches]
        return float(torch.stack(losses).sum()), gradients(bench)

    for _ in range(2):
        loss, seen = all_of(graph)
        bench.clear()
        eager_loss, wanted = all_of(bench.loss_and_gradients)
        assert loss == pytest.approx(eager_loss, rel=2e-3)
        require_close(seen, wanted)
        with torch.no_grad():
            for each in bench.trainable:
                each.mul_(1.2)
        # A fused optimizer writes past the version counters: its step is what the copies go by.
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    bench.clear()


def test_a_replay_never_waits_for_the_host(bench: Bench) -> None:
    batches = bench.batches(TOKENS, True, 2)
    graph = bench._run(Way("ours", TOKENS, "ours", lean=True, packed=True, graph=True), batches, TOKENS)
    graph(batches[0], TOKENS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            graph(batch, TOKENS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        bench.clear()
