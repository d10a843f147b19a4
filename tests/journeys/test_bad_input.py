"""What a person gets wrong is told in one sentence, before anything is rented, with an exit code that is not zero."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments import rehearsal
from tasks.recipes import shipped
from tests.journeys.conftest import ROOT, ROWS, seed, store_of

pytestmark = pytest.mark.journey
Change = Callable[[Path], tuple[str, dict[str, str]]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rehearsal.Rehearsal]:
    with rehearsal.start(tmp_path_factory.mktemp("world"), boot_s=0.3, pace=0.02) as made:
        seed(store_of(made.env))
        yield made


def edited(old: str, new: str) -> Change:
    def change(folder: Path) -> tuple[str, dict[str, str]]:
        text = shipped()["counting"].read_text()
        assert old in text
        (folder / "mine.yaml").write_text(text.replace(old, new, 1))
        return str(folder / "mine.yaml"), {}

    return change


def with_data(rows: bytes | None) -> Change:
    def change(folder: Path) -> tuple[str, dict[str, str]]:
        if rows is not None:
            (folder / "sft.jsonl").write_bytes(rows)
        return edited("bucket:datasets/tiny/sft.jsonl", "sft.jsonl")(folder)

    return change


def environment(**variables: str) -> Change:
    return lambda folder: ("counting", variables)


CASES: dict[str, tuple[Change, list[str]]] = {
    "an unknown key": (
        edited("max_usd: 1.0", "max_usd: 1.0\n  max_eur: 1"),
        ["mine.yaml: budget", "max_eur", "did you mean 'max_usd'"],
    ),
    "a wrong type": (edited("steps: 20", "steps: many"), ["phases.0.cpt.steps", "integer", "'many'"]),
    "a recipe that is not there": (lambda folder: ("countin", {}), ["countin", "did you mean 'counting'"]),
    "a missing object": (
        edited("datasets/tiny/sft.jsonl", "datasets/none.jsonl"),
        ["sft data", "bucket:datasets/none.jsonl", "no such object"],
    ),
    "a missing file": (with_data(None), ["sft data", "sft.jsonl", "no such file"]),
    "a malformed row": (
        with_data(json.dumps(ROWS["sft"][0]).encode() + b"\n{oops\n"),
        ["sft data", "sft.jsonl: line 2", "not JSON"],
    ),
    "an unreachable bucket": (
        environment(LIVERY_S3_ENDPOINT_URL="http://127.0.0.1:9"),
        ["bucket", "127.0.0.1:9", "LIVERY_S3_"],
    ),
    "a wrong bucket key": (environment(LIVERY_S3_SECRET_ACCESS_KEY="wrong-secret-123"), ["bucket", "LIVERY_S3_"]),
    "a bucket that is not there": (environment(LIVERY_BUCKET="nobodys-bucket"), ["bucket", "nobodys-bucket"]),
    "a wrong market key": (environment(LIVERY_MARKET_API_KEY="wrong-key-12345"), ["LIVERY_MARKET_API_KEY"]),
    "a missing setting": (environment(LIVERY_BUCKET=""), ["LIVERY_BUCKET"]),
    "more hours than a box may live": (
        edited("max_hours: 1", "max_hours: 48"),
        ["budget.max_hours", "48", "LIVERY_MAX_AGE_HOURS"],
    ),
    "a budget below any box": (edited("max_usd: 1.0", "max_usd: 0.0001"), ["budget.max_usd"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_before_anything_is_rented(
    name: str, world: rehearsal.Rehearsal, prefect_api: str, tmp_path: Path
) -> None:
    change, words = CASES[name]
    recipe, variables = change(tmp_path)
    environ = {
        **os.environ,
        **world.env,
        "PREFECT_API_URL": prefect_api,
        "PREFECT_HOME": str(tmp_path),
        "LIVERY_STATE_DIR": str(tmp_path / "state"),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-m", "flows", "finetune", recipe],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in {2, 3, 4}, done.stdout + done.stderr
    error = next(line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert not [word for word in words if word not in error], error
    assert not [secret for secret in ("wrong-secret-123", "wrong-key-12345") if secret in done.stdout + done.stderr]
    assert world.control.state()["instances"] == []
