from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.training.sharded import synthetic
from training.contract.quantised import hardware_of, plan_quantised
from training.contract.recipe import parse_recipe
from training.contract.shapes import QWEN3_235B, QWEN36_35B, ModelShape
from training.sharded.__main__ import main
from training.sharded.inventory import quantisable
from training.sharded.plan import plan
from training.sharded.synthetic import inventory_of

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "training" / "recipes"
RECIPE = RECIPES / "qwen3-235b-a22b-qlora.yaml"
SHIPPED = {QWEN3_235B.family: "qwen3-235b-a22b-qlora-1gpu.yaml", QWEN36_35B.family: "qwen3.6-35b-a3b-nf4.yaml"}


@pytest.mark.parametrize("shape", [QWEN3_235B, QWEN36_35B], ids=lambda shape: shape.family)
def test_the_plan_from_config_json_alone_is_the_one_from_headers(shape: ModelShape) -> None:
    wanted = parse_recipe(yaml.safe_load((RECIPES / SHIPPED[shape.family]).read_text()))
    on = hardware_of("h100", 1, 160, dph_usd=2.0)
    told, counted = plan(inventory_of(shape), wanted, on), plan_quantised(wanted, shape, on)
    assert told.chosen and counted.chosen and told.options == counted.options
    assert counted.train_hours == told.train_hours
    assert counted.load_hours == pytest.approx(told.load_hours, rel=0.05) and counted.usd == pytest.approx(
        told.usd, rel=0.01
    )


@pytest.mark.parametrize("shape", [QWEN3_235B, QWEN36_35B], ids=lambda shape: shape.family)
def test_what_the_shape_counts_as_linear_is_what_the_loader_keeps_in_4_bits(shape: ModelShape) -> None:
    held = inventory_of(shape).matrices
    kept = sum(at.numbers for name, (group, at) in held.items() if quantisable(shape, group, name))
    rest = sum(at.numbers for name, (group, at) in held.items() if not quantisable(shape, group, name))
    assert shape.linear_parameters == kept
    assert shape.parameters - shape.expert_parameters - kept == rest


def test_the_command_prints_the_table_and_answers_by_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    synthetic.write_235b(tmp_path)
    command = ["plan", "--model", str(tmp_path), "--recipe", str(RECIPE)]
    assert main(command) == 0, "the recipe's own box"
    out = capsys.readouterr().out
    assert "4 x 84.9 GB cards (82.4 for use), 64.0 GB host memory, $11.00/h" in out
    assert "chosen: " in out and "h to load, $" in out and "fits, and cannot be chosen yet" in out
    assert main([*command, "--gpus", "1", "--gpu-gb", "24", "--host-gb", "256", "--dph", "9"]) == 1
    assert "refused: host: " in capsys.readouterr().out
    assert main([*command, "--tier", "h200", "--gpu-gb", "80"]) == 0
    assert "not measured" in capsys.readouterr().out, "an H200 has no 80 GB"
    (tmp_path / "model-00007-of-00118.safetensors").unlink()
    assert main(command) == 2
    assert "error: model.safetensors.index.json: names model-00007-of-00118.safetensors" in capsys.readouterr().err


def test_planning_loads_no_torch() -> None:
    code = "import sys, training.sharded.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
