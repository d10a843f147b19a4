"""Time the whole experts layer beside its peers on this card, and refuse to print a number of a path whose results are wrong.

    python -m kernels.benchmark [--out RESULTS.md] [--rows 35B:4096,...] [--quick]

Every path runs forward and backward on the same fresh random data and uneven routing: x, router weights and both factors of both projections
get gradients. Times are medians of CUDA events over rounds in which every path has its turn; each path gets the better of eager calls and a
captured graph. A turn is a few calls on a rested card; "sustained" is without any rest, when the card has lowered its clock. Like with like,
all have bfloat16 factors, each in the layout it likes best, and hand their gradients out in bfloat16.
"ours, training" is what a run really does, and more work: float32 masters in PEFT's layout, gradients added to their .grad in float32.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton
from torch import Tensor

from kernels import reference, torch_paths
from kernels.adapter import Adapter, lay_out
from kernels.moe_lora import PORTABLE, Plan, experts_with_lora, plan_for

BANDWIDTH_TBS, RATE_TFLOPS = 4.3, 790.0
"""An H200's copy bandwidth and bf16 matrix rate as measured on random data: what the floor is reckoned from."""
RANK, TOP_K, SCALE, SKEW = 32, 8, 2.0, 0.5
REST_S, SETTLE_S = 0.2, 1.0
MOST_ERROR = 5e-3
MOST_PEER_ERROR = 1e-2


@dataclass(frozen=True)
class Shape:
    name: str
    H: int
    I: int
    E: int

    def floor_ms(self, T: int) -> float:
        """Frozen weights read once a pass, adapters, x, out and h in bf16; base products once a pass, LoRA's once and twice."""
        M, weights = T * TOP_K, self.E * 3 * self.H * self.I
        factors = self.E * RANK * (2 * self.H + 3 * self.I)
        forward_bytes = 2 * (weights + factors + 2 * T * self.H + M * 2 * self.I) + 4 * M
        backward_bytes = 2 * (weights + 2 * factors + 3 * T * self.H + M * 2 * self.I)
        base, lora = 2 * M * 3 * self.H * self.I, 2 * M * RANK * (2 * self.H + 3 * self.I)
        passes = ((forward_bytes, base + lora), (backward_bytes, base + 2 * lora))
        return sum(max(size / BANDWIDTH_TBS / 1e9, work / RATE_TFLOPS / 1e9) for size, work in passes)


SHAPES = {shape.name: shape for shape in (Shape("35B", 2048, 512, 256), Shape("235B", 4096, 1536, 128))}
ROWS = (("35B", 4096), ("35B", 16384), ("235B", 4096), ("235B", 16384))


@dataclass
class Case:
    """One row's data: the base weights, the factors grouped, and everything a step reads."""

    x: Tensor
    expert: Tensor
    weight: Tensor
    w1: Tensor
    w2: Tensor
    factors: tuple[Tensor, Tensor, Tensor, Tensor]
    dout: Tensor


@dataclass
class Result:
    path: str
    forward_ms: float = float("nan")
    eager_ms: float = float("nan")
    graph_ms: float = float("nan")
    spread_pct: float = float("nan")
    sustained_ms: float = float("nan")
    issue_ms: float = float("nan")
    graph_issue_ms: float = float("nan")
    kept_gb: float = float("nan")
    peak_gb: float = float("nan")
    errors: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def best_ms(self) -> float:
        return min(ms for ms in (self.eager_ms, self.graph_ms, float("inf")) if ms == ms)

    @property
    def worst_error(self) -> float:
        return max(self.errors.values(), key=lambda error: float("inf") if error != error else error)


Forward = Callable[[], Tensor]


def make_case(shape: Shape, T: int, seed: int, device: str = "cuda") -> Case:
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*size: int, std: float = 1.0) -> Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16, generator=generator).mul_(std)

    H, I, E = shape.H, shape.I, shape.E
    bias = SKEW * torch.randn(E, device=device, generator=generator)
    logits, expert = torch.topk(torch.randn(T, E, device=device, generator=generator) + bias, TOP_K, dim=-1)
    factors = (
        random(E, RANK, H, std=H**-0.5),
        random(E, 2 * I, RANK, std=0.3 * RANK**-0.5),
        random(E, RANK, I, std=I**-0.5),
        random(E, H, RANK, std=0.3 * RANK**-0.5),
    )
    return Case(
        x=random(T, H),
        expert=expert,
        weight=torch.softmax(logits, -1).bfloat16(),
        w1=random(E, 2 * I, H, std=H**-0.5),
        w2=random(E, H, I, std=I**-0.5),
        factors=factors,
        dout=random(T, H),
    )


class Ours:
    """Our kernels on bfloat16 factors, gradients handed out."""

    def __init__(self, case: Case, plan: Plan, dtype: torch.dtype = torch.bfloat16) -> None:
        E = case.w1.shape[0]
        a1, b1, a2, b2 = case.factors
        flat = (reference.flat_a(a1), reference.flat_b(b1), reference.flat_a(a2), reference.flat_b(b2))
        self.masters = [tensor.to(dtype).requires_grad_() for tensor in flat]
        self.case, self.plan, self.accumulate = case, plan, False
        for lora_B in self.masters[1::2]:
            self._place(lora_B)
        self.up, self.down = (Adapter(*self.masters[i : i + 2], E, SCALE) for i in (0, 2))
        self.leaves = [case.x.detach().requires_grad_(), case.weight.detach().requires_grad_()]

    def _place(self, lora_B: Tensor) -> None:
        lay_out(lora_B)

    def forward(self) -> Tensor:
        c = self.case
        x, weight = self.leaves
        return experts_with_lora(
            x,
            c.expert,
            weight,
            c.w1,
            c.w2,
            self.up,
            self.down,
            plan=self.plan,
            accumulate=self.accumulate,
            check_experts=False,
        )

    def step(self) -> None:
        torch.autograd.grad(self.forward(), [*self.leaves, *self.masters], self.case.dout)

    def results(self) -> dict[str, Tensor]:
        out = self.forward()
        grads = torch.autograd.grad(out, [*self.leaves, *self.masters], self.case.dout)
        return self._named(out, grads[:2], grads[2:])

    def _named(self, out: Tensor, grads: Iterable[Tensor], factors: Iterable[Tensor]) -> dict[str, Tensor]:
        layouts = (reference.grouped_a, reference.grouped_b) * 2
        grouped = [layout(factor, self.case.w1.shape[0]) for layout, factor in zip(layouts, factors, strict=True)]
        return dict(zip(reference.RESULTS, (out.detach(), *grads, *grouped), strict=True))


class OursTraining(Ours):
    """As in training: float32 masters as PEFT lays them, gradients added to .grad by the kernels."""

    def __init__(self, case: Case, plan: Plan) -> None:
        super().__init__(case, plan, torch.float32)
        self.accumulate = True

    def _place(self, lora_B: Tensor) -> None:
        pass

    def step(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None
        self.forward().backward(self.case.dout)

    def results(self) -> dict[str, Tensor]:
        for tensor in (*self.masters, *self.leaves):
            tensor.grad = None
        out = self.forward()
        out.backward(self.case.dout)
        grads = [tensor.grad for tensor in (*self.leaves, *self.masters) if tensor.grad is not None]
        return self._named(out, grads[:2], grads[2:])


class Peer:
    """A path made of torch's operations, on grouped bfloat16 factors."""

    def __init__(self, case: Case, layer: Callable[..., Tensor]) -> None:
        self.case, self.layer = case, layer
        self.factors = tuple(factor.detach().requires_grad_() for factor in case.factors)
        self.leaves = [case.x.detach().requires_grad_(), case.weight.detach().requires_grad_(), *self.factors]

    def forward(self) -> Tensor:
        c = self.case
        return self.layer(self.leaves[0], c.expert, self.leaves[1], c.w1, c.w2, self.factors, SCALE)

    def step(self) -> None:
        torch.autograd.grad(self.forward(), self.leaves, self.case.dout)

    def results(self) -> dict[str, Tensor]:
        out = self.forward()
        grads = torch.autograd.grad(out, self.leaves, self.case.dout)
        return dict(zip(reference.RESULTS, (out.detach(), *grads), strict=True))


def paths(case: Case, quick: bool) -> dict[str, Callable[[], Ours | Peer]]:
    """What is timed, by name; made when its turn comes, so that nothing else holds memory."""
    capability = torch.cuda.get_device_capability()
    made: dict[str, Callable[[], Ours | Peer]] = {
        "ours": lambda: Ours(case, plan_for(capability)),
        "ours, training": lambda: OursTraining(case, plan_for(capability)),
        "grouped_mm + LoRA": lambda: Peer(case, torch_paths.grouped_mm),
        "the same, torch.compile": lambda: Peer(case, torch.compile(torch_paths.grouped_mm, dynamic=False)),
    }
    if not quick:
        made["ours, portable"] = lambda: Ours(case, PORTABLE)
        made["as PEFT computes it"] = lambda: Peer(case, torch_paths.folded)
        made["host loop"] = lambda: Peer(case, torch_paths.host_loop)
    return made


@dataclass
class Runner:
    """One path that has shown its results, ready to be timed in its turn."""

    result: Result
    eager: Callable[[], None]
    graph: Callable[[], None] | None
    rounds: list[tuple[float, float]] = field(default_factory=list)
    """(eager, graph) ms of each round."""

    def take_turn(self, calls: int) -> None:
        eager = _rested_ms(self.eager, calls)
        self.rounds.append((eager, _rested_ms(self.graph, calls) if self.graph else float("nan")))

    def finish(self) -> Result:
        result = self.result
        eager, graph = zip(*self.rounds, strict=True)
        result.eager_ms, result.graph_ms = statistics.median(eager), statistics.median(graph)
        best = graph if result.graph_ms < result.eager_ms else eager
        result.spread_pct = 100 * (max(best) - min(best)) / statistics.median(best)
        result.sustained_ms = _sustained_ms(self.graph if best is graph and self.graph else self.eager, result.best_ms)
        return result


def prepare(name: str, path: Ours | Peer, wanted: dict[str, Tensor]) -> Runner:
    """Everything about a path but its time: errors, memory, what it costs the host, its graph if it can have one."""
    result = Result(name)
    seen = path.results()
    result.errors = {key: reference.relative_error(seen[key], wanted[key]) for key in reference.RESULTS}
    del seen

    for _ in range(3):
        path.step()
    result.kept_gb, result.peak_gb = _memory(path)
    result.forward_ms = _median_ms(path.forward, 7)
    result.issue_ms = _issue_ms(path.step)
    try:
        graph = _capture(path.step)
    except Exception as error:  # noqa: BLE001 - whatever a peer does that no graph may hold: it keeps its eager time, and the table says so
        result.note = f"no graph: {str(error).splitlines()[0][:60]}"
        torch.cuda.synchronize()
        return Runner(result, path.step, None)
    result.graph_issue_ms = _issue_ms(graph.replay)
    return Runner(result, path.step, graph.replay)


def _rested_ms(call: Callable[[], object], calls: int) -> float:
    """Every turn begins on a card that has done nothing for the same while: else whoever follows a path that tires it less gains by that."""
    torch.cuda.synchronize()
    time.sleep(REST_S)
    return _median_ms(call, calls)


def _sustained_ms(call: Callable[[], object], ms: float) -> float:
    """With no rest at all, once the card's clock has settled: what a layer would take if a step were made of nothing else."""
    for _ in range(int(SETTLE_S * 1e3 / ms) + 1):
        call()
    return _median_ms(call, 5)


def _median_ms(call: Callable[[], object], repeats: int) -> float:
    """Median of one pair of events a call."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    call()
    torch.cuda.synchronize()
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def _issue_ms(step: Callable[[], None], calls: int = 10) -> float:
    """Host time to issue one forward and backward while the launch queue has room."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        step()
    issued = time.perf_counter() - start
    torch.cuda.synchronize()
    return issued / calls * 1e3


def _memory(path: Ours | Peer) -> tuple[float, float]:
    """(kept between forward and backward, peak), both above what stood before, x and out excluded."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = path.forward()
    kept = torch.cuda.memory_allocated() - before - out.nbytes
    del out
    path.step()
    torch.cuda.synchronize()
    return kept / 1e9, (torch.cuda.max_memory_allocated() - before) / 1e9


def _capture(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def run_row(shape: Shape, T: int, quick: bool, rounds: int) -> list[Result]:
    case = make_case(shape, T, seed=int(time.time()) % 2**31)
    wanted = reference.all_results(
        case.x, case.expert, case.weight, case.w1, case.w2, case.factors, SCALE, case.dout, torch.float64
    )
    torch.cuda.empty_cache()
    runners: list[Runner] = []
    slow: list[Runner] = []
    for name, make in paths(case, quick).items():
        runner = prepare(name, make(), wanted)
        (slow if name == "host loop" else runners).append(runner)
    # Turn by turn, for a card lowers its clock as it grows hot.
    for _ in range(rounds):
        for runner in runners:
            runner.take_turn(calls=7)
    for runner in slow:
        runner.take_turn(calls=3)
    return [runner.finish() for runner in (*runners, *slow)]


def wrong(results: list[Result]) -> list[str]:
    """Every result that is too far from float64, ours or a peer's: a number of a wrong path compares nothing."""
    limits = {result.path: MOST_ERROR if result.path.startswith("ours") else MOST_PEER_ERROR for result in results}
    return [
        f"{result.path}: {key} {error:.1e}, want <= {limits[result.path]:.0e}"
        for result in results
        for key, error in result.errors.items()
        if not error <= limits[result.path]
    ]


def table(shape: Shape, T: int, results: list[Result]) -> str:
    ours = next(result for result in results if result.path == "ours")
    peers = [result for result in results if not result.path.startswith("ours")]
    best = min(peers, key=lambda result: result.best_ms)
    floor = shape.floor_ms(T)
    lines = [
        f"**{shape.name}, {T} tokens**: floor {floor:.3f} ms, ours {ours.best_ms:.3f} ms ({100 * floor / ours.best_ms:.0f} % of floor), "
        f"best peer {best.path} {best.best_ms:.3f} ms, **{best.best_ms / ours.best_ms:.2f} ×** "
        f"(sustained {ours.sustained_ms:.3f} and {best.sustained_ms:.3f} ms, {best.sustained_ms / ours.sustained_ms:.2f} ×)",
        "",
        "| path | forward ms | fwd+bwd eager ms | graph ms | spread % | sustained ms | issue ms, eager | graph | kept GB | peak GB | worst error | ours is | note |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.path} | {r.forward_ms:.3f} | {r.eager_ms:.3f} | {r.graph_ms:.3f} | {r.spread_pct:.1f} | {r.sustained_ms:.3f} | {r.issue_ms:.2f} | {r.graph_issue_ms:.2f} | {r.kept_gb:.3f} "
        f"| {r.peak_gb:.2f} | {r.worst_error:.1e} | {r.best_ms / ours.best_ms:.2f} × | {r.note} |".replace("nan", "-")
        for r in results
    ]
    return "\n".join(lines)


def machine() -> str:
    properties = torch.cuda.get_device_properties(0)
    return (
        f"{properties.name}, {properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB; "
        f"torch {torch.__version__}, triton {triton.__version__}, CUDA {torch.version.cuda}; {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.benchmark", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    parser.add_argument(
        "--rows", default=",".join(f"{name}:{T}" for name, T in ROWS), help="shape:tokens, comma-separated"
    )
    parser.add_argument("--quick", action="store_true", help="leave the two slow peers out")
    parser.add_argument("--rounds", type=int, default=7, help="turns of every path, of 7 calls each")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA card here; run it on one", file=sys.stderr)
        return 2
    parts, red = [machine()], []
    print(parts[0], flush=True)
    for row in options.rows.split(","):
        name, T = row.split(":")
        results = run_row(SHAPES[name], int(T), options.quick, options.rounds)
        if faults := wrong(results):
            red += [f"{row} {fault}" for fault in faults]
            print("\n".join([f"{row}: results are wrong, so no table:", *faults]), file=sys.stderr, flush=True)
            continue
        parts.append(table(SHAPES[name], int(T), results))
        print(f"\n{parts[-1]}", flush=True)
    if options.out and not red:
        options.out.write_text("\n\n".join(parts) + "\n")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main())
