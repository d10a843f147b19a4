"""Rows of any documents in one graph's room. A CPU has no graphs: here the same work is done again where a card replays it, in the same memory."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.conftest import recipe_of
from tests.training.lean.conftest import adapted
from training import experts, lean, packing
from training.contract.families import Family
from training.lean.graph import MicroBatchGraph, _copies
from training.lean.packed_graph import CHUNK, IGNORED, PackedGraphs, Room, inputs_of, places
from training.model import attach, load_base, lora_tensors

VOCABULARY = 96


class Again:
    """A recorder for a machine without a card."""

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        return work


def ends_of(lengths: list[int]) -> list[int]:
    return [0, *itertools.accumulate(lengths)]


@pytest.mark.parametrize("rows", [1, 3])
def test_room_for_rows_holds_any_of_them_together(rows: int) -> None:
    draw = random.Random(0)
    data = [[draw.randint(1, 200) for _ in range(draw.randint(1, 9))] for _ in range(40)]
    room = Room.for_rows(data, rows)
    assert room.tokens % CHUNK == 0
    for _ in range(300):
        ends = ends_of([each for row in draw.choices(data, k=rows) for each in row])
        assert room.holds(ends)
        listed = places(ends, room)
        assert listed.dtype == torch.int32
    longest = max(data, key=sum)
    assert not room.holds(ends_of([*longest * rows, room.tokens])), "more tokens"
    assert not room.holds(ends_of([1] * room.documents)), "more documents"
    assert not room.holds([0, room.longest + 1]), "a longer one"


def test_what_a_row_leaves_free_is_cut_as_long_as_its_documents() -> None:
    """One document of it would take the time of its square, where the last rows of an epoch fill a part of the room."""
    room = Room.for_rows([[100, 28], [64, 60]], 8)
    assert room.longest == 128 and room.tokens == 1024
    ends = places(ends_of([100, 28]), room)[: room.documents + 1]
    assert int(ends.diff().max()) <= room.longest and int(ends[-1]) == room.tokens
    ids = torch.zeros(1, room.tokens, dtype=torch.int64)
    assert inputs_of(ids, ids, places(ends_of([64]), room), room)["max_length_q"] == room.longest


def test_places_name_every_chunk_once_and_fill_up_with_one_of_a_document_without_tokens() -> None:
    room = Room.for_rows([[70, 64], [100, 20, 3]], 1)
    listed = places(ends_of([70, 64]), room)
    ends = listed[: room.documents + 1].tolist()
    first = -(-(room.documents + 1) // 4) * 4
    chunks = listed[first:].view(-1, 2).tolist()
    assert ends == [0, 70, 134, 192, 192, 192]
    assert len(chunks) == room.chunks
    assert chunks[:4] == [[0, 0], [0, 1], [1, 0], [2, 0]]
    assert all(each == [room.documents - 1, 0] for each in chunks[4:])
    assert ends[room.documents] == ends[room.documents - 1], "its last document has no tokens"


def test_the_lists_are_new_tensors_at_each_call() -> None:
    """flash-linear-attention keeps offsets by the identity of a list of ends; captured with a kept one, a graph would keep the first row's documents."""
    room = Room.for_rows([[5, 6]], 1)
    ids = torch.zeros(1, room.tokens, dtype=torch.int64)
    where = places([0, 5, 11], room)
    one, two = (inputs_of(ids, ids, where, room) for _ in range(2))
    assert one["cu_seq_lens_q"] is not two["cu_seq_lens_q"]
    assert one["position_ids"][0, :12].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 0]
    assert one["seq_idx"][0, :12].tolist() == [0] * 5 + [1] * 6 + [2]


@pytest.fixture
def model(tiny: Any) -> Any:
    recipe = recipe_of("tiny-moe")
    packing.install()
    model = attach(load_base(tiny / "model", recipe), recipe, None).train()
    with torch.no_grad():
        for _, _, tensor in lora_tensors(model, "lora_B"):
            tensor.normal_(0, 0.05, generator=torch.Generator().manual_seed(tensor.numel()))
    return model


def row_of(lengths: list[int], seed: int) -> tuple[Tensor, Tensor, list[int]]:
    ids = torch.randint(0, VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    ends = ends_of(lengths)
    labels[0, ends[:-1]] = IGNORED
    return ids, labels, ends


def results_of(model: Any) -> Callable[[dict[str, Any], Tensor], tuple[Tensor, ...]]:
    def found(inputs: dict[str, Any], items: Tensor) -> tuple[Tensor, ...]:
        logits = model(**{k: v for k, v in inputs.items() if k != "labels"}, use_cache=False).logits[0, :-1]
        return (torch.nn.functional.cross_entropy(logits, inputs["labels"][0, 1:], reduction="sum") / items,)

    return found


def plainly(model: Any, ids: Tensor, labels: Tensor, ends: list[int], items: Tensor) -> Tensor:
    documents = [ids[:, a:b] for a, b in itertools.pairwise(ends)]
    inputs = {**packing.packed_inputs(documents), "labels": labels}
    (loss,) = results_of(model)(inputs, items)
    loss.backward()
    return loss.detach()


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.train
def test_rows_of_other_documents_give_the_loss_and_every_gradient_that_they_give_alone(model: Any) -> None:
    data = [[9, 30, 4], [21, 1], [17, 17, 6, 3], [38]]
    rows = [row_of(each, seed) for seed, each in enumerate(data)]
    told: list[str] = []
    graphs = PackedGraphs(model, results_of(model), Room.for_rows(data, 1), told.append, Again)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.5)
    for _ in range(2):
        items = torch.tensor(50)
        losses = [graphs(*row, items) for row in rows]
        seen = gradients(model)
        optimizer.zero_grad(set_to_none=True)
        wanted = [plainly(model, *row, items) for row in rows]
        for name, gradient in gradients(model).items():
            torch.testing.assert_close(
                seen[name], gradient, rtol=2e-3, atol=2e-6, msg=lambda said, n=name: f"{n}: {said}"
            )
        assert [float(each[0]) for each in losses if each][-1] == pytest.approx(float(wanted[-1]), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert len(told) == 1 and "is one graph" in told[0]


@pytest.mark.train
@pytest.mark.parametrize("policy", ["experts_kept", "full"])
def test_every_family_gives_the_same_gradients_whatever_is_computed_again(family: Family, policy: str) -> None:
    model = adapted(family)
    assert lean.install(model).whole
    lean.set_recompute(model, policy)
    data = [[9, 30, 4], [1, 1, 60], [38]]
    rows = [row_of(each, seed) for seed, each in enumerate(data)]
    graphs = PackedGraphs(model, results_of(model), Room.for_rows(data, 1), lambda _: None, Again)
    assert all(graphs(*row, torch.tensor(50)) for row in rows)
    seen = gradients(model)
    model.zero_grad(set_to_none=True)
    for row in rows:
        plainly(model, *row, torch.tensor(50))
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-5, atol=1e-8, msg=lambda said, n=name: f"{n}: {said}")


@pytest.mark.train
def test_a_row_that_outgrows_the_room_is_said_and_goes_the_other_way_with_what_was_added(model: Any) -> None:
    small, large = row_of([9, 4], 0), row_of([130], 1)
    told: list[str] = []
    graphs = PackedGraphs(model, results_of(model), Room.for_rows([[9, 4]], 1), told.append, Again)
    items = torch.tensor(20)
    assert graphs(*small, items) is not None
    before = gradients(model)
    assert graphs(*large, items) is None and graphs(*small, items) is None
    assert "130 tokens in 1 documents came up" in told[-1] and len(told) == 2
    assert all(torch.equal(each, before[name]) for name, each in gradients(model).items())


@pytest.mark.train
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (RuntimeError, "operation not permitted when stream is capturing"),
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
)
def test_what_cannot_be_captured_trains_without_and_leaves_no_gradient_and_no_count(
    model: Any, kind: type[RuntimeError], words: str
) -> None:
    class Refuses(Again):
        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            # A new one: pytest keeps its parameters, and an error keeps the frames, with the model in them, that it went through.
            raise kind(words)

    told: list[str] = []
    row, before = row_of([9, 4], 0), experts.calls(model, "trained")
    graphs = PackedGraphs(model, results_of(model), Room.for_rows([[9, 4]], 1), told.append, Refuses)
    assert graphs(*row, torch.tensor(20)) is None
    assert told == [f"not captured, {kind.__name__}: {words}; micro-batches are launched kernel by kernel from here on"]
    assert not gradients(model)
    assert experts.calls(model, "trained") == before, "the guard would take warming up for training"


@pytest.mark.train
def test_the_copies_that_a_graph_reads_stay_though_the_model_makes_others(model: Any) -> None:
    """Those of routed experts are made anew while the adapter is scaled otherwise, as the last checkpoint's probe does it."""
    row = row_of([9, 4], 0)
    graphs = PackedGraphs(model, results_of(model), Room.for_rows([[9, 4]], 1), lambda _: None, Again)
    graphs(*row, torch.tensor(20))
    read = [weakref.ref(tensor) for copies in _copies(model) for tensor in copies.kept]
    assert len(read) > 20
    for module in model.modules():
        for inputs in vars(module).get("livery_inputs", {}).values():
            inputs._copies.clear()
    gc.collect()
    assert all(each() is not None for each in read)


@pytest.mark.train
def test_a_replay_counts_as_the_forwards_that_it_runs(model: Any) -> None:
    """The guard wants each layer's experts to have run for every micro-batch, and a replay runs no Python."""

    class Silent(Again):
        def record(self, work: Callable[[], None]) -> Callable[[], None]:
            work()
            return lambda: None

    row = row_of([9, 4], 0)
    graphs = PackedGraphs(model, results_of(model), Room.for_rows([[9, 4]], 1), lambda _: None, Silent)
    before = experts.calls(model, "trained")
    for _ in range(3):
        graphs(*row, torch.tensor(20))
    assert {name: count - before[name] for name, count in experts.calls(model, "trained").items()} == dict.fromkeys(
        before, 3
    )


@pytest.mark.train
def test_masters_in_other_memory_want_another_graph(model: Any) -> None:
    row, told = row_of([9, 4], 0), list[str]()
    graphs = PackedGraphs(model, results_of(model), Room.for_rows([[9, 4]], 1), told.append, Again)
    items = torch.tensor(20)
    graphs(*row, items)
    for each in model.parameters():
        if each.requires_grad:
            each.data = each.data.clone() * 1.5
            each.grad = None
    assert graphs(*row, items) is not None and len(told) == 2
    seen = gradients(model)
    model.zero_grad(set_to_none=True)
    plainly(model, *row, items)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(seen[name], gradient, rtol=2e-3, atol=2e-6)


@pytest.mark.train
def test_a_gradient_that_somebody_replaced_within_a_step_is_refused(model: Any) -> None:
    lean.remove(model)
    row, items = row_of([9, 4], 0), torch.tensor(20)
    ids, labels, ends = row
    room = Room.for_rows([[9, 4]], 1)
    batch = {"ids": torch.nn.functional.pad(ids, (0, room.tokens - 13)), "where": places(ends, room)}
    labelled = torch.nn.functional.pad(labels, (0, room.tokens - 13), value=IGNORED)
    graph = MicroBatchGraph(
        model,
        lambda given: results_of(model)(inputs_of(given["ids"], labelled, given["where"], room), items),
        batch,
        Again(),
    )
    graph(batch)
    next(each for each in model.parameters() if each.requires_grad).grad = None
    with pytest.raises(ValueError, match=r"another \.grad"):
        graph(batch)
    torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.0).step()
    with pytest.raises(ValueError, match="the graph was captured with"):
        graph({name: each[..., :-1] for name, each in batch.items()})
