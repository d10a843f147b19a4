from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from training.box.light import light_bytes, light_names, make_first, make_light, round_safetensors
from training.contract.manifest import FileEntry

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


def test_the_adapter_is_rounded_as_torch_rounds_it(tmp_path: Path) -> None:
    values = torch.cat([torch.randn(4099) * 10.0**power for power in range(-38, 38, 4)])
    edges = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, 3.4e38, -3.4e38, float("inf"), -float("inf"), 1e-45])
    tensors = {"b": values, "a": edges.reshape(3, 3), "kept": torch.arange(5), "half": torch.ones(3).bfloat16()}
    safetensors.save_file(tensors, tmp_path / "full.safetensors", metadata={"format": "pt"})
    round_safetensors(tmp_path / "full.safetensors", tmp_path / "light.safetensors")
    light = safetensors.load_file(tmp_path / "light.safetensors")
    for name in ("a", "b"):
        assert light[name].dtype == torch.bfloat16 and torch.equal(light[name], tensors[name].bfloat16()), name
    assert torch.equal(light["kept"], tensors["kept"]) and torch.equal(light["half"], tensors["half"])
    with (tmp_path / "light.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    assert header["__metadata__"] == {"format": "pt"}


def test_peft_loads_it_into_an_fp32_adapter(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    base = transformers.LlamaForCausalLM(config)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path / "full")
    make_light(tmp_path / "full", ["adapter_config.json", "adapter_model.safetensors"], tmp_path / "light")
    again = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM(config), tmp_path / "light", is_trainable=True)
    weights = {name: p for name, p in again.named_parameters() if "lora_" in name}
    want = {name: p for name, p in model.named_parameters() if "lora_" in name}
    assert weights.keys() == want.keys() and weights
    for name, weight in weights.items():
        assert weight.dtype == torch.float32 and torch.equal(weight, want[name].bfloat16().float())


EXPERTS = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
SHARED = "base_model.model.model.layers.0.mlp.shared_expert.up_proj.lora_A.weight"
ATTENTION = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def test_what_goes_first_is_all_but_the_routed_experts(tmp_path: Path) -> None:
    tensors = {name: torch.randn(4, 8) for name in (EXPERTS, SHARED, ATTENTION)}
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "adapter_config.json").write_text("{}")
    safetensors.save_file(tensors, tmp_path / "light" / "adapter_model.safetensors", metadata={"format": "pt"})
    assert make_first(tmp_path / "light", tmp_path / "first") == ["adapter_config.json", "adapter_model.safetensors"]
    first = safetensors.load_file(tmp_path / "first" / "adapter_model.safetensors")
    assert set(first) == {SHARED, ATTENTION}
    for name, tensor in first.items():
        assert torch.equal(tensor, tensors[name].bfloat16()), name


@pytest.mark.parametrize("names", [(), (EXPERTS,), (ATTENTION, SHARED)])
def test_where_that_is_nothing_or_all_of_it_nothing_goes_first(tmp_path: Path, names: tuple[str, ...]) -> None:
    if names:
        safetensors.save_file({name: torch.ones(2) for name in names}, tmp_path / "adapter_model.safetensors")
    assert make_first(tmp_path, tmp_path / "first") == []


def test_peft_loads_an_adapter_of_which_a_part_is_missing_and_that_part_changes_nothing(tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    base = transformers.LlamaForCausalLM(config)
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    round_safetensors(path, tmp_path / "part", keep=lambda name: "up_proj" not in name)
    (tmp_path / "part").rename(path)
    with pytest.warns(UserWarning, match="missing"):
        again = peft.PeftModel.from_pretrained(transformers.LlamaForCausalLM(config), tmp_path)
    weights = {name: p for name, p in again.named_parameters() if "lora_B" in name}
    assert {"up_proj" in name: bool(p.any()) for name, p in weights.items()} == {True: False, False: True}


def test_what_only_the_trainer_needs_is_left_out_and_counted_so(tmp_path: Path) -> None:
    sizes = {"adapter_model.safetensors": 1000, "optimizer.pt": 2000, "rng_state.pth": 10, "trainer_state.json": 7}
    files = {name: FileEntry(sha256="0" * 64, bytes=size) for name, size in sizes.items()}
    assert light_names(files) == ["adapter_model.safetensors", "trainer_state.json"]
    assert light_bytes(files) == 507
