"""One call of each lean op with all that it gives: outputs and the gradient of every input that may have one, in any dtype, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import head, lean

Tensors = dict[str, Tensor]
EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """T tokens, H hidden, heads of D numbers with R rotated, the convolution's K and V channels, E experts with k chosen, vocabulary."""

    T: int
    H: int
    heads: int
    D: int
    R: int
    key: int
    value: int
    experts: int
    k: int
    vocabulary: int
    rows: int


@dataclass(frozen=True)
class Case:
    """`inputs` in float32 on the CPU; those named in `leaves` get a gradient. `op` gives outputs, of which `plain` have none."""

    name: str
    op: Callable[[Tensors], tuple[Tensor, ...]]
    inputs: Tensors
    leaves: tuple[str, ...]
    longest_sum: int

    def results(self, dtype: torch.dtype, device: str = "cpu", rounded_to: torch.dtype | None = None) -> Tensors:
        """Outputs "0", "1".. and gradients by name, of inputs that were rounded to `rounded_to` first."""
        tensors = {name: _cast(each, dtype, rounded_to or dtype).to(device) for name, each in self.inputs.items()}
        for name in self.leaves:
            tensors[name].requires_grad_()
        outputs = self.op(tensors)
        flowing = [each for each in outputs if each.requires_grad]
        upstream = [_cast(_upstream(each.shape), dtype, rounded_to or dtype).to(each) for each in flowing]
        gradients = torch.autograd.grad(flowing, [tensors[name] for name in self.leaves], upstream)
        found = {str(i): each.detach() for i, each in enumerate(outputs)}
        return found | {f"d {name}": each for name, each in zip(self.leaves, gradients, strict=True)}


def all_cases(s: Sizes, seed: int = 0) -> list[Case]:
    torch.manual_seed(seed)
    x_TH, weight_H, conv = torch.randn(s.T, s.H), torch.randn(s.H) * 0.3, 2 * s.key + s.value
    document_T = torch.cumsum(torch.rand(s.T) < 0.1, 0).to(torch.int32)
    cases = []
    for zero_centered in (True, False):
        kind = "zero centred" if zero_centered else "plain"

        def norm(t: Tensors, zero_centered: bool = zero_centered) -> tuple[Tensor, ...]:
            return (lean.rms_norm(t["x"], t["w"], EPS, zero_centered=zero_centered),)

        def add_norm(t: Tensors, zero_centered: bool = zero_centered) -> tuple[Tensor, ...]:
            return lean.add_rms_norm(t["x"], t["residual"], t["w"], EPS, zero_centered=zero_centered)

        def query(t: Tensors, zero_centered: bool = zero_centered) -> tuple[Tensor, ...]:
            q, gate = lean.query_gate_norm_rope(t["qg"], t["w"], t["cos"], t["sin"], EPS, zero_centered=zero_centered)
            return q, lean.sigmoid_mul(q, gate)

        def key(t: Tensors, zero_centered: bool = zero_centered) -> tuple[Tensor, ...]:
            return (lean.norm_rope(t["k"][:, 1:], t["w"], t["cos"], t["sin"], EPS, zero_centered=zero_centered),)

        rope = {"w": torch.randn(s.D), "cos": torch.randn(s.T, s.R), "sin": torch.randn(s.T, s.R)}
        cases += [
            Case(f"rms_norm, {kind}", norm, {"x": x_TH, "w": weight_H}, ("x",), s.H),
            Case(
                f"add_rms_norm, {kind}",
                add_norm,
                {"x": x_TH, "residual": torch.randn(s.T, s.H), "w": weight_H},
                ("x", "residual"),
                s.H,
            ),
            Case(
                f"query_gate_norm_rope and sigmoid_mul of its view, {kind}",
                query,
                {"qg": torch.randn(s.T, s.heads, 2 * s.D), **rope},
                ("qg",),
                s.D,
            ),
            Case(f"norm_rope of a view, {kind}", key, {"k": torch.randn(s.T, s.heads + 1, s.D), **rope}, ("k",), s.D),
        ]
    return [
        *cases,
        Case(
            "gated_rms_norm with gates beside something else",
            lambda t: (lean.gated_rms_norm(t["x"], t["z"][..., : s.D], t["w"], EPS),),
            {"x": torch.randn(s.T, s.heads, s.D), "z": torch.randn(s.T, s.heads, s.D + 8), "w": torch.randn(s.D)},
            ("x", "z"),
            s.D,
        ),
        Case(
            "conv_silu_split of packed documents, channels beside others",
            lambda t: lean.conv_silu_split(t["x"][:, :conv], t["w"], t["document"], s.key),
            {"x": torch.randn(s.T, conv + 8), "w": torch.randn(conv, 4) * 0.5, "document": document_T},
            ("x",),
            8,
        ),
        Case(
            "silu_mul of halves",
            lambda t: (lean.silu_mul(*t["gate_up"].chunk(2, -1)),),
            {"gate_up": torch.randn(s.T, 2 * s.H)},
            ("gate_up",),
            1,
        ),
        Case(
            "shared_add with its gate beside the router's logits",
            lambda t: (lean.shared_add(t["expert"], t["shared"], t["logits"][:, -1:], t["residual"]),),
            {
                **{name: torch.randn(s.T, s.H) for name in ("expert", "shared", "residual")},
                "logits": torch.randn(s.T, s.experts + 1),
            },
            ("expert", "shared", "logits", "residual"),
            s.H,
        ),
        Case(
            "shared_add without a residual",
            lambda t: (lean.shared_add(t["expert"], t["shared"], t["gate"]),),
            {"expert": torch.randn(s.T, s.H), "shared": torch.randn(s.T, s.H), "gate": torch.randn(s.T, 1)},
            ("expert", "shared", "gate"),
            s.H,
        ),
        *(
            Case(
                f"top_k_router, {'normalised' if normalise else 'as they are'}",
                lambda t, normalise=normalise: lean.top_k_router(t["logits"][:, :-1], s.k, normalise=normalise),  # type: ignore[misc]
                {"logits": torch.randn(s.T, s.experts + 1) * 3},
                ("logits",),
                s.experts,
            )
            for normalise in (True, False)
        ),
        head_case(s),
    ]


def head_case(s: Sizes) -> Case:
    label_T = torch.randint(0, s.vocabulary, (s.T,))
    label_T[::3] = head.IGNORED
    return Case(
        "token_log_probs with ignored labels",
        lambda t: head.token_log_probs(t["hidden"], t["w"], t["label"], temperature=0.7, rows=s.rows)[:2],
        {"hidden": torch.randn(s.T, s.H), "w": torch.randn(s.vocabulary, s.H) * s.H**-0.5, "label": label_T},
        ("hidden",),
        s.vocabulary,
    )


def _cast(tensor: Tensor, dtype: torch.dtype, rounded_to: torch.dtype) -> Tensor:
    return tensor.to(rounded_to).to(dtype) if tensor.is_floating_point() else tensor.clone()


def _upstream(shape: torch.Size) -> Tensor:
    return torch.sin(torch.arange(shape.numel(), dtype=torch.float32) * 0.7 + 0.3).view(shape)
