"""A whole training step on a 4-bit base at full depth: real shapes, random weights, TRL's own SFT trainer.

    python -m training.sharded.benchmark --gpus 1 --ways host --tokens 8192 16384 --host-layers 2 --stand-in --save
    python -m training.sharded.benchmark --gpus 4 --cap-gib 76 --tokens 4096 8192 16384 --stand-in --save
    python -m training.sharded.benchmark --tiny --gpus 2

Each way of bringing the layers is measured on the same loaded base, switched without reading anything. The first step of each is left out. The stand-in is
what frameworks do: every expert's projection a module of its own in pageable host memory, fetched when it is called. It runs on few layers, and its time
a layer is the difference between two depths, so that the head counts in neither.

`--host-layers` keeps so many layers in host memory and hands them out in turn, where a machine has not the memory for all: the same bytes go over the bus.
Exit codes: 0 measured, 2 this machine cannot.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from training import launch
from training.contract.recipe import Recipe, parse_recipe
from training.contract.shapes import QWEN3_235B, QWEN36_35B, ModelShape

SCHEMA = 1
_STAND_IN_LAYERS = (1, 3)
_FILL = 64 << 20
_RECIPES = Path(__file__).parents[1] / "recipes"
_TINY = replace(
    QWEN3_235B,
    hidden=64,
    vocabulary=512,
    attention_layers=3,
    heads=4,
    kv_heads=2,
    head_dim=16,
    experts=8,
    experts_per_token=2,
    intermediate=32,
)
MODELS = {"235b": QWEN3_235B, "35b": QWEN36_35B, "tiny": _TINY}


class CannotMeasure(RuntimeError):
    """This machine lacks what the measurement needs."""


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    shape: ModelShape
    tokens: tuple[int, ...]
    """Of one card's micro-batch, one an optimizer step."""
    row: int
    rank: int
    steps: int
    optimizer: str
    ways: tuple[str, ...]
    host_layers: int
    cap_gib: float
    stand_in: bool
    save: bool
    load_layers: int
    tiny: bool


def measure(setting: Setting) -> dict[str, Any]:
    """Every way at every size, on this process's card and with its crew. Collective."""
    import torch

    from training.sharded.ranks import current

    ranks = current()
    device = torch.device("cpu") if setting.tiny else torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if setting.cap_gib and not setting.tiny:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, setting.cap_gib * 2**30 / total), device)
    document: dict[str, Any] = {"schema": SCHEMA, "what": "sharded", "gpus": ranks.size, "steps": []}
    say = print if ranks.rank == 0 else (lambda *_, **__: None)
    bench = _Bench(setting, ranks, device)
    for way in bench.ways():
        for tokens in setting.tokens:
            try:
                found = bench.step(way, tokens)
            except torch.cuda.OutOfMemoryError as error:
                found = {"way": way, "tokens_a_card": tokens, "out_of_memory": str(error).split(". ")[0]}
                bench.clear()
            document["steps"].append(found)
            say(_step_line(found), flush=True)
    if setting.save:
        document["saved"] = bench.saved()
        say(f"  saved: {document['saved']}", flush=True)
    if setting.load_layers:
        bench.let_go()
        document["loaded"] = bench.loaded()
        say(f"  loaded: {document['loaded']}", flush=True)
    if setting.stand_in:
        document["stand_in"] = bench.stand_in()
        say(f"  stand-in: {document['stand_in']}", flush=True)
    return document


class _Bench:
    def __init__(self, setting: Setting, ranks: Any, device: Any) -> None:
        from training.sharded.start import Held

        self.setting, self.ranks, self.device = setting, ranks, device
        self.recipe = recipe_of(setting, ranks.size)
        self.held: Held = random_base(setting, setting.shape, ranks, device, self.ways()[0])
        self._model: Any = None

    def ways(self) -> tuple[str, ...]:
        cards = "all_gather" if self.ranks.size > 1 else "resident"
        return self.setting.ways or (cards, "host")

    def step(self, way: str, tokens: int) -> dict[str, Any]:
        """Seconds of an optimizer step of so many tokens a card, and what it took."""
        import torch

        self.clear()
        self.held.switch(way)
        model = self._fresh(self.held, self.setting.shape)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds, loss, self._trainer = _train(self.setting, self.recipe, model, tokens, self.ranks.size)
        middle = statistics.median(seconds)
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else 0
        highest = max(self._collect(peak))
        layers = self.held.layers
        return {
            "way": way,
            "tokens_a_card": tokens,
            "step_s": round(middle, 4),
            "step_s_all": [round(each, 4) for each in seconds],
            "tokens_per_s": round(tokens * self.ranks.size / middle, 1),
            "layer_ms": round(middle / self.setting.shape.layers * 1e3, 2),
            "peak_gib": round(highest / 2**30, 2),
            "unforeseen": getattr(layers, "unforeseen", 0),
            "asked": getattr(layers, "asked", 0),
            "loss": loss,
        }

    def saved(self) -> dict[str, Any]:
        """The last model's adapter and resume file: seconds, bytes, and what the host's memory grew by at most."""
        from training.contract.manifest import RESUME
        from training.sharded import adapters, resume
        from training.sharded.trainer import factors, placed

        trainer = self._trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        folder = Path(self._share(tempfile.mkdtemp(prefix="livery-save-")))
        found = {}
        family, named = self.recipe.model.family, {"base": "random", "ranks": self.ranks}
        for what, write in {
            "fused": lambda at: adapters.save(at, factors(trainer.model), self.recipe.adapters, family, **named),
            "per_expert": lambda at: adapters.save(
                at, factors(trainer.model), self.recipe.adapters, family, layout="per_expert", **named
            ),
            "resume": lambda at: resume.save(at / RESUME, placed(trainer.model), optimizer, ranks=self.ranks),
            "loaded": lambda at: resume.load(folder / "resume" / RESUME, placed(trainer.model), optimizer),
        }.items():
            place = folder / what
            place.mkdir(exist_ok=True)
            self.ranks.barrier()
            began, before = time.monotonic(), _anonymous_gb()
            with _HighWater() as water:
                write(place)
            self.ranks.barrier()
            size = sum(path.stat().st_size for path in place.iterdir())
            found[what] = {
                "seconds": round(time.monotonic() - began, 2),
                "gb": round(size / 1e9, 3),
                "host_growth_gb": round(max(self._collect(max(0.0, water.gb - before))), 3),
            }
        return found

    def loaded(self) -> dict[str, Any]:
        """A checkpoint of a few layers, written here and so in the page cache: from its files, and from the NF4 cache that this leaves beside it."""
        import torch

        from training.sharded.loader import load

        shape = _deep(self.setting.shape, self.setting.load_layers)
        folder = Path(self._share(tempfile.mkdtemp(prefix="livery-load-")))
        size = write_checkpoint(folder, shape, self.ranks, self.device)
        cuda, found = self.device.type == "cuda", {}
        for what in ("files", "cache"):
            self.clear()
            if cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            before, began = _anonymous_gb(), time.monotonic()
            with _HighWater() as water:
                dtype = getattr(torch, self.recipe.model.dtype)
                base = load(folder, device=self.device, dtype=dtype, ranks=self.ranks, use_cache=True)
            after = torch.cuda.memory_allocated(self.device) if cuda else 0
            peak = torch.cuda.max_memory_allocated(self.device) if cuda else 0
            seconds = max(self._collect(base.report.seconds))
            read = sum(self._collect(base.report.read_bytes))
            found[what] = {
                "seconds": round(seconds, 2),
                "seconds_with_writing_the_cache": round(max(self._collect(time.monotonic() - began)), 2),
                "from_cache": base.report.from_cache,
                "checkpoint_gb": round(size / 1e9, 3),
                "read_gb": round(read / 1e9, 3),
                "read_of_checkpoint": round(read / size, 4),
                "gbs": round(read / 1e9 / seconds, 2),
                "host_growth_gb": round(max(self._collect(water.gb - before)), 3),
                "gpu_peak_over_final_gb": round(max(self._collect((peak - after) / 1e9)), 3),
            }
            del base
        self.ranks.barrier()
        if self.ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return found

    def let_go(self) -> None:
        """Of the measured base: two do not fit."""
        self.held = None
        self.clear()

    def stand_in(self) -> dict[str, Any]:
        """Milliseconds a layer of per-module pageable offload at the middle size, and how often ours goes into that."""
        tokens = 8192 if 8192 in self.setting.tokens else self.setting.tokens[len(self.setting.tokens) // 2]
        self.clear()
        times = []
        for layers in _STAND_IN_LAYERS:
            shape = replace(self.setting.shape, attention_layers=layers, linear_layers=0)
            held = random_base(self.setting, shape, self.ranks, self.device, "host")
            model = self._fresh(held, shape)
            _install_pageable(model, held, self.recipe)
            seconds, _, _ = _train(self.setting, self.recipe, model, tokens, self.ranks.size, steps=2)
            times.append(statistics.median(seconds))
            del model, held
            self.clear()
        layer_ms = (times[1] - times[0]) / (_STAND_IN_LAYERS[1] - _STAND_IN_LAYERS[0]) * 1e3
        return {"tokens_a_card": tokens, "layer_ms": round(layer_ms, 1), "steps_s": [round(each, 3) for each in times]}

    def clear(self) -> None:
        import torch

        self._model = self._trainer = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fresh(self, held: Any, shape: ModelShape) -> Any:
        """A model with adapters, its lora_B not zero: a gradient of lora_A that is exactly zero would be cheaper than a real one."""
        import torch
        from peft import get_peft_model

        from training.model import lora_config, lora_tensors
        from training.sharded import start
        from training.sharded.model import assemble

        dtype = getattr(torch, self.recipe.model.dtype)
        bare = assemble(held.base, config_of(shape), family=shape.family, dtype=dtype, device=self.device)
        bare.livery_held = held
        model = get_peft_model(bare, lora_config(self.recipe.adapters, shape.family))
        start.begin_adapters(model, self.recipe)
        start.install(model, self.recipe)
        generator = torch.Generator(self.device).manual_seed(self.ranks.rank)
        with torch.no_grad():
            for _, _, tensor in lora_tensors(model, "lora_B"):
                tensor.normal_(0, 1e-3, generator=generator)
        return model

    def _collect(self, value: float) -> list[float]:
        import torch

        if self.ranks.size == 1:
            return [value]
        whole = torch.empty(self.ranks.size, dtype=torch.float64, device=self.device)
        self.ranks.gather(whole, torch.tensor([value], dtype=torch.float64, device=self.device))
        return [float(each) for each in whole.tolist()]

    def _share(self, text: str) -> str:
        import torch

        told = torch.tensor(list(text.encode().ljust(256, b"\0")), dtype=torch.uint8, device=self.device)
        self.ranks.broadcast(told, 0)
        return bytes(told.tolist()).rstrip(b"\0").decode()


def recipe_of(setting: Setting, gpus: int) -> Recipe:
    """The shipped recipe of the shape's model, with this setting's rank and optimizer and nothing but SFT."""
    import yaml

    data = yaml.safe_load((_RECIPES / "qwen3-235b-a22b-qlora.yaml").read_text())
    data["model"] |= {
        "family": setting.shape.family,
        "quantisation": "nf4",
        "dtype": "float32" if setting.tiny else "bfloat16",
    }
    data["adapters"] |= {"rank": setting.rank, "alpha": 2 * setting.rank}
    data["optimizer"] = setting.optimizer
    data["box"] |= {"gpus": gpus, "device": "cpu" if setting.tiny else "cuda"}
    if setting.tiny:
        data["box"]["tier"] = "rehearsal"
    data["phases"] = [
        phase | {"accumulation": gpus, "batch_size": 1} for phase in data["phases"] if phase["kind"] == "sft"
    ]
    data["evaluation"] = {"data": None}
    return parse_recipe(data, "benchmark")


def random_base(setting: Setting, shape: ModelShape, ranks: Any, device: Any, way: str) -> Any:
    """A base of that shape with random codes, as `start` would hold it."""
    import torch

    from training.sharded import start
    from training.sharded.loader import Base, Report
    from training.sharded.ranks import share
    from training.sharded.storage import empty_layer, open_shared_host
    from training.sharded.streaming import from_host

    inventory = inventory_of(shape)
    first, last = share(shape.experts, ranks)
    host, whole = None, []
    if way == "host":
        kept = min(setting.host_layers or shape.layers, shape.layers)
        host = open_shared_host(_deep(shape, kept), ranks, device)
        distinct = list(host.layers())
        for layer in distinct:
            _fill(layer.experts(first, last))
        ranks.barrier()
        if device.type == "cuda":
            host.register()
        whole = list(itertools.islice(itertools.cycle(distinct), shape.layers))
        mine = tuple(layer.experts(first, last) for layer in whole)
    else:
        mine = tuple(empty_layer(shape, first, last, device) for _ in range(shape.layers))
        for layer in mine:
            _fill(layer)
    dtype = torch.float32 if setting.tiny else torch.bfloat16
    report = Report({}, 0, 0, 0, 0.0, False)
    base = Base(inventory, first, last, mine, _random_matrices(inventory, dtype, device), report)
    layers = from_host(whole, shape, device) if whole else start._from_cards(base, ranks, device)
    return start.Held(base, ranks, device, layers, "measured", host)


def inventory_of(shape: ModelShape) -> Any:
    """Of a checkpoint that nobody has written: one matrix an expert and projection."""
    from training.sharded.headers import TensorAt
    from training.sharded.inventory import take_inventory, wanted_matrices

    kinds = kinds_of(shape)
    wanted = {name: size for name, (_, size) in wanted_matrices(shape, kinds).items()}
    for layer, expert in itertools.product(range(shape.layers), range(shape.experts)):
        base = f"model.layers.{layer}.mlp.experts.{expert}"
        wanted[f"{base}.gate_proj.weight"] = wanted[f"{base}.up_proj.weight"] = (shape.intermediate, shape.hidden)
        wanted[f"{base}.down_proj.weight"] = (shape.hidden, shape.intermediate)
    headers = {name: TensorAt(name, Path("none"), 0, 0, "BF16", size) for name, size in wanted.items()}
    return take_inventory(headers, shape, kinds)


def write_checkpoint(folder: Path, shape: ModelShape, ranks: Any, device: Any) -> int:
    """Random bf16 weights as transformers writes them, a file a layer; returns the bytes of their tensors. Collective."""
    from safetensors.torch import save_file

    from training.sharded.headers import INDEX
    from training.sharded.inventory import wanted_matrices

    H, I = shape.hidden, shape.intermediate  # noqa: E741  the legend's letters
    matrices = {name: size for name, (_, size) in wanted_matrices(shape, kinds_of(shape)).items()}
    weight_map = dict.fromkeys(matrices, "model-rest.safetensors")
    for layer in range(shape.layers):
        names = {
            f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight": (H, I) if part == "down" else (I, H)
            for expert in range(shape.experts)
            for part in ("gate", "up", "down")
        }
        weight_map |= dict.fromkeys(names, f"model-{layer:05d}.safetensors")
        if layer % ranks.size == ranks.rank:
            save_file(
                {name: _weights(size, device) for name, size in names.items()},
                folder / f"model-{layer:05d}.safetensors",
            )
    if ranks.rank == 0:
        save_file({name: _weights(size, device) for name, size in matrices.items()}, folder / "model-rest.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        (folder / "config.json").write_text(json.dumps(config_of(shape).to_dict()))
    ranks.barrier()
    numbers = sum(math.prod(size) for size in matrices.values()) + shape.expert_parameters
    return 2 * numbers


def _weights(size: tuple[int, ...], device: Any) -> Any:
    import torch

    return (torch.randn(size, device=device) * 0.02).to(torch.bfloat16).cpu()


def kinds_of(shape: ModelShape) -> tuple[str, ...]:
    if not shape.linear_layers:
        return ("full_attention",) * shape.layers
    return tuple("linear_attention" if (layer + 1) % 4 else "full_attention" for layer in range(shape.layers))


def config_of(shape: ModelShape) -> Any:
    """The text configuration that has this shape."""
    common = {
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocabulary,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.intermediate,
        "tie_word_embeddings": shape.tied,
    }
    if shape.family == "qwen3_moe":
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig(**common, rope_theta=5e6, decoder_sparse_step=1, mlp_only_layers=[])
    from transformers import Qwen3_5MoeTextConfig

    return Qwen3_5MoeTextConfig(**common, layer_types=list(kinds_of(shape)))


def _deep(shape: ModelShape, layers: int) -> ModelShape:
    return replace(shape, attention_layers=layers, linear_layers=0)


def _fill(layer: Any) -> None:
    """Random codes, and scales with which the weights have a deviation of about 0.02. A block of them again and again: only the bytes count."""
    import torch

    for packed in (layer.gate_up, layer.down):
        codes = torch.randint(
            0, 256, (min(_FILL, packed.packed.numel()),), dtype=torch.uint8, device=packed.packed.device
        )
        for start in range(0, packed.packed.numel(), codes.numel()):
            part = packed.packed[start : start + codes.numel()]
            part.copy_(codes[: part.numel()])
        packed.absmax.fill_(0.035)


def _random_matrices(inventory: Any, dtype: Any, device: Any) -> dict[str, Any]:
    import torch

    from training.sharded.inventory import quantisable
    from training.sharded.storage import Matrix, empty_packed

    torch.manual_seed(7)  # what every process has whole must be the same
    found: dict[str, Any] = {}
    for name, (group, at) in inventory.matrices.items():
        if quantisable(inventory.shape, group, name):
            room = Matrix(empty_packed(at.numbers, device), at.shape)
            room.values.packed.random_(0, 256)
            room.values.absmax.fill_(0.035)
            found[name] = room
        elif group == "norms":
            found[name] = torch.ones(at.shape, dtype=dtype, device=device)
        else:
            found[name] = torch.randn(at.shape, dtype=dtype, device=device) * 0.02
    return found


def _train(
    setting: Setting, recipe: Recipe, model: Any, tokens: int, gpus: int, steps: int | None = None
) -> tuple[list[float], float, Any]:
    """Seconds of each optimizer step but the first, the last loss, and the trainer: TRL's, with the arguments that a phase gives it."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    from training.sharded.trainer import adapt
    from training.tiny import datasets, make_tokenizer

    count, row = (steps or setting.steps) + 1, min(setting.row, tokens)
    rows = tokens // row
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, setting.shape.vocabulary, (count * rows * gpus, row), generator=generator).tolist()
    cuda = not setting.tiny
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=1,
            max_steps=count,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            router_aux_loss_coef=0.0,
            optim="adamw_torch_8bit" if recipe.optimizer == "adamw_8bit" else "adamw_torch_fused",
            bf16=cuda,
            use_cpu=not cuda,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            dataloader_pin_memory=cuda,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            max_length=row,
            seed=recipe.seed,
        )
        tokenizer = make_tokenizer(datasets())
        rows_of = Dataset.from_dict({"input_ids": ids})
        trainer = SFTTrainer(model, args=arguments, train_dataset=rows_of, processing_class=tokenizer)
        adapt(trainer, recipe)
        trainer.remove_callback(PrinterCallback)
        clock = _clock(cuda)
        trainer.add_callback(clock)
        trainer.train()
    loss = next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry)
    return clock.seconds[1:], loss, trainer


def _clock(cuda: bool) -> Any:
    import torch
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """From an idle card to an idle card."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            self._began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if cuda:
                torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self._began)

    return Clock()


def _install_pageable(model: Any, held: Any, recipe: Recipe) -> None:
    """Every layer's experts as frameworks offload them."""
    from training import experts
    from training.sharded.storage import LayerExperts, Packed

    wrappers = [wrapper for _, wrapper in experts.outer_wrappers(model)]
    for wrapper, layer in zip(wrappers, held.host.layers(), strict=True):
        # Copies in pageable memory, which is what the shared one is not.
        parts = [Packed(part.packed.clone(), part.absmax.clone()) for part in (layer.gate_up, layer.down)]
        wrapper.livery_layer = _Pageable(
            LayerExperts(layer.first, layer.last, *parts), held.base.inventory.shape, held.ranks
        )


class _Pageable:
    """A routed layer as 3·E small modules: each fetched from pageable memory when it is called, in the forward pass, in its recomputation and in the
    backward pass."""

    def __init__(self, layer: Any, shape: ModelShape, ranks: Any) -> None:
        self._layer, self._shape, self._ranks = layer, shape, ranks

    def __call__(self, experts: Any, hidden_TH: Any, expert_Tk: Any, weight_Tk: Any, active: Any) -> Any:
        import torch
        from torch import nn

        from training.sharded.execution import gather_adapter

        E, H, I = self._shape.experts, self._shape.hidden, self._shape.intermediate  # noqa: E741  the legend's letters
        dtype = hidden_TH.dtype
        up, down = (gather_adapter(active[name][0], self._ranks, dtype) for name in ("gate_up_proj", "down_proj"))
        A1, B1, A2, B2 = (each.to(dtype) for lora in (up, down) for each in (lora.a_ERX(), lora.b_EOR()))
        out = torch.zeros_like(hidden_TH)
        order = torch.argsort(expert_Tk.flatten(), stable=True)
        counts = torch.bincount(expert_Tk.flatten(), minlength=E).tolist()
        for expert, places in enumerate(order.split(counts)):
            if not len(places):
                continue
            token = places // expert_Tk.shape[1]
            x = hidden_TH[token]
            both = self._layer.gate_up.part(expert * 2 * I * H, 2 * I * H)
            halves = [_Fetched.apply(x, both.part(half * I * H, I * H), (I, H)) for half in (0, 1)]
            gate_up = torch.cat(halves, 1) + (x @ A1[expert].t()) @ B1[expert].t() * up.scaling
            h = nn.functional.silu(gate_up[:, :I]) * gate_up[:, I:]
            y = _Fetched.apply(h, self._layer.down.part(expert * H * I, H * I), (H, I))
            y = y + (h @ A2[expert].t()) @ B2[expert].t() * down.scaling
            out = out.index_add(0, token, y * weight_Tk.flatten()[places].unsqueeze(-1).to(dtype))
        return out


def _fetched() -> Any:
    import torch

    from training.sharded.storage import Matrix, Packed

    def fetch(values: Any, shape: tuple[int, int], like: Any) -> Any:
        there = Packed(values.packed.to(like.device), values.absmax.to(like.device))
        return Matrix(there, shape).dequantise(like.dtype)

    class Fetched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, values: Any, shape: tuple[int, int]) -> Any:
            ctx.values, ctx.shape = values, shape
            return x @ fetch(values, shape, x).t()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
            return grad @ fetch(ctx.values, ctx.shape, grad), None, None

    return Fetched


class _Lazy:
    """The autograd function, made when torch is needed first."""

    def apply(self, *arguments: Any) -> Any:
        self.apply = _fetched().apply  # type: ignore[method-assign]
        return self.apply(*arguments)


_Fetched = _Lazy()


class _HighWater:
    """The most anonymous memory that this process had inside the context, looked at every 20 ms."""

    def __enter__(self) -> _HighWater:
        import threading

        self.gb, self._over = _anonymous_gb(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            self.gb = max(self.gb, _anonymous_gb())


def _anonymous_gb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024 / 1e9
    return 0.0


def _step_line(found: dict[str, Any]) -> str:
    head = f"  {found['way']:<11} {found['tokens_a_card']:>6} tokens a card: "
    if "out_of_memory" in found:
        return head + f"does not fit ({found['out_of_memory']})"
    return head + (
        f"{found['step_s']:.3f} s a step, {found['tokens_per_s']:,.0f} tok/s, {found['layer_ms']:.1f} ms a layer, "
        f"peak {found['peak_gib']:.2f} GiB, loss {found['loss']:.4f}, {found['unforeseen']} of {found['asked']} layers not sent for in time"
    )


def _lines(document: dict[str, Any]) -> Iterator[str]:
    gpu = document.get("gpu")
    yield f"{document['gpus']} x {gpu['name'] if gpu else 'CPU'}; " + ", ".join(
        f"{name} {version}" for name, version in document["versions"].items()
    )
    for found in document["steps"]:
        yield _step_line(found)
    if stand_in := document.get("stand_in"):
        ours = [
            each["layer_ms"]
            for each in document["steps"]
            if each["tokens_a_card"] == stand_in["tokens_a_card"] and "layer_ms" in each
        ]
        ratio = f", {stand_in['layer_ms'] / min(ours):.1f} times ours" if ours else ""
        yield f"  pageable modules at {stand_in['tokens_a_card']} tokens a card: {stand_in['layer_ms']:.0f} ms a layer{ratio}"
    for what, facts in document.get("loaded", {}).items():
        yield (
            f"  from {what}: {facts['read_gb']:.2f} GB in {facts['seconds']:.1f} s ({facts['gbs']:.2f} GB/s), {facts['read_of_checkpoint']:.3f} of the "
            f"checkpoint's bytes, host memory +{facts['host_growth_gb']:.3f} GB a process, card's peak {facts['gpu_peak_over_final_gb']:.2f} GB over what stays"
        )
    for what, facts in document.get("saved", {}).items():
        yield f"  {what:<10} {facts['gb']:.2f} GB in {facts['seconds']:.1f} s, host memory +{facts['host_growth_gb']:.3f} GB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m training.sharded.benchmark", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--model", choices=("235b", "35b"), default="235b")
    parser.add_argument("--ways", nargs="*", choices=("host", "all_gather", "resident"), default=())
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192], help="of one card's micro-batch")
    parser.add_argument("--row", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3, help="that are timed")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--optimizer", choices=("adamw", "adamw_8bit"), default="adamw")
    parser.add_argument("--host-layers", type=int, default=0, help="distinct layers in host memory; 0: all")
    parser.add_argument("--cap-gib", type=float, default=0.0, help="of each card's memory, as a smaller card has it")
    parser.add_argument("--stand-in", action="store_true", help="also per-module pageable offload")
    parser.add_argument("--load-layers", type=int, default=0, help="also write and load a checkpoint of so many layers")
    parser.add_argument("--save", action="store_true", help="also save and resume")
    parser.add_argument("--tiny", action="store_true", help="small shapes in float32 on the CPU")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser


def _setting(options: argparse.Namespace) -> Setting:
    import torch

    if not options.tiny and torch.cuda.device_count() < options.gpus:
        raise CannotMeasure(
            f"{torch.cuda.device_count()} cards here, want {options.gpus}; `--tiny` shows that the benchmark itself works"
        )
    shape = MODELS["tiny" if options.tiny else options.model]
    if options.layers:
        shape = _deep(shape, options.layers)
    return Setting(
        shape=shape,
        tokens=tuple(64 for _ in (1,)) if options.tiny else tuple(options.tokens),
        row=32 if options.tiny else options.row,
        rank=4 if options.tiny else options.rank,
        steps=options.steps,
        optimizer=options.optimizer,
        ways=tuple(options.ways),
        host_layers=options.host_layers,
        cap_gib=options.cap_gib,
        stand_in=options.stand_in,
        save=options.save,
        load_layers=options.load_layers,
        tiny=options.tiny,
    )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(arguments)
    if options.gpus > 1 and "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as work:
            code, said = launch.run(
                [sys.executable, "-m", "training.sharded.benchmark", *arguments], options.gpus, Path(work)
            )
        print(said, file=sys.stderr) if said else None
        return code
    try:
        setting = _setting(options)
    except CannotMeasure as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    if options.gpus > 1:
        from training.sharded.company import Company

        Company(cards=not options.tiny)
    from training.benchmark import machine

    document = measure(setting) | machine()
    if int(os.environ.get("RANK", "0")) == 0:
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print("\n".join(_lines(document)), flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    ended = main()
    sys.stdout.flush()
    # Taking a process group down waits for the others.
    os._exit(ended)
