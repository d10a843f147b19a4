"""The import probe and stage B of preflight, in the environment that will train.

    python -m training.box.probe --assignment FILE --nonce N [--constraints FILE] [--seconds S]

Prints two JSON lines, the CheckReports `probe` and `b`. Exit codes of installers are not believed: what counts is that this very
interpreter imports the pinned packages, that nothing which patches them is there, and that the device computes what it should. Stage B ends
within the given seconds: what did not fit is unknown.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from training.box import preflight
from training.contract import layout
from training.contract.cards import CARDS
from training.contract.checks import Check, CheckReport
from training.contract.families import FAMILIES
from training.contract.flops import predicted_tokens_s
from training.contract.memory import USABLE
from training.contract.micro_batches import regrouped
from training.contract.recipe import Assignment, Recipe
from training.contract.shapes import QWEN36_35B, ModelShape, shape_in, shape_of

BASE = ("pydantic", "boto3", "huggingface_hub")
HEAVY = ("torch", "transformers", "peft", "trl")
# Their versions count, but each costs seconds to import and comes along with the four above where it is used.
VERSIONS_ONLY = ("datasets", "accelerate", "safetensors")
# The first two replace forwards when they are merely imported; the third is found by its presence and used unasked.
FORBIDDEN = ("unsloth", "unsloth_zoo", "axolotl", "liger_kernel")
# Below these relative errors of bf16 (8 bits of mantissa) and fp32 products of this size are rounding, above them they are wrong.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}
_CONFIGURATIONS = 2
_DEVICE_S = 100.0
_MOST_TOKENS = 8192  # of the layer that is timed: as many as kernels.dispatch takes


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="training.box.probe")
    parser.add_argument("--assignment", type=Path, required=True)
    parser.add_argument("--nonce", required=True)
    parser.add_argument("--constraints", type=Path, default=Path.home() / layout.BOX_HOME / "constraints.txt")
    parser.add_argument("--seconds", type=float, default=_DEVICE_S, help="for stage B")
    options = parser.parse_args(argv)
    recipe = Assignment.model_validate_json(options.assignment.read_bytes()).recipe
    imports = probe_imports(recipe, options.constraints, options.nonce)
    print(imports.model_dump_json(), flush=True)
    if imports.ok:
        home = options.assignment.expanduser().parent
        device = probe_device(recipe, options.nonce, seconds=options.seconds, shape=box_shape(recipe, home))
        # The trainer holds its own speed against what this card reached here.
        (home / Path(layout.BOX_DEVICE_FACTS).name).write_text(json.dumps(device.facts))
        print(device.model_dump_json(), flush=True)
        if any(check.verdict == "unknown" for check in device.checks):
            # A check that was left behind may still hold the device, and would be waited for.
            os._exit(0)
    return 0


def probe_imports(recipe: Recipe, constraints: Path, nonce: str) -> CheckReport:
    """Import what the recipe's trainer needs and compare the versions with the pins."""
    imported = (*BASE, *(HEAVY if recipe.trainer == "trl" else ()))
    pinned = (*imported, *(VERSIONS_ONLY if recipe.trainer == "trl" else ()))
    pins = read_pins(constraints)
    facts: dict[str, str] = {"python": sys.version.split()[0], "prefix": sys.prefix}
    checks = [_imported(name) for name in imported]
    for name in pinned:
        facts[name] = _version(name) or ""
        checks.extend(_pinned(name, facts[name], pins.get(_normal(name))))
    checks.extend(_absent(name) for name in FORBIDDEN)
    checks.append(_our_kernels())
    return CheckReport(stage="probe", nonce=nonce, checks=tuple(checks), facts=facts)


def box_shape(recipe: Recipe, home: Path) -> ModelShape:
    """The model's shape by its config.json, if the prefetch has brought it by now; else by family and size."""
    return shape_in(home / Path(layout.BOX_MODEL).name, recipe.model)


def probe_device(
    recipe: Recipe, nonce: str, *, seconds: float = _DEVICE_S, shape: ModelShape | None = None
) -> CheckReport:
    """Compute something small on the recipe's device and compare it with the plain way. `none` computes nothing, so has no checks."""
    limited = Limited(seconds)
    facts: dict[str, str] = {}
    checks: list[Check] = []
    if recipe.box.device == "cuda":
        checks = list(_cuda(recipe, shape or shape_of(recipe.model), facts, limited))
    elif recipe.box.device == "cpu":
        checks = [limited.check("grouped_mm", lambda: _grouped("cpu", "float32", facts))]
    facts["seconds"] = f"{limited.spent_s:.2f}"
    # A check that was left behind may still write its facts.
    return CheckReport(stage="b", nonce=nonce, checks=tuple(checks), facts=dict(facts))


class Limited:
    """Checks within a number of seconds together. One that is not done by then is left behind in its thread, and the rest are not begun."""

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self._until = self._began + seconds
        self._stuck = ""

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self._began

    def check(self, name: str, look: Callable[[], Check]) -> Check:
        left = self._until - time.monotonic()
        answer: list[Check] = []
        if self._stuck or left <= 0:
            return _unknown(name, f"not looked at, {self._stuck or 'the time for checks'} was used up")
        thread = threading.Thread(target=lambda: answer.append(_guarded(name, look)), daemon=True)
        thread.start()
        thread.join(left)
        if not answer:
            self._stuck = f"{name} had not ended when the time"
            return _unknown(name, f"not done in the {left:.0f} s that were left")
        return answer[0]


def read_pins(constraints: Path) -> dict[str, str]:
    """name → version of a constraints file's `name==version ; marker` lines."""
    found = re.finditer(r"^([A-Za-z0-9._-]+)==([^\s;]+)", constraints.read_text(), re.MULTILINE)
    return {_normal(match[1]): match[2] for match in found}


def _imported(name: str) -> Check:
    purpose = "the trainer needs it" if name in HEAVY else "transfers and contracts need it"
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a broken package may raise anything, and all of it is the answer
        seen = f"{type(error).__name__}: {error}"[:300]
        # The same pins import elsewhere, so it is this box's copy that is broken.
        return Check(
            id=f"import {name}", verdict="fail", actual=seen, required="imports", purpose=purpose, remedy="next offer"
        )
    return Check(id=f"import {name}", verdict="pass", actual="imports", required="imports", purpose=purpose)


def _pinned(name: str, seen: str, pin: str | None) -> Iterator[Check]:
    purpose = "other versions may load a checkpoint and mean something else by it"
    if pin is None:
        yield Check(
            id=f"version {name}", verdict="unknown", actual=seen, required="no pin", purpose=purpose, blame="us"
        )
        return
    # A local tag such as +cpu or +cu130 names the build, not another version.
    good = seen.split("+")[0] == pin.split("+")[0]
    yield Check(
        id=f"version {name}",
        verdict="pass" if good else "fail",
        actual=seen or "none",
        required=pin,
        purpose=purpose,
        remedy="" if good else "install with constraints.txt",
        blame="us",
    )


def _absent(name: str) -> Check:
    """Neither a distribution nor a module of that name; looked for without importing it, since the import is the harm."""
    there = importlib.util.find_spec(name) is not None or _version(name) is not None
    return Check(
        id=f"absent {name}",
        verdict="fail" if there else "pass",
        actual="installed" if there else "absent",
        required="absent",
        purpose="it replaces forwards of the libraries that train, silently",
        remedy=f"remove {name} from the image, or use one without it" if there else "",
        blame="image",
    )


def _our_kernels() -> Check:
    """The folder `kernels` is ours, and Hugging Face's distribution of that name is not beside it."""
    spec, ours = importlib.util.find_spec("kernels"), importlib.util.find_spec("training")
    theirs = _version("kernels")
    places = [Path(found.origin).parent.parent for found in (spec, ours) if found and found.origin]
    good = theirs is None and len(places) == 2 and places[0] == places[1]
    seen = f"distribution kernels {theirs}" if theirs else str(places[0] / "kernels") if places else "none"
    return Check(
        id="kernels",
        verdict="pass" if good else "fail",
        actual=seen,
        required="our package, and no distribution of that name",
        purpose="transformers would load kernels from the network through the other one",
        remedy="" if good else "remove the distribution 'kernels' from the environment",
        blame="image" if theirs else "us",
    )


def _cuda(recipe: Recipe, shape: ModelShape, facts: dict[str, str], limited: Limited) -> Iterator[Check]:
    seen = preflight.read_driver_facts("cuda")
    code, library, driver = seen["cuda_init"], seen["libcuda"], seen.get("driver_version")
    facts.update(cuda_driver=str(seen["cuda_driver"]), driver_version=str(driver), libcuda=library)
    answer = preflight.cuda_init_check(code, library, driver, recipe.box.min_driver, seen.get("host_cuda"))
    yield Check.model_validate(answer)
    if answer["verdict"] == "fail":
        return
    # Dear ones last: kernels are compiled for the first time here, and what does not fit into the time is unknown.
    yield limited.check("matmul", lambda: _matmul(facts))
    yield limited.check("gpu_free", lambda: _gpu_free(facts))
    yield limited.check("grouped_mm", lambda: _grouped("cuda", "bfloat16", facts))
    if "routed_experts" in recipe.adapters.groups and recipe.model.dtype == "bfloat16":
        yield limited.check("experts_path", lambda: _experts_path(recipe, shape, facts))
    if FAMILIES[recipe.model.family].packing == "gated_delta_net":
        yield limited.check("gated_delta_rule", lambda: _gated_delta(recipe, shape, facts))
    predict(recipe, shape, facts)


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever the device throws is what it has to say, and the report must go out
        seen = f"{type(error).__name__}: {error}"[:300]
        purpose = "a training step is made of this"
        return Check(id=name, verdict="fail", actual=seen, required="runs", purpose=purpose, remedy="next offer")


def _unknown(name: str, seen: str) -> Check:
    return Check(
        id=name, verdict="unknown", actual=seen, required="an answer", purpose="a training step is made of this"
    )


def _matmul(facts: dict[str, str]) -> Check:
    """A product of about 1 GB of operands, so that memory and clocks are exercised, checked at a corner in float64."""
    import torch

    n = 12288
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = a @ b
    torch.cuda.synchronize()
    began = time.monotonic()
    product = a @ b
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    facts["matmul_tflops"] = f"{2 * n**3 / seconds / 1e12:.0f}"
    corner = a[:64].double() @ b[:, :64].double()
    return _close("matmul", product[:64, :64].double(), corner, "bfloat16")


def _grouped(device: str, dtype_name: str, facts: dict[str, str]) -> Check:
    """The grouped product of the routed experts against a loop over them: forward and gradient, with an empty expert among them."""
    import torch

    torch.manual_seed(0)
    dtype = getattr(torch, dtype_name)
    sizes = [32, 0, 80, 16] if device == "cpu" else [1024, 0, 2048, 512]
    x = torch.randn(sum(sizes), 64, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(len(sizes), 64, 128, device=device, dtype=dtype)
    ends = torch.tensor(sizes, device=device).cumsum(0).to(torch.int32)
    began = time.monotonic()
    y = torch.nn.functional.grouped_mm(x, w, offs=ends)
    (grad,) = torch.autograd.grad(y.float().square().sum(), x)
    seconds = time.monotonic() - began
    x_loop = x.detach().double().requires_grad_()
    y_loop = torch.cat([rows @ w[e].double() for e, rows in enumerate(torch.split(x_loop, sizes))])
    (grad_loop,) = torch.autograd.grad(y_loop.square().sum(), x_loop)
    facts["grouped_mm_seconds"] = f"{seconds:.4f}"
    forward = _close("grouped_mm", y.detach().double(), y_loop.detach(), dtype_name)
    return forward if forward.verdict == "fail" else _close("grouped_mm", grad.double(), grad_loop, dtype_name)


def _experts_path(recipe: Recipe, shape: ModelShape, facts: dict[str, str], device: str = "cuda") -> Check:
    """One layer of routed experts with LoRA at the recipe's own shapes: which computation gives right results on this card, and how fast it is.

    Where the fast ways fail or wait for the host, every card of the kind is alike: the recipe has to say that the slow one is wanted.
    """
    import torch

    from kernels import dispatch

    sizes = (shape.hidden, shape.intermediate, shape.experts, shape.experts_per_token, recipe.adapters.rank)
    tokens = min(micro_batch_tokens(recipe, shape), _MOST_TOKENS)
    choice = dispatch.choose(dispatch.Shapes(*sizes, tokens), torch.device(device))
    taken = next((trial for trial in choice.trials if trial.path == choice.path), None)
    facts["experts_path"] = choice.path
    if taken is not None and taken.milliseconds is not None:
        facts.update(experts_layer_ms=f"{taken.milliseconds:.3f}", experts_tokens=str(tokens))
    return experts_path_check(choice.path, choice.slow, choice.reason, allowed="slow_experts" in recipe.allow)


def micro_batch_tokens(recipe: Recipe, shape: ModelShape) -> int:
    """Of the first phase, as its plan splits a step: few rows at once take the experts longer a token than they will in training."""
    available_gb = CARDS[recipe.box.tier].memory_gb * USABLE
    phase = regrouped(recipe, recipe.phases[0], shape, available_gb, recipe.box.gpus)
    return phase.batch_size * phase.max_length


def experts_path_check(path: str, slow: bool, reason: str, *, allowed: bool) -> Check:
    fails = slow and not allowed
    return Check(
        id="experts_path",
        verdict="fail" if fails else "pass",
        actual=f"{path}: {reason}"[:300],
        required="any right path" if allowed else "a fast path",
        purpose="the routed experts are most of a step, and a wait for the host in each layer costs more than their product",
        remedy="write `allow: [slow_experts]` into the recipe, or take another box.tier" if fails else "",
        blame="user",
    )


def _gated_delta(recipe: Recipe, shape: ModelShape, facts: dict[str, str]) -> Check:
    """The gated delta net's fast rule, forward and backward on this card, as our layers call it on packed rows: what is compiled here is in Triton's
    cache for the first step. transformers' own layers run the same kernels, but that their gates are made outside."""
    began = time.monotonic()
    try:
        importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        allowed = "slow_experts" in recipe.allow
        seen = f"not importable ({error}), plain torch instead"
        remedy = "" if allowed else "install the extra `cuda`, or write `allow: [slow_experts]` into the recipe"
        return _rule_check("pass" if allowed else "fail", seen, remedy)
    from training.lean import delta_net
    from training.lean.tuning import use_shipped

    rule = functools.partial(delta_net.delta_rule, importlib.import_module(FAMILIES[recipe.model.family].modeling))
    # An estimate has widths that no model has, and the kernels are made for these.
    sizes = shape if shape.exact and shape.key_heads else QWEN36_35B
    if use_shipped():  # nothing is tuned then
        check = gated_delta_check(rule, sizes, "cuda")
    else:
        with few_configurations():
            check = gated_delta_check(rule, sizes, "cuda")
        if check.actual.startswith("OutOfResources"):  # none of the few fits this card
            check = gated_delta_check(rule, sizes, "cuda")
    facts["gated_delta_rule_seconds"] = f"{time.monotonic() - began:.1f}"
    return check


@contextmanager
def few_configurations() -> Iterator[None]:
    """Of each tuned kernel only the first configurations: tuning all of the rule's kernels takes a minute and a half on a cold cache, and here
    their results count, not their speed. Triton keeps what it finds under the configurations tried, so a trainer still tunes for itself."""
    from triton.runtime.autotuner import Autotuner

    prune, tried = Autotuner.prune_configs, []

    def first(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        tried.append(self)
        return list(prune(self, kwargs)[:_CONFIGURATIONS])

    Autotuner.prune_configs = first
    try:
        yield
    finally:
        Autotuner.prune_configs = prune
        for tuner in tried:
            tuner.cache.clear()  # the best of the few need not be good, nor fit


def gated_delta_check(rule: Callable[..., Any], shape: ModelShape, device: str) -> Check:
    """Output and five gradients of `rule`, called as `training.lean.delta_net.delta_rule` but for its first argument, in bfloat16 against the rule as it
    is written. transformers' own is no reference: where the library is installed, that is the library's kernel again.

    The library refuses this backward on Hopper with Triton 3.4 to 3.7.0, whose code for one of its kernels is wrong: asked for at the first
    training step, that would come after the download.
    """
    import torch

    from training.lean.rule_check import Heads, differences

    heads = Heads(shape.key_heads, shape.key_head_dim, shape.value_heads, shape.value_head_dim)
    try:
        apart = differences(rule, heads, torch.empty(0, device=device, dtype=torch.bfloat16))
    except Exception as error:  # noqa: BLE001 - a kernel that this card or this Triton cannot take says so in errors of many kinds
        return _rule_check("fail", f"{type(error).__name__}: {str(error).strip()}"[:300], _rule_remedy(str(error)))
    wrong = [name for name, each in apart.items() if not each <= TOLERANCE["bfloat16"]]  # a NaN, too
    seen = f"{max(apart.values()):.1e} relative error" + (f", off in {', '.join(wrong)}" if wrong else "")
    return _rule_check("fail" if wrong else "pass", seen, _rule_remedy("") if wrong else "")


def _rule_remedy(said: str) -> str:
    found = _version("triton") or "none"
    if "640" in said or "incorrect results" in said:
        return f"Triton is {found}; want 3.7.1 or later (constraints.txt), whose code for Hopper is right again"
    return f"the versions of Triton ({found}) and flash-linear-attention must be those of constraints.txt"


def _rule_check(verdict: Literal["pass", "fail"], actual: str, remedy: str) -> Check:
    return Check(
        id="gated_delta_rule",
        verdict=verdict,
        actual=actual,
        required=f"≤ {TOLERANCE['bfloat16']:g} relative error, forward and backward",
        purpose="three of four layers are made of it",
        remedy=remedy,
        blame="us",  # another card of the kind would do the same
    )


def predict(recipe: Recipe, shape: ModelShape, facts: dict[str, str]) -> None:
    """Add `predicted_tokens_s`, worked out of what was measured here; nothing where a part of it was not."""
    if not {"matmul_tflops", "experts_layer_ms", "experts_tokens"} <= set(facts):
        return
    tokens_s = predicted_tokens_s(
        shape,
        recipe.adapters,
        recipe.phases[0].max_length,
        layer_s=float(facts["experts_layer_ms"]) / 1e3,
        layer_tokens=int(facts["experts_tokens"]),
        matmul_tflops=float(facts["matmul_tflops"]),
    )
    facts["predicted_tokens_s"] = f"{tokens_s:.0f}"


def _gpu_free(facts: dict[str, str]) -> Check:
    import torch

    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    facts.update(gpu_free_gb=f"{free / 1e9:.1f}", gpu_total_gb=f"{total / 1e9:.1f}", gpu=torch.cuda.get_device_name())
    good = free >= 0.97 * total
    return Check(
        id="gpu_free",
        verdict="pass" if good else "fail",
        actual=f"{free / 1e9:.1f}",
        required=f"≥ {0.97 * total / 1e9:.1f}",
        unit="GB",
        purpose="memory that somebody else holds is missing in training",
        remedy="" if good else "next offer",
    )


def _close(name: str, seen: object, wanted: object, dtype: str) -> Check:
    import torch

    assert isinstance(seen, torch.Tensor) and isinstance(wanted, torch.Tensor)
    error = float((seen - wanted).norm() / wanted.norm())
    good = error <= TOLERANCE[dtype]  # false for NaN too
    return Check(
        id=name,
        verdict="pass" if good else "fail",
        actual=f"{error:.1e}",
        required=f"≤ {TOLERANCE[dtype]:g}",
        unit="relative error",
        purpose="a device that computes wrongly trains wrongly",
        remedy="" if good else "next offer",
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
