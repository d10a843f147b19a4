"""Configurations of flash-linear-attention's kernels for a kind of card: found once by the library's own tuner, shipped, and read by every run after.

    python -m training.lean.tuning --out training/lean/tuned/NVIDIA_H200

Without them a run's first step on a card compiles and times some hundred variants, one after another (92 s on an H200). A card for which none are
shipped tunes as ever. The format is the library's own (`fla/ops/utils/cache.py` of 0.6.0): a JSON a kernel, `default_config` for whatever sizes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

SHIPPED = Path(__file__).parent / "tuned"
_ROW_TOKENS = 16_384
_KEY_HEADS, _VALUE_HEADS, _HEAD_DIM = 16, 32, 128
"""Of Qwen3.5 and 3.6 mixture-of-experts models."""
_HALF_WIDTH = {str(torch.bfloat16), str(torch.float16)}
_WARM_UP_MS, _TIMED_MS = 2, 10
_MANY, _LEAST_WARPS, _ROWS = 4, 4, (16, 32, 64)


def use_shipped() -> str | None:
    """Let the library read what is shipped for this card; returns its folder, or None where there is none or the environment says something else.
    To be called before the library's first kernel runs; calling it again changes nothing."""
    from fla.ops.utils import cache

    folder = str(SHIPPED / str(cache.get_gpu_info()))
    told = "FLA_CACHE_MODE" in os.environ or os.environ.get("FLA_CONFIG_DIR", folder) != folder
    if told or not os.path.isdir(folder):
        return None
    if cache.FLA_CACHE_MODE is not cache.FlaCacheMode.FULL:
        os.environ["FLA_CONFIG_DIR"] = folder
        cache.FLA_CACHE_MODE = cache.FlaCacheMode.FULL
        cache.load_cached_config = _fitting(cache.load_cached_config)
    return folder


def _fitting(load: Callable[..., Any]) -> Callable[..., Any]:
    """They were tuned with rows of bfloat16. In float32 each stage takes twice the shared memory, 361 of the 232 kB that an H200 has, so half of them."""

    def load_fitting(kernel_name: str, autotune_key: Any = None) -> Any:
        config = load(kernel_name, autotune_key)
        # The key ends in the dtypes of the kernel's tensors.
        if config is None or autotune_key is None or _HALF_WIDTH & set(autotune_key.autotune_key):
            return config
        return {**config, "num_stages": max(1, config["num_stages"] // 2)}

    return load_fitting


def tune() -> dict[str, dict[str, Any]]:
    """The fastest configuration of each kernel of the rule on this card, by the kernel's name."""
    import fla.ops.gated_delta_rule  # noqa: F401  its tuners are made by importing it
    import triton

    _time_briefly()
    _leave_out(lambda every: every)
    _run_rule(_ROW_TOKENS)
    found = {}
    for tuner in _tuners():
        if tuner.cache:
            # The row of several documents ran last, and is what trains.
            best = list(tuner.cache.values())[-1]
            found[tuner.kernel_name] = {
                "kernel_name": tuner.kernel_name,
                "triton_version": triton.__version__,
                "default_config": {
                    "kwargs": best.kwargs,
                    "num_warps": best.num_warps,
                    "num_stages": best.num_stages,
                    "num_ctas": best.num_ctas,
                },
            }
    return found


def compile_one_of_each(number: int) -> None:
    """Compile the configuration of this number, counted round, of each kernel: so that the tuning, which asks for all, finds them in Triton's cache."""
    import fla.ops.gated_delta_rule  # noqa: F401
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources

    _time_briefly()
    run, tries = Autotuner.run, [0]
    _leave_out(lambda every: [every[(number + tries[0]) % len(every)]])

    def run_next_if_it_does_not_fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        for tries[0] in range(len(self.configs)):
            try:
                return run(self, *args, **kwargs)
            except OutOfResources:
                self.cache.clear()
        return run(self, *args, **kwargs)

    Autotuner.run = run_next_if_it_does_not_fit
    _run_rule(4096)


def _time_briefly() -> None:
    import triton

    for tuner in _tuners():
        tuner._do_bench = lambda call, quantiles: triton.testing.do_bench(
            call, warmup=_WARM_UP_MS, rep=_TIMED_MS, quantiles=quantiles
        )


def _leave_out(choose: Callable[[list[Any]], list[Any]]) -> None:
    """Of a kernel with many configurations only those worth a try, and of them what `choose` takes."""
    from triton.runtime.autotuner import Autotuner

    prune = Autotuner.prune_configs

    def pruned(self: Any, kwargs: Any) -> list[Any]:
        every = prune(self, kwargs)
        # Tiles of 64 to 128 squared spill from two warps; rows of 128 numbers want more than one.
        worth = [each for each in every if each.num_warps >= _LEAST_WARPS and each.kwargs.get("BT", 32) in _ROWS]
        return choose(worth if len(every) > _MANY and worth else every)

    Autotuner.prune_configs = pruned


def _run_rule(tokens: int) -> None:
    """Forward and backward, the row as one document and as several."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    for ends in (None, torch.tensor([0, tokens // 4, tokens // 2 + 16, tokens], dtype=torch.int32, device="cuda")):
        row = {"device": "cuda", "dtype": torch.bfloat16}
        query, key = (torch.randn(1, tokens, _KEY_HEADS, _HEAD_DIM, **row, requires_grad=True) for _ in range(2))
        value = torch.randn(1, tokens, _VALUE_HEADS, _HEAD_DIM, **row, requires_grad=True)
        decay, beta = (torch.randn(1, tokens, _VALUE_HEADS, **row, requires_grad=True) for _ in range(2))
        out, _ = chunk_gated_delta_rule(
            query,
            key,
            value,
            g=decay,
            beta=beta,
            A_log=torch.zeros(_VALUE_HEADS, **row),
            dt_bias=torch.zeros(_VALUE_HEADS, **row),
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens=ends,
        )
        out.backward(torch.randn_like(out))
    torch.cuda.synchronize()


def _tuners() -> Iterator[Any]:
    from fla.ops.utils.cache import CachedAutotuner

    yield from (each for each in gc.get_objects() if type(each) is CachedAutotuner)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m training.lean.tuning", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder named as the library names the card")
    parser.add_argument("--processes", type=int, default=max(1, min(12, (os.cpu_count() or 1) - 2)))
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("tuning: no card that torch can use; run it where there is one", file=sys.stderr)
        return 2
    if options.part is not None:
        compile_one_of_each(options.part)
        return 0
    command = [sys.executable, "-m", "training.lean.tuning", "--out", str(options.out)]
    command += ["--processes", str(options.processes), "--part"]
    workers = [subprocess.Popen([*command, str(part)]) for part in range(options.processes)]
    for worker in workers:
        worker.wait()  # what one could not compile, the tuning tries itself
    options.out.mkdir(parents=True, exist_ok=True)
    found = tune()
    for name, config in found.items():
        (options.out / f"{name}.json").write_text(json.dumps(config, indent=1) + "\n")
    print(f"{len(found)} kernels tuned: {', '.join(sorted(found))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
