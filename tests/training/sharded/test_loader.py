from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels import nf4, reference
from tests.training.sharded.threads import on_ranks
from training.contract.shapes import read_shape
from training.sharded import reader
from training.sharded.headers import SINGLE, CheckpointError
from training.sharded.inventory import read_inventory
from training.sharded.loader import Base, load
from training.sharded.reader import Read
from training.sharded.storage import BLOCK, LayerExperts, Matrix, SharedHost, join
from training.sharded.synthetic import tensors_of

CPU = torch.device("cpu")
SMALL = {"device": CPU, "dtype": torch.float32, "buffer_bytes": 3000, "buffers": 3}
"""Buffers that end within matrices, and no multiple of a block long."""


def fused(model: Path, layer: int) -> dict[str, Tensor]:
    """The layer's experts as transformers would hold them."""
    tensors = load_file(model / SINGLE)
    base = f"model.layers.{layer}.mlp.experts"
    count = read_inventory(model).shape.experts

    def stack(name: str) -> Tensor:
        return torch.stack([tensors[f"{base}.{expert}.{name}_proj.weight"] for expert in range(count)])

    return {"gate_up": torch.cat([stack("gate"), stack("up")], dim=1), "down": stack("down")}


def quantised(weights: Tensor) -> tuple[Tensor, Tensor]:
    return reference.quantise_nf4(weights, torch.tensor(nf4.CODES))


def same_bits(seen: LayerExperts, model: Path, layer: int) -> None:
    for part, weights in fused(model, layer).items():
        packed, absmax = quantised(weights)
        values = seen.gate_up if part == "gate_up" else seen.down
        assert torch.equal(values.packed, packed) and torch.equal(values.absmax, absmax), (layer, part)


def joined(bases: list[Base]) -> list[LayerExperts]:
    return [join(pieces) for pieces in zip(*(base.experts for base in bases), strict=True)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_pieces_of_all_ranks_join_to_the_bits_of_the_whole_tensor(model: Path, ranks: int) -> None:
    bases = on_ranks(ranks, lambda rank: load(model, ranks=rank, **SMALL))
    for layer, seen in enumerate(joined(bases)):
        same_bits(seen, model, layer)
    held = bases[0].last - bases[0].first
    assert held * ranks == 8 and bases[-1].last == 8


def test_names_and_layout_are_those_of_the_class_that_transformers_loads(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    base = load(model, **SMALL)
    assert set(base.matrices) == {name for name in theirs if ".experts." not in name}
    for layer, seen in enumerate(base.experts):
        for part, values in (("gate_up", seen.gate_up), ("down", seen.down)):
            packed, absmax = quantised(theirs[f"model.layers.{layer}.mlp.experts.{part}_proj"])
            assert torch.equal(values.packed, packed) and torch.equal(values.absmax, absmax), (layer, part)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_byte_of_the_checkpoint_is_read_once_on_the_box(model: Path, ranks: int) -> None:
    bases = on_ranks(ranks, lambda rank: load(model, ranks=rank, **SMALL))
    size = (model / SINGLE).stat().st_size - int.from_bytes((model / SINGLE).read_bytes()[:8], "little") - 8
    assert sum(base.report.read_bytes for base in bases) == size


@pytest.mark.parametrize("linears", ["nf4", "bf16"])
def test_everything_else_is_whole_on_every_rank(model: Path, linears: str) -> None:
    bases = on_ranks(2, lambda rank: load(model, ranks=rank, linears=linears, **SMALL))
    tensors = load_file(model / SINGLE)
    for base in bases:
        assert set(base.matrices) == {name for name in tensors if ".experts." not in name}
        for name, seen in base.matrices.items():
            if isinstance(seen, Matrix):
                packed, absmax = quantised(tensors[name])
                assert torch.equal(seen.values.packed, packed) and torch.equal(seen.values.absmax, absmax)
                error = reference.relative_error(seen.dequantise(torch.float32), tensors[name])
                assert seen.shape == tensors[name].shape and 0.05 < error < 0.12
            else:
                assert torch.equal(seen, tensors[name])
    packed = {name.split(".")[4] for name, seen in bases[0].matrices.items() if isinstance(seen, Matrix)}
    assert ("q_proj" in packed) == (linears == "nf4") and not packed & {"q_norm", "in_proj_a", "A_log", "conv1d"}


def test_fused_experts_of_a_vision_language_checkpoint_give_the_same_bits(model: Path, tmp_path: Path) -> None:
    tensors = {name: each for name, each in load_file(model / SINGLE).items() if ".experts." not in name}
    for layer in range(4):
        for part, weights in fused(model, layer).items():
            tensors[f"model.layers.{layer}.mlp.experts.{part}_proj"] = weights
    renamed = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors.items()}
    save_file(renamed | {"mtp.fc.weight": torch.ones(8)}, tmp_path / SINGLE)
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    bases = on_ranks(2, lambda rank: load(tmp_path, ranks=rank, **SMALL))
    for layer, seen in enumerate(joined(bases)):
        same_bits(seen, model, layer)
    assert bases[0].report.left_out_bytes == 32
    assert sum(base.report.read_bytes for base in bases) == bases[0].report.checkpoint_bytes


def test_bfloat16_is_quantised_from_its_own_values(model: Path, tmp_path: Path) -> None:
    save_file({name: each.bfloat16() for name, each in load_file(model / SINGLE).items()}, tmp_path / SINGLE)
    (tmp_path / "config.json").write_bytes((model / "config.json").read_bytes())
    for layer, seen in enumerate(load(tmp_path, **SMALL).experts):
        same_bits(seen, tmp_path, layer)


def test_all_ranks_fill_one_copy_in_host_memory(model: Path) -> None:
    shape = read_inventory(model).shape
    mine = SharedHost(shape)
    # As another process would: through the first one's path.
    hosts = [mine, SharedHost(shape, mine.path)]
    on_ranks(2, lambda rank: load(model, ranks=rank, into=list(hosts[rank.rank].layers()), **SMALL))
    for host in hosts:
        for layer, seen in enumerate(host.layers()):
            same_bits(seen, model, layer)
    assert mine.bytes == sum(layer.bytes for layer in mine.layers())
    with pytest.raises(ValueError, match="the ranks load two models"):
        SharedHost(replace(shape, experts=4), mine.path)


def test_the_report_has_bytes_by_group_and_type(model: Path) -> None:
    base = load(model, **SMALL)
    weights = base.inventory.shape.expert_parameters
    assert base.report.held_bytes["routed_experts", "nf4"] == weights * 36 // BLOCK
    assert base.report.held_bytes["embeddings", "float32"] == 2 * 256 * 64 * 4
    assert ("attention", "nf4") in base.report.held_bytes and (
        "routed_experts",
        "float32",
    ) not in base.report.held_bytes
    assert any(line.startswith("routed_experts     nf4") for line in base.report.lines())


def test_experts_that_did_not_all_arrive_are_an_error_that_names_the_layer(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from training.sharded.inventory import Inventory

    whole = Inventory.stretches

    def short(self: Inventory, layer: int, part: str, first: int, last: int) -> object:
        found = list(whole(self, layer, part, first, last))  # type: ignore[arg-type]
        return found[:-1] if (layer, part) == (2, "down") else found

    monkeypatch.setattr(Inventory, "stretches", short)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.down_proj: 14336 of 16384 weights"):
        load(model, **SMALL)


def test_a_file_that_is_cut_while_it_is_read_is_named_and_nobody_waits(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    path.write_bytes(bytes(100))
    reads = [Read(path, 10 * number, 10, lambda data: None, f"t{number}") for number in range(12)]
    with pytest.raises(CheckpointError, match=r"cut\.safetensors: ends 10 bytes before t10 does"):
        reader.stream(reads, CPU, buffer_bytes=16, buffers=2)
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: x cannot be read: No such file"):
        reader.stream([Read(tmp_path / "gone.safetensors", 0, 1, lambda data: None, "x")], CPU)


def test_a_fault_of_who_takes_the_bytes_ends_the_reading(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))

    def refuse(data: Tensor) -> None:
        raise RuntimeError("no room")

    reads = [Read(tmp_path / "a", number, 1, refuse, "x") for number in range(50)]
    with pytest.raises(RuntimeError, match="no room"):
        reader.stream(reads, CPU, buffer_bytes=16, buffers=2)


def test_files_are_read_in_their_order_whatever_order_is_asked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(50)))
    seen: list[int] = []
    reads = [
        Read(tmp_path / "a", number, 1, lambda data: seen.append(int(data[0])), "x") for number in reversed(range(50))
    ]
    assert reader.stream(reads, CPU, buffer_bytes=1, buffers=3).bytes == 50
    assert seen == list(range(50))


def test_experts_that_cannot_be_dealt_out_evenly_are_refused(model: Path) -> None:
    with pytest.raises(ValueError, match="8 experts over 3 ranks: want a number of ranks that divides them, such as 2"):
        on_ranks(3, lambda rank: load(model, ranks=rank, **SMALL))


def test_a_matrix_without_whole_blocks_is_refused_and_never_left_unquantised_in_silence(tmp_path: Path) -> None:
    from training.tiny import make_model

    odd = make_model(256, 1, 0, family="qwen3_moe").config.to_dict() | {"num_attention_heads": 1, "head_dim": 17}
    odd |= {"hidden_size": 16, "moe_intermediate_size": 4, "num_key_value_heads": 1, "num_hidden_layers": 1}
    shape = read_shape(json.dumps(odd))
    save_file({name: torch.ones(wanted) for name, wanted in tensors_of(shape).items()}, tmp_path / SINGLE)
    (tmp_path / "config.json").write_text(json.dumps(odd))
    with pytest.raises(CheckpointError, match=r"q_proj\.weight: 272 weights cannot be kept in 4 bits"):
        load(tmp_path, **SMALL)
    assert not isinstance(load(tmp_path, linears="bf16", **SMALL).matrices["lm_head.weight"], Matrix)


def test_a_view_of_some_experts_is_the_layers_own_memory(model: Path) -> None:
    (layer, *_) = load(model, **SMALL).experts
    view = layer.experts(2, 5)
    assert (view.first, view.last) == (2, 5)
    # A view of a view counts as the model does, too.
    for one, other in zip(view.experts(3, 5).buffers, layer.experts(3, 5).buffers, strict=True):
        assert one.data_ptr() == other.data_ptr() and one.shape == other.shape
    view.down.packed.zero_()
    each = layer.down.packed.numel() // 8
    assert not layer.down.packed[2 * each : 5 * each].any() and layer.down.packed[: 2 * each].any()


_MEASURE = """
import sys, threading, time
import torch
from pathlib import Path
from training.sharded.loader import load
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))
torch.zeros(1 << 20).bfloat16().float().abs().amax()
before, peak, stop = anonymous(), [0], threading.Event()
def watch():
    while not stop.wait(0.002):
        peak[0] = max(peak[0], anonymous())
watcher = threading.Thread(target=watch); watcher.start()
base = load(Path(sys.argv[1]), device=torch.device("cpu"), buffer_bytes=1 << 20, buffers=4)
stop.set(); watcher.join()
held = sum(base.report.held_bytes.values())
print(held, peak[0] - before - held, base.report.read_bytes)
"""


@pytest.mark.train
def test_the_host_holds_the_result_and_a_few_buffers_and_never_the_checkpoint(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe", "hidden_size": 512, "vocab_size": 2048, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 64,
        "num_experts_per_tok": 8, "moe_intermediate_size": 256, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(json.dumps(config))
    save_file(
        {name: torch.full(wanted, 0.02, dtype=torch.bfloat16) for name, wanted in tensors_of(shape).items()},
        tmp_path / SINGLE,
    )
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    held, over, read = map(int, done.stdout.split())
    assert read > 200e6 > held
    # Two hundred megabytes pass through four of one each; the plain quantiser's intermediates are twenty times a buffer.
    assert over < 60e6, (held, over, read)


def test_safetensors_itself_agrees_on_what_is_stored(model: Path) -> None:
    with safe_open(model / SINGLE, "pt") as file:
        names = set(file.keys())
    found = read_inventory(model)
    assert names == {at.name for _, at in found.matrices.values()} | {
        at.name for sources in found.experts.values() for at in sources
    }
