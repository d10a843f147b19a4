"""Shipped configurations reach the library's kernels, and the environment's word goes first. The library itself needs a card; its cache module is stood in."""

from __future__ import annotations

import enum
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from training import packing
from training.lean import tuning

ROOT = Path(__file__).parents[3]
LOADED = {"kwargs": {"BV": 64}, "num_warps": 4, "num_stages": 4, "num_ctas": 1}


class Mode(enum.Enum):
    DISABLED = "disabled"
    FULL = "full"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("fla.ops.utils.cache")
    module.get_gpu_info = lambda: "NVIDIA_H200"  # type: ignore[attr-defined]
    module.FlaCacheMode, module.FLA_CACHE_MODE = Mode, Mode.DISABLED  # type: ignore[attr-defined]
    module.load_cached_config = lambda name, key=None: dict(LOADED)  # type: ignore[attr-defined]
    utils = types.ModuleType("fla.ops.utils")
    utils.cache = module  # type: ignore[attr-defined]
    for name, each in {"fla": None, "fla.ops": None, "fla.ops.utils": utils, "fla.ops.utils.cache": module}.items():
        monkeypatch.setitem(sys.modules, name, each or types.ModuleType(name))
    for name in ("FLA_CONFIG_DIR", "FLA_CACHE_MODE"):
        monkeypatch.delenv(name, raising=False)
    return module


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "NVIDIA_H200"
    folder.mkdir()
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path)
    # What the call sets goes with the test.
    monkeypatch.setenv("FLA_CONFIG_DIR", "")
    monkeypatch.delenv("FLA_CONFIG_DIR")
    return folder


def test_what_is_shipped_for_a_card_is_read_on_it(cache: types.ModuleType, shipped: Path) -> None:
    assert tuning.use_shipped() == str(shipped)
    assert os.environ["FLA_CONFIG_DIR"] == str(shipped) and cache.FLA_CACHE_MODE is Mode.FULL


@pytest.mark.parametrize("name", ["FLA_CONFIG_DIR", "FLA_CACHE_MODE"])
def test_the_environments_word_goes_first(
    cache: types.ModuleType, shipped: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "theirs")
    assert tuning.use_shipped() is None
    assert cache.FLA_CACHE_MODE is Mode.DISABLED and os.environ.get(name) == "theirs"


def test_asking_twice_says_and_does_the_same(cache: types.ModuleType, shipped: Path) -> None:
    """Also in a process that was started with the environment of one that has asked."""
    tuning.use_shipped()
    load = cache.load_cached_config
    assert tuning.use_shipped() == str(shipped) and cache.load_cached_config is load
    cache.FLA_CACHE_MODE = Mode.DISABLED  # type: ignore[attr-defined]
    assert tuning.use_shipped() == str(shipped) and cache.FLA_CACHE_MODE is Mode.FULL


@pytest.mark.parametrize(
    ("dtypes", "stages"), [(["bfloat16", "float32"], 4), (["float16", "int32"], 4), (["float32", "int32"], 2)]
)
def test_rows_of_float32_get_half_the_stages_of_those_that_were_tuned(
    cache: types.ModuleType, shipped: Path, dtypes: list[str], stages: int
) -> None:
    tuning.use_shipped()
    key = types.SimpleNamespace(autotune_key=(16, 32, 128, False, *(f"torch.{dtype}" for dtype in dtypes)))
    assert cache.load_cached_config("kernel", key) == {**LOADED, "num_stages": stages}


def test_a_kernel_for_which_nothing_is_shipped_is_left_to_the_tuner(cache: types.ModuleType, shipped: Path) -> None:
    cache.load_cached_config = lambda name, key=None: None  # type: ignore[attr-defined]
    tuning.use_shipped()
    key = types.SimpleNamespace(autotune_key=(16, "torch.float32"))
    assert cache.load_cached_config("kernel", key) is None


def test_a_card_for_which_nothing_is_shipped_tunes_as_ever(cache: types.ModuleType, shipped: Path) -> None:
    shipped.rmdir()
    assert tuning.use_shipped() is None and cache.FLA_CACHE_MODE is Mode.DISABLED


def test_every_shipped_configuration_is_of_the_librarys_form() -> None:
    for path in tuning.SHIPPED.glob("*/*.json"):
        told = json.loads(path.read_text())
        assert told["kernel_name"] == path.stem
        assert {"kwargs", "num_warps", "num_stages", "num_ctas"} <= told["default_config"].keys()


def test_without_a_card_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if tuning.torch.cuda.is_available():
        pytest.skip("there is a card")
    assert tuning.main(["--out", str(tmp_path)]) == 2
    assert "no card" in capsys.readouterr().err


def test_teaching_packed_rows_reads_them_before_any_layer_runs(
    cache: types.ModuleType, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own layers call the same kernels: without this the first of them timed variants for three minutes on an H200."""
    monkeypatch.setattr(packing.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(packing, "has_fast_rule", lambda: True)
    packing.install()
    assert os.environ["FLA_CONFIG_DIR"] == str(shipped) and cache.FLA_CACHE_MODE is Mode.FULL


def test_what_is_shipped_is_in_the_librarys_format() -> None:
    """`fla/ops/utils/cache.py` of 0.6.0."""
    found = sorted(tuning.SHIPPED.glob("*/*.json"))
    assert {path.parent.name for path in found} == {"NVIDIA_H200"} and len(found) == 13
    for path in found:
        config = json.loads(path.read_text())
        assert config["kernel_name"] == path.stem and config["triton_version"] == "3.7.1"
        assert config["default_config"].keys() == {"kwargs", "num_warps", "num_stages", "num_ctas"}


@pytest.mark.skipif(importlib.util.find_spec("fla") is None, reason="flash-linear-attention is not installed")
def test_every_kernel_fits_the_cards_shared_memory_as_shipped_packed_and_not_in_bfloat16_and_in_float32() -> None:
    """Compiled for an H200, whose 232,448 bytes a block they once passed in float32: no card is needed."""
    script = Path(__file__).parent / "compiled_rule.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    for name in ("FLA_CONFIG_DIR", "FLA_CACHE_MODE", "TRITON_INTERPRET"):
        environment.pop(name, None)
    command = [sys.executable, str(script), "packed", "given-float32"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    shipped = {path.stem for path in tuning.SHIPPED.glob("NVIDIA_H200/*.json")}
    assert {row["kernel"] for row in found} >= shipped, "all that is shipped is for kernels of the rule"
    assert {row["form"] for row in found} == {"packed", "given-float32"}
    too_big = [row for row in found if row["shared"] > 232_448]
    assert not too_big, too_big
