"""Stage B of preflight on a real card. Run it on a machine with one: `python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

import pytest

from training.box.probe import probe_device
from training.contract.recipe import Recipe, parse_recipe

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")]


def recipe() -> Recipe:
    return parse_recipe(
        {
            "name": "probe",
            "model": {"source": "bucket:models/x", "family": "qwen3_5_moe", "size_gb": 1},
            "phases": [{"kind": "sft", "data": "bucket:sft.jsonl", "steps": 1, "learning_rate": 1e-4}],
            "box": {"tier": "h200"},
            "budget": {"max_usd": 1},
        }
    )


def test_every_check_of_stage_b_passes_and_its_facts_are_measured() -> None:
    from training.lean.tuning import use_shipped

    report = probe_device(recipe(), "n")
    print(report.model_dump_json(indent=1))
    assert report.ok, [check.sentence for check in report.failed]
    assert {check.id for check in report.checks} >= {
        "matmul",
        "grouped_mm",
        "experts_path",
        "gated_delta_rule",
        "gpu_free",
    }
    assert not [check.sentence for check in report.checks if check.verdict == "unknown"], "all of it fits into the time"
    if use_shipped():  # one variant of each kernel is compiled: seconds, where tuning takes minutes
        assert float(report.facts["gated_delta_rule_seconds"]) < 40
    assert float(report.facts["matmul_tflops"]) > 10 and float(report.facts["predicted_tokens_s"]) > 100


def test_memory_that_somebody_else_holds_is_seen() -> None:
    held = torch.empty(int(0.2 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device="cuda")
    report = probe_device(recipe(), "n")
    assert "gpu_free" in [check.id for check in report.failed]
    del held
