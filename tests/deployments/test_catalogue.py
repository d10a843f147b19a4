from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deployments.catalogue import CATALOGUE, Deployment, served
from deployments.pools import prefect_yaml
from tasks.recipes import load_recipe

ROOT = Path(__file__).parents[2]
by_name = pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.full_name)


@by_name
def test_every_deployment_names_a_flow_that_exists_under_that_name(entry: Deployment) -> None:
    assert entry.load_flow().name == entry.flow
    assert (ROOT / entry.file_entrypoint.split(":")[0]).is_file()


@by_name
def test_every_deployments_defaults_are_parameters_of_its_flow(entry: Deployment) -> None:
    entry.load_flow().validate_parameters(dict(entry.parameters))
    assert set(entry.parameters) <= set(inspect.signature(entry.load_flow().fn).parameters)


@by_name
def test_every_recipe_named_by_a_deployment_can_be_read(entry: Deployment) -> None:
    if "recipe" in entry.parameters:
        load_recipe(entry.parameters["recipe"])


@by_name
def test_no_deployment_has_a_secret_among_its_parameters(entry: Deployment) -> None:
    names = inspect.signature(entry.load_flow().fn).parameters
    assert not [name for name in names if any(word in name for word in ("key", "token", "secret", "password"))]


def test_the_deployments_people_trigger_are_there() -> None:
    assert {"finetune/full", "finetune/smoke", "finetune/rehearsal", "plan/offers", "reaper/cron", "audit/daily"} <= {
        entry.full_name for entry in CATALOGUE
    }


def test_the_reaper_is_served_by_a_process_of_its_own() -> None:
    assert [entry.full_name for entry in served("reaper", rehearsal=True)] == ["reaper/cron", "audit/daily"]
    assert "reaper/cron" not in {entry.full_name for entry in served("runs", rehearsal=True)}


def test_the_audit_can_be_run_where_the_reapers_process_is_dead() -> None:
    assert "audit/now" in {entry.full_name for entry in served("runs", rehearsal=False)}


def test_a_rehearsal_is_not_served_with_a_real_account() -> None:
    assert "finetune/rehearsal" not in {entry.full_name for entry in served("runs", rehearsal=False)}


def test_the_hooks_are_there_for_a_process_that_knows_only_the_entrypoint() -> None:
    """As a worker's hook runner loads them after the flow's own process is dead: from the file, in a fresh process."""
    program = (
        "from prefect.flows import load_flow_from_entrypoint\n"
        "flow = load_flow_from_entrypoint('flows/finetune.py:finetune')\n"
        "hooks = flow.on_failure_hooks + flow.on_cancellation_hooks + flow.on_crashed_hooks\n"
        "print([f'{hook.__module__}:{hook.__name__}' for hook in hooks])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(["tasks.guard:destroy_hook"] * 3), done.stderr


def test_every_flow_that_rents_has_all_three_hooks() -> None:
    flow = next(entry for entry in CATALOGUE if entry.full_name == "finetune/full").load_flow()
    assert flow.on_failure_hooks and flow.on_cancellation_hooks and flow.on_crashed_hooks


def test_prefect_yaml_is_what_the_catalogue_writes() -> None:
    text = (ROOT / "deployments" / "prefect.yaml").read_text()
    assert text == prefect_yaml(), "run `python -m deployments yaml`"
    entries = yaml.safe_load(text)["deployments"]
    assert {entry["name"] for entry in entries} == {"full", "smoke", "offers", "cron", "daily", "now"}


def test_pools_give_a_flow_the_sigterm_behaviour_that_lets_it_destroy_its_box() -> None:
    """Measured: without it `prefect flow-run execute` dies at once on SIGTERM and the box bills for ever."""
    for entry in yaml.safe_load(prefect_yaml())["deployments"]:
        assert entry["work_pool"]["job_variables"]["env"]["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "reschedule"
