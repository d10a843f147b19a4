from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tasks.pretend import recipe
from tests.training.published import QWEN36_CONFIG as CONFIG
from training.contract.recipe import Assignment, Recipe
from training.phases.meter import Gpu, Meter, ask_gpu

H200 = {"tier": "h200", "max_dph_usd": 4.0}


def meter(home: Path, wanted: Recipe, config: object = CONFIG) -> Meter:
    (home / "model").mkdir(exist_ok=True)
    (home / "model" / "config.json").write_text(json.dumps(config))
    assignment = Assignment(
        recipe=wanted, run="r", flow_run_id="a" * 36, attempt=1, bucket="b", hard_end=4_000_000_000, dph_usd=1.0
    )
    return Meter.of(assignment, home)


def test_the_peak_that_was_measured_on_this_card_goes_before_its_data_sheet(tmp_path: Path) -> None:
    sheet = meter(tmp_path, recipe(box=H200))
    (tmp_path / "device.json").write_text('{"matmul_tflops": "790"}')
    measured = meter(tmp_path, recipe(box=H200))
    assert sheet.peak and (sheet.peak.tflops, sheet.peak.source) == (989.0, "data sheet")
    assert measured.peak and (measured.peak.tflops, measured.peak.source) == (790.0, "measured")
    # 19,556 tokens a second of the 35B were 29.2 % of that card with the base alone; adapters and attention are an eighth more.
    mfu = measured.mfu(32_768, 16, 32_768 / 19_556)
    assert mfu == pytest.approx(0.292 * 13.24 / 11.79, rel=0.01)


@pytest.mark.parametrize("facts", ["", "{", "[]", '{"matmul_tflops": "fast"}', '{"matmul_tflops": 0}'])
def test_facts_that_cannot_be_read_are_no_measurement(tmp_path: Path, facts: str) -> None:
    (tmp_path / "device.json").write_text(facts)
    made = meter(tmp_path, recipe(box=H200))
    assert made.peak and made.peak.source == "data sheet"


def test_what_is_not_known_has_no_utilisation(tmp_path: Path) -> None:
    known = meter(tmp_path, recipe(box=H200))
    assert known.mfu(None, 1, 1.0) is None and known.mfu(0, 0, 1.0) is None and known.mfu(10, 1, 0.0) is None
    assert meter(tmp_path, recipe(box=H200), {"model_type": "llama"}).mfu(100, 1, 1.0) is None


def answering(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_the_driver_tells_how_busy_the_card_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(tmp_path, monkeypatch, 'echo "97, 641.25, 104512"')
    assert ask_gpu() == Gpu(97.0, 641.25, 104_512.0)


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        ('echo "97, [N/A], 104512"', Gpu(97.0, None, 104_512.0)),
        ("exit 9", Gpu()),
        ("echo nonsense", Gpu()),
        ("echo", Gpu()),
    ],
)
def test_what_the_driver_does_not_tell_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, seen: Gpu
) -> None:
    answering(tmp_path, monkeypatch, script)
    assert ask_gpu() == seen


def test_a_box_without_a_driver_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_gpu() == Gpu()
