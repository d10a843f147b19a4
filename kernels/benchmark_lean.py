"""How near the lean ops come to the card's memory: `python -m kernels.benchmark_lean [tokens]`, sizes of Qwen3.6-35B-A3B, bfloat16.

An op's bytes are those that it must move: each input read once, each output written once. Time is CUDA events' around many calls, the host's
part hidden by them being queued.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import head, lean
from kernels.launch import ceil_div

_REPEATS, _CALLS = 7, 10
_STATS = (torch.float32, torch.float32, torch.bool)
_HIDDEN, _KEY, _VALUE, _EXPERTS, _TOP_K, _SHARED, _VOCABULARY = 2048, 2048, 4096, 256, 8, 512, 248_320


@dataclass(frozen=True)
class Row:
    op: str
    microseconds: float
    megabytes: float

    @property
    def tb_per_s(self) -> float:
        return self.megabytes / self.microseconds

    def __str__(self) -> str:
        return f"{self.op:32} {self.microseconds:9.1f} µs {self.megabytes:8.1f} MB {self.tb_per_s:6.2f} TB/s"


def measure(tokens: int = 4096) -> Iterator[Row]:
    """Forward and backward of each op, one after the other; needs a card."""
    torch.manual_seed(0)
    T, eps = tokens, 1e-6

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def frozen(*shape: int) -> Tensor:
        return new(*shape).detach()

    document = torch.arange(T, device="cuda", dtype=torch.int32) // 1000
    hidden = [new(T, _HIDDEN) for _ in range(4)]
    channels, per_head = 2 * _KEY + _VALUE, _VALUE // 128
    cos, weight = frozen(T, 64), frozen(_HIDDEN)
    mixed, conv = new(T, channels), frozen(channels, 4)
    gated, qg, keys = [new(T, per_head, 128) for _ in range(2)], new(T, 16, 512), new(T, 2, 256)
    heads = [new(T, 16, 256) for _ in range(2)]
    gate, up, logits, token_gate = new(T, _SHARED), new(T, _SHARED), new(T, _EXPERTS), new(T, 1)
    yield from _both("rms_norm", lambda: lean.rms_norm(hidden[0], weight, eps, zero_centered=True), hidden[:1])
    yield from _both(
        "add_rms_norm", lambda: lean.add_rms_norm(*hidden[:2], weight, eps, zero_centered=True), hidden[:2], 4, 4
    )
    yield from _both("gated_rms_norm", lambda: lean.gated_rms_norm(*gated, weight[:128], eps), gated)
    yield from _both("conv_silu_split", lambda: lean.conv_silu_split(mixed, conv, document, _KEY), [mixed])
    yield from _both("silu_mul", lambda: lean.silu_mul(gate, up), [gate, up])
    yield from _both(
        "shared_add", lambda: lean.shared_add(*hidden[:2], token_gate, hidden[2]), [*hidden[:3], token_gate], 4, 3
    )
    yield from _both(
        "query_gate_norm_rope",
        lambda: lean.query_gate_norm_rope(qg, weight[:256], cos, cos, eps, zero_centered=True),
        [qg],
        1,
        2.5,
    )
    yield from _both("norm_rope", lambda: lean.norm_rope(keys, weight[:256], cos, cos, eps, zero_centered=True), [keys])
    yield from _both("sigmoid_mul", lambda: lean.sigmoid_mul(*heads), heads)
    yield from _both("top_k_router", lambda: lean.top_k_router(logits, _TOP_K)[0], [logits], 1, 2)
    yield from _head(frozen(T, _HIDDEN).requires_grad_(), frozen(_VOCABULARY, _HIDDEN))


def _head(hidden_TH: Tensor, weight_VH: Tensor) -> Iterator[Row]:
    """The whole, and the pass over the logits alone: read twice, written once."""
    T, V = len(hidden_TH), len(weight_VH)
    label_T = torch.randint(0, V, (T,), device="cuda")
    whole_us = _microseconds(lambda: head.token_log_probs(hidden_TH, weight_VH, label_T), 1)
    yield Row("token_log_probs", whole_us, 3 * T * V * 2 / 1e6 + 2 * ceil_div(T, 2048) * weight_VH.nbytes / 1e6)
    logits = (hidden_TH[:2048] @ weight_VH.T).detach()
    log_prob_T, entropy_T, top_T = (torch.empty(len(logits), device="cuda", dtype=t) for t in _STATS)
    pass_us = _microseconds(
        lambda: head._label_stats(logits, label_T[:2048], log_prob_T, entropy_T, top_T, 1.0, True), 2
    )
    yield Row("label_stats", pass_us, 3 * logits.nbytes / 1e6)


def _both(
    name: str,
    op: Callable[[], Tensor | tuple[Tensor, ...]],
    leaves: list[Tensor],
    forward: float | None = None,
    backward: float | None = None,
) -> Iterator[Row]:
    """Bytes in units of the first leaf's; where none are given, all leaves and outputs, and in the backward pass twice the leaves besides."""
    outputs = op()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [torch.randn_like(each) for each in outputs]
    inside, out = sum(each.nbytes for each in leaves), sum(each.nbytes for each in outputs)
    unit = leaves[0].nbytes
    yield Row(name, _microseconds(op), (forward * unit if forward else inside + out) / 1e6)

    def back() -> None:
        torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)

    yield Row(f"{name}, backward", _microseconds(back), (backward * unit if backward else 2 * inside + out) / 1e6)


def _microseconds(call: Callable[[], object], calls: int = _CALLS) -> float:
    for _ in range(2):
        call()
    times = []
    for _ in range(_REPEATS):
        # Long enough asleep for the host to queue all calls: then only the card's time is seen.
        torch.cuda._sleep(20_000_000)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def main() -> int:
    if not torch.cuda.is_available():
        print("benchmark: no CUDA card here; run it on a machine with one", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name())
    for row in measure(*map(int, sys.argv[1:])):
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
