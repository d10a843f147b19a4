# ruff: noqa: F811 - the fixtures of the box are imported by name, and asked for by it
"""The three preflights against a real box: what passes, what fails it, and what is no result at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks import install, preflight
from tasks.errors import BoxLost, InstallFailed, PreflightFailed
from tasks.remote.ssh import Remote
from tests.tasks.remote.conftest import (  # noqa: F401
    SshBox,
    box,
    counting_recipe,
    key_path,
    link,
    login,
    remote,
)
from tests.training.box.netfault import Link
from training.contract import layout
from training.contract.checks import CheckReport
from training.contract.recipe import Assignment, Recipe

FACTS = {"gpus": [{"name": "Rehearsal", "memory_mb": 8000}], "driver_version": "580.95.05", "cuda_driver": 13000}


def give_facts(box: SshBox, **changes: object) -> None:
    path = box.root / "facts.json"
    path.write_text(json.dumps({**FACTS, **changes}))
    box.environ["LIVERY_BOX_FACTS"] = str(path)
    box.reboot()


def assign(remote: Remote, recipe: Recipe) -> None:
    assignment = Assignment(recipe=recipe, run="unit", flow_run_id="f", attempt=1, bucket="b", hard_end=9_999_999_999)
    remote.put(assignment.model_dump_json().encode(), layout.BOX_ASSIGNMENT, timeout_s=10)
    remote.put(b"", layout.BOX_PRIVATE_ENV, mode=0o600, timeout_s=10)


def test_a_good_box_passes_stage_a(remote: Remote, box: SshBox) -> None:
    give_facts(box)
    report = preflight.check_box(remote, counting_recipe())
    assert report.ok and report.facts["driver_version"] == "580.95.05"


def test_an_old_driver_fails_the_host_with_the_numbers(remote: Remote, box: SshBox) -> None:
    give_facts(box, driver_version="550.54.15")
    with pytest.raises(PreflightFailed, match=r"driver: seen 550\.54\.15, want ≥ 580\.65\.06") as caught:
        preflight.check_box(remote, counting_recipe())
    assert caught.value.blame == "host"


def test_all_shortcomings_are_named_at_once(remote: Remote, box: SshBox) -> None:
    give_facts(box, disk_free_gb=0.001, pids_max=4)
    with pytest.raises(PreflightFailed, match=r"disk_free: .*; pids_max: "):
        preflight.check_box(remote, counting_recipe())


def test_a_box_without_our_zip_prints_no_report_and_that_is_a_failure(remote: Remote, box: SshBox) -> None:
    (box.home / layout.BOX_ZIP).unlink()
    with pytest.raises(PreflightFailed, match="printed no report"):
        preflight.check_box(remote, counting_recipe())


def test_a_box_that_does_not_answer_is_lost_not_unfit(
    remote: Remote, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_STAGE_A_S", 1.5)
    link.refuse()
    link.reset()
    with pytest.raises(BoxLost):
        preflight.check_box(remote, counting_recipe())


def test_an_echo_of_the_command_or_an_old_report_is_no_result() -> None:
    report = CheckReport(stage="a", nonce="mine", checks=())
    log = f"+ python -m training.box.probe --nonce mine\n{{garbage mine\n{report.model_dump_json()}\n"
    assert preflight.find_reports(log, "mine") == [report]
    assert preflight.find_reports(log, "other") == []
    assert preflight.find_reports("--nonce mine", "mine") == []


@pytest.mark.parametrize(("floor_mbps", "mib"), [(20, 8), (1000, 32)])
def test_the_links_are_measured_with_what_their_floor_needs(floor_mbps: float, mib: int) -> None:
    box = counting_recipe().box.model_copy(update={"min_inet_up_mbps": floor_mbps, "min_inet_down_mbps": floor_mbps})
    assert preflight.probe_bytes(box) == mib << 20


def test_the_import_probe_believes_only_what_imports_there(remote: Remote, box: SshBox, tmp_path: Path) -> None:
    recipe = counting_recipe()
    assign(remote, recipe)
    install.install_transfer(remote, recipe, tmp_path)
    install.install_training(remote, recipe, tmp_path)
    imports, device = preflight.check_device(remote, recipe)
    assert imports.ok and imports.facts["boto3"] and device.checks == ()
    broken = box.root / "broken"
    (broken / "unsloth").mkdir(parents=True)
    (broken / "unsloth/__init__.py").write_text("")
    (broken / "boto3.py").write_text("raise ImportError('broken on this box')")
    box.environ["PYTHONPATH"] = str(broken)
    box.reboot()
    with pytest.raises(InstallFailed, match=r"import boto3: seen ImportError: broken.*absent unsloth: seen installed"):
        preflight.check_device(remote, recipe)


def test_a_probe_that_prints_nothing_is_a_failed_install(remote: Remote, box: SshBox) -> None:
    assign(remote, counting_recipe())
    with pytest.raises(InstallFailed, match="no report with our nonce"):
        preflight.check_device(remote, counting_recipe())
