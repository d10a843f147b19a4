from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from training.contract.shapes import QWEN3_235B, QWEN36_35B, TINY, ModelShape, read_shape
from training.sharded.headers import CheckpointError, TensorAt, read_headers
from training.sharded.inventory import Inventory, read_inventory, take_inventory
from training.sharded.synthetic import inventory_of, kinds_of, tensors_of


def headers(shape: ModelShape = TINY) -> dict[str, TensorAt]:
    return {
        name: TensorAt(name, Path("model.safetensors"), 0, 0, "BF16", wanted)
        for name, wanted in tensors_of(shape).items()
    }


def take(found: Mapping[str, TensorAt], shape: ModelShape = TINY) -> Inventory:
    return take_inventory(found, shape, kinds_of(shape))


def fused(found: dict[str, TensorAt], shape: ModelShape = TINY) -> dict[str, TensorAt]:
    """As vision-language checkpoints hold them: fused experts under another prefix, a vision tower and MTP layers beside them."""
    kept = {name: at for name, at in found.items() if ".mlp.experts." not in name}
    for layer in range(shape.layers):
        base = f"model.layers.{layer}.mlp.experts"
        for part, wanted in (
            ("gate_up_proj", (shape.experts, 2 * shape.intermediate, shape.hidden)),
            ("down_proj", (shape.experts, shape.hidden, shape.intermediate)),
        ):
            kept[f"{base}.{part}"] = next(iter(found.values()))._replace(name=f"{base}.{part}", shape=wanted)
    renamed = {name.replace("model.", "model.language_model.", 1): at for name, at in kept.items()}
    extra = next(iter(found.values()))
    return renamed | {name: extra._replace(name=name) for name in ("model.visual.blocks.0.w", "mtp.fc.weight")}


@pytest.mark.parametrize("shape", [QWEN3_235B, QWEN36_35B])
def test_the_wanted_tensors_have_exactly_the_models_parameters(shape: ModelShape) -> None:
    found = inventory_of(shape)
    routed = sum(at.numbers for sources in found.experts.values() for at in sources)
    assert routed == shape.expert_parameters
    assert routed + sum(at.numbers for _, at in found.matrices.values()) == shape.parameters


def test_a_checkpoint_of_each_family_is_sorted_whole(model: Path) -> None:
    found = read_inventory(model)
    taken = sum(len(sources) for sources in found.experts.values()) + len(found.matrices)
    assert taken == len(read_headers(model)) and not found.left_out


def test_fused_experts_a_prefix_a_vision_tower_and_mtp_are_known() -> None:
    found = take(fused(headers()))
    assert [at.name for at in found.left_out] == ["model.visual.blocks.0.w", "mtp.fc.weight"]
    each = 2 * TINY.intermediate * TINY.hidden
    assert [tuple(stretch)[1:] for stretch in found.stretches(0, "gate_up", 2, 6)] == [(2 * each, 4 * each, 0)]


def test_a_rank_takes_gate_before_up_of_its_own_experts() -> None:
    stretches = list(take(headers()).stretches(1, "gate_up", 2, 4))
    assert [stretch.tensor.name.split("experts.")[1] for stretch in stretches] == [
        f"{expert}.{half}_proj.weight" for expert in (2, 3) for half in ("gate", "up")
    ]
    each = TINY.intermediate * TINY.hidden
    assert [stretch.place for stretch in stretches] == [0, each, 2 * each, 3 * each]


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.experts.3.up_proj.weight", "model.layers.3.self_attn.q_proj.weight"]
)
def test_a_missing_tensor_is_named(name: str) -> None:
    found = headers()
    del found[name]
    with pytest.raises(CheckpointError, match=f"{name}: is in no file"):
        take(found)


def test_a_routed_expert_that_nobody_would_quantise_is_an_error_that_names_it() -> None:
    found = headers()
    found["model.layers.0.mlp.experts.8.gate_proj.weight"] = found["model.norm.weight"]
    with pytest.raises(
        CheckpointError, match=r"experts\.8\.gate_proj\.weight is a routed expert's and would stay unquant"
    ):
        take(found)


def test_experts_under_unknown_names_are_an_error_that_shows_one() -> None:
    found = {name.replace("gate_proj", "w1") if ".experts." in name else name: at for name, at in headers().items()}
    with pytest.raises(CheckpointError, match=r"its experts are called otherwise, such as .*\.w1\.weight"):
        take(found)


def test_a_tensor_without_a_place_is_named() -> None:
    found = headers()
    found["model.layers.9.input_layernorm.weight"] = found["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.9\.input_layernorm\.weight has no place"):
        take(found)


def test_another_shape_and_an_8_bit_checkpoint_are_refused() -> None:
    found = headers()
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    with pytest.raises(CheckpointError, match=r"has shape \[64, 16\], config\.json wants \[64, 32\]"):
        take(found | {name: found[name]._replace(shape=(64, 16))})
    with pytest.raises(CheckpointError, match=r"is F8_E4M3; want BF16, F16, F32"):
        take(found | {name: found[name]._replace(dtype="F8_E4M3")})


def test_a_tied_head_may_be_repeated_or_not() -> None:
    tied = replace(TINY, tied=True)
    found = headers()
    assert "lm_head.weight" not in take(found, tied).matrices
    del found["lm_head.weight"]
    assert "lm_head.weight" not in take(found, tied).matrices


def test_the_type_of_each_layer_comes_from_config_json(model: Path, family: str) -> None:
    shape = read_shape((model / "config.json").read_bytes())
    mixers = {name.split(".")[3] for name in read_inventory(model).matrices if ".layers.3." in name}
    assert "self_attn" in mixers
    assert shape.linear_layers == (3 if family == "qwen3_5_moe" else 0)


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_inventory(tmp_path)
