from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.training.sharded.synthetic import write_235b
from training.sharded.headers import INDEX, SINGLE, CheckpointError, file_metadata, read_headers
from training.sharded.inventory import read_inventory


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two files and their index."""
    files = {"a.safetensors": {"x": torch.randn(3, 4), "y": torch.ones(5)}, "b.safetensors": {"z": torch.zeros(2, 2)}}
    for name, tensors in files.items():
        save_file(tensors, tmp_path / name, {"format": "pt"})
    index = {"weight_map": {tensor: name for name, tensors in files.items() for tensor in tensors}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    return tmp_path


def test_every_tensor_is_found_where_it_lies(sharded: Path) -> None:
    found = read_headers(sharded)
    assert set(found) == {"x", "y", "z"}
    for name, at in found.items():
        data = at.file.read_bytes()[at.offset : at.offset + at.bytes]
        wanted = load_file(at.file)[name]
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=torch.float32).view(at.shape), wanted)
    assert file_metadata(sharded / "a.safetensors") == {"format": "pt"}


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / SINGLE)
    at = read_headers(tmp_path)["x"]
    assert (at.dtype, at.shape, at.bytes, at.item_bytes, at.numbers) == ("BF16", (2,), 4, 2, 2)


def test_a_torn_file_is_named(sharded: Path) -> None:
    path = sharded / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"b\.safetensors: \d+ bytes, its header describes \d+; the file is torn"):
        read_headers(sharded)


@pytest.mark.parametrize("content", [b"", b"\x05\0", (10**9).to_bytes(8, "little") + b"{}", b"\x02" + bytes(7) + b"[]"])
def test_a_file_that_is_no_safetensors_file_is_named(sharded: Path, content: bytes) -> None:
    (sharded / "b.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"b\.safetensors: .*fetch"):
        read_headers(sharded)


def test_a_tensor_whose_bytes_are_not_those_of_its_shape_is_named(tmp_path: Path) -> None:
    text = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=r"x: 8 bytes for \[3\] of F32"):
        read_headers(tmp_path)


def test_an_index_that_names_a_file_that_is_not_there_is_refused(sharded: Path) -> None:
    (sharded / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names b\.safetensors, which is not there \(1 of 2"):
        read_headers(sharded)


def test_a_tensor_that_the_index_has_and_no_file_is_named(sharded: Path) -> None:
    save_file({"x": torch.ones(1)}, sharded / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors: lacks y"):
        read_headers(sharded)


def test_files_of_two_versions_are_refused(sharded: Path) -> None:
    save_file({"z": torch.zeros(1), "new": torch.ones(1)}, sharded / "b.safetensors")
    with pytest.raises(CheckpointError, match=r"b\.safetensors: holds new, which .* has in no file"):
        read_headers(sharded)


def test_a_folder_without_weights_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        read_headers(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"weight_map": {"x": "../../secret"}}', '{"weight_map": {"x": 3}}'])
def test_an_index_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="weight_map"):
        read_headers(tmp_path)


def test_every_tensor_and_byte_of_the_235b_is_found_in_its_headers(tmp_path: Path) -> None:
    write_235b(tmp_path)
    assert len(read_headers(tmp_path)) == 36_945
    assert read_inventory(tmp_path).bytes == 470_187_269_120
