from __future__ import annotations

import json
from typing import Any

import pytest

from tests.training.published import QWEN36_CONFIG
from training.contract.recipe import Adapters, Model
from training.contract.shapes import KNOWN, QWEN3_235B, QWEN36_35B, TINY, ShapeError, read_shape, shape_of

ALL = Adapters()
TWO = Adapters(groups=("attention", "routed_experts"))


def model_of(size_gb: float, **changes: Any) -> Model:
    return Model.model_validate({"source": "bucket:m", "family": "qwen3_5_moe", "size_gb": size_gb, **changes})


def test_the_known_models_have_their_known_numbers_of_parameters() -> None:
    assert QWEN36_35B.parameters == 34_660_610_688
    assert QWEN3_235B.parameters == 235_093_634_560
    assert QWEN36_35B.expert_parameters * 2 / 1e9 == pytest.approx(64.42, abs=0.01)
    assert QWEN36_35B.active_parameters / 1e9 == pytest.approx(2.95, abs=0.005)


def test_adapters_at_rank_32_have_their_known_numbers_of_parameters_a_group() -> None:
    counts = QWEN36_35B.lora_parameters(ALL)
    assert counts["routed_experts"] == 1_006_632_960 + 838_860_800
    assert sum(counts.values()) == 1_883_832_320
    assert QWEN3_235B.lora_parameters(TWO) == {"attention": 101_646_336, "routed_experts": 4_928_307_200}
    gates = Adapters(gate_projections=True)
    assert QWEN36_35B.lora_parameters(gates)["linear_attention"] - counts["linear_attention"] == 2 * 30 * 32 * 2080


def test_rank_scales_every_group() -> None:
    half = QWEN36_35B.lora_parameters(Adapters(rank=16))
    assert all(count == 2 * half[group] for group, count in QWEN36_35B.lora_parameters(ALL).items())


@pytest.mark.train
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_moe"])
@pytest.mark.parametrize("gates", [False, True])
def test_counts_are_those_of_the_model_that_transformers_and_peft_build(family: str, gates: bool) -> None:
    """On the meta device, so that nothing is computed."""
    import torch
    from peft import get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    from training.model import lora_config

    small = {"vocab_size": 320, "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8}
    small |= {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    if family == "qwen3_5_moe":
        small |= {"shared_expert_intermediate_size": 40, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        small |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16}
    elif gates:
        pytest.skip("this family has no gated delta net")
    name = family if family == "qwen3_moe" else "qwen3_5_moe_text"
    config = AutoConfig.for_model(name, **small)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(json.dumps(config.to_dict(), default=str))
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.family == family and shape.exact
    groups = ALL.groups if family == "qwen3_5_moe" else TWO.groups
    adapters = Adapters(rank=3, alpha=6, groups=groups, gate_projections=gates)
    with torch.device("meta"):
        wrapped = get_peft_model(model, lora_config(adapters, family))
    trainable = sum(parameter.numel() for parameter in wrapped.parameters() if parameter.requires_grad)
    assert sum(shape.lora_parameters(adapters).values()) == trainable


def test_a_known_model_is_known_by_its_family_and_size() -> None:
    assert shape_of(model_of(70.2)) is QWEN36_35B and shape_of(model_of(72)) is QWEN36_35B
    assert shape_of(model_of(470, family="qwen3_moe")) is QWEN3_235B
    assert shape_of(model_of(0.00196, dtype="float32")) is TINY


@pytest.mark.parametrize("size_gb", [0.01, 3, 30, 244, 800])
def test_any_other_model_is_an_estimate_of_about_its_size_that_says_so(size_gb: float) -> None:
    shape = shape_of(model_of(size_gb))
    assert not shape.exact
    assert shape.parameters * 2 / 1e9 == pytest.approx(size_gb, rel=0.1)
    widths = (shape.hidden, shape.intermediate, shape.head_dim, shape.key_head_dim, shape.shared_intermediate)
    assert not any(width % 32 for width in widths), (
        "no card's kernels take other widths, and a probe at this shape would blame the card"
    )


def test_the_text_part_of_a_multimodal_configuration_is_read() -> None:
    assert read_shape(json.dumps(QWEN36_CONFIG)) == QWEN36_35B
    with pytest.raises(ShapeError, match=r"head_dim: seen None, want a whole number"):
        read_shape(json.dumps({**QWEN36_CONFIG["text_config"], "head_dim": None}))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("{", "not JSON"),
        ("[]", "want an object"),
        ('{"model_type": "llama"}', "model_type: seen 'llama', want one of qwen3_5_moe"),
        ('{"model_type": "qwen3_moe", "mlp_only_layers": [0]}', "dense MLP"),
    ],
)
def test_a_configuration_that_is_not_known_is_refused_by_name(config: str, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        read_shape(config, "mirror/config.json")


def test_known_shapes_are_exact() -> None:
    assert all(shape.exact for shape in KNOWN)
