"""The import probe and stage B, run in this very environment as on a box."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from training.box import probe
from training.contract.checks import Check, CheckReport
from training.contract.recipe import Assignment, Recipe
from training.contract.shapes import QWEN36_35B, TINY, shape_of

ROOT = Path(__file__).parents[3]


def recipe(trainer: str) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "unit",
            "model": {"source": "bucket:m", "family": "qwen3_5_moe", "size_gb": 0.01},
            "phases": [{"kind": "sft", "data": "bucket:d", "steps": 1, "learning_rate": 0.001}],
            "box": {"tier": "rehearsal", "device": "cpu" if trainer == "trl" else "none"},
            "budget": {"max_usd": 1},
            "trainer": trainer,
        }
    )


def run(tmp_path: Path, trainer: str, pythonpath: Path | None = None, constraints: str = "") -> list[CheckReport]:
    assignment = Assignment(
        recipe=recipe(trainer), run="unit", flow_run_id="f", attempt=1, bucket="b", hard_end=int(time.time()) + 99
    )
    (tmp_path / "recipe.json").write_text(assignment.model_dump_json())
    pins = tmp_path / "constraints.txt"
    pins.write_text(constraints or (ROOT / "constraints.txt").read_text())
    words = ["--assignment", str(tmp_path / "recipe.json"), "--nonce", "n0nce", "--constraints", str(pins)]
    environ: dict[str, Any] = {**os.environ, **({"PYTHONPATH": str(pythonpath)} if pythonpath else {})}
    command = [sys.executable, "-m", "training.box.probe", *words]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return [CheckReport.model_validate_json(line) for line in done.stdout.splitlines()]


def distribution(folder: Path, name: str, version: str = "1.0") -> None:
    """A package as an installer leaves it."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise AssertionError('the probe must not import this')")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.train  # imports the whole training stack in a fresh process
def test_the_training_environment_passes_both_stages_on_the_cpu(tmp_path: Path) -> None:
    imports, device = run(tmp_path, "trl")
    assert imports.ok, [check.sentence for check in imports.failed]
    assert {"import torch", "version peft", "absent unsloth", "kernels"} <= {check.id for check in imports.checks}
    assert device.ok and [check.id for check in device.checks] == ["grouped_mm"]
    assert imports.nonce == device.nonce == "n0nce" and float(device.facts["seconds"]) < 60
    assert json.loads((tmp_path / "device.json").read_text()) == device.facts, (
        "the trainer reads the measured peak here"
    )


@pytest.mark.parametrize("name", ["unsloth", "axolotl", "liger_kernel"])
def test_a_package_that_patches_the_others_is_found_without_importing_it(tmp_path: Path, name: str) -> None:
    distribution(tmp_path / "extra", name)
    (imports,) = run(tmp_path, "counting", tmp_path / "extra")
    assert [check.id for check in imports.failed] == [f"absent {name}"]
    assert imports.failed[0].blame == "image"


def test_the_other_distribution_named_kernels_is_refused(tmp_path: Path) -> None:
    distribution(tmp_path / "extra", "kernels", "0.19.0")
    (imports,) = run(tmp_path, "counting", tmp_path / "extra")
    assert "kernels" in [check.id for check in imports.failed]


def test_an_import_that_breaks_is_the_boxs_fault_and_stops_before_the_device(tmp_path: Path) -> None:
    (tmp_path / "extra/boto3").mkdir(parents=True)
    (tmp_path / "extra/boto3/__init__.py").write_text("raise OSError('libssl.so.3: cannot open shared object file')")
    (imports,) = run(tmp_path, "counting", tmp_path / "extra")
    (failed,) = [check for check in imports.failed if check.id == "import boto3"]
    assert failed.blame == "host" and "libssl" in failed.actual


def test_another_version_than_the_pinned_one_is_ours_to_mend(tmp_path: Path) -> None:
    (imports,) = run(tmp_path, "counting", constraints="boto3==0.0.1\npydantic==2.0.0 ; python_version < '4'\n")
    assert {check.id for check in imports.failed} == {"version boto3", "version pydantic"}
    assert {check.blame for check in imports.failed} == {"us"}
    assert [check.id for check in imports.checks if check.verdict == "unknown"] == ["version huggingface_hub"]


def test_a_build_tag_is_not_another_version() -> None:
    assert next(probe._pinned("torch", "2.13.0+cpu", "2.13.0")).verdict == "pass"
    assert next(probe._pinned("torch", "2.12.0+cpu", "2.13.0")).verdict == "fail"


def test_a_device_that_computes_wrongly_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    right = torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda x, w, offs: right(x, w, offs=offs) * 1.01)
    report = probe.probe_device(recipe("trl"), "n")
    assert [check.id for check in report.failed] == ["grouped_mm"]
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", lambda x, w, offs: right(x, w, offs=offs) * float("nan"))
    assert not probe.probe_device(recipe("trl"), "n").ok


def test_a_device_that_throws_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available")

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", broken)
    report = probe.probe_device(recipe("trl"), "n")
    assert "no kernel image" in report.failed[0].actual


def test_a_check_that_does_not_end_is_unknown_and_so_are_those_after_it() -> None:
    limited, ended = probe.Limited(0.2), threading.Event()

    def stuck() -> Check:
        ended.wait()
        raise AssertionError

    good = Check(id="quick", verdict="pass", actual="1", required="1", purpose="p")
    try:
        assert limited.check("quick", lambda: good) is good
        left_behind, after = limited.check("slow", stuck), limited.check("late", lambda: good)
    finally:
        ended.set()
    assert (left_behind.verdict, after.verdict) == ("unknown", "unknown")
    assert "not done in the" in left_behind.actual and "slow had not ended" in after.actual
    assert limited.spent_s < 5


def test_nothing_is_begun_when_the_time_is_used_up() -> None:
    report = probe.probe_device(recipe("trl"), "n", seconds=0)
    assert report.ok and [check.verdict for check in report.checks] == ["unknown"]


def test_the_path_of_the_experts_fails_only_where_a_slow_one_is_not_allowed() -> None:
    fast = probe.experts_path_check("hopper", False, "right in all results, 1.64 ms a layer", allowed=False)
    slow = probe.experts_path_check("host loop", True, "portable: compilation failed", allowed=False)
    assert fast.verdict == "pass" and "1.64 ms" in fast.actual
    assert (slow.verdict, slow.blame) == ("fail", "user") and "allow: [slow_experts]" in slow.remedy
    assert probe.experts_path_check("host loop", True, "x", allowed=True).verdict == "pass"


@pytest.fixture
def our_rule() -> Callable[..., Any]:
    """As our layers call it; on a CPU that is transformers' own in plain torch, document by document."""
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

    from training import packing
    from training.lean import delta_net

    packing.install()
    return functools.partial(delta_net.delta_rule, modeling_qwen3_5_moe)


@pytest.mark.train
def test_the_gated_delta_rule_is_held_against_the_rule_as_written_in_output_and_all_gradients(our_rule: Any) -> None:
    good = probe.gated_delta_check(our_rule, TINY, "cpu")
    assert good.verdict == "pass" and good.actual.endswith("relative error")

    def scaled(**row: Any) -> Any:
        return our_rule(**row) * 1.05

    def deaf_to_decay(**row: Any) -> Any:
        row["decay"] = row["decay"].detach() + 0 * row["decay"]
        return our_rule(**row)

    def across_borders(**row: Any) -> Any:
        return our_rule(**{**row, "options": {}})

    def nothing(**row: Any) -> Any:
        return our_rule(**row) * float("nan")

    for broken, part in ((scaled, "output"), (deaf_to_decay, "decay"), (across_borders, "output"), (nothing, "query")):
        check = probe.gated_delta_check(broken, TINY, "cpu")
        assert (check.verdict, check.blame) == ("fail", "us") and "relative error, off in" in check.actual
        assert part in check.actual, check.actual


@pytest.mark.train
def test_a_kernel_that_stands_in_for_transformers_own_rule_is_not_held_against_itself(
    our_rule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' plain function is the library's kernel wherever the library is installed: on an H200 the two agreed because they were one."""
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

    right = modeling.torch_chunk_gated_delta_rule
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", lambda *a, **k: (right(*a, **k)[0] * 1.05, None))
    assert probe.gated_delta_check(our_rule, TINY, "cpu").verdict == "fail"


@pytest.mark.train
def test_the_library_that_refuses_hopper_with_an_old_triton_is_named_with_the_version_that_mends_it() -> None:
    def refuses(**row: Any) -> Any:
        raise RuntimeError(
            "Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results for gated chunk_bwd_dqkwg (see #640). Please upgrade"
        )

    check = probe.gated_delta_check(refuses, TINY, "cpu")
    assert check.verdict == "fail" and "3.7.1 or later" in check.remedy and "#640" in check.actual


def test_the_models_own_config_gives_the_shape_and_the_recipe_does_where_it_is_not_there_yet(tmp_path: Path) -> None:
    assert probe.box_shape(recipe("trl"), tmp_path) == shape_of(recipe("trl").model)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{")
    assert probe.box_shape(recipe("trl"), tmp_path) == shape_of(recipe("trl").model)


def test_the_speed_is_predicted_only_of_what_was_measured() -> None:
    facts = {"matmul_tflops": "790", "experts_layer_ms": "4.54", "experts_tokens": "16384"}
    for missing in facts:
        some = {name: value for name, value in facts.items() if name != missing}
        probe.predict(recipe("trl"), QWEN36_35B, some)
        assert "predicted_tokens_s" not in some
    probe.predict(recipe("trl"), QWEN36_35B, facts)
    assert 20_000 < float(facts["predicted_tokens_s"]) < 24_000


def test_the_experts_are_timed_on_as_many_tokens_as_the_plan_puts_through_at_once() -> None:
    """Few rows of a recipe take the experts longer a token, and a box would be judged by a pace that nobody trains at."""
    given = recipe("trl").model_dump(mode="json")
    given["model"]["size_gb"] = 72
    given["box"] = {"tier": "h200", "device": "cuda"}
    given["phases"][0] |= {"batch_size": 1, "accumulation": 16, "max_length": 512}
    assert probe.micro_batch_tokens(Recipe.model_validate(given), QWEN36_35B) == 16 * 512
    given["micro_batches"] = "recipe"
    assert probe.micro_batch_tokens(Recipe.model_validate(given), QWEN36_35B) == 512
    assert probe.micro_batch_tokens(recipe("trl"), TINY) == 2 * 2048, "on a CPU the recipe's"


@pytest.mark.train  # imports triton
def test_the_rules_kernels_are_not_tuned_at_length_for_a_check_and_are_afterwards() -> None:
    from triton.runtime.autotuner import Autotuner

    tuner = object.__new__(Autotuner)
    tuner.configs, tuner.early_config_prune, tuner.perf_model = list(range(30)), None, None
    tuner.cache = {}
    with probe.few_configurations():
        assert tuner.prune_configs({}) == [0, 1]
        tuner.cache["sizes"] = 1
    assert len(tuner.prune_configs({})) == 30
    assert not tuner.cache, "the better of two is not the best, and may not even fit"


@pytest.mark.train  # imports triton
def test_the_experts_are_tried_at_the_recipes_shapes_and_the_path_taken_is_told_with_its_reason() -> None:
    facts: dict[str, str] = {}
    check = probe._experts_path(recipe("trl"), TINY, facts, "cpu")
    assert facts == {"experts_path": "grouped_mm"}, "nothing is timed on a CPU"
    assert check.verdict == "fail" and check.actual.startswith("grouped_mm: portable: "), "our kernels want a card"
