from __future__ import annotations

import copy
from typing import Any

import pytest

from training.contract.recipe import RecipeError, parse_recipe

GOOD: dict[str, Any] = {
    "name": "tools-35b",
    "model": {"source": "bucket:models/tiny", "family": "qwen3_5_moe", "size_gb": 1},
    "phases": [{"kind": "sft", "data": "bucket:datasets/sft.jsonl", "steps": 10, "learning_rate": 1e-4}],
    "box": {"tier": "rtxpro6000"},
    "budget": {"max_usd": 20},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    data = copy.deepcopy(GOOD)
    inner: Any = data
    *parts, last = path.split(".")
    for part in parts:
        inner = inner[int(part)] if part.isdigit() else inner.setdefault(part, {})
    inner[int(last) if last.isdigit() else last] = value
    return data


def test_a_good_recipe_is_read_with_its_defaults() -> None:
    recipe = parse_recipe(GOOD)
    assert recipe.box.max_dph_usd == 1.30
    assert recipe.phase("sft").router_aux_loss == 0.0


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("phasess", [], ["phasess", "did you mean 'phases'"]),
        ("box.tire", "h200", ["box", "tire", "did you mean 'tier'"]),
        ("phases.0.learning_rat", 1, ["phases.0.sft", "did you mean 'learning_rate'"]),
        ("box.tier", "h800", ["box.tier", "rtxpro6000", "h100", "seen: 'h800'"]),
        ("budget.max_usd", "lots", ["budget.max_usd", "number", "seen: 'lots'"]),
        ("budget.max_usd", 0, ["budget.max_usd", "greater than 0"]),
        ("model.source", "hub:Qwen/Qwen3.6-35B-A3B@main", ["model.source", "40-digit commit", "@main"]),
        ("phases.0.steps", 2.5, ["phases.0.sft.steps", "integer"]),
        ("box.countries", ["Germany"], ["box.countries", "two-letter"]),
        ("name", "Tools 35B", ["name", "lower case", "Tools 35B"]),
        ("adapters.groups", ["experts"], ["adapters.groups", "routed_experts"]),
        ("trainer", "counting", ["counting", "box.device"]),
        ("box.device", "cpu", ["box.device", "cuda"]),
    ],
)
def test_a_wrong_field_is_refused_in_one_line_that_names_it(path: str, value: Any, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(changed(path, value))
    message = str(caught.value)
    assert "\n" not in message
    assert not [word for word in words if word not in message], message


def test_each_of_several_problems_has_its_own_line() -> None:
    data = changed("box.tire", "h200")
    data["budget"] = {"max_usd": -1}
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data, "mine.yaml")
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == ["mine.yaml", "mine.yaml"]


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_what_is_not_a_mapping_is_refused(data: Any) -> None:
    with pytest.raises(RecipeError, match="want a mapping"):
        parse_recipe(data)


def test_kto_needs_two_rows_in_a_batch() -> None:
    data = changed(
        "phases.0", {"kind": "kto", "data": "bucket:k.jsonl", "steps": 1, "learning_rate": 1e-4, "batch_size": 1}
    )
    with pytest.raises(RecipeError, match="at least 2 rows"):
        parse_recipe(data)


def test_grpo_batches_hold_whole_groups() -> None:
    data = changed(
        "phases.0",
        {
            "kind": "grpo",
            "data": "bucket:g.jsonl",
            "steps": 1,
            "learning_rate": 1e-4,
            "batch_size": 3,
            "accumulation": 1,
        },
    )
    with pytest.raises(RecipeError, match="multiple of generations"):
        parse_recipe(data)


def test_a_run_is_any_list_of_phases_each_under_a_name_of_its_own() -> None:
    data = copy.deepcopy(GOOD)
    data["phases"] = [data["phases"][0], data["phases"][0] | {"name": "again"}]
    assert parse_recipe(data).phase_names == (data["phases"][0]["kind"], "again")
    data["phases"][1].pop("name")
    with pytest.raises(RecipeError, match=r"2 are called .* give each a name of its own"):
        parse_recipe(data)
    for name in ("Evil/../name", "evaluation", "with_underscore"):
        data["phases"][1]["name"] = name
        with pytest.raises(RecipeError, match="sft-code"):
            parse_recipe(data)


def test_what_decides_the_weights_changes_the_digest_and_what_does_not_does_not() -> None:
    digest = parse_recipe(GOOD).phase_digest("sft")
    assert parse_recipe(changed("phases.0.learning_rate", 2e-4)).phase_digest("sft") != digest
    assert parse_recipe(changed("adapters.rank", 16)).phase_digest("sft") != digest
    assert parse_recipe(changed("budget.max_usd", 99)).phase_digest("sft") == digest
    assert parse_recipe(changed("box.tier", "h200")).phase_digest("sft") == digest


def test_an_earlier_phase_decides_a_later_one_and_not_the_other_way_round() -> None:
    both = changed("phases", [{"kind": "cpt", "data": "bucket:c", "steps": 5, "learning_rate": 1e-4}, *GOOD["phases"]])
    more = copy.deepcopy(both)
    more["phases"][0]["steps"] = 6
    assert parse_recipe(both).phase_digest("sft") != parse_recipe(more).phase_digest("sft")
    longer = copy.deepcopy(both)
    longer["phases"][1]["steps"] = 99
    assert parse_recipe(both).phase_digest("cpt") == parse_recipe(longer).phase_digest("cpt")


def quantised(**changes: Any) -> dict[str, Any]:
    """`changes` go into the section that has the field: model, box or the one phase."""
    data = copy.deepcopy(GOOD)
    data["model"]["quantisation"] = "nf4"
    for name, value in changes.items():
        section = data["box"] if name == "gpus" else data["phases"][0] if name in data["phases"][0] else data["model"]
        section[name] = value
    return data


def test_a_base_is_not_quantised_and_one_card_does_unless_the_recipe_says_otherwise() -> None:
    plain = parse_recipe(GOOD)
    assert (plain.model.quantisation, plain.model.nf4_cache, plain.box.gpus) == ("none", False, 1)
    assert (plain.model.linears, plain.model.execution) == ("nf4", "auto")


@pytest.mark.parametrize(
    ("name", "value"), [("linears", "bf16"), ("execution", "host"), ("execution", "all_gather"), ("nf4_cache", True)]
)
def test_what_is_of_a_4_bit_base_alone_is_refused_without_one(name: str, value: Any) -> None:
    with pytest.raises(
        RecipeError, match=rf"recipe: model: {name}: {value} .* want quantisation: nf4, or leave {name} out"
    ):
        parse_recipe(changed(f"model.{name}", value))
    assert getattr(parse_recipe(quantised(**{name: value})).model, name) == value


def test_several_cards_train_a_4_bit_base_only() -> None:
    with pytest.raises(RecipeError, match=r"box\.gpus: 4 cards .* want 1, or model\.quantisation: nf4"):
        parse_recipe(changed("box.gpus", 4))
    assert parse_recipe(quantised(gpus=4)).box.gpus == 4


def test_the_micro_batches_of_a_step_are_dealt_out_evenly_to_the_cards() -> None:
    data = quantised(gpus=4)
    data["phases"][0]["accumulation"] = 6
    with pytest.raises(RecipeError, match=r"phases\.sft\.accumulation: 6 .* over 4 cards .* want a multiple of 4"):
        parse_recipe(data)


def test_a_phase_that_generates_is_refused_on_a_4_bit_base() -> None:
    data = quantised()
    data["phases"] = [data["phases"][0] | {"kind": "grpo", "generations": 8}]
    with pytest.raises(RecipeError, match=r"phases\.grpo: grpo cannot run on a 4-bit base.*cpt, sft, dpo, kto"):
        parse_recipe(data)


def test_rounding_the_base_changes_the_digest_and_where_it_lies_does_not() -> None:
    plain, packed = parse_recipe(GOOD).phase_digest("sft"), parse_recipe(quantised()).phase_digest("sft")
    assert parse_recipe(quantised(linears="bf16")).phase_digest("sft") not in (plain, packed) and plain != packed
    for other in ({"execution": "host"}, {"nf4_cache": True}, {"gpus": 4}):
        assert parse_recipe(quantised(**other)).phase_digest("sft") == packed


def test_a_run_begun_before_4_bit_bases_keeps_its_digest() -> None:
    """Frozen: a checkpoint whose digest differs is never gone on from."""
    assert parse_recipe(GOOD).phase_digest("sft") == "c6486edefecf8d4cf5fdbc966be850f30c361395326d46d429894ca759e70fde"
