"""Log-probabilities of the labels: beside the plain softmax, in pieces of any size, for any loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
head = pytest.importorskip("kernels.head")
T, H, V = 23, 12, 37


@pytest.fixture
def problem() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    label = torch.randint(0, V, (T,))
    label[[0, 4, 22]] = head.IGNORED
    return torch.randn(T, H).double().requires_grad_(), torch.randn(V, H).double(), label


def plain(hidden: Any, weight: Any, label: Any, temperature: float) -> tuple[Any, Any, Any]:
    log_p, counts = torch.log_softmax(hidden @ weight.T / temperature, -1), label != head.IGNORED
    log_prob = log_p.gather(1, label.clamp(min=0)[:, None])[:, 0] * counts
    return log_prob, -(log_p.exp() * log_p).sum(-1) * counts, (log_p.argmax(-1) == label) & counts


@pytest.mark.parametrize("rows", [1, 5, 23, 2048])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_any_loss_of_the_log_probabilities_has_the_plain_gradient_whatever_the_pieces(
    problem: Any, rows: int, temperature: float
) -> None:
    hidden, weight, label = problem
    ours = head.token_log_probs(hidden, weight, label, temperature=temperature, rows=rows)
    stock = plain(hidden, weight, label, temperature)
    for one, two in zip(ours, stock, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    assert not ours[1].requires_grad and not ours[2].requires_grad
    for loss in (
        lambda p: p.sum() / 7,
        lambda p: torch.sigmoid(p[:9].sum() - p[9:].sum()),
        lambda p: p.exp().square().sum(),
    ):
        (one,), (two,) = (torch.autograd.grad(loss(p), hidden, retain_graph=True) for p in (ours[0], stock[0]))
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-12)
        assert not one[label == head.IGNORED].any()


def test_nothing_is_kept_where_no_gradient_is_wanted(problem: Any) -> None:
    hidden, weight, label = problem
    with torch.no_grad():
        log_prob, _, _ = head.token_log_probs(hidden, weight, label)
    assert not log_prob.requires_grad
    assert not head.token_log_probs(hidden.detach(), weight, label)[0].requires_grad
    assert head.token_log_probs(hidden, weight, label)[0].grad_fn.saved_tensors[0].shape == (T, H)


def test_bfloat16_gives_float32_log_probabilities_and_autocast_changes_nothing(problem: Any) -> None:
    hidden, weight, label = (each.detach() for each in problem)
    ours = head.token_log_probs(hidden.bfloat16(), weight.bfloat16(), label)
    assert ours[0].dtype == ours[1].dtype == torch.float32
    wanted = plain(hidden.bfloat16().double(), weight.bfloat16().double(), label, 1.0)
    # A logit of up to 16 rounds by up to 2⁻⁵.
    torch.testing.assert_close(ours[0].double(), wanted[0], rtol=0, atol=0.07)
    with torch.autocast("cpu", torch.bfloat16):
        inside = head.token_log_probs(hidden.float(), weight.float(), label)[0]
    assert torch.equal(inside, head.token_log_probs(hidden.float(), weight.float(), label)[0])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"label_T": torch.zeros(T)}, "label_T: torch.float32"),
        ({"label_T": torch.zeros(T - 1, dtype=torch.int64)}, r"label_T: .*\(22,\)"),
        ({"weight_VH": torch.zeros(V, H + 1)}, r"weight_VH: shape \(37, 13\); want \(37, 12\)"),
        ({"hidden_TH": torch.zeros(1, T, H)}, "hidden_TH, weight_VH: 3 and 2"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"weight_VH": torch.zeros(V, H, requires_grad=True)}, "asks for a gradient"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(problem: Any, change: dict[str, Any], says: str) -> None:
    hidden, weight, label = problem
    with pytest.raises(ValueError, match=says):
        head.token_log_probs(**{"hidden_TH": hidden, "weight_VH": weight, "label_T": label} | change)


def test_the_kernel_beside_float64(interpreted: Callable[..., str]) -> None:
    interpreted(
        "interpreted_lean.py",
        "the_head_says_whether_the_label_is_the_likeliest_and_the_lowest_of_equals_is",
        "without_a_gradient_the_logits_stay_as_they_are",
    )
