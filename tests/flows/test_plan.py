from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.plan import main, plan
from tasks.errors import NoOffers
from tests.tasks.pretend import Pretend, recipe, rehearsal_recipe
from training.box.store import Store
from training.contract.recipe import Recipe


def _file(wanted: Recipe, folder: Path) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(json.loads(wanted.model_dump_json(exclude_none=True))))
    return str(path)


def test_the_flow_returns_the_plan_and_shows_the_offers(
    environment: dict[str, str], pretend: Pretend, store: Store, tmp_path: Path
) -> None:
    made = plan(_file(rehearsal_recipe(), tmp_path))
    assert [ranked.offer.machine_id for ranked in made.offers] == [36001, 36002, 36003, 36004]
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["offers"])))
    rows: list[dict[str, Any]] = json.loads(str(max(found, key=lambda artifact: artifact.created).data))
    assert rows[0]["offer"] == 24002001
    assert {method for method, _ in pretend.calls} == {"POST"}, "spends nothing"
    assert store.list("") == [], "writes nothing"


def test_no_offer_fails_the_flow(environment: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(NoOffers):
        plan(_file(rehearsal_recipe(), tmp_path), max_dph_usd=0.01)


def test_the_terminal_gets_a_table_or_json(
    environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(recipe(step_seconds=30.0), tmp_path)
    assert main([path]) == 0
    assert "24001001" in capsys.readouterr().out
    assert main([path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "tools-35b"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--max-dph", "0.1"], 3, "price: 13 (raise box.max_dph_usd"),
        (["--tier", "h100"], 2, "box.tier"),
    ],
)
def test_exit_codes_and_one_clear_error(
    environment: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    assert main([_file(recipe(step_seconds=30.0), tmp_path), *arguments]) == code
    assert said in capsys.readouterr().err


def test_a_bucket_that_does_not_answer_is_said_before_the_market_is_asked(
    environment: dict[str, str],
    pretend: Pretend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LIVERY_S3_ENDPOINT_URL", "http://127.0.0.1:9")
    assert main([_file(rehearsal_recipe(), tmp_path)]) == 2
    assert "bucket" in capsys.readouterr().err and pretend.calls == []


def test_it_runs_as_a_module(environment: dict[str, str], tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    program = [sys.executable, "-m", "flows.plan", _file(rehearsal_recipe(), tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, env=environ)
    assert done.returncode == 0 and "24002001" in done.stdout, done.stderr
