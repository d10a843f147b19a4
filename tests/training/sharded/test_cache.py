from __future__ import annotations

import json
import os
from pathlib import Path
from shutil import copytree

import pytest
import torch

from tests.training.sharded.threads import on_ranks
from training.sharded import cache
from training.sharded.loader import Base, load
from training.sharded.storage import LayerExperts, Matrix, join

SMALL = {"device": torch.device("cpu"), "dtype": torch.float32, "buffer_bytes": 4096, "buffers": 2, "use_cache": True}


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    return Path(copytree(model, tmp_path / "model"))


def load_all(model: Path, ranks: int, said: list[str] | None = None) -> list[Base]:
    told: list[str] = [] if said is None else said
    return on_ranks(
        ranks, lambda rank: load(model, ranks=rank, notice=lambda what, why: told.append(f"{what}: {why}"), **SMALL)
    )


def layers(bases: list[Base]) -> list[LayerExperts]:
    return [join(pieces) for pieces in zip(*(base.experts for base in bases), strict=True)]


def require_equal(seen: list[Base], wanted: list[Base]) -> None:
    for one, other in zip(layers(seen), layers(wanted), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.buffers, other.buffers, strict=True))
    for base in seen:
        for name, matrix in wanted[0].matrices.items():
            mine = base.matrices[name]
            if isinstance(matrix, Matrix):
                assert isinstance(mine, Matrix) and all(map(torch.equal, mine.values, matrix.values)), name
            else:
                assert isinstance(mine, torch.Tensor) and torch.equal(mine, matrix), name


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_restart_loads_the_same_bits_from_the_cache_whatever_the_number_of_ranks(copied: Path, ranks: int) -> None:
    said: list[str] = []
    made = load_all(copied, 2, said)
    again = load_all(copied, ranks, said)
    assert not any(base.report.from_cache for base in made) and all(base.report.from_cache for base in again)
    require_equal(again, made)
    assert not said
    # fp32 experts in the tiny model: 4.5 bits of 32, and what stays unpacked.
    assert sum(base.report.read_bytes for base in again) < 0.6 * sum(base.report.read_bytes for base in made)
    assert "NF4 cache" in again[0].report.lines()[-1]


def flip_a_byte(model: Path) -> None:
    data = model / cache.FOLDER / cache.DATA
    with data.open("r+b") as file:
        at = file_middle(data)
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def file_middle(path: Path) -> int:
    from training.sharded.headers import file_header

    at = next(each for each in file_header(path) if each.name == "layers.2.gate_up.packed")
    return at.offset + at.bytes // 2


def cut(model: Path) -> None:
    data = model / cache.FOLDER / cache.DATA
    os.truncate(data, data.stat().st_size - 1)


def change_the_source(model: Path) -> None:
    os.utime(model / "model.safetensors", ns=(1, 1))


def forget_the_manifest(model: Path) -> None:
    (model / cache.FOLDER / cache.MANIFEST).unlink()


def claim_another_format(model: Path) -> None:
    path = model / cache.FOLDER / cache.MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 99}))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (flip_a_byte, "layers.2.gate_up.packed: its bytes are not those that were written"),
        (cut, "the file is torn"),
        (change_the_source, "was made from other files"),
        (forget_the_manifest, "its writing was cut short"),
        (claim_another_format, "is of format 99, this version reads 1"),
    ],
)
def test_a_wrong_or_torn_cache_is_refused_and_made_anew_and_that_is_said(
    copied: Path, harm: object, reason: str
) -> None:
    made = load_all(copied, 2)
    assert callable(harm)
    harm(copied)
    said: list[str] = []
    again = load_all(copied, 2, said)
    assert len(said) == 1 and reason in said[0] and said[0].endswith("it is made anew")
    assert not any(base.report.from_cache for base in again)
    require_equal(again, made)
    assert all(base.report.from_cache for base in load_all(copied, 2))


def test_a_cache_without_the_matrices_that_are_wanted_in_4_bits_is_refused(copied: Path) -> None:
    load(copied, linears="bf16", **SMALL)
    said: list[str] = []
    load(copied, notice=lambda what, why: said.append(why), **SMALL)
    assert len(said) == 1 and "it was made with other matrices in 4 bits" in said[0]
    # More than is wanted does no harm.
    assert load(copied, linears="bf16", **SMALL).report.from_cache


def test_no_cache_is_written_or_read_unasked(copied: Path) -> None:
    load(copied, **{**SMALL, "use_cache": False})
    assert not (copied / cache.FOLDER).exists()
