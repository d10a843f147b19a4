"""A whole optimizer step of Qwen3.6-35B-A3B at full depth, real shapes and random weights: stock transformers and PEFT, the experts in grouped products,
and ours, on one model, one after another in one process.

Each way runs the same step: micro-batches of rows of 2,048 random tokens with a loss on each, clipping, AdamW with fp32 state on fp32 adapters. Its
learning rate is zero, so all ways see the same weights. Loops are driven directly; `trainer` runs ours under TRL's SFTTrainer.

Shape letters: B rows, T tokens.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from training import experts, lean, packing
from training.contract.flops import token_flops
from training.contract.memory import CONTEXT_GB, recompute_for
from training.contract.recipe import Adapters, Recipe, Recompute, parse_recipe
from training.contract.shapes import ModelShape, read_shape
from training.lean import blocks

ROW_TOKENS = 2048
CHECKED_LAYERS = 4
"""At 40 random layers two ways of plain torch agree to a cosine of 0.3 only: now and then a token goes to another expert, and then all after it differ."""
_CLIP = 1.0
_TOLERANCE = {"float32": (1e-4, 0.999), "bfloat16": (2e-3, 0.98)}
_PROFILED = "livery:"
Layer = Literal["peft", "grouped", "ours", "portable"]
Run = Callable[[Mapping[str, Any], int], Tensor]
"""Adds the gradients of a micro-batch; returns its loss over so many tokens of the whole step."""


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    layers: int = 40
    tokens: int = 32_768
    """Of one optimizer step."""
    micro: tuple[int, ...] = (4096, 16_384)
    """Tokens of a micro-batch: the first for what others do, the last for the best that fits."""
    rank: int = 32
    steps: int = 3
    device: str = "cuda"
    dtype: str = "bfloat16"
    tiny: bool = False
    recompute: Literal["auto"] | Recompute = "auto"
    peak_gb: float = 125.0
    """What `auto` may take of the card, the driver's own part left out."""
    ways: tuple[str, ...] = ()
    """Names; none = all."""
    trainer: bool = False
    seconds: float = float("inf")
    """After these no other way is begun, and none begins another step."""
    check: bool = True
    profile: bool = True

    @property
    def row(self) -> int:
        return min(ROW_TOKENS, *self.micro)


@dataclass(frozen=True)
class Way:
    """One way of making the step."""

    name: str
    micro: int
    layer: Layer
    lean: bool = False
    packed: bool = False
    graph: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {self.micro}"


def ways(setting: Setting) -> list[Way]:
    """What matters most first, for a run that has not the time for all."""
    small, large = setting.micro[0], setting.micro[-1]
    every = [
        Way("ours", large, "ours", lean=True),
        Way("ours-packed", large, "ours", lean=True, packed=True),
        Way("seed", small, "grouped"),
        Way("ours+graph", small, "ours", lean=True, graph=True),
        Way("stock", small, "peft"),
        Way("ours", small, "ours", lean=True),
        Way("seed", large, "grouped"),
        Way("experts", large, "ours"),
        Way("portable", large, "portable", lean=True),
    ]
    if setting.device == "cpu":
        plain = [replace(way, layer="grouped") if way.layer in ("ours", "portable") else way for way in every]
        every = [way for way in plain if not way.graph]
    once = list(dict.fromkeys(every))
    return [way for way in once if not setting.ways or way.name in setting.ways]


def measure(
    setting: Setting,
    tell: Callable[[str], None] = lambda line: None,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Every way's seconds, memory and shares; `ratio` only if ours and stock agree on the first layers. A way that does not fit the card or the time says
    so and no more. `keep` gets the document after each way."""
    began = time.perf_counter()
    bench = Bench(setting, until=began + setting.seconds)
    built_s = round(time.perf_counter() - began, 1)
    tell(f"built {bench.shape.parameters / 1e9:.2f} G weights, {bench.adapters / 1e9:.3f} G of adapters in {built_s} s")
    check = _checked(bench) if setting.check else {"passed": False, "left out": "--no-check"}
    tell(f"ours against stock in {CHECKED_LAYERS} layers, at {time.perf_counter() - began:.0f} s: {check}")
    found: dict[str, dict[str, Any]] = {}
    document: dict[str, Any] = {
        "setting": vars(setting) | {"row_tokens": setting.row},
        "built_s": built_s,
        "adapter_parameters": bench.adapters,
        "matmul_tflops": bench.peak_tflops,
        "gflop_a_token": round(bench.token_flop / 1e9, 2),
        "check": check,
        "ways": found,
    }

    def add(name: str, facts: dict[str, Any]) -> None:
        found[name] = facts
        tell(f"{name}, at {time.perf_counter() - began:.0f} s: {facts}")
        if check["passed"]:
            document["ratio"] = _ratios(found, setting)
        keep(document)

    for way in ways(setting):
        add(way.label, bench.measure(way))
    if setting.trainer:
        bench.drop_optimizer()
        add("trainer", bench.alone(lambda: under_trl(bench)))
    return document


def _checked(bench: Bench) -> dict[str, Any]:
    try:
        return bench.agreement()
    except RuntimeError as error:
        # A library that refuses this card: no ratio then, but the ways that run are still worth their time.
        bench.clear()
        return {"passed": False, "failed": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}


def lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The document for a person."""
    setting = document["setting"]
    yield (
        f"{setting['layers']} layers, rank {setting['rank']}, {setting['tokens']} tokens a step, median of {setting['steps']} steps; "
        f"{document['adapter_parameters'] / 1e9:.3f} G adapter parameters; {document['gflop_a_token']} GFLOP a token"
        + (f", {document['matmul_tflops']:.0f} TFLOP/s measured" if document["matmul_tflops"] else "")
    )
    for name, facts in document["ways"].items():
        if "failed" in facts:
            yield f"  {name:<18} {facts['failed']}"
            continue
        mfu = "" if facts["mfu"] is None else f", MFU {facts['mfu']:.1%}"
        busy = "" if facts["busy_share"] is None else f", busy {facts['busy_share']:.1%}"
        peak = "" if facts["peak_gb"] is None else f", peak {facts['peak_gb']:.1f} GB"
        yield f"  {name:<18} {facts['step_s']:>8.3f} s a step, {facts['tokens_per_s']:>9,.0f} tok/s{mfu}{busy}{peak}, recompute {facts['recompute']}"
        if facts["parts_ms"]:
            yield "    " + ", ".join(f"{part} {ms:.1f}" for part, ms in facts["parts_ms"].items()) + " ms"
    check = document["check"]
    if not check["passed"]:
        yield f"  OURS AND STOCK DO NOT AGREE, so there is no ratio: {check}"
    for what, ratio in document.get("ratio", {}).items():
        yield f"  {what}: {ratio:.2f}x"


class Bench:
    """The model with its adapters, one optimizer, and the ways of running it."""

    def __init__(self, setting: Setting, until: float = float("inf")) -> None:
        packing.install()
        self.until = until
        self.setting = setting
        self.model = adapted(setting)
        self.base: Any = self.model.get_base_model()
        self.config = self.base.config.get_text_config()
        self.shape: ModelShape = read_shape(self.base.config.to_json_string(use_diff=False))
        self.trainable = [each for each in self.model.parameters() if each.requires_grad]
        self.adapters = sum(each.numel() for each in self.trainable)
        self.token_flop = token_flops(self.shape, _adapters(setting), setting.row).total
        self.peak_tflops = matmul_tflops() if setting.device == "cuda" else None
        self._optimizer: Any = None

    def agreement(self) -> dict[str, Any]:
        """Do stock and ours compute the same? Loss and the direction of every group's gradient in the first layers, on one micro-batch."""
        small = self.setting.micro[0]
        every, self.config.num_hidden_layers = self.config.num_hidden_layers, min(CHECKED_LAYERS, self.setting.layers)
        batch, held = self.batches(small, False, 1)[0], {}
        layer: Layer = "ours" if self.setting.device == "cuda" else "grouped"
        try:
            for way in (Way("stock", small, "peft"), Way("ours", small, layer, lean=True)):
                self.choose(way)
                loss = self.loss(batch, items=1000)
                loss.backward()
                held[way.name] = (float(loss.detach()), self._gradients())
                self.clear()
        finally:
            self.config.num_hidden_layers = every
        return _agreement(held, self.setting.dtype)

    def measure(self, way: Way) -> dict[str, Any]:
        """One way's facts. What it held is free afterwards."""
        return self.alone(lambda: self._measure(way))

    def alone(self, measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        if self.late:
            return {"failed": self.late}
        try:
            return measured()
        except torch.OutOfMemoryError as error:
            return {"failed": f"does not fit this card: {str(error).splitlines()[0][:160]}"}
        except RuntimeError as error:
            # A library that refuses this card or these versions stops its own way; the others are still worth their time.
            return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        finally:
            self.clear()

    @property
    def late(self) -> str:
        return f"not begun: {self.setting.seconds:.0f} s are over" if time.perf_counter() > self.until else ""

    def choose(self, way: Way) -> str:
        """Put this way's forwards, head and recomputing in place; returns what is recomputed."""
        from trl.trainer.utils import add_fused_lm_head

        lean.remove(self.model)
        experts.uninstall(self.model)
        if way.layer != "peft":
            experts.install(self.model, _layer(way.layer))
        self.base.__dict__.pop("forward", None)
        self.base.gradient_checkpointing_disable()
        add_fused_lm_head(self.base, outputs=("log_probs", "entropy", "is_top1"))
        if not way.lean:
            self.base.gradient_checkpointing_enable({"use_reentrant": False})
            return "full"
        from training.phases.lean_trainer import install_head

        installed = lean.install(self.model)
        assert installed.whole, dict(installed.left)
        policy = self.policy(way.micro)
        lean.set_recompute(self.model, policy)
        install_head(self.base)
        return policy

    def policy(self, micro: int) -> Recompute:
        recipe = _recipe(self.setting, micro)
        return recompute_for(recipe, recipe.phases[0], self.shape, self.setting.peak_gb + CONTEXT_GB)

    def batches(self, micro: int, packed: bool, count: int) -> list[dict[str, Any]]:
        """`count` micro-batches of random tokens: rows, or documents of uneven lengths in one row."""
        generator = torch.Generator().manual_seed(1)
        rows = (micro // self.setting.row, self.setting.row)
        without_mask = self.setting.device == "cuda" and lean.takes_no_mask(self.model)
        masks = {"attention_mask": {"full_attention": None, "linear_attention": None}} if without_mask else {}
        found = []
        for _ in range(count):
            ids = torch.randint(0, self.config.vocab_size, rows, generator=generator)
            if packed:
                given = _packed_row(ids.reshape(1, -1), self.setting, generator)
            else:
                on_device = ids.to(self.setting.device)
                given = {"input_ids": on_device, "labels": on_device}
            found.append({**given, **masks})
        return found

    def loss(self, batch: Mapping[str, Any], items: int) -> Tensor:
        """Of one micro-batch, over `items` tokens of the whole step."""
        cuda = self.setting.device == "cuda"
        casts: Any = torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()
        given = dict(batch)
        if "cu_seq_lens_cpu" in given:
            given["cu_seq_lens_cpu"] = given[
                "cu_seq_lens_cpu"
            ].clone()  # a new one each micro-batch, as the trainer has it
        with casts:
            outputs = self.model(**given, use_cache=False, fused_lm_head=True)
        return -outputs.log_probs.sum() / items

    def loss_and_gradients(self, batch: Mapping[str, Any], items: int) -> Tensor:
        loss = self.loss(batch, items)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self, keep_gradients: bool = False) -> None:
        """Clip, step and zero; a graph needs the gradients' memory kept."""
        if self._optimizer is None:
            self._optimizer = torch.optim.AdamW(
                self.trainable, lr=0.0, weight_decay=0.0, fused=self.setting.device == "cuda"
            )
        nn.utils.clip_grad_norm_(self.trainable, _CLIP, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=not keep_gradients)

    def drop_optimizer(self) -> None:
        self._optimizer = None
        self.clear()

    def clear(self) -> None:
        for each in self.trainable:
            each.grad = None
        gc.collect()
        if self.setting.device == "cuda":
            torch.cuda.empty_cache()

    def facts(self, seconds: Sequence[float]) -> dict[str, Any]:
        middle = statistics.median(seconds)
        rate = self.setting.tokens / middle
        mfu = None if self.peak_tflops is None else round(rate * self.token_flop / (self.peak_tflops * 1e12), 4)
        return {
            "step_s": round(middle, 4),
            "step_s_all": [round(each, 4) for each in seconds],
            "tokens_per_s": round(rate, 1),
            "mfu": mfu,
        }

    def _measure(self, way: Way) -> dict[str, Any]:
        policy = self.choose(way)
        count = max(1, self.setting.tokens // way.micro)
        batches = self.batches(way.micro, way.packed, count)
        items = count * way.micro
        run: Run = self.loss_and_gradients
        if way.graph:
            from training.lean.graph import MicroBatchGraph

            graph = MicroBatchGraph(self.model, lambda batch: self.loss(batch, items), batches[0])
            run = lambda batch, _: graph(batch)  # noqa: E731
        began = time.perf_counter()
        # What compiles does so in the first micro-batch; a whole step of the slow ways would only take time.
        self._step(batches[:1], items, run)
        first_s = self._since(began)
        _reset_peak(self.setting.device)
        static = _allocated_gb(self.setting.device)
        seconds: list[float] = []
        while len(seconds) < self.setting.steps and not (seconds and time.perf_counter() + seconds[-1] > self.until):
            began = time.perf_counter()
            loss = self._step(batches, items, run)
            seconds.append(self._since(began))
        peak = _peak_gb(self.setting.device, reserved=way.graph)
        began = time.perf_counter()
        run(batches[0], items)
        micro_s = self._since(began)
        began = time.perf_counter()
        self.update(keep_gradients=True)
        update_s = self._since(began)
        micro_s = min(micro_s, (statistics.median(seconds) - update_s) / count)
        profiles = self.setting.device == "cuda" and self.setting.profile and not self.late
        busy_ms, parts = profiled(self, run, batches[0], items) if profiles else (None, {})
        if way.graph:
            parts = {}  # launched by one call, which no mark is inside of
        return {
            **self.facts(seconds),
            "micro": way.micro,
            "recompute": policy,
            "micro_ms": round(micro_s * 1e3, 2),
            "optimizer_ms": round(update_s * 1e3, 2),
            "busy_ms": busy_ms,
            "busy_share": None if busy_ms is None else round(busy_ms / (micro_s * 1e3), 4),
            "parts_ms": parts,
            "peak_gb": peak,
            "static_gb": static,
            "first_step_s": round(first_s, 2),
            "loss": round(loss, 5),
        }

    def _step(self, batches: Sequence[Mapping[str, Any]], items: int, run: Run) -> float:
        losses = [run(batch, items).clone() for batch in batches]
        self.update(keep_gradients=run != self.loss_and_gradients)
        return float(torch.stack(losses).sum())

    def _since(self, began: float) -> float:
        if self.setting.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def _gradients(self) -> dict[str, list[Tensor]]:
        from training.model import all_lora_tensors

        grouped: dict[str, list[Tensor]] = {}
        for group, _, tensor in all_lora_tensors(self.model):
            if tensor.grad is not None:
                grouped.setdefault(group, []).append(tensor.grad.detach().clone())
        return grouped


def adapted(setting: Setting) -> Any:
    """The model with adapters on every group, made on the device: frozen bf16 weights, trainable fp32 adapters whose lora_B is noise."""
    from peft import get_peft_model

    from training.model import lora_config, lora_tensors

    base = _base(setting).requires_grad_(False)
    with torch.device(setting.device):
        model: Any = get_peft_model(base, lora_config(_adapters(setting), "qwen3_5_moe"))
    generator = torch.Generator(device=setting.device).manual_seed(1)
    with torch.no_grad():
        for _, _, tensor in lora_tensors(model, "lora_B"):
            tensor.normal_(0, 0.01, generator=generator)
    return model.train()


def _base(setting: Setting) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

    from training.benchmark import SMALL

    kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(setting.layers)]
    small = {**SMALL, "vocab_size": 512} if setting.tiny else {}
    config = Qwen3_5MoeTextConfig(
        num_hidden_layers=setting.layers, layer_types=kinds, tie_word_embeddings=False, **small
    )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, setting.dtype), attn_implementation="sdpa"
        )
    model.to_empty(device=setting.device)
    with torch.device(setting.device):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)  # what it holds is computed, not drawn
    _draw(model, setting)
    model.set_experts_implementation("grouped_mm")
    return model


@torch.no_grad()
def _draw(model: Any, setting: Setting) -> None:
    """Random weights as a trained model's are scaled. All embeddings share a part: so routing is uneven, as in real use."""
    generator = torch.Generator(device=setting.device).manual_seed(0)
    spread = 0.1 if setting.tiny else 0.02
    for name, weight in model.named_parameters():
        if name.endswith(("linear_attn.norm.weight", "dt_bias")):
            weight.fill_(1.0)
        elif "norm" in name:
            weight.zero_()
        elif name.endswith("A_log"):
            weight.uniform_(0.01, 16, generator=generator).log_()
        else:
            weight.normal_(0, 0.3 if "conv1d" in name else spread, generator=generator)
    embeddings = model.get_input_embeddings().weight
    embeddings.add_(torch.empty_like(embeddings[:1]).normal_(0, 0.5 * spread, generator=generator))


def matmul_tflops(size: int = 8192, turns: int = 20) -> float:
    """Of one large product in bf16 on this card, as the device probe measures it."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn_like(a)
    times = []
    for turn in range(turns + 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        torch.cuda.synchronize()
        if turn >= 5:
            times.append(start.elapsed_time(end))
    return round(2 * size**3 / statistics.median(times) / 1e9, 1)


def _packed_row(ids_1T: Tensor, setting: Setting, generator: torch.Generator) -> dict[str, Any]:
    """One row of documents whose lengths lie around that of an unpacked row, as the trainer hands it on."""
    half = setting.row // 2
    count = max(1, ids_1T.shape[1] // setting.row)
    shifts = torch.randint(-half, half, (count - 1,), generator=generator).tolist()
    cuts = [setting.row * (each + 1) + shift for each, shift in enumerate(shifts)]
    given = packing.packed_inputs([part.to(setting.device) for part in torch.tensor_split(ids_1T, cuts, dim=1)])
    labels = given["input_ids"].masked_fill(given["position_ids"] == 0, -100)
    return {**given, "labels": labels, "cu_seq_lens_cpu": given["cu_seq_lens_q"].cpu()}


def _layer(layer: Layer) -> Any:
    if layer == "grouped":
        return experts.GROUPED
    if layer == "portable":
        from kernels.moe_lora import PORTABLE
        from training.kernel_layer import KernelLayer

        return KernelLayer(PORTABLE)
    return None


def _adapters(setting: Setting) -> Adapters:
    return Adapters(rank=setting.rank, alpha=2 * setting.rank)


def _recipe(setting: Setting, micro: int) -> Recipe:
    """What the memory plan reads."""
    phase = {
        "kind": "sft",
        "data": "bucket:none",
        "steps": 1,
        "learning_rate": 1e-4,
        "max_length": max(16, setting.row),
    }
    cuda = setting.device == "cuda"
    return parse_recipe(
        {
            "name": "benchmark",
            "model": {"source": "bucket:none", "family": "qwen3_5_moe", "size_gb": 70, "dtype": setting.dtype},
            "adapters": _adapters(setting).model_dump(mode="json"),
            "phases": [{**phase, "batch_size": max(1, micro // setting.row)}],
            "box": {"tier": "h200", "device": "cuda"} if cuda else {"tier": "rehearsal", "device": "cpu"},
            "budget": {"max_usd": 1},
            "optimizer": "adamw",
            "recompute": setting.recompute,
        }
    )


def _agreement(held: Mapping[str, tuple[float, dict[str, list[Tensor]]]], dtype: str) -> dict[str, Any]:
    loss_tolerance, wanted = _TOLERANCE[dtype]
    (stock, theirs), (ours, mine) = held["stock"], held["ours"]
    cosines = {group: _cosine(parts, mine.get(group, [])) for group, parts in theirs.items()}
    error = abs(ours - stock) / abs(stock)
    wrong = [group for group, cosine in cosines.items() if not cosine >= wanted]
    return {
        "passed": error <= loss_tolerance and not wrong and bool(cosines),
        "loss_relative_error": error,
        "gradient_cosine": {group: round(cosine, 5) for group, cosine in cosines.items()},
        "gradient_cosine_wanted": wanted,
        "wrong": wrong,
    }


def _cosine(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    if len(one) != len(other):
        return float("nan")
    product = square = other_square = 0.0
    for a, b in zip(one, other, strict=True):
        product += float((a * b).sum(dtype=torch.float64))
        square += float(a.square().sum(dtype=torch.float64))
        other_square += float(b.square().sum(dtype=torch.float64))
    return product / max((square * other_square) ** 0.5, 1e-300)


def _ratios(found: Mapping[str, Mapping[str, Any]], setting: Setting) -> dict[str, float]:
    rates = {name: facts["tokens_per_s"] for name, facts in found.items() if "tokens_per_s" in facts}
    small, large = setting.micro[0], setting.micro[-1]
    mine = [rate for name, rate in rates.items() if name.startswith(("ours ", "ours+graph "))]
    if not mine:
        return {}
    against = {"best of ours against the seed": f"seed {small}", "best of ours against stock": f"stock {small}"}
    ratios = {what: round(max(mine) / rates[name], 3) for what, name in against.items() if name in rates}
    if f"ours-packed {large}" in rates and f"ours {large}" in rates:
        ratios["seconds packed against unpacked"] = round(rates[f"ours {large}"] / rates[f"ours-packed {large}"], 3)
    return ratios


def _allocated_gb(device: str) -> float | None:
    return round(torch.cuda.memory_allocated() / 1e9, 2) if device == "cuda" else None


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def _peak_gb(device: str, reserved: bool = False) -> float | None:
    """What tensors held at most; with `reserved` what was taken of the card: a graph's memory belongs to no tensor."""
    if device != "cuda":
        return None
    return round((torch.cuda.max_memory_reserved() if reserved else torch.cuda.max_memory_allocated()) / 1e9, 2)


# What each kernel belongs to: marks are put down where a part begins, forward and backward, and a kernel belongs to the last one before its launch.


class _Mark(torch.autograd.Function):
    """Passes its input through, and puts down a mark when its gradient comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _mark(ctx.name)
        return grads[0], None


def _mark(name: str) -> None:
    with torch.profiler.record_function(_PROFILED + name):
        pass


def profiled(bench: Bench, run: Run, batch: Mapping[str, Any], items: int) -> tuple[float, dict[str, float]]:
    """GPU milliseconds of one micro-batch, in all (overlaps counted once) and by part."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with _marks(bench.base), torch.profiler.profile(activities=kinds) as profile:
        _mark("norms and residuals")
        run(batch, items)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return shares(json.loads(path.read_text())["traceEvents"])


def shares(events: Sequence[Mapping[str, Any]]) -> tuple[float, dict[str, float]]:
    """Of a Chrome trace: (busy ms, ms by the part whose mark came last before the launch). The host has one thread at work at a time: while the
    backward pass runs in its own, the main one waits."""
    marks: list[tuple[float, str]] = []
    launched: dict[int, float] = {}
    work: list[tuple[float, float, int]] = []
    for event in events:
        kind, name = event.get("cat"), str(event.get("name", ""))
        correlation = event.get("args", {}).get("correlation")
        if kind == "user_annotation" and name.startswith(_PROFILED):
            marks.append((event["ts"], name.removeprefix(_PROFILED)))
        elif kind in ("cuda_runtime", "cuda_driver") and correlation is not None:
            launched[correlation] = event["ts"]
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            work.append((event["ts"], event["dur"], correlation))
    marks.sort()
    times = [at for at, _ in marks]
    busy_us, until, parts = 0.0, 0.0, dict[str, float]()
    for began, took, correlation in sorted(work):
        index = bisect.bisect_right(times, launched.get(correlation, -1.0)) - 1
        part = marks[index][1] if index >= 0 else "unknown"
        parts[part] = parts.get(part, 0.0) + took
        busy_us += max(0.0, began + took - max(began, until))
        until = max(until, began + took)
    ranked = sorted(parts.items(), key=lambda each: -each[1])
    return round(busy_us / 1e3, 2), {part: round(us / 1e3, 2) for part, us in ranked}


@contextlib.contextmanager
def _marks(base: Any) -> Iterator[None]:
    """Marks around the parts of each layer and of the head, for one profiled pass."""
    kept: list[tuple[Any, Any]] = []

    def watch(module: Any, name: str, around: str) -> None:
        kept.append((module, module.__dict__.get("forward")))
        module.forward = _between(module.forward, name, around)

    for layer in base.model.layers:
        mixer = "gated delta net" if hasattr(layer, "linear_attn") else "attention"
        watch(layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn, mixer, "norms and residuals")
        around = "norms and residuals"
        if lean.recompute_of(layer) is None:
            around = "shared expert and router"
            watch(layer.mlp, around, "norms and residuals")
        watch(layer.mlp.experts, "routed experts", around)
    watch(base.model, "norms and residuals", "head")
    # The block's own forward is looked for by its identity, so the part of it that is not the experts is marked where it is computed.
    route = blocks.route
    blocks.route = _marked_route  # type: ignore[assignment]
    try:
        yield
    finally:
        blocks.route = route
        for module, forward in kept:
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = forward


def _marked_route(block: Any, x_TH: Tensor, plain: Any = blocks.route) -> Any:
    name, around = "shared expert and router", "norms and residuals"
    _mark(name)
    routed = plain(block, _Mark.apply(x_TH, around) if _carries(x_TH) else x_TH)
    _mark(around)
    if routed is None:
        return None
    weight = _Mark.apply(routed.weight_Tk, name) if _carries(routed.weight_Tk) else routed.weight_Tk
    if routed.shared is None or not _carries(routed.shared[0]):
        return routed._replace(weight_Tk=weight)
    return routed._replace(weight_Tk=weight, shared=(_Mark.apply(routed.shared[0], name), routed.shared[1]))


def _between(forward: Callable[..., Any], name: str, around: str) -> Callable[..., Any]:
    """A forward that marks where its part begins and ends, and where its backward does."""

    def marked(*args: Any, **kwargs: Any) -> Any:
        _mark(name)
        if args and _carries(args[0]):
            args = (_Mark.apply(args[0], around), *args[1:])
        elif _carries(kwargs.get("hidden_states")):
            kwargs["hidden_states"] = _Mark.apply(kwargs["hidden_states"], around)
        out = forward(*args, **kwargs)
        _mark(around)
        if _carries(out):
            return _Mark.apply(out, name)
        if isinstance(out, tuple) and out and _carries(out[0]):
            return (_Mark.apply(out[0], name), *out[1:])
        if _carries(getattr(out, "last_hidden_state", None)):
            out.last_hidden_state = _Mark.apply(out.last_hidden_state, name)
        return out

    return marked


def _carries(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def under_trl(bench: Bench) -> dict[str, Any]:
    """Ours as training takes it: TRL's SFTTrainer with packing, its optimizer and its logging, seconds from step end to step end."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from training.phases.lean_trainer import adapt
    from training.tiny import datasets, make_tokenizer

    setting = bench.setting
    micro = setting.micro[-1]
    cuda = setting.device == "cuda"
    policy = bench.choose(Way("trainer", micro, "ours" if cuda else "grouped", lean=True))
    bench.base.__dict__.pop("forward", None)  # the trainer puts its own head on
    count = max(1, setting.tokens // micro)
    steps = setting.steps + 2
    rows = (steps + 1) * count * (micro // setting.row)
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(0, bench.config.vocab_size, (rows, setting.row), generator=generator).tolist()
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_log(self, *_: Any, **__: Any) -> None:
            # The loss has just been read: the card is through with the step.
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=count,
            max_steps=steps,
            max_length=micro,
            packing=True,
            packing_strategy="bfd",
            learning_rate=0.0,
            weight_decay=0.0,
            optim="adamw_torch_fused" if cuda else "adamw_torch",
            router_aux_loss_coef=0.0,
            bf16=cuda,
            use_cpu=not cuda,
            gradient_checkpointing=False,
            dataloader_pin_memory=cuda,
            logging_steps=1,
            logging_nan_inf_filter=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SFTTrainer(
            bench.model,
            args=arguments,
            train_dataset=Dataset.from_dict({"input_ids": ids}),
            processing_class=make_tokenizer(datasets()),
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        adapt(trainer)
        _reset_peak(setting.device)
        trainer.train()
    # The first step compiles, and the last log is the trainer's summary.
    seconds = [after - before for before, after in itertools.pairwise(ends[1:-1])]
    bench.clear()
    return {
        **bench.facts(seconds),
        "micro": micro,
        "recompute": policy,
        "busy_share": None,
        "parts_ms": {},
        "peak_gb": _peak_gb(setting.device),
    }
