"""Cross-compile flash-linear-attention's rule for an H200, with the configurations shipped for it, and print what each kernel takes; run by
test_lean_tuning.py. No card is needed, and none is used.

    python tests/training/lean/compiled_rule.py FORM…

A form is `packed`, as our layers call the rule, or `given`, as transformers' own do; with `-float32` behind it, in that dtype.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

CARD, SHARED_LIMIT = "NVIDIA H200", 232_448
_T, _K, _V, _D = 160, 16, 32, 128
_RUN = JITFunction.run


class Driver:
    """What Triton and the library ask before a launch."""

    utils = types.SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": SHARED_LIMIT})

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


def main(forms: list[str]) -> None:
    pretend_a_card()
    from training.lean.tuning import use_shipped

    assert use_shipped(), f"nothing is shipped for {CARD}"
    for form in forms:
        compile_only(form)
        run_rule(form)


def pretend_a_card() -> None:
    """Its name and its limits."""
    os.environ["FLA_GPU_NAME"] = CARD
    triton.runtime.driver.set_active(Driver())
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_name = lambda device=None: CARD
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    from fla.utils import hardware

    # Tensors stay on the CPU, whose index is None.
    hardware.get_all_max_shared_mem = lambda: {0: SHARED_LIMIT, None: SHARED_LIMIT}


def compile_only(form: str) -> None:
    """Kernels are compiled from here on, not launched; each call prints one line."""

    def compile_alone(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = _RUN(self, *args, grid=grid, warmup=True, **options)
        print(json.dumps({"form": form, "kernel": self.__name__, "shared": kernel.metadata.shared}), flush=True)
        return kernel

    JITFunction.run = compile_alone


def run_rule(form: str) -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    way, _, dtype = form.partition("-")
    like: dict[str, Any] = {"dtype": getattr(torch, dtype or "bfloat16")}
    query, key = (torch.randn(1, _T, _K, _D, **like, requires_grad=True) for _ in range(2))
    value = torch.randn(1, _T, _V, _D, **like, requires_grad=True)
    decay, beta = (torch.rand(1, _T, _V, **like, requires_grad=True) for _ in range(2))
    options: dict[str, Any] = {"g": decay.float()}
    if way == "packed":
        gates = {"A_log": torch.zeros(_V, **like), "dt_bias": torch.zeros(_V, **like)}
        ends = torch.tensor([0, 70, 71, _T], dtype=torch.int32)
        options = {
            "g": decay,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "cu_seqlens": ends,
            **gates,
        }
    out, _ = chunk_gated_delta_rule(query, key, value, beta=beta, use_qk_l2norm_in_kernel=True, **options)
    out.backward(torch.ones_like(out))


if __name__ == "__main__":
    main(sys.argv[1:])
