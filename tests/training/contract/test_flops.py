from __future__ import annotations

import pytest

from training.contract.flops import PEAK_TFLOPS, token_flops, utilisation
from training.contract.recipe import Adapters
from training.contract.shapes import QWEN36_35B


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
