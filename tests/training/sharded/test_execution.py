"""A model on a 4-bit base computes what transformers and PEFT compute on the same rounded weights: loss and every gradient, however it is spread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from tests.training.sharded.threads import on_ranks
from training import experts, lean
from training.contract.recipe import Adapters
from training.model import lora_config, lora_tensors
from training.sharded.loader import Base, load
from training.sharded.model import PackedLinear, assemble, routed, run_experts
from training.sharded.ranks import Alone, Ranks
from training.sharded.storage import Matrix, SharedHost
from training.sharded.streaming import Ahead, Layers, Resident, from_host, gathered

CPU = torch.device("cpu")
TOKENS = 24
# A model without memory is made under a patch of torch itself, which threads would share; ranks are processes.
_ONE_AT_A_TIME = threading.Lock()
GROUPS = {"qwen3_moe": ("attention", "routed_experts")}


def adapters_of(family: str) -> Adapters:
    groups = GROUPS.get(family, ("attention", "linear_attention", "shared_expert", "routed_experts"))
    return Adapters(rank=4, alpha=8, groups=groups)


def rows(count: int) -> Tensor:
    return torch.randint(0, 250, (count, TOKENS), generator=torch.Generator().manual_seed(5))


def fill_adapters(model: Any, first: int = 0) -> None:
    """The same numbers by name and expert whatever part of the experts is here; `first` is the first of them."""
    for which in ("lora_A", "lora_B"):
        for _, name, tensor in lora_tensors(model, which):
            generator = torch.Generator().manual_seed(sum(name.encode()) % 2**31)
            owner = model.get_submodule(name.rpartition(".")[0])
            whole = getattr(owner, "livery_whole", getattr(owner, "num_experts", 1))
            shape = list(tensor.shape)
            axis = 0 if which == "lora_A" else 1
            shape[axis] = shape[axis] // getattr(owner, "num_experts", 1) * whole
            values = torch.randn(shape, generator=generator) * 0.1
            with torch.no_grad():
                tensor.copy_(part_of(values, which, first, getattr(owner, "num_experts", 1), whole))


def part_of(values: Tensor, which: str, first: int, mine: int, whole: int) -> Tensor:
    """Of a whole A [E·R, X] or B [O, R·E], the part of the experts [first, first + mine)."""
    if mine == whole:
        return values
    if which == "lora_A":
        return values.view(whole, -1, values.shape[1])[first : first + mine].flatten(0, 1)
    return values.view(values.shape[0], -1, whole)[:, :, first : first + mine].flatten(1)


def gradients(model: Any) -> dict[str, Tensor]:
    found = {}
    for which in ("lora_A", "lora_B"):
        for _, name, tensor in lora_tensors(model, which):
            assert tensor.grad is not None, name
            found[name] = tensor.grad.detach().clone()
    return found


@pytest.fixture(scope="module")
def reference(model: Path, family: str) -> Callable[[int], tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of stock PEFT on the rounded weights, over so many rows."""
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    base = load(model, device=CPU, dtype=torch.float32)
    with torch.no_grad():
        for name, room in base.matrices.items():
            if isinstance(room, Matrix):
                rounded.get_parameter(name).copy_(room.dequantise(torch.float32))
        for (_, module), layer in zip(routed(rounded, family), base.experts, strict=True):
            layer.gate_up.dequantise(module.gate_up_proj)
            layer.down.dequantise(module.down_proj)
    peft = get_peft_model(rounded.requires_grad_(False), lora_config(adapters_of(family), family))
    fill_adapters(peft)

    def of(count: int) -> tuple[float, dict[str, Tensor]]:
        peft.zero_grad()
        losses = [peft(input_ids=row[None], labels=row[None]).loss for row in rows(count)]
        loss = torch.stack(losses).mean()
        loss.backward()
        return float(loss.detach()), gradients(peft)

    return of


def build(path: Path, family: str, base: Base, layers: Layers, ranks: Ranks, groups: Adapters | None = None) -> Any:
    with _ONE_AT_A_TIME:
        bare = assemble(base, AutoConfig.from_pretrained(path), family=family, dtype=torch.float32, device=CPU)
        model = get_peft_model(bare, lora_config(groups or adapters_of(family), family))
    experts.install(model)
    for _, module in model.named_modules():
        if hasattr(module, "num_experts"):
            module.livery_whole = base.inventory.shape.experts
    inner = experts._GroupedLayer(experts.torch_grouped_mm)
    assert run_experts(model, layers, inner, base, ranks, family) == base.inventory.shape.layers
    assert lean.install(model).left == {}, "packed linear layers are part of it"
    fill_adapters(model, base.first)
    return model


def layers_of(way: str, base: Base, ranks: Ranks, host: SharedHost | None) -> Layers:
    shape = base.inventory.shape
    if way == "resident":
        return Resident(base.experts)
    if way == "host":
        assert host is not None
        return from_host(list(host.layers()), shape, CPU)
    if way == "host, some staying":
        assert host is not None
        return from_host(list(host.layers()), shape, CPU, stay=2)
    return gathered(base.experts, shape, ranks, CPU)


def close(seen: Tensor, wanted: Tensor) -> bool:
    """Relative to the whole tensor: float32 sums in another order."""
    return float((seen - wanted).norm()) <= 1e-5 * float(wanted.norm()) + 1e-9


@pytest.mark.parametrize(
    ("way", "checkpointing"),
    [("resident", False), ("resident", True), ("host", True), ("host, some staying", True), ("all_gather", True)],
    ids=["resident-kept", "resident", "host", "host-staying", "all_gather"],
)
def test_one_rank_has_the_loss_and_every_gradient_of_stock_peft(
    model: Path, family: str, reference: Any, way: str, checkpointing: bool
) -> None:
    from training.sharded.inventory import read_inventory

    host = SharedHost(read_inventory(model).shape) if way.startswith("host") else None
    base = load(model, device=CPU, dtype=torch.float32, into=list(host.layers()) if host else None)
    layers = layers_of(way, base, Alone(), host)
    ours = build(model, family, base, layers, Alone())
    if checkpointing:
        ours.train()
        lean.set_recompute(ours, "full")
    losses = []
    for row in rows(2):  # one after the other, as micro-batches are
        loss = ours(input_ids=row[None], labels=row[None], use_cache=False).loss / 2
        loss.backward()
        losses.append(float(loss.detach()))
    wanted, expected = reference(2)
    assert sum(losses) == pytest.approx(wanted, rel=2e-6)
    for name, grad in gradients(ours).items():
        assert close(grad, expected[name]), name
    if isinstance(layers, Ahead):
        first = 0 if "staying" in way else 1
        assert layers.unforeseen == first, "the very first layer, if it moves; every other was under way"


@pytest.mark.parametrize(("size", "way"), [(2, "all_gather"), (4, "all_gather"), (4, "host")])
def test_ranks_with_a_part_of_the_experts_each_have_the_same_gradients(
    model: Path, family: str, reference: Any, size: int, way: str
) -> None:
    from training.sharded.inventory import read_inventory

    host = SharedHost(read_inventory(model).shape) if way == "host" else None

    def work(ranks: Any) -> tuple[float, dict[str, Tensor], int, int]:
        into = list(host.layers()) if host else None
        base = load(model, device=CPU, dtype=torch.float32, ranks=ranks, into=into)
        ours = build(model, family, base, layers_of(way, base, ranks, host), ranks)
        row = rows(size)[ranks.rank]
        loss = ours(input_ids=row[None], labels=row[None], use_cache=False).loss
        loss.backward()
        return float(loss.detach()), gradients(ours), base.first, base.last

    found = on_ranks(size, work)
    wanted, expected = reference(size)
    assert sum(loss for loss, *_ in found) / size == pytest.approx(wanted, rel=2e-6)
    E = found[-1][3]
    for name, whole in expected.items():
        which = name.rpartition(".")[2]
        if ".experts" in name:
            for _, grads, first, last in found:
                assert close(grads[name], part_of(whole, which, first, last - first, E)), name
        else:
            assert close(torch.stack([grads[name] for _, grads, *_ in found]).mean(0), whole), name


def test_a_base_without_adapters_on_its_experts_computes_too(model: Path, family: str) -> None:
    base = load(model, device=CPU, dtype=torch.float32)
    both = []
    for groups in (adapters_of(family), Adapters(rank=4, alpha=8, groups=("attention",))):
        ours = build(model, family, base, Resident(base.experts), Alone(), groups)
        with torch.no_grad(), ours.disable_adapter():
            both.append(ours(input_ids=rows(1), use_cache=False).logits)
    assert torch.equal(*both)


def test_a_packed_weight_that_is_read_past_us_gives_no_number(model: Path, family: str) -> None:
    """lesson: a weight that is not there must not look like zeros."""
    base = load(model, device=CPU, dtype=torch.float32)
    ours = assemble(base, AutoConfig.from_pretrained(model), family=family, dtype=torch.float32, device=CPU)
    weights = [module.weight for module in ours.modules() if isinstance(module, PackedLinear)]
    weights += [parameter for _, module in routed(ours, family) for parameter in module.parameters()]
    assert all(bool(weight.isnan().all()) for weight in weights)
    assert all(weight.untyped_storage().nbytes() == 4 for weight in weights)
    linear = next(module for module in ours.modules() if isinstance(module, PackedLinear))
    x = torch.ones(1, linear.in_features)
    assert bool(nn.functional.linear(x, linear.weight).isnan().all()) and bool(linear(x).isfinite().all())


def test_what_a_forward_unpacked_is_gone_before_the_recomputation(model: Path, family: str) -> None:
    base = load(model, device=CPU, dtype=torch.float32)
    alive: list[int] = []
    ours = build(model, family, base, _Counting(base, alive), Alone())
    ours.train()
    lean.set_recompute(ours, "full")
    row = rows(1)
    loss = ours(input_ids=row, labels=row, use_cache=False).loss
    forward = len(alive)
    loss.backward()
    assert forward == base.inventory.shape.layers and len(alive) == 2 * forward
    assert sum(isinstance(module, nn.Linear) for module in ours.modules())


class _Counting(Resident):
    def __init__(self, base: Base, asked: list[int]) -> None:
        super().__init__(base.experts)
        object.__setattr__(self, "asked", asked)

    def use(self, index: int) -> Any:
        self.asked.append(index)  # type: ignore[attr-defined]
        return super().use(index)
