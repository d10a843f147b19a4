"""The import probe and stage B of preflight, in the environment that will train.

    python -m training.box.probe --assignment FILE --nonce N [--constraints FILE]

Prints two JSON lines, the CheckReports `probe` and `b`. Exit codes of installers are not believed: what counts is that this very
interpreter imports the pinned packages, that nothing which patches them is there, and that the device computes what it should.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from training.box import preflight
from training.contract import layout
from training.contract.checks import Check, CheckReport
from training.contract.recipe import Assignment, Recipe

BASE = ("pydantic", "boto3", "huggingface_hub")
HEAVY = ("torch", "transformers", "peft", "trl")
# Their versions count, but each costs seconds to import and comes along with the four above where it is used.
VERSIONS_ONLY = ("datasets", "accelerate", "safetensors")
# The first two replace forwards when they are merely imported; the third is found by its presence and used unasked.
FORBIDDEN = ("unsloth", "unsloth_zoo", "axolotl", "liger_kernel")
# Below these relative errors of bf16 (8 bits of mantissa) and fp32 products of this size are rounding, above them they are wrong.
TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="training.box.probe")
    parser.add_argument("--assignment", type=Path, required=True)
    parser.add_argument("--nonce", required=True)
    parser.add_argument("--constraints", type=Path, default=Path.home() / layout.BOX_HOME / "constraints.txt")
    options = parser.parse_args(argv)
    recipe = Assignment.model_validate_json(options.assignment.read_bytes()).recipe
    imports = probe_imports(recipe, options.constraints, options.nonce)
    print(imports.model_dump_json(), flush=True)
    if imports.ok:
        device = probe_device(recipe, options.nonce)
        print(device.model_dump_json(), flush=True)
        # The trainer holds its own speed against what this card reached here.
        (options.assignment.expanduser().parent / Path(layout.BOX_DEVICE_FACTS).name).write_text(
            json.dumps(device.facts)
        )
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


def probe_device(recipe: Recipe, nonce: str) -> CheckReport:
    """Compute something small on the recipe's device and compare it with the plain way. `none` computes nothing, so has no checks."""
    began = time.monotonic()
    facts: dict[str, str] = {}
    checks: list[Check] = []
    if recipe.box.device == "cuda":
        checks = list(_cuda(recipe, facts))
    elif recipe.box.device == "cpu":
        checks = [_guarded("grouped_mm", lambda: _grouped("cpu", "float32", facts))]
    facts["seconds"] = f"{time.monotonic() - began:.2f}"
    return CheckReport(stage="b", nonce=nonce, checks=tuple(checks), facts=facts)


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


def _cuda(recipe: Recipe, facts: dict[str, str]) -> Iterator[Check]:
    version, code, library = preflight.ask_cuda()
    driver = preflight.read_driver_facts("cuda").get("driver_version")
    facts.update(cuda_driver=str(version), driver_version=str(driver), libcuda=library)
    answer = preflight.cuda_init_check(code, library, driver, recipe.box.min_driver)
    yield Check.model_validate(answer)
    if answer["verdict"] == "fail":
        return
    yield _guarded("matmul", lambda: _matmul(facts))
    yield _guarded("grouped_mm", lambda: _grouped("cuda", "bfloat16", facts))
    yield _guarded("no_host_sync", lambda: _no_host_sync(recipe))
    yield _guarded("gpu_free", lambda: _gpu_free(facts))


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever the device throws is what it has to say, and the report must go out
        seen = f"{type(error).__name__}: {error}"[:300]
        purpose = "a training step is made of this"
        return Check(id=name, verdict="fail", actual=seen, required="runs", purpose=purpose, remedy="next offer")


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


def _no_host_sync(recipe: Recipe) -> Check:
    """Does torch's grouped product wait for the device? Where it does (sm_120), it is a loop over the experts, and slow in silence.

    The card is not at fault, and every card of its kind is alike: the recipe has to say that this is wanted.
    """
    import torch

    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(2, 64, 64, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([100, 256], device="cuda", dtype=torch.int32)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.nn.functional.grouped_mm(x, w, offs=ends)
        waits = False
    except RuntimeError as error:
        if "synchroniz" not in str(error).lower():
            raise
        waits = True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allowed = "slow_experts" in recipe.allow
    return Check(
        id="no_host_sync",
        verdict="fail" if waits and not allowed else "pass",
        actual=("waits, allowed by the recipe" if allowed else "waits") if waits else "none",
        required="none",
        purpose="a wait for the device in each layer costs more than the product itself",
        remedy="write `allow: [slow_experts]` into the recipe, or take tier h200 or b200" if waits else "",
        blame="user",
    )


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
