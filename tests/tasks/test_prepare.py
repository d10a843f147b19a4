"""What a person gets wrong is told in one sentence, before anything is rented."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tasks.data
from deployments import rehearsal
from tasks.data import check_data
from tasks.domain import Label, Lease
from tasks.errors import LiveryError, NoOffers, UserError
from tasks.lease import write_lease
from tasks.market.protocol import CreateRequest
from tasks.offers import plan_run, require_rentable
from tasks.prepare import prepare_run
from tasks.recipes import load_recipe, shipped
from tasks.run import Run
from tasks.settings import read_settings
from tests.journeys.conftest import ROWS, seed, store_of
from training.box.store import Store
from training.contract.recipe import Recipe

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
    "a region that nothing is known near": (
        environment(LIVERY_S3_REGION="me-central-1"),
        ["LIVERY_S3_REGION", "me-central-1", "box.countries"],
    ),
    "a driver too old for the CUDA wanted": (
        edited('min_driver: "580.65.06"', 'min_driver: "535.1"'),
        ["box.min_driver", "535.1", "580.65.06"],
    ),
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


def as_parquet(rows: list[dict[str, Any]], path: Path) -> Path:
    pyarrow_parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow_parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), path)
    return path


def test_a_parquet_file_and_a_prefix_of_them_in_the_bucket_become_json_lines_there(
    prepared: Callable[[Change], Run], tmp_path: Path, world: rehearsal.Rehearsal, caplog: pytest.LogCaptureFixture
) -> None:
    """The nulls that the table put beside each call's own argument are gone, and told."""
    time_call = {"function": {"name": "get_time", "arguments": {"zone": "UTC"}}}
    asked = ROWS["sft"][0]["messages"][0]
    other = {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [time_call]}], "tools": []}
    rows = [{**ROWS["sft"][0], "tools": []}, other]
    as_parquet(rows, tmp_path / "mine.parquet")
    for number, row in enumerate(ROWS["cpt"][:2]):
        path = as_parquet([row], tmp_path / f"part-{number}.parquet")
        store_of(world.env).put_bytes(f"datasets/parts/{path.name}", path.read_bytes())

    def change(folder: Path) -> tuple[str, dict[str, str]]:
        path = Path(edited("bucket:datasets/tiny/sft.jsonl", "mine.parquet")(folder)[0])
        text = path.read_text()
        assert "bucket:datasets/tiny/cpt.jsonl" in text
        path.write_text(text.replace("bucket:datasets/tiny/cpt.jsonl", "bucket:datasets/parts/"))
        return str(path), {}

    run = prepared(change)
    for name, wanted in (("sft", rows), ("cpt", ROWS["cpt"][:2])):
        source = run.recipe.phase(name).data
        assert source == f"bucket:datasets/by-digest/{run.digests[name]}.jsonl"
        lines = run.store.get_bytes(source.removeprefix("bucket:"))
        assert lines is not None and hashlib.sha256(lines).hexdigest() == run.digests[name]
        assert [json.loads(line) for line in lines.splitlines()] == wanted
    assert "sft data: mine.parquet: 2 nulls left out of calls' arguments" in caplog.text


def test_a_table_that_cannot_be_read_is_told_in_one_sentence(prepared: Callable[[Change], Run], tmp_path: Path) -> None:
    (tmp_path / "mine.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(
        UserError, match=r"^sft data: 'mine.parquet': mine.parquet: cannot be read as parquet: .*$"
    ) as caught:
        prepared(edited("bucket:datasets/tiny/sft.jsonl", "mine.parquet"))
    assert "\n" not in str(caught.value)


def tiny_recipe(folder: Path, rows: list[dict[str, Any]]) -> Recipe:
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = load_recipe("tiny-moe", {"phases": ["sft"]})
    phase = recipe.phase("sft").model_copy(update={"data": "mine.jsonl"})
    return recipe.model_copy(
        update={"phases": (phase,), "evaluation": recipe.evaluation.model_copy(update={"data": None})}
    )


def test_data_is_checked_by_the_models_own_tokenizer_from_the_bucket(
    world: rehearsal.Rehearsal, tmp_path: Path
) -> None:
    tiny = pytest.importorskip("training.tiny")
    rows = tiny.datasets()["sft"]
    tiny.make_tokenizer({"cpt": [], "sft": rows}).save_pretrained(tmp_path / "tokenizer")
    store = store_of(world.env)
    for path in (tmp_path / "tokenizer").iterdir():
        store.put_bytes(f"models/with-tokenizer/{path.name}", path.read_bytes())
    long = {"messages": [{"role": "user", "content": "Oslo? " * 900}, rows[0]["messages"][1]]}
    recipe = tiny_recipe(tmp_path, [*rows[:4], long])
    recipe = recipe.model_copy(
        update={"model": recipe.model.model_copy(update={"source": "bucket:models/with-tokenizer"})}
    )
    first, heading, line, warning = check_data(recipe, tmp_path, lambda: store).splitlines()
    assert first.startswith("sft: mine.jsonl: 5 rows, sha256 ")
    told = dict(zip(re.split("  +", heading), re.split("  +", line), strict=True))
    assert (told["phase"], told["rows"], told["too long"], told["packs"]) == ("sft", "5", "1", "2")
    assert warning.startswith("warning: sft: mine.jsonl: 1 row (line 5) is without `tools`")


def test_what_reads_the_data_is_given_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\nenv\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(interpreter))
    for name in ("LIVERY_MARKET_API_KEY", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "HARMLESS"):
        monkeypatch.setenv(name, f"value of {name}")
    _, output, _ = tasks.data._training_data("convert")
    assert "value of HARMLESS" in output and output.count("value of ") == 1


def test_data_is_checked_without_a_bucket_where_nothing_lies_there(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, ROWS["sft"][:2])
    hub = recipe.model.model_copy(update={"source": f"hub:owner/name@{'a' * 40}"})

    def no_bucket() -> Store:
        raise AssertionError("the bucket was opened")

    told = check_data(recipe.model_copy(update={"model": hub}), tmp_path, no_bucket)
    assert "2 rows" in told and "the same as an earlier one" in told and "no checks by the tokenizer: hub:" in told
    (tmp_path / "mine.jsonl").write_bytes(GOOD_ROW + b"{oops\n")
    with pytest.raises(UserError, match=r"^sft data: mine\.jsonl: line 2: not JSON"):
        check_data(recipe, tmp_path, no_bucket)


def test_a_budget_below_any_box_finds_no_offer_and_names_the_field(prepared: Callable[[Change], Run]) -> None:
    run = prepared(edited("max_usd: 1.0", "max_usd: 0.0001"))
    with pytest.raises(NoOffers, match=r"budget\.max_usd"):
        require_rentable(plan_run(run.recipe, run.market, run.store, now=run.clock()))


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


@pytest.mark.parametrize(("skew_s", "word"), [(-1200, "behind"), (1200, "ahead of")])
def test_a_machine_whose_clock_is_wrong_rents_nothing(
    prepared: Callable[[Change], Run], monkeypatch: pytest.MonkeyPatch, skew_s: float, word: str
) -> None:
    """Its leases would be old when they are written, and the reaper would take its boxes for dead ones."""
    monkeypatch.setattr(Store, "server_time", lambda self: time.time() - skew_s)
    with pytest.raises(UserError, match=f"1200 s {word} the bucket's.*set the clock"):
        prepared(environment())


def test_errors_of_ours_carry_the_exit_code_that_scripts_rely_on() -> None:
    assert (UserError.exit_code, NoOffers.exit_code, LiveryError.exit_code) == (2, 3, 1)
