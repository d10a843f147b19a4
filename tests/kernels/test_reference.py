"""The reference that every kernel is held against is itself right: its gradients are those of finite differences, its layouts are PEFT's."""

from __future__ import annotations

import torch

from kernels import reference, torch_paths


def case(dtype: torch.dtype = torch.float64) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    T, H, E, k, I, R = 6, 4, 3, 2, 4, 4  # rows of 16 bytes in float32, which grouped_mm wants

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    expert = torch.tensor([[0, 2], [2, 0], [0, 2], [0, 2], [2, 0], [0, 2]])  # expert 1 gets nothing
    tensors = (random(T, H), expert, random(T, k).abs(), random(E, 2 * I, H), random(E, H, I))
    factors = (random(E, R, H), random(E, 2 * I, R), random(E, R, I), random(E, H, R))
    return (*tensors, *factors), random(T, H)


def test_its_gradients_are_those_of_finite_differences() -> None:
    (x, expert, weight, w1, w2, *factors), _ = case()

    def layer(x: torch.Tensor, weight: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        return reference.experts_with_lora(x, expert, weight, w1, w2, *factors, 1.5)

    assert torch.autograd.gradcheck(layer, [tensor.requires_grad_() for tensor in (x, weight, *factors)])


def test_torchs_paths_compute_the_same() -> None:
    (x, expert, weight, w1, w2, *factors), dout = case(torch.float32)
    wanted = reference.all_results(x, expert, weight, w1, w2, tuple(factors), 1.5, dout)
    for path in (torch_paths.grouped_mm, torch_paths.host_loop, torch_paths.folded):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, *factors)]
        out = path(leaves[0], expert, leaves[1], w1, w2, tuple(leaves[2:]), 1.5)
        gradients = torch.autograd.grad(out, leaves, dout)
        for name, seen in zip(reference.RESULTS, (out, *gradients), strict=True):
            assert reference.relative_error(seen, wanted[name]) < 1e-5, (path.__name__, name)


def test_flat_factors_are_pefts_expert_slowest_in_a_and_fastest_in_b() -> None:
    a, b = torch.arange(24).view(3, 2, 4), torch.arange(30).view(3, 5, 2)
    flat_a, flat_b = reference.flat_a(a), reference.flat_b(b)
    assert flat_a.shape == (6, 4) and torch.equal(flat_a[2 * 2 + 1], a[2, 1])
    assert flat_b.shape == (5, 6) and torch.equal(flat_b[:, 1 * 3 + 2], b[2, :, 1])
    assert torch.equal(reference.grouped_a(flat_a, 3), a) and torch.equal(reference.grouped_b(flat_b, 3), b)


def test_nan_is_never_within_a_tolerance() -> None:
    error = reference.relative_error(torch.tensor([1.0, float("nan")]), torch.ones(2))
    assert not error <= 1e9
