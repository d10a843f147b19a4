"""A whole optimizer step of Qwen3.6-35B-A3B at full depth, real shapes and random weights: stock transformers and PEFT, the experts in grouped products,
and ours, on one model, one after another in one process.

Each way runs the same step: micro-batches of rows of 2,048 random tokens with a loss on each, clipping, AdamW with fp32 state on fp32 adapters, or ours
with state in 8 bits, and then no ratio to the others. Its learning rate is zero, so all ways see the same weights. Loops are driven directly; `trainer`
runs ours under TRL's SFTTrainer.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from training import experts, lean, packing
from training.contract.flops import token_flops
from training.contract.memory import CONTEXT_GB, recompute_for
from training.contract.recipe import Recompute
from training.contract.shapes import ModelShape, read_shape
from training.model import release
from training.optimizer import AdamW, ClipsInStep
from training.step_model import adapted, packed_row
from training.step_profile import profiled
from training.step_setting import Layer, Setting, Way, adapters_of, recipe_of, ways

__all__ = ["Bench", "Setting", "Way", "lines", "matmul_tflops", "measure", "ways"]

CHECKED_LAYERS = 4
"""At 40 random layers two ways of plain torch agree to a cosine of 0.3 only: now and then a token goes to another expert, and then all after it differ."""
_CLIP = 1.0
_TOLERANCE = {"float32": (1e-4, 0.999), "bfloat16": (2e-3, 0.98)}
_MICRO_BATCHES = 3
Run = Callable[[Mapping[str, Any], int], Tensor]
"""Adds the gradients of a micro-batch; returns its loss over so many tokens of the whole step."""


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
        f"{setting['layers']} layers, rank {setting['rank']}, {setting['optimizer']}, {setting['tokens']} tokens a step, median of {setting['steps']} steps; "
        f"{document['adapter_parameters'] / 1e9:.3f} G adapter parameters; {document['gflop_a_token']} GFLOP a token"
        + (f", {document['matmul_tflops']:.0f} TFLOP/s measured" if document["matmul_tflops"] else "")
    )
    for name, facts in document["ways"].items():
        if "failed" in facts:
            yield f"  {name:<18} {facts['failed']}"
            continue
        mfu = "" if facts["mfu"] is None else f", MFU {facts['mfu']:.1%}"
        busy = "" if facts["busy_share"] is None else f", busy {facts['busy_share']:.1%}"
        if facts["step_busy_share"] is not None:
            busy += f" of a micro-batch and {facts['step_busy_share']:.1%} of the step"
        peak = (
            ""
            if facts["peak_gb"] is None
            else f", peak {facts['peak_gb']:.1f} GB ({facts['peak_reserved_gb']:.1f} reserved)"
        )
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
        self.token_flop = token_flops(self.shape, adapters_of(setting), setting.row).total
        self.peak_tflops = matmul_tflops() if setting.device == "cuda" else None
        self._optimizer: Any = None
        self._lean = False
        """Whether the way at hand is ours, optimizer and all."""

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
        if way.name != "trainer":
            return self.alone(lambda: self._measure(way))
        from training.step_trainer import under_trl

        self.drop_optimizer()
        return self.alone(lambda: under_trl(self, way))

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
        if way.lean != self._lean:
            self._lean = way.lean
            self.drop_optimizer()
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
        recipe = recipe_of(self.setting, micro)
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
                given = packed_row(ids.reshape(1, -1), self.setting, generator)
            else:
                on_device = ids.to(self.setting.device)
                given = {"input_ids": on_device, "labels": on_device}
            found.append({**given, **masks})
        return found

    def loss(self, batch: Mapping[str, Any], items: int | Tensor) -> Tensor:
        """Of one micro-batch, over `items` tokens of the whole step."""
        cuda = self.setting.device == "cuda"
        casts: Any = torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()
        given = dict(batch)
        if "cu_seq_lens_cpu" in given:
            # A new one each micro-batch, as the trainer has it.
            given["cu_seq_lens_cpu"] = given["cu_seq_lens_cpu"].clone()
        with casts:
            outputs = self.model(**given, use_cache=False, fused_lm_head=True)
        return -outputs.log_probs.sum() / items

    def loss_and_gradients(self, batch: Mapping[str, Any], items: int) -> Tensor:
        loss = self.loss(batch, items)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        """Clip, step and zero."""
        if self._optimizer is None:
            self._optimizer = self._fresh_optimizer()
        if isinstance(self._optimizer, ClipsInStep):
            self._optimizer.clip(self.trainable, _CLIP)
        else:
            nn.utils.clip_grad_norm_(self.trainable, _CLIP, foreach=True)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _fresh_optimizer(self) -> torch.optim.Optimizer:
        cuda, none = self.setting.device == "cuda", {"lr": 0.0, "weight_decay": 0.0}
        if cuda and self._lean:
            return self._own_optimizer()(self.trainable, **none)  # type: ignore[call-arg]
        return torch.optim.AdamW(self.trainable, **none, fused=cuda)

    def _own_optimizer(self) -> type[ClipsInStep]:
        if self.setting.optimizer == "adamw":
            return AdamW
        from training.optimizer_8bit import AdamW8bit  # torchao takes seconds to import

        return AdamW8bit

    def drop_optimizer(self) -> None:
        self._optimizer = None
        self.clear()

    def clear(self) -> None:
        for each in self.trainable:
            each.grad = None
        release()

    def reset_peak(self) -> None:
        """From here on, without what the allocator keeps of what is gone: a peak of reserved memory would hold it."""
        release()
        if self.setting.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def peaks(self, graph: bool = False) -> dict[str, float | None]:
        """GB since `reset_peak`: what tensors held at most, and what was taken of the card. A graph's memory belongs to no tensor, so there the second is
        both."""
        if self.setting.device != "cuda":
            return {"peak_gb": None, "peak_reserved_gb": None}
        reserved = round(torch.cuda.max_memory_reserved() / 1e9, 2)
        held = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        return {"peak_gb": reserved if graph else held, "peak_reserved_gb": reserved}

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
        run = self._run(way, batches, items)
        began = time.perf_counter()
        # What compiles does so in the first micro-batch; a whole step of the slow ways would only take time.
        self._step(batches[:1], items, run)
        first_s = self._since(began)
        self.reset_peak()
        static = round(torch.cuda.memory_allocated() / 1e9, 2) if self.setting.device == "cuda" else None
        if way.lean:
            # The allocator grows in the first step, which made it twice as long.
            self._step(batches, items, run)
        seconds: list[float] = []
        while len(seconds) < self.setting.steps and not (seconds and time.perf_counter() + seconds[-1] > self.until):
            began = time.perf_counter()
            loss = self._step(batches, items, run)
            seconds.append(self._since(began))
        peaks = self.peaks(way.graph)
        return {
            **self.facts(seconds),
            "micro": way.micro,
            "recompute": policy,
            **self._parts(way, count, statistics.median(seconds) * 1e3, lambda: run(batches[0], items)),
            **peaks,
            "static_gb": static,
            "first_step_s": round(first_s, 2),
            "loss": round(loss, 5),
        }

    def _run(self, way: Way, batches: Sequence[Mapping[str, Any]], items: int) -> Run:
        if not way.graph:
            return self.loss_and_gradients
        if way.packed:
            return self._packed_run(batches, items)
        from training.lean.graph import MicroBatchGraph

        graph = MicroBatchGraph(self.model, lambda given: (self.loss(given, items),), batches[0])
        return lambda given, _: graph(given)[0]

    def _packed_run(self, batches: Sequence[Mapping[str, Any]], items: int) -> Run:
        from training.lean.packed_graph import PackedGraphs, Room

        room = Room.for_rows([each["cu_seq_lens_cpu"].diff().tolist() for each in batches], 1)
        masks = {name: each for name, each in batches[0].items() if name == "attention_mask"}
        told: list[str] = []
        graphs = PackedGraphs(self.model, lambda given, over: (self.loss({**given, **masks}, over),), room, told.append)
        over = torch.tensor(float(items), device=self.setting.device)

        def run(given: Mapping[str, Any], _: int) -> Tensor:
            found = graphs(given["input_ids"], given["labels"], given["cu_seq_lens_cpu"].tolist(), over)
            if found is None:
                raise RuntimeError(told[-1])
            return found[0]

        return run

    def _parts(self, way: Way, count: int, step_ms: float, run: Callable[[], object]) -> dict[str, Any]:
        """What a step is made of: micro-batches, the optimizer, and how long the card is at work in each."""
        micro_ms = self._micro_batch_ms(run)
        began = time.perf_counter()
        self.update()
        update_ms = self._since(began) * 1e3
        found: dict[str, Any] = {
            "micro_ms": round(micro_ms, 2),
            "optimizer_ms": round(update_ms, 2),
            "busy_ms": None,
            "busy_share": None,
            "step_busy_share": None,
            "parts_ms": {},
        }
        if self.setting.device != "cuda" or not self.setting.profile or self.late:
            return found
        run()  # the first one behind a step also renews what is computed once a step
        busy_ms, parts = profiled(self.base, run)
        return found | {
            "busy_ms": busy_ms,
            "busy_share": round(busy_ms / micro_ms, 4),
            "step_busy_share": round((count * busy_ms + update_ms) / step_ms, 4),
            # A graph is launched by one call, which no mark is inside of.
            "parts_ms": {} if way.graph else parts,
        }

    def _micro_batch_ms(self, run: Callable[[], object]) -> float:
        """The median of a few run one after another, as in a step: the host launches one while the card is at work on the one before."""
        cuda = self.setting.device == "cuda"
        ends: list[Any] = [_now(cuda)]
        for _ in range(_MICRO_BATCHES):
            run()
            ends.append(_now(cuda))
        if not cuda:
            return 1e3 * statistics.median(after - before for before, after in itertools.pairwise(ends))
        torch.cuda.synchronize()
        return statistics.median(before.elapsed_time(after) for before, after in itertools.pairwise(ends))

    def _step(self, batches: Sequence[Mapping[str, Any]], items: int, run: Run) -> float:
        losses = [run(batch, items).clone() for batch in batches]
        self.update()
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


def _layer(layer: Layer) -> Any:
    if layer == "grouped":
        return experts.GROUPED
    if layer == "portable":
        from kernels.moe_lora import PORTABLE
        from training.kernel_layer import KernelLayer

        return KernelLayer(PORTABLE)
    return None


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
    small = setting.micro[0]
    mine = [rate for name, rate in rates.items() if name.startswith(("ours ", "ours+graph "))]
    if not mine:
        return {}
    against = {"best of ours against the seed": f"seed {small}", "best of ours against stock": f"stock {small}"}
    alike = setting.optimizer == "adamw"
    ratios = {what: round(max(mine) / rates[name], 3) for what, name in against.items() if alike and name in rates}
    for name, micro in itertools.product(("ours", "ours+graph"), setting.micro):
        packed = f"{name.replace('ours', 'ours-packed')} {micro}"
        if packed in rates and f"{name} {micro}" in rates:
            ratios[f"seconds packed against unpacked, {name} {micro}"] = round(
                rates[f"{name} {micro}"] / rates[packed], 3
            )
    return ratios


def _now(cuda: bool) -> Any:
    """Seconds of this process's clock, or an event in the card's stream."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
