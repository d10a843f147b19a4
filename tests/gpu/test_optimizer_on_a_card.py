"""AdamW in one pass on a real card: beside float64 and beside torch's fused one, without a wait for the host, inside a CUDA graph, and nearer to the
memory's speed than torch's passes are.

Run it on a machine with a card: `python -m pytest -m gpu tests/gpu/test_optimizer_on_a_card.py -s`.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
    pytest.mark.timeout(280),
]
adamw, benchmark = (pytest.importorskip(f"kernels.{name}") for name in ("adamw", "benchmark_adamw"))
cases = pytest.importorskip("tests.kernels.adamw_cases")
optimizer = pytest.importorskip("training.optimizer")

SHAPES = ((37,), (128, 513), (1,), (16_384,), (3, 16_385), (4096, 1031), (8192, 2048))
NUMBERS = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def no_wait() -> Iterator[Any]:
    """Within it a wait for the card is an error."""

    class NoWait:
        def __enter__(self) -> None:
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_: Any) -> None:
            torch.cuda.set_sync_debug_mode("default")

    yield NoWait()
    torch.cuda.set_sync_debug_mode("default")


def parameters(*, aligned: bool = True) -> list[Any]:
    """Matrices lie transposed; one more may begin at an odd address."""
    made = [torch.nn.Parameter(each) for each in cases.Case("cuda", SHAPES).parameters]
    if aligned:
        return made
    odd = torch.empty(1001, device="cuda")[1:].fill_(0.5)
    return [*made, torch.nn.Parameter(odd)]


def gradients(of: list[Any], number: int) -> None:
    make = torch.Generator("cuda").manual_seed(number)
    for each in of:
        each.grad = torch.empty_like(each).copy_(torch.randn(each.shape, generator=make, device="cuda"))


def test_every_variant_beside_float64() -> None:
    cases.check("cuda")


@pytest.mark.parametrize("aligned", [True, False])
def test_five_steps_are_torchs_clipping_and_fused_step_and_wait_for_nobody(no_wait: Any, aligned: bool) -> None:
    mine, wanted = parameters(aligned=aligned), parameters(aligned=aligned)
    ours = optimizer.AdamW(mine, **NUMBERS)
    stock = torch.optim.AdamW(wanted, **NUMBERS, fused=True)
    norms = []
    for number in range(5):
        gradients(mine, number)
        gradients(wanted, number)
        with no_wait:
            seen = ours.clip(mine, 1.0)
            ours.step()
        norms.append((seen, torch.nn.utils.clip_grad_norm_(wanted, 1.0)))
        stock.step()
        for each in (ours, stock):
            each.param_groups[0]["lr"] *= 0.5
    for seen, want in norms:
        torch.testing.assert_close(seen, want, rtol=1e-5, atol=0)
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-7)
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(ours.state[one][kind], stock.state[other][kind], rtol=1e-5, atol=1e-9)
    other_way = torch.optim.AdamW(wanted, **NUMBERS, fused=True)
    other_way.load_state_dict(copy.deepcopy(ours.state_dict()))
    ours.load_state_dict(copy.deepcopy(stock.state_dict()))
    gradients(mine, 9)
    gradients(wanted, 9)
    ours.step()
    other_way.step()
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-7)


def test_moments_in_8_bits_are_the_twins_at_odd_heights_and_at_the_models_own() -> None:
    for shapes in (cases.PACKED, ((8192, 512), (1024, 8192), (2048, 8192), (48, 256))):
        bad = cases.check_packed("cuda", shapes=shapes)
        assert not bad, bad


@pytest.fixture
def eight_bit(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchao's optimizer and ours; torchao's step as it is written, since to compile it takes a minute."""
    inside = pytest.importorskip("torchao.optim.adam", reason="torchao is not installed")
    monkeypatch.setattr(inside.torch, "compile", lambda function, **_: function)
    return inside.AdamW8bit, pytest.importorskip("training.optimizer_8bit").AdamW8bit


def test_the_8_bit_step_is_torchaos_and_waits_for_nobody(eight_bit: Any, no_wait: Any) -> None:
    """Each step from where torchao stands: one code that differs, where two are as near, makes other steps of one number. The first sends the maps."""
    torchaos, ours_8bit = eight_bit
    device = torch.device("cuda", 0)
    small = [torch.full(shape, 0.5, device=device) for shape in ((37,), (1000, 5), (16, 256))]
    mine, wanted = (
        [torch.nn.Parameter(each.clone()) for each in (*benchmark._tensors(1, device), *small)] for _ in range(2)
    )
    numbers = NUMBERS | {"eps": 1e-6}
    ours, stock = ours_8bit(mine, **numbers), torchaos(wanted, **numbers)
    for number in range(3):
        gradients(mine, number)
        gradients(wanted, number)
        with no_wait if number else contextlib.nullcontext():
            ours.clip(mine, 1.0)
            ours.step()
        torch.nn.utils.clip_grad_norm_(wanted, 1.0)
        stock.step()
        for one, other in zip(mine, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=3e-6)
            for kind in ("exp_avg", "exp_avg_sq"):
                seen, want = ours.state[one][kind], stock.state[other][kind]
                if type(want) is torch.Tensor:
                    torch.testing.assert_close(seen, want, rtol=1e-5, atol=1e-9)
                else:
                    apart = (seen.codes.int() - want.codes.int()).abs()
                    assert int(apart.max()) <= 1 and float(apart.float().mean()) <= 1e-3
                    torch.testing.assert_close(seen.scale, want.scale, rtol=1e-5, atol=1e-12)
                seen.copy_(want)
            one.data.copy_(other.data)


def test_8_bit_steps_with_gradients_of_every_size_are_torchaos() -> None:
    eight = pytest.importorskip("tests.kernels.adamw_8bit_cases", reason="torchao is not installed")
    one_pass = pytest.importorskip("kernels.adamw_8bit").AdamW8bitPass()
    bad = eight.check(one_pass, "cuda", steps=3, shapes=(*eight.SHAPES, (8192, 512)))
    assert not bad, bad


def test_the_first_8_bit_step_is_not_compiled_shape_by_shape(eight_bit: Any) -> None:
    _, ours_8bit = eight_bit
    mine = [torch.nn.Parameter(torch.zeros(256 * (16 + n), device="cuda")) for n in range(40)]
    gradients(mine, 0)
    ours = ours_8bit(mine, **NUMBERS)
    torch.cuda.synchronize()
    start = time.perf_counter()
    ours.step()
    torch.cuda.synchronize()
    assert time.perf_counter() - start < 5.0
    print({"ms": benchmark._time(ours.step, torch.device("cuda", 0))})


def test_two_runs_give_the_same_bits() -> None:
    found = []
    for _ in range(2):
        mine = parameters()
        ours = optimizer.AdamW(mine, **NUMBERS)
        for number in range(3):
            gradients(mine, number)
            ours.clip(mine, 1.0)
            ours.step()
        found.append([each.detach().clone() for each in mine])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_zeroed_gradients_leave_the_same_pass(no_wait: Any) -> None:
    mine = parameters()
    ours = optimizer.AdamW(mine, **NUMBERS, zero_grads=True)
    gradients(mine, 0)
    places = [each.grad.data_ptr() for each in mine]
    with no_wait:
        ours.clip(mine, 1.0)
        ours.step()
    for each, place in zip(mine, places, strict=True):
        assert each.grad.data_ptr() == place and not each.grad.any()


def test_a_tensor_of_more_numbers_than_32_bits_count_is_gone_through_to_its_end() -> None:
    count = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 5 * 4 * count:
        pytest.skip("needs 43 GB")
    tensors = [torch.zeros(count, device="cuda") for _ in range(4)]
    tensors[1].fill_(2.0)
    update = adamw.Update(*[[each] for each in tensors], [torch.zeros((), device="cuda")])
    clip = adamw.GradientNorm()(update.gradients, 1.0)
    assert float(clip.norm) == pytest.approx(2 * count**0.5, rel=1e-6)
    adamw.AdamWPass()(update, adamw.Rates(1e-2))
    for part in tensors[0].split(2**28):
        assert float((part + 1e-2).abs().max()) < 1e-8


def test_an_update_of_many_numbers_is_no_slower_than_torchs_passes() -> None:
    """A quarter of the 35B model's adapters. The floor of 1.05 leaves room for a busy machine; RESULTS has what it takes."""
    found = {name: ms for name, ms, _, _ in benchmark.measure(10, torch.device("cuda", 0))}
    print(found)
    assert found["ours: norm, then clip, update, zero"] < 1.05 * found["torch: all three"], found
