"""How near the lean ops come to the card's memory: `python -m kernels.benchmark_lean [--tokens T]`, sizes of Qwen3.6-35B-A3B, bfloat16.

An op's bytes are those that it must move: each input read once, each output written once. Time is CUDA events' around many calls, the host's
part hidden by them being queued.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import head, lean
from kernels.benchmark import machine
from kernels.launch import ceil_div
from kernels.rows import takes_kernel

_REPEATS, _CALLS = 7, 10
_ASLEEP, _LONGEST = 20_000_000, 640_000_000
"""Clock cycles: 11 ms of an H200, and a third of a second."""
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
        return f"| {self.op} | {self.microseconds:.1f} | {self.megabytes:.1f} | {self.tb_per_s:.2f} |"


Clock = Callable[[Callable[[], object], int], float]


def microseconds(call: Callable[[], object], calls: int) -> float:
    """The card's time of one of so many calls. RuntimeError if they wait for the card, or the host cannot queue them while it sleeps."""
    for _ in range(2):
        call()
    times: list[float] = []
    asleep = _ASLEEP
    while len(times) < _REPEATS:
        torch.cuda.synchronize()
        # While the card sleeps the host queues all calls: then only the card's time is seen.
        torch.cuda._sleep(asleep)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        hidden = not start.query()
        end.synchronize()
        if hidden:
            times.append(start.elapsed_time(end) * 1e3 / calls)
        elif asleep >= _LONGEST:
            raise RuntimeError(
                f"{calls} calls are not queued in {asleep} cycles; want an op that does not wait, and an idler host"
            )
        else:
            asleep *= 2
    return statistics.median(times)


def measure(tokens: int = 4096, device: str = "cuda", clock: Clock = microseconds) -> Iterator[Row]:
    """Forward and backward of each op, one after the other."""
    torch.manual_seed(0)
    T, eps = tokens, 1e-6

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    def frozen(*shape: int) -> Tensor:
        return new(*shape).detach()

    document = torch.arange(T, device=device, dtype=torch.int32) // 1000
    hidden = [new(T, _HIDDEN) for _ in range(4)]
    channels, per_head = 2 * _KEY + _VALUE, _VALUE // 128
    cos, weight = frozen(T, 64), frozen(_HIDDEN)
    mixed, conv = new(T, channels), frozen(channels, 4)
    gated, qg, keys = [new(T, per_head, 128) for _ in range(2)], new(T, 16, 512), new(T, 2, 256)
    heads = [new(T, 16, 256) for _ in range(2)]
    gate, up, logits, token_gate = new(T, _SHARED), new(T, _SHARED), new(T, _EXPERTS), new(T, 1)
    yield from _both(clock, "rms_norm", lambda: lean.rms_norm(hidden[0], weight, eps, zero_centered=True), hidden[:1])
    yield from _both(
        clock, "add_rms_norm", lambda: lean.add_rms_norm(*hidden[:2], weight, eps, zero_centered=True), hidden[:2], 4, 4
    )
    yield from _both(clock, "gated_rms_norm", lambda: lean.gated_rms_norm(*gated, weight[:128], eps), gated)
    yield from _both(clock, "conv_silu_split", lambda: lean.conv_silu_split(mixed, conv, document, _KEY), [mixed])
    yield from _both(clock, "silu_mul", lambda: lean.silu_mul(gate, up), [gate, up])
    yield from _both(
        clock,
        "shared_add",
        lambda: lean.shared_add(*hidden[:2], token_gate, hidden[2]),
        [*hidden[:3], token_gate],
        4,
        3,
    )
    yield from _both(
        clock,
        "query_gate_norm_rope",
        lambda: lean.query_gate_norm_rope(qg, weight[:256], cos, cos, eps, zero_centered=True),
        [qg],
        1,
        2.5,
    )
    yield from _both(
        clock, "norm_rope", lambda: lean.norm_rope(keys, weight[:256], cos, cos, eps, zero_centered=True), [keys]
    )
    yield from _both(clock, "sigmoid_mul", lambda: lean.sigmoid_mul(*heads), heads)
    yield from _both(clock, "top_k_router", lambda: lean.top_k_router(logits, _TOP_K)[0], [logits], 1, 2)
    yield from _head(clock, frozen(T, _HIDDEN).requires_grad_(), frozen(_VOCABULARY, _HIDDEN))


def _head(clock: Clock, hidden_TH: Tensor, weight_VH: Tensor) -> Iterator[Row]:
    """The whole, and the pass over the logits alone: read twice, written once."""
    T, V = len(hidden_TH), len(weight_VH)
    label_T = torch.randint(0, V, (T,), device=hidden_TH.device)
    whole_us = clock(lambda: head.token_log_probs(hidden_TH, weight_VH, label_T), 1)
    yield Row("token_log_probs", whole_us, 3 * T * V * 2 / 1e6 + 2 * ceil_div(T, 2048) * weight_VH.nbytes / 1e6)
    logits_TV = (hidden_TH[:2048] @ weight_VH.T).detach()
    label_T = label_T[:2048]
    stats = [torch.empty(len(logits_TV), device=hidden_TH.device, dtype=dtype) for dtype in _STATS]
    fill = head._label_stats if takes_kernel(logits_TV) else head.plain_label_stats
    yield Row("label_stats", clock(lambda: fill(logits_TV, label_T, *stats, 1.0, True), 2), 3 * logits_TV.nbytes / 1e6)


def _both(
    clock: Clock,
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
    yield Row(name, clock(op, _CALLS), (forward * unit if forward else inside + out) / 1e6)

    def back() -> None:
        torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)

    yield Row(f"{name}, backward", clock(back, _CALLS), (backward * unit if backward else 2 * inside + out) / 1e6)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.benchmark_lean", description="The lean ops' table.")
    parser.add_argument("--tokens", type=int, default=4096, help="rows of every op; at least 1")
    options = parser.parse_args(argv)
    if options.tokens < 1:
        parser.error(f"--tokens: seen {options.tokens}, want at least 1")
    if not torch.cuda.is_available():
        print("no CUDA card here; run it on a machine with one", file=sys.stderr)
        return 2
    print(f"{machine()}; {options.tokens} tokens\n\n| op | µs | MB | TB/s |\n|---|---|---|---|", flush=True)
    for row in measure(options.tokens):
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
