"""One projection's LoRA over all experts: PEFT's flat masters, the copies that the kernels read, and where gradients go.

PEFT stores lora_A [E·r, X] with the expert as the slowest row index, and lora_B [O, r·E] with the expert as the *fastest* column index. The
kernels read A as it is and B transposed, [r·E, O], both in the activations' dtype and with the rank padded to a power of two (a matrix unit
takes no less than 16). Copies are renewed when a master may have changed since: when any optimizer of torch has made a step, or the master's version
counter moved. The counter alone would not do: a fused AdamW writes past it, and training would go on from the first step's factors for ever. Whoever
else writes past it (`parameter.data.copy_`, an optimizer inside a replayed graph) calls `renew()`. Copies that are kept keep their place in memory, so that
a captured graph which reads them stays right.

A lora_B may lie in memory as its own transpose (strides (1, O); `lay_out` makes it so). To PEFT and the optimizer it is the same tensor, and
gradients are then added to its .grad in place. A row-major one costs a pass over the gradient of B in each backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from kernels import moe_kernels
from kernels.launch import Launcher, ceil_div, power_of_2

MAX_RANK = 64
_optimizer_steps = 0
_LEAST = 16
_BLOCK = 64


def _count_step(*_: Any) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


register_optimizer_step_post_hook(_count_step)


def optimizer_steps() -> int:
    """Steps that optimizers of torch have made in this process: a fused one writes past the masters' version counters."""
    return _optimizer_steps


def only_adds_to_grad(nodes: Sequence[Any]) -> bool:
    """True if this backward pass will do nothing with these leaves' gradients but add them to .grad: then a kernel may do that itself. To be asked
    inside a backward; `nodes` are the leaves' entries of its `ctx.next_functions`.

    Not so inside `torch.autograd.grad`, which hands gradients out and leaves .grad alone (the engine refuses the question there), nor where a
    hook waits for a gradient, nor for a master that was computed.
    """
    if any(node is None or node.name() != "torch::autograd::AccumulateGrad" for node in nodes):
        return False
    if any(node.variable._backward_hooks or node.variable._post_accumulate_grad_hooks for node in nodes):
        return False
    try:
        return all(torch._C._will_engine_execute_node(node) for node in nodes)
    except RuntimeError:
        return False


class Adapter:
    """`lora_A` [E·r, X] and `lora_B` [O, r·E] as PEFT holds them, float32 or the activations' own dtype. ValueError on other shapes."""

    def __init__(self, lora_A: Tensor, lora_B: Tensor, experts: int, scale: float, *, keep_copies: bool = True) -> None:
        rank, rest = divmod(lora_A.shape[0], experts)
        if rest or lora_A.dim() != 2 or lora_B.dim() != 2 or lora_B.shape[1] != lora_A.shape[0]:
            raise ValueError(
                f"lora_A {list(lora_A.shape)} and lora_B {list(lora_B.shape)}: want [{experts}·r, in] and [out, r·{experts}], "
                "as PEFT >= 0.19 stores fused experts"
            )
        if not 1 <= rank <= MAX_RANK:
            raise ValueError(
                f"rank {rank}: these kernels take 1 to {MAX_RANK}; use a smaller rank, or the grouped_mm path"
            )
        if lora_A.dtype != lora_B.dtype or lora_A.device != lora_B.device:
            raise ValueError(
                f"lora_A {lora_A.dtype} on {lora_A.device}, lora_B {lora_B.dtype} on {lora_B.device}; want the same"
            )
        if not lora_A.is_contiguous() or not (lora_B.is_contiguous() or lora_B.t().is_contiguous()):
            raise ValueError(
                f"strides {lora_A.stride()} and {lora_B.stride()}; want lora_A contiguous, lora_B or its transpose too"
            )
        self.lora_A, self.lora_B = lora_A, lora_B
        self.experts, self.rank, self.scale = experts, rank, scale
        self.padded = max(_LEAST, power_of_2(rank))
        self.launch = Launcher()
        self._keep = keep_copies
        self._copies: tuple[Tensor, Tensor] | None = None
        self._seen: tuple[object, ...] = ()

    @property
    def input_size(self) -> int:
        return self.lora_A.shape[1]

    @property
    def output_size(self) -> int:
        return self.lora_B.shape[0]

    def copies(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A [E, R, X] and B transposed [R, E, O] in `dtype`, R the padded rank; new ones only if a master has changed, or none are kept."""
        if not self._keep:
            return self._passing(dtype)
        now = (dtype, _optimizer_steps, *((m.data_ptr(), m._version, m.device) for m in (self.lora_A, self.lora_B)))
        if self._copies is None or now != self._seen:
            if self._copies is None or self._copies[0].dtype != dtype or self._copies[0].device != self.lora_A.device:
                self._copies = self._room(dtype)
            self._written(self._copies)
            self._seen = now
        return self._copies

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """The copies that are kept now, if any are."""
        return self._copies or ()

    def renew(self) -> None:
        """Copy the masters anew, in place: they were written in a way that no version counter saw."""
        if self._copies is not None:
            self._written(self._copies)

    def gradient_targets(self, accumulate: bool) -> tuple[Tensor, Tensor, bool, bool]:
        """Where the kernels write: dA [E·r, X], dB [r, E, O], and for each whether they add to what stands there.

        Accumulating, these are the masters' own .grad where that has the masters' layout; else new memory.
        """
        da, db = (master.grad if accumulate else None for master in (self.lora_A, self.lora_B))
        add_a, add_b = da is not None, db is not None and self._transposed(db)
        if da is None:
            da = torch.empty_like(self.lora_A)
        if db is None and self._transposed(self.lora_B):
            db = torch.empty_like(self.lora_B)
        if db is not None and self._transposed(db):
            return da, db.t().view(self.rank, self.experts, -1), add_a, add_b
        shape = (self.rank, self.experts, self.output_size)
        return da, torch.empty(shape, dtype=torch.float32, device=da.device), add_a, False

    def finish(self, da: Tensor, db_REO: Tensor, accumulate: bool) -> tuple[Tensor | None, Tensor | None]:
        """The gradients in the masters' layout. Accumulating, they end in .grad and None is returned, so autograd adds nothing more."""
        db = self.lora_B.grad if accumulate else None
        if db is None or not self._transposed(db):
            db = self._in_layout(db_REO, db)
        if not accumulate:
            return da, db
        self.lora_A.grad, self.lora_B.grad = da, db
        return None, None

    def _in_layout(self, db_REO: Tensor, before: Tensor | None) -> Tensor:
        flat = db_REO.view(-1, self.output_size)
        if self._transposed(self.lora_B) and before is None:
            return flat.t()
        out = torch.empty_like(self.lora_B) if before is None else before
        self._transpose(flat, out, add=before is not None)
        return out

    def _transposed(self, tensor: Tensor) -> bool:
        return tensor.stride() == (1, tensor.shape[0])

    def _room(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For A [E, R, X] and B [R, E, O], with zeros where the rank is padded."""
        E, R = self.experts, self.padded
        make = torch.empty if self.rank == R else torch.zeros
        # A copy first made while text is generated must serve training later: no inference tensor can be kept for a backward pass.
        with torch.inference_mode(False):
            like = {"dtype": dtype, "device": self.lora_A.device}
            return make(E, R, self.input_size, **like), make(R, E, self.output_size, **like)

    def _written(self, room: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        a_ERX, b_REO = room
        r, master = self.rank, self.lora_B.detach()
        with torch.inference_mode(False), torch.no_grad():
            a_ERX[:, :r].copy_(self.lora_A.detach().view(self.experts, r, -1))
            if self._transposed(master):
                b_REO[:r].copy_(master.t().view(r, self.experts, -1))
            else:
                self._transpose(master, b_REO[:r], add=False)
        return room

    @torch.no_grad()
    def _passing(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """For one call. What lies as the kernels read it is read where it lies."""
        E, r, master = self.experts, self.rank, self.lora_B.detach()
        if r < self.padded or self.lora_A.dtype != dtype or not self._transposed(master):
            return self._written(self._room(dtype))
        return self.lora_A.detach().view(E, r, -1), master.t().view(r, E, -1)

    def _transpose(self, source: Tensor, out: Tensor, add: bool) -> None:
        rows, cols = source.shape
        grid = (ceil_div(rows, _BLOCK), ceil_div(cols, _BLOCK))
        self.launch(
            moe_kernels.transpose,
            grid,
            (source, out, rows, cols, _BLOCK, add),
            {"num_warps": 4},
            key=(rows, add, source.dtype, out.dtype),
        )


def lay_out(lora_B: Tensor) -> None:
    """Let this lora_B lie transposed in memory, in place: same shape, same values, strides (1, O).

    Before an optimizer has seen it: moments made earlier would have the other layout.
    """
    with torch.no_grad():
        lora_B.data = lora_B.data.t().contiguous().t()
        if lora_B.grad is not None:
            lora_B.grad = lora_B.grad.t().contiguous().t()
