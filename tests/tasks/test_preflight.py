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
from training.contract.checks import Check, CheckReport
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


def test_what_a_box_has_no_time_to_look_at_is_unknown_and_fails_nothing(remote: Remote, box: SshBox) -> None:
    give_facts(box)
    report = preflight.check_box(remote, counting_recipe(), within_s=2.0)
    assert report.ok
    disks = {check.id: check.verdict for check in report.checks if check.id.startswith("disk_w")}
    assert disks.keys() == {"disk_write"}


def test_links_that_do_not_pass_their_few_megabytes_in_time_are_no_links(
    remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*_: object, **__: object) -> None:
        raise InstallFailed("links: not done after 60 s, budget 60 s; its last line: no output")

    monkeypatch.setattr(preflight, "follow", late)
    with pytest.raises(PreflightFailed, match="links: not done after 60 s") as caught:
        preflight.check_links(remote, counting_recipe())
    assert (caught.value.blame, caught.value.fault) == ("host", "uplink_mbps")


def test_links_that_there_is_no_time_for_are_unknown_and_nobody_is_asked(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    report = preflight.check_links(remote, counting_recipe(), within_s=30.0)
    assert [check.verdict for check in report.checks] == ["unknown", "unknown"] and report.ok
    assert "unknown: uplink_mbps: seen no time left to look" in caplog.text


def report_of(*blames: str) -> CheckReport:
    checks = tuple(
        Check(id=f"c{n}", verdict="fail", actual="a", required="r", purpose="p", blame=blame)  # type: ignore[arg-type]
        for n, blame in enumerate(blames)
    )
    return CheckReport(stage="a", nonce="n", checks=checks)


@pytest.mark.parametrize(
    ("blames", "blame", "fault"),
    [
        (("image",), "image", "c0"),
        (("image", "host"), "host", "c1"),
        (("image", "user"), "other", "c1"),
        (("us",), "other", "c0"),
        (("host", "host"), "host", "c0"),
    ],
)
def test_a_host_is_blamed_before_an_image_and_what_we_must_mend_before_that(
    blames: tuple[str, ...], blame: str, fault: str
) -> None:
    with pytest.raises(PreflightFailed) as caught:
        preflight._judged(report_of(*blames), PreflightFailed)
    assert (caught.value.blame, caught.value.fault) == (blame, fault)


def test_the_step_that_the_card_can_do_is_held_against_the_plans() -> None:
    recipe = counting_recipe()
    (phase,) = recipe.phases
    tokens = phase.batch_size * phase.accumulation * phase.max_length
    quick = preflight.step_check(recipe, str(tokens), {"sft": 1.0})
    assert (quick.verdict, quick.actual) == ("pass", "1.00 at best in phase sft")
    slow = preflight.step_check(recipe, str(tokens / 3), {"sft": 1.0})
    assert (slow.verdict, slow.blame) == ("fail", "host") and "3.00 at best" in slow.sentence
    several = recipe.model_copy(update={"box": recipe.box.model_copy(update={"gpus": 4})})
    assert preflight.step_check(several, str(tokens / 4), {"sft": 1.0}).actual == "1.00 at best in phase sft"
    assert preflight.step_check(recipe, None, {"sft": 1.0}).verdict == "unknown"
    assert preflight.step_check(recipe, "1", {}).verdict == "unknown"


def test_a_card_is_asked_for_a_fast_disk_and_a_rehearsal_for_a_small_sample() -> None:
    recipe = counting_recipe()
    small = preflight.wanted_of(recipe.box, None, now=0, round_trip_s=0)
    large = preflight.wanted_of(recipe.box.model_copy(update={"device": "cuda"}), None, now=0, round_trip_s=0)
    assert (small["disk_probe_mb"], large["disk_probe_mb"], large["min_disk_mb_s"]) == (16, 2000, 300.0)


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
