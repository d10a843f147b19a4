"""How fast is it? Three measurements, each with the check that makes it worth reading.

    python -m training.benchmark step --layers 40 --tokens 32768 --micro 4096 16384 --rank 32 --steps 3 --json OUT
        A whole optimizer step of Qwen3.6-35B-A3B on this machine's card: stock transformers and PEFT, the experts in grouped products, and ours, each in
        micro-batches of so many tokens; see `training.step_benchmark`. `--trainer` adds ours under TRL, `--only` takes ways by name, `--tiny` does it on
        a CPU with small shapes. `--peer PYTHON` adds a peer's package, in an environment of its own; see `training.peer_step`.

    python -m training.benchmark layers --layers 4 --tokens 4096 --rank 32 --steps 10 --json OUT
        A few layers of Qwen3.6-35B-A3B's real shapes with random weights, on this machine's card: stock PEFT on transformers' grouped_mm, and
        our factored experts. One model, one process, turn by turn; the same checkpointing, autocast and optimizer. No ratio is printed unless both
        give the same loss and the same gradients. `--tiny` does it on a CPU with small shapes.
    python -m training.benchmark cascade --steps 10 --json OUT
        CPU seconds of all five phases on the tiny model, one thread, in this process.

Exit codes: 0 measured, 1 the two ways do not agree or the cascade did not end, 2 this machine cannot.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from training import allocator, peer_step
from training.contract.memory import POLICIES
from training.contract.recipe import RecipeError

SCHEMA = 1
ROW_TOKENS = 2048
# The head of the real vocabulary would be two thirds of the work of four layers, the same in both ways, and hide what is compared.
VOCABULARY = 8192
_VERSIONS = ("torch", "triton", "transformers", "peft", "trl", "flash-linear-attention", "livery")
# Loss (relative) and gradient (cosine a group) of two ways of the same sum. bf16 rounds, and now and then a token goes to its ninth expert.
_TOLERANCE = {"float32": (1e-5, 0.9999), "bfloat16": (1e-3, 0.98)}
_WARM_UP = 2
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
"""Sizes of `--tiny`."""


class CannotMeasure(RuntimeError):
    """This machine lacks what the measurement needs."""


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    layers: int
    tokens: int
    rank: int
    steps: int
    device: str
    dtype: str
    tiny: bool


@dataclass
class Timing:
    """One way's steps."""

    seconds: list[float] = field(default_factory=list)
    peak_gb: float | None = None
    static_gb: float | None = None
    loss: float = float("nan")
    gradients: dict[str, Any] = field(default_factory=dict)

    def facts(self, tokens: int) -> dict[str, Any]:
        middle = statistics.median(self.seconds)
        return {
            "step_s": round(middle, 5),
            "step_s_min": round(min(self.seconds), 5),
            "step_s_max": round(max(self.seconds), 5),
            "tokens_per_s": round(tokens / middle, 1),
            "peak_gb": self.peak_gb,
            "static_gb": self.static_gb,
            "loss": self.loss,
        }


def measure_layers(setting: Setting, layer: Any = None) -> dict[str, Any]:
    """Both ways on one model; the document that `--json` writes. `ratio` is there only if they agree.

    `layer` is the computation of the routed experts (training.experts.Layer) that is held against the stock one; None = the one that trains.
    """
    import torch

    from training import experts, packing

    packing.install()
    torch.manual_seed(0)
    model = _adapted(setting)
    ways: dict[str, Callable[[], None]] = {
        "stock": lambda: experts.uninstall(model),
        "factored": lambda: _install(model, layer),
    }
    optimizer = _optimizer(model, setting.device)
    batches = _batches(setting, model.config.get_text_config().vocab_size)
    timings = {name: Timing() for name in ways}
    for name, choose in ways.items():
        choose()
        timings[name].loss, timings[name].gradients = _forward_and_backward(model, batches[0], setting)
        optimizer.zero_grad(set_to_none=True)
    check = _agreement(timings, setting.dtype, ran=min(experts.calls(model, "trained").values()))
    for timing in timings.values():
        timing.gradients = {}
    # Turn by turn: a card that grows warm slows whoever comes last.
    for turn in range(2):
        for name, choose in ways.items():
            choose()
            _time(
                model, optimizer, batches, setting, timings[name], setting.steps // 2 + setting.steps % 2 * (1 - turn)
            )
    return _document(setting, model, timings, check)


def measure_cascade(steps: int, recipe: Path) -> dict[str, Any]:
    """CPU seconds of a cascade of `steps` a phase, of this process and of the uploads that it starts. Everything is loaded for the first time."""
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
    from training import runner
    from training.contract.events import PhaseEnd, read_events
    from training.contract.recipe import parse_recipe
    from training.local import load

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wanted = load(recipe).model_dump(mode="json")
        for phase in wanted["phases"]:
            phase.update(steps=steps, save_every_steps=steps, warmup_steps=0)
        parse_recipe(wanted)
        (folder / "recipe.yaml").write_text(json.dumps(wanted))  # JSON is YAML
        made = _cpu_s()
        if wanted["trainer"] == "trl":
            _make_world(folder / "world")
        began, wall = _cpu_s(), time.monotonic()
        places = {"recipe": "recipe.yaml", "folder": "run", "model": "world/model", "data-dir": "world/datasets"}
        code = runner.main([word for name, place in places.items() for word in (f"--{name}", str(folder / place))])
        spent = {who: _cpu_s()[who] - began[who] for who in began}
        ends = [event for event in read_events(folder / "run" / "events.jsonl") if isinstance(event, PhaseEnd)]
    return {
        "schema": SCHEMA,
        "what": "cascade",
        "complete": code == 0 and len(ends) == len(wanted["phases"]) and all(end.complete for end in ends),
        "steps": steps,
        "cpu_s": round(spent["self"] + spent["children"], 2),
        "cpu_s_by": {who: round(seconds, 2) for who, seconds in spent.items()},
        "world_cpu_s": round(sum(began.values()) - sum(made.values()), 2),
        "wall_s": round(time.monotonic() - wall, 2),
        "phases": {end.phase: {"wall_s": end.seconds, "loss": [end.loss_first, end.loss_last]} for end in ends},
        **machine(),
    }


def machine() -> dict[str, Any]:
    """Where it was measured."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    facts: dict[str, Any] = {"versions": versions, "cpus": os.cpu_count(), "system": platform.platform()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        facts["gpu"] = {"name": card.name, "memory_gb": round(card.total_memory / 1e9, 1), "cuda": torch.version.cuda}
    return facts


def _adapted(setting: Setting) -> Any:
    """The model with adapters on every group, trainable; lora_B is noise, or nothing of the adapters would be seen in the loss."""
    import torch
    from peft import get_peft_model

    from training.contract.recipe import Adapters
    from training.model import lora_config, lora_tensors

    base = _base(setting).requires_grad_(False)
    model: Any = get_peft_model(base, lora_config(Adapters(rank=setting.rank, alpha=2 * setting.rank), "qwen3_5_moe"))
    with torch.no_grad():
        for _, _, tensor in lora_tensors(model, "lora_B"):
            tensor.normal_(0, 0.02)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _base(setting: Setting) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

    # Every fourth layer has full attention, as in the model; its own defaults are the 35B's.
    kinds = ["full_attention" if index % 4 == 3 else "linear_attention" for index in range(setting.layers)]
    config = Qwen3_5MoeTextConfig(
        num_hidden_layers=setting.layers,
        layer_types=kinds,
        vocab_size=512 if setting.tiny else VOCABULARY,
        tie_word_embeddings=False,
        **(SMALL if setting.tiny else {}),
    )
    with torch.device(setting.device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, setting.dtype), attn_implementation="sdpa"
        )
    model.set_experts_implementation("grouped_mm")
    return model


def _install(model: Any, layer: Any) -> None:
    from training import experts

    experts.install(model, layer)


def _optimizer(model: Any, device: str) -> Any:
    """AdamW whose learning rate is zero: all steps of both ways see the same weights, and it does all its work."""
    import torch

    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trainable, lr=0.0, weight_decay=0.0, fused=device == "cuda")


def _batches(setting: Setting, vocabulary: int) -> list[Any]:
    import torch

    length = min(ROW_TOKENS, setting.tokens)
    generator = torch.Generator().manual_seed(1)
    shape = (setting.steps + _WARM_UP, setting.tokens // length, length)
    return list(torch.randint(0, vocabulary, shape, generator=generator).to(setting.device))


def _forward_and_backward(model: Any, ids: Any, setting: Setting) -> tuple[float, dict[str, Any]]:
    """Loss, and the gradient of each group as one vector in fp32 on the CPU."""
    import torch

    from training.model import all_lora_tensors

    torch.manual_seed(0)
    loss = _loss(model, ids, setting)
    loss.backward()
    grouped: dict[str, list[Any]] = {}
    for group, _, tensor in all_lora_tensors(model):
        gradient = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
        grouped.setdefault(group, []).append(gradient.detach().float().flatten().cpu())
    return float(loss.detach()), {group: torch.cat(parts) for group, parts in grouped.items()}


def _loss(model: Any, ids: Any, setting: Setting) -> Any:
    import torch

    casts = torch.autocast("cuda", torch.bfloat16) if setting.device == "cuda" else nullcontext()
    with casts:
        return model(input_ids=ids, labels=ids, use_cache=False).loss


def _agreement(timings: Mapping[str, Timing], dtype: str, ran: int) -> dict[str, Any]:
    """Do both ways compute the same? By the loss and by the direction of each group's gradient; `ran` is how often ours ran in each layer."""
    import torch

    loss_tolerance, cosine_wanted = _TOLERANCE[dtype]
    stock, ours = timings["stock"], timings["factored"]
    loss_error = abs(ours.loss - stock.loss) / abs(stock.loss)
    cosines = {
        group: float(torch.nn.functional.cosine_similarity(gradient.double(), ours.gradients[group].double(), dim=0))
        for group, gradient in stock.gradients.items()
    }
    wrong = [group for group, cosine in cosines.items() if not cosine >= cosine_wanted]
    return {
        "passed": bool(loss_error <= loss_tolerance) and not wrong and ran > 0,
        "factored_runs_a_layer": ran,
        "loss_relative_error": loss_error,
        "loss_tolerance": loss_tolerance,
        "gradient_cosine": {group: round(cosine, 6) for group, cosine in cosines.items()},
        "gradient_cosine_wanted": cosine_wanted,
        "wrong": wrong,
    }


def _time(model: Any, optimizer: Any, batches: Sequence[Any], setting: Setting, timing: Timing, steps: int) -> None:
    """`steps` optimizer steps after a warm-up, each from an idle device to an idle device."""
    import torch

    cuda = setting.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for number in range(_WARM_UP + steps):
        ids = batches[number % len(batches)]
        if cuda:
            torch.cuda.synchronize()
            timing.static_gb = round(torch.cuda.memory_allocated() / 1e9, 2)
        began = time.perf_counter()
        _loss(model, ids, setting).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        if number >= _WARM_UP:
            timing.seconds.append(time.perf_counter() - began)
    if cuda:
        timing.peak_gb = round(max(timing.peak_gb or 0.0, torch.cuda.max_memory_allocated() / 1e9), 2)


def _document(setting: Setting, model: Any, timings: Mapping[str, Timing], check: dict[str, Any]) -> dict[str, Any]:
    tokens = setting.tokens // min(ROW_TOKENS, setting.tokens) * min(ROW_TOKENS, setting.tokens)
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "what": "layers",
        "setting": {**vars(setting), "vocabulary": model.config.get_text_config().vocab_size, "row_tokens": ROW_TOKENS},
        "adapter_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "check": check,
        "ways": {name: timing.facts(tokens) for name, timing in timings.items()},
        **machine(),
    }
    if check["passed"]:
        stock, ours = document["ways"]["stock"], document["ways"]["factored"]
        document["ratio"] = {"tokens_per_s": round(ours["tokens_per_s"] / stock["tokens_per_s"], 3)}
        if ours["peak_gb"] and stock["peak_gb"]:
            document["ratio"]["peak_memory"] = round(ours["peak_gb"] / stock["peak_gb"], 3)
    return document


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The document for a person."""
    gpu = document.get("gpu")
    where = f"{gpu['name']}, {gpu['memory_gb']} GB, CUDA {gpu['cuda']}" if gpu else f"CPU, {document['cpus']} cores"
    yield f"{where}; " + ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    if document["what"] == "step":
        from training.step_benchmark import lines

        yield from lines(document)
        if "peer" in document:
            yield from peer_step.lines(document["peer"])
        return
    if document["what"] == "cascade":
        yield f"cascade of {document['steps']} steps a phase: {document['cpu_s']} CPU-s on one thread ({document['wall_s']} s of wall time)"
        for name, facts in document["phases"].items():
            yield f"  {name:<8} {facts['wall_s']:>7.2f} s"
        return
    setting, check = document["setting"], document["check"]
    yield (
        f"{setting['layers']} layers, rank {setting['rank']}, {setting['tokens']} tokens a step in {setting['dtype']}, every layer recomputed; "
        f"median of {setting['steps']} steps"
    )
    for name, facts in document["ways"].items():
        peak = (
            ""
            if facts["peak_gb"] is None
            else f", peak {facts['peak_gb']:.2f} GB ({facts['static_gb']:.2f} of it static)"
        )
        yield f"  {name:<9} {facts['step_s'] * 1e3:>9.2f} ms a step, {facts['tokens_per_s']:>10,.0f} tok/s{peak}, loss {facts['loss']:.6f}"
    if not check["passed"]:
        wrong = ", ".join(f"{group} {check['gradient_cosine'][group]}" for group in check["wrong"]) or "none"
        yield (
            f"  THE TWO DO NOT AGREE, so there is no ratio: loss differs by {check['loss_relative_error']:.1e} (at most {check['loss_tolerance']:g}), "
            f"gradients below a cosine of {check['gradient_cosine_wanted']}: {wrong}"
        )
        return
    memory = document["ratio"].get("peak_memory")
    yield f"  factored against stock: {document['ratio']['tokens_per_s']:.2f}x the tokens/s" + (
        f", {memory:.2f}x the memory" if memory else ""
    )


def _make_world(into: Path) -> None:
    from training.tiny import make

    make(into)


def _cpu_s() -> dict[str, float]:
    """User and system seconds of this process and of its ended children."""
    used = {"self": resource.RUSAGE_SELF, "children": resource.RUSAGE_CHILDREN}
    return {name: sum(resource.getrusage(who)[:2]) for name, who in used.items()}


def measure_step(options: argparse.Namespace) -> dict[str, Any]:
    """The document that `--json` writes; progress goes to standard error."""
    import torch

    from training.step_benchmark import Setting as StepSetting
    from training.step_benchmark import measure
    from training.step_setting import SettingError, require

    if not options.tiny and not torch.cuda.is_available():
        raise CannotMeasure("no CUDA card here; real shapes need one, `--tiny` shows that the benchmark itself works")
    setting = StepSetting(
        layers=options.layers or (4 if options.tiny else 40),
        tokens=options.tokens or (96 if options.tiny else 32_768),
        micro=tuple(options.micro or ((24, 48) if options.tiny else (4096, 16_384))),
        rank=options.rank,
        steps=options.steps or 3,
        device="cpu" if options.tiny else "cuda",
        dtype="float32" if options.tiny else "bfloat16",
        tiny=options.tiny,
        optimizer=options.optimizer,
        recompute=options.recompute,
        peak_gb=options.peak_gb,
        ways=tuple(options.only or ()),
        trainer=options.trainer,
        seconds=options.seconds,
        check=not options.no_check,
        profile=not options.no_profile,
    )
    try:
        require(setting)
    except SettingError as error:
        raise CannotMeasure(str(error)) from None

    # Before ours, which fills the card.
    peer = _peer(options, setting) if options.peer else None

    def whole(found: dict[str, Any]) -> dict[str, Any]:
        beside = {} if peer is None else {"peer": {**peer, "ratio": peer_step.ratios(peer, found)}}
        return {"schema": SCHEMA, "what": "step", **found, **beside, **machine()}

    def keep(found: dict[str, Any]) -> None:
        if options.json:
            _write(options.json, whole(found))

    return whole(measure(setting, tell=lambda line: print(line, file=sys.stderr, flush=True), keep=keep))


def _peer(options: argparse.Namespace, setting: Any) -> dict[str, Any]:
    wanted = peer_step.PeerSetting(
        python=options.peer,
        package=options.peer_package,
        tokens=setting.micro,
        rank=setting.rank,
        row=setting.row,
        device=setting.device,
        dtype=setting.dtype,
        tiny=setting.tiny,
    )
    try:
        return peer_step.measure(wanted, tell=lambda line: print(line, file=sys.stderr, flush=True))
    except peer_step.NoPeer as error:
        raise CannotMeasure(str(error)) from None


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _setting(options: argparse.Namespace) -> Setting:
    if options.tiny:
        return Setting(
            options.layers or 4, options.tokens or 4096, options.rank, options.steps or 10, "cpu", "float32", True
        )
    import torch

    if not torch.cuda.is_available():
        raise CannotMeasure("no CUDA card here; real shapes need one, `--tiny` shows that the benchmark itself works")
    return Setting(
        options.layers or 4, options.tokens or 4096, options.rank, options.steps or 10, "cuda", "bfloat16", False
    )


def _layer(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise CannotMeasure(f"--layer: seen '{name}', want MODULE:NAME of a training.experts.Layer: {error}") from None


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"seen {text}, want at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.benchmark", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("what", nargs="?", choices=("layers", "step", "cascade"), default="layers")
    parser.add_argument("--layers", type=_positive, help="4, of a whole step 40")
    parser.add_argument(
        "--tokens", type=_positive, help=f"a step, in rows of up to {ROW_TOKENS}: 4,096, of a whole step 32,768"
    )
    parser.add_argument("--rank", type=_positive, default=32)
    parser.add_argument(
        "--steps", type=_positive, help="that are timed; for the cascade, of each phase: 10, of a whole step 3"
    )
    parser.add_argument(
        "--layer", metavar="MODULE:NAME", help="another computation of the routed experts to hold against the stock one"
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes in float32 on the CPU")
    parser.add_argument(
        "--recipe", type=Path, default=Path(__file__).parent / "recipes" / "tiny-moe.yaml", help="of the cascade"
    )
    whole = parser.add_argument_group("of a whole step")
    whole.add_argument(
        "--micro", type=_positive, nargs="+", metavar="TOKENS", help="of a micro-batch: what others do, what is best"
    )
    whole.add_argument(
        "--only",
        nargs="+",
        metavar="WAY",
        help="ways by name: stock seed experts ours ours-packed portable, and on a card ours+graph ours-packed+graph",
    )
    whole.add_argument(
        "--optimizer", choices=("adamw", "adamw_8bit"), default="adamw", help="of our ways, on a card; adamw"
    )
    whole.add_argument("--recompute", choices=("auto", *POLICIES), default="auto")
    whole.add_argument("--peak-gb", type=float, default=125.0, help="what `--recompute auto` may take; 125")
    whole.add_argument("--trainer", action="store_true", help="ours under TRL's SFTTrainer, too")
    whole.add_argument(
        "--peer", type=Path, metavar="PYTHON", help="interpreter of an environment with a peer's package"
    )
    whole.add_argument("--peer-package", default="unsloth", metavar="NAME")
    whole.add_argument("--seconds", type=float, default=float("inf"), help="after which no other way is begun")
    whole.add_argument("--no-check", action="store_true", help="leave out the comparison with stock, and so the ratios")
    whole.add_argument(
        "--no-profile", action="store_true", help="leave out what needs a profiled micro-batch: busy share and parts"
    )
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args(argv)
    try:
        if options.what == "cascade":
            document = measure_cascade(options.steps or 10, options.recipe)
        elif options.what == "step":
            document = measure_step(options)
        else:
            document = measure_layers(_setting(options), _layer(options.layer) if options.layer else None)
    except (CannotMeasure, RecipeError) as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 2
    if options.json:
        _write(options.json, document)
    print("\n".join(_lines(document)))
    return 0 if document.get("complete", True) and document.get("check", {"passed": True})["passed"] else 1


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    allocator.grow_segments()  # as a run does
    sys.exit(main())
