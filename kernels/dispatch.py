"""Which computation of the experts layer this card gets: chosen by capability, and by a check of every result on the card itself.

Kernels that compile can still be wrong on an architecture they were not written on, and torch's grouped_mm waits for the host in silence where it
has no kernel. So each candidate runs one layer of the recipe's own shapes, with empty and with crowded experts, and its output and all six
gradients are held against plain loops; then it is timed beside grouped_mm. The choice says which path won and why, and what became of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels import reference, torch_paths
from kernels.adapter import MAX_RANK, Adapter
from kernels.moe_lora import PORTABLE, SIZE_MULTIPLE, Plan, experts_with_lora, plan_for

GROUPED_MM, HOST_LOOP = "grouped_mm", "host loop"
_SCALE = 2.0
_BUSY_EXPERTS = 12  # of the check's experts get rows; the others are empty
_CHECK_TOKENS = 256
_TIMED_RUNS = 7
_CLEARLY = 1.05
"""grouped_mm takes over only if it is faster by more than the noise of a short timing."""


class NoPathError(RuntimeError):
    """No computation of the experts layer gives right results on this card; the message says what each did."""


@dataclass(frozen=True)
class Shapes:
    """One layer of the recipe: hidden size, intermediate size, experts, experts a token, rank, and the tokens of a micro-batch."""

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    rank: int
    tokens: int = 4096


@dataclass(frozen=True)
class Trial:
    """What became of one candidate."""

    path: str
    plan: Plan | None
    errors: dict[str, float] = field(default_factory=dict)
    """Relative error of each result beside float32 loops."""
    milliseconds: float | None = None
    """Forward and backward of one layer; None where nothing was timed."""
    fault: str | None = None

    @property
    def ok(self) -> bool:
        return self.fault is None


@dataclass(frozen=True)
class Choice:
    path: str
    plan: Plan | None
    """The plan of our kernels; None means torch's own operations."""
    reason: str
    slow: bool
    """Slower than this card can do: needs the recipe's word."""
    trials: tuple[Trial, ...]


Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x, expert, weight) -> out, over the problem's weights and factors."""


@dataclass
class Problem:
    """Random weights, factors and tokens of the given shapes."""

    x: Tensor
    expert: Tensor
    weight: Tensor
    w1: Tensor
    w2: Tensor
    factors: torch_paths.Factors
    dout: Tensor


def choose(shapes: Shapes, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Choice:
    """Try the candidates on `device` and take the first right one, or grouped_mm if that is clearly faster. NoPathError if none is right."""
    checked, busy = make_problem(shapes, device, dtype, _CHECK_TOKENS, _BUSY_EXPERTS), min(shapes.tokens, 8192)
    wanted = reference.all_results(
        checked.x,
        checked.expert,
        checked.weight,
        checked.w1,
        checked.w2,
        checked.factors,
        _SCALE,
        checked.dout,
        torch.float32,
    )
    timed = make_problem(shapes, device, dtype, busy, shapes.experts, weights=(checked.w1, checked.w2, checked.factors))
    trials = []
    for plan in _plans(device, shapes):
        trials.append(try_path(checked, timed, wanted, plan))
        if trials[-1].ok:
            break
    trials.append(try_path(checked, timed, wanted, None))
    return decide(tuple(trials), _unsupported(shapes))


def decide(trials: tuple[Trial, ...], unsupported: str | None = None) -> Choice:
    """The first of our paths that is right, unless grouped_mm is right and clearly faster."""
    *ours, torchs = trials
    failed = [f"{trial.path}: {trial.fault}" for trial in trials if trial.fault]
    if unsupported:
        failed.insert(0, unsupported)
    right = next((trial for trial in ours if trial.ok), None)
    if right and not (torchs.ok and _faster(torchs, right)):
        reason = f"right in all results, {_ms(right)} a layer"
        if torchs.ok:
            reason += f" beside {torchs.path}'s {_ms(torchs)}"
        return Choice(right.path, right.plan, "; ".join([reason, *failed]), slow=right is not ours[0], trials=trials)
    if not torchs.ok:
        raise NoPathError("; ".join(failed))
    if right:
        reason = f"{_ms(torchs)} a layer, our {right.path} kernels {_ms(right)}"
        return Choice(torchs.path, None, "; ".join([reason, *failed]), slow=torchs.path == HOST_LOOP, trials=trials)
    return Choice(torchs.path, None, "; ".join(failed), slow=True, trials=trials)


def try_path(checked: Problem, timed: Problem | None, wanted: dict[str, Tensor], plan: Plan | None) -> Trial:
    """Run one candidate on the checked problem and compare; time it on the other if it is right."""
    path = plan.name if plan else GROUPED_MM
    try:
        step = _Step(checked, plan)
        if plan is None and _waits_for_host(step):
            path = HOST_LOOP
        errors = compare(step.results(), wanted, checked)
        fault = _fault(errors, reference.tolerance(checked.x.dtype, max(checked.w1.shape[1:])))
        if fault is None and plan is not None and _waits_for_host(step):
            fault = "waits for the host"
        milliseconds = _time(_Step(timed, plan)) if timed and fault is None and timed.x.is_cuda else None
    except Exception as error:  # noqa: BLE001 - a kernel that this card or this Triton cannot take must not end the run: the next path is tried, and this is told
        return Trial(path, plan, fault=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
    return Trial(path, plan, errors, milliseconds, fault)


def compare(seen: dict[str, Tensor], wanted: dict[str, Tensor], problem: Problem) -> dict[str, float]:
    """Relative error of each result; infinite where an expert without rows got a gradient."""
    errors = {name: reference.relative_error(seen[name], wanted[name]) for name in reference.RESULTS}
    empty = torch.bincount(problem.expert.reshape(-1), minlength=problem.w1.shape[0]) == 0
    for name in reference.RESULTS[3:]:
        if seen[name][empty].abs().sum().item() != 0:
            errors[name] = float("inf")
    return errors


def make_problem(
    shapes: Shapes,
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    busy_experts: int,
    weights: tuple[Tensor, Tensor, torch_paths.Factors] | None = None,
) -> Problem:
    """`tokens` of fresh random data, routed unevenly to `busy_experts` of the experts, the others empty."""
    H, I, E, R = shapes.hidden, shapes.intermediate, shapes.experts, shapes.rank

    generator = torch.Generator(device)  # of its own: training's random numbers stay what the recipe's seed makes them
    generator.seed()

    def random(*size: int, std: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*size, device=device, dtype=dtype, generator=generator).mul_(std)

    busy = torch.randperm(E, device=device, generator=generator)[: max(busy_experts, shapes.top_k)]
    scores = random(tokens, len(busy), dtype=torch.float32) + random(len(busy), std=0.5, dtype=torch.float32)
    logits, picks = torch.topk(scores, shapes.top_k)
    w1, w2, factors = weights or (
        random(E, 2 * I, H, std=H**-0.5),
        random(E, H, I, std=I**-0.5),
        (
            random(E, R, H, std=H**-0.5),
            random(E, 2 * I, R, std=0.3 * R**-0.5),
            random(E, R, I, std=I**-0.5),
            random(E, H, R, std=0.3 * R**-0.5),
        ),
    )
    weight = torch.softmax(logits, -1).to(dtype)
    return Problem(random(tokens, H), busy[picks].contiguous(), weight, w1, w2, factors, random(tokens, H))


class _Step:
    """One candidate on one problem, forward and backward."""

    def __init__(self, problem: Problem, plan: Plan | None) -> None:
        self.problem, self.plan, self.experts = problem, plan, problem.w1.shape[0]
        self.x, self.weight = (tensor.detach().requires_grad_() for tensor in (problem.x, problem.weight))
        if plan:
            a1, b1, a2, b2 = problem.factors
            flat = (reference.flat_a(a1), reference.flat_b(b1), reference.flat_a(a2), reference.flat_b(b2))
            self.masters = [tensor.float().requires_grad_() for tensor in flat]
            self.up, self.down = (Adapter(*self.masters[i : i + 2], self.experts, _SCALE) for i in (0, 2))
        else:
            self.masters = [factor.detach().requires_grad_() for factor in problem.factors]

    def __call__(self) -> tuple[Tensor, ...]:
        p = self.problem
        if self.plan:
            out = experts_with_lora(
                self.x, p.expert, self.weight, p.w1, p.w2, self.up, self.down, plan=self.plan, check_experts=False
            )
        else:
            out = torch_paths.grouped_mm(self.x, p.expert, self.weight, p.w1, p.w2, tuple(self.masters), _SCALE)  # type: ignore[arg-type]
        return out, *torch.autograd.grad(out, [self.x, self.weight, *self.masters], p.dout)

    def results(self) -> dict[str, Tensor]:
        results = dict(zip(reference.RESULTS, (tensor.detach() for tensor in self()), strict=True))
        if self.plan:
            for name in reference.RESULTS[3:]:
                grouped = reference.grouped_a if name.startswith("dA") else reference.grouped_b
                results[name] = grouped(results[name], self.experts)
        return results


def _plans(device: torch.device, shapes: Shapes) -> list[Plan]:
    if _unsupported(shapes):
        return []
    if device.type != "cuda":
        return [PORTABLE]
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return []
    best = plan_for(capability)
    return [best] if best is PORTABLE else [best, PORTABLE]


def _unsupported(shapes: Shapes) -> str | None:
    if shapes.rank > MAX_RANK:
        return f"our kernels take ranks up to {MAX_RANK}, the recipe wants {shapes.rank}"
    if shapes.hidden % SIZE_MULTIPLE or shapes.intermediate % SIZE_MULTIPLE:
        return f"our kernels take sizes that {SIZE_MULTIPLE} divides, the model has {shapes.hidden} and {shapes.intermediate}"
    return None


def _fault(errors: dict[str, float], limit: float) -> str | None:
    wrong = [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error <= limit]
    return f"{', '.join(wrong)} (want <= {limit:.1e})" if wrong else None


def _waits_for_host(step: _Step) -> bool:
    """torch's grouped_mm does where it falls back to a loop."""
    return step.x.is_cuda and waits_for_host(step)


def waits_for_host(step: Callable[[], object]) -> bool:
    """True if the step, which works on a card, makes the host wait for it."""
    step()  # the first run of a kernel may load it, which waits once
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        if "synchroniz" not in str(error).lower():
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False


def _time(step: _Step) -> float:
    """Median milliseconds of a few runs, by the card's own clock."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_TIMED_RUNS)]
    step()
    for start, end in events:
        start.record()
        step()
        end.record()
    torch.cuda.synchronize()
    return sorted(start.elapsed_time(end) for start, end in events)[_TIMED_RUNS // 2]


def _faster(one: Trial, other: Trial) -> bool:
    return (
        one.milliseconds is not None
        and other.milliseconds is not None
        and one.milliseconds * _CLEARLY < other.milliseconds
    )


def _ms(trial: Trial) -> str:
    return "not timed" if trial.milliseconds is None else f"{trial.milliseconds:.2f} ms"
