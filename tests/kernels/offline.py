"""Compile for a card that is not here: the layer's own launches are recorded on tensors without memory, then each is cross-compiled."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import moe_lora
from kernels.adapter import Adapter
from kernels.launch import Launcher

# Shared memory that one block may have, by NVIDIA's CUDA programming guide, table of technical specifications.
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
_TYPES = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Launch:
    fn: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Compiled:
    shared: int
    registers: int
    stack: int
    ptx: str

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.ptx))


class Recorder(Launcher):
    def __init__(self) -> None:
        super().__init__()
        self.launches: dict[Any, Launch] = {}

    def __call__(self, fn: Any, grid: Any, args: tuple[Any, ...], options: dict[str, Any], key: Any = ()) -> None:
        self.launches[fn, key] = Launch(fn, args, options)


def record_layer(plan: moe_lora.Plan, T: int, H: int, I: int, E: int, k: int, rank: int) -> list[Launch]:
    """Every launch of one forward and backward pass with LoRA, gradients accumulated."""
    meta = {"device": "meta"}
    adapters = []
    for size_in, size_out in ((H, 2 * I), (I, H)):
        adapter = Adapter(torch.empty(E * rank, size_in, **meta), torch.empty(size_out, rank * E, **meta), E, 2.0)
        adapter.launch = Recorder()
        adapter.lora_A.grad, adapter.lora_B.grad = torch.empty_like(adapter.lora_A), torch.empty_like(adapter.lora_B)
        adapters.append(adapter)
    bf16 = {"device": "meta", "dtype": torch.bfloat16}
    x, weight = torch.empty(T, H, **bf16), torch.empty(T, k, **bf16)
    expert = torch.empty(T, k, dtype=torch.int64, **meta)
    w1, w2 = torch.empty(E, 2 * I, H, **bf16), torch.empty(E, H, I, **bf16)
    call = moe_lora._Call(expert, w1, w2, *adapters, plan, accumulate=True, keep=True)
    layer = moe_lora._Layer(x, weight, call)
    layer.launch = Recorder()
    routing = moe_lora.route(expert, weight, E, plan.heights, layer.launch)
    out, kept = layer.forward(x, weight, routing, keep=True)
    layer.backward(out, x, weight, kept, routing, wants_dx=True, wants_factors=True)
    return [*layer.launch.launches.values(), *adapters[0].launch.launches.values()]


def compile_for(launch: Launch, capability: int) -> Compiled:
    fn, names = launch.fn, launch.fn.arg_names
    constants = {p.name: arg for p, arg in zip(fn.params, launch.args, strict=True) if p.is_constexpr}
    signature = {
        name: "constexpr" if name in constants else _type(arg) for name, arg in zip(names, launch.args, strict=True)
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    kernel = triton.compile(
        ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options=launch.options,
    )
    registers, stack = _resources(kernel.asm["cubin"])
    return Compiled(kernel.metadata.shared, registers, stack, kernel.asm["ptx"])


def _type(arg: Any) -> str:
    if isinstance(arg, TensorDescriptor):
        return f"tensordesc<bf16{arg.block_shape}>"
    if isinstance(arg, torch.Tensor):
        return _TYPES[arg.dtype]
    return {int: "i32", float: "fp32"}[type(arg)]


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack a thread): spills are stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])
