"""Several projections of one input with LoRA, against the same in autograd's own operations."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernels import lora_linear
from kernels.lora_linear import Copies, Lora, Projection, project

H, SHAPE = 24, (3, 5)
# Width, rank (0: no LoRA), scale: what a block's input is projected to.
WIDTHS = ((16, 4, 2.0), (8, 0, 0.0), (32, 8, 0.5), (1, 0, 0.0))


def make(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, list[Projection]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    masters = torch.float32 if dtype == torch.bfloat16 else dtype

    def lora(width: int, rank: int, scale: float) -> Lora | None:
        factors = (normal(rank, H) / 5, normal(width, rank) / 5)
        return Lora(*(each.to(masters).requires_grad_() for each in factors), scale) if rank else None

    x = normal(*SHAPE, H).requires_grad_()
    return x, [
        Projection(nn.Parameter(normal(width, H) / 5, requires_grad=False), lora(width, rank, scale))
        for width, rank, scale in WIDTHS
    ]


def plain(x: Tensor, projections: Sequence[Projection]) -> tuple[Tensor, ...]:
    def one(weight: Tensor, lora: Lora | None) -> Tensor:
        y = x @ weight.t()
        return y if lora is None else y + lora.scale * (x @ lora.a_rH.to(x.dtype).t()) @ lora.b_Or.to(x.dtype).t()

    return tuple(one(*each) for each in projections)


def masters(projections: Sequence[Projection]) -> list[Tensor]:
    return [master for each in projections if each.lora for master in (each.lora.a_rH, each.lora.b_Or)]


def loss(outputs: Sequence[Tensor], seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype) for y in outputs]
    return sum((y * w).sum() for y, w in zip(outputs, weights, strict=True))  # type: ignore[return-value]


def gradients(outputs: Sequence[Tensor], x: Tensor, projections: Sequence[Projection]) -> list[Tensor | None]:
    for each in (x, *masters(projections)):
        each.grad = None
    loss(outputs).backward()
    return [each.grad for each in (x, *masters(projections))]


def same(got: Sequence[Tensor | None], wanted: Sequence[Tensor | None], tolerance: float = 1e-12) -> None:
    for g, w in zip(got, wanted, strict=True):
        assert g is not None and w is not None
        assert g.dtype == w.dtype and float((g - w).detach().norm()) <= tolerance * float(w.detach().norm())


def thin(projections: Sequence[Projection], copies: Copies) -> Tensor:
    loras = [each.lora for each in projections if each.lora]
    narrow = sorted((each.weight_OH for each in projections if not each.lora), key=len, reverse=True)
    return copies.of(loras, narrow, torch.float32)[0]


def test_outputs_and_every_gradient_equal_autograds_own() -> None:
    x, projections = make()
    wanted = plain(x, projections)
    got = project(x, projections)
    same(got, wanted)
    same(gradients(got, x, projections), gradients(wanted, x, projections))


def test_an_output_that_nobody_uses_costs_nothing_and_its_factors_get_none() -> None:
    x, projections = make()
    got = project(x, projections)
    x.grad = None
    got[2].sum().backward()
    a, b = masters(projections)[:2]
    assert a.grad is None and b.grad is None
    wanted = torch.autograd.grad(plain(x, projections)[2].sum(), [x, *masters(projections)[2:]])
    same([x.grad, *(each.grad for each in masters(projections)[2:])], wanted)


def test_the_first_layers_factors_are_recorded_although_its_input_wants_no_gradient() -> None:
    x, projections = make()
    wanted = gradients(plain(x, projections), x, projections)[1:]
    x = x.detach()
    for master in masters(projections):
        master.grad = None
    loss(project(x, projections)).backward()
    assert x.grad is None
    same([master.grad for master in masters(projections)], wanted)


def test_gradients_of_micro_batches_add_up_in_the_same_place() -> None:
    x, projections = make()
    copies = Copies()
    wanted = [2 * g for g in gradients(plain(x, projections), x, projections) if g is not None][1:]
    for master in masters(projections):
        master.grad = None
    loss(project(x, projections, copies)).backward()
    places = [master.grad.data_ptr() for master in masters(projections) if master.grad is not None]
    loss(project(x, projections, copies)).backward()
    same([master.grad for master in masters(projections)], wanted)
    assert places == [master.grad.data_ptr() for master in masters(projections) if master.grad is not None]


def test_bfloat16_makes_float32_gradients_of_float32_masters_within_its_rounding() -> None:
    x, projections = make(torch.bfloat16)
    got = project(x, projections)
    mine = gradients(got, x, projections)
    # The same numbers in float64: what differs is rounding of operands (2^-9 each) and of intermediate sums.
    exact_x = x.detach().double().requires_grad_()
    exact = [
        Projection(
            weight.double(),
            lora and Lora(*(m.detach().bfloat16().double().requires_grad_() for m in lora[:2]), lora.scale),
        )
        for weight, lora in projections
    ]
    wanted = plain(exact_x, exact)
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == torch.bfloat16 and float((g.double() - w).norm()) <= 3 * 2**-9 * float(w.norm())
    for g, w in zip(mine, gradients(wanted, exact_x, exact), strict=True):
        assert g is not None and w is not None
        assert float((g.double() - w).norm()) <= 4 * 2**-9 * float(w.norm())
    assert all(g is not None and g.dtype == torch.float32 for g in mine[1:])


def test_autograd_grad_gets_the_gradients_and_leaves_grad_alone() -> None:
    x, projections = make()
    wanted = torch.autograd.grad(loss(plain(x, projections)), [x, *masters(projections)])
    got = torch.autograd.grad(loss(project(x, projections)), [x, *masters(projections)])
    same(got, wanted)
    assert all(master.grad is None for master in masters(projections))


def test_wide_frozen_projections_and_groups_without_a_lora_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, projections = make()
    for chosen in (projections, projections[1::2], projections[::2], projections[:1]):
        wanted = gradients(plain(x, chosen), x, chosen)
        for widest in (512, 4, 0):
            monkeypatch.setattr(lora_linear, "NARROW", widest)
            same(project(x, chosen), plain(x, chosen))
            same(gradients(project(x, chosen), x, chosen), wanted)


def test_only_a_narrow_projection_used_gives_its_gradient_alone() -> None:
    x, projections = make()
    project(x, projections)[3].sum().backward()
    same([x.grad], torch.autograd.grad(plain(x, projections)[3].sum(), [x]))
    assert all(master.grad is None for master in masters(projections))


def test_a_narrow_weight_that_is_written_is_read_anew() -> None:
    x, projections = make()
    copies = Copies()
    project(x, projections, copies)
    projections[1].weight_OH.mul_(2)
    same(project(x, projections, copies), plain(x, projections))


def test_a_weight_made_for_one_call_has_no_copies_renewed() -> None:
    """Renewed between a forward pass and its backward pass they would be refused as changed."""
    x, projections = make()
    copies = Copies()

    def unpacked() -> list[Projection]:
        return [each._replace(weight_OH=each.weight_OH.detach().clone()) for each in projections]

    kept = [unpacked(), unpacked()]
    first, second = (project(x, each, copies) for each in kept)
    got = gradients([a + b for a, b in zip(first, second, strict=True)], x, projections)
    wanted = gradients([2 * y for y in plain(x, projections)], x, projections)
    same(got, wanted)


def test_a_hook_on_a_master_is_given_its_gradient() -> None:
    x, projections = make()
    first = masters(projections)[0]
    wanted = gradients(plain(x, projections), x, projections)[1]
    seen: list[Tensor] = []
    first.register_hook(lambda gradient: seen.append(gradient))  # type: ignore[no-untyped-call]
    got = gradients(project(x, projections), x, projections)
    same([seen[0], got[1]], [wanted, wanted])


def test_masters_that_were_computed_get_their_gradients_passed_on() -> None:
    x, projections = make()
    source = masters(projections)[0]

    def doubled() -> list[Projection]:
        lora = projections[0].lora
        assert lora
        return [Projection(projections[0].weight_OH, Lora(source * 2, lora.b_Or, lora.scale)), *projections[1:]]

    wanted = gradients(plain(x, doubled()), x, projections)
    same(gradients(project(x, doubled()), x, projections), wanted)


def test_a_frozen_adapter_takes_part_and_gets_no_gradient() -> None:
    x, projections = make()
    for master in masters(projections)[:2]:
        master.requires_grad_(False)
    wanted = gradients(plain(x, projections), x, projections)
    got = gradients(project(x, projections), x, projections)
    assert got[1] is None and got[2] is None
    same([got[0], *got[3:]], [wanted[0], *wanted[3:]])


def test_recomputed_in_the_backward_pass_it_gives_the_same() -> None:
    x, projections = make()
    wanted = gradients(plain(x, projections), x, projections)
    outputs = checkpoint(lambda x: project(x, projections), x, use_reentrant=False, preserve_rng_state=False)
    same(gradients(outputs, x, projections), wanted)


def test_autocast_does_not_recast_what_is_computed_here() -> None:
    x, projections = make(torch.float32)
    wanted = gradients(plain(x, projections), x, projections)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = project(x, projections)
        got = gradients(outputs, x, projections)
    assert all(y.dtype == torch.float32 for y in outputs)
    same(got, wanted, 1e-6)


@pytest.mark.parametrize("fused", [True, False])
def test_copies_are_renewed_after_an_optimizers_step_in_the_same_place(fused: bool) -> None:
    """A fused AdamW writes past the version counters."""
    x, projections = make(torch.float32)
    copies = Copies()
    before = project(x, projections, copies)
    place = thin(projections, copies).data_ptr()
    loss(before).backward()
    torch.optim.AdamW(masters(projections), lr=0.1, fused=fused).step()
    after = project(x, projections, copies)
    same(after, plain(x, projections), 1e-6)
    assert float((after[0] - before[0]).norm()) > 0.1 * float(before[0].norm())
    assert thin(projections, copies).data_ptr() == place


def test_a_write_that_no_counter_saw_is_read_after_renew() -> None:
    x, projections = make(torch.float32)
    copies = Copies()
    before = project(x, projections, copies)[0]
    masters(projections)[1].data.mul_(3)
    assert torch.equal(project(x, projections, copies)[0], before), "the write would have been seen anyway"
    copies.renew()
    same(project(x, projections, copies), plain(x, projections), 1e-6)


def test_copies_made_while_text_is_generated_serve_training_later() -> None:
    x, projections = make()
    copies = Copies()
    with torch.inference_mode():
        project(x, projections, copies)
    wanted = gradients(plain(x, projections), x, projections)
    same(gradients(project(x, projections, copies), x, projections), wanted)


def test_what_does_not_fit_is_refused() -> None:
    x, projections = make()
    (weight, lora), *_ = projections
    assert lora
    bad = {
        r"projection 0: weight \[16, 12\]": Projection(weight[:, :12], lora),
        "torch.float32 on cpu; want": Projection(weight.float(), lora),
        "asks for a gradient": Projection(weight.clone().requires_grad_(), lora),
        r"factors \[4, 24\] and \[16, 2\]": Projection(weight, Lora(lora.a_rH, lora.b_Or[:, :2], 1.0)),
    }
    for message, projection in bad.items():
        with pytest.raises(ValueError, match=message):
            project(x, [projection])
