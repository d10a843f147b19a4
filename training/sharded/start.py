"""From a model folder and a recipe to a model on a 4-bit base that can be trained: load once a process, choose how the layers reach the card, put the
adapters on.

The packed base outlives the models that are built on it: each phase and each evaluation gets a model of its own, and reads nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from training import experts, parts
from training.contract.quantised import Hardware, QuantisedPlan, hardware_of
from training.contract.recipe import Recipe
from training.errors import ModelError
from training.experts import ADAPTER
from training.lean.host_inputs import HostInputs
from training.model import lora_tensors
from training.sharded import links
from training.sharded.host_memory import available_bytes
from training.sharded.inventory import read_inventory
from training.sharded.loader import Base, load
from training.sharded.model import absent, assemble, routed, run_experts
from training.sharded.plan import plan
from training.sharded.ranks import Ranks
from training.sharded.storage import LayerExperts, SharedHost, empty_layer, open_shared_host
from training.sharded.streaming import Layers, Resident, from_host, gathered

Way = str
"""`resident`, `host` or `all_gather`; see `training.contract.recipe.Execution`."""


@dataclass
class Held:
    """A loaded base and how its layers reach this rank's card."""

    base: Base
    ranks: Ranks
    device: torch.device
    layers: Layers
    reason: str
    """Why they do it this way."""
    host: SharedHost | None = None
    home: HostInputs | None = None
    """Where the layers' inputs wait for the backward pass, if not on the card."""

    def lines(self) -> list[str]:
        return [*self.base.report.lines(), f"experts: {self.layers.way}, {self.reason}"]

    def switch(self, way: Way) -> None:
        """Take the layers another way, from what is loaded: nothing is read again. Models built before keep theirs. HostMemoryError, or torch's own
        out-of-memory error, if there is no room. Collective."""
        if way == self.layers.way:
            return
        shape, ranks = self.base.inventory.shape, self.ranks
        if way == "host":
            self.host = _host_copy(self.base, ranks, self.device)
            whole = list(self.host.layers())
            mine = tuple(layer.experts(self.base.first, self.base.last) for layer in whole)
            self.base = replace(self.base, experts=mine)
            self.layers = from_host(whole, shape, self.device)
        else:
            mine = tuple(_on_card(layer, shape, self.device) for layer in self.base.experts)
            self.base, self.host = replace(self.base, experts=mine), None
            self.layers = from_cards(self.base, ranks, self.device)
        self.reason = "switched to"


_held: tuple[tuple[object, ...], Held] | None = None


def load_quantised(path: Path, recipe: Recipe, *, ranks: Ranks, device: torch.device) -> Any:
    """The frozen text class on the base of `path` in NF4, its base read only the first time in this process; `model.livery_held` says how it lies.
    Collective. CheckpointError, ModelError or HostMemoryError if it cannot be had."""
    global _held
    key = (path.resolve(), recipe.model.model_dump_json(), ranks, device)
    if _held is None or _held[0] != key:
        _held = None  # two do not fit
        _held = (key, _load(path, recipe, ranks, device))
    held = _held[1]
    dtype = getattr(torch, recipe.model.dtype)
    config = AutoConfig.from_pretrained(path)
    model = assemble(held.base, config, family=recipe.model.family, dtype=dtype, device=device)
    model.livery_held = held
    run(model, recipe)
    return model


def forget() -> None:
    """Let go of the base that this process keeps."""
    global _held
    _held = None


def begin_adapters(model: Any, recipe: Recipe) -> None:
    """Fresh adapters, the same whatever the number of processes: each lora_A by a seed of its own name, as PEFT draws it, each lora_B zero. And say of
    those of routed experts which part of them is here."""
    held: Held = model.livery_held
    if held.ranks.size > 1:
        _mark_parts(model, held)
    for _, name, tensor in lora_tensors(model, "lora_A"):
        seed = int.from_bytes(hashlib.sha256(f"{recipe.seed} {name}".encode()).digest()[:6], "big")
        whole = torch.empty(parts.whole_shape(tensor))
        bound = 1 / math.sqrt(whole.shape[1])  # kaiming_uniform_ with a = sqrt(5), which is PEFT's
        whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            tensor.copy_(parts.mine(tensor, whole))
    with torch.no_grad():
        for _, _, tensor in lora_tensors(model, "lora_B"):
            tensor.zero_()


def _mark_parts(model: Any, held: Held) -> None:
    experts_count = held.base.inventory.shape.experts
    for _, wrapper in experts.outer_wrappers(model):
        for link in experts.chain(wrapper):
            factors = link.lora_A[ADAPTER].weight, link.lora_B[ADAPTER].weight
            parts.mark(*factors, held.base.first, link.num_experts, experts_count, held.ranks)


def install(model: Any, recipe: Recipe, layer: experts.Layer | None = None) -> None:
    """Give every layer's routed experts their forward, what is best on this card, on weights unpacked for the call; and all around them ours.
    Collective."""
    experts.install(model, layer or experts.GROUPED)
    run(model, recipe, layer)
    from training import lean  # it needs triton, which a machine without a card may lack

    model.livery_lean = lean.install(model)
    if model.livery_held.device.type == "cuda":
        # Kept, what one layer unpacks would be kept of all.
        lean.set_recompute(model, "full")
        lean.keep_inputs(model, model.livery_held.home)


def run(model: Any, recipe: Recipe, layer: experts.Layer | None = None) -> None:
    """Let the routed experts of a model that `install` has seen run on the layers that its base has now. Collective."""
    held: Held = model.livery_held
    inner, choice = (layer, None) if layer else _inner(model, recipe)
    run_experts(model, held.layers, inner or experts.GROUPED, held.base, held.ranks, recipe.model.family)
    for _, wrapper in experts.outer_wrappers(model):
        wrapper.livery_choice = choice


def _load(path: Path, recipe: Recipe, ranks: Ranks, device: torch.device) -> Held:
    inventory = read_inventory(path)
    found = plan(inventory, recipe, _hardware(recipe, ranks, device)) if device.type == "cuda" else None
    way, reason = choose(recipe, ranks.size, found)
    options: dict[str, Any] = {
        "device": device,
        "dtype": getattr(torch, recipe.model.dtype),
        "ranks": ranks,
        "linears": recipe.model.linears,
        "use_cache": recipe.model.nf4_cache,
    }
    strategy = "host" if way == "host" else "all_gather"
    planned = next((option for option in found.options if option.strategy == strategy), None) if found else None
    home = None
    if planned and planned.inputs_in_host:
        home, reason = HostInputs(device), f"{reason}; layers' inputs wait in host memory"
    if way != "host":
        base = load(path, **options)
        return Held(base, ranks, device, from_cards(base, ranks, device), reason, home=home)
    host = open_shared_host(inventory.shape, ranks, device)
    whole = list(host.layers())
    base = load(path, into=whole, **options)
    if device.type == "cuda":
        host.register()
    stay = planned.staying_layers if planned else 0
    if stay:
        reason += f"; {stay} of {len(whole)} layers stay on the card"
    return Held(base, ranks, device, from_host(whole, inventory.shape, device, stay), reason, host, home)


def choose(recipe: Recipe, processes: int, found: QuantisedPlan | None) -> tuple[Way, str]:
    """How the layers shall reach the card, and why. The recipe's word if it has one; else the faster of what fits, by the plan `found` for this box's own
    links; None: there is no card. ModelError if nothing fits."""
    cards = "all_gather" if processes > 1 else "resident"
    if recipe.model.execution != "auto":
        return ("host" if recipe.model.execution == "host" else cards), "as the recipe says"
    if found is None:
        return cards, "the only memory there is"
    if found.chosen is None:
        raise ModelError(
            "the base fits no way: " + "; ".join((*found.refusals, *(f"would fit: {each}" for each in found.would_fit)))
        )
    measured = f"{found.hardware.host_gbs:.0f} GB/s from host memory" + (
        f", {found.hardware.link_gbs:.0f} GB/s between cards" if processes > 1 else ""
    )
    return ("host" if found.chosen.strategy == "host" else cards), f"the fastest that fits ({measured})"


def _hardware(recipe: Recipe, ranks: Ranks, device: torch.device) -> Hardware:
    """This box. The ranks measure together and agree, so that all choose alike. Collective."""
    seen = torch.tensor(
        [
            torch.cuda.get_device_properties(device).total_memory / 1e9,
            available_bytes() / 1e9,
            links.host_to_card_gbs(device, ranks),
            links.gather_gbs(device, ranks) if ranks.size > 1 else 0.0,
        ],
        dtype=torch.float64,
        device=device,
    )
    ranks.mean(seen)
    gpu_gb, host_gb, host_gbs, link_gbs = seen.tolist()
    known = hardware_of(recipe.box.tier, ranks.size, host_gb, name=torch.cuda.get_device_name(device))
    return replace(known, gpu_gb=gpu_gb, host_gbs=host_gbs, link_gbs=link_gbs or known.link_gbs)


def _inner(model: Any, recipe: Recipe) -> tuple[experts.Layer | None, Any]:
    """Our kernels where the card shows that they are right on it, at the shapes of whole layers."""
    held: Held = model.livery_held
    if held.device.type != "cuda" or recipe.model.dtype != "bfloat16":
        return None, None
    from training import kernel_layer  # it needs triton, which a machine without a card may lack

    shape = held.base.inventory.shape
    _, module = next(routed(model, recipe.model.family))
    whole = _Shapes(
        absent((shape.experts, 2 * shape.intermediate, shape.hidden), torch.bfloat16, held.device),
        module.act_fn,
        shape.experts,
    )
    chosen = kernel_layer.best(whole, shape.experts_per_token, recipe.adapters.rank)
    # Beside fetching and unpacking a layer, making the copies anew costs nothing; kept, they are half of the masters' memory again.
    return (kernel_layer.KernelLayer(chosen.plan, keep_copies=False) if chosen.plan else None), chosen


@dataclass(frozen=True)
class _Shapes:
    """What `kernel_layer.best` asks of a layer's experts."""

    gate_up_proj: torch.Tensor
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    num_experts: int


def from_cards(base: Base, ranks: Ranks, device: torch.device) -> Layers:
    """The layers of a base that lies on the cards: whole on one, or gathered. Collective."""
    if ranks.size == 1:
        return Resident(base.experts)
    # In a group of its own: the next layer's gathering must not wait for what this one's adapters send.
    return gathered(base.experts, base.inventory.shape, ranks.beside(), device)


def _host_copy(base: Base, ranks: Ranks, device: torch.device) -> SharedHost:
    host = open_shared_host(base.inventory.shape, ranks, device)
    for layer, mine in zip(host.layers(), base.experts, strict=True):
        for there, here in zip(layer.experts(base.first, base.last).buffers, mine.buffers, strict=True):
            there.copy_(here)
    ranks.barrier()
    if device.type == "cuda":
        host.register()
    return host


def _on_card(layer: LayerExperts, shape: Any, device: torch.device) -> LayerExperts:
    room = empty_layer(shape, layer.first, layer.last, device)
    for there, here in zip(room.buffers, layer.buffers, strict=True):
        there.copy_(here)
    return room
