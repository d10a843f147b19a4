"""The runner on a 4-bit base: the same phases, checks and checkpoints as on any other, in one process or several, and from the one to the other."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors import safe_open

from tests.training.conftest import Box, place_box, recipe_of
from training.contract.recipe import Recipe

pytestmark = [pytest.mark.train, pytest.mark.timeout(600)]
_STEPS = {"cpt": 2, "sft": 4, "dpo": 2}


def recipe(gpus: int = 1) -> Recipe:
    plain = recipe_of("tiny-moe")
    of = {phase["kind"]: phase for phase in plain.model_dump(mode="json")["phases"]}
    phases = [
        of[kind] | {"steps": steps, "save_every_steps": 2, "accumulation": 2, "batch_size": 1, "warmup_steps": 0}
        for kind, steps in _STEPS.items()
    ]
    return recipe_of(
        "tiny-moe",
        phases=phases,
        model=plain.model.model_dump(mode="json") | {"quantisation": "nf4"},
        box=plain.box.model_dump(mode="json") | {"gpus": gpus},
        evaluation={"data": None},
        # 8-bit moments are rounded in blocks, and parts have other blocks than the whole.
        optimizer="adamw",
    )


def losses(*boxes: Box) -> dict[tuple[str, int], float]:
    return {(step.phase, step.step): step.loss for box in boxes for step in box.of("step")}


def result(bucket: Path) -> dict[str, Any]:
    (path,) = bucket.glob("runs/*/adapter/adapter_model.safetensors")
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  a file is no dict


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Box, Path]:
    """A whole run in one process."""
    root = tmp_path_factory.mktemp("alone")
    box = place_box(root / "box", {}, recipe(), "one", tiny, bucket=f"folder:{root / 'bucket'}")
    assert box.run_here() == 0, box.of("abort")
    return box, root / "bucket"


def test_every_stage_of_the_checks_speaks_on_a_packed_base(alone: tuple[Box, Path]) -> None:
    box, _ = alone
    spoken = {(guard.phase, guard.stage) for guard in box.of("guard")}
    for phase in _STEPS:
        wanted = {"load", "attach", "static", "canary", "step1", "step2", "checkpoint", "end"}
        assert {(phase, stage) for stage in wanted} <= spoken
    assert ("dpo", "reference") in spoken
    said = next(notice.reason for notice in box.of("notice") if notice.what == "base in 4 bits")
    assert "routed_experts     nf4" in said and "experts: resident" in said


def test_a_lost_process_is_named_and_one_process_goes_on_where_two_had_been(
    alone: tuple[Box, Path], tiny: Path, tmp_path: Path
) -> None:
    one, kept = alone
    bucket = f"folder:{tmp_path / 'bucket'}"
    two = place_box(tmp_path / "two", {}, recipe(gpus=2), "two", tiny, bucket=bucket)
    launcher = two.start()
    try:
        two.wait_for(
            lambda: any((each.phase, each.step) == ("sft", 2) for each in two.of("checkpoint_durable")), timeout_s=240
        )
        _follower(launcher.pid).send_signal(signal.SIGKILL)
        assert launcher.wait(timeout=60) == 3
    finally:
        _kill(launcher.pid)
    (abort,) = two.of("abort")
    assert "process 1 of 2 ended by signal 9 (SIGKILL); SIGKILL mostly means" in abort.reason and abort.blame == "host"
    assert two.of("runner_end")[-1].complete is False

    third = place_box(tmp_path / "third", {}, recipe(), "two", tiny, bucket=bucket)
    assert third.run_here() == 0, third.of("abort")
    assert third.of("phase_start")[0].resumed_from == "runs/two/manifests/sft/00000002.json"
    # Equal but for the order of float32 sums, which training carries on: 6.1306524 against 6.1306529 after four steps.
    wanted, seen = losses(one), losses(two, third)
    assert seen.keys() == wanted.keys()
    assert all(seen[step] == pytest.approx(wanted[step], rel=1e-4) for step in wanted), (seen, wanted)
    stored, expected = result(tmp_path / "bucket"), result(kept)
    assert stored.keys() == expected.keys()
    for name, tensor in stored.items():
        assert float((tensor - expected[name]).norm()) <= 1e-3 * float(expected[name].norm()), name


def test_a_torn_model_file_is_the_users_to_mend_and_names_the_file(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    world = tmp_path / "world"
    shutil.copytree(tiny, world)
    (weights,) = (world / "model").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-200])
    box = place_box(tmp_path / "box", {}, recipe(), "torn", world, bucket=f"folder:{tmp_path / 'bucket'}")
    assert box.run_here() == 3
    (abort,) = box.of("abort")
    assert abort.blame == "user" and "model.safetensors" in abort.reason and "fetch it again" in abort.reason
    assert "Traceback" not in "".join(capfd.readouterr())


def test_too_little_host_memory_is_the_machines() -> None:
    from training.runner import _abort_of
    from training.sharded import host_memory

    with pytest.raises(host_memory.HostMemoryError) as caught:
        host_memory.require_memory(1 << 60, "the base in 4 bits")
    assert _abort_of(caught.value, None).blame == "host"


def test_told_to_stop_all_processes_save_together_and_end(tiny: Path, tmp_path: Path) -> None:
    box = place_box(tmp_path / "box", {}, recipe(gpus=2), "stop", tiny, bucket=f"folder:{tmp_path / 'bucket'}")
    launcher = box.start()
    try:
        box.wait_for(lambda: bool(box.of("step")), timeout_s=240)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(timeout=120) == 143
    finally:
        _kill(launcher.pid)
    assert not box.of("abort") and "told to stop" in box.of("runner_end")[-1].reason
    saved = [(each.phase, each.step) for each in box.of("checkpoint_durable")]
    last = box.of("step")[-1]
    assert (last.phase, last.step) in saved


def _follower(launcher: int) -> psutil.Process:
    found = [each for each in psutil.Process(launcher).children() if each.environ().get("RANK") == "1"]
    assert len(found) == 1
    return found[0]


def _kill(pid: int) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.05)
