from __future__ import annotations

import pytest
import yaml

from training.contract.recipe_yaml import read_yaml


def test_words_that_old_yaml_takes_for_true_and_false_are_words() -> None:
    text = "cuda_graphs: off\ncountries: [NO, DE]\nfresh: yes\nkept: true\nlost: False\n"
    assert read_yaml(text, yaml) == {
        "cuda_graphs": "off",
        "countries": ["NO", "DE"],
        "fresh": "yes",
        "kept": True,
        "lost": False,
    }
    assert yaml.safe_load("off") is False, "the library's own loader is left as it was"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name: a\noptimizer: adamw\nallow: []\noptimizer: adamw_8bit\n", (4, "'optimizer' stands in line 2, too")),
        ("box:\n  tier: h200\n  tier: b200\n", (3, "'tier' stands in line 2, too")),
    ],
)
def test_a_key_that_stands_twice_is_an_error_that_names_both_lines(text: str, said: tuple[int, str]) -> None:
    with pytest.raises(yaml.MarkedYAMLError) as found:
        read_yaml(text, yaml)
    assert found.value.problem_mark and (found.value.problem_mark.line + 1) == said[0]
    assert said[1] in str(found.value.problem)


def test_the_same_key_in_two_places_and_merged_mappings_are_none() -> None:
    text = "a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: {<<: *a}\n"
    assert read_yaml(text, yaml) == {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": {"x": 1, "y": 2}}
