"""What a person gets wrong is told in one sentence, before anything is rented."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployments import rehearsal
from tasks.domain import Label, Lease
from tasks.errors import LiveryError, NoOffers, UserError
from tasks.lease import write_lease
from tasks.market.protocol import CreateRequest
from tasks.offers import best_offer, plan_run
from tasks.prepare import prepare_run
from tasks.recipes import shipped
from tasks.run import Run
from tasks.settings import read_settings
from tests.journeys.conftest import ROWS, seed, store_of

Change = Callable[[Path], tuple[str, dict[str, str]]]
FLOW_RUN = "00000000-0000-4000-8000-000000000001"


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


GOOD_ROW = json.dumps(ROWS["sft"][0]).encode() + b"\n"
CASES: dict[str, tuple[Change, list[str]]] = {
    "an unknown key": (
        edited("max_usd: 1.0", "max_usd: 1.0\n  max_uds: 1"),
        ["mine.yaml: budget", "max_uds", "did you mean 'max_usd'"],
    ),
    "a wrong type": (edited("steps: 20", "steps: many"), ["phases.0.cpt.steps", "integer", "'many'"]),
    "a recipe that is not there": (lambda folder: ("countin", {}), ["countin", "did you mean 'counting'"]),
    "a missing object": (
        edited("datasets/tiny/sft.jsonl", "datasets/none.jsonl"),
        ["sft data", "bucket:datasets/none.jsonl", "no such object"],
    ),
    "a missing file": (with_data(None), ["sft data", "sft.jsonl", "no such file"]),
    "a malformed row": (with_data(GOOD_ROW + b"{oops\n"), ["sft data", "sft.jsonl: line 2", "not JSON"]),
    "an unreachable bucket": (
        environment(LIVERY_S3_ENDPOINT_URL="http://127.0.0.1:9"),
        ["bucket", "127.0.0.1:9", "LIVERY_S3_"],
    ),
    "a wrong bucket key": (environment(LIVERY_S3_SECRET_ACCESS_KEY="wrong-secret-123"), ["bucket", "LIVERY_S3_"]),
    "a bucket that is not there": (environment(LIVERY_BUCKET="nobodys-bucket"), ["bucket", "nobodys-bucket"]),
    "a wrong market key": (environment(LIVERY_MARKET_API_KEY="wrong-key-12345"), ["LIVERY_MARKET_API_KEY", "refuses"]),
    "a missing setting": (environment(LIVERY_BUCKET=""), ["LIVERY_BUCKET"]),
    "more hours than a box may live": (
        edited("max_hours: 1", "max_hours: 48"),
        ["budget.max_hours", "48", "LIVERY_MAX_AGE_HOURS"],
    ),
}


@pytest.fixture
def prepared(world: rehearsal.Rehearsal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Change], Run]:
    def prepare(change: Change) -> Run:
        recipe, variables = change(tmp_path)
        for name, value in {**world.env, "LIVERY_STATE_DIR": str(tmp_path / "state"), **variables}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        return prepare_run(recipe, {}, FLOW_RUN, read_settings())

    return prepare


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_in_one_sentence(name: str, prepared: Callable[[Change], Run]) -> None:
    change, words = CASES[name]
    with pytest.raises(UserError) as caught:
        prepared(change)
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
    assert "\n" not in message
    assert not [secret for secret in ("wrong-secret-123", "wrong-key-12345") if secret in message]


def test_a_good_recipe_with_local_data_is_prepared_and_its_data_is_in_the_bucket(
    prepared: Callable[[Change], Run],
) -> None:
    run = prepared(with_data(GOOD_ROW * 4))
    source = run.recipe.phase("sft").data
    assert source == f"bucket:datasets/by-digest/{run.digests['sft']}.jsonl"
    assert run.store.get_bytes(source.removeprefix("bucket:")) == GOOD_ROW * 4
    assert run.unfinished() and run.phases_left() == run.recipe.phase_names


def test_a_budget_below_any_box_finds_no_offer_and_names_the_field(prepared: Callable[[Change], Run]) -> None:
    run = prepared(edited("max_usd: 1.0", "max_usd: 0.0001"))
    with pytest.raises(NoOffers, match=r"budget\.max_usd"):
        best_offer(plan_run(run.recipe, run.market, run.store, now=run.clock()))


def test_a_run_that_somebody_trains_is_not_trained_twice_but_follows_a_dead_one_at_once(
    prepared: Callable[[Change], Run], world: rehearsal.Rehearsal
) -> None:
    other, now = "00000000-0000-4000-8000-000000000002", time.time()
    first = prepared(environment())
    write_lease(first.store, Lease(flow_run_id=other, run="counting", renewed_at=now, expires_at=now + 600))
    assert prepared(environment()).unfinished(), "a live lease without a box is a dead run's"
    offer = min(first.market.search(first.recipe.box), key=lambda each: each.dph_total_usd)
    label = Label(flow_run_id=other, attempt=1, hard_end=int(now) + 3600).text
    box = first.market.create(CreateRequest(offer=offer, image="i", disk_gb=10, label=label, onstart=""))
    try:
        with pytest.raises(UserError, match=f"is being trained by flow run {other}"):
            prepared(environment())
    finally:
        first.market.destroy(box)


def test_a_fresh_run_has_a_name_of_its_own(prepared: Callable[[Change], Run], tmp_path: Path) -> None:
    run = prepared(environment())
    again = prepare_run("counting", {}, FLOW_RUN, run.settings, fresh=True)
    assert again.recipe.name == f"counting-{FLOW_RUN[:8]}"


def test_errors_of_ours_carry_the_exit_code_that_scripts_rely_on() -> None:
    assert (UserError.exit_code, NoOffers.exit_code, LiveryError.exit_code) == (2, 3, 1)
