from __future__ import annotations

import pytest

from training.contract.flops import PEAK_TFLOPS, predicted_tokens_s, step_tokens, token_flops, utilisation
from training.contract.recipe import Adapters, DpoPhase, SftPhase
from training.contract.shapes import QWEN36_35B

H200 = {"layer_s": 4.54e-3, "layer_tokens": 16_384, "matmul_tflops": 790.0}


def test_a_token_of_the_35b_costs_11_8_gflop_in_the_frozen_base() -> None:
    """2.95 billion active weights, forward and the gradient of the input; frozen weights have no gradient of their own."""
    assert token_flops(QWEN36_35B, Adapters(), 2048).base / 1e9 == pytest.approx(11.8, abs=0.05)


def test_adapters_attention_and_the_delta_net_add_about_an_eighth() -> None:
    flops = token_flops(QWEN36_35B, Adapters(), 2048)
    assert flops.lora / 1e9 == pytest.approx(6 * (57.67 + 38.34) / 1e3, abs=0.01)
    assert 13.0 < flops.total / 1e9 < 13.6
    assert token_flops(QWEN36_35B, Adapters(), 8192).attention > flops.attention


def test_utilisation_is_useful_arithmetic_over_the_peak() -> None:
    """19,556 tokens a second on an H200 are 29.2 % of the 790 TFLOP/s that were measured on it, and less of its data sheet's."""
    base = token_flops(QWEN36_35B, Adapters(), 2048).base
    assert utilisation(base, 19_556, 790) == pytest.approx(0.292, abs=0.001)
    assert utilisation(base, 19_556, PEAK_TFLOPS["h200"]) < 0.24


def test_the_predicted_speed_is_the_one_measured_with_stock_modules_and_fast_experts() -> None:
    """An H200 with whole layers recomputed: 4.54 ms a layer of experts at 16,384 tokens, 790 TFLOP/s, and 8,987 tokens a second."""
    assert predicted_tokens_s(QWEN36_35B, Adapters(rank=32), 2048, **H200, lean=False) == pytest.approx(8_987, rel=0.05)


def test_the_predicted_speed_is_the_one_measured_with_lean_layers() -> None:
    """0.768 s at work on 16,384 tokens on an H200 of 742 TFLOP/s, 4.65 ms a layer of experts among them, and all but the experts recomputed."""
    measured = {**H200, "layer_s": 0.00465, "matmul_tflops": 742.0}
    assert predicted_tokens_s(QWEN36_35B, Adapters(rank=32), 2048, **measured) == pytest.approx(
        16_384 / 0.768, rel=0.02
    )
    predicted = predicted_tokens_s(QWEN36_35B, Adapters(rank=32), 2048, **H200)
    throttled = predicted_tokens_s(
        QWEN36_35B, Adapters(rank=32), 2048, **{**H200, "layer_s": 0.1, "matmul_tflops": 80.0}
    )
    assert throttled < predicted / 8


def test_a_steps_tokens_are_its_rows_and_a_dpo_row_holds_two_answers() -> None:
    row = {
        "data": "bucket:d",
        "steps": 1,
        "learning_rate": 1e-4,
        "batch_size": 2,
        "accumulation": 4,
        "max_length": 1024,
    }
    assert step_tokens(SftPhase.model_validate(row)) == 8192
    assert step_tokens(DpoPhase.model_validate(row)) == 16_384
