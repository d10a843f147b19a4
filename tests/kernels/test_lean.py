"""The lean ops: plain twins beside transformers' own modules, kernels beside the plain twins, and what each refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
lean, rows = (pytest.importorskip(f"kernels.{name}") for name in ("lean", "rows"))
MOST_STACK = 64  # bytes a thread, as for the experts' kernels
Tensor = Any


def results(outputs: Any, leaf: Tensor) -> list[Tensor]:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [torch.sin(torch.arange(each.numel()) + 0.3).view(each.shape).to(each) for each in outputs]
    return [*(each.detach() for each in outputs), torch.autograd.grad(outputs, leaf, upstream, retain_graph=True)[0]]


def alike(ours: list[Tensor], stock: list[Tensor], limit: float = 1e-5) -> None:
    for one, two in zip(ours, stock, strict=True):
        assert one.dtype == two.dtype and one.shape == two.shape
        torch.testing.assert_close(one, two, rtol=limit, atol=limit)


@pytest.fixture
def qwen() -> Any:
    return pytest.importorskip("transformers.models.qwen3_5_moe.modeling_qwen3_5_moe")


def test_the_norms_are_the_stock_modules_also_where_bfloat16_rounds(qwen: Any) -> None:
    older = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    for module, zero_centered in ((qwen.Qwen3_5MoeRMSNorm(32), True), (older.Qwen3MoeRMSNorm(32), False)):
        for dtype in (torch.float32, torch.bfloat16):
            module = module.to(dtype).requires_grad_(False)
            module.weight.normal_()
            x = torch.randn(2, 5, 32, dtype=dtype, requires_grad=True)
            ours = lean.rms_norm(x, module.weight, 1e-6, zero_centered=zero_centered)
            assert torch.equal(ours, module(x))
            alike(results(ours, x), results(module(x), x), 1e-5 if dtype == torch.float32 else 2e-2)
            total, y = lean.add_rms_norm(x, x.detach() * 2, module.weight, 1e-6, zero_centered=zero_centered)
            assert torch.equal(total, x + x.detach() * 2) and torch.equal(y, module(total))


def test_the_gated_norm_is_the_stock_module_also_where_bfloat16_rounds(qwen: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        module = qwen.Qwen3_5MoeRMSNormGated(16).to(dtype).requires_grad_(False)
        module.weight.normal_()
        x, gate = (torch.randn(7, 3, 16, dtype=dtype, requires_grad=True) for _ in range(2))
        ours, stock = lean.gated_rms_norm(x, gate, module.weight, 1e-6), module(x, gate)
        assert torch.equal(ours, stock)
        for leaf in (x, gate):
            alike(
                results(lean.gated_rms_norm(x, gate, module.weight, 1e-6), leaf), results(module(x, gate), leaf), 2e-2
            )


def test_the_convolution_of_one_document_is_the_stock_one_and_of_two_packed_is_that_of_each(qwen: Any) -> None:
    x, weight = torch.randn(11, 20, requires_grad=True), torch.randn(20, 4)
    stock = qwen.causal_conv1d_fn(x.T[None], weight, activation="silu")[0].T
    ours = lean.conv_silu_split(x, weight, torch.zeros(11, dtype=torch.int32), 6)
    assert [part.shape[1] for part in ours] == [6, 6, 8]
    alike(results(torch.cat(ours, 1), x), results(stock, x))
    packed = lean.conv_silu_split(x, weight, torch.tensor([4] * 5 + [9] * 6, dtype=torch.int32), 6)
    each = [
        lean.conv_silu_split(part, weight, torch.zeros(len(part), dtype=torch.int32), 6) for part in x.split([5, 6])
    ]
    alike(results(packed, x), results(tuple(torch.cat(parts) for parts in zip(*each, strict=True)), x))


def test_the_heads_are_normed_and_rotated_as_the_stock_attention_does(qwen: Any) -> None:
    norm = qwen.Qwen3_5MoeRMSNorm(16).requires_grad_(False)
    norm.weight.normal_()
    qg, cos, sin = torch.randn(9, 3, 32, requires_grad=True), torch.randn(9, 6), torch.randn(9, 6)
    query, gate = torch.chunk(qg, 2, dim=-1)
    heads_first = norm(query).transpose(0, 1)[None]
    stock, _ = qwen.apply_rotary_pos_emb(heads_first, heads_first, cos[None], sin[None])
    stock = stock[0].transpose(0, 1)
    ours = lean.query_gate_norm_rope(qg, norm.weight, cos, sin, norm.eps, zero_centered=True)
    alike(results(ours, qg), results((stock, gate), qg))
    assert ours[1].data_ptr() == qg[..., 16:].data_ptr()
    x = query.detach().requires_grad_()
    alike([lean.norm_rope(x, norm.weight, cos, sin, norm.eps, zero_centered=True)], [stock.detach()])
    gated = lean.sigmoid_mul(stock, gate)
    alike(results(gated, qg), results(stock * torch.sigmoid(gate), qg))


def test_router_and_shared_expert_are_the_stock_block(qwen: Any) -> None:
    logits = torch.randn(13, 10, requires_grad=True)
    router = qwen.Qwen3_5MoeTopKRouter.__new__(qwen.Qwen3_5MoeTopKRouter)
    torch.nn.Module.__init__(router)
    router.top_k, router.hidden_dim, router.weight = 4, 10, torch.nn.Parameter(torch.eye(10), requires_grad=False)
    _, weight, expert = router(logits)
    ours = lean.top_k_router(logits, 4)
    assert torch.equal(ours[1], expert)
    alike(results(ours[0], logits), results(weight, logits))
    x, gate = torch.randn(5, 6, requires_grad=True), torch.randn(5, 1)
    alike(results(lean.silu_mul(x, x * 2), x), results(torch.nn.functional.silu(x) * (x * 2), x))
    stock = 3 * x + (2 * x + torch.sigmoid(gate) * x)
    alike(results(lean.shared_add(2 * x, x, gate, 3 * x), x), results(stock, x))


def test_of_equal_logits_the_lowest_experts_are_chosen() -> None:
    _, expert = lean.top_k_router(torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0], [0.0] * 5]), 3)
    assert expert.tolist() == [[1, 2, 4], [0, 1, 2]]


def test_autocast_changes_nothing_inside() -> None:
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        inside = lean.rms_norm(x, x[0], 1e-6, zero_centered=True), lean.top_k_router(x, 2)[0]
    outside = lean.rms_norm(x, x[0], 1e-6, zero_centered=True), lean.top_k_router(x, 2)[0]
    assert all(torch.equal(one, two) for one, two in zip(inside, outside, strict=True))


def test_recomputed_layers_give_the_same_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    qg, w, cos = torch.randn(5, 2, 16, requires_grad=True), torch.randn(8), torch.randn(5, 8)

    def layer(qg: Tensor) -> Tensor:
        query, gate = lean.query_gate_norm_rope(qg, w, cos, cos, 1e-6, zero_centered=True)
        return lean.silu_mul(*lean.add_rms_norm(lean.sigmoid_mul(query, gate), gate, w, 1e-6, zero_centered=False))

    alike(results(checkpoint(layer, qg, use_reentrant=False), qg), results(layer(qg), qg), 0.0)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: lean.rms_norm(x, torch.ones(3), 1e-6, zero_centered=True), r"weight: shape \(3,\); want \(8,\)"),
        (
            lambda x: lean.rms_norm(x, torch.ones(8, requires_grad=True), 1e-6, zero_centered=True),
            "weight: it asks for a gradient",
        ),
        (lambda x: lean.add_rms_norm(x, x[:1], x[0], 1e-6, zero_centered=True), r"residual: \(1, 8\)"),
        (lambda x: lean.conv_silu_split(x, torch.ones(8, 4), torch.zeros(4), 2), "document_T: torch.float32"),
        (lambda x: lean.conv_silu_split(x, torch.ones(8, 3), torch.zeros(4).int(), 2), "weight_CK: shape"),
        (lambda x: lean.conv_silu_split(x, torch.ones(8, 4), torch.zeros(4).int(), 4), "key_size: 4 of 8"),
        (lambda x: lean.silu_mul(x, x.double()), "up: .*torch.float64"),
        (lambda x: lean.shared_add(x, x, x, x), r"gate_T1: .*\(4, 8\)"),
        (lambda x: lean.norm_rope(x[:, None], x[0], x, x[:, :4], 1e-6, zero_centered=True), "cos, sin: shapes"),
        (lambda x: lean.top_k_router(x, 9), "k: 9"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(call: Callable[[Tensor], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(torch.randn(4, 8))


def test_frozen_weights_that_ask_for_gradients_are_taken_where_no_gradient_is_made() -> None:
    x, weight = torch.randn(4, 8), torch.ones(8, requires_grad=True)
    with torch.no_grad():
        lean.rms_norm(x, weight, 1e-6, zero_centered=True)


def test_views_in_token_order_are_read_where_they_lie_and_others_copied() -> None:
    merged = torch.randn(6, 50)
    for view in (merged[:, 10:], merged[:, 2:50].view(6, 4, 12), merged[:, :48].view(2, 3, 4, 12)[..., :5]):
        seen = rows.rows_of(view)
        assert seen.tensor.data_ptr() == view.data_ptr()
        for r, row in enumerate(view.reshape(-1, view.shape[-1])):
            at = view.storage_offset() + r // seen.groups * seen.outer + r % seen.groups * seen.inner
            assert torch.equal(merged.view(-1)[at : at + len(row)], row)
    for view in (merged.T, torch.randn(4, 6, 8).transpose(0, 1), torch.randn(3, 8).expand(2, 3, 8)[:, ::2]):
        assert rows.rows_of(view).tensor.is_contiguous()


def test_kernels_beside_float64_on_memory_full_of_nan(interpreted: Callable[..., str]) -> None:
    interpreted(
        "interpreted_lean.py",
        "every_op_beside_float64",
        "equal_logits_choose_the_lowest_experts_and_rows_of_nan_stay_among_the_experts",
    )


def test_a_kernel_broken_on_purpose_is_caught(interpreted: Callable[..., str]) -> None:
    interpreted("interpreted_lean.py", "every_kernel_broken_on_purpose_is_caught")


@pytest.mark.parametrize(("model", "capabilities"), [("35B", ("90", "120")), ("235B", ("100", "80"))])
def test_every_kernel_compiles_without_spills_and_reads_sixteen_bytes_at_a_time(
    run_alone: Callable[..., str], model: str, capabilities: tuple[str, ...]
) -> None:
    found = [
        json.loads(line) for line in run_alone("compiled_lean.py", model, *capabilities, interpret=False).splitlines()
    ]
    names = {"norm", "norm_backward", "gated_norm", "gated_norm_backward", "conv", "conv_backward", "gated"}
    names |= {"gated_backward", "add_shared", "add_shared_backward", "rotate", "rotate_backward"}
    names |= {"choose", "choose_backward", "label_stats"}
    assert {row["kernel"] for row in found} == names
    for row in found:
        assert row["stack"] <= MOST_STACK and row["registers"] <= 128 and row["shared"] <= 16_384, row
        narrow = {
            "choose",
            "choose_backward",
            "conv_backward",
        }  # logits beside a gate; 8 bytes a thread of more threads
        assert row["wide loads"] > 0 or row["kernel"] in narrow, row
        # Tiles that are exchanged between threads cost more than the memory does.
        assert row["barriers"] <= (16 if row["kernel"] == "label_stats" else 8), row


def test_no_wait_for_the_host_is_written_in_the_ops() -> None:
    folder = Path(__file__).parents[2] / "kernels"
    for name in ("rows", "norms", "conv", "gates", "rope", "router", "head"):
        source = (folder / f"{name}.py").read_text()
        assert not [word for word in (".item(", ".tolist(", ".cpu(", "nonzero", "synchronize") if word in source], name
