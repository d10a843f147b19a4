from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.__main__ import main
from flows.plan import plan
from tasks import steps
from tasks.errors import NoOffers, UserError
from tasks.run import Run
from tests.tasks.pretend import FLOW_RUN, Pretend, recipe, rehearsal_recipe
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
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["offers", "filters"])))
    newest = {artifact.key: artifact for artifact in sorted(found, key=lambda artifact: str(artifact.created))}
    rows: list[dict[str, Any]] = json.loads(str(newest["offers"].data))
    assert rows[0]["offer"] == 24002001 and "4 offers found, 4 pass" in str(newest["offers"].description)
    assert "4 offers found, 4 pass" in str(newest["filters"].description)
    assert {method for method, _ in pretend.calls} == {"POST", "GET"}, "spends nothing"
    assert store.list("") == [], "writes nothing"


def test_no_offer_fails_the_flow(environment: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(NoOffers):
        plan(_file(rehearsal_recipe(), tmp_path), max_dph_usd=0.01)


@pytest.mark.filterwarnings("ignore:Artifact creation outside")
def test_a_run_stops_at_its_plan_when_the_account_cannot_pay_for_it(
    environment: dict[str, str], pretend: Pretend, store: Store, tmp_path: Path
) -> None:
    pretend.market.credit_usd = 0.0001
    wanted, market = rehearsal_recipe(), pretend.client(tmp_path)
    run = Run(wanted, {}, FLOW_RUN, market, store, pretend.settings(tmp_path), clock=pretend.clock)
    with pytest.raises(UserError, match=r"credit: \$0\.0001 left"):
        steps.plan.fn(run)
    assert pretend.count("PUT", "/api/v0/asks/") == 0


def test_the_terminal_gets_a_table_or_json(
    environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _file(recipe(step_seconds=30.0), tmp_path)
    assert main(["plan", path]) == 0
    assert "24001001" in capsys.readouterr().out
    assert main(["plan", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "tools-35b"


@dataclass(frozen=True)
class Mistake:
    code: int
    words: list[str]
    changes: dict[str, Any] = field(default_factory=dict)
    environ: dict[str, str | None] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    credit_usd: float = 100.0


MISTAKES = {
    "a revoked key": Mistake(
        2, ["LIVERY_MARKET_API_KEY", "refuses this key"], environ={"LIVERY_MARKET_API_KEY": "revoked-key-123"}
    ),
    "no credit": Mistake(2, ["credit: $0.05 left", "needs $", "add at least"], credit_usd=0.05),
    "an unknown tier": Mistake(2, ["box.tier", "h800", "rtxpro6000"], arguments=("--tier", "h800")),
    "a 4-bit base with too little host memory": Mistake(
        2,
        [
            "cannot hold the 4-bit base",
            "22.5 GB of host memory, the box has 16.0",
            "would fit: box.min_host_memory_gb 23",
        ],
        changes={
            "model": {"quantisation": "nf4", "execution": "host"},
            "box": {"tier": "rtx4090", "min_host_memory_gb": 16},
            "adapters": {"rank": 8, "alpha": 16},
        },
    ),
    "a disk without room for the 4-bit cache": Mistake(
        2,
        ["box.disk_gb: 75", "its 4-bit cache 19", "leave model.nf4_cache out"],
        changes={
            "model": {"quantisation": "nf4", "nf4_cache": True},
            "box": {"disk_gb": 75},
            "adapters": {"rank": 8, "alpha": 16},
        },
    ),
    "a bucket with no region": Mistake(
        2, ["LIVERY_S3_REGION", "eu-central-1"], environ={"LIVERY_S3_REGION": None, "LIVERY_S3_ENDPOINT_URL": None}
    ),
    "a region that nothing is known near": Mistake(
        2, ["LIVERY_S3_REGION", "me-central-1", "box.countries"], environ={"LIVERY_S3_REGION": "me-central-1"}
    ),
    "a cap below everything listed": Mistake(
        3, ["none of 13", "loosen price (raise box.max_dph_usd)", "gives "], arguments=("--max-dph", "0.1")
    ),
    "a driver too old for the CUDA wanted": Mistake(
        2, ["box.min_driver", "535.1", "580.65.06"], changes={"box": {"min_driver": "535.1"}}
    ),
    "a disk smaller than the model": Mistake(2, ["box.disk_gb: 40", "70.2 GB"], changes={"box": {"disk_gb": 40}}),
    "an uplink that nobody in the wanted countries has": Mistake(
        3,
        ["no single filter gives an offer; 2 stand", "want 5000 Mbps", "want IS"],
        changes={"box": {"min_inet_up_mbps": 5000, "countries": ["IS"]}},
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_one_clear_error_before_anything_is_rented(
    name: str,
    environment: dict[str, str],
    pretend: Pretend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mistake = MISTAKES[name]
    for variable, value in mistake.environ.items():
        monkeypatch.delenv(variable) if value is None else monkeypatch.setenv(variable, value)
    pretend.market.credit_usd = mistake.credit_usd
    assert (
        main(["plan", _file(recipe(step_seconds=30.0, **mistake.changes), tmp_path), *mistake.arguments])
        == mistake.code
    )
    said = capsys.readouterr().err
    assert not [word for word in mistake.words if word not in said], said
    assert said.startswith("error: ") and said.count("\nerror: ") == 0 and "revoked-key-123" not in said
    assert pretend.count("PUT", "/api/v0/asks/") == 0


def test_a_bucket_that_does_not_answer_is_said_before_the_market_is_asked(
    environment: dict[str, str],
    pretend: Pretend,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LIVERY_S3_ENDPOINT_URL", "http://127.0.0.1:9")
    assert main(["plan", _file(rehearsal_recipe(), tmp_path)]) == 2
    assert "bucket" in capsys.readouterr().err and pretend.calls == []


def test_a_bucket_in_europe_takes_european_hosts_and_says_so(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIVERY_S3_REGION", "eu-central-1")
    path = _file(recipe(step_seconds=30.0), tmp_path)
    assert main(["plan", path, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert {ranked["offer"]["country"] for ranked in planned["offers"]} <= {"DE", "FR", "FI"}
    assert planned["notes"][-1].endswith("for a bucket in eu-central-1")


def test_the_plan_of_a_4_bit_base_shows_strategy_memory_hours_and_dollars(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "qwen3-235b-a22b-qlora"]) == 0
    said = capsys.readouterr().out
    assert "4-bit base: all_gather, experts spread over the cards, the next packed layer gathered ahead" in said
    assert "GB on each of 4 cards in phase sft (base 31.9" in said and "12 GB of host memory" in said
    assert "predicted (rates scaled from an H200's, not measured)" in said and "on the best offer" in said


def test_a_plan_on_the_terminal_never_loads_prefect(environment: dict[str, str], tmp_path: Path) -> None:
    """Prefect takes seconds to import, and a plan has no need of it."""
    program = "import sys; from flows.__main__ import main; code = main(sys.argv[1:]); print(code, 'prefect' in sys.modules, 'torch' in sys.modules)"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program, "plan", _file(rehearsal_recipe(), tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
    assert done.stdout.splitlines()[-1] == "0 False False", done.stdout + done.stderr
    assert "24002001" in done.stdout
