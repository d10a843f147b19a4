"""Qwen3.6-35B's real widths and vocabulary, a few layers deep, random weights: attach, canary, guard and ten steps in each packed phase; fifty steps
with a checkpoint and a resume.

The figures are printed (`-s`) and recorded in training/RESULTS.md. `-k fifty` runs the last alone: three layers, 7 GB of weights, checkpoints of 1.7 GB.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.conftest import CardRun, card_recipe, place
from tests.gpu.timeline import timeline

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card"),
    pytest.mark.timeout(560),
]
LAYERS = ["linear_attention"] * 3 + ["full_attention"]
# Names of a group's tensors in four layers: 3 x 3 gated delta net, 4 attention, 3 x 4 shared expert, one a routed parameter and layer.
COUNTS = {
    "attention": 4,
    "linear_attention": 9,
    "shared_expert": 12,
    "routed_experts.gate_up_proj": 4,
    "routed_experts.down_proj": 4,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("wide"), LAYERS)


def make_world(directory: Path, layers: list[str]) -> Path:
    """The tiny world's tokenizer and data under a model of the real widths."""
    from transformers.models.qwen3_5_moe import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    from training import tiny

    began = time.monotonic()
    tiny.make(directory)
    small = json.loads((directory / "model" / "config.json").read_text())
    for path in (directory / "model").glob("*.safetensors"):
        path.unlink()
    ends = {name: small[name] for name in ("eos_token_id", "pad_token_id")}
    # Every other number is the class's default, which is the published model's.
    config = Qwen3_5MoeTextConfig(num_hidden_layers=len(layers), layer_types=layers, dtype=torch.bfloat16, **ends)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = Qwen3_5MoeForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = ends.values()
    print(f"model of {len(layers)} layers made in {time.monotonic() - began:.1f} s", flush=True)
    model.save_pretrained(directory / "model", max_shard_size="4GB")
    print(f"and written, {time.monotonic() - began:.1f} s", flush=True)
    del model
    torch.cuda.empty_cache()
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, world: Path) -> CardRun:
    shared: dict[str, Any] = {"batch_size": 2, "accumulation": 2, "warmup_steps": 1, "save_every_steps": 10}
    packed = shared | {"max_length": 2048, "learning_rate": 1e-4, "steps": 10}
    paired = shared | {"max_length": 512, "learning_rate": 1e-4, "steps": 4}
    phases = [
        packed | {"kind": "cpt", "data": "bucket:cpt.jsonl"},
        packed | {"kind": "sft", "data": "bucket:sft.jsonl"},
        paired | {"kind": "dpo", "data": "bucket:dpo.jsonl"},
        paired | {"kind": "kto", "data": "bucket:kto.jsonl"},
    ]
    recipe = card_recipe(
        adapters={"rank": 32, "alpha": 64},
        optimizer="adamw",
        phases=phases,
        evaluation={"data": None},
        name="full-width",
    )
    run = place(tmp_path_factory.mktemp("full"), recipe, world)
    run.run(timeout_s=520)
    return run


def test_all_groups_attach_in_full_number_and_are_alive(run: CardRun) -> None:
    for phase in ("cpt", "sft", "dpo", "kto"):
        stages = {event.stage: event.groups for event in run.of("guard") if event.phase == phase}
        assert stages["attach"] == COUNTS
        for stage in ("canary", "step1", "step2", "end"):
            assert set(stages[stage]) == set(COUNTS) and min(stages[stage].values()) > 0, (phase, stage)
        print(phase, {stage: groups for stage, groups in stages.items() if stage in ("canary", "packing", "step1")})


def test_packed_rows_equal_documents_alone_on_the_fast_rule(run: CardRun) -> None:
    measured = {e.phase: e.groups["logits"] for e in run.of("guard") if e.stage == "packing"}
    print("packing, relative difference of logits:", measured)
    assert set(measured) == {"cpt", "sft"} and max(measured.values()) < 2e-2
    assert [event.what for event in run.of("notice") if "slow" in event.what or "unpacked" in event.what] == []


def test_ten_steps_learn_and_are_timed(run: CardRun) -> None:
    for phase in ("cpt", "sft"):
        steps = [event for event in run.of("step") if event.phase == phase]
        seconds = sorted(event.seconds for event in steps[2:])
        print(phase, "loss", [round(event.loss, 3) for event in steps], "median s", seconds[len(seconds) // 2])
        print(phase, "last step", steps[-1].model_dump_json())
        assert len(steps) == 10 and steps[-1].loss < steps[0].loss
    print("dpo/kto first rewards", [e.metrics for e in run.of("step") if e.phase in ("dpo", "kto") and e.step == 1])


def test_fifty_packed_steps_go_on_after_a_lost_box(tmp_path: Path) -> None:
    phase = {
        "kind": "sft",
        "data": "bucket:sft.jsonl",
        "steps": 50,
        "learning_rate": 1e-4,
        "batch_size": 2,
        "accumulation": 4,
        "max_length": 2048,
        "warmup_steps": 1,
        "save_every_steps": 25,
    }
    changes = {"adapters": {"rank": 32, "alpha": 64}, "optimizer": "adamw", "evaluation": {"data": None}}
    world = make_world(tmp_path, LAYERS[1:])
    run = place(tmp_path, card_recipe(phases=[phase], name="fifty", **changes), world)
    runner = run.start()
    run.wait_for(lambda: reached(run, 25, 27) or runner.poll() is not None, timeout_s=200)
    run.kill(runner)
    assert reached(run, 25, 27), (run.folder / "log").read_text()[-6000:]
    before = {event.step: event.loss for event in run.of("step")}
    run.run(timeout_s=200)
    print(*timeline(run.events(), run.starts), sep="\n", flush=True)
    start = run.of("phase_start")[-1]
    after = {event.step: event.loss for event in run.of("step") if event.seq > start.seq}
    print(
        "resumed at", start.step, "losses before and after", {n: (before.get(n), after[n]) for n in sorted(after)[:5]}
    )
    assert start.step == 25 and sorted(after) == list(range(26, 51)) and after[50] < before[1]
    assert {26, 27} <= before.keys()
    for step in before.keys() & after.keys():
        assert after[step] == pytest.approx(before[step], rel=0.05), step
    spoken = {event.stage for event in run.of("guard")}
    assert {"attach", "canary", "packing", "step1", "step2", "checkpoint", "restore", "end"} <= spoken
    assert not [event.what for event in run.of("notice") if "slow" in event.what or "unpacked" in event.what]


def reached(run: CardRun, saved: int, step: int) -> bool:
    """Whether training is past a step, and the checkpoint before it sealed beside the run or in the bucket. To wait for the bucket in any case would
    leave the time for the next save."""
    sealed = run.folder / "work" / "staging" / f"sft_{saved:08d}"
    return (sealed.exists() or bool(run.of("checkpoint_durable"))) and run.of("step")[-1].step >= step
