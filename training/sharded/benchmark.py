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
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from training import launch, lean, parts
from training.benchmark import CannotMeasure, machine
from training.contract.manifest import RESUME
from training.contract.recipe import Recipe, parse_recipe
from training.contract.shapes import QWEN3_235B, QWEN36_35B, ModelShape
from training.lean.host_inputs import HostInputs
from training.model import lora_config, lora_tensors
from training.phases.lean_trainer import install_head
from training.sharded import adapters, resume, stand_in, start
from training.sharded.company import Company
from training.sharded.loader import load
from training.sharded.model import assemble
from training.sharded.ranks import current
from training.sharded.start import Held
from training.sharded.streaming import from_host
from training.sharded.synthetic import config_of, random_base, random_host_base, with_layers, write_checkpoint
from training.sharded.trainer import adapt, factors, placed
from training.tiny import datasets, make_tokenizer

SCHEMA = 1
_STAND_IN_LAYERS = (1, 3)
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
    stay: tuple[int, ...]
    """Layers that stay on the card where the rest comes from host memory: for each size, or for all."""
    cap_gib: float
    inputs_in_host: bool
    stand_in: bool
    save: bool
    load_layers: int
    tiny: bool


def measure(setting: Setting) -> dict[str, Any]:
    """Every way at every size, on this process's card and with its crew. Collective."""
    ranks = current()
    device = torch.device("cpu") if setting.tiny else torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    if setting.cap_gib and not setting.tiny:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, setting.cap_gib * 2**30 / total), device)
    document: dict[str, Any] = {"schema": SCHEMA, "what": "sharded", "gpus": ranks.size, "steps": []}
    say = print if ranks.rank == 0 else (lambda *_, **__: None)
    began = time.monotonic()
    bench = _Bench(setting, ranks, device)
    document["held_s"] = round(time.monotonic() - began, 1)
    say(f"  a random base held: {document['held_s']} s", flush=True)
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
        self.setting, self.ranks, self.device = setting, ranks, device
        self.recipe = recipe_of(setting, ranks.size)
        self._dtype = getattr(torch, self.recipe.model.dtype)
        self._whole: list[Any] = []
        self._staying = 0
        self._home = HostInputs(device) if setting.inputs_in_host else None
        self.held: Any = self._hold(self.ways()[0])
        self._trainer: Any = None
        self._model: tuple[str, Any] | None = None

    def ways(self) -> tuple[str, ...]:
        cards = "all_gather" if self.ranks.size > 1 else "resident"
        return self.setting.ways or (cards, "host")

    def step(self, way: str, tokens: int) -> dict[str, Any]:
        """Seconds of an optimizer step of so many tokens a card, and what it took."""
        self.clear()
        stay = self._let_stay(tokens) if way == "host" and self._whole else 0
        model = self._model_of(way)
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
            "layers_staying": stay,
            "inputs_in_host_gb": round(self._home.bytes / 1e9, 2) if self._home else 0.0,
            "step_s": round(middle, 4),
            "step_s_all": [round(each, 4) for each in seconds],
            "tokens_per_s": round(tokens * self.ranks.size / middle, 1),
            "layer_ms": round(middle / self.setting.shape.layers * 1e3, 2),
            "peak_gib": round(highest / 2**30, 2),
            "unforeseen": getattr(layers, "unforeseen", 0),
            "asked": getattr(layers, "asked", 0),
            "loss": loss,
        }

    def _model_of(self, way: str) -> Any:
        """One a way, its gradients gone: drawing the adapters takes longer than many steps."""
        if self._model is None or self._model[0] != way:
            self._model = None
            self.clear()
            self.held.switch(way)
            self._model = way, self._fresh(self.held, self.setting.shape)
        self._model[1].zero_grad(set_to_none=True)
        return self._model[1]

    def _let_stay(self, tokens: int) -> int:
        """How many layers stay on the card at this size, and have them there."""
        stay = dict(zip(self.setting.tokens, itertools.cycle(self.setting.stay or (0,)), strict=False))[tokens]
        if stay != self._staying:
            self.held.layers = from_host(self._whole, self.setting.shape, self.device, stay)
            self._staying = stay
            if self._model:
                start.run(self._model[1], self.recipe)
        return stay

    def saved(self) -> dict[str, Any]:
        """The last model's adapter and resume file: seconds, bytes, and what the host's memory grew by at most."""
        trainer = self._trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        folder = Path(self._share(tempfile.mkdtemp(prefix="livery-save-")))
        found = {}
        family, named = self.recipe.model.family, {"base": "random", "ranks": self.ranks}
        for what, write in {
            "fused": lambda at: adapters.save(at, factors(trainer.model), self.recipe.adapters, family, **named),
            "per_expert": lambda at: adapters.save(
                at,
                factors(trainer.model),
                self.recipe.adapters,
                family,
                layout="per_expert",
                dtype=torch.bfloat16,  # it is what serving engines load
                **named,
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
        if self.ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        return found

    def loaded(self) -> dict[str, Any]:
        """A checkpoint of a few layers, written here and so in the page cache: from its files, and from the NF4 cache that this leaves beside it."""
        shape = with_layers(self.setting.shape, self.setting.load_layers)
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
        self.held = self._model = None
        self._whole = []
        self.clear()

    def stand_in(self) -> dict[str, Any]:
        """Milliseconds a layer of per-module pageable offload at the middle size, and how often ours goes into that."""
        tokens = 8192 if 8192 in self.setting.tokens else self.setting.tokens[len(self.setting.tokens) // 2]
        self.let_go()
        times = []
        for layers in _STAND_IN_LAYERS:
            shape = with_layers(self.setting.shape, layers)
            base, host, whole = random_host_base(shape, layers, self.ranks, self.device, self._dtype)
            held = Held(base, self.ranks, self.device, from_host(whole, shape, self.device), "not used", host)
            model = self._fresh(held, shape)
            stand_in.install(model, whole, shape, self.ranks)
            seconds, _, _ = _train(self.setting, self.recipe, model, tokens, self.ranks.size, steps=2)
            times.append(statistics.median(seconds))
            del model, held, base, host, whole
            self.clear()
        layer_ms = (times[1] - times[0]) / (_STAND_IN_LAYERS[1] - _STAND_IN_LAYERS[0]) * 1e3
        return {"tokens_a_card": tokens, "layer_ms": round(layer_ms, 1), "steps_s": [round(each, 3) for each in times]}

    def clear(self) -> None:
        self._trainer = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _hold(self, way: str) -> Held:
        """A random base of the measured shape, as `start` would hold it."""
        shape, place = self.setting.shape, (self.ranks, self.device)
        if way != "host":
            base = random_base(shape, *place, self._dtype)
            return Held(base, *place, start.from_cards(base, *place), "measured")
        base, host, whole = random_host_base(shape, self.setting.host_layers or shape.layers, *place, self._dtype)
        self._whole = whole
        return Held(base, *place, from_host(whole, shape, self.device), "measured", host)

    def _fresh(self, held: Any, shape: ModelShape) -> Any:
        """A model with adapters, its lora_B not zero: a gradient of lora_A that is exactly zero would be cheaper than a real one."""
        bare = assemble(held.base, config_of(shape), family=shape.family, dtype=self._dtype, device=self.device)
        bare.livery_held = held
        model = get_peft_model(bare, lora_config(self.recipe.adapters, shape.family))
        start.begin_adapters(model, self.recipe)
        start.install(model, self.recipe)
        lean.set_recompute(model, "full")
        lean.keep_inputs(model, self._home)
        # What every process has whole must be the same on all.
        alike, own = (torch.Generator(self.device).manual_seed(seed) for seed in (0, 1 + self.ranks.rank))
        with torch.no_grad():
            for _, _, tensor in lora_tensors(model, "lora_B"):
                tensor.normal_(0, 1e-3, generator=own if parts.part_of(tensor) else alike)
        return model

    def _collect(self, value: float) -> list[float]:
        if self.ranks.size == 1:
            return [value]
        whole = torch.empty(self.ranks.size, dtype=torch.float64, device=self.device)
        self.ranks.gather(whole, torch.tensor([value], dtype=torch.float64, device=self.device))
        return [float(each) for each in whole.tolist()]

    def _share(self, text: str) -> str:
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


def _train(
    setting: Setting, recipe: Recipe, model: Any, tokens: int, gpus: int, steps: int | None = None
) -> tuple[list[float], float, Any]:
    """Seconds of each optimizer step but the first, the last loss, and the trainer: TRL's, with the arguments that a phase gives it."""
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
            gradient_checkpointing=not model.livery_lean.whole,
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
        if recipe.optimizer == "adamw_8bit":
            _set_optimizer(trainer)
        install_head(trainer.model.get_base_model())
        trainer.remove_callback(PrinterCallback)
        clock = _Clock()
        trainer.add_callback(clock)
        trainer.train()
    loss = next(entry["loss"] for entry in reversed(trainer.state.log_history) if "loss" in entry)
    return clock.seconds[1:], loss, trainer


def _set_optimizer(trainer: Any) -> None:
    """torchao's own compiles a function for each shape in the first step, a minute and more of the 235B model's."""
    reason = "triton is not installed"
    if find_spec("triton") is not None:
        from training import optimizer

        reason = optimizer.adapt(trainer, clips=False)
    if reason:
        print(f"  the optimizer is torchao's own: {reason}", file=sys.stderr, flush=True)


class _Clock(TrainerCallback):
    """Seconds of each step, from an idle card to an idle card."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._began = _idle()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(_idle() - self._began)


def _idle() -> float:
    """The time when the card has nothing more to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


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
        f"{found['layers_staying']} layers staying, peak {found['peak_gib']:.2f} GiB, loss {found['loss']:.4f}, {found['unforeseen']} of {found['asked']} layers not sent for in time"
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
    parser.add_argument("--stay", nargs="*", type=int, default=[], help="layers that stay on the card, for each size")
    parser.add_argument(
        "--inputs-in-host", action="store_true", help="what layers are recomputed from waits in host memory"
    )
    parser.add_argument("--cap-gib", type=float, default=0.0, help="of each card's memory, as a smaller card has it")
    parser.add_argument("--stand-in", action="store_true", help="also per-module pageable offload")
    parser.add_argument("--load-layers", type=int, default=0, help="also write and load a checkpoint of so many layers")
    parser.add_argument("--save", action="store_true", help="also save and resume")
    parser.add_argument("--tiny", action="store_true", help="small shapes in float32 on the CPU")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser


def _setting(options: argparse.Namespace) -> Setting:
    if not options.tiny and torch.cuda.device_count() < options.gpus:
        raise CannotMeasure(
            f"{torch.cuda.device_count()} cards here, want {options.gpus}; `--tiny` shows that the benchmark itself works"
        )
    shape = MODELS["tiny" if options.tiny else options.model]
    if options.layers:
        shape = with_layers(shape, options.layers)
    return Setting(
        shape=shape,
        tokens=(64,) if options.tiny else tuple(options.tokens),
        row=32 if options.tiny else options.row,
        rank=4 if options.tiny else options.rank,
        steps=options.steps,
        optimizer=options.optimizer,
        ways=tuple(options.ways),
        host_layers=options.host_layers,
        stay=tuple(options.stay),
        cap_gib=options.cap_gib,
        inputs_in_host=options.inputs_in_host,
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
        Company(cards=not options.tiny)

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
