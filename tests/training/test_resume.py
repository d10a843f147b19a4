"""A lost box costs the steps since its last checkpoint and nothing else: the run ends with the very bytes of an uninterrupted one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.training.conftest import Box, Cascade, place_box, seven_phases
from training.box.store import Store
from training.contract import layout
from training.contract.manifest import Manifest
from training.contract.recipe import Recipe

pytestmark = [pytest.mark.train, pytest.mark.timeout(600)]
LOST_IN = ("cpt", "sft-again", "dpo", "kto", "grpo")
DRIVER = "import sys\nfrom training.runner import main\nprint([main(['--assignment', path]) for path in sys.argv[1:]])"


@dataclass
class Resumed:
    """A box that went on from the middle of one phase to that phase's end."""

    box: Box
    phase: str
    middle: int
    store: Store

    @property
    def manifest(self) -> Manifest:
        return last(self.store, self.phase)


def last(store: Store, phase: str) -> Manifest:
    key = layout.manifest("cascade", phase, seven_phases().phase(phase).steps)
    return Manifest.model_validate_json(store.get_bytes(key) or b"")


def upto(phase: str) -> Recipe:
    """The run as far as that phase. What decides a phase's weights is all up to it, so its checkpoints fit."""
    recipe = seven_phases()
    phases = recipe.phases[: recipe.phase_names.index(phase) + 1]
    return Recipe.model_validate(recipe.model_dump(mode="json") | {"phases": phases, "evaluation": {"data": None}})


def lost_in(cascade: Cascade, root: Path, phase: str, tiny: Path) -> Resumed:
    """The bucket as the lost box left it: the phase's middle checkpoint is the last manifest, and of the end's upload there are blobs, one
    of them half. Hard links: a folder's objects are replaced, never written into."""
    shutil.copytree(cascade.bucket, root / "bucket", copy_function=os.link)
    store = Store.from_environment(f"folder:{root / 'bucket'}")
    names = seven_phases().phase_names
    middle = seven_phases().phase(phase).save_every_steps
    for name in names[names.index(phase) :]:
        for info in store.list(layout.phase_manifests("cascade", name)):
            if name != phase or not info.key.endswith(f"{middle:08d}.json"):
                store.delete(info.key)
    blob = layout.blob("cascade", last(cascade.store, phase).files["optimizer.pt"].sha256)
    half = (store.get_bytes(blob) or b"")[:1000]
    store.delete(blob)
    (root / "bucket" / Path(blob).parent / ".unfinished-killed").write_bytes(half)
    if phase == "kto":  # its reference is computed again, DPO's is fetched
        for info in store.list(f"{layout.run('cascade')}/references/"):
            store.delete(info.key)
    box = place_box(root / "box", {}, upto(phase), "cascade", tiny, bucket=f"folder:{root / 'bucket'}")
    for path in (cascade.box.root / "data").glob("*-again.jsonl"):
        if (box.root / "data" / path.name).exists():
            shutil.copy(path, box.root / "data")
    return Resumed(box, phase, middle, store)


@pytest.fixture(scope="module")
def resumed(cascade: Cascade, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Resumed]:
    """One new process that goes on in five runs one after another, each lost in another phase."""
    boxes = {phase: lost_in(cascade, tmp_path_factory.mktemp(phase), phase, tiny) for phase in LOST_IN}
    command = [sys.executable, "-c", DRIVER, *(str(each.box.assignment) for each in boxes.values())]
    driver = subprocess.run(command, capture_output=True, text=True, timeout=400, env=cascade.box.environment)
    aborts = [event for each in boxes.values() for event in each.box.of("abort")]
    assert driver.stdout.splitlines()[-1] == str([0] * len(boxes)), (aborts, driver.stderr[-3000:])
    return boxes


@pytest.mark.parametrize("phase", LOST_IN)
def test_a_resumed_phase_ends_with_the_very_bytes_of_the_uninterrupted_one(
    cascade: Cascade, resumed: dict[str, Resumed], phase: str
) -> None:
    here, there = resumed[phase], last(cascade.store, phase)
    (start,) = here.box.of("phase_start")
    assert (start.phase, start.step) == (phase, here.middle), "no step before the checkpoint is trained again"
    for name in ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert here.manifest.files[name] == there.files[name], name
    assert {name: group.digest for name, group in here.manifest.groups.items()} == {
        name: group.digest for name, group in there.groups.items()
    }


@pytest.mark.parametrize("phase", LOST_IN)
def test_its_losses_and_learning_rates_go_on_as_if_nothing_had_been(
    cascade: Cascade, resumed: dict[str, Resumed], phase: str
) -> None:
    def steps(box: Box, after: int) -> list[Any]:
        return [
            (event.step, event.loss, event.learning_rate, event.grad_norm)
            for event in box.of("step")
            if event.phase == phase and event.step > after
        ]

    here = resumed[phase]
    wanted = steps(cascade.box, here.middle)
    assert wanted and steps(here.box, 0) == wanted
    assert (here.manifest.loss_first, here.manifest.loss_last) == (
        last(cascade.store, phase).loss_first,
        last(cascade.store, phase).loss_last,
    )


def test_the_reference_is_the_phase_start_policy_and_never_the_checkpoint(resumed: dict[str, Resumed]) -> None:
    """DPO's columns come from the bucket, KTO's are computed again, GRPO's copy is made again: all from the adapter that the phase began with,
    although the checkpoint's is at hand."""
    said = {
        phase: [event.what for event in each.box.of("notice") if "reference" in event.what]
        for phase, each in resumed.items()
    }
    assert said == {
        "cpt": [],
        "sft-again": [],
        "dpo": ["reference fetched"],
        "kto": ["reference computed"],
        "grpo": [],
    }


def test_a_reference_copy_that_is_not_the_phase_start_policy_is_refused(tiny: Path) -> None:
    """As it would be if a new box built the model from the checkpoint, or trained the copy."""
    from training.errors import LivenessError
    from training.model import attach, load_base, lora_tensors
    from training.references import require_copy

    recipe = seven_phases()
    model = attach(load_base(tiny / "model", recipe), recipe, None)
    require_copy(model, wanted=False)
    with pytest.raises(LivenessError, match="want default and ref"):
        require_copy(model, wanted=True)
    model.add_adapter("ref", model.peft_config["default"])
    copies = [
        (tensor, copy)
        for which in ("lora_A", "lora_B")
        for (_, _, tensor), (_, _, copy) in zip(
            lora_tensors(model, which), lora_tensors(model, which, "ref"), strict=True
        )
    ]
    for tensor, copy in copies:
        copy.data.copy_(tensor.data)
        copy.requires_grad_(False)
    require_copy(model, wanted=True)
    copies[0][1].requires_grad_(True)
    with pytest.raises(LivenessError, match="trains") as caught:
        require_copy(model, wanted=True)
    assert caught.value.stage == "reference" and caught.value.tensor
    copies[0][1].requires_grad_(False)
    copies[-1][0].data[0, 0] += 1
    with pytest.raises(LivenessError, match="differs from the phase-start adapter"):
        require_copy(model, wanted=True)
    with pytest.raises(LivenessError, match="want default alone"):
        require_copy(model, wanted=False)
